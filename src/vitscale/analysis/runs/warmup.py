"""Finds how many of a run's first steps are still slow, and whether its times fall or rise through the others.

Steps that the study marks as warm-up (`measure.warmup_steps`) are left out before; this looks at the steps after them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vitscale.analysis.runs.steps import MAD_TO_SIGMA, Flags, Integers, medians
from vitscale.analysis.statistics import t_below
from vitscale.base.arrays import FloatArray

FEWEST_STEPS = 12
"""Fewest steps in which warm-up is looked for: of fewer, chance makes the first ones look slow too often."""
_SLOW_EXCESS = 0.05
"""Share of the steady level by which a slow step exceeds it, at least."""
_SLOW_DEVIATIONS = 3.0
"""Deviations of the noise by which it exceeds the level too."""
_SINGLE_SLOW_EXCESS = 0.5
"""As `_SLOW_EXCESS`, for a run whose first step alone is slow."""
_SINGLE_SLOW_DEVIATIONS = 10.0
"""As `_SLOW_DEVIATIONS`, for such a run."""
_WIDENING_STEPS = 8.0
"""The noise inside n steps is taken to be 1 + 8 / n times as large: few steps show their autocorrelation badly."""
_LARGEST_STEP_CORRELATION = 0.9
"""Largest autocorrelation of steps that is allowed for."""
_MOST_TREND_BLOCKS = 20
"""Number of blocks of steps on which a trend is looked for; fewer where there are fewer steps."""
_FEWEST_TREND_BLOCKS = 8
_SMALLEST_TREND = 0.05
"""Smallest share by which the times change where they have a trend."""
_TREND_LEVEL = 1e-4
"""Level of the one-sided test in either direction. A test that estimates the autocorrelation from few blocks is far
from exact: with this and the required change of 5 %, noise with an autocorrelation of 0.9 falls or rises in under 3 %
of runs."""
_LARGEST_BLOCK_CORRELATION = 0.97
"""Largest autocorrelation of blocks that is allowed for."""


@dataclass(frozen=True)
class WarmUp:
    """The warm-up of one run, by its times."""

    steps: int
    """Number of slow first steps, which no figure rests on; never more than half of all."""
    trend: float | None
    """Share by which the times change from the first to the last third of the other steps: below 0 they fall, above 0
    they rise. None where they are steady."""


NO_WARM_UP = WarmUp(0, None)
"""No first step is slow, and the times are steady."""


def warm_up(times: FloatArray) -> list[WarmUp]:
    """Look for slow first steps in each run, and for a trend in the steps after them.

    The steady level is the median of the later half, and its noise the scaled median absolute deviation there: a few
    outliers move neither. Noise that lasts from step to step moves the level of a whole run, but shows too little
    inside a half: it is widened for that (`_noise_widening`). A step is slow where it exceeds the level by 5 % and by 3
    deviations of the noise. Two or more slow steps at the beginning are warm-up; so is a single one that exceeds the
    level by half and by 10 deviations. Steps that are slow later on are not warm-up.

    Args:
        times: seconds of steps of one kind, in order: (runs, steps).

    Returns:
        One for each run; `NO_WARM_UP` where there are fewer than `FEWEST_STEPS` steps.
    """
    runs, steps = times.shape
    if steps < FEWEST_STEPS:
        return [NO_WARM_UP] * runs
    half = steps // 2
    later_half = times[:, half:]
    level = medians(later_half)[:, None]  # (runs, 1)
    slow_counts = _slow_first_steps(times, later_half, level)  # (runs,)
    warm_ups = [NO_WARM_UP] * runs
    for slow_count in np.unique(slow_counts).tolist():
        members = np.flatnonzero(slow_counts == slow_count)  # indices of the runs with so many slow steps
        if slow_count > half:  # not warm in time: only half is left out, and the trend is that from half to half
            early_level = medians(times[members, :half])
            changes = level[members, 0] / early_level - 1
            trends: list[float | None] = list(changes.tolist())
        else:
            trends = _trends(times[members, slow_count:])
        for run, trend in zip(members.tolist(), trends, strict=True):
            warm_ups[run] = WarmUp(min(slow_count, half), trend)
    return warm_ups


def _slow_first_steps(times: FloatArray, later_half: FloatArray, level: FloatArray) -> Integers:
    """Return how many steps at the beginning of each run are slow, (runs,); a single one counts only if it is extreme.

    Example: of slow, slow, steady, slow, ... the first 2 count.

    Args:
        times: seconds of all steps, (runs, steps).
        later_half: those of the later half.
        level: the steady level of each run, (runs, 1).
    """
    with np.errstate(over="ignore", invalid="ignore"):
        noise = MAD_TO_SIGMA * medians(np.abs(later_half - level))[:, None] * _noise_widening(later_half, level)

        def exceeds(seconds: FloatArray, excess_share: float, deviations: float) -> Flags:
            return (seconds > level * (1 + excess_share)) & (seconds > level + deviations * noise)

        is_slow = exceeds(times, _SLOW_EXCESS, _SLOW_DEVIATIONS)
        is_slow_so_far = np.logical_and.accumulate(is_slow, axis=1)  # it and all steps before it
        slow_counts: Integers = is_slow_so_far.sum(axis=1)
        is_first_extreme = exceeds(times[:, :1], _SINGLE_SLOW_EXCESS, _SINGLE_SLOW_DEVIATIONS)[:, 0]
    slow_counts[(slow_counts == 1) & ~is_first_extreme] = 0
    return slow_counts


def _noise_widening(seconds: FloatArray, median: FloatArray) -> FloatArray:
    """Return the factor, (runs, 1), by which noise is larger than the deviations inside n consecutive steps show.

    Where neighbouring steps are correlated by r, it is sqrt((1 + r) / (1 - r)), by which the error of a mean grows,
    times 1 + 8 / n, because few steps show r badly.

    Args:
        seconds: of the n steps, (runs, n).
        median: their median, (runs, 1).
    """
    steps = seconds.shape[1]
    ratios = seconds / np.where(median > 0, median, math.nan)
    residuals = ratios - ratios.mean(axis=1, keepdims=True)
    correlations = [_neighbour_correlation(residuals_of_run) for residuals_of_run in residuals]
    estimates = np.array(correlations)[:, None]  # (runs, 1)
    # Deviations from a mean of n values show about r - (1 + 3 r) / n on average: Kendall, "Note on bias in the
    # estimation of autocorrelation" (Biometrika 41, 1954, 403-404). This is solved for r.
    unbiased = (steps * estimates + 1) / (steps - 3)  # (runs, 1)
    usable = np.clip(unbiased, 0.0, _LARGEST_STEP_CORRELATION)
    correlation = np.where(np.isnan(unbiased), _LARGEST_STEP_CORRELATION, usable)
    widening = np.sqrt((1 + correlation) / (1 - correlation)) * (1 + _WIDENING_STEPS / steps)
    return np.where(median > 0, widening, 1.0)


def _trends(seconds: FloatArray) -> list[float | None]:
    """Return the share by which each run's times change, where they do so steadily; None for a run that is steady.

    The change is that from the first to the last third of up to 20 blocks of consecutive steps, by medians. It counts
    if it is more than 5 %, and the blocks' logarithms lie on a line that falls or rises beyond chance (`_slope`).

    Args:
        seconds: of steps after warm-up, (runs, steps).
    """
    trends: list[float | None] = [None] * len(seconds)
    steps = seconds.shape[1]
    block_count = min(_MOST_TREND_BLOCKS, steps)
    if block_count < _FEWEST_TREND_BLOCKS:
        return trends
    blocks = _block_medians(seconds, block_count)  # (runs, blocks)
    third = block_count // 3
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        level = medians(blocks)  # (runs,)
        smallest = blocks.min(axis=1)
        largest = blocks.max(axis=1)
        has_logarithms = (smallest > 0) & (smallest / level != 0) & np.isfinite(largest / level)
        change = medians(blocks[:, -third:]) / medians(blocks[:, :third]) - 1
    is_small_change = np.abs(change) <= _SMALLEST_TREND  # False for NaN
    for run in np.flatnonzero(has_logarithms & ~is_small_change).tolist():
        slope = _slope(np.log(blocks[run] / level[run]))
        has_same_direction = slope.value * change[run] > 0
        if has_same_direction and _is_beyond_chance(slope, block_count):
            trends[run] = float(change[run])
    return trends


def _block_medians(seconds: FloatArray, block_count: int) -> FloatArray:
    """Return the medians of consecutive blocks of steps, as equally long as may be: (runs, steps) -> (runs, blocks)."""
    # Block k has the steps from bounds[k] to bounds[k + 1]: [0, 3, 6, 10] are 3 blocks of 3, 3 and 4 steps.
    bounds = seconds.shape[1] * np.arange(block_count + 1) // block_count
    lengths = np.diff(bounds)
    block_medians = np.empty((len(seconds), block_count))
    for length in np.unique(lengths):  # all blocks of one length at once
        blocks = np.flatnonzero(lengths == length)
        steps = bounds[blocks, None] + np.arange(length)  # (blocks, length)
        block_medians[:, blocks] = medians(seconds[:, steps])
    return block_medians


class _Slope(NamedTuple):
    """The slope of a line from one value to the next, and its standard error."""

    value: float
    error: float


def _is_beyond_chance(slope: _Slope, values: int) -> bool:
    """Whether so steep a slope of a line through so many values is too improbable if the true one is 0."""
    if not slope.error > 0:  # the values lie on the line
        return True
    return t_below(_freedom(values), -abs(slope.value) / slope.error) < _TREND_LEVEL


def _freedom(values: int) -> int:
    """Return the degrees of freedom of a line through n values: 3 are its level, its slope and the correlation."""
    return values - 3


def _slope(values: FloatArray) -> _Slope:
    """Return the slope of a line through n values whose errors are correlated from each to the next.

    The line, value = level + slope x position, is fitted twice, after Prais & Winsten, "Trend estimators and serial
    correlation" (Cowles Commission 383, 1954). Ordinary least squares give residuals, and these the correlation r of
    neighbouring errors. Then the same equation is fitted to columns without that correlation (`_decorrelated`), because
    least squares understate the error of a slope where errors are correlated.
    """
    count = len(values)
    positions: FloatArray = np.arange(count, dtype=np.float64) - (count - 1) / 2  # -1, 0, 1: their mean is 0
    ordinary_slope = positions @ values / (positions @ positions)
    residuals = values - float(values.mean()) - ordinary_slope * positions
    # Residuals of a line through n values show about r - (2 + 4 r) / n on average. This is solved for r.
    unbiased = (count * _neighbour_correlation(residuals) + 2) / (count - 4)
    correlation = min(max(unbiased, 0.0), _LARGEST_BLOCK_CORRELATION)
    return _least_squares_slope(
        ones=_decorrelated(np.ones(count), correlation),
        positions=_decorrelated(positions, correlation),
        values=_decorrelated(values, correlation),
    )


def _decorrelated(column: FloatArray, correlation: float) -> FloatArray:
    """Return a column (n,) of an equation whose errors are correlated by r, so that its errors are not correlated.

    From each element r times the one before it is taken: e(k) - r e(k - 1) is the new part of the error e(k), whose
    variance is 1 - r^2 of that of e(k). The first element has none before it, and is scaled to the same variance.
    """
    first = math.sqrt(1 - correlation * correlation) * column[:1]
    following = column[1:] - correlation * column[:-1]
    return np.concatenate([first, following])


def _least_squares_slope(ones: FloatArray, positions: FloatArray, values: FloatArray) -> _Slope:
    """Return the slope for which `values - level * ones - slope * positions` has the least squares, and its error.

    The two normal equations are, with `a.b` for the product of two columns,

        level * ones.ones      + slope * ones.positions      = ones.values
        level * ones.positions + slope * positions.positions = positions.values

    and are solved by Cramer's rule. The slope's variance is that of the errors times ones.ones / determinant.
    """
    ones_ones = ones @ ones
    ones_positions = ones @ positions
    positions_positions = positions @ positions
    ones_values = ones @ values
    positions_values = positions @ values
    determinant = ones_ones * positions_positions - ones_positions * ones_positions
    slope = (ones_ones * positions_values - ones_positions * ones_values) / determinant
    level = (positions_positions * ones_values - ones_positions * positions_values) / determinant
    squared_errors = float(((values - level * ones - slope * positions) ** 2).sum())
    error_variance = squared_errors / _freedom(len(values))
    return _Slope(float(slope), math.sqrt(error_variance * float(ones_ones / determinant)))


def _neighbour_correlation(residuals: FloatArray) -> float:
    """Return the correlation of each of some residuals (n,) with the next one; 0 where all are 0."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = float(residuals @ residuals)
        return float(residuals[1:] @ residuals[:-1]) / squares if squares > 0 else 0.0
