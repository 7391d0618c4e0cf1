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
from typing import NamedTuple

import numpy as np

from vitscale.analysis.statistics import (
    CONFIDENCE,
    FEWEST_REPEATS,
    LogMean,
    SquaredError,
    exp_of,
    log_mean,
    t_below,
    t_quantile,
    welch_p,
)
from vitscale.base.arrays import FloatArray
from vitscale.present.estimate import Estimate

_TEST_LEVEL = 1 - CONFIDENCE
"""Share of studies in which an interval misses, or a test errs: 5 %."""
_OUTER_LEVEL = _TEST_LEVEL / 10
"""The same for the simultaneous interval that bounds the conditional one: the share that the paper recommends."""
_BISECTION_STEPS = 60
"""Steps of a bisection: more than a double has digits."""
_GRID_ERRORS = 8.0
"""Number of standard errors on either side of a mean over which the bias is integrated."""
_GRID_POINTS = 401
_TRIALS_PER_PIECE = 256
"""Number of trials whose densities are in memory at a time."""


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


def winner(costs: Sequence[Sequence[float]], deciding_runs: Sequence[int] = (), *, correct: bool = True) -> Winner:
    """Find the cheapest of several trials, and correct its cost for having been chosen.

    Args:
        costs: of each trial one positive cost per run, all in one unit.
        deciding_runs: how many of the first runs of each trial decided how many runs it has (`deciding_runs` of
            `statistics.interval`); empty: none, for the number of runs was fixed.
        correct: whether to correct its cost, which takes a second for some thousand trials.

    Raises:
        ValueError: there is no trial, a trial has no cost, or a cost is not positive and finite.
    """
    if not costs:
        raise ValueError("no trials: one must be chosen from at least one")
    deciding_runs_by_trial = deciding_runs or [0] * len(costs)
    means = []
    for trial_costs, trial_deciding_runs in zip(costs, deciding_runs_by_trial, strict=True):
        means.append(log_mean(trial_costs, trial_deciding_runs))
    best = min(range(len(means)), key=lambda position: means[position].value)
    if means[best].runs < FEWEST_REPEATS:
        return Winner(best, (), is_tested=False, corrected=None)
    corrected_cost = _corrected_cost(means, best) if correct and len(means) > 1 else None
    return Winner(best, _rivals(means, best), is_tested=True, corrected=corrected_cost)


@dataclass(frozen=True)
class _Noise:
    """The standard deviation of one run's logarithm, pooled over trials, with its degrees of freedom."""

    deviation: float
    freedom: int

    def error_of(self, mean: LogMean) -> float:
        """Return the standard error of a trial's mean logarithm, if its runs have this noise."""
        return self.deviation / math.sqrt(mean.runs)


def _rivals(means: Sequence[LogMean], best: int) -> tuple[int, ...]:
    """Return the positions of the trials that are not significantly slower than the best, the cheapest first."""
    noise = _pooled_noise(means)
    tests = len(means) - 1
    rivals = []
    for position, mean in enumerate(means):
        if position != best and not _is_slower(mean, means[best], noise, tests=tests):
            rivals.append(position)
    return tuple(sorted(rivals, key=lambda position: means[position].value))


def _is_slower(trial: LogMean, best: LogMean, noise: _Noise, *, tests: int) -> bool:
    """Whether a trial's mean is significantly above the best one's.

    Args:
        trial: one of the others; with fewer than 3 runs it is taken to be as noisy as all trials together.
        best: the winner, with 3 runs or more.
        noise: that of all trials together.
        tests: number of trials that the winner is compared with.
    """
    trial_error = trial.error
    if trial.runs < FEWEST_REPEATS:
        trial_error = SquaredError(noise.error_of(trial) ** 2, noise.freedom)
    one_sided_p = welch_p(trial.value - best.value, [trial_error, best.error]) / 2  # it is above the best one's anyway
    return tests * one_sided_p < _TEST_LEVEL


