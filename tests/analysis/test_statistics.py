from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitscale.analysis.statistics import ONE_RUN, TOO_FEW, compare, interval, quantile, ratio

costs = st.floats(min_value=1e-3, max_value=1e6, allow_nan=False)
repeats = st.lists(costs, min_size=1, max_size=12)
several = st.lists(costs, min_size=2, max_size=12)

# Upper 97.5 % points of Student's t from printed tables (Fisher & Yates), to their four or five digits.
T_TABLE = {1: 12.706, 2: 4.3027, 4: 2.7764}


def test_one_run_has_no_interval() -> None:
    found = interval([1.5])
    assert (found.centre, found.low, found.high, found.note) == (1.5, None, None, ONE_RUN)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_few_runs_use_student_t_on_logarithms(count: int) -> None:
    logs = [0.1 * k for k in range(count)]
    mean = sum(logs) / count
    deviation = math.sqrt(sum((x - mean) ** 2 for x in logs) / (count - 1))
    half = T_TABLE[count - 1] * deviation / math.sqrt(count)
    found = interval([math.exp(x) for x in logs])
    assert found.centre == pytest.approx(math.exp(mean))
    assert found.low == pytest.approx(math.exp(mean - half), rel=1e-4)
    assert found.high == pytest.approx(math.exp(mean + half), rel=1e-4)
    assert found.note == (TOO_FEW if count == 2 else "")


def test_six_runs_use_interpolated_order_statistics() -> None:
    # By hand: g_1 = 1 - 2/64 = 0.96875, g_2 = 1 - 14/64 = 0.78125, I = 0.01875/0.1875 = 0.1,
    # weight = 5 * 0.1 / (1 + 4 * 0.1) = 5/14; between the first and second value from either end.
    found = interval([5.0, 1.0, 6.0, 2.0, 3.0, 4.0])
    assert found.centre == 3.5
    assert found.low == pytest.approx(1 + 5 / 14)
    assert found.high == pytest.approx(6 - 5 / 14)
    assert found.note == ""


def test_nine_runs_interpolate_one_further_in() -> None:
    # g_2 = 1 - 20/512 = 0.9609375, g_3 = 1 - 92/512 = 0.8203125, I = 0.0109375/0.140625 = 7/90,
    # weight = 7 * 7/90 / (2 + 5 * 7/90) = (49/90) / (215/90) = 49/215.
    found = interval([float(k) for k in range(1, 10)])
    assert found.low == pytest.approx(2 + 49 / 215)
    assert found.high == pytest.approx(8 - 49 / 215)


def test_an_outlier_does_not_move_the_interval_of_many_runs_far() -> None:
    steady = interval([1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06, 1.07, 1.08])
    hit = interval([1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06, 1.07, 100.0])
    assert hit == steady


def test_ratio_is_welch_on_logarithms() -> None:
    # Logs (0, 0.2) and (0, 0.1, 0.2): variances 0.02 and 0.01, squared errors 0.01 and 1/300, sum 4/300.
    # Degrees of freedom (4/300)^2 / (0.01^2/1 + (1/300)^2/2) = 16/9.5 = 1.6842.
    # t(0.975; 1.6842) = 5.188, between the table's 12.706 (1) and 4.303 (2): found by bisection of its integral.
    freedom = 16 / 9.5
    found = ratio([1.0, math.exp(0.2)], [1.0, math.exp(0.1), math.exp(0.2)])
    assert found.centre == pytest.approx(1.0)
    assert found.high is not None
    assert found.low == pytest.approx(1 / found.high)
    quantile_used = math.log(found.high) / math.sqrt(4 / 300)
    assert student_t_cdf(quantile_used, freedom) == pytest.approx(0.975, abs=1e-5)
    assert found.note == TOO_FEW


def student_t_cdf(t: float, freedom: float) -> float:
    """By Simpson's rule over the density, without scipy."""
    factor = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))

    def density(x: float) -> float:
        return factor * math.pow(1 + x * x / freedom, -(freedom + 1) / 2)

    steps = 20_000
    width = t / steps
    inner = sum((4 if k % 2 else 2) * density(k * width) for k in range(1, steps))
    return 0.5 + width / 3 * (density(0) + inner + density(t))


def test_the_baselines_uncertainty_is_carried_through() -> None:
    steady, noisy, points = [1.0, 1.001, 0.999], [1.0, 1.2, 0.85], [0.5, 0.51, 0.49]
    narrow, wide = ratio(steady, points), ratio(noisy, points)
    assert narrow.low is not None
    assert wide.low is not None
    assert wide.low < narrow.low


