"""Predictions held against what was measured at larger rank counts."""

from __future__ import annotations

import math

import pytest

from evidence_factory import UNKNOWN, make_evidence, make_point
from vitscale.prediction.answering import constant_seconds_per_step, interval_score, score


def test_the_interval_score_is_the_width_and_twenty_times_what_lies_outside() -> None:
    assert interval_score(0.9, 1.1, 1.0) == pytest.approx(0.2)
    assert interval_score(0.9, 1.1, 1.2) == pytest.approx((0.2 + 20 * 0.1) / 1.2)
    assert interval_score(0.9, 1.1, 0.8) == pytest.approx((0.2 + 20 * 0.1) / 0.8)


def test_up_to_half_of_the_largest_count_is_fitted_and_the_rest_held_out() -> None:
    points = [make_point(n, (0.6, 0.61), model=None, engine="unknown") for n in (1, 2, 3, 4, 6, 8)]
    (found,) = score(make_evidence(points, UNKNOWN))
    assert found.fitted_gpus == (1, 2, 3, 4)
    assert found.held_out_gpus == (6, 8)
    assert found.runs == 4
    assert found.held == 4
    assert found.mean_absolute_percentage_error < 0.04
    assert found.baseline_error == pytest.approx((0.605 / 0.6 - 1 + 1 - 0.605 / 0.61) / 2, rel=0.01)


def test_a_run_far_off_is_not_held_and_costs_its_distance() -> None:
    points = [make_point(n, 0.6, model=None, engine="unknown") for n in (1, 2, 3, 4)] + [
        make_point(8, 1.2, model=None, engine="unknown")
    ]
    (found,) = score(make_evidence(points, UNKNOWN))
    assert found.held == 0
    assert found.worst_error > 0.4
    assert found.interval_score > 5


@pytest.mark.parametrize("counts", [(1,), (1, 2), (2, 4, 8)[:2], (4, 5, 6)])
def test_too_few_counts_have_no_score(counts: tuple[int, ...]) -> None:
    assert score(make_evidence([make_point(n, 0.6) for n in counts], UNKNOWN)) == ()


def test_the_baseline_of_two_runs_by_hand() -> None:
    """Logarithms +-d: t(0.95, 1) = 6.314, s = d sqrt 2; halves: t s / sqrt 2 of the mean, t s sqrt(3/2) of a run."""
    d = 0.01
    points = [make_point(1, 0.6 * math.exp(d)), make_point(2, 0.6 * math.exp(-d))]
    found = constant_seconds_per_step(points)
    assert found.ends[1] / found.value == pytest.approx(math.exp(6.3138 * d), rel=1e-3)
    assert found.future_ends[1] / found.value == pytest.approx(math.exp(6.3138 * d * math.sqrt(3)), rel=1e-3)
    assert constant_seconds_per_step(points[:1]).future_high == math.inf
