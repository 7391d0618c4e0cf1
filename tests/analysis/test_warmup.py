from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitscale.analysis.runs import warmup
from vitscale.analysis.runs.warmup import FEWEST_STEPS, NO_WARM_UP, WarmUp

times = st.lists(st.floats(min_value=0.0, max_value=1e308), max_size=60)


def noisy(seed: int, sigma: float, steps: int, runs: int = 1) -> np.ndarray:
    """`runs` white-noise runs around 1."""
    return np.exp(sigma * np.random.default_rng(seed).standard_normal((runs, steps)))


def warm_up(seconds: list[float]) -> WarmUp:
    return warmup.warm_up(np.array([seconds], dtype=float))[0]


def test_level_times_have_no_warm_up() -> None:
    assert warm_up([0.1] * 40) == NO_WARM_UP


def test_the_slow_steps_at_the_beginning_are_warm_up() -> None:
    assert warm_up([3.0, 2.0, 1.5, 1.06, *[1.0] * 30]) == WarmUp(4, None)


def test_what_is_within_5_percent_is_none() -> None:
    assert warm_up([1.04, 1.04, 1.04, *[1.0] * 30]) == NO_WARM_UP


def test_what_is_within_3_deviations_of_the_noise_is_none() -> None:
    # The later half is 0.9 and 1.1 in turn: median 1.0, MAD 0.1, and no noise that lasts. Of 16 steps a deviation is
    # 1 + 8 / 16 times as long: 1 + 3 x 1.5 x 0.14826 = 1.667.
    rest = [0.9, 1.1] * 15
    assert warm_up([1.66, 1.66, *rest]).steps == 0
    assert warm_up([1.67, 1.67, *rest]).steps == 2


def test_one_slow_step_in_the_middle_is_no_warm_up() -> None:
    assert warm_up([*[1.0] * 10, 9.0, *[1.0] * 20]) == NO_WARM_UP


def test_a_slow_step_after_the_first_level_one_is_no_warm_up() -> None:
    assert warm_up([2.0, 2.0, 1.0, 2.0, *[1.0] * 30]).steps == 2


def test_one_slow_step_alone_must_be_slow_beyond_doubt() -> None:
    assert warm_up([1.4, *[1.0] * 30]) == NO_WARM_UP
    assert warm_up([1.6, *[1.0] * 30]) == WarmUp(1, None)


def test_outliers_in_the_later_half_do_not_hide_a_warm_up() -> None:
    assert warm_up([2.0, 1.5, 1.2, *[1.0] * 20, 8.0, *[1.0] * 10, 7.0]).steps == 3


def test_never_more_than_half_is_left_out_and_then_it_is_still_warming_up() -> None:
    found = warm_up([*[2.0] * 24, *[1.0] * 16])
    assert found == WarmUp(20, -0.5)


def test_a_warm_up_of_exactly_half_is_over() -> None:
    assert warm_up([*[2.0] * 20, *[1.0] * 20]) == WarmUp(20, None)


@pytest.mark.parametrize("steps", range(FEWEST_STEPS))
def test_of_a_few_steps_nothing_is_claimed(steps: int) -> None:
    assert warm_up([2.0 if k < steps // 2 else 1.0 for k in range(steps)]) == NO_WARM_UP


def test_times_that_go_on_falling_or_rising_are_told_with_how_much() -> None:
    # From 1.0 to 0.8 in a line: the thirds' middles lie near 0.967 and 0.833, a fall of 14 %; the other way 16 %.
    line = [1.0 - 0.2 * k / 99 for k in range(100)]
    assert warm_up(line).trend == pytest.approx(-0.14, abs=0.02)
    assert warm_up(line[::-1]).trend == pytest.approx(0.16, abs=0.02)


@pytest.mark.parametrize("by", [-0.04, 0.04])
def test_a_change_of_less_than_5_percent_is_level(by: float) -> None:
    assert warm_up([1.0 + by * k / 99 for k in range(100)]).trend is None


def test_an_exponential_tail_is_cut_off_and_the_rest_is_level() -> None:
    base = noisy(1, 0.01, 120)[0]
    found = warm_up([float(b * (1 + 2 * math.exp(-k / 6))) for k, b in enumerate(base)])
    # 2 exp(-k / 6) is 5 % at step 22.
    assert 18 <= found.steps <= 24
    assert found.trend is None


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.8, 0.9])
@pytest.mark.parametrize("steps", [12, 16, 20, 30, 60])
def test_noise_alone_loses_steps_falls_and_rises_in_few_cases(rho: float, steps: int) -> None:
    """AR(1) noise of the logarithms: of 300 runs each at 5, 10 and 20 % at most 3 % lose a step, fall, or rise.

    The constants were chosen with seeds 3, 11 and 12; these are others.
    """
    found = []
    for sigma in (0.05, 0.1, 0.2):
        rng = np.random.default_rng([steps, round(10 * rho), round(100 * sigma)])
        noise = rng.standard_normal((300, steps))
        for k in range(1, steps):
            noise[:, k] = rho * noise[:, k - 1] + math.sqrt(1 - rho**2) * noise[:, k]
        found += warmup.warm_up(np.exp(sigma * noise))
    assert sum(one.steps > 0 for one in found) <= 0.03 * len(found)
    assert sum((one.trend or 0.0) < 0 for one in found) <= 0.03 * len(found)
    assert sum((one.trend or 0.0) > 0 for one in found) <= 0.03 * len(found)


@pytest.mark.parametrize(("first", "last", "steps"), [(1.2, 1.0, 40), (1.15, 1.0, 300), (1.0, 1.15, 300)])
def test_a_slow_change_in_noise_is_found(first: float, last: float, steps: int) -> None:
    """20 % through 40 steps, 15 % through 300, in 3 % noise."""
    slope = np.linspace(first, last, steps)
    found = [one.trend for one in warmup.warm_up(noisy(3, 0.03, steps, 100) * slope)]
    assert sum((trend or 0.0) * (last - first) > 0 for trend in found) > 95


@given(times)
def test_at_least_half_of_the_steps_stay_whatever_they_are(seconds: list[float]) -> None:
    found = warm_up(seconds)
    assert 0 <= 2 * found.steps <= len(seconds)
    assert found.trend is None or found.trend >= -1


@given(st.lists(st.floats(min_value=1e-4, max_value=1e3), min_size=FEWEST_STEPS, max_size=60), st.integers(-8, 8))
def test_the_unit_of_time_does_not_matter(seconds: list[float], power: int) -> None:
    assert warm_up([value * 2.0**power for value in seconds]) == warm_up(seconds)


@given(st.lists(st.floats(min_value=0.99, max_value=1.01), min_size=24, max_size=60), st.integers(2, 10))
def test_a_beginning_of_twice_the_time_is_always_found(level: list[float], slow: int) -> None:
    assert warm_up([2.0] * slow + level).steps == slow
