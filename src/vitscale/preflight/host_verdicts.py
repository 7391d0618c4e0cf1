"""Findings of a check about hosts: versions, cores, the loader, the disk of the results, and groups of ranks.

They answer these questions. Are the hosts alike, and do they have enough cores for what runs on them? Does the loader
keep up with the model? Can the disk hold the results? Does each group of ranks that share the study's model lie on one
host, and is a group slower than the others?
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from vitscale.preflight.network_verdicts import facts_by_host
from vitscale.preflight.verdict import concerning, error, finding, host_of, hosts_of, note, ranks_named, warning
from vitscale.present.document import About, Finding
from vitscale.present.units import counted, listed, number, seconds, size
from vitscale.store.checks import CheckedRank, CheckRecord, FactsLine, Operation, SplitGroup

_QUOTA_TOLERANCE = 1.05
"""Cores used may exceed those available by this factor, for a quota need not be a whole number of cores."""
_MOST_LIBRARIES_NAMED = 8
"""Most libraries that one finding lists."""


def versions_differ(record: CheckRecord) -> Iterable[Finding]:
    """Warns of libraries whose versions differ between hosts."""
    ranks_by_version: dict[str, dict[str, list[CheckedRank]]] = {}
    for rank in record.ranks:
        if rank.facts is not None:
            for library, version in rank.facts.environment.versions.items():
                by_version = ranks_by_version.setdefault(library, {})
                by_version.setdefault(version or "absent", []).append(rank)
    differences = [
        _version_difference(library, by_version)
        for library, by_version in ranks_by_version.items()
        if len(by_version) > 1
    ]
    if differences:
        yield warning(
            kind="versions-differ",
            message=f"not all hosts have the same versions: {'; '.join(differences[:_MOST_LIBRARIES_NAMED])}",
            advice="Install the same versions everywhere, or use one environment on a shared disk",
        )


def _version_difference(library: str, ranks_by_version: Mapping[str, list[CheckedRank]]) -> str:
    """Return "torch 2.13, but 2.12 on node3"; the usual version is that of most ranks."""
    usual_version = max(ranks_by_version, key=lambda version: len(ranks_by_version[version]))
    other_versions = [
        f"{version} on {listed(hosts_of(ranks))}"
        for version, ranks in ranks_by_version.items()
        if version != usual_version
    ]
    return f"{library} {usual_version}, but {listed(other_versions)}"


def drivers_differ(record: CheckRecord) -> Iterable[Finding]:
    """Warns of GPU drivers whose versions differ between hosts."""
    ranks_by_driver: dict[str, list[CheckedRank]] = {}
    for rank in record.ranks:
        driver = rank.facts.environment.device.driver if rank.facts is not None else None
        if driver is not None:
            ranks_by_driver.setdefault(driver, []).append(rank)
    if len(ranks_by_driver) > 1:
        drivers = [f"{driver} on {listed(hosts_of(ranks))}" for driver, ranks in ranks_by_driver.items()]
        yield warning(
            kind="drivers-differ",
            message=f"not all hosts have the same GPU driver: {listed(drivers)}",
            advice="Install one driver everywhere; until then compare no figures across these hosts",
        )


def too_few_cores(record: CheckRecord) -> Iterable[Finding]:
    """Warns of hosts with more threads than cores, or than their quota grants; separately for loader threads."""
    crowded: dict[str, str] = {}
    crowded_by_workers: dict[str, str] = {}
    ranks_by_host = Counter(map(host_of, record.ranks))
    for host, facts in facts_by_host(record).items():
        load = _CoreLoad(
            ranks=ranks_by_host[host],
            threads=record.request.world.threads_per_rank,
            workers=_loader_threads(record),
            cores=_usable_cores(facts),
        )
        by_quota = " by its quota" if load.cores < facts.host_cores else ""
        if load.exceeds_cores(load.threads):
            crowded[host] = f"{load.ranks} x {load.threads} threads on {load.cores:g} cores{by_quota}"
        elif load.workers and load.exceeds_cores(load.threads + load.workers):
            crowded_by_workers[host] = (
                f"{load.ranks} x ({load.threads} threads + {load.workers} loader threads) on {load.cores:g} "
                f"cores{by_quota}"
            )
    if crowded:
        hosts = list(crowded)
        yield warning(
            kind="too-few-cores",
            message=f"ranks share cores on {listed(hosts)}: {crowded[hosts[0]]}",
            advice="Use fewer ranks per host or a smaller launch.threads_per_rank, or ask for more cores",
            about=About(hosts=tuple(hosts)),
        )
    if crowded_by_workers:
        hosts = list(crowded_by_workers)
        yield warning(
            kind="loader-shares-cores",
            message=f"loader threads share cores with the ranks on {listed(hosts)}: {crowded_by_workers[hosts[0]]}",
            advice="Set data.workers lower, or ask for more cores per rank",
            about=About(hosts=tuple(hosts)),
        )


class _CoreLoad(NamedTuple):
    """The threads that run on one host, and its cores."""

    ranks: int
    threads: int
    """Threads of each rank that compute."""
    workers: int
    """Loader threads of each rank."""
    cores: float

    def exceeds_cores(self, threads_per_rank: int) -> bool:
        """Whether the ranks have clearly more than one thread for each core, with this many threads each."""
        return self.ranks * threads_per_rank > _QUOTA_TOLERANCE * self.cores


def _loader_threads(record: CheckRecord) -> int:
    """Return the loader threads of a rank in the study; 0 without a study."""
    trial = record.request.trial
    return trial.data.workers if trial is not None else 0


def _usable_cores(facts: FactsLine) -> float:
    """Return the cores of a host, or its quota where that is less."""
    quota_cores = facts.environment.cpu_quota_cores
    return facts.host_cores if quota_cores is None else min(facts.host_cores, quota_cores)


_USUAL_MATMUL_SHARE = 0.3
"""Share of the matrix-multiply rate that training usually reaches at least; a slower loader is certainly too slow."""
_LITTLE_ROOM_BYTES = 1 << 30
_NO_ROOM_BYTES = 64 << 20
_SLOW_RECORD_SECONDS = 0.1
_LATE_FOLDER_SECONDS = 2.0


def slow_loader(record: CheckRecord) -> Iterable[Finding]:
    """Warns of a loader slower than the model; a note where it is only perhaps too slow."""
    rates = [rank.loader.images_per_second for rank in record.ranks if rank.loader is not None]
    need = record.loader_need
    if not rates or need is None or min(rates) >= need.images_per_second:
        return
    slowest = min(rates)
    is_measured = need.source == "run"
    is_certain = is_measured or slowest < _USUAL_MATMUL_SHARE * need.images_per_second
    verb = "takes" if is_measured else "may take up to"
    consequence = ": training waits for data" if is_certain else ""
    condition = "" if is_certain else " if training shows data wait"
    yield finding(
        "warning" if is_certain else "note",
        kind="loader-slow",
        message=f"the loader alone gives a rank {number(slowest)} images/s, and the model {verb} "
        f"{number(need.images_per_second)} ({need.described}){consequence}",
        advice=f"Set data.workers higher (it is {_loader_threads(record)}){condition}",
    )


def full_disk(record: CheckRecord) -> Iterable[Finding]:
    """Warns of a disk with little room; an error where there is none."""
    free_bytes = [rank.disk.free_bytes for rank in record.ranks if rank.disk is not None]
    if not free_bytes or min(free_bytes) >= _LITTLE_ROOM_BYTES:
        return
    is_full = min(free_bytes) < _NO_ROOM_BYTES
    yield finding(
        "error" if is_full else "warning",
        kind="disk-full" if is_full else "little-room",
        message=f"the disk of the results has {size(min(free_bytes))} left",
        advice="Free space, or give a folder on another disk with -o",
    )


def slow_disk(record: CheckRecord) -> Iterable[Finding]:
    """Notes a disk on which records take long to be safe."""
    times = [statistics.median(rank.disk.record_seconds) for rank in record.ranks if rank.disk is not None]
    if times and max(times) > _SLOW_RECORD_SECONDS:
        yield note(
            kind="slow-disk",
            message=f"a record takes up to {seconds(max(times))} to be safe on the disk of the results",
            advice="Training does not wait for it; give a folder on a faster disk with -o if the end of runs drags on",
        )


def unshared_folder(record: CheckRecord) -> Iterable[Finding]:
    """Warns of hosts that do not see what another host writes, or see it late."""
    unsighted = [rank for rank in record.ranks if _waited_in_vain(rank)]
    if unsighted:
        ranks = ranks_named([rank.rank for rank in unsighted])
        yield error(
            kind="folder-not-shared",
            message=f"{ranks} ({listed(hosts_of(unsighted))}) did not see a file that rank 0 wrote to the results "
            "folder",
            advice="Give a folder on a file system that all hosts share with -o",
            about=concerning(unsighted),
        )
    late = [rank for rank in record.ranks if _seen_after_seconds(rank) > _LATE_FOLDER_SECONDS]
    if late:
        longest = max(map(_seen_after_seconds, late))
        yield note(
            kind="late-folder",
            message=f"a file that rank 0 wrote was seen on {listed(hosts_of(late))} only after {seconds(longest)}: the "
            "file system keeps what it knows of a folder for a while",
            advice="Keep measure.hang_seconds well above that",
            about=concerning(late),
        )


def _waited_in_vain(rank: CheckedRank) -> bool:
    """Whether a rank waited for rank 0's file in vain. A rank that did not wait has recorded another reason."""
    disk = rank.disk
    return disk is not None and disk.seen_seconds is None and "not seen" in disk.seen_reason


