"""The answer of a check: all findings, the most severe first, and the measurements, as a document and as JSON fields.

The findings on pace are shown again before a study runs on the same hosts.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vitscale.preflight import (
    host_verdicts,
    link_verdicts,
    network_verdicts,
    pace_verdicts,
    plugin_verdicts,
    reach_verdicts,
)
from vitscale.preflight.pace_verdicts import checked_rank_speeds, rates, relative_speeds
from vitscale.preflight.verdict import host_of
from vitscale.present import document as doc
from vitscale.present.data import finding_fields
from vitscale.present.units import UNAVAILABLE, UNKNOWN, counted, number, rate, seconds, size
from vitscale.runner import Plan
from vitscale.schedulers import Submitter
from vitscale.store.checks import (
    GROUPS,
    OPERATIONS,
    CheckedRank,
    CheckGroup,
    CheckRecord,
    CollectiveFit,
    Operation,
    latest,
)

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
    link_verdicts.nvlinks_down,
    link_verdicts.peer_access_off,
    link_verdicts.slow_inside_nodes,
    link_verdicts.network_over_sockets,
    link_verdicts.adapters_unused,
    link_verdicts.no_gpu_direct,
    link_verdicts.adapters_differ,
    link_verdicts.narrow_pcie,
    plugin_verdicts.missing_plugin,
    network_verdicts.slow_link,
    link_verdicts.slow_adapters,
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
    """Return all findings of a check, the most severe first."""
    return doc.most_severe_first([finding for rule in RULES for finding in rule(record)])


def pace_warnings(plan: Plan, results: Path) -> list[str]:
    """Return a line for each finding of an earlier check that ranks compute at different paces.

    The check is the newest one of exactly these hosts and this kind of device: in the folder, else among the user's
    own. The list is empty where there is no such check, and for a batch system, whose choice of hosts is unknown.

    Args:
        plan: the study; its hosts are those on which most of its ranks run at a time.
        results: the folder given with -o, or its default.
    """
    if isinstance(plan.scheduler, Submitter):
        return []
    largest_world = max((trial.world for trial in plan.record.trials.values()), key=lambda world: world.size)
    hosts = tuple(host.name for host in plan.scheduler.hosts(largest_world)) or (socket.gethostname(),)
    devices = {trial.train.device for trial in plan.record.trials.values()}
    record = latest(results, hosts, lambda checked: checked.request.device in devices)
    if record is None:
        return []
    day = time.strftime("%Y-%m-%d", time.gmtime(record.started_unix_seconds))
    findings = [*pace_verdicts.slow_ranks(record), *pace_verdicts.mixed_devices(record)]
    return [f"{finding.message} (vitscale check, {day}). {finding.advice}" for finding in findings]


_MOST_RANK_ROWS = 64
"""Most ranks with a row in the table."""
_AT_ONCE_SECONDS = 0.02
"""Below this a new file is seen "at once"."""


def check_fields(record: CheckRecord, findings: Sequence[doc.Finding], path: Path) -> dict[str, Any]:
    """Return the check and its findings as JSON fields, with the raw values."""
    speeds = checked_rank_speeds(record)
    return {
        "stored": str(path),
        "verdicts": [finding_fields(finding) for finding in findings],
        "rank_speeds": list(speeds) if speeds is not None else None,
        "pace_against_others": {str(rank): pace for rank, pace in relative_speeds(rates(record.ranks)).items()},
        "check": record.model_dump(mode="json"),
    }


def check_document(record: CheckRecord, findings: Sequence[doc.Finding], path: Path) -> doc.Document:
    """Return a document with the findings, the most severe first, then the measurements."""
    blocks: list[doc.Block] = [doc.Paragraph(f"{_heading(record)}: {doc.counts_of(findings)}", "strong"), *findings]
    if record.ranks:
        blocks.append(_rank_table(record))
    if any(rank.collectives for rank in record.ranks):
        blocks.append(_collective_table(record))
    blocks.append(doc.Bullets((*_loader_lines(record), *_disk_lines(record))))
    return doc.Document("", tuple(blocks), (f"Stored: {path}",))


def _heading(record: CheckRecord) -> str:
    """Return "2 hosts, 8 ranks; nccl on cuda; started by torchrun"."""
    world = record.request.world
    facts = [rank.facts for rank in record.ranks if rank.facts is not None]
    backend = (facts[0].environment.backend if facts else None) or UNAVAILABLE
    hosts_and_ranks = f"{counted(world.nodes, 'host')}, {counted(world.size, 'rank')}"
    return f"{hosts_and_ranks}; {backend} on {record.request.device}; started by {record.launcher}"


def _rank_table(record: CheckRecord) -> doc.Table:
    """Return a table with a row for each rank.

    Its memory is the device's. Its pace is the rank's rate of fixed work over that of the fastest rank.
    """
    rank_rates = rates(record.ranks)
    highest_rate = max(rank_rates.values(), default=0.0)
    columns = (
        *map(doc.Column, ("rank", "cores", "memory", "matmul", "pace")),
        doc.Column("host", words=True),
        doc.Column("device", words=True),
    )
    rows = []
    for rank in record.ranks[:_MOST_RANK_ROWS]:
        device = rank.facts.environment.device if rank.facts is not None else None
        matmul_rate = rank.matmul.flops_per_second if rank.matmul is not None else None
        pace = f"{rank_rates[rank.rank] / highest_rate:.2f}" if rank.rank in rank_rates else UNKNOWN
        texts = (
            str(rank.rank),
            _cores_of_rank(rank, record),
            size(device.memory_bytes if device is not None else None),
            rate(matmul_rate, "FLOP/s"),
            pace,
            host_of(rank) or UNAVAILABLE,
            device.name if device is not None else UNAVAILABLE,
        )
        rows.append(tuple(map(doc.Cell, texts)))
    unlisted_ranks = len(record.ranks) - _MOST_RANK_ROWS
    notes = (f"{unlisted_ranks} more ranks: --json has them.",) if unlisted_ranks > 0 else ()
    return doc.Table(columns, (doc.RowGroup("", tuple(rows)),), notes)


def _cores_of_rank(rank: CheckedRank, record: CheckRecord) -> str:
    """Return the cores of the rank's host, or its quota where that is less, divided by the ranks there."""
    if rank.facts is None:
        return UNKNOWN
    host_cores: float = rank.facts.host_cores
    quota_cores = rank.facts.environment.cpu_quota_cores
    usable_cores = host_cores if quota_cores is None else min(host_cores, quota_cores)
    ranks_there = sum(host_of(other) == host_of(rank) for other in record.ranks)
    return f"{usable_cores / ranks_there:.3g}"


