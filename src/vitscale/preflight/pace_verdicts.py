"""Findings of a check about the speed of its ranks: which are slow and why, unlike devices, throttling, clocks.

All ranks of a check compute pieces of the same work at the same time, in several repeats (`ComputeLine`). Three figures
of a rank follow from that:

    rate             pieces per second, the median over its repeats
    relative speed   its rate / the median rate of all other ranks: 0.5 is half as fast as they are
    rank speed       its rate / the rate of the fastest rank, as `train.rank_speeds` in a study takes it
"""

from __future__ import annotations

import bisect
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from vitscale.machine.gpus import GpuVendor, vendor_of_name
from vitscale.preflight.verdict import concerning, hosts_of, note, ranks_named, warning
from vitscale.present.document import About, Finding
from vitscale.present.units import listed
from vitscale.store.checks import CheckedRank, CheckRecord
from vitscale.store.records import GpuSamples
from vitscale.trial.rank_batches import speeds_from_rates

_SLOW_SPEED = 0.9
"""A rank is slow below this relative speed."""
_UNSTEADY_SPREAD = 0.15
"""A rank is unsteady if its repeats differ by more than this share of their median."""
_THROTTLED_SHARE = 0.01
"""Throttling is reported above this share of the time."""
_LONGEST_SPEED_LIST = 64
"""Most ranks whose speeds are written out in an advice."""


class _SlowGroup(NamedTuple):
    """Slow ranks with the same device and the same relative speed share one finding."""

    device: str
    speed: str
    """Relative speed with two decimals."""


def slow_ranks(record: CheckRecord) -> Iterable[Finding]:
    """Warns of ranks that were clearly slower than the others in every repeat, and says why."""
    rank_rates = rates(record.ranks)
    speeds = relative_speeds(rank_rates)
    groups: dict[_SlowGroup, list[CheckedRank]] = {}
    for rank in record.ranks:
        speed = speeds.get(rank.rank)
        if speed is not None and _is_slow_in_every_repeat(rank, rank_rates[rank.rank], speed):
            group = _SlowGroup(_device_name(rank), f"{speed:.2f}")
            groups.setdefault(group, []).append(rank)

    matmul_rates = {rank.rank: rank.matmul.flops_per_second for rank in record.ranks if rank.matmul is not None}
    matmul_speeds = relative_speeds(matmul_rates)
    for group in sorted(groups, key=lambda group: group.speed):
        yield _slow_group_finding(record, group, groups[group], matmul_speeds)


def _is_slow_in_every_repeat(rank: CheckedRank, rate: float, relative_speed: float) -> bool:
    """Whether the rank is slow, and even its fastest repeat was below the median rate of the others.

    A rank with one repeat at the others' rate was disturbed in its other repeats, which `unsteady` reports.
    """
    if rank.compute is None or relative_speed >= _SLOW_SPEED:
        return False
    fastest_repeat = max(rank.compute.pieces_per_second)
    # The others' rate is rate / relative_speed. Multiply instead: a relative speed can be so small that it is 0.
    return fastest_repeat * relative_speed < rate


def _slow_group_finding(
    record: CheckRecord, group: _SlowGroup, ranks: Sequence[CheckedRank], matmul_speeds: Mapping[int, float]
) -> Finding:
    """Return the finding for slow ranks. Args: matmul_speeds: rank -> relative speed of large matrix products."""
    numbers = [rank.rank for rank in ranks]
    is_single = len(ranks) == 1
    verb = "computes" if is_single else "compute"
    possessive = "its" if is_single else "their"
    cause = _cause_of_slowness(ranks[0], record, matmul_speeds)
    if cause.is_other_processes:
        advice = "Stop what else runs there, and check again"
    else:
        advice = _share_advice(record, numbers)
    return warning(
        kind="slow-rank",
        message=f"{ranks_named(numbers)} ({group.device}, {listed(hosts_of(ranks))}) {verb} at {group.speed} of the "
        f"others: with equal shares the job runs at {possessive} pace. {cause.sentence}",
        advice=advice,
        about=concerning(ranks),
    )


class _Cause(NamedTuple):
    """Why a rank is slow."""

    sentence: str
    """Without its full stop."""
    is_other_processes: bool = False
    """Whether other processes take the rank's CPU time, so that stopping them helps."""


