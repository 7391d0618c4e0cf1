"""Do all ranks compute at the same pace? If not, which are slow, and why?"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from math import ceil, floor

from vitscale.preflight.verdict import concerning, hosts_of, note, ranks_named, warning
from vitscale.present.document import About, Finding
from vitscale.present.units import listed
from vitscale.store.checks import CheckedRank, CheckRecord

_SLOW = 0.9
"""A rank below this share of the others' pace is slow."""
_UNSTEADY = 0.15
_THROTTLED = 0.01
"""Share of the time above which throttling is told."""
_TAKEN = "other processes take the rest"
_MOST_SPEEDS = 64


def slow_ranks(record: CheckRecord) -> Iterable[Finding]:
    """Ranks well below the others' pace in every repeat; ranks alike share a finding."""
    pieces_per_second = rates(record.ranks)
    relative = against_others(pieces_per_second)
    alike: dict[tuple[str, str], list[CheckedRank]] = {}
    for rank in record.ranks:
        pace = relative.get(rank.rank)
        if pace is None or pace >= _SLOW or rank.compute is None:
            continue
        # A rank with one repeat at the others' pace was disturbed in its other repeats, which `unsteady` tells.
        # Multiplied instead of divided, because a pace can be so small that it is 0.
        if max(rank.compute.pieces_per_second) * pace < pieces_per_second[rank.rank]:
            alike.setdefault((_device(rank), f"{pace:.2f}"), []).append(rank)
    multiplied = against_others({r.rank: r.matmul.flops_per_second for r in record.ranks if r.matmul is not None})
    for (device, at), slow in sorted(alike.items(), key=lambda item: item[0][1]):
        numbers = [rank.rank for rank in slow]
        verb = "computes" if len(slow) == 1 else "compute"
        whose = "its" if len(slow) == 1 else "their"
        why = _why(slow[0], record, multiplied)
        disturbed = why.endswith(_TAKEN)
        yield warning(
            "slow-rank",
            f"{ranks_named(numbers)} ({device}, {listed(hosts_of(slow))}) {verb} at {at} of the others: with equal "
            f"shares the job runs at {whose} pace. {why}",
            "Stop what else runs there, and check again" if disturbed else _share_advice(record, numbers),
            concerning(slow),
        )


def _why(rank: CheckedRank, record: CheckRecord, multiplied: Mapping[int, float]) -> str:
    """Why a slow rank is slow, as far as was measured."""
    compute = rank.compute
    others = [each.compute.cpu_share for each in record.ranks if each.compute is not None and each.rank != rank.rank]
    most = max((share for share in others if share is not None), default=None)
    own_share = compute.cpu_share if compute is not None else None
    # A quota that gives all ranks the same makes none slower than the others.
    lacks_cpu = own_share is None or most is None or own_share < _SLOW * most
    throttled_share = (compute.cpu_throttled_share or 0.0) if compute is not None else 0.0
    if throttled_share > _THROTTLED and rank.facts is not None and lacks_cpu:
        quota = rank.facts.environment.cpu_quota_cores
        return f"Its CPU quota of {quota:g} cores holds it back" if quota is not None else "Its CPU quota holds it back"
    if compute is not None and compute.gpu is not None and (compute.gpu.throttled_share or 0.0) > _THROTTLED:
        return f"Its GPU slows its clocks: {listed(compute.gpu.throttle_reasons)}"
    on_cpu = rank.facts is not None and rank.facts.environment.device.type == "cpu"
    if own_share is not None and on_cpu and own_share < _SLOW and lacks_cpu:
        return f"It gets {own_share:.2f} of a core: {_TAKEN}"
    own = multiplied.get(rank.rank)
    if own is None:
        return "Its matrix-multiply rate is unavailable"
    if own < _SLOW:
        return f"Its matrix-multiply rate is {own:.2f} of the others' too: the device is slower"
    return f"Its matrix-multiply rate is {own:.2f} of the others': something else takes its time"


def _share_advice(record: CheckRecord, slow: list[int]) -> str:
    without = f"Leave {'it' if len(slow) == 1 else 'them'} out, or give smaller shares"
    speeds = rank_speeds(record)
    if speeds is None or len(speeds) > _MOST_SPEEDS:
        return f"{without} with rank_speeds in [train]"
    return f"{without}: in [train] rank_speeds = [{', '.join(map(str, speeds))}]"


def mixed_devices(record: CheckRecord) -> Iterable[Finding]:
    """Ranks on different devices."""
    by_device: dict[str, list[CheckedRank]] = {}
    for rank in record.ranks:
        if rank.facts is not None:
            by_device.setdefault(_device(rank), []).append(rank)
    if len(by_device) > 1:
        each = listed([f"{name} ({ranks_named([r.rank for r in ranks])})" for name, ranks in by_device.items()])
        yield warning(
            "mixed-devices",
            f"the ranks compute on unlike devices: {each}; the slowest type sets the pace of every step, and the least "
            "memory the largest batch",
            "Use one type, or shares that follow the speeds (rank_speeds in [train])",
        )


