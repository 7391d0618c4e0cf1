from __future__ import annotations

import dataclasses

import pytest

from prediction_factory import resolved_study
from results_factory import make_results
from vitscale.analysis import analyse
from vitscale.errors import RequestError
from vitscale.prediction import answering, fitting
from vitscale.prediction.answering import answer, forecast
from vitscale.prediction.evidence import Evidence, Series, gather
from vitscale.prediction.fitting import FittedSeries, fit, fit_series
from vitscale.prediction.network.checked import network_of
from vitscale.prediction.predicting import Question
from vitscale.trial.trial import Mode

STEPS = {1: [0.100, 0.101], 2: [0.104, 0.105], 4: [0.108, 0.109]}


def evidence(mode: Mode = "strong-micro") -> Evidence:
    return gather(analyse(resolved_study(STEPS, mode)), network_of(None))


def test_a_report_looks_eight_times_as_far_as_was_measured() -> None:
    found = forecast(fit(evidence()))
    assert found is not None
    gpus = [one.gpus for one in found.predictions]
    assert {1, 2, 4, 6, 8, 16, 24, 32} <= set(gpus)
    assert (gpus, gpus[-1]) == (sorted(gpus), 32)
    assert [score.held_out_gpus for score in found.scores] == [(4,)]


def test_the_series_that_is_named_is_fitted_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    of_all = evidence()
    series = tuple(dataclasses.replace(of_all.series[0], name=name) for name in "abc")
    fitted: list[str] = []

    def noted(one: Series, known: Evidence) -> FittedSeries:
        fitted.append(one.name)
        return fit_series(one, known)

    for module in (fitting, answering):  # the latter judges predictions by fits of its own
        monkeypatch.setattr(module, "fit_series", noted)
    answered = answer(fit(dataclasses.replace(of_all, series=series)), [Question((4,), series="b")])
    assert {one.series for one in answered.predictions} == {"b"} == set(fitted)


def test_twice_the_same() -> None:
    assert forecast(fit(evidence())) == forecast(fit(evidence()))


def test_nothing_measured_has_no_outlook() -> None:
    empty = gather(analyse(make_results([], [])), network_of(None))
    assert forecast(fit(empty)) is None


def test_rank_counts_that_a_global_batch_does_not_divide_over_are_left_out() -> None:
    (series,) = evidence().series
    points = tuple(  # 8 images, whatever the ranks
        dataclasses.replace(
            point,
            trial=point.trial.model_copy(
                update={"train": point.trial.train.model_copy(update={"micro_batch": 8 // point.gpus})}
            ),
        )
        for point in series.points
    )
    fixed = dataclasses.replace(evidence(), series=(dataclasses.replace(series, mode="strong-global", points=points),))
    found = forecast(fit(fixed))
    assert found is not None
    assert [one.gpus for one in found.predictions] == [1, 2, 4, 8]
    answered = answer(
        fit(dataclasses.replace(fixed, series=(*fixed.series, dataclasses.replace(series, name="other")))),
        [Question((8, 16), series=series.name), Question((8, 16), series="other")],
    )
    assert [(one.series, one.gpus) for one in answered.predictions] == [("ddp", 8), ("other", 8), ("other", 16)]
    (reason,) = answered.left_out
    assert reason.startswith("ddp: a global batch of 8 does not divide over 16 ranks")


def test_what_alone_is_asked_and_cannot_be_is_refused() -> None:
    (series,) = evidence().series
    fixed = dataclasses.replace(evidence(), series=(dataclasses.replace(series, mode="strong-global"),))
    with pytest.raises(RequestError, match="does not divide over 7 ranks"):
        answer(fit(fixed), [Question((7,), series="ddp")])


def test_a_plain_series_has_no_outlook() -> None:
    (series,) = evidence().series
    points = tuple(
        dataclasses.replace(
            point,
            trial=point.trial.model_copy(update={"train": point.trial.train.model_copy(update={"engine": "none"})}),
        )
        for point in series.points[:1]
    )
    plain = dataclasses.replace(evidence(), series=(dataclasses.replace(series, points=points),))
    assert forecast(fit(plain)) is None
