"""What a check says: all findings, the most severe first, and what was measured, as a document and as JSON fields.

The findings on pace are shown again before a study runs on the same hosts.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from vitscale.preflight import host_verdicts, network_verdicts, pace_verdicts, reach_verdicts
from vitscale.preflight.pace_verdicts import checked_rank_speeds, rates, relative_speeds
from vitscale.preflight.verdict import host_of
from vitscale.present import document as doc
from vitscale.present.data import finding_fields
from vitscale.present.units import UNAVAILABLE, UNKNOWN, counted, number, rate, seconds, size
from vitscale.runner import Plan
from vitscale.schedulers import Submitter
from vitscale.store.checks import GROUPS, OPERATIONS, CheckedRank, CheckRecord, latest

RULES: tuple[Callable[[CheckRecord], Iterable[doc.Finding]], ...] = (
    reach_verdicts.unreachable_hosts,
    reach_verdicts.missing_ranks,
    reach_verdicts.rank_0_not_reached,
    reach_verdicts.failed_stages,
    network_verdicts.interface_choices,
    host_verdicts.unshared_folder,
    host_verdicts.full_disk,
    pace_verdicts.slow_ranks,
    pace_verdicts.gpu_throttling,
    pace_verdicts.cpu_throttling,
    pace_verdicts.clocks_differ,
    pace_verdicts.mixed_devices,
    host_verdicts.too_few_cores,
    host_verdicts.versions_differ,
    host_verdicts.drivers_differ,
    network_verdicts.slow_link,
    host_verdicts.slow_groups,
    host_verdicts.groups_across_hosts,
    host_verdicts.no_groups,
    host_verdicts.slow_loader,
    host_verdicts.slow_disk,
    pace_verdicts.power_limits,
    pace_verdicts.unsteady,
    reach_verdicts.broken_lines,
)
"""All rules; findings of the same severity keep this order."""


def judged(record: CheckRecord) -> tuple[doc.Finding, ...]:
    """All findings of a check, the most severe first."""
    return doc.most_severe_first([finding for rule in RULES for finding in rule(record)])


def pace_warnings(plan: Plan, results: Path) -> list[str]:
    """A line for each finding that ranks compute at different paces; empty without a check, or where all are alike.

    The check is the newest one of exactly these hosts and this kind of device, in the folder or else among the user's
    own. Of the hosts that a batch system will choose nothing is known.

    Args:
        plan: the study; the hosts of its largest world count.
        results: the folder given with -o, or its default.
    """
    if isinstance(plan.scheduler, Submitter):
        return []
    largest = max((trial.world for trial in plan.record.trials.values()), key=lambda world: world.size)
    hosts = tuple(host.name for host in plan.scheduler.hosts(largest)) or (socket.gethostname(),)
    devices = {trial.train.device for trial in plan.record.trials.values()}
    record = latest(results, hosts, lambda checked: checked.request.device in devices)
    if record is None:
        return []
    when = time.strftime("%Y-%m-%d", time.gmtime(record.started_unix_seconds))
    findings = [finding for rule in (pace_verdicts.slow_ranks, pace_verdicts.mixed_devices) for finding in rule(record)]
    return [f"{finding.message} (vitscale check, {when}). {finding.advice}" for finding in findings]


_MOST_RANKS = 64
_AT_ONCE_SECONDS = 0.02


def check_fields(record: CheckRecord, findings: Sequence[doc.Finding], path: Path) -> dict[str, Any]:
    """The check and its findings as JSON fields, with the raw values."""
    speeds = checked_rank_speeds(record)
    return {
        "stored": str(path),
        "verdicts": [finding_fields(finding) for finding in findings],
        "rank_speeds": list(speeds) if speeds is not None else None,
        "pace_against_others": {str(rank): pace for rank, pace in relative_speeds(rates(record.ranks)).items()},
        "check": record.model_dump(mode="json"),
    }


def check_document(record: CheckRecord, findings: Sequence[doc.Finding], path: Path) -> doc.Document:
    """A document with the findings, the most severe first, then what was measured."""
    tables = [_ranks(record)] if record.ranks else []
    if any(rank.collectives for rank in record.ranks):
        tables.append(_collectives(record))
    blocks: tuple[doc.Block, ...] = (*findings, *tables, doc.Bullets((*_loader(record), *_disk(record))))
    heading = doc.Paragraph(f"{_heading(record)}: {doc.counts_of(findings)}", "strong")
    return doc.Document("", (heading, *blocks), (f"Stored: {path}",))


def _heading(record: CheckRecord) -> str:
    world = record.request.world
    backend = next((r.facts.environment.backend for r in record.ranks if r.facts), None) or UNAVAILABLE
    where = f"{counted(world.nodes, 'host')}, {counted(world.size, 'rank')}"
    return f"{where}; {backend} on {record.request.device}; started by {record.launcher}"


def _ranks(record: CheckRecord) -> doc.Table:
    """A table with a row per rank. Memory is the device's; pace is the fixed compute's over the fastest rank's."""
    pace = rates(record.ranks)
    fastest = max(pace.values(), default=0.0)
    columns = [*map(doc.Column, ("rank", "cores", "memory", "matmul", "pace")), doc.Column("host", words=True)]
    rows = []
    for rank in record.ranks[:_MOST_RANKS]:
        environment = rank.facts.environment if rank.facts else None
        texts = (
            str(rank.rank),
            _cores(rank, record),
            size(environment.device.memory_bytes if environment else None),
            rate(rank.matmul.flops_per_second if rank.matmul else None, "FLOP/s"),
            f"{pace[rank.rank] / fastest:.2f}" if rank.rank in pace else UNKNOWN,
            host_of(rank) or UNAVAILABLE,
            environment.device.name if environment else UNAVAILABLE,
        )
        rows.append(tuple(map(doc.Cell, texts)))
    more = len(record.ranks) - _MOST_RANKS
    notes = (f"{more} more ranks: --json has them.",) if more > 0 else ()
    return doc.Table((*columns, doc.Column("device", words=True)), (doc.Group("", tuple(rows)),), notes)


