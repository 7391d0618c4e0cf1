"""Are the hosts alike, and do they have enough cores for what runs on them?

Does the loader keep up with the model, and is the disk fit to hold the results?
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from vitscale.preflight.verdict import error, finding, hosts_of, note, ranks_named, warning
from vitscale.present.document import Finding
from vitscale.present.units import listed, number, seconds, size
from vitscale.store.checks import CheckedRank, CheckRecord

_NEAR = 1.05
"""Cores used may exceed those available by this factor, for a quota need not be a whole number of cores."""


def versions_differ(record: CheckRecord) -> Iterable[Finding]:
    """Libraries whose versions differ between hosts."""
    by_library: dict[str, dict[str, list[CheckedRank]]] = {}
    for rank in record.ranks:
        if rank.facts is not None:
            for name, version in rank.facts.environment.versions.items():
                by_library.setdefault(name, {}).setdefault(version or "absent", []).append(rank)
    unlike = {name: by_version for name, by_version in by_library.items() if len(by_version) > 1}
    if unlike:
        each = []
        for name, by_version in unlike.items():
            usual = max(by_version, key=lambda version: len(by_version[version]))
            odd = [f"{v} on {listed(hosts_of(ranks))}" for v, ranks in by_version.items() if v != usual]
            each.append(f"{name} {usual}, but {listed(odd)}")
        yield warning(
            "versions-differ",
            f"not all hosts have the same versions: {'; '.join(each[:8])}",
            "Install the same versions everywhere, or use one environment on a shared disk",
        )


def drivers_differ(record: CheckRecord) -> Iterable[Finding]:
    """GPU drivers whose versions differ between hosts."""
    by_driver: dict[str, list[CheckedRank]] = {}
    for rank in record.ranks:
        if rank.facts is not None and rank.facts.environment.device.driver is not None:
            by_driver.setdefault(rank.facts.environment.device.driver, []).append(rank)
    if len(by_driver) > 1:
        each = [f"{driver} on {listed(hosts_of(ranks))}" for driver, ranks in by_driver.items()]
        yield warning(
            "drivers-differ",
            f"not all hosts have the same GPU driver: {listed(each)}",
            "Install one driver everywhere; until then compare no figures across these hosts",
        )


def too_few_cores(record: CheckRecord) -> Iterable[Finding]:
    """Hosts with more threads than cores, or than their quota grants; told separately for loader threads."""
    threads = record.request.world.threads_per_rank
    workers = record.request.trial.data.workers if record.request.trial is not None else 0
    crowded: dict[str, str] = {}
    crowded_by_workers: dict[str, str] = {}
    by_host: dict[str, list[CheckedRank]] = {}
    for rank in record.ranks:
        if rank.facts is not None:
            by_host.setdefault(rank.facts.environment.host, []).append(rank)
    for host, ranks in by_host.items():
        facts = ranks[0].facts
        if facts is None:
            continue
        quota = facts.environment.cpu_quota_cores
        room = min(facts.host_cores, quota if quota is not None else facts.host_cores)
        has = f"{room:g} cores" + (" by its quota" if room < facts.host_cores else "")
        if len(ranks) * threads > _NEAR * room:
            crowded[host] = f"{len(ranks)} x {threads} threads on {has}"
        elif workers and len(ranks) * (threads + workers) > _NEAR * room:
            crowded_by_workers[host] = f"{len(ranks)} x ({threads} threads + {workers} loader threads) on {has}"
    if crowded:
        yield warning(
            "too-few-cores",
            f"ranks share cores on {listed([*crowded])}: {next(iter(crowded.values()))}",
            "Use fewer ranks per host or a smaller launch.threads_per_rank, or ask for more cores",
            hosts=tuple(crowded),
        )
    if crowded_by_workers:
        yield warning(
            "loader-shares-cores",
            f"loader threads share cores with the ranks on {listed([*crowded_by_workers])}: "
            f"{next(iter(crowded_by_workers.values()))}",
            "Set data.workers lower, or ask for more cores per rank",
            hosts=tuple(crowded_by_workers),
        )


_USUAL_SHARE = 0.3
"""Share of the matrix-multiply rate that training usually reaches at least; a slower loader is certainly too slow."""
_LITTLE_ROOM = 1 << 30
_NO_ROOM = 64 << 20
_SLOW_RECORD_SECONDS = 0.1
_LATE_SECONDS = 2.0


def slow_loader(record: CheckRecord) -> Iterable[Finding]:
    """A loader slower than the model."""
    rates = [rank.loader.images_per_second for rank in record.ranks if rank.loader is not None]
    need = record.loader_need
    if not rates or need is None or min(rates) >= need.images_per_second:
        return
    certain = need.source == "run" or min(rates) < _USUAL_SHARE * need.images_per_second
    workers = record.request.trial.data.workers if record.request.trial is not None else 0
    yield finding(
        "warning" if certain else "note",
        "loader-slow",
        f"the loader alone gives a rank {number(min(rates))} images/s, and the model "
        f"{'takes' if need.source == 'run' else 'may take up to'} {number(need.images_per_second)} "
        f"({need.described})" + (": training waits for data" if certain else ""),
        f"Set data.workers higher (it is {workers})" + ("" if certain else " if training shows data wait"),
    )


def full_disk(record: CheckRecord) -> Iterable[Finding]:
    """A disk with little room, or none."""
    free = [rank.disk.free_bytes for rank in record.ranks if rank.disk is not None]
    if free and min(free) < _LITTLE_ROOM:
        yield finding(
            *(("warning", "little-room") if min(free) >= _NO_ROOM else ("error", "disk-full")),
            f"the disk of the results has {size(min(free))} left",
            "Free space, or give a folder on another disk with -o",
        )


def slow_disk(record: CheckRecord) -> Iterable[Finding]:
    """A disk on which records take long to be safe."""
    times = [statistics.median(rank.disk.record_seconds) for rank in record.ranks if rank.disk is not None]
    if times and max(times) > _SLOW_RECORD_SECONDS:
        yield note(
            "slow-disk",
            f"a record takes up to {seconds(max(times))} to be safe on the disk of the results",
            "Training does not wait for it; give a folder on a faster disk with -o if the end of runs drags on",
        )


def unshared_folder(record: CheckRecord) -> Iterable[Finding]:
    """Hosts that do not see what another host writes, or see it late."""
    blind = [r for r in record.ranks if r.disk and r.disk.seen_seconds is None and "not seen" in r.disk.seen_reason]
    if blind:
        yield error(
            "folder-not-shared",
            f"{ranks_named([rank.rank for rank in blind])} ({listed(hosts_of(blind))}) did not see a file that rank 0 "
            "wrote to the results folder",
            "Give a folder on a file system that all hosts share with -o",
            tuple(rank.rank for rank in blind),
            hosts_of(blind),
        )
    late = [rank for rank in record.ranks if rank.disk and (rank.disk.seen_seconds or 0.0) > _LATE_SECONDS]
    if late:
        longest = max(rank.disk.seen_seconds or 0.0 for rank in late if rank.disk)
        yield note(
            "late-folder",
            f"a file that rank 0 wrote was seen on {listed(hosts_of(late))} only after {seconds(longest)}: the file "
            "system keeps what it knows of a folder for a while",
            "Keep measure.hang_seconds well above that",
            tuple(rank.rank for rank in late),
            hosts_of(late),
        )
