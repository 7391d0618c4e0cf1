"""The cheapest of several trials, and its cost corrected for having been chosen.

The smallest of several means is too small: of ten equal trials the one that happened to run fastest is taken, and its
mean keeps that luck. Two corrections, both on the logarithms of the costs, in which noise is taken for normal:

    the interval   the hybrid conditional one of Andrews, Kitagawa & McCloskey, "Inference on Winners" (Quarterly
                   Journal of Economics 139, 2024, 305-358), section 5. Given that the winner beat the runner-up, its
                   mean follows a normal distribution cut off at the runner-up's. The interval holds all true costs
                   under which the observed mean is in the middle 95 % of that, within a wider simultaneous interval.
    the cost       the observed mean less its bias, by the parametric bootstrap (Efron & Tibshirani, "An Introduction to
                   the Bootstrap", 1993, chapter 10): what the winner of new runs would be too small by. The means that
                   new runs scatter around are drawn towards each other first, so that they scatter no more than true
                   ones do (Louis, "Estimating a population of parameter values using Bayes and empirical Bayes
                   methods", Journal of the American Statistical Association 79, 1984, 393-398).

Three runs of one trial say little about its noise. The variance is pooled over the trials close to the winner, and
Student's t takes the place of the normal distribution. benchmarks/winners.py tries this where the truth is known.

A rival is a trial that is not significantly slower than the winner: Welch's test at 5 %, one-sided, divided by the
number of trials that the winner is held against (the subset selection of Gupta, "On some multiple decision (selection
and ranking) rules", Technometrics 7, 1965, 225-245, with Bonferroni's bound). A trial of fewer than 3 runs has the
noise of all trials.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vitscale.analysis.statistics import (
    CONFIDENCE,
    FEWEST_REPEATS,
    LogMean,
    exp_of,
    log_mean,
    t_below,
    t_quantile,
    welch_p,
)
from vitscale.present.estimate import Estimate

_ERROR = 1 - CONFIDENCE
_OUTER_ERROR = _ERROR / 10
"""Error of the simultaneous interval that bounds the conditional one: the share that the paper recommends."""
_HALVINGS = 60
_GRID_REACH = 8.0
"""Standard errors on either side of a mean over which the bias is integrated."""
_GRID_POINTS = 401
_TRIALS_AT_ONCE = 256

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Winner:
    """The trial of the smallest mean cost among several. Positions are those in the list of costs."""

    position: int
    rivals: tuple[int, ...]
    """Trials not significantly slower, the cheapest first. Empty also where runs are too few for a test."""
    is_tested: bool
    """Whether the winner has runs enough to be told apart from others."""
    corrected: Estimate | None
    """Its cost, corrected for having been chosen. None: the only trial, fewer than 3 runs, or not asked for."""


def winner(costs: Sequence[Sequence[float]], looked: Sequence[int] = (), *, correct: bool = True) -> Winner:
    """Finds the cheapest of several trials.

    Args:
        costs: of each trial one positive cost per run, all in one unit.
        looked: `looked` of each trial, as for `statistics.interval`; empty: 0 of each.
        correct: whether to correct its cost, which takes a second for some thousand trials.

    Raises:
        ValueError: there is no trial, a trial has no cost, or a cost is not positive and finite.
    """
    if not costs:
        raise ValueError("no trials: one must be chosen from at least one")
    means = [log_mean(values, runs) for values, runs in zip(costs, looked or [0] * len(costs), strict=True)]
    best = min(range(len(means)), key=lambda position: means[position].value)
    if means[best].runs < FEWEST_REPEATS:
        return Winner(best, (), is_tested=False, corrected=None)
    others = [position for position in range(len(means)) if position != best]
    noise = _pooled(means)
    rivals = [position for position in others if not _is_slower(means[position], means[best], noise, tests=len(others))]
    rivals.sort(key=lambda position: means[position].value)
    return Winner(
        best, tuple(rivals), is_tested=True, corrected=_corrected(means, best) if others and correct else None
    )


def _is_slower(trial: LogMean, best: LogMean, noise: _Noise, *, tests: int) -> bool:
    """Whether a trial's mean is significantly above the best one's.

    Args:
        trial: one of the others; with fewer than 3 runs it is taken to be as noisy as all trials together.
        best: the winner, with 3 runs or more.
        noise: that of all trials together.
        tests: number of trials that the winner is held against.
    """
    side = (trial.squared_error, trial.freedom)
    if trial.runs < FEWEST_REPEATS:
        side = (noise.error_of(trial) ** 2, noise.freedom)
    p = welch_p(trial.value - best.value, [side, (best.squared_error, best.freedom)])
    return tests * p / 2 < _ERROR


@dataclass(frozen=True)
class _Noise:
    """The standard deviation of one run's logarithm, pooled over trials, with its degrees of freedom."""

    deviation: float
    freedom: int

    def error_of(self, mean: LogMean) -> float:
        """Standard error of a trial's mean."""
        return self.deviation / math.sqrt(mean.runs)


def _corrected(means: Sequence[LogMean], best: int) -> Estimate:
    """The winner's cost with its interval, corrected for having been chosen."""
    close = _close_to(means, best)
    noise = _pooled([means[position] for position in close])
    value = means[best].value
    if noise.deviation == 0:
        return Estimate(exp_of(value), exp_of(value), exp_of(value))
    low, high = _hybrid_interval(means, best, noise)
    expected = value + _selection_bias(_drawn_together(means, close, noise), [noise.error_of(mean) for mean in means])
    # Where the runner-up is as fast, the conditional interval lies above all that the observed mean speaks for.
    return Estimate(exp_of(expected), exp_of(min(low, expected)), exp_of(max(high, expected)))


