"""Is a run warm? How many of its first steps are still slow, and whether its times fall or rise through the rest.

Steps marked as warm-up (`measure.warmup_steps`) have been left out before; this looks at what follows them.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from vitscale.analysis.statistics import t_below

FEWEST_STEPS = 12
"""Below it chance makes the first steps look slow too often, and nothing is looked for."""
_SLOWER_BY = 0.05
_DEVIATIONS = 3.0
_ALONE_SLOWER_BY = 0.5
_ALONE_DEVIATIONS = 10.0
_MAD_TO_SIGMA = 1.4826
"""Median absolute deviation of normal noise to its standard deviation."""
_SMALL_SAMPLE = 8.0
_MOST_CORRELATED = 0.9
_BLOCKS = 20
_FEWEST_BLOCKS = 8
_CHANGE = 0.05
_P = 1e-4
"""One-sided, in either direction. A test that estimates the autocorrelation from few blocks is far from exact: with
this and the 5 % that is asked for as well, noise with an autocorrelation of 0.9 falls or rises in under 3 % of runs."""
_MOST_CORRELATED_BLOCKS = 0.97


@dataclass(frozen=True)
class WarmUp:
    """What a run's times say of its warm-up."""

    steps: int
    """So many of the first steps are slow; never more than half of all."""
    trend: float | None
    """By what share the times change from the first to the last third of the other steps: below 0 they fall, above 0
    they rise. None where they are steady."""


NONE_SEEN = WarmUp(0, None)


def warm_up(seconds: Sequence[float]) -> WarmUp:
    """Looks for a slow beginning in the times of like steps, in order.

    The steady level is the median of the later half, its noise the scaled median absolute deviation there: neither
    moves for a few outliers. Noise that lasts from step to step moves the level of a whole run, and shows too little
    inside a half: deviations are made longer by it (`_stretch`). A step is slow where it is beyond that level by 5 %
    and by 3 such deviations. Two or more slow steps at the beginning are warm-up; so is one alone that is beyond by
    half and by 10 deviations. What is slow later on is no warm-up.
    """
    if len(seconds) < FEWEST_STEPS:
        return NONE_SEEN
    half = len(seconds) // 2
    steady = statistics.median(seconds[half:])
    noise = _MAD_TO_SIGMA * statistics.median(abs(value - steady) for value in seconds[half:])
    noise *= _stretch(seconds[half:])

    def beyond(value: float, share: float, deviations: float) -> bool:
        return value > steady * (1 + share) and value > steady + deviations * noise

    slow = next((n for n, value in enumerate(seconds) if not beyond(value, _SLOWER_BY, _DEVIATIONS)), len(seconds))
    if slow == 1 and not beyond(seconds[0], _ALONE_SLOWER_BY, _ALONE_DEVIATIONS):
        slow = 0
    if slow > half:  # it did not get warm in time: what is left out is not all of it
        return WarmUp(half, steady / statistics.median(seconds[:half]) - 1)
    return WarmUp(slow, _trend(seconds[slow:]))


def _stretch(seconds: Sequence[float]) -> float:
    """What a deviation inside n consecutive steps is multiplied by, for the autocorrelation r of their noise.

    sqrt((1 + r) / (1 - r)), by which the error of a mean grows, times 1 + 8 / n, for few steps tell r badly. r is
    unbiased by Kendall, "Note on bias in the estimation of autocorrelation" (Biometrika 41, 1954, 403-404).
    """
    count, middle = len(seconds), statistics.median(seconds)
    if middle <= 0:
        return 1.0
    ratios = [value / middle for value in seconds]
    mean = sum(ratios) / count
    r = (count * _correlation([ratio - mean for ratio in ratios]) + 1) / (count - 3)
    r = min(max(r, 0.0), _MOST_CORRELATED) if r == r else _MOST_CORRELATED
    return math.sqrt((1 + r) / (1 - r)) * (1 + _SMALL_SAMPLE / count)


def _trend(seconds: Sequence[float]) -> float | None:
    """Share by which the times change, where they do so steadily: by 5 % and more than chance has it.

    A line through the logarithms of the medians of up to 20 blocks of consecutive steps, with errors that are
    correlated from block to block: Prais & Winsten, "Trend estimators and serial correlation" (Cowles Commission 383,
    1954). The correlation is that of the residuals, with the bias that fitting a line has taken off.
    """
    count = min(_BLOCKS, len(seconds))
    if count < _FEWEST_BLOCKS:
        return None
    edges = [len(seconds) * edge // count for edge in range(count + 1)]
    blocks = [statistics.median(seconds[start:end]) for start, end in itertools.pairwise(edges)]
    middle, third = statistics.median(blocks), count // 3
    if min(blocks) <= 0 or min(blocks) / middle == 0 or not math.isfinite(max(blocks) / middle):
        return None
    before, after = statistics.median(blocks[:third]), statistics.median(blocks[-third:])
    change = after / before - 1
    if abs(change) <= _CHANGE:
        return None
    slope, error = _slope([math.log(block / middle) for block in blocks])
    chance = t_below(count - 3, -abs(slope) / error) if error > 0 else 0.0
    return change if slope * change > 0 and chance < _P else None


def _slope(values: Sequence[float]) -> tuple[float, float]:
    """The slope per place and its standard error, by Prais and Winsten."""
    count = len(values)
    times = [step - (count - 1) / 2 for step in range(count)]
    mean = sum(values) / count
    slope = sum(t * value for t, value in zip(times, values, strict=True)) / sum(t * t for t in times)
    r = _correlation([value - mean - slope * t for t, value in zip(times, values, strict=True)])
    r = min(max((count * r + 2) / (count - 4), 0.0), _MOST_CORRELATED_BLOCKS)

    def free(of: Sequence[float]) -> list[float]:
        return [math.sqrt(1 - r * r) * of[0], *(now - r * last for last, now in itertools.pairwise(of))]

    ones, times, values = free([1.0] * count), free(times), free(values)

    def product(first: Sequence[float], second: Sequence[float]) -> float:
        return sum(a * b for a, b in zip(first, second, strict=True))

    oo, ot, tt = product(ones, ones), product(ones, times), product(times, times)
    whole = oo * tt - ot * ot
    slope = (oo * product(times, values) - ot * product(ones, values)) / whole
    level = (tt * product(ones, values) - ot * product(times, values)) / whole
    squares = sum((v - level * o - slope * t) ** 2 for v, o, t in zip(values, ones, times, strict=True))
    return slope, math.sqrt(squares / (count - 3) * oo / whole)


def _correlation(residuals: Sequence[float]) -> float:
    """Correlation of each value with the next one; 0 where there is none."""
    whole = sum(value * value for value in residuals)
    return sum(a * b for a, b in itertools.pairwise(residuals)) / whole if whole > 0 else 0.0
