"""How fast ranks compute, one against the others."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from math import ceil, floor

from vitscale.store.check_records import CheckedRank, CheckRecord

_DECIMALS = 2


def rates(ranks: Sequence[CheckedRank]) -> dict[int, float]:
    """Pieces of the fixed work per second, the median over repeats, of each rank that measured it; same work only."""
    told = {rank.rank: rank.compute for rank in ranks if rank.compute is not None}
    kinds = [line.work for line in told.values()]
    usual = max(kinds, key=kinds.count, default="")
    return {
        rank: rate
        for rank, line in sorted(told.items())
        if line.work == usual and (rate := statistics.median(line.pieces_per_second)) > 0
    }


def against_others(found: Mapping[int, float]) -> dict[int, float]:
    """Each rank's rate / the median rate of all other ranks; empty for one rank."""
    if len(found) < 2:
        return {}
    ordered = sorted(found, key=lambda rank: found[rank])
    middle = (len(ordered) - 2) / 2  # of the others, who are one fewer
    relative = {}
    for place, rank in enumerate(ordered):
        two = (floor(middle), ceil(middle))
        others = statistics.fmean(found[ordered[n if n < place else n + 1]] for n in two)
        relative[rank] = found[rank] / others
    return dict(sorted(relative.items()))


def rank_speeds(record: CheckRecord) -> tuple[float, ...] | None:
    """For `train.rank_speeds`: each rank's rate / that of the fastest, in rank order; None where a rank is missing."""
    found = rates(record.ranks)
    if set(found) != set(range(record.request.world.size)):
        return None
    fastest = max(found.values())
    return tuple(max(round(rate / fastest, _DECIMALS), 10**-_DECIMALS) for _, rate in sorted(found.items()))
