"""The runs of a trial: how much of their spread lies between allocations, and how many are enough.

Repeats in one allocation of a cluster share its nodes, their neighbours and their temperature: their interval does not
cover what another allocation would give. Where runs come from several allocations, a one-way random-effects analysis of
variance tells the two spreads apart. Where allocations differ, each counts as one observation, not each run.

Sources: Searle, Casella & McCulloch, "Variance Components" (Wiley, 1992), chapter 3; Bancroft, "On biases in estimation
due to the use of preliminary tests of significance" (Annals of Mathematical Statistics 15, 1944, 190-204).

The other question: is a trial's epoch time known as closely as the study asks (`measure.target_ci`)?

Stopping as soon as an interval is narrow favours runs that agree by chance: where a limit on runs keeps most studies
from stopping at all, half of those that do stop miss the truth. So the runs that decide and those that estimate the
spread are kept apart, as in Stein's two-stage procedure:

    the first m runs, m = 3, 4, ..., tell how many it takes: the smallest N of m + 3 or more whose Student's interval is
    within the target if the spread is as large as these m allow at 80 %;
    as soon as this N is at most 2 m (or m + 3), N runs are made, whatever they say;
    the interval is around the mean of all N, with the spread that the runs after the m-th add.

For log-normal effects that spread and the mean are independent of what the decision rested on, so that the interval
holds the truth in 95 % of the studies that stop, at any spread, target and limit. It may come out wider than was asked,
and the report then says so: going on until it is narrow would be the old mistake. Simulated and recorded effects:
benchmarks/target_ci.py.

Sources: Stein, "A two-sample test for a linear hypothesis whose power is independent of the variance" (Annals of
Mathematical Statistics 16, 1945, 243-258); Hall, "Asymptotic theory of triple sampling for sequential estimation of a
mean" (Annals of Statistics 9, 1981, 1229-1238).
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vitscale.analysis.runs.environments import environments
from vitscale.analysis.statistics import FEWEST_REPEATS, f_above, interval, mean_interval, t_quantile, variance
from vitscale.present.estimate import Estimate
from vitscale.store.results import Run

_POOLED_ABOVE = 0.25
"""P-value of the F test above which runs of different allocations count as alike. Far above 5 %: with a few runs each
the test sees little, and runs that are wrongly pooled make an interval too narrow."""

Clusters = Sequence[Sequence[int]] | None
"""Runs of each observation, by their place among the runs of a trial; None: each run is one."""


@dataclass(frozen=True)
class Components:
    """The spread of a trial's epoch times, as standard deviations of their logarithms; small ones are shares."""

    between: float
    """Spread of allocations; 0 where they differ by no more than the runs inside them."""
    within: float
    """Spread of runs inside an allocation."""
    p: float
    """P-value of the F test that allocations do not differ."""

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
    """The places of each name in `places` (`allocation_of` each run), in the order in which the names first occur."""
    return tuple(tuple(i for i, name in enumerate(places) if name == each) for each in dict.fromkeys(places))


def clusters_of(
    runs: int, by_allocation: tuple[tuple[int, ...], ...], spread: Components | None
) -> tuple[tuple[int, ...], ...]:
    """The runs of each observation: an allocation's runs where allocations differ, else each run alone."""
    return by_allocation if spread is not None and spread.clustered else tuple((run,) for run in range(runs))


