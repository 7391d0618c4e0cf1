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
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vitscale.analysis.runs.environments import environments
from vitscale.analysis.statistics import FEWEST_REPEATS, f_above, interval, mean_interval, t_quantile, variance
from vitscale.present.estimate import Estimate
from vitscale.store.results import Run

_POOLING_P = 0.25
"""P-value of the F test above which runs of different allocations count as alike. Far above 5 %: with a few runs each
the test sees little, and runs that are wrongly pooled make an interval too narrow."""

Clusters = Sequence[Sequence[int]] | None
"""The runs of each observation, by their index among the runs of a trial; None: each run is an observation.

Example: ((0, 1), (2,)) are two observations of three runs.
"""


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
        return self.p < _POOLING_P


def allocation_of(run: Run) -> str:
    """Return the batch system's job and the hosts of a run: "job 17, node-1, node-2"; empty if unknown."""
    ranks = environments(run)
    jobs = dict.fromkeys(rank.allocation for rank in ranks if rank.allocation is not None)
    hosts = sorted({rank.host for rank in ranks})
    return ", ".join((*jobs, *hosts))


def groups(allocations: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the indices of the runs of each allocation, in the order in which the allocations first occur.

    Example: ["a", "b", "a"] gives ((0, 2), (1,)).

    Args:
        allocations: the allocation of each run (`allocation_of`).
    """
    runs_by_allocation: dict[str, list[int]] = {}
    for run, allocation in enumerate(allocations):
        runs_by_allocation.setdefault(allocation, []).append(run)
    return tuple(tuple(runs) for runs in runs_by_allocation.values())


def clusters_of(
    runs: int, by_allocation: tuple[tuple[int, ...], ...], spread: Components | None
) -> tuple[tuple[int, ...], ...]:
    """Return the runs of each observation: an allocation's runs where allocations differ, else each run alone."""
    if spread is not None and spread.clustered:
        return by_allocation
    return tuple((run,) for run in range(runs))


def components(costs: Sequence[Sequence[float]]) -> Components | None:
    """Return the components of the spread, by the analysis of variance of the logarithms.

    With k allocations of n_i runs, N together, MSB and MSW the mean squares between and within them, the variances are
    between = (MSB - MSW) / n0, n0 = (N - sum of n_i^2 / N) / (k - 1), within = MSW; the test is on F = MSB / MSW.

    Args:
        costs: positive costs of the runs of each allocation.

    Returns:
        None where there is one allocation, or none has 2 runs.
    """
    allocations = [_Allocation.of(allocation_costs) for allocation_costs in costs if allocation_costs]
    count = len(allocations)
    runs = sum(len(allocation.logs) for allocation in allocations)
    if not 1 < count < runs:
        return None
    mean = statistics.fmean(itertools.chain.from_iterable(allocation.logs for allocation in allocations))
    squares_between = sum(len(allocation.logs) * (allocation.mean - mean) ** 2 for allocation in allocations)
    squares_within = sum(itertools.chain.from_iterable(allocation.squares for allocation in allocations))
    mean_square_between = squares_between / (count - 1)
    mean_square_within = squares_within / (runs - count)
    typical_runs = (runs - sum(len(allocation.logs) ** 2 for allocation in allocations) / runs) / (count - 1)  # n0
    between = math.sqrt(max(0.0, mean_square_between - mean_square_within) / typical_runs)
    if mean_square_within == 0:
        return Components(between, within=0.0, p=0.0 if mean_square_between > 0 else 1.0)
    p = f_above(count - 1, runs - count, mean_square_between / mean_square_within)
    return Components(between, math.sqrt(mean_square_within), p)


class _Allocation(NamedTuple):
    """The logarithms of the costs of an allocation's runs, at least one, and their mean."""

    logs: list[float]
    mean: float

    @classmethod
    def of(cls, costs: Sequence[float]) -> _Allocation:
        """Take the logarithms of positive costs."""
        logs = [math.log(cost) for cost in costs]
        return cls(logs, statistics.fmean(logs))

    @property
    def squares(self) -> list[float]:
        """Squared deviations of the runs from the allocation's mean."""
        return [(log - self.mean) ** 2 for log in self.logs]


def observations(
    values: Sequence[float | None], clusters: Clusters, mean: Callable[[list[float]], float] = statistics.geometric_mean
) -> list[float]:
    """Return one value per observation: the mean of the known values of its runs; lacks observations without any.

    Args:
        values: the value of each run; None where it is unknown.
        clusters: the runs of each observation.
        mean: of the values of one observation; the geometric mean needs them positive.
    """
    if clusters is None:
        return [value for value in values if value is not None]
    observed = []
    for cluster in clusters:
        values_of_cluster = [values[run] for run in cluster]
        known_values = [value for value in values_of_cluster if value is not None]
        if len(known_values) == 1:
            observed.append(known_values[0])  # exactly: a geometric mean of one value is off in the last digit
        elif known_values:
            observed.append(mean(known_values))
    return observed


def over_runs(values: Sequence[float | None], clusters: Clusters, deciding_runs: int = 0) -> Estimate | None:
    """Return the mean of a figure over the runs of a trial, with its 95 % interval; None where no run has the figure.

    It is a geometric mean, or an arithmetic mean where a run has 0. The interval needs 3 observations.

    Args:
        values: the value of each run, not negative; None where it is unknown.
        clusters: the runs that count together as one observation, as those of one allocation may; see `Clusters`.
        deciding_runs: how many of the first runs decided how many runs were made (`run_plan`). It is to be stated for
            figures that follow the time of a step, on which they decided: the interval then rests on the spread of the
            later runs. 0: the number of runs was fixed before, or the figure had no part in it.
    """
    all_are_positive = all(value is None or value > 0 for value in values)
    if all_are_positive:
        observed = observations(values, clusters, statistics.geometric_mean)
        return interval(observed, deciding_runs=deciding_runs, fewest=FEWEST_REPEATS) if observed else None
    # A geometric mean has no zeros, and times of 0 are not log-normal.
    observed = observations(values, clusters, statistics.fmean)
    return mean_interval(observed) if observed else None


FEWEST_DECIDING_RUNS = 3
"""Fewest first runs that may decide how many runs there are: m of the module's docstring."""
FEWEST_RUNS_AFTER_DECISION = 3
"""Fewest runs that follow them."""
_SPREAD_BOUND_CHANCE = 0.2
"""Chance that the spread is larger than the bound taken for it; chosen with seed 7, tested with others."""


@dataclass(frozen=True)
class RunPlan:
    """How many runs a trial takes, and how many of the first runs decided this."""

    deciding_runs: int
    """Number of first runs that decided it: m of the module's docstring."""
    runs: int
    """Number of runs in all: N of the module's docstring."""


def run_plan(costs: Sequence[float], target_ci: float) -> RunPlan | None:
    """Return the number of runs that makes the interval about as narrow as asked; None where it needs more first runs.

    Args:
        costs: epoch seconds of the runs so far, in the order of the runs. More runs never change a plan.
        target_ci: how far the interval may reach from its centre, as a share of it.
    """
    logs = [math.log(cost) for cost in costs]
    for deciding_runs in range(FEWEST_DECIDING_RUNS, len(logs) + 1):  # m of the module's docstring
        largest_spread = math.sqrt(variance(logs[:deciding_runs])) * _spread_bound_factor(deciding_runs - 1)
        fewest_runs = deciding_runs + FEWEST_RUNS_AFTER_DECISION
        most_runs = max(fewest_runs, 2 * deciding_runs)
        for runs in range(fewest_runs, most_runs + 1):  # N of the module's docstring
            freedom = runs - deciding_runs - 1  # counted as in `statistics.interval`
            log_half_width = t_quantile(freedom) * largest_spread / math.sqrt(runs)
            if log_half_width <= math.log1p(target_ci):
                return RunPlan(deciding_runs, runs)
    return None


def count_deciding_runs(costs: Sequence[float], target_ci: float | None) -> int:
    """Return how many first runs decided the number of runs, where as many runs were made as they asked for; else 0.

    Args:
        costs: epoch seconds of the runs so far, in the order of the runs.
        target_ci: as for `run_plan`; None where the study has none.
    """
    if target_ci is None:
        return 0
    plan = run_plan(costs, target_ci)
    if plan is None or len(costs) < plan.runs:
        return 0
    return plan.deciding_runs


def half_width(interval: Estimate | None) -> float | None:
    """Return how far the 95 % interval reaches from its centre on the longer side, as a share of the centre.

    None without an interval.
    """
    if interval is None or interval.low is None or interval.high is None:
        return None
    return max(interval.high - interval.value, interval.value - interval.low) / interval.value


@functools.cache
def _spread_bound_factor(freedom: int) -> float:
    """Return the factor from a standard deviation with so many degrees of freedom to its upper bound."""
    from scipy.special import chdtri  # here, as in `analysis.statistics`

    return math.sqrt(freedom / float(chdtri(freedom, 1 - _SPREAD_BOUND_CHANCE)))
