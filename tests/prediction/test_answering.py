from __future__ import annotations

import dataclasses
import math

import pytest

from evidence_factory import MEASURED, make_evidence, make_point
from prediction_factory import resolved_study
from results_factory import make_results
from vitscale.analysis import analyse
from vitscale.engines.variants import EngineVariant
from vitscale.errors import RequestError
from vitscale.prediction import answering, fitting
from vitscale.prediction.answering import Changes, answer, forecast, questions
from vitscale.prediction.configurations import Candidate
from vitscale.prediction.evidence import Evidence, Series, gather
from vitscale.prediction.fitting import FittedSeries, fit, fit_series
from vitscale.prediction.network.checked import network_of
from vitscale.prediction.predicting import Question
from vitscale.prediction.variants import variant
from vitscale.prediction.workloads import evaluate_all
from vitscale.trial.parallel import ParallelSpec
from vitscale.trial.trial import Mode, world_of_hosts

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


def of_one_batch() -> Evidence:
    """256 images on 1, 2 and 4 ranks, each with all of its own at once."""
    points = [
        make_point(n, s, micro_batch=256 // n) for n, s in ((1, (2.0, 2.01)), (2, (1.02, 1.03)), (4, (0.53, 0.54)))
    ]
    return make_evidence(points, MEASURED, mode="strong-global")


@pytest.mark.parametrize(
    ("micro_batch", "batches"), [(16, [(16, 8), (16, 2)]), (64, [(64, 2), (32, 1)]), (None, [(128, 1), (32, 1)])]
)
def test_a_global_batch_stays_and_the_micro_batch_is_at_most_what_is_asked(
    micro_batch: int | None, batches: list[tuple[int, int]]
) -> None:
    known = of_one_batch()
    asked = questions(known, (2, 8), Changes(micro_batch=micro_batch))
    answers = answer(fit(known), asked).predictions
    assert [prediction.trial.global_batch for prediction in answers] == [256, 256]
    trains = [prediction.trial.train for prediction in answers]
    assert [(train.micro_batch, train.grad_accum) for train in trains] == batches


def test_under_a_global_batch_accumulation_follows() -> None:
    known = of_one_batch()
    with pytest.raises(
        RequestError, match=r"--grad-accum is 2, and all rank counts keep one global batch.*--micro-batch"
    ):
        answer(fit(known), questions(known, (2,), Changes(grad_accum=2)))


def test_parts_and_the_rest_add_up_to_the_step() -> None:
    """Although they are medians."""
    known = make_evidence([make_point(n, 0.4 + 0.05 * (n - 1) / n) for n in (1, 2, 4, 8)])
    for prediction in answer(fit(known), [Question((8, 64))]).predictions:
        parts = [prediction.compute_seconds, prediction.wait_seconds, prediction.wire_seconds, prediction.norm_seconds]
        parts += [prediction.bubble_seconds, prediction.rest_seconds]
        told = sum(part.value for part in parts if part is not None)
        assert told == pytest.approx(prediction.step_seconds.value)
    assert prediction.rest_seconds is not None
    assert prediction.rest_seconds.value > 0.02 * prediction.step_seconds.value  # 64 ranks, of which 8 were measured


def test_a_measured_efficiency_is_as_unsure_as_its_two_steps() -> None:
    """Five runs of each count, 1 % apart: independent, so that their ratio is unsure by more than either."""
    runs = (0.99, 0.995, 1.0, 1.005, 1.01)
    known = make_evidence([make_point(n, [s * each for each in runs]) for n, s in ((1, 0.4), (2, 0.42), (4, 0.44))])
    every = [Candidate(n, n, EngineVariant("ddp"), 64, 1) for n in (1, 2, 4)]
    evaluated = evaluate_all(fit(known), "ddp", every)
    assert evaluated.labels == ("measured",) * 3
    widths = evaluated.speed.high / evaluated.speed.low - 1
    of_steps = evaluated.step.high / evaluated.step.low - 1
    assert widths[0] == 0.0  # one rank over itself
    assert widths[1:] == pytest.approx(math.sqrt(2) * of_steps[1:], rel=0.25)


def test_uneven_hosts_can_be_asked_about_with_another_split() -> None:
    points = [make_point(n, 0.2 + 0.01 * n, engine="fsdp2", per_node=4) for n in (1, 2, 4, 6)]
    trial = points[-1].trial.model_copy(update={"world": world_of_hosts(6, 4, 1)})
    points[-1] = dataclasses.replace(points[-1], trial=trial, trial_id=trial.identity())
    known = fit(make_evidence(points, MEASURED)).series["ddp"]
    assert variant(known, {"parallel": ParallelSpec(tensor=4)}).trial.world.size == 8


def test_a_stage_that_gathers_in_no_buckets_is_asked_about_without_them() -> None:
    points = [make_point(n, 0.2 + 0.01 * n, engine="deepspeed", zero_stage=1, gather_bucket_mib=8) for n in (1, 2)]
    known = fit(make_evidence(points, MEASURED)).series["ddp"]
    for stage, kept in ((1, 8), (2, None), (3, 8)):
        assert variant(known, {"zero_stage": stage}).trial.train.gather_bucket_mib == kept