def components(costs: Sequence[Sequence[float]]) -> Components | None:
    """The components of the spread, by the analysis of variance of the logarithms.

    With k allocations of n_i runs, N together, MSB and MSW the mean squares between and within them:
    between = (MSB - MSW) / n0, n0 = (N - sum of n_i^2 / N) / (k - 1), within = MSW, F = MSB / MSW.

    Args:
        costs: positive costs of the runs of each allocation.

    Returns:
        None where there is one allocation, or none has 2 runs.
    """
    logs = [[math.log(cost) for cost in some] for some in costs if some]
    count, runs = len(logs), sum(map(len, logs))
    if not 1 < count < runs:
        return None
    mean = statistics.fmean(log for some in logs for log in some)
    squares_between = sum(len(some) * (statistics.fmean(some) - mean) ** 2 for some in logs) / (count - 1)
    apart = (log - own for some in logs for own in [statistics.fmean(some)] for log in some)
    squares_within = sum(residual**2 for residual in apart) / (runs - count)
    typical = (runs - sum(len(some) ** 2 for some in logs) / runs) / (count - 1)
    between = math.sqrt(max(0.0, squares_between - squares_within) / typical)
    if squares_within == 0:
        return Components(between, 0.0, 0.0 if squares_between > 0 else 1.0)
    p = f_above(count - 1, runs - count, squares_between / squares_within)
    return Components(between, math.sqrt(squares_within), p)


def observations(
    values: Sequence[float | None], clusters: Clusters, mean: Callable[[list[float]], float] = statistics.geometric_mean
) -> list[float]:
    """One value per cluster of runs: the mean of its known values, which the geometric mean needs positive."""
    own = [[run] for run in range(len(values))] if clusters is None else clusters
    known = [[value for run in cluster if (value := values[run]) is not None] for cluster in own]
    return [some[0] if len(some) == 1 else mean(some) for some in known if some]


def over_runs(values: Sequence[float | None], clusters: Clusters, looked: int = 0) -> Estimate | None:
    """The figure of a trial from one value per run, none negative; None where no run has it.

    It is `statistics.interval` of one value per cluster, or `mean_interval` where a run has 0. There are no bounds from
    fewer than 3 values. `looked`, as for `statistics.interval`: of figures that follow the time of a step.
    """
    positive = all(value is None or value > 0 for value in values)
    known = observations(values, clusters, statistics.geometric_mean if positive else statistics.fmean)
    if not known:
        return None
    return interval(known, looked=looked, fewest=FEWEST_REPEATS) if positive else mean_interval(known)


FEWEST_LOOKED_AT = 3
FEWEST_AFTER = 3
_SPREAD_BOUND = 0.2
"""Chance that the spread is larger than the bound taken for it; chosen with seed 7, tested with others."""


@dataclass(frozen=True)
class RunPlan:
    """How many runs a trial takes, and how many of the first runs decided this."""

    looked: int
    runs: int


def run_plan(costs: Sequence[float], target_ci: float) -> RunPlan | None:
    """The number of runs that makes the interval about as narrow as asked; None where these runs cannot tell it yet.

    Args:
        costs: epoch seconds of the runs so far, in the order of the runs. More runs never change a plan.
        target_ci: how far the interval may reach from its centre, as a share of it.
    """
    logs = [math.log(cost) for cost in costs]
    for looked in range(FEWEST_LOOKED_AT, len(logs) + 1):
        spread = math.sqrt(variance(logs[:looked])) * _bound(looked - 1)
        least = looked + FEWEST_AFTER
        for runs in range(least, max(least, 2 * looked) + 1):
            # Degrees of freedom are counted as in `statistics.interval`.
            if t_quantile(runs - looked - 1) * spread / math.sqrt(runs) <= math.log1p(target_ci):
                return RunPlan(looked, runs)
    return None


def looked_at(costs: Sequence[float], target_ci: float | None) -> int:
    """How many first runs decided the number of runs; 0 where none did."""
    plan = run_plan(costs, target_ci) if target_ci is not None else None
    return plan.looked if plan is not None and len(costs) >= plan.runs else 0


def half_width(interval: Estimate | None) -> float | None:
    """How far the 95 % interval reaches from its centre on the longer side, as a share of the centre."""
    if interval is None or interval.low is None or interval.high is None:
        return None
    return max(interval.high - interval.value, interval.value - interval.low) / interval.value


@functools.cache
def _bound(freedom: int) -> float:
    """The factor from a standard deviation to its upper bound."""
    from scipy.special import chdtri  # here, as in `analysis.statistics`

    return math.sqrt(freedom / float(chdtri(freedom, 1 - _SPREAD_BOUND)))