def _pooled(means: Sequence[LogMean]) -> _Noise:
    freedom = sum(mean.freedom for mean in means)
    squares = sum(mean.freedom * mean.squared_error * mean.runs for mean in means)
    return _Noise(math.sqrt(squares / freedom), freedom)


def _close_to(means: Sequence[LogMean], best: int) -> list[int]:
    """The winner and all trials that pooled noise does not tell apart from it."""
    noise = _pooled(means)
    limit = t_quantile(noise.freedom, 1 - _ERROR / (len(means) - 1))
    close = [best]
    for position, mean in enumerate(means):
        error = math.hypot(noise.error_of(mean), noise.error_of(means[best]))
        if position != best and mean.value - means[best].value <= limit * error:
            close.append(position)
    return close


def _hybrid_interval(means: Sequence[LogMean], best: int, noise: _Noise) -> tuple[float, float]:
    """The ends of the hybrid conditional interval of the winner's mean logarithm."""
    error, observed = noise.error_of(means[best]), means[best].value
    runner_up = min(mean.value for position, mean in enumerate(means) if position != best)
    reach = error * t_quantile(noise.freedom, 1 - _OUTER_ERROR / (2 * len(means)))
    tail = (_ERROR - _OUTER_ERROR) / (1 - _OUTER_ERROR) / 2

    def share_below(truth: float) -> float:
        """The chance of a mean below the observed one, given `truth`, that it wins and lies within `reach`."""
        least = -reach / error
        most = (min(runner_up, truth + reach) - truth) / error
        return _share_of_slice(noise.freedom, least, (observed - truth) / error, most)

    ends = [_root(share_below, observed - reach, observed + reach, share) for share in (1 - tail, tail)]
    return ends[0], ends[1]


def _share_of_slice(freedom: int, least: float, value: float, most: float) -> float:
    """The share of Student's t between `least` and `most` that lies below `value`; by the thinner tail, for digits."""
    if most <= least or value >= most:
        return 1.0
    if value <= least:
        return 0.0
    if least > 0:
        least, value, most = -most, -value, -least
        return 1 - _share_of_slice(freedom, least, value, most)
    start = t_below(freedom, least)
    return (t_below(freedom, value) - start) / (t_below(freedom, most) - start)


def _root(decreasing: Callable[[float], float], low: float, high: float, value: float) -> float:
    """Where a function that falls from `low` to `high` has a value, by halving."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if decreasing(middle) > value:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _drawn_together(means: Sequence[LogMean], close: Sequence[int], noise: _Noise) -> list[float]:
    """The means, those close to the winner drawn towards each other until they scatter as their true values do.

    How true values scatter is what the means scatter by beyond their standard errors (the estimate of DerSimonian and
    Laird, "Meta-analysis in clinical trials", Controlled Clinical Trials 7, 1986, 177-188).
    """
    truths = [mean.value for mean in means]
    if len(close) < 2:
        return truths
    weights = [1 / noise.error_of(means[position]) ** 2 for position in close]
    total = math.fsum(weights)
    centre = math.fsum(weight * truths[position] for weight, position in zip(weights, close, strict=True)) / total
    squares = math.fsum(
        weight * (truths[position] - centre) ** 2 for weight, position in zip(weights, close, strict=True)
    )
    scale = total - math.fsum(weight**2 for weight in weights) / total
    variance = max(0.0, (squares - (len(close) - 1)) / scale)
    for weight, position in zip(weights, close, strict=True):
        kept_share = variance / (variance + 1 / weight)
        truths[position] = centre + math.sqrt(kept_share) * (truths[position] - centre)
    return truths


def _selection_bias(truths: Sequence[float], errors: Sequence[float]) -> float:
    """What the smallest of normal means is too small by: the mean of (true value - observed one) of the winner.

    At x, trial i is observed and wins with density f_i(x) = normal density of i * P(all others lie above x).

    Args:
        truths: the true mean of each trial.
        errors: the standard error of each.
    """
    centres, scales = np.array(truths)[:, None], np.array(errors)[:, None]
    least, most = np.min(centres - _GRID_REACH * scales), np.min(centres + _GRID_REACH * scales)
    may_win = (centres - _GRID_REACH * scales < most)[:, 0]
    centres, scales = centres[may_win], scales[may_win]
    grid = np.linspace(least, most, _GRID_POINTS)
    # In pieces: thousands of trials would take gigabytes.
    pieces = [slice(first, first + _TRIALS_AT_ONCE) for first in range(0, len(centres), _TRIALS_AT_ONCE)]
    log_all_above = np.zeros(_GRID_POINTS)
    for piece in pieces:
        log_all_above += np.log(_share_above((grid - centres[piece]) / scales[piece])).sum(axis=0)
    luck = 0.0
    for piece in pieces:
        deviations = (grid - centres[piece]) / scales[piece]
        densities = np.exp(-0.5 * deviations**2) / (scales[piece] * math.sqrt(2 * math.pi))
        others_above = np.exp(log_all_above - np.log(_share_above(deviations)))
        luck += float(((centres[piece] - grid) * densities * others_above).sum())
    return luck * float(grid[1] - grid[0])


@functools.cache
def _normal_table() -> tuple[Floats, Floats]:
    """Deviations, and the share of the normal distribution above each."""
    deviations = np.linspace(-_GRID_REACH, 4 * _GRID_REACH, 40 * _GRID_POINTS)
    return deviations, np.array([0.5 * math.erfc(value / math.sqrt(2)) for value in deviations])


def _share_above(deviations: Floats) -> Floats:
    table, shares = _normal_table()
    return np.maximum(np.interp(deviations, table, shares), np.finfo(float).tiny)