def throttled(record: CheckRecord) -> Iterable[Finding]:
    """GPUs that slowed their clocks, and ranks that a CPU quota held back, while they computed."""
    hot = {
        rank.rank: rank
        for rank in record.ranks
        if rank.compute is not None and rank.compute.gpu is not None
        and (rank.compute.gpu.throttled_share or 0.0) > _THROTTLED
    }  # fmt: skip
    if hot:
        reasons = [
            reason for r in hot.values() if r.compute and r.compute.gpu for reason in r.compute.gpu.throttle_reasons
        ]
        yield warning(
            "gpu-throttled",
            f"the GPU of {ranks_named([*hot])} ({listed(hosts_of(hot.values()))}) slows its clocks: "
            f"{listed(list(dict.fromkeys(reasons)))}",
            "See to cooling and the power limit (nvidia-smi -q -d PERFORMANCE)",
            concerning(hot.values()),
        )
    held = {r.rank: r for r in record.ranks if r.compute and (r.compute.cpu_throttled_share or 0.0) > _THROTTLED}
    if held:
        most = max(rank.compute.cpu_throttled_share or 0.0 for rank in held.values() if rank.compute)
        yield warning(
            "cpu-throttled",
            f"the CPU quota holds back {ranks_named([*held])} ({listed(hosts_of(held.values()))}), by up to "
            f"{most:.2f} core-seconds per second",
            "Ask for a quota of as many cores as the ranks of a host compute with, or use fewer ranks or threads",
            concerning(held.values()),
        )


def power_limits(record: CheckRecord) -> Iterable[Finding]:
    """GPUs whose power limit is below the default, or was reached while they computed."""
    limits: dict[str, list[CheckedRank]] = {}
    for rank in record.ranks:
        settings = rank.facts.environment.device.settings if rank.facts is not None else None
        limit, default = (settings.power_limit_watts, settings.power_limit_default_watts) if settings else (None, None)
        samples = rank.compute.gpu if rank.compute is not None else None
        of = f" of {limit:g} W" if limit is not None else ""
        if limit is not None and default is not None and limit < default:
            limits.setdefault(f"a power limit{of}, below the default of {default:g} W", []).append(rank)
        elif samples is not None and "power cap" in (samples.limits or ()):
            limits.setdefault(f"a power limit{of}, which was reached", []).append(rank)
    for said, ranks in limits.items():
        numbers = [rank.rank for rank in ranks]
        yield note(
            "power-limit",
            f"the GPU{'s' if len(numbers) > 1 else ''} of {ranks_named(numbers)} ({listed(hosts_of(ranks))}) "
            f"{'have' if len(numbers) > 1 else 'has'} {said}",
            "Times belong to this limit: compare only GPUs with the same one (nvidia-smi -pl sets it)",
            concerning(ranks),
        )


def unsteady(record: CheckRecord) -> Iterable[Finding]:
    """Ranks whose pace changes from one repeat to the next."""
    worst = {}
    for rank in record.ranks:
        if rank.compute is not None and (middle := statistics.median(rank.compute.pieces_per_second)) > 0:
            spread = (max(rank.compute.pieces_per_second) - min(rank.compute.pieces_per_second)) / middle
            if spread > _UNSTEADY:
                worst[rank.rank] = spread
    if worst:
        yield note(
            "unsteady",
            f"the pace of {ranks_named([*worst])} varies by up to {100 * max(worst.values()):.0f} % from one repeat to "
            "the next: other processes compute there too, or clocks change",
            "See what else runs there (top, nvidia-smi), and check again; speeds are known no better than that",
            About(ranks=tuple(worst)),
        )


def clocks_differ(record: CheckRecord) -> Iterable[Finding]:
    """GPUs of one type at different clocks under the same work."""
    clocks: dict[str, dict[int, float]] = {}
    for rank in record.ranks:
        if rank.compute is not None and rank.compute.gpu is not None:
            clock = rank.compute.gpu.sm_clock_mhz_median
            if clock is not None and clock > 0:
                clocks.setdefault(_device(rank), {})[rank.rank] = clock
    for device, by_rank in clocks.items():
        highest = max(by_rank.values())
        low = [rank for rank, clock in by_rank.items() if clock < _SLOW * highest]
        if low:
            yield warning(
                "clocks-differ",
                f"{device}: {ranks_named(low)} at {min(by_rank.values()):,.0f} MHz, others at {highest:,.0f} MHz under "
                "the same work",
                "Look for a lower power limit or locked clocks (nvidia-smi -q -d CLOCK,POWER)",
                About(ranks=tuple(low)),
            )


def _device(rank: CheckedRank) -> str:
    return rank.facts.environment.device.name if rank.facts is not None else "unavailable device"


_DECIMALS = 2


def rates(ranks: Sequence[CheckedRank]) -> dict[int, float]:
    """Each rank's pieces of the fixed work per second, median over repeats; only ranks with the most common work."""
    told = {rank.rank: rank.compute for rank in ranks if rank.compute is not None}
    kinds = [line.work for line in told.values()]
    usual = max(kinds, key=kinds.count, default="")
    return {
        rank: rate
        for rank, line in sorted(told.items())
        if line.work == usual and (rate := statistics.median(line.pieces_per_second)) > 0
    }


def against_others(pieces_per_second: Mapping[int, float]) -> dict[int, float]:
    """Each rank's rate over the median rate of all other ranks; empty for one rank."""
    if len(pieces_per_second) < 2:
        return {}
    ordered = sorted(pieces_per_second, key=lambda rank: pieces_per_second[rank])
    middle = (len(ordered) - 2) / 2  # index of the median among the others, which are one fewer
    relative = {}
    for at, rank in enumerate(ordered):
        two = (floor(middle), ceil(middle))
        others = statistics.fmean(pieces_per_second[ordered[n if n < at else n + 1]] for n in two)
        relative[rank] = pieces_per_second[rank] / others
    return dict(sorted(relative.items()))


def rank_speeds(record: CheckRecord) -> tuple[float, ...] | None:
    """Values for `train.rank_speeds`: rates over the fastest rank's, in rank order; None where a rank is missing."""
    pieces_per_second = rates(record.ranks)
    if set(pieces_per_second) != set(range(record.request.world.size)):
        return None
    fastest = max(pieces_per_second.values())
    return tuple(max(round(rate / fastest, _DECIMALS), 10**-_DECIMALS) for _, rate in sorted(pieces_per_second.items()))