def _seen_after_seconds(rank: CheckedRank) -> float:
    """Return how long a rank waited until it saw rank 0's file; 0 where that is unknown."""
    return (rank.disk.seen_seconds or 0.0) if rank.disk is not None else 0.0


_SLOW_GROUP_RATIO = 1.5
"""A group that takes this many times the median of the others is slow."""
_GROUPS_USED_IN_EVERY_BLOCK: tuple[SplitGroup, ...] = ("tensor", "sequence")
"""Groups whose ranks exchange in every block of the model."""


def slow_groups(record: CheckRecord) -> Iterable[Finding]:
    """Warns of groups whose exchange takes much longer than others' along the same axis, at the largest common size."""
    rank_by_number = {rank.rank: rank for rank in record.ranks}
    for name, operations in record.request.exchanges.items():
        reported = set[tuple[int, ...]]()
        for operation in operations:
            times = _group_times(record, name, operation)
            for ranks, group_seconds in times.seconds_by_group.items():
                usual_seconds = _usual_seconds(times.seconds_by_group, without=ranks)
                is_slow = usual_seconds > 0 and group_seconds >= _SLOW_GROUP_RATIO * usual_seconds
                if not is_slow or ranks in reported:
                    continue
                reported.add(ranks)
                hosts = hosts_of(rank_by_number[rank] for rank in ranks)
                yield warning(
                    kind="slow-group",
                    message=f"{name} {_group_name(ranks)} ({listed(hosts)}): {operation.replace('_', '-')} of "
                    f"{size(times.size_bytes)} takes {seconds(group_seconds)}, {group_seconds / usual_seconds:.1f} "
                    "times as long as in the other groups, which wait for it",
                    advice="See what else uses these hosts and their links; or leave them out",
                    about=About(ranks=ranks, hosts=hosts),
                )


