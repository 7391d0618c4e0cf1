"""What the points of a series have in common: devices, loading, messages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from evidence_factory import MEASURED, UNKNOWN, make_evidence, make_point
from vitscale.engines.messages import Message
from vitscale.prediction.evidence import Evidence, StepParts
from vitscale.prediction.step import of_series
from vitscale.prediction.step.of_series import device_factors, model_of, slowdown, typical_slowdown, worlds_of

ONE = make_point(1, 0.2, devices=("old",))
FOUR = make_point(4, 0.3, devices=("new", "old", "new", "new"), rank_speeds=(1.0, 0.5, 0.98, 1.0))


def test_unlike_devices_are_told_by_name_against_the_fastest() -> None:
    factors = device_factors((ONE, FOUR))
    assert factors == {"new": 1.0, "old": 2.0}
    assert (slowdown(ONE, factors), slowdown(FOUR, factors)) == (2.0, 2.0)
    assert (typical_slowdown(ONE, factors), typical_slowdown(FOUR, factors)) == (2.0, 1.0)
    assert worlds_of((ONE, FOUR)).slowdown.tolist() == [2.0, 2.0]


def test_one_slow_device_among_like_ones_counts_against_the_typical_rank() -> None:
    throttled = make_point(4, 0.3, devices=("new",) * 4, rank_speeds=(1.0, 0.5, 1.0, 1.0))
    assert device_factors((throttled,)) == {}
    assert slowdown(throttled, {}) == 2.0
    assert slowdown(make_point(4, 0.3, rank_speeds=(1.0, 0.95, 1.0, 1.0)), {}) == 1.0
    assert slowdown(make_point(4, 0.3), {}) == 1.0


def parts(data_wait: float) -> StepParts:
    return StepParts(0.1, 0.07, 0.01, data_wait, 0.0, 0.0, 0.0)


def test_a_loader_between_steps_takes_what_steps_waited_for_it() -> None:
    """0.064 s for the 64 images of a step."""
    found = model_of((make_point(1, 0.2, parts=parts(0.064)),), make_evidence([], UNKNOWN)).loading
    assert found is not None
    assert found.seconds_per_image == pytest.approx(0.001)
    assert not found.ahead


def test_a_loader_that_steps_wait_for_sets_the_pace() -> None:
    point = make_point(2, 0.32, parts=parts(0.1), workers=4)
    found = model_of((point,), make_evidence([], UNKNOWN)).loading
    assert found is not None
    assert found.seconds_per_image == pytest.approx(0.32 / 64)
    assert found.ahead


def test_a_loader_that_keeps_up_is_known_from_the_check_alone() -> None:
    point = make_point(2, 0.32, parts=parts(0.0), workers=4)
    assert model_of((point,), make_evidence([], UNKNOWN)).loading is None
    found = model_of((point,), Evidence((), MEASURED, loader_images_per_second=500.0)).loading
    assert found is not None
    assert found.seconds_per_image == pytest.approx(1 / 500)


def test_bytes_that_were_counted_stand_before_arithmetic() -> None:
    counted = make_point(2, 0.2, engine="deepspeed", sent_bytes={("all_reduce", "float32"): 1000})
    alone = make_point(1, 0.2, engine="deepspeed")
    found = model_of((alone, counted), make_evidence([], UNKNOWN)).messages
    assert found is not None
    assert sum(one.tensor_bytes * one.times(1) for one in found if one.operation == "all_reduce") == pytest.approx(1000)
    by_arithmetic = model_of((alone,), make_evidence([], UNKNOWN)).messages
    assert by_arithmetic is not None
    assert sum(one.tensor_bytes for one in by_arithmetic) > 1e8


def test_norms_of_a_model_that_arithmetic_does_not_know_are_as_they_were_counted() -> None:
    """Two micro-steps of 44 calls and 20,000 bytes; the gradients' bytes are another matter."""
    sent = {("all_reduce", "float64"): 40_000, ("all_reduce", "float32"): 10**6}
    how: dict[str, Any] = {"model": None, "batch_norm": "synchronised", "grad_accum": 2}
    point = replace(make_point(2, 0.2, sent_bytes=sent, **how), sent_calls={("all_reduce", "float64"): 88})
    (found,) = model_of((make_point(1, 0.2, **how), point), make_evidence([], UNKNOWN)).norms
    assert found.calls * found.tensor_bytes == pytest.approx(20_000)
    assert (found.calls, found.micro_steps) == (44, "all")
    assert model_of((make_point(1, 0.2, **how),), make_evidence([], UNKNOWN)).norms == ()


def test_norms_are_not_among_what_the_engine_sends() -> None:
    vit = make_point(2, 0.2, engine="deepspeed", sent_bytes={("all_reduce", "float32"): 1000})
    sent = {("all_reduce", "float64"): 10**9, ("all_reduce", "float32"): 1000}
    norms = (Message("all_reduce", 1.0, 1, "forward", None, "all"),)
    with mock.patch.object(of_series, "norm_messages", return_value=norms):
        model = model_of((replace(vit, sent_bytes=sent),), make_evidence([], UNKNOWN))
    assert model.messages == model_of((vit,), make_evidence([], UNKNOWN)).messages
    assert model.norms == norms


def test_the_backward_share_is_what_was_timed() -> None:
    timed = make_point(1, 0.2, parts=parts(0.0))
    assert model_of((timed,), make_evidence([], UNKNOWN)).backward_share == pytest.approx(0.7)
    assert model_of((make_point(1, 0.2),), make_evidence([], UNKNOWN)).backward_share == pytest.approx(2 / 3)


def test_the_backend_is_the_points() -> None:
    assert model_of((replace(ONE, backend="gloo"),), make_evidence([], UNKNOWN)).backend == "gloo"