class _Exchange(NamedTuple):
    """An operation in the groups of one kind."""

    group: CheckGroup
    operation: Operation


def _collective_table(record: CheckRecord) -> doc.Table:
    """Return a table with a row for each operation in each kind of group.

    A fitted latency of 0 is too small to measure, and is shown as unknown.
    """
    columns = (
        doc.Column("collectives", words=True),
        doc.Column("operation", words=True),
        *map(doc.Column, ("ranks", "latency", "bandwidth", "largest", "took")),
    )
    measured: set[_Exchange] = set()
    for rank in record.ranks:
        measured |= {_Exchange(line.group, line.operation) for line in rank.collectives}
    fit_by_exchange: dict[_Exchange, CollectiveFit] = {}
    for fit in record.fits:
        fit_by_exchange.setdefault(_Exchange(fit.group, fit.operation), fit)
    rows = []
    for group in GROUPS:
        for operation in OPERATIONS:
            exchange = _Exchange(group, operation)
            if exchange in measured or exchange in fit_by_exchange:
                texts = (group, operation.replace("_", "-"), *_fit_figures(fit_by_exchange.get(exchange)))
                rows.append(tuple(map(doc.Cell, texts)))
    return doc.Table(columns, (doc.RowGroup("", tuple(rows)),))


def _fit_figures(fit: CollectiveFit | None) -> tuple[str, ...]:
    """Return ranks, latency, bandwidth, and the largest size with its time; all unknown without a fit."""
    if fit is None:
        return (UNKNOWN,) * 5
    return (
        str(fit.ranks),
        seconds(fit.latency_seconds or None),
        rate(fit.bandwidth_bytes_per_second, "B/s"),
        size(fit.largest_size_bytes),
        seconds(fit.largest_seconds),
    )


def _loader_lines(record: CheckRecord) -> list[str]:
    """Return a line on the loader; none without a study, whose images it would load."""
    if record.request.trial is None:
        return []
    loaders = [rank.loader for rank in record.ranks if rank.loader is not None]
    if not loaders:
        return [f"loader: {UNAVAILABLE}"]
    slowest = min(loader.images_per_second for loader in loaders)
    workers = counted(loaders[0].workers, "worker")
    need = record.loader_need
    needed = f"{number(need.images_per_second)} images/s ({need.source})" if need is not None else UNAVAILABLE
    return [f"loader: {number(slowest)} images/s per rank, {workers}; needed: {needed}"]


def _disk_lines(record: CheckRecord) -> list[str]:
    """Return a line on the disk of the results."""
    disks = [rank.disk for rank in record.ranks if rank.disk is not None]
    if not disks:
        return [f"disk: {UNAVAILABLE}"]
    free = size(min(disk.free_bytes for disk in disks))
    slowest_record = max(statistics.median(disk.record_seconds) for disk in disks)
    line = f"disk: {free} free; a record is safe after {seconds(slowest_record)}"
    seen_seconds: list[float] = []
    for rank in record.ranks:
        is_other_rank = rank.rank != 0  # rank 0 writes the file that the others wait for
        if is_other_rank and rank.disk is not None and rank.disk.seen_seconds is not None:
            seen_seconds.append(rank.disk.seen_seconds)
    if seen_seconds:
        latest_seen = max(seen_seconds)
        delay = f"within {seconds(latest_seen)}" if latest_seen > _AT_ONCE_SECONDS else "at once"
        line += f"; other ranks see a new file {delay}"
    return [line]