@pytest.mark.parametrize(("above", "below"), [([1.0], [1.0, 2.0]), ([1.0, 2.0], [1.0]), ([3.0], [2.0])])
def test_ratio_with_one_run_on_a_side_has_no_interval(above: list[float], below: list[float]) -> None:
    found = ratio(above, below)
    assert (found.low, found.high, found.note) == (None, None, ONE_RUN)


@pytest.mark.parametrize("bad", [[], [0.0], [-1.0, 1.0], [math.nan], [math.inf, 1.0]])
def test_values_that_are_no_costs_are_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match=r"no values|positive and finite"):
        interval(bad)
    with pytest.raises(ValueError, match=r"no values|positive and finite"):
        ratio([1.0], bad)


@given(several)
def test_the_interval_holds_its_centre(values: list[float]) -> None:
    found = interval(values)
    assert found.low is not None
    assert found.high is not None
    assert found.low * (1 - 1e-9) <= found.centre <= found.high * (1 + 1e-9)


@given(repeats, st.floats(min_value=0.01, max_value=100))
def test_the_interval_scales_with_the_unit(values: list[float], factor: float) -> None:
    ours, scaled = interval(values).times(factor), interval([value * factor for value in values])
    assert scaled.centre == pytest.approx(ours.centre)
    if ours.low is not None:
        assert (scaled.low, scaled.high) == pytest.approx((ours.low, ours.high), rel=1e-6)


@given(several, several)
def test_a_ratio_turned_over_is_the_reciprocal(above: list[float], below: list[float]) -> None:
    one, other = ratio(above, below), ratio(below, above)
    assert one.centre * other.centre == pytest.approx(1.0)
    # Two-run intervals can be wider than a float: then their ends are 0 and infinity, and have no product.
    if one.low and one.high and other.high and math.isfinite(one.high) and math.isfinite(other.high):
        assert one.low * other.high == pytest.approx(1.0, rel=1e-6)


def test_bounds_beyond_all_floats_are_infinite_and_no_error() -> None:
    found = ratio([1e300, 1e-300], [1e-300, 1e300])
    assert (found.low, found.high) == (0.0, math.inf)


def test_compare_names_faster_slower_and_no_difference() -> None:
    fast, slow = [1.0, 1.01, 0.99], [2.0, 2.02, 1.98]
    assert compare(fast, slow).verdict == "faster"
    assert compare(fast, slow).ratio == pytest.approx(2.0, rel=1e-3)
    assert compare(slow, fast).verdict == "slower"
    assert compare(slow, fast).ratio == pytest.approx(0.5, rel=1e-3)
    assert compare(fast, [1.0, 1.02, 0.98]).verdict == "no significant difference"
    assert compare([1.0], slow).verdict == "too few repeats to tell"
    assert compare([1.0], slow).low is None


@given(several)
def test_equal_work_relabelled_makes_no_difference(values: list[float]) -> None:
    assert compare(values, list(reversed(values))).verdict == "no significant difference"


def test_quantiles_are_linear_between_neighbours() -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0, 5.0], 0.5) == 3.0
    assert quantile([float(k) for k in range(101)], 0.95) == 95.0
    assert quantile([1.0, 2.0], 0.95) == pytest.approx(1.95)
    assert quantile([7.0], 0.99) == 7.0


@pytest.mark.parametrize("count", [3, 6, 10])
def test_intervals_hold_the_truth_as_often_as_they_say(count: int) -> None:
    """Lognormal run times with median 1: 95 % of the intervals hold it. 3 sigma of 2,000 draws is 1.5 %."""
    random_ = random.Random(count)  # a seeded simulation, no secret
    draws = 2000
    held = 0
    for _ in range(draws):
        found = interval([random_.lognormvariate(0, 0.05) for _ in range(count)])
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 1 <= found.high
    assert held / draws == pytest.approx(0.95, abs=0.02)


def test_welch_intervals_hold_the_truth_with_unequal_spreads() -> None:
    random_ = random.Random(7)
    draws = 2000
    held = 0
    for _ in range(draws):
        found = ratio(
            [random_.lognormvariate(math.log(2), 0.1) for _ in range(3)],
            [random_.lognormvariate(0, 0.02) for _ in range(6)],
        )
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 2 <= found.high
    assert held / draws == pytest.approx(0.95, abs=0.02)
