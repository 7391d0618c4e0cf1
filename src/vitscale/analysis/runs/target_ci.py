"""Is a trial's epoch time known as closely as the study asks (`measure.target_ci`), or does it need more runs?

Stopping as soon as an interval is narrow favours runs that agree by chance: where a limit of runs keeps most studies
from stopping at all, half of those that do stop miss the truth. So the runs that decide and those that tell the spread
are kept apart, as in Stein's two-stage procedure:

    the first m runs, m = 3, 4, ..., say how many it takes: the smallest N of m + 3 runs or more of which Student's
    interval is within the target if the spread is as large as these m allow at 80 %;
    from the first m on whose N is at most 2 m (or m + 3), N runs are made, whatever they say;
    the interval is around the mean of all N, with the spread that the runs after the m-th add.

Of log-normal effects that spread and the mean are independent of what was decided by, so that the interval holds the
truth in 95 % of the studies that stop, at any spread, target and limit. It may come out wider than was asked, and the
report then says so: to go on until it is not would be the old mistake. Simulated and recorded effects:
benchmarks/target_ci.py.

Sources: Stein, "A two-sample test for a linear hypothesis whose power is independent of the variance" (Annals of
Mathematical Statistics 16, 1945, 243-258); Hall, "Asymptotic theory of triple sampling for sequential estimation of a
mean" (Annals of Statistics 9, 1981, 1229-1238).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vitscale.analysis.statistics import t_quantile, variance
from vitscale.present.estimate import Estimate

if TYPE_CHECKING:
    from vitscale.analysis.trials import TrialResult

TargetStatus = Literal["reached", "open", "stopped", "failed", "untimed"]
"""reached: it has as many runs as its first ones asked for. open: another run is wanted. stopped: not reached with as
many runs as are allowed. failed: a run did not complete, so none is added. untimed: its runs tell no epoch time."""

FEWEST_LOOKED_AT = 3
FEWEST_AFTER = 3
_SPREAD_BOUND = 0.2
"""The spread is taken as large as it is exceeded in 20 % of cases; chosen with seed 7, tested with others."""


@dataclass(frozen=True)
class RunPlan:
    """How many runs a trial takes, and by how many of them this was decided."""

    looked: int
    runs: int


def run_plan(costs: Sequence[float], target_ci: float) -> RunPlan | None:
    """The number of runs that makes the interval about as narrow as asked; None where these cannot tell it yet.

    Args:
        costs: epoch seconds of the runs so far, in the order of the runs. More of them never change a plan.
        target_ci: how far the interval may reach from its centre, as a share of it.
    """
    logs = [math.log(cost) for cost in costs]
    for looked in range(FEWEST_LOOKED_AT, len(logs) + 1):
        spread = math.sqrt(variance(logs[:looked])) * _bound(looked - 1)
        least = looked + FEWEST_AFTER
        for runs in range(least, max(least, 2 * looked) + 1):
            # As `statistics.interval` counts its degrees of freedom.
            if t_quantile(runs - looked - 1) * spread / math.sqrt(runs) <= math.log1p(target_ci):
                return RunPlan(looked, runs)
    return None


def looked_at(costs: Sequence[float], target_ci: float | None) -> int:
    """How many first runs decided the number of runs; 0 where all of them stand for themselves."""
    plan = run_plan(costs, target_ci) if target_ci is not None else None
    return plan.looked if plan is not None and len(costs) >= plan.runs else 0


def half_width(interval: Estimate | None) -> float | None:
    """How far the 95 % interval reaches from its centre, as a share of it; of its two sides the longer one."""
    if interval is None or interval.low is None or interval.high is None:
        return None
    return max(interval.high - interval.value, interval.value - interval.low) / interval.value


def target_status(result: TrialResult, target_ci: float, max_repeats: int) -> TargetStatus:
    """How a trial stands, by those of its runs that may be combined."""
    if result.failures:
        return "failed"
    if result.runs and not result.epoch_costs:
        return "untimed"
    if looked_at(result.epoch_costs, target_ci):
        return "reached"
    return "stopped" if result.runs_done >= max_repeats else "open"


@functools.cache
def _bound(freedom: int) -> float:
    """What a standard deviation is multiplied by for its upper bound."""
    from scipy.special import chdtri  # a third of a second to import, and only needed here

    return math.sqrt(freedom / float(chdtri(freedom, 1 - _SPREAD_BOUND)))