def _cause_of_slowness(rank: CheckedRank, record: CheckRecord, matmul_speeds: Mapping[int, float]) -> _Cause:
    """The first cause that the measurements support: CPU quota, GPU clocks, busy cores, slow device.

    Args:
        rank: the slow rank.
        record: the check, for the CPU time of the other ranks.
        matmul_speeds: rank number -> relative speed of large matrix products, which use the device alone.
    """
    lacks_cpu_time = _lacks_cpu_time(rank, record.ranks)
    if rank.facts is not None and _cpu_throttled_share(rank) > _THROTTLED_SHARE and lacks_cpu_time:
        return _Cause(_quota_sentence(rank.facts.environment.cpu_quota_cores))

    gpu = _gpu_samples(rank)
    if gpu is not None and _gpu_throttled_share(rank) > _THROTTLED_SHARE:
        return _Cause(f"Its GPU slows its clocks: {listed(gpu.throttle_reasons)}")

    cpu_share = _cpu_share(rank) if _computes_on_cpu(rank) else None
    if cpu_share is not None and cpu_share < _SLOW_SPEED and lacks_cpu_time:
        sentence = f"It gets {cpu_share:.2f} of a core: other processes take the rest"
        return _Cause(sentence, is_other_processes=True)

    matmul_speed = matmul_speeds.get(rank.rank)
    if matmul_speed is None:
        return _Cause("Its matrix-multiply rate is unavailable")
    if matmul_speed < _SLOW_SPEED:
        return _Cause(f"Its matrix-multiply rate is {matmul_speed:.2f} of the others' too: the device is slower")
    return _Cause(f"Its matrix-multiply rate is {matmul_speed:.2f} of the others': something else takes its time")


def _lacks_cpu_time(rank: CheckedRank, ranks: Sequence[CheckedRank]) -> bool:
    """Whether the rank got clearly less CPU time than the rank with the most; True where either is unknown.

    A quota that gives all ranks the same makes none of them slower than the others.
    """
    own_share = _cpu_share(rank)
    other_shares = [_cpu_share(other) for other in ranks if other.rank != rank.rank]
    known_shares = [share for share in other_shares if share is not None]
    if own_share is None or not known_shares:
        return True
    return own_share < _SLOW_SPEED * max(known_shares)


def _quota_sentence(quota_cores: float | None) -> str:
    if quota_cores is None:
        return "Its CPU quota holds it back"
    return f"Its CPU quota of {quota_cores:g} cores holds it back"


def _share_advice(record: CheckRecord, slow_ranks: Sequence[int]) -> str:
    """Return the advice to leave slow ranks out, or to give them smaller shares of the batch."""
    pronoun = "it" if len(slow_ranks) == 1 else "them"
    advice = f"Leave {pronoun} out, or give smaller shares"
    speeds = checked_rank_speeds(record)
    if speeds is None or len(speeds) > _LONGEST_SPEED_LIST:
        return f"{advice} with rank_speeds in [train]"
    values = ", ".join(str(speed) for speed in speeds)
    return f"{advice}: in [train] rank_speeds = [{values}]"


def mixed_devices(record: CheckRecord) -> Iterable[Finding]:
    """Warns of ranks on different devices."""
    ranks_by_device: dict[str, list[int]] = {}
    for rank in record.ranks:
        if rank.facts is not None:
            ranks_by_device.setdefault(_device_name(rank), []).append(rank.rank)
    if len(ranks_by_device) < 2:
        return
    devices = listed([f"{device} ({ranks_named(ranks)})" for device, ranks in ranks_by_device.items()])
    yield warning(
        kind="mixed-devices",
        message=f"the ranks compute on unlike devices: {devices}; the slowest type sets the pace of every step, and "
        "the least memory the largest batch",
        advice="Use one type, or shares that follow the speeds (rank_speeds in [train])",
    )


def gpu_throttling(record: CheckRecord) -> Iterable[Finding]:
    """Warns of GPUs that slowed their clocks while they computed."""
    ranks = [rank for rank in record.ranks if _gpu_throttled_share(rank) > _THROTTLED_SHARE]
    if not ranks:
        return
    reasons: list[str] = []
    for rank in ranks:
        gpu = _gpu_samples(rank)
        if gpu is not None:
            reasons += [reason for reason in gpu.throttle_reasons if reason not in reasons]
    yield warning(
        kind="gpu-throttled",
        message=f"the GPU of {_numbers_and_hosts(ranks)} slows its clocks: {listed(reasons)}",
        advice=f"See to cooling and the power limit ({_vendor(ranks[0]).cause_command})",
        about=concerning(ranks),
    )


