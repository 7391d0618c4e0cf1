"""Amdahl's law where it is true, and its share in answers that a prior decides."""

from __future__ import annotations

import math

import pytest

from evidence_factory import make_evidence, make_point
from vitscale.prediction import amdahl
from vitscale.prediction.evidence import Evidence
from vitscale.prediction.fitting import fit
from vitscale.prediction.predicting import Question, predict
from vitscale.prediction.results import Prediction


def test_the_law_is_found_where_it_holds() -> None:
    counts = (1, 2, 4, 8)
    assert amdahl.serial_and_parallel(counts, [0.8 + 12 / n for n in counts]) == pytest.approx((0.8, 12.0))
    assert amdahl.serial_and_parallel((4, 4), (1.0, 1.1)) is None


def imported(engine: str = "unknown") -> Evidence:
    """Steps of one micro-batch on 1, 4 and 8 ranks of one host, 0.2 s and 5 ms for each further rank: by Amdahl 5 ms of
    a rank's images are serial."""
    model = None if engine == "unknown" else "vit-b16"
    return make_evidence(
        [make_point(n, 0.2 + 0.005 * (n - 1), per_node=8, engine=engine, model=model) for n in (1, 4, 8)]
    )


def answers(evidence: Evidence, weight: float, monkeypatch: pytest.MonkeyPatch, *counts: int) -> tuple[Prediction, ...]:
    monkeypatch.setattr(amdahl, "WEIGHT", weight)
    return predict(fit(evidence), Question(counts, nodes_of=8))


def test_a_prior_driven_middle_lies_so_far_towards_amdahls_and_its_intervals_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    evidence = imported()
    (alone,), (shared,) = (answers(evidence, weight, monkeypatch, 16) for weight in (0.0, 0.2))
    assert alone.label == shared.label == "prior-driven"
    # 0.2 + 15 x 0.005 s, which lies within the interval of the mean.
    middle, of_law = alone.step_seconds.value, 0.275
    assert middle < of_law < alone.step_seconds.ends[1]
    assert shared.step_seconds.value == pytest.approx(middle**0.8 * of_law**0.2, rel=1e-3)
    assert shared.step_seconds.ends == alone.step_seconds.ends
    assert shared.step_seconds.future_ends == alone.step_seconds.future_ends
    assert alone.speedup
    assert shared.speedup
    assert shared.speedup.value / alone.speedup.value == pytest.approx(middle / shared.step_seconds.value)


def test_far_out_it_goes_no_further_than_the_interval_and_counts_less(monkeypatch: pytest.MonkeyPatch) -> None:
    evidence = imported()
    (alone,), (shared,) = (answers(evidence, weight, monkeypatch, 4096) for weight in (0.0, 0.2))
    low, high = alone.step_seconds.ends
    assert 0.2 + 4095 * 0.005 > high > low
    reach = math.log(shared.step_seconds.value / alone.step_seconds.value)
    assert reach == pytest.approx(0.2 / 3 * math.log(high / alone.step_seconds.value))  # 9 doublings


@pytest.mark.parametrize(("engine", "gpus"), [("unknown", 6), ("unknown", 8), ("ddp", 16)])
def test_what_was_measured_and_messages_that_are_known_keep_their_own(
    engine: str, gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    evidence = imported(engine)
    alone, shared = (answers(evidence, weight, monkeypatch, gpus) for weight in (0.0, 0.2))
    assert [one.step_seconds for one in alone] == [one.step_seconds for one in shared]