def _cores(rank: CheckedRank, record: CheckRecord) -> str:
    """Cores of the rank's host, or its quota where that is less, divided by the ranks there."""
    if rank.facts is None:
        return UNKNOWN
    quota = rank.facts.environment.cpu_quota_cores
    sharing = sum(host_of(other) == host_of(rank) for other in record.ranks)
    room = min(rank.facts.host_cores, quota if quota is not None else rank.facts.host_cores) / sharing
    return f"{room:.3g}"


def _collectives(record: CheckRecord) -> doc.Table:
    """A table with a row per group and operation. A fitted latency of 0 is too small to measure: shown as unknown."""
    columns = (
        doc.Column("collectives", words=True),
        doc.Column("operation", words=True),
        *map(doc.Column, ("ranks", "latency", "bandwidth", "largest", "took")),
    )
    measured = {(line.group, line.operation) for rank in record.ranks for line in rank.collectives}
    rows = []
    for group, operation in ((group, operation) for group in GROUPS for operation in OPERATIONS):
        fit = next((f for f in record.fits if (f.group, f.operation) == (group, operation)), None)
        if fit is None and (group, operation) not in measured:
            continue
        figures = [UNKNOWN] * 5
        if fit is not None:
            figures = [
                str(fit.ranks),
                seconds(fit.latency_seconds or None),
                rate(fit.bandwidth_bytes_per_second, "B/s"),
                size(fit.largest_size_bytes),
                seconds(fit.largest_seconds),
            ]
        rows.append(tuple(map(doc.Cell, (group, operation.replace("_", "-"), *figures))))
    return doc.Table(columns, (doc.Group("", tuple(rows)),))


def _loader(record: CheckRecord) -> list[str]:
    loaders = [rank.loader for rank in record.ranks if rank.loader is not None]
    if record.request.trial is None:
        return []
    if not loaders:
        return [f"loader: {UNAVAILABLE}"]
    slowest = min(line.images_per_second for line in loaders)
    need = record.loader_need
    needed = f"{number(need.images_per_second)} images/s ({need.source})" if need else UNAVAILABLE
    return [f"loader: {number(slowest)} images/s per rank, {counted(loaders[0].workers, 'worker')}; needed: {needed}"]


def _disk(record: CheckRecord) -> list[str]:
    disks = [rank.disk for rank in record.ranks if rank.disk is not None]
    if not disks:
        return [f"disk: {UNAVAILABLE}"]
    safe = max(statistics.median(disk.record_seconds) for disk in disks)
    seen = [r.disk.seen_seconds for r in record.ranks if r.rank != 0 and r.disk and r.disk.seen_seconds is not None]
    when = f"within {seconds(max(seen))}" if max(seen, default=0.0) > _AT_ONCE_SECONDS else "at once"
    shared = f"; other ranks see a new file {when}" if seen else ""
    free = size(min(disk.free_bytes for disk in disks))
    return [f"disk: {free} free; a record is safe after {seconds(safe)}{shared}"]
