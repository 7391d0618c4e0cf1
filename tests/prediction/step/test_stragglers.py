"""The expected slowest against tables and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vitscale.prediction.step.model import expected_slowest


@pytest.mark.parametrize(
    ("ranks", "exact"),
    [(1, 0.0), (2, 0.56419), (5, 1.16296), (10, 1.53875), (100, 2.50759), (1000, 3.24144)],
)
def test_the_exact_expectations_of_normal_order_statistics(ranks: int, exact: float) -> None:
    """Harter, Biometrika 48 (1961), table 1; of two it is 1/sqrt(pi)."""
    assert float(expected_slowest(np.array(float(ranks)))) == pytest.approx(exact, abs=0.03)
    assert exact == 0.0 or expected_slowest(np.array(float(ranks))) > 0


def test_a_hundred_thousand_ranks_wait_for_more_than_four_deviations_but_not_for_five() -> None:
    assert 4.3 < expected_slowest(np.array(1e5)) < 4.5


def test_any_shape() -> None:
    assert expected_slowest(np.array([[1.0, 2.0], [2.0, 1.0]])).shape == (2, 2)
    assert expected_slowest(np.array([2.0, 8.0, 2.0])).tolist()[0] == expected_slowest(np.array(2.0))


@pytest.mark.parametrize("ranks", [2, 16, 256])
def test_the_mean_step_of_ranks_that_wait_for_one_another(ranks: int) -> None:
    """Simulated: devices that stay as they are in each job, and jitter in every step."""
    jitter, devices = 0.03, 0.02
    random = np.random.default_rng(7)
    of_jobs = 1 + devices * random.standard_normal((2000, 1, ranks))
    steps = of_jobs + jitter * random.standard_normal((2000, 5, ranks))
    late = (steps.max(axis=2) - steps.mean(axis=2)).mean()
    found = math.hypot(jitter, devices) * float(expected_slowest(np.array(float(ranks))))
    assert found == pytest.approx(late, rel=0.07)  # the formula itself is 4.5 % high for two