def _corrected_cost(means: Sequence[LogMean], best: int) -> Estimate:
    """Return the winner's cost with its interval, corrected for having been chosen.

    Args:
        means: of two trials or more.
        best: position of the winner.
    """
    close = _trials_near_best(means, best)
    noise = _pooled_noise([means[position] for position in close])
    value = means[best].value
    if noise.deviation == 0:
        return Estimate(exp_of(value), exp_of(value), exp_of(value))
    ends = _hybrid_interval(means, best, noise)
    errors = [noise.error_of(mean) for mean in means]
    expected = value + _selection_bias(_shrunken_means(means, close, noise), errors)
    # Where the runner-up is as fast, the conditional interval may lie above the corrected cost.
    low = min(ends.low, expected)
    high = max(ends.high, expected)
    return Estimate(exp_of(expected), exp_of(low), exp_of(high))


def _pooled_noise(means: Sequence[LogMean]) -> _Noise:
    """Return the noise of one run, from the spread of runs within each trial; at least one trial must have two runs."""
    freedom = sum(mean.freedom for mean in means)
    squares = sum(mean.freedom * mean.squared_error * mean.runs for mean in means)
    return _Noise(math.sqrt(squares / freedom), freedom)


def _trials_near_best(means: Sequence[LogMean], best: int) -> list[int]:
    """Return the positions of the winner and of all trials that pooled noise does not tell apart from it."""
    noise = _pooled_noise(means)
    limit = t_quantile(noise.freedom, 1 - _TEST_LEVEL / (len(means) - 1))
    close = [best]
    for position, mean in enumerate(means):
        error = math.hypot(noise.error_of(mean), noise.error_of(means[best]))
        if position != best and mean.value - means[best].value <= limit * error:
            close.append(position)
    return close


class _Interval(NamedTuple):
    """Ends of an interval of logarithms."""

    low: float
    high: float


def _hybrid_interval(means: Sequence[LogMean], best: int, noise: _Noise) -> _Interval:
    """Return the hybrid conditional interval of the winner's mean logarithm (the module's docstring has the source).

    Its ends are the true means under which the observed mean is just at an end of the middle 95 % of the distribution
    that it has as the winner's.
    """
    observed = means[best].value
    error = noise.error_of(means[best])
    runner_up = min(mean.value for position, mean in enumerate(means) if position != best)
    reach = error * t_quantile(noise.freedom, 1 - _OUTER_LEVEL / (2 * len(means)))
    tail = (_TEST_LEVEL - _OUTER_LEVEL) / (1 - _OUTER_LEVEL) / 2

    def share_below(truth: float) -> float:
        """Return the chance of a mean below the observed one.

        It is conditional: the true mean is `truth`, the trial wins, and its mean lies within `reach` of the truth.
        """
        low = -reach / error
        high = (min(runner_up, truth + reach) - truth) / error
        return _truncated_t_below(noise.freedom, low, (observed - truth) / error, high)

    # The greater the truth, the smaller the share below what was observed: the lower end has the larger share.
    return _Interval(
        low=_root(share_below, observed - reach, observed + reach, value=1 - tail),
        high=_root(share_below, observed - reach, observed + reach, value=tail),
    )


def _truncated_t_below(freedom: int, low: float, value: float, high: float) -> float:
    """Return the share below `value` of Student's t cut off at `low` and `high`; 1 where nothing is between these."""
    if high <= low or value >= high:
        return 1.0
    if value <= low:
        return 0.0
    if low > 0:  # mirrored: shares far up the upper tail are all 1 to 16 digits, and their differences 0
        return 1 - _truncated_t_below(freedom, low=-high, value=-value, high=-low)
    below_low = t_below(freedom, low)
    return (t_below(freedom, value) - below_low) / (t_below(freedom, high) - below_low)