def _usual_seconds(seconds_by_group: Mapping[tuple[int, ...], float], *, without: tuple[int, ...]) -> float:
    """Return the median time of the other groups; 0 where there is no other."""
    other_seconds = [group_seconds for ranks, group_seconds in seconds_by_group.items() if ranks != without]
    return statistics.median(other_seconds) if other_seconds else 0.0


class _GroupTimes(NamedTuple):
    """Times of one operation in the groups along an axis, at the largest size that all their ranks measured."""

    size_bytes: int
    seconds_by_group: dict[tuple[int, ...], float]
    """Ranks of a group -> seconds of one call, of the slowest rank in the best repeat."""


class _RankSize(NamedTuple):
    rank: int
    size_bytes: int


def _group_times(record: CheckRecord, name: SplitGroup, operation: Operation) -> _GroupTimes:
    """Return the times of an operation in all groups along an axis; none where they have no common size."""
    repeat_seconds: dict[_RankSize, Sequence[float]] = {}
    for rank in record.ranks:
        for line in rank.collectives:
            if line.group == name and line.operation == operation:
                repeat_seconds[_RankSize(rank.rank, line.size_bytes)] = line.seconds
    groups = record.request.split_groups(name)
    size = _largest_common_size(repeat_seconds, list(chain.from_iterable(groups)))
    if size is None:
        return _GroupTimes(0, {})
    seconds_by_group = {}
    for group in groups:
        seconds_by_group[group] = _best_group_seconds([repeat_seconds[_RankSize(rank, size)] for rank in group])
    return _GroupTimes(size, seconds_by_group)


