"""Many configurations at once are what each is alone; what was measured is answered from its own runs."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import numpy as np
import pytest

from evidence_factory import IMAGES, MEASURED, UNKNOWN, make_evidence, make_point
from vitscale.engines.variants import EngineVariant
from vitscale.errors import RequestError
from vitscale.prediction import workloads
from vitscale.prediction.configurations import Candidate
from vitscale.prediction.evaluating import ROUGH, evaluate
from vitscale.prediction.evidence import Evidence, Series, StepParts
from vitscale.prediction.fitting import DRAWS, fit
from vitscale.prediction.gpu_types import gpu_type
from vitscale.prediction.instances import Instance
from vitscale.prediction.layouts import whole_steps
from vitscale.prediction.network.links import declared_link
from vitscale.prediction.predicting import Question, predict, spread_by_part
from vitscale.prediction.variants import variant
from vitscale.prediction.workloads import evaluate_all

PARTS = StepParts(0.19, 0.125, 0.01, 0.0, 0.0, 0.0, 0.0)
POINTS = tuple(make_point(n, (s, s * 1.01), parts=PARTS) for n, s in ((1, 0.2), (2, 0.202), (4, 0.204)))
FITTED = fit(make_evidence(POINTS, MEASURED))


def ddp(gpus: int, micro_batch: int = 64, grad_accum: int = 1, **how: object) -> Candidate:
    return Candidate(gpus, 8, EngineVariant("ddp"), micro_batch, grad_accum, **how)  # type: ignore[arg-type]  # fields of a candidate


def test_a_candidate_is_what_predict_says_of_it() -> None:
    many = evaluate_all(FITTED, "ddp", [ddp(8), ddp(64, 32), ddp(1024)], memory_capacity_bytes=80 * 10**9)
    gpus_of, micro_batches = np.array([8.0, 64.0, 1024.0]), np.array([64.0, 32.0, 64.0])
    steps = whole_steps(np.full(3, float(IMAGES)), gpus_of * micro_batches, micro_batches, drop_last=False)
    for n, (gpus, micro_batch) in enumerate([(8, 64), (64, 32), (1024, 64)]):
        asked = Question((gpus,), 8, changes={"micro_batch": micro_batch}, memory_capacity_bytes=80 * 10**9)
        (alone,) = predict(FITTED, asked)
        assert many.step.at(n) == alone.step_seconds
        assert alone.epoch_seconds is not None
        assert steps[n] * many.step.value[n] == pytest.approx(alone.epoch_seconds.value)
        assert many.memory_bytes[n] == alone.memory_bytes
        assert many.oom_chance[n] == pytest.approx(alone.oom_chance)
        assert many.labels[n] == alone.label


@pytest.mark.parametrize("in_forks", [False, True])
def test_a_configuration_is_the_same_to_the_digit_whatever_else_is_asked(
    monkeypatch: pytest.MonkeyPatch, in_forks: bool
) -> None:
    """Many share arrays, the memory of like ranks and cached messages, or are worked out in another process: each is
    what it is by itself."""
    every = [
        Candidate(gpus, 8, EngineVariant.of_fields(engine, {"zero_stage": stage}), micro_batch, accum, checkpointed)
        for engine, stage in (("ddp", 0), ("fsdp2", 0), *(("deepspeed", stage) for stage in range(4)))
        for gpus, micro_batch, accum, checkpointed in ((8, 64, 1, False), (24, 16, 4, False), (8, 32, 1, True))
    ]
    forked: list[int] = []
    fork = os.fork
    with monkeypatch.context() as changed:
        changed.setattr(workloads, "_MANY_KINDS", 2 if in_forks else 1 << 30)
        changed.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
        changed.setattr(os, "fork", lambda: forked.append(1) or fork())  # type: ignore[func-returns-value]  # None
        many = evaluate_all(FITTED, "ddp", every)
    assert len(forked) == in_forks
    for n, one in enumerate(every):
        alone = evaluate_all(FITTED, "ddp", [one])
        assert many.labels[n] == alone.labels[0]
        assert many.step.at(n) == alone.step.at(0)
        assert many.speed.at(n) == alone.speed.at(0)
        assert many.memory_bytes[n] == alone.memory_bytes[0]
        assert np.isfinite(many.memory_bytes[n])


def test_what_was_measured_is_answered_from_its_own_runs() -> None:
    outlier = replace(POINTS[1], step_seconds=(0.4, 0.404))
    fitted = fit(make_evidence((POINTS[0], outlier, POINTS[2]), MEASURED))
    found = evaluate_all(fitted, "ddp", [Candidate.of(point.trial) for point in POINTS] + [ddp(3)])

    assert found.labels == ("measured", "measured", "measured", "does not fit")
    assert found.step.value[1] == pytest.approx(math.sqrt(0.4 * 0.404), rel=0.01)
    # Of two runs: the mean is 1 / sqrt(2) as uncertain as one run, a third one sqrt(1 + 1 / 2) times as uncertain.
    mean, future = (
        np.log(high / low) for high, low in (
            (found.step.high[1], found.step.low[1]), (found.step.future_high[1], found.step.future_low[1])
        )
    )  # fmt: skip
    assert future / mean == pytest.approx(math.sqrt(3), rel=0.15)


def test_what_was_measured_once_is_no_less_sure_than_its_neighbours_that_nobody_ran() -> None:
    """Steps of a known curve, one run each: the fit has five runs, and a configuration alone has one of them."""
    steps = {1: 0.2, 2: 0.206, 4: 0.212, 8: 0.218, 16: 0.224}
    points = tuple(make_point(n, step, engine="unknown", model=None) for n, step in steps.items())
    fitted = fit(make_evidence(points, UNKNOWN))
    asked = Candidate.of(points[3].trial)
    own, of_model = (
        evaluate(variant(fitted.series["ddp"], {}), [asked], measured=measured) for measured in (points, ())
    )
    assert (own.labels, own.step.value[0]) == (("measured",), pytest.approx(steps[8]))
    for of_own, of_fit, truth in ((own.step, of_model.step, steps[8]), (own.speed, of_model.speed, 0.2 / steps[8])):
        assert of_own.low[0] >= min(of_own.value[0], of_fit.low[0])
        assert of_own.high[0] <= max(of_own.value[0], of_fit.high[0])
        assert of_own.low[0] < truth < of_own.high[0]
    assert own.step.future_high[0] <= max(own.step.value[0], of_model.step.future_high[0])


def test_a_batch_beyond_the_largest_measured_one_is_extrapolated() -> None:
    small = tuple(make_point(n, 0.05, micro_batch=16) for n in (1, 2, 4))
    both = Evidence((Series("ddp", "strong-micro", {}, POINTS), Series("16", "strong-micro", {}, small)), MEASURED)
    found = evaluate_all(fit(both), "ddp", [ddp(3, batch) for batch in (8, 16, 32, 64, 128)])

    assert found.labels == ("extrapolated", "interpolated", "interpolated", "interpolated", "extrapolated")


def test_rough_middles_are_within_a_few_per_cent() -> None:
    asked = [ddp(gpus, batch) for gpus in (2, 16, 256) for batch in (16, 64, 256)]
    rough, whole = (evaluate_all(FITTED, "ddp", asked, draws=draws).step.value for draws in (ROUGH, DRAWS))

    assert rough == pytest.approx(whole, rel=0.1)


def test_each_engine_is_worked_out_from_the_series_that_measured_it() -> None:
    slow_fsdp2 = tuple(make_point(n, (0.4, 0.41), engine="fsdp2") for n in (1, 2, 4))
    evidence = Evidence(
        (Series("ddp", "strong-micro", {}, POINTS), Series("fsdp2", "strong-micro", {}, slow_fsdp2)), MEASURED
    )
    found = evaluate_all(fit(evidence), "ddp", [ddp(8), Candidate(8, 8, EngineVariant("fsdp2"), 64, 1)])
    assert found.step.value[1] > 1.8 * found.step.value[0]


def test_what_is_unknown_is_not_a_number() -> None:
    blind = fit(make_evidence([make_point(n, 0.2, images=None) for n in (1, 2)], UNKNOWN))
    found = evaluate_all(blind, "ddp", [ddp(4)])
    images = np.array([np.nan])
    assert np.isnan(whole_steps(images, np.array([256.0]), np.array([64.0]), drop_last=False)).all()
    assert np.isnan(found.oom_chance).all()
    assert np.isfinite(found.step.value).all()


def test_checkpointing_computes_a_third_more_and_takes_less_memory() -> None:
    plain, saving = ddp(8), ddp(8, activation_checkpointing=True)
    found = evaluate_all(FITTED, "ddp", [plain, saving])
    assert found.step.value[1] / found.step.value[0] == pytest.approx(1.32, rel=0.04)
    assert found.memory_bytes[1] < found.memory_bytes[0]


def test_accumulation_shares_one_exchange_among_micro_steps() -> None:
    found = evaluate_all(FITTED, "ddp", [ddp(64), ddp(64, grad_accum=4)])
    assert 3.8 * 0.19 < found.step.value[1] - found.step.value[0] + 0.19 < 4.4 * 0.19
    assert found.speed.value[1] >= found.speed.value[0]


def test_with_one_global_batch_efficiency_is_against_one_rank_that_has_all_of_it() -> None:
    """512 images a step, at most 64 at once, each micro-step of b images 0.05 + 0.25 b / 64 s, and nothing sent: from 8
    ranks on a rank's own share shrinks, and a sixth of its micro-step does not."""
    batches = {1: (64, 8), 8: (64, 1), 16: (32, 1), 32: (16, 1)}
    steps = {gpus: accum * (0.05 + 0.25 * images / 64) for gpus, (images, accum) in batches.items()}
    points = [
        make_point(gpus, (steps[gpus], 1.004 * steps[gpus], 0.996 * steps[gpus]), micro_batch=images, grad_accum=accum)
        for gpus, (images, accum) in batches.items()
    ]
    fitted = fit(make_evidence(points, MEASURED, mode="strong-global"))
    found = evaluate_all(
        fitted, "ddp", [replace(ddp(gpus, *batches[gpus]), ranks_per_node=min(8, gpus)) for gpus in batches]
    )
    for n, gpus in enumerate(batches):
        (said,) = predict(fitted, Question((gpus,), 8))
        assert said.efficiency is not None
        assert found.speed.value[n] == pytest.approx(said.efficiency.value, rel=0.02)
        assert found.speed.value[n] == pytest.approx(steps[1] / (gpus * steps[gpus]), rel=0.02)


