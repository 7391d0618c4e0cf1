"""Finds how many of a run's first steps are still slow, and whether its times fall or rise through the others.

Steps marked as warm-up (`measure.warmup_steps`) have been left out already; this looks at the steps after them.
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
"""Fewest steps that are looked at: of fewer, chance makes the first ones look slow too often."""
_SLOWER_BY = 0.05
"""Share of the steady level by which a slow step exceeds it."""
_DEVIATIONS = 3.0
"""Deviations by which it exceeds the level too."""
_ALONE_SLOWER_BY = 0.5
"""The same share for a single slow step at the beginning."""
_ALONE_DEVIATIONS = 10.0
_SMALL_SAMPLE = 8.0
_MOST_CORRELATED = 0.9
"""Largest autocorrelation of steps that is allowed for."""
_BLOCKS = 20
"""Number of blocks of steps on which a trend is looked for; fewer where there are fewer steps."""
_FEWEST_BLOCKS = 8
_CHANGE = 0.05
"""Smallest share by which the times change where they have a trend."""
_P = 1e-4
"""Level of the one-sided test in either direction. A test that estimates the autocorrelation from few blocks is far
from exact: with this and the required change of 5 %, noise with an autocorrelation of 0.9 falls or rises in under 3 %
of runs."""
_MOST_CORRELATED_BLOCKS = 0.97


@dataclass(frozen=True)
class WarmUp:
    """The warm-up of one run, by its times."""

    steps: int
    """Number of first steps that are slow; never more than half of all."""
    trend: float | None
    """Share by which the times change from the first to the last third of the other steps: below 0 they fall, above 0
    they rise. None where they are steady."""


NONE_SEEN = WarmUp(0, None)


def warm_up(times: FloatArray) -> list[WarmUp]:
    """Look for a slow beginning in the times of like steps, in order: (runs, steps).

    The steady level is the median of the later half, and its noise the scaled median absolute deviation there: a few
    outliers move neither. Noise that lasts from step to step moves the level of a whole run, but shows too little
    inside a half: deviations are stretched for it (`_stretch`). A step is slow where it exceeds that level by 5 % and
    by 3 such deviations. Two or more slow steps at the beginning are warm-up; so is a single one that exceeds the level
    by half and by 10 deviations. Steps that are slow later on are not warm-up.
    """
    runs, steps = times.shape
    if steps < FEWEST_STEPS:
        return [NONE_SEEN] * runs
    half = steps // 2
    late = times[:, half:]
    level = medians(late)[:, None]  # (runs, 1)
    slow_steps = _slow_steps(times, late, level)  # (runs,)
    warm_ups = [NONE_SEEN] * runs
    for count in np.unique(slow_steps).tolist():
        members = np.flatnonzero(slow_steps == count)  # runs with so many slow steps
        if count > half:  # not warm in time: only half is left out, and the trend is that from half to half
            early_level = medians(times[members, :half])
            changes = level[members, 0] / early_level - 1
            trends: list[float | None] = list(changes.tolist())
        else:
            trends = _trends(times[members, count:])
        for run, trend in zip(members.tolist(), trends, strict=True):
            warm_ups[run] = WarmUp(min(count, half), trend)
    return warm_ups


def _slow_steps(times: FloatArray, late: FloatArray, level: FloatArray) -> Integers:
    """Return the number of slow steps at the beginning of each run, (runs,); a single one counts only if it is extreme.

    Args:
        times: of all steps, (runs, steps).
        late: those of the later half.
        level: the steady level of each run, (runs, 1).
    """
    with np.errstate(over="ignore", invalid="ignore"):
        noise = MAD_TO_SIGMA * medians(np.abs(late - level))[:, None] * _stretch(late, level)

        def exceeds(seconds: FloatArray, share: float, deviations: float) -> Flags:
            return (seconds > level * (1 + share)) & (seconds > level + deviations * noise)

        is_slow_so_far = np.logical_and.accumulate(exceeds(times, _SLOWER_BY, _DEVIATIONS), axis=1)
        slow_steps: Integers = is_slow_so_far.sum(axis=1)
        is_first_extreme = exceeds(times[:, :1], _ALONE_SLOWER_BY, _ALONE_DEVIATIONS)[:, 0]
    slow_steps[(slow_steps == 1) & ~is_first_extreme] = 0
    return slow_steps


def _stretch(seconds: FloatArray, middle: FloatArray) -> FloatArray:
    """Return the factor on a deviation inside n consecutive steps, (runs, 1), for noise of autocorrelation r.

    It is sqrt((1 + r) / (1 - r)), by which the error of a mean grows, times 1 + 8 / n, because few steps tell r badly.
    The bias of r is taken off after Kendall, "Note on bias in the estimation of autocorrelation" (Biometrika 41, 1954,
    403-404).

    Args:
        seconds: of the n steps, (runs, n).
        middle: their median, (runs, 1).
    """
    steps = seconds.shape[1]
    ratios = seconds / np.where(middle > 0, middle, math.nan)
    residuals = ratios - ratios.mean(axis=1, keepdims=True)
    biased = np.array([_correlation(residuals_of_run) for residuals_of_run in residuals])[:, None]  # (runs, 1)
    unbiased = (steps * biased + 1) / (steps - 3)
    correlation = np.where(np.isnan(unbiased), _MOST_CORRELATED, np.clip(unbiased, 0.0, _MOST_CORRELATED))
    stretch = np.sqrt((1 + correlation) / (1 - correlation)) * (1 + _SMALL_SAMPLE / steps)
    return np.where(middle > 0, stretch, 1.0)


def _trends(seconds: FloatArray) -> list[float | None]:
    """Return the share by which the times of each run change, if they do so steadily: by over 5 % and beyond chance.

    A line is fitted to the logarithms of the medians of up to 20 blocks of consecutive steps, with errors that are
    correlated from block to block: Prais & Winsten, "Trend estimators and serial correlation" (Cowles Commission 383,
    1954). The correlation is that of the residuals, corrected for the bias that fitting a line brings.
    """
    trends: list[float | None] = [None] * len(seconds)
    steps = seconds.shape[1]
    count = min(_BLOCKS, steps)
    if count < _FEWEST_BLOCKS:
        return trends
    blocks = _block_medians(seconds, count)  # (runs, blocks)
    third = count // 3
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        middle = medians(blocks)  # (runs,)
        smallest = blocks.min(axis=1)
        largest = blocks.max(axis=1)
        has_logarithms = (smallest > 0) & (smallest / middle != 0) & np.isfinite(largest / middle)
        change = medians(blocks[:, -third:]) / medians(blocks[:, :third]) - 1
    is_small_change = np.abs(change) <= _CHANGE  # False for NaN
    for run in np.flatnonzero(has_logarithms & ~is_small_change).tolist():
        slope = _slope(np.log(blocks[run] / middle[run]))
        chance = t_below(count - 3, -abs(slope.value) / slope.error) if slope.error > 0 else 0.0
        has_same_direction = slope.value * change[run] > 0
        if has_same_direction and chance < _P:
            trends[run] = float(change[run])
    return trends


def _block_medians(seconds: FloatArray, count: int) -> FloatArray:
    """Return the medians of `count` blocks of consecutive steps, as equally long as may be: (runs, count)."""
    bounds = seconds.shape[1] * np.arange(count + 1) // count  # [0, 3, 6, 10]: blocks of 3, 3 and 4 steps
    lengths = np.diff(bounds)
    block_medians = np.empty((len(seconds), count))
    for length in np.unique(lengths):
        blocks = np.flatnonzero(lengths == length)
        steps = bounds[blocks, None] + np.arange(length)  # (blocks, length)
        block_medians[:, blocks] = medians(seconds[:, steps])
    return block_medians


class _Slope(NamedTuple):
    """The slope of a line from one value to the next, and its standard error."""

    value: float
    error: float


def _slope(values: FloatArray) -> _Slope:
    """Return the slope of a line that is fitted to n values, by Prais and Winsten.

    First an ordinary line gives the correlation r of the residuals. Then the line is fitted again, after r times the
    value before was taken from each value: the errors of these differences are uncorrelated.
    """
    count = len(values)
    positions: FloatArray = np.arange(count, dtype=np.float64) - (count - 1) / 2  # their mean is 0
    ordinary_slope = positions @ values / (positions @ positions)
    residuals = values - float(values.mean()) - ordinary_slope * positions
    unbiased = (count * _correlation(residuals) + 2) / (count - 4)
    correlation = min(max(unbiased, 0.0), _MOST_CORRELATED_BLOCKS)

    def uncorrelated(column: FloatArray) -> FloatArray:
        first = math.sqrt(1 - correlation * correlation) * column[:1]
        return np.concatenate([first, column[1:] - correlation * column[:-1]])

    return _least_squares_slope(
        ones=uncorrelated(np.ones(count)), times=uncorrelated(positions), values=uncorrelated(values)
    )


def _least_squares_slope(ones: FloatArray, times: FloatArray, values: FloatArray) -> _Slope:
    """Return the slope of the least squares of `values - level * ones - slope * times`.

    The two normal equations are, with `a.b` for the product of two columns,

        level * ones.ones + slope * ones.times = ones.values
        level * ones.times + slope * times.times = times.values

    One degree of freedom more than for a line is taken off the error: that of the correlation.
    """
    ones_ones = ones @ ones
    ones_times = ones @ times
    times_times = times @ times
    ones_values = ones @ values
    times_values = times @ values
    determinant = ones_ones * times_times - ones_times * ones_times
    slope = (ones_ones * times_values - ones_times * ones_values) / determinant
    level = (times_times * ones_values - ones_times * times_values) / determinant
    squares = float(((values - level * ones - slope * times) ** 2).sum())
    freedom = len(values) - 3
    return _Slope(float(slope), math.sqrt(squares / freedom * float(ones_ones / determinant)))


def _correlation(residuals: FloatArray) -> float:
    """Return the correlation of each value with the next one; 0 where there is none."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = float(residuals @ residuals)
        return float(residuals[1:] @ residuals[:-1]) / squares if squares > 0 else 0.0