def _largest_common_size(measured: Iterable[_RankSize], ranks: Sequence[int]) -> int | None:
    """Return the largest size in bytes that all these ranks have measured; None where they have none in common."""
    ranks_by_size: dict[int, set[int]] = {}
    for rank_size in measured:
        ranks_by_size.setdefault(rank_size.size_bytes, set()).add(rank_size.rank)
    common_sizes = [size for size, ranks_of_size in ranks_by_size.items() if ranks_of_size.issuperset(ranks)]
    return max(common_sizes, default=None)


def _best_group_seconds(repeats_by_rank: Sequence[Sequence[float]]) -> float:
    """Return the seconds of a group's fastest repeat, each of which takes as long as on its slowest rank.

    `repeats_by_rank`: the seconds of each repeat, for each rank of the group.
    """
    seconds_by_repeat = zip(*repeats_by_rank, strict=False)  # as many repeats as all ranks have
    slowest_by_repeat: list[float] = [max(seconds_of_ranks) for seconds_of_ranks in seconds_by_repeat]
    return min(slowest_by_repeat)


def groups_across_hosts(record: CheckRecord) -> Iterable[Finding]:
    """Warns of groups that exchange between hosts in every block of the model."""
    hosts = {rank.rank: host_of(rank) for rank in record.ranks}
    for name in _GROUPS_USED_IN_EVERY_BLOCK:
        groups = record.request.split_groups(name)
        spread = [ranks for ranks in groups if len(_known_hosts(ranks, hosts)) > 1]
        if not spread:
            continue
        ranks = spread[0]
        share = f" ({len(spread)} of {len(groups)} such groups)" if len(groups) > 1 else ""
        if len(ranks) <= record.request.world.ranks_per_node:
            advice = f"Put a multiple of {len(ranks)} ranks on each host, so that a group lies on one"
        else:
            advice = "Split the model over the ranks of a host alone, and raise data parallelism instead"
        yield warning(
            kind="group-across-hosts",
            message=f"{name} {_group_name(ranks)}{share} exchanges activations in every block, between the hosts "
            f"{listed(sorted(_known_hosts(ranks, hosts)))}",
            advice=advice,
            about=About(ranks=ranks),
        )


def _known_hosts(ranks: Iterable[int], hosts: Mapping[int, str | None]) -> set[str]:
    """Return the hosts of a group's ranks, as far as they are known."""
    known_hosts = set()
    for rank in ranks:
        host = hosts.get(rank)
        if host is not None:
            known_hosts.add(host)
    return known_hosts


def no_groups(record: CheckRecord) -> Iterable[Finding]:
    """Notes a check on a number of ranks that cannot be divided into the study's groups, which go unmeasured."""
    trial = record.request.trial
    if trial is None:
        return
    ranks = record.request.world.size
    ranks_per_model = trial.parallel.ranks_per_model
    if ranks_per_model > 1 and ranks % ranks_per_model:
        yield note(
            kind="groups-unchecked",
            message=f"{ranks_per_model} ranks share a model in this study, and the check had {counted(ranks, 'rank')}: "
            "what such groups exchange was not measured",
            advice=f"Check on a multiple of {ranks_per_model} ranks (--ranks-per-node, a longer hostfile)",
        )


def _group_name(ranks: Iterable[int]) -> str:
    """Return the ranks of a group as "2+3", as in messages on lost ranks."""
    return "+".join(map(str, ranks))