def cpu_throttling(record: CheckRecord) -> Iterable[Finding]:
    """Warns of ranks that a CPU quota held back while they computed."""
    ranks = [rank for rank in record.ranks if _cpu_throttled_share(rank) > _THROTTLED_SHARE]
    if not ranks:
        return
    largest_share = max(_cpu_throttled_share(rank) for rank in ranks)
    yield warning(
        kind="cpu-throttled",
        message=f"the CPU quota holds back {_numbers_and_hosts(ranks)}, by up to {largest_share:.2f} core-seconds per "
        "second",
        advice="Ask for a quota of as many cores as the ranks of a host compute with, or use fewer ranks or threads",
        about=concerning(ranks),
    )


def power_limits(record: CheckRecord) -> Iterable[Finding]:
    """Notes GPUs whose power limit is below the default, or was reached while they computed."""
    ranks_by_limit: dict[str, list[CheckedRank]] = {}
    for rank in record.ranks:
        limit = _notable_power_limit(rank)
        if limit is not None:
            ranks_by_limit.setdefault(limit, []).append(rank)
    for limit, ranks in ranks_by_limit.items():
        subject, verb = ("the GPU", "has") if len(ranks) == 1 else ("the GPUs", "have")
        yield note(
            kind="power-limit",
            message=f"{subject} of {_numbers_and_hosts(ranks)} {verb} {limit}",
            advice="Times belong to this limit: compare only GPUs with the same one "
            f"({_vendor(ranks[0]).power_limit_command} sets it)",
            about=concerning(ranks),
        )


def _notable_power_limit(rank: CheckedRank) -> str | None:
    """ "a power limit of 300 W, which was reached"; None where the limit is the default and was not reached."""
    settings = rank.facts.environment.device.settings if rank.facts is not None else None
    limit = settings.power_limit_watts if settings is not None else None
    default = settings.power_limit_default_watts if settings is not None else None
    name = "a power limit" if limit is None else f"a power limit of {limit:g} W"
    if limit is not None and default is not None and limit < default:
        return f"{name}, below the default of {default:g} W"
    gpu = _gpu_samples(rank)
    if gpu is not None and gpu.limits is not None and "power cap" in gpu.limits:
        return f"{name}, which was reached"
    return None


def unsteady(record: CheckRecord) -> Iterable[Finding]:
    """Notes ranks whose rate changes from one repeat to the next."""
    spreads: dict[int, float] = {}
    for rank in record.ranks:
        spread = _spread_over_repeats(rank)
        if spread is not None and spread > _UNSTEADY_SPREAD:
            spreads[rank.rank] = spread
    if not spreads:
        return
    yield note(
        kind="unsteady",
        message=f"the pace of {ranks_named(list(spreads))} varies by up to {100 * max(spreads.values()):.0f} % from "
        "one repeat to the next: other processes compute there too, or clocks change",
        advice=f"See what else runs there (top, {_vendor(record.ranks[0]).tool}), and check again; speeds are known no "
        "better than that",
        about=About(ranks=tuple(spreads)),
    )


def _spread_over_repeats(rank: CheckedRank) -> float | None:
    """(Fastest - slowest repeat) / the median of them; None where the rank computed nothing."""
    if rank.compute is None:
        return None
    repeats = rank.compute.pieces_per_second
    median = statistics.median(repeats)
    if median <= 0:
        return None
    return (max(repeats) - min(repeats)) / median


def clocks_differ(record: CheckRecord) -> Iterable[Finding]:
    """Warns of GPUs of one type that ran at different clocks under the same work."""
    clocks_by_device: dict[str, dict[int, float]] = {}
    for rank in record.ranks:
        gpu = _gpu_samples(rank)
        clock = gpu.sm_clock_mhz_median if gpu is not None else None
        if clock is not None and clock > 0:
            clocks_by_device.setdefault(_device_name(rank), {})[rank.rank] = clock
    for device, clocks in clocks_by_device.items():
        highest = max(clocks.values())
        lowest = min(clocks.values())
        slow_ranks = [rank for rank, clock in clocks.items() if clock < _SLOW_SPEED * highest]
        if slow_ranks:
            yield warning(
                kind="clocks-differ",
                message=f"{device}: {ranks_named(slow_ranks)} at {lowest:,.0f} MHz, others at {highest:,.0f} MHz under "
                "the same work",
                advice=f"Look for a lower power limit or locked clocks ({vendor_of_name(device).limits_command})",
                about=About(ranks=tuple(slow_ranks)),
            )