def _root(decreasing: Callable[[float], float], low: float, high: float, value: float) -> float:
    """Return the argument between `low` and `high` at which a decreasing function has a value, by bisection."""
    for _ in range(_BISECTION_STEPS):
        middle = (low + high) / 2
        if decreasing(middle) > value:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _shrunken_means(means: Sequence[LogMean], close: Sequence[int], noise: _Noise) -> list[float]:
    """Return the means, those close to the winner moved towards their centre until they scatter as true values do.

    Means scatter because true values do, and because of noise. The variance of the true values is what the means
    scatter by beyond their standard errors (the estimate of DerSimonian and Laird, "Meta-analysis in clinical trials",
    Controlled Clinical Trials 7, 1986, 177-188).

    Args:
        means: of all trials.
        close: positions of those close to the winner, and of the winner; the other means stay as they are.
        noise: of one run.
    """
    shrunken = [mean.value for mean in means]
    if len(close) < 2:
        return shrunken
    weights = [1 / noise.error_of(means[position]) ** 2 for position in close]
    values = [means[position].value for position in close]
    total_weight = math.fsum(weights)
    centre = math.fsum(weight * value for weight, value in zip(weights, values, strict=True)) / total_weight
    squares = math.fsum(weight * (value - centre) ** 2 for weight, value in zip(weights, values, strict=True))
    squares_by_noise = len(close) - 1  # expected where all true values are equal
    scale = total_weight - math.fsum(weight**2 for weight in weights) / total_weight
    true_variance = max(0.0, (squares - squares_by_noise) / scale)
    for position, weight, value in zip(close, weights, values, strict=True):
        true_share = true_variance / (true_variance + 1 / weight)
        shrunken[position] = centre + math.sqrt(true_share) * (value - centre)
    return shrunken


def _selection_bias(truths: Sequence[float], errors: Sequence[float]) -> float:
    """Return the mean of (true value - observed one) of the trial that is observed as the smallest of all.

    At x, trial i is observed and wins with density f_i(x) = normal density of i * P(all others lie above x). The bias
    is the sum over i of the integral of (true value of i - x) f_i(x).

    Args:
        truths: the true mean of each trial.
        errors: the standard error of each.
    """
    all_centres = np.array(truths)[:, None]  # (trials, 1)
    all_scales = np.array(errors)[:, None]
    least_values = all_centres - _GRID_ERRORS * all_scales
    lowest = np.min(least_values)
    # The trial with this largest value lies below it for certain: no trial whose least value is above it can win.
    highest = np.min(all_centres + _GRID_ERRORS * all_scales)
    may_win = (least_values < highest)[:, 0]
    centres = all_centres[may_win]
    scales = all_scales[may_win]
    grid = np.linspace(lowest, highest, _GRID_POINTS)  # the observed values x
    # In pieces: thousands of trials would take gigabytes.
    pieces = [slice(first, first + _TRIALS_PER_PIECE) for first in range(0, len(centres), _TRIALS_PER_PIECE)]
    log_all_above = np.zeros(_GRID_POINTS)  # logarithm of P(all trials lie above x)
    for piece in pieces:
        deviations = (grid - centres[piece]) / scales[piece]  # (trials of the piece, points)
        log_all_above += np.log(_share_above(deviations)).sum(axis=0)
    sum_over_grid = 0.0
    for piece in pieces:
        deviations = (grid - centres[piece]) / scales[piece]
        densities = np.exp(-0.5 * deviations**2) / (scales[piece] * math.sqrt(2 * math.pi))
        others_above = np.exp(log_all_above - np.log(_share_above(deviations)))
        sum_over_grid += float(((centres[piece] - grid) * densities * others_above).sum())
    grid_step = float(grid[1] - grid[0])
    return sum_over_grid * grid_step


class _NormalValues(NamedTuple):
    """Deviations, and the share of the normal distribution above each."""

    deviations: FloatArray
    shares_above: FloatArray


@functools.cache
def _normal_table() -> _NormalValues:
    """Return the shares at deviations from -8 to 32, between which `_share_above` interpolates."""
    deviations = np.linspace(-_GRID_ERRORS, 4 * _GRID_ERRORS, 40 * _GRID_POINTS)
    return _NormalValues(deviations, np.array([0.5 * math.erfc(value / math.sqrt(2)) for value in deviations]))


def _share_above(deviations: FloatArray) -> FloatArray:
    """Return the share of the normal distribution above each deviation; never 0, so that it has a logarithm."""
    table = _normal_table()
    shares = np.interp(deviations, table.deviations, table.shares_above)
    return np.maximum(shares, np.finfo(float).tiny)
