"""How well predictions do where the answer is known: fitted on smaller rank counts, compared with larger ones."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from vitscale.analysis.statistics import t_quantile
from vitscale.prediction.evidence import Evidence, Point, Series
from vitscale.prediction.fitting import Fitted, fit_series
from vitscale.prediction.predicting import Question, predict
from vitscale.prediction.results import CONFIDENCE, Estimate, Score

_FEWEST = 2
"""Rank counts to fit on, and to tell how constant seconds per step are."""


def score(evidence: Evidence) -> tuple[Score, ...]:
    """Of each series with enough rank counts: those up to half of the largest are fitted, the others held out."""
    return tuple(found for series in evidence.series if (found := score_series(series, evidence)) is not None)


def score_series(series: Series, evidence: Evidence) -> Score | None:
    """One series' score; None where fewer than two rank counts are at most half of the largest."""
    largest = max(point.gpus for point in series.points)
    known = tuple(point for point in series.points if 2 * point.gpus <= largest)
    if len({point.gpus for point in known}) < _FEWEST:
        return None
    held_out = [point for point in series.points if point not in known]
    fitted = fit_series(replace(series, points=known), evidence)
    baseline = constant_seconds_per_step(known)
    errors, base_errors, scores, base_scores, held = list[float](), list[float](), list[float](), list[float](), 0
    for point in held_out:
        asked = Question((point.gpus,), nodes_of=point.trial.world.ranks_per_node, series=series.name)
        predicted = predict(Fitted(evidence, {series.name: fitted}), asked)[0].step_seconds
        for seconds in point.step_seconds:
            errors.append(abs(predicted.value / seconds - 1))
            base_errors.append(abs(baseline.value / seconds - 1))
            scores.append(interval_score(predicted.future_low, predicted.future_high, seconds))
            base_scores.append(interval_score(baseline.future_low, baseline.future_high, seconds))
            held += predicted.future_low <= seconds <= predicted.future_high
    return Score(
        series=series.name,
        fitted_gpus=tuple(point.gpus for point in known),
        held_out_gpus=tuple(point.gpus for point in held_out),
        runs=len(errors),
        mean_absolute_percentage_error=statistics.fmean(errors),
        worst_error=max(errors),
        held=held,
        interval_score=statistics.fmean(scores),
        baseline_error=statistics.fmean(base_errors),
        baseline_interval_score=statistics.fmean(base_scores),
    )


def interval_score(low: float, high: float, actual: float) -> float:
    """The width of a 90 % interval and, for what lies outside, 20 times the distance to it, over the actual value.

    Gneiting & Raftery, "Strictly Proper Scoring Rules, Prediction, and Estimation" (2007), equation 43.
    """
    outside = max(0.0, low - actual) + max(0.0, actual - high)
    return (high - low + 2 / (1 - CONFIDENCE) * outside) / actual


def constant_seconds_per_step(points: Sequence[Point]) -> Estimate:
    """The simplest honest prediction: a step takes what it took; the interval is Student's t of the logarithms.

    The micro-batch must be the same at all points for it to mean anything, as it is but for strong-global.
    """
    steps = [seconds for point in points for seconds in point.step_seconds]
    middle = statistics.median(steps)
    if len(steps) < 2:
        return Estimate(middle, middle, middle, 0.0, math.inf)
    logs = [math.log(seconds) for seconds in steps]
    half = t_quantile(len(logs) - 1, (1 + CONFIDENCE) / 2) * statistics.stdev(logs)
    mean, future = half / math.sqrt(len(logs)), half * math.sqrt(1 + 1 / len(logs))
    return Estimate(
        middle, middle * math.exp(-mean), middle * math.exp(mean), middle * math.exp(-future), middle * math.exp(future)
    )