# The figures that the findings rest on


def _vendor(rank: CheckedRank) -> GpuVendor:
    """Return whose GPU a rank has."""
    return vendor_of_name(_device_name(rank))


def rates(ranks: Sequence[CheckedRank]) -> dict[int, float]:
    """Rank number -> pieces per second, the median over its repeats.

    Only ranks that computed the most common kind of work have one, because rates of unlike work do not compare; nor
    have ranks whose rate is 0.
    """
    compute_lines = {rank.rank: rank.compute for rank in ranks if rank.compute is not None}
    if not compute_lines:
        return {}
    kinds_of_work = Counter(line.work for line in compute_lines.values())
    most_common_work = kinds_of_work.most_common(1)[0][0]
    medians = {
        number: statistics.median(line.pieces_per_second)
        for number, line in sorted(compute_lines.items())
        if line.work == most_common_work
    }
    return {number: rate for number, rate in medians.items() if rate > 0}


def relative_speeds(rates: Mapping[int, float]) -> dict[int, float]:
    """Rank number -> its rate / the median rate of all other ranks; empty for a single rank.

    Example: {0: 100.0, 1: 100.0, 2: 50.0} gives 0.5 for rank 2, and 100 / 75 for ranks 0 and 1.
    """
    if len(rates) < 2:
        return {}
    ordered_rates = sorted(rates.values())
    speeds = {}
    for number, rate in sorted(rates.items()):
        position = bisect.bisect_left(ordered_rates, rate)
        speeds[number] = rate / _median_without(ordered_rates, position)
    return speeds


def _median_without(ordered_rates: Sequence[float], position: int) -> float:
    """The median of sorted rates without the one at `position`. It is fast, for a check may have thousands of ranks."""
    count = len(ordered_rates) - 1
    middle_positions = ((count - 1) // 2, count // 2)  # two of an even number of rates, one of an odd number twice
    middle_rates = []
    for middle in middle_positions:
        shifted = middle if middle < position else middle + 1
        middle_rates.append(ordered_rates[shifted])
    return statistics.fmean(middle_rates)


def checked_rank_speeds(record: CheckRecord) -> tuple[float, ...] | None:
    """Values for `train.rank_speeds`, in rank order, from the rates of a check; None where a rank has no rate."""
    rank_rates = rates(record.ranks)
    if set(rank_rates) != set(range(record.request.world.size)):
        return None
    return speeds_from_rates([rank_rates[number] for number in sorted(rank_rates)])


# What one rank tells


def _device_name(rank: CheckedRank) -> str:
    return rank.facts.environment.device.name if rank.facts is not None else "unavailable device"


def _computes_on_cpu(rank: CheckedRank) -> bool:
    return rank.facts is not None and rank.facts.environment.device.type == "cpu"


def _cpu_share(rank: CheckedRank) -> float | None:
    """CPU seconds per second that the rank's process got while it computed; None where unknown."""
    return rank.compute.cpu_share if rank.compute is not None else None


def _cpu_throttled_share(rank: CheckedRank) -> float:
    """Core-seconds per second for which a CPU quota held the rank back; 0 without a quota."""
    share = rank.compute.cpu_throttled_share if rank.compute is not None else None
    return share if share is not None else 0.0


def _gpu_samples(rank: CheckedRank) -> GpuSamples | None:
    """What was sampled of the rank's GPU while it computed; None without a GPU."""
    return rank.compute.gpu if rank.compute is not None else None


def _gpu_throttled_share(rank: CheckedRank) -> float:
    """Share of the samples in which the GPU slowed its clocks because of heat or a fault; 0 where unknown."""
    gpu = _gpu_samples(rank)
    share = gpu.throttled_share if gpu is not None else None
    return share if share is not None else 0.0


def _numbers_and_hosts(ranks: Sequence[CheckedRank]) -> str:
    """ "ranks 1 and 2 (node-a)"."""
    numbers = [rank.rank for rank in ranks]
    return f"{ranks_named(numbers)} ({listed(hosts_of(ranks))})"
