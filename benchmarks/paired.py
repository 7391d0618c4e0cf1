"""Errors and intervals of several models on the same held-out points: shares that held, scores, paired differences.

Errors are ln(predicted rate / measured rate), positive where too fast. Interval scores are of logarithms: they are the
same whether rates or seconds are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitscale.prediction.answering import interval_score
from vitscale.prediction.results import CONFIDENCE

Array = NDArray[np.float64]
OURS = "vitscale"
RESAMPLES = 2000
_TAIL = (1 - CONFIDENCE) / 2


@dataclass(frozen=True)
class Point:
    """One held-out rank count of one series. Rates are samples per second."""

    series: str
    source: str
    """The repository that published it."""
    unit: str
    """Series that share figures have the same: what is resampled."""
    gpus: int
    label: str
    measured: float
    """The median of the runs."""
    run: float
    """The first of them: one run, which the interval of a future run should hold."""
    predicted: Mapping[str, float]
    """Model -> rate."""
    low: float
    """Of a future run, 90 %, as vitscale says; so `high`."""
    high: float
    mean_low: float
    mean_high: float


@dataclass(frozen=True)
class Intervals:
    """Of the logarithm of a future run's rate, against the run that was measured; one entry per point."""

    low: Array
    high: Array

    @property
    def held(self) -> NDArray[np.bool_]:
        """Whether the run lies within."""
        return np.asarray((self.low <= 0) & (self.high >= 0))

    @property
    def scores(self) -> Array:
        """Interval scores: the width, and 20 times the distance of a run that lies outside."""
        # The score is over the actual value, which is put at 1: a logarithm has no zero of its own.
        pairs = zip(self.low, self.high, strict=True)
        return np.array([interval_score(1 + low, 1 + high, 1.0) for low, high in pairs])


def errors(points: Sequence[Point], model: str) -> Array:
    """ln(predicted / measured) of each point."""
    return np.array([math.log(point.predicted[model] / point.measured) for point in points])


def same_intervals(points: Sequence[Point], model: str) -> Intervals:
    """vitscale's own width about the model's middle."""
    ours, middle = (_logs([point.predicted[name] for point in points], points) for name in (OURS, model))
    low, high = (_logs(ends, points) for ends in ([one.low for one in points], [one.high for one in points]))
    return Intervals(middle + low - ours, middle + high - ours)


def intervals_of_other_sources(points: Sequence[Point], model: str) -> Intervals:
    """The middle, less the 95th and the 5th percentile of the model's own errors on all other sources.

    NaN where there is no other source.
    """
    middle, off = _logs([point.predicted[model] for point in points], points), errors(points, model)
    sources = np.array([point.source for point in points])
    ends = np.full((2, len(points)), math.nan)
    for source in np.unique(sources):
        if (others := off[sources != source]).size:
            ends[:, sources == source] = np.quantile(others, [1 - _TAIL, _TAIL])[:, None]
    return Intervals(middle - ends[0], middle - ends[1])


def _logs(rates: Sequence[float], points: Sequence[Point]) -> Array:
    return np.asarray(np.log(np.array(rates) / np.array([point.run for point in points])), dtype=np.float64)


def clopper_pearson(held: int, of: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The exact binomial interval of a share: Clopper & Pearson (Biometrika 1934), by quantiles of the beta."""
    from scipy.special import betaincinv

    tail = (1 - confidence) / 2
    low = 0.0 if held == 0 else float(betaincinv(held, of - held + 1, tail))
    high = 1.0 if held == of else float(betaincinv(held + 1, of - held, 1 - tail))
    return low, high


@dataclass(frozen=True)
class Difference:
    """Of the means of two models over units; below 0 the first is better."""

    mean: float
    low: float
    """90 %, by bootstrap over units; so `high`."""
    high: float
    standard_error: float
    units: int

    @property
    def behind(self) -> bool:
        """The first is worse by more than two standard errors."""
        return self.mean > 2 * self.standard_error


def difference(first: Array, second: Array, points: Sequence[Point], seed: int) -> Difference | None:
    """Of `first` less `second`, a figure per point each: in every unit the mean over its points, of those the mean.

    None with fewer than two units, where nothing tells how far units differ.
    """
    of_units = mean_of_units(first - second, points)
    if len(of_units) < 2:
        return None
    chosen = np.random.default_rng(seed).integers(len(of_units), size=(RESAMPLES, len(of_units)))
    low, high = np.quantile(of_units[chosen].mean(axis=1), [_TAIL, 1 - _TAIL])
    error = float(of_units.std(ddof=1)) / math.sqrt(len(of_units))
    return Difference(float(of_units.mean()), float(low), float(high), error, len(of_units))


def mean_of_units(figures: Array, points: Sequence[Point]) -> Array:
    """The mean over each unit's points of a figure per point; one entry per unit."""
    names = np.array([point.unit for point in points])
    return np.array([np.mean(figures[names == unit]) for unit in dict.fromkeys(names)])


def units(figures: Sequence[tuple[str, frozenset[object]]]) -> list[str]:
    """For each series, by (name, its measured figures), the name of the first that it shares figures with, at any
    number of removes. One alone may be alike by chance."""
    owner: list[int] = list(range(len(figures)))
    for n, (_, own) in enumerate(figures):
        joined = {owner[m] for m in range(n) if len(own & figures[m][1]) > 1} | {n}
        owner = [min(joined) if one in joined else one for one in owner]
    return [figures[n][0] for n in owner]
