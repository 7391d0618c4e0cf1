"""Are the hosts alike, and do they have enough cores for what runs on them?

Does the loader keep up with the model, and is the disk fit to hold the results? Does each group of ranks that share the
study's model lie on one host, and is one slower than the others?
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable

from vitscale.preflight.network_verdicts import facts_by_host
from vitscale.preflight.verdict import concerning, error, finding, host_of, hosts_of, note, ranks_named, warning
from vitscale.present.document import About, Finding
from vitscale.present.units import counted, listed, number, seconds, size
from vitscale.store.checks import CheckedRank, CheckRecord, Operation, SplitGroup

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
    ranks_on = Counter(map(host_of, record.ranks))
    for host, facts in facts_by_host(record).items():
        ranks = ranks_on[host]
        quota = facts.environment.cpu_quota_cores
        room = min(facts.host_cores, quota if quota is not None else facts.host_cores)
        has = f"{room:g} cores" + (" by its quota" if room < facts.host_cores else "")
        if ranks * threads > _NEAR * room:
            crowded[host] = f"{ranks} x {threads} threads on {has}"
        elif workers and ranks * (threads + workers) > _NEAR * room:
            crowded_by_workers[host] = f"{ranks} x ({threads} threads + {workers} loader threads) on {has}"
    if crowded:
        yield warning(
            "too-few-cores",
            f"ranks share cores on {listed([*crowded])}: {next(iter(crowded.values()))}",
            "Use fewer ranks per host or a smaller launch.threads_per_rank, or ask for more cores",
            About(hosts=tuple(crowded)),
        )
    if crowded_by_workers:
        yield warning(
            "loader-shares-cores",
            f"loader threads share cores with the ranks on {listed([*crowded_by_workers])}: "
            f"{next(iter(crowded_by_workers.values()))}",
            "Set data.workers lower, or ask for more cores per rank",
            About(hosts=tuple(crowded_by_workers)),
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
            concerning(blind),
        )
    late = [rank for rank in record.ranks if rank.disk and (rank.disk.seen_seconds or 0.0) > _LATE_SECONDS]
    if late:
        longest = max(rank.disk.seen_seconds or 0.0 for rank in late if rank.disk)
        yield note(
            "late-folder",
            f"a file that rank 0 wrote was seen on {listed(hosts_of(late))} only after {seconds(longest)}: the file "
            "system keeps what it knows of a folder for a while",
            "Keep measure.hang_seconds well above that",
            concerning(late),
        )


_SLOW = 1.5
"""A group that takes this many times the median of the others is slow."""
_IN_EVERY_BLOCK: tuple[SplitGroup, ...] = ("tensor", "sequence")
"""Groups whose ranks exchange in every block of the model."""


def slow_groups(record: CheckRecord) -> Iterable[Finding]:
    """Groups whose exchange takes much longer than others' along the same axis, at the largest common size."""
    by_rank = {rank.rank: rank for rank in record.ranks}
    for name, operations in record.request.exchanges.items():
        told = set[tuple[int, ...]]()
        for operation in operations:
            size_bytes, took = _group_seconds(record, name, operation)
            for ranks, own in took.items():
                others = [other for group, other in took.items() if group != ranks]
                usual = statistics.median(others) if others else 0.0
                if usual <= 0 or own < _SLOW * usual or ranks in told:
                    continue
                told.add(ranks)
                hosts = hosts_of(by_rank[rank] for rank in ranks)
                yield warning(
                    "slow-group",
                    f"{name} {_joined(ranks)} ({listed(hosts)}): {operation.replace('_', '-')} of {size(size_bytes)} "
                    f"takes {seconds(own)}, {own / usual:.1f} times as long as in the other groups, which wait for it",
                    "See what else uses these hosts and their links; or leave them out",
                    About(ranks=ranks, hosts=hosts),
                )


def _group_seconds(
    record: CheckRecord, name: SplitGroup, operation: Operation
) -> tuple[int, dict[tuple[int, ...], float]]:
    """(size in bytes, ranks of a group -> seconds of one call, of the slowest rank in the best repeat)."""
    lines = {
        (rank.rank, line.size_bytes): line.seconds
        for rank in record.ranks
        for line in rank.collectives
        if (line.group, line.operation) == (name, operation)
    }
    groups = record.request.split_groups(name)
    ranks = [rank for group in groups for rank in group]
    common = [size for _, size in lines if all((rank, size) in lines for rank in ranks)]
    if not common:
        return 0, {}
    largest = max(common)
    return largest, {
        group: min(map(max, zip(*(lines[rank, largest] for rank in group), strict=False))) for group in groups
    }


def groups_across_hosts(record: CheckRecord) -> Iterable[Finding]:
    """Groups that exchange between hosts in every block of the model."""
    host = {rank.rank: host_of(rank) for rank in record.ranks}
    each = record.request.world.ranks_per_node
    for name in _IN_EVERY_BLOCK:
        groups = record.request.split_groups(name)
        spread = [ranks for ranks in groups if len({host.get(rank) for rank in ranks} - {None}) > 1]
        if not spread:
            continue
        ranks = spread[0]
        more = f" ({len(spread)} of {len(groups)} such groups)" if len(groups) > 1 else ""
        advice = "Split the model over the ranks of a host alone, and raise data parallelism instead"
        if len(ranks) <= each:
            advice = f"Put a multiple of {len(ranks)} ranks on each host, so that a group lies on one"
        yield warning(
            "group-across-hosts",
            f"{name} {_joined(ranks)}{more} exchanges activations in every block, between the hosts "
            f"{listed(sorted(filter(None, {host.get(rank) for rank in ranks})))}",
            advice,
            About(ranks=ranks),
        )


def no_groups(record: CheckRecord) -> Iterable[Finding]:
    """A check on a number of ranks that cannot be divided into the study's groups, whose exchanges go unmeasured."""
    trial, ranks = record.request.trial, record.request.world.size
    if trial is not None and (shared := trial.parallel.ranks_per_model) > 1 and ranks % shared:
        yield note(
            "groups-unchecked",
            f"{shared} ranks share a model in this study, and the check had {counted(ranks, 'rank')}: what such groups "
            "exchange was not measured",
            f"Check on a multiple of {shared} ranks (--ranks-per-node, a longer hostfile)",
        )


def _joined(ranks: Iterable[int]) -> str:
    """Ranks of a group as "2+3", as in messages on lost ranks."""
    return "+".join(map(str, ranks))
