"""Is a run warm? How many of its first steps are still slow, and whether its times fall or rise through the rest.

Steps marked as warm-up (`measure.warmup_steps`) have been left out already; this looks at the steps after them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from vitscale.analysis.runs.steps import MAD_TO_SIGMA, Flags, medians
from vitscale.analysis.statistics import t_below
from vitscale.base.arrays import FloatArray

FEWEST_STEPS = 12
"""Fewest steps that are looked at: of fewer, chance makes the first ones look slow too often."""
_SLOWER_BY = 0.05
_DEVIATIONS = 3.0
_ALONE_SLOWER_BY = 0.5
_ALONE_DEVIATIONS = 10.0
_SMALL_SAMPLE = 8.0
_MOST_CORRELATED = 0.9
_BLOCKS = 20
_FEWEST_BLOCKS = 8
_CHANGE = 0.05
_P = 1e-4
"""Level of the one-sided test in either direction. A test that estimates the autocorrelation from few blocks is far
from exact: with this and the required change of 5 %, noise with an autocorrelation of 0.9 falls or rises in under 3 %
of runs."""
_MOST_CORRELATED_BLOCKS = 0.97


@dataclass(frozen=True)
class WarmUp:
    """What a run's times say of its warm-up."""

    steps: int
    """Number of first steps that are slow; never more than half of all."""
    trend: float | None
    """Share by which the times change from the first to the last third of the other steps: below 0 they fall, above 0
    they rise. None where they are steady."""


NONE_SEEN = WarmUp(0, None)


def warm_up(times: FloatArray) -> list[WarmUp]:
    """Looks for a slow beginning in the times of like steps, in order: (runs, steps).

    The steady level is the median of the later half, and its noise the scaled median absolute deviation there: a few
    outliers move neither. Noise that lasts from step to step moves the level of a whole run, but shows too little
    inside a half: deviations are stretched for it (`_stretch`). A step is slow where it exceeds that level by 5 % and
    by 3 such deviations. Two or more slow steps at the beginning are warm-up; so is a single one that exceeds the level
    by half and by 10 deviations. Steps that are slow later on are not warm-up.
    """
    if times.shape[1] < FEWEST_STEPS:
        return [NONE_SEEN] * len(times)
    half = times.shape[1] // 2
    late = times[:, half:]
    steady = medians(late)[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        noise = MAD_TO_SIGMA * medians(np.abs(late - steady))[:, None] * _stretch(late, steady)

        def beyond(values: FloatArray, share: float, deviations: float) -> Flags:
            return (values > steady * (1 + share)) & (values > steady + deviations * noise)

        slow = np.logical_and.accumulate(beyond(times, _SLOWER_BY, _DEVIATIONS), axis=1).sum(axis=1)
        slow[(slow == 1) & ~beyond(times[:, :1], _ALONE_SLOWER_BY, _ALONE_DEVIATIONS)[:, 0]] = 0
    seen = [NONE_SEEN] * len(times)
    for steps in np.unique(slow).tolist():
        runs = np.flatnonzero(slow == steps)
        if steps > half:  # it did not get warm in time: what is left out is not all of it
            trends: list[float | None] = list((steady[runs, 0] / medians(times[runs, :half]) - 1).tolist())
        else:
            trends = _trends(times[runs, steps:])
        for run, trend in zip(runs.tolist(), trends, strict=True):
            seen[run] = WarmUp(min(steps, half), trend)
    return seen


def _stretch(seconds: FloatArray, middle: FloatArray) -> FloatArray:
    """The factor that stretches a deviation inside n consecutive steps, (runs, 1), for noise of autocorrelation r.

    It is sqrt((1 + r) / (1 - r)), by which the error of a mean grows, times 1 + 8 / n, because few steps tell r badly.
    The bias of r is taken off after Kendall, "Note on bias in the estimation of autocorrelation" (Biometrika 41, 1954,
    403-404).
    """
    count = seconds.shape[1]
    ratios = seconds / np.where(middle > 0, middle, math.nan)
    correlations = np.array([_correlation(own) for own in ratios - ratios.mean(axis=1, keepdims=True)])[:, None]
    r = (count * correlations + 1) / (count - 3)
    r = np.where(np.isnan(r), _MOST_CORRELATED, np.clip(r, 0.0, _MOST_CORRELATED))
    return np.where(middle > 0, np.sqrt((1 + r) / (1 - r)) * (1 + _SMALL_SAMPLE / count), 1.0)


def _trends(seconds: FloatArray) -> list[float | None]:
    """Share by which the times of each run change where they do so steadily: by more than 5 % and more than by chance.

    A line is fitted to the logarithms of the medians of up to 20 blocks of consecutive steps, with errors that are
    correlated from block to block: Prais & Winsten, "Trend estimators and serial correlation" (Cowles Commission 383,
    1954). The correlation is that of the residuals, corrected for the bias that fitting a line brings.
    """
    trends: list[float | None] = [None] * len(seconds)
    steps = seconds.shape[1]
    count = min(_BLOCKS, steps)
    if count < _FEWEST_BLOCKS:
        return trends
    edges, third = steps * np.arange(count + 1) // count, count // 3
    lengths, blocks = np.diff(edges), np.empty((len(seconds), count))
    for length in np.unique(lengths):
        own = np.flatnonzero(lengths == length)
        blocks[:, own] = medians(seconds[:, edges[own, None] + np.arange(length)])
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        middle, least, most = medians(blocks), blocks.min(axis=1), blocks.max(axis=1)
        told = (least > 0) & (least / middle != 0) & np.isfinite(most / middle)
        change = medians(blocks[:, -third:]) / medians(blocks[:, :third]) - 1
    for run in np.flatnonzero(told & ~(np.abs(change) <= _CHANGE)).tolist():
        slope, error = _slope(np.log(blocks[run] / middle[run]))
        chance = t_below(count - 3, -abs(slope) / error) if error > 0 else 0.0
        if slope * change[run] > 0 and chance < _P:
            trends[run] = float(change[run])
    return trends


def _slope(values: FloatArray) -> tuple[float, float]:
    """The slope per place and its standard error, by Prais and Winsten."""
    count = len(values)
    times: FloatArray = np.arange(count, dtype=np.float64) - (count - 1) / 2
    slope = times @ values / (times @ times)
    r = _correlation(values - float(values.mean()) - slope * times)
    r = min(max((count * r + 2) / (count - 4), 0.0), _MOST_CORRELATED_BLOCKS)

    def free(of: FloatArray) -> FloatArray:
        return np.concatenate([math.sqrt(1 - r * r) * of[:1], of[1:] - r * of[:-1]])

    ones, times, values = free(np.ones(count)), free(times), free(values)
    oo, ot, tt = ones @ ones, ones @ times, times @ times
    whole = oo * tt - ot * ot
    slope = (oo * (times @ values) - ot * (ones @ values)) / whole
    level = (tt * (ones @ values) - ot * (times @ values)) / whole
    squares = float(((values - level * ones - slope * times) ** 2).sum())
    return float(slope), math.sqrt(squares / (count - 3) * float(oo / whole))


def _correlation(residuals: FloatArray) -> float:
    """Correlation of each value with the next one; 0 where there is none."""
    with np.errstate(over="ignore", invalid="ignore"):
        whole = float(residuals @ residuals)
        return float(residuals[1:] @ residuals[:-1]) / whole if whole > 0 else 0.0
