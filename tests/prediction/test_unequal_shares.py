"""Ranks of unlike speed that take unequal shares: what such runs say of equal ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from evidence_factory import MEASURED, make_evidence, make_point
from vitscale.engines.variants import EngineVariant
from vitscale.prediction.configurations import Candidate
from vitscale.prediction.evidence import Evidence, MeasuredPoint
from vitscale.prediction.fitting import fit
from vitscale.prediction.predicting import Question, predict
from vitscale.prediction.workloads import evaluate_all

SECONDS = {"A": 0.010, "B": 0.030}
"""Device -> its time for an image; nothing else takes any."""


def point(gpus: int, shares: Sequence[int], devices: str, *, named: bool = True) -> MeasuredPoint:
    step = max(share * SECONDS[device] for share, device in zip(shares, devices, strict=True))
    unequal: dict[str, Any] = {"micro_batches": tuple(shares)} if len(set(shares)) > 1 else {}
    speeds = tuple(SECONDS["A"] / SECONDS[device] for device in devices)
    return make_point(
        gpus,
        (0.998 * step, step, 1.002 * step),
        micro_batch=sum(shares) // len(shares),
        devices=tuple(devices) if named else ("cpu",) * gpus,
        rank_speeds=speeds,
        **unequal,
    )


def unequal(*, named: bool = True) -> Evidence:
    """The fast take 24 images and the slow 8: 240 ms for each."""
    points = [point(2, (24, 8), "AB", named=named), point(4, (24, 24, 8, 8), "AABB", named=named)]
    assert [measured.step_seconds[1] for measured in points] == [0.24, 0.24]
    return make_evidence(points, MEASURED)


@pytest.mark.parametrize("named", [True, False], ids=["two types", "one type, unlike speeds"])
def test_with_equal_shares_the_slow_rank_makes_a_step_twice_as_long(named: bool) -> None:
    """16 images take the slow one 480 ms, a little less if a part of that grows with no image: nothing tells."""
    for prediction in predict(fit(unequal(named=named)), Question(gpus=(2, 4))):
        assert prediction.step_seconds.value == pytest.approx(0.48, rel=0.1)
        assert prediction.step_seconds.future_ends[1] > 0.46
        shares = [assumed.taken for assumed in prediction.assumptions if assumed.part == "shares of ranks"]
        assert shares == ["equal, micro-batch 16 on each rank; the measured are unequal"]


def test_so_does_advice_expect_it() -> None:
    (step,) = evaluate_all(fit(unequal()), "ddp", [Candidate(4, 4, EngineVariant("ddp"), 16, 1)]).step.value
    assert step == pytest.approx(0.48, rel=0.1)


def test_equal_shares_that_were_measured_come_out_as_they_are() -> None:
    alike = [point(2, (16, 16), "AB"), point(4, (16,) * 4, "AABB")]
    for prediction in predict(fit(make_evidence(alike, MEASURED)), Question(gpus=(2, 4))):
        assert prediction.step_seconds.value == pytest.approx(0.48, rel=0.02)
        assert not prediction.assumptions


def test_shares_without_a_speed_for_each_rank_are_taken_for_those_of_alike_ranks() -> None:
    points = [dataclasses.replace(own, rank_speeds=None, devices=()) for own in unequal().series[0].points]
    (prediction,) = predict(fit(make_evidence(points, MEASURED)), Question(gpus=(4,)))
    assert prediction.step_seconds.value == pytest.approx(0.16, rel=0.1)  # two thirds of the largest share's
