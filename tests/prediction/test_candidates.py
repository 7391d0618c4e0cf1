"""Thousands of configurations at once are what each is alone."""

from __future__ import annotations

import math

import numpy as np
import pytest

from evidence_factory import MEASURED, UNKNOWN, make_evidence, make_point
from vitscale.errors import RequestError
from vitscale.prediction.candidates import Candidate, forecast_candidates, spread_by_part
from vitscale.prediction.evidence import Evidence, Series, StepParts
from vitscale.prediction.fitting import fit
from vitscale.prediction.predicting import Question, predict

PARTS = StepParts(0.19, 0.125, 0.01, 0.0, 0.0, 0.0, 0.0)
POINTS = tuple(make_point(n, (s, s * 1.01), parts=PARTS) for n, s in ((1, 0.2), (2, 0.202), (4, 0.204)))
FITTED = fit(make_evidence(POINTS, MEASURED))


def ddp(gpus: int, micro_batch: int = 64, grad_accum: int = 1, **how: object) -> Candidate:
    return Candidate(gpus, 8, "ddp", 0, micro_batch, grad_accum, **how)  # type: ignore[arg-type]


def test_a_candidate_is_what_predict_says_of_it() -> None:
    many = forecast_candidates(FITTED, "ddp", [ddp(8), ddp(64, 32), ddp(1024)], 80 * 10**9)
    for n, (gpus, micro_batch) in enumerate([(8, 64), (64, 32), (1024, 64)]):
        asked = Question((gpus,), 8, changes={"micro_batch": micro_batch}, memory_capacity_bytes=80 * 10**9)
        (alone,) = predict(FITTED, asked)
        assert many.step_seconds[n] == pytest.approx(alone.step_seconds.value, rel=0.03)
        assert many.step_future_high[n] == pytest.approx(alone.step_seconds.future_high, rel=0.06)
        assert alone.epoch_seconds is not None
        assert many.epoch_seconds[n] == pytest.approx(alone.epoch_seconds.value, rel=0.03)
        assert many.memory_bytes[n] == alone.memory_bytes
        assert many.oom_chance[n] == pytest.approx(alone.oom_chance)
        assert many.labels[n] == alone.label


def test_each_engine_is_worked_out_from_the_series_that_measured_it() -> None:
    slow_fsdp2 = tuple(make_point(n, (0.4, 0.41), engine="fsdp2") for n in (1, 2, 4))
    evidence = Evidence(
        (Series("ddp", "strong-micro", {}, POINTS), Series("fsdp2", "strong-micro", {}, slow_fsdp2)), MEASURED
    )
    found = forecast_candidates(fit(evidence), "ddp", [ddp(8), Candidate(8, 8, "fsdp2", 0, 64, 1)])
    assert found.step_seconds[1] > 1.8 * found.step_seconds[0]


def test_what_is_unknown_is_not_a_number() -> None:
    blind = fit(make_evidence([make_point(n, 0.2, images=None) for n in (1, 2)], UNKNOWN))
    found = forecast_candidates(blind, "ddp", [ddp(4)])
    assert np.isnan(found.epoch_seconds).all()
    assert np.isnan(found.oom_chance).all()
    assert np.isfinite(found.step_seconds).all()


def test_checkpointing_computes_a_third_more_and_takes_less_memory() -> None:
    plain, saving = ddp(8), ddp(8, activation_checkpointing=True)
    found = forecast_candidates(FITTED, "ddp", [plain, saving])
    assert found.step_seconds[1] / found.step_seconds[0] == pytest.approx(1.32, rel=0.04)
    assert found.memory_bytes[1] < found.memory_bytes[0]


def test_accumulation_shares_one_exchange_among_micro_steps() -> None:
    found = forecast_candidates(FITTED, "ddp", [ddp(64), ddp(64, grad_accum=4)])
    assert 3.8 * 0.19 < found.step_seconds[1] - found.step_seconds[0] + 0.19 < 4.4 * 0.19
    assert found.efficiency[1] >= found.efficiency[0]


def test_none_and_unknown_series() -> None:
    assert forecast_candidates(FITTED, "ddp", []).step_seconds.shape == (0,)
    with pytest.raises(RequestError, match="dpd"):
        forecast_candidates(FITTED, "dpd", [ddp(8)])


def test_the_shares_of_the_spread_add_up_and_name_what_is_not_known() -> None:
    blind = fit(make_evidence(POINTS, UNKNOWN)).series["ddp"]
    here, there = spread_by_part(blind, 8, 8), spread_by_part(blind, 64, 8)
    assert sum(there.values()) == pytest.approx(1.0)
    assert max(there, key=lambda part: there[part]) == "network between hosts"
    assert here["network between hosts"] == pytest.approx(0.0, abs=1e-9)
    assert math.isclose(sum(here.values()), 1.0)
