"""Where the runs of a trial were made, and how much of their spread lies between allocations.

Repeats in one allocation of a cluster share its nodes, their neighbours and their temperature: their interval does not
cover what another allocation would give. Where runs come from several, a one-way random-effects analysis of variance
tells the two spreads apart, and where allocations differ an allocation counts as one observation, not each of its runs.

Sources: Searle, Casella & McCulloch, "Variance Components" (Wiley, 1992), chapter 3; Bancroft, "On biases in estimation
due to the use of preliminary tests of significance" (Annals of Mathematical Statistics 15, 1944, 190-204).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vitscale.analysis.runs.environments import environments
from vitscale.analysis.statistics import FEWEST_REPEATS, interval, mean_interval
from vitscale.analysis.student_t import f_above
from vitscale.present.estimate import Estimate
from vitscale.store.results import Run

_POOLED_ABOVE = 0.25
"""P-value of the F test above which runs of different allocations count as alike. Far above 5 %: with a few runs each
the test sees little, and runs that are wrongly pooled make an interval too narrow."""

Clusters = Sequence[Sequence[int]] | None
"""The runs of each observation, by their place among the runs of a trial; None: each is one."""


@dataclass(frozen=True)
class Components:
    """The spread of a trial's epoch times, as standard deviations of their logarithms: of small ones shares."""

    between: float
    """Of allocations. 0 where they differ by no more than the runs inside them."""
    within: float
    """Of runs inside an allocation."""
    p: float
    """Of the F test that allocations do not differ."""

    @property
    def clustered(self) -> bool:
        """Whether an allocation counts as one observation."""
        return self.p < _POOLED_ABOVE


def allocation_of(run: Run) -> str:
    """The batch system's job and the hosts that a run was made in; empty where the record does not tell."""
    of_ranks = environments(run)
    names = dict.fromkeys(rank.allocation for rank in of_ranks if rank.allocation is not None)
    return ", ".join((*names, *sorted({rank.host for rank in of_ranks})))


def groups(places: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The places in `places` of equal names, in the order of their first: what `allocation_of` says of each run."""
    return tuple(tuple(i for i, name in enumerate(places) if name == each) for each in dict.fromkeys(places))


def clusters_of(
    runs: int, by_allocation: tuple[tuple[int, ...], ...], spread: Components | None
) -> tuple[tuple[int, ...], ...]:
    """The runs of each observation: an allocation with its runs where allocations differ, else each run."""
    return by_allocation if spread is not None and spread.clustered else tuple((run,) for run in range(runs))


def components(costs: Sequence[Sequence[float]]) -> Components | None:
    """The components of the spread, by the analysis of variance of the logarithms.

    With k allocations of n_i runs, N together, MSB and MSW the mean squares between and within them:
    between = (MSB - MSW) / n0, n0 = (N - sum of n_i^2 / N) / (k - 1), within = MSW, F = MSB / MSW.

    Args:
        costs: of each allocation the cost of each run, positive.

    Returns:
        None where fewer than 2 allocations have 2 runs or more.
    """
    logs = [[math.log(cost) for cost in some] for some in costs if some]
    if sum(len(some) > 1 for some in logs) < 2:
        return None
    count, runs = len(logs), sum(map(len, logs))
    mean = statistics.fmean(log for some in logs for log in some)
    squares_between = sum(len(some) * (statistics.fmean(some) - mean) ** 2 for some in logs) / (count - 1)
    squares_within = sum((log - statistics.fmean(some)) ** 2 for some in logs for log in some) / (runs - count)
    typical = (runs - sum(len(some) ** 2 for some in logs) / runs) / (count - 1)
    between = math.sqrt(max(0.0, squares_between - squares_within) / typical)
    if squares_within == 0:
        return Components(between, 0.0, 0.0 if squares_between > 0 else 1.0)
    p = f_above(count - 1, runs - count, squares_between / squares_within)
    return Components(between, math.sqrt(squares_within), p)


def observations(
    values: Sequence[float | None], clusters: Clusters, mean: Callable[[list[float]], float] = statistics.geometric_mean
) -> list[float]:
    """One value per cluster of runs: the mean of those that are known, which for the geometric mean are positive."""
    own = [[run] for run in range(len(values))] if clusters is None else clusters
    known = [[value for run in cluster if (value := values[run]) is not None] for cluster in own]
    return [some[0] if len(some) == 1 else mean(some) for some in known if some]


def over_runs(values: Sequence[float | None], clusters: Clusters) -> Estimate | None:
    """The figure of a trial from one value per run, none negative; None where no run has it.

    As `statistics.interval` of one value per cluster, and where a run has 0 as `mean_interval`; no bounds from fewer
    than 3 of them.
    """
    positive = all(value is None or value > 0 for value in values)
    known = observations(values, clusters, statistics.geometric_mean if positive else statistics.fmean)
    if not known:
        return None
    return interval(known, fewest=FEWEST_REPEATS) if positive else mean_interval(known)