def test_an_instance_has_the_network_of_its_own() -> None:
    t4 = tuple(replace(point, devices=("Tesla T4",) * point.gpus) for point in POINTS)
    instances = [Instance(name, gpu_type("T4"), 4, 2.0, declared_link(name)) for name in ("1GbE", "8x200Gb/s")]
    slow, fast = (replace(ddp(16), ranks_per_node=4, instance=one) for one in instances)
    found = evaluate_all(fit(make_evidence(t4, UNKNOWN)), "ddp", [slow, fast, replace(fast, gpus=4)])

    assert found.labels == ("extrapolated", "extrapolated", "interpolated")
    assert found.step.value[0] > 2 * found.step.value[1]


def test_memory_that_was_said_is_that_of_the_measured_gpu_and_not_of_an_instance_with_another() -> None:
    """ViT-B/16 at 64 images fits on a T4 of 16 GB and at 512 does not, whatever the measured GPUs are said to have."""
    v100 = tuple(replace(point, devices=("Tesla V100-SXM2-16GB",) * point.gpus) for point in POINTS)
    points = tuple(
        replace(p, trial=p.trial.model_copy(update={"train": p.trial.train.model_copy(update={"precision": "fp16"})}))
        for p in v100
    )
    fitted, instance = fit(make_evidence(points, MEASURED)), Instance("g4", gpu_type("T4"), 1, 0.5)
    other = [Candidate(1, 1, EngineVariant("ddp"), images, 1, instance=instance) for images in (64, 512)]
    for said in (None, 4 * 10**9, 400 * 10**9):
        chances = evaluate_all(fitted, "ddp", other, memory_capacity_bytes=said).oom_chance
        assert [bool(chance > 0.5) for chance in chances] == [False, True]
    small = evaluate_all(fitted, "ddp", [ddp(1)], memory_capacity_bytes=4 * 10**9)
    assert small.oom_chance[0] > 0.5


def test_none_and_unknown_series() -> None:
    assert evaluate_all(FITTED, "ddp", []).step.value.shape == (0,)
    with pytest.raises(RequestError, match="dpd"):
        evaluate_all(FITTED, "dpd", [ddp(8)])


def test_the_shares_of_the_spread_add_up_and_name_what_is_not_known() -> None:
    blind = variant(fit(make_evidence(POINTS, UNKNOWN)).series["ddp"], {})
    here, there = spread_by_part(blind, ddp(8)), spread_by_part(blind, ddp(64))
    assert sum(there.values()) == pytest.approx(1.0)
    assert max(there, key=lambda part: there[part]) == "network between hosts"
    assert here["network between hosts"] == pytest.approx(0.0, abs=1e-9)
    assert math.isclose(sum(here.values()), 1.0)
