"""From evidence to an answer: to what was asked, or to what a report shows unasked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vitscale.errors import RequestError
from vitscale.prediction.evidence import Evidence, Series
from vitscale.prediction.fitting import Fitted, fit
from vitscale.prediction.outlook import Outlook
from vitscale.prediction.predicting import Question, predict
from vitscale.prediction.results import Prediction
from vitscale.prediction.scoring import score

_FRACTIONS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""How many times the largest measured rank count a report looks ahead."""


def answer(evidence: Evidence, questions: Sequence[Question]) -> Outlook:
    """Each question answered, and how well such answers did.

    Of several series, those that cannot have the rank counts asked for are left out and told.

    Raises:
        RequestError: no question can be answered.
    """
    fitted = fit(evidence)
    found: list[Prediction] = []
    refused: list[RequestError] = []
    for asked in questions:
        predictions, why = _as_far_as_possible(fitted, asked)
        found += predictions
        refused += why
        if why and len(questions) == 1:
            raise why[0]
    if refused and not found:
        raise refused[0]
    asked_about = {one.series for one in questions}
    judged = replace(evidence, series=tuple(one for one in evidence.series if asked_about & {one.name, None}))
    return Outlook(evidence, tuple(found), score(judged), tuple(dict.fromkeys(map(str, refused))))


def outlook(evidence: Evidence) -> Outlook | None:
    """What a report shows unasked: each series from its smallest measured rank count to eight times its largest.

    None where nothing was measured, or nothing lies beyond it. Rank counts at which a series cannot be (a global batch
    that does not divide) are left out.
    """
    fitted = fit(evidence)
    found: list[Prediction] = []
    for series in (one for one in evidence.series if can_grow(one)):
        predictions, _ = _as_far_as_possible(fitted, Question(gpus=_counts(series), series=series.name))
        if any(one.gpus > series.points[-1].gpus for one in predictions):
            found += predictions
    return Outlook(evidence, tuple(found), score(evidence)) if found else None


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
    return tuple(one for some, _ in alone for one in some), [error for _, why in alone for error in why]


def _counts(series: Series) -> tuple[int, ...]:
    """The measured counts, and beyond them multiples of the largest."""
    largest = series.points[-1].gpus
    beyond = {int(largest * times) for times in _FRACTIONS if (largest * times).is_integer()}
    return tuple(sorted(beyond | {point.gpus for point in series.points}))
