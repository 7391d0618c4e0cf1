"""A check in words for a terminal of 80 columns."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from vitscale.errors import printable
from vitscale.preflight.quantities import UNAVAILABLE, rate, seconds, size, three_digits
from vitscale.preflight.speeds import rates
from vitscale.preflight.verdict import SEVERITIES, Verdict, host_of
from vitscale.store.check_records import GROUPS, OPERATIONS, CheckedRank, CheckRecord

_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_MOST_RANKS = 64
_UNKNOWN = "-"
_AT_ONCE_SECONDS = 0.02


def check_text(record: CheckRecord, verdicts: Sequence[Verdict], path: Path, width: int = 80) -> list[RenderableType]:
    """What was measured, then the verdicts, the most severe first."""
    parts: list[RenderableType] = [_heading(record), ""]
    if record.ranks:
        parts += [_ranks(record), ""]
    if any(rank.collectives for rank in record.ranks):
        parts += [_collectives(record), ""]
    parts += [Text(_wrapped(line, width, indent="")) for line in (*_loader(record), *_disk(record))]
    for verdict in verdicts:
        parts += [Text(""), _verdict(verdict, width)]
    return [*parts, Text(""), Text(_counts(verdicts)), Text(f"Stored: {path}")]


def _heading(record: CheckRecord) -> Text:
    world = record.request.world
    backend = next((r.facts.environment.backend for r in record.ranks if r.facts), None) or UNAVAILABLE
    hosts = f"{world.nodes} host{'s' if world.nodes > 1 else ''}, {world.size} rank{'s' if world.size > 1 else ''}"
    return Text(printable(f"{hosts}; {backend} on {record.request.device}; started by {record.launcher}"))


def _ranks(record: CheckRecord) -> Table:
    """One line per rank. Memory is the device's; pace is that of the fixed compute over the fastest rank's."""
    found = rates(record.ranks)
    fastest = max(found.values(), default=0.0)
    table = Table(box=None, pad_edge=False)
    for name in ("rank", "cores", "memory", "matmul", "pace"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("host", overflow="fold")
    table.add_column("device", overflow="ellipsis", no_wrap=True)
    for rank in record.ranks[:_MOST_RANKS]:
        facts = rank.facts
        memory = facts.environment.device.memory_bytes if facts else None
        table.add_row(
            str(rank.rank),
            _cores(rank, record),
            size(memory) if memory is not None else _UNKNOWN,
            rate(rank.matmul.flops_per_second, "FLOP/s") if rank.matmul else _UNKNOWN,
            f"{found[rank.rank] / fastest:.2f}" if rank.rank in found else _UNKNOWN,
            escape(printable(host_of(rank) or UNAVAILABLE)),
            escape(printable(facts.environment.device.name if facts else UNAVAILABLE)),
        )
    if len(record.ranks) > _MOST_RANKS:
        table.add_row("...", "", "", "", "", f"{len(record.ranks) - _MOST_RANKS} more", "")
    return table


def _cores(rank: CheckedRank, record: CheckRecord) -> str:
    """What the rank's host has for each of its ranks: cores, or its quota where that is less."""
    if rank.facts is None:
        return _UNKNOWN
    quota = rank.facts.environment.cpu_quota_cores
    sharing = sum(host_of(other) == host_of(rank) for other in record.ranks)
    room = min(rank.facts.host_cores, quota if quota is not None else rank.facts.host_cores) / sharing
    return f"{room:.3g}"


def _collectives(record: CheckRecord) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("collectives")
    table.add_column("operation")
    for name in ("ranks", "latency", "bandwidth", "largest", "took"):
        table.add_column(name, justify="right", no_wrap=True)
    for group in GROUPS:
        for operation in OPERATIONS:
            fit = next((f for f in record.fits if (f.group, f.operation) == (group, operation)), None)
            if fit is None:
                if any(
                    line.group == group and line.operation == operation for r in record.ranks for line in r.collectives
                ):
                    table.add_row(group, operation.replace("_", "-"), *([_UNKNOWN] * 5))
                continue
            table.add_row(
                group,
                operation.replace("_", "-"),
                str(fit.ranks),
                seconds(fit.latency_seconds),
                rate(fit.bandwidth_bytes_per_second, "B/s"),
                size(fit.largest_size_bytes),
                seconds(fit.largest_seconds),
            )
    return table


def _loader(record: CheckRecord) -> list[str]:
    found = [rank.loader for rank in record.ranks if rank.loader is not None]
    if record.request.trial is None:
        return []
    if not found:
        return [f"loader: {UNAVAILABLE}"]
    slowest = min(line.images_per_second for line in found)
    need = record.loader_need
    needed = f"{three_digits(need.images_per_second)} images/s ({need.source})" if need else UNAVAILABLE
    return [f"loader: {three_digits(slowest)} images/s per rank, {found[0].workers} workers; needed: {needed}"]


def _disk(record: CheckRecord) -> list[str]:
    found = [rank.disk for rank in record.ranks if rank.disk is not None]
    if not found:
        return [f"disk: {UNAVAILABLE}"]
    safe = max(statistics.median(disk.record_seconds) for disk in found)
    seen = [r.disk.seen_seconds for r in record.ranks if r.rank != 0 and r.disk and r.disk.seen_seconds is not None]
    when = f"within {seconds(max(seen))}" if max(seen, default=0.0) > _AT_ONCE_SECONDS else "at once"
    shared = f"; other ranks see a new file {when}" if seen else ""
    return [
        f"disk: {size(min(disk.free_bytes for disk in found))} free; a record is safe after {seconds(safe)}{shared}"
    ]


def _verdict(verdict: Verdict, width: int) -> Text:
    text = Text(verdict.severity, _STYLES[verdict.severity])
    text.append(f"  {verdict.kind}\n", "bold")
    text.append(_wrapped(f"{verdict.message}.", width) + "\n", "")
    text.append(_wrapped(f"Next: {verdict.advice}.", width), "")
    return text


def _wrapped(line: str, width: int, indent: str = "  ") -> str:
    wrapper = textwrap.TextWrapper(max(width, 40), initial_indent=indent, subsequent_indent="  ")
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.fill(printable(line).replace("\n", "\\n"))


def _counts(verdicts: Sequence[Verdict]) -> str:
    counts = [sum(verdict.severity == severity for verdict in verdicts) for severity in SEVERITIES]
    named = [f"{count} {name}{'s' * (count != 1)}" for count, name in zip(counts, SEVERITIES, strict=True)]
    return ", ".join(named) if any(counts) else "Nothing to complain of."
