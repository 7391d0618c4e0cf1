"""Answers from evidence, to what was asked or to what a report shows unasked; and how well such answers do."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from vitscale.analysis.statistics import t_quantile
from vitscale.base.forks import spread
from vitscale.errors import RequestError
from vitscale.prediction.evidence import Evidence, Point, Series
from vitscale.prediction.fitting import Fitted, FittedSeries, fit_series
from vitscale.prediction.predicting import Question, predict
from vitscale.prediction.results import CONFIDENCE, Forecast, Prediction, Score, predicted
from vitscale.present.estimate import Estimate

_FRACTIONS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""How many times the largest measured rank count a report looks ahead."""


_MANY_SERIES = 4
"""Number of series from which forks of this process are worth their cost."""


def answer(fitted: Fitted, questions: Sequence[Question]) -> Forecast:
    """Each question answered, and how well such answers did.

    With several questions, series that cannot have the rank counts asked for are left out and named.

    Raises:
        RequestError: no question can be answered.
    """
    evidence = fitted.evidence
    answered: list[Prediction] = []
    refused: list[RequestError] = []
    for asked in questions:
        predictions, why = _as_far_as_possible(fitted, asked)
        answered += predictions
        refused += why
        if why and len(questions) == 1:
            raise why[0]
    if refused and not answered:
        raise refused[0]
    asked_about = {question.series for question in questions}
    judged = replace(evidence, series=tuple(series for series in evidence.series if asked_about & {series.name, None}))
    return Forecast(evidence, tuple(answered), score(judged), tuple(dict.fromkeys(map(str, refused))))


def forecast(fitted: Fitted) -> Forecast | None:
    """What a report shows unasked: each series from its smallest measured rank count to eight times its largest.

    None where nothing was measured, or nothing lies beyond it. Rank counts that a series cannot have (its global batch
    does not divide) are left out.
    """
    evidence = fitted.evidence

    def ahead(series: Series) -> tuple[FittedSeries | None, tuple[Prediction, ...], Score | None]:
        score = score_series(series, evidence)
        if not can_grow(series):
            return None, (), score
        asked = Question(gpus=_counts(series), series=series.name)
        return fitted.series[series.name], _as_far_as_possible(fitted, asked)[0], score

    answers = spread(ahead, evidence.series, fewest=_MANY_SERIES)
    fitted.keep([known for known, _, _ in answers if known is not None])
    predicted = [
        prediction
        for series, (_, predictions, _) in zip(evidence.series, answers, strict=True)
        if any(prediction.gpus > series.points[-1].gpus for prediction in predictions)
        for prediction in predictions
    ]
    scores = tuple(score for _, _, score in answers if score is not None)
    return Forecast(evidence, tuple(predicted), scores) if predicted else None


def can_grow(series: Series, engine: str | None = None) -> bool:
    """Whether there is an engine for more ranks than one: the series' own, or the one it is to have instead."""
    return (engine or series.points[-1].trial.train.engine) != "none"


def _as_far_as_possible(fitted: Fitted, asked: Question) -> tuple[tuple[Prediction, ...], list[RequestError]]:
    """The predictions that can be made, and why others cannot."""
    try:
        return predict(fitted, asked), []
    except RequestError as error:
        if len(asked.gpus) == 1:
            return (), [RequestError(f"{asked.series}: {error}")]
    alone = [_as_far_as_possible(fitted, replace(asked, gpus=(gpus,))) for gpus in asked.gpus]
    return tuple(prediction for some, _ in alone for prediction in some), [error for _, why in alone for error in why]


def _counts(series: Series) -> tuple[int, ...]:
    """The measured counts, and beyond them multiples of the largest."""
    largest = series.points[-1].gpus
    beyond = {int(largest * times) for times in _FRACTIONS if (largest * times).is_integer()}
    return tuple(sorted(beyond | {point.gpus for point in series.points}))


_FEWEST = 2
"""Least rank counts to fit on, and to tell how constant seconds per step are."""


def score(evidence: Evidence) -> tuple[Score, ...]:
    """Scores of series with enough rank counts: counts up to half of the largest are fitted, the others held out."""
    return tuple(own for series in evidence.series if (own := score_series(series, evidence)) is not None)


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
        said = predict(Fitted(evidence, {series.name: fitted}), asked)[0].step_seconds
        low, high = said.future_ends
        for seconds in point.step_seconds:
            errors.append(abs(said.value / seconds - 1))
            base_errors.append(abs(baseline.value / seconds - 1))
            scores.append(interval_score(low, high, seconds))
            base_scores.append(interval_score(*baseline.future_ends, seconds))
            held += low <= seconds <= high
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

    It means something only where the micro-batch is the same at all points, as it is but for strong-global.
    """
    steps = [seconds for point in points for seconds in point.step_seconds]
    middle = statistics.median(steps)
    if len(steps) < 2:
        return predicted(middle, middle, middle, 0.0, math.inf)
    logs = [math.log(seconds) for seconds in steps]
    half = t_quantile(len(logs) - 1, (1 + CONFIDENCE) / 2) * statistics.stdev(logs)
    mean, future = half / math.sqrt(len(logs)), half * math.sqrt(1 + 1 / len(logs))
    return predicted(
        middle, middle * math.exp(-mean), middle * math.exp(mean), middle * math.exp(-future), middle * math.exp(future)
    )
