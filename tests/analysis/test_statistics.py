from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitscale.analysis.statistics import ONE_RUN, TOO_FEW, Interval, compare, interval, quantile, ratio

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


# --- simulated studies ---------------------------------------------------------------------------------------------
#
# Each draw is a study: a log-normal effect for every run, of which the true centre is known. With 4,000 draws a share
# of 95 % is seen within 0.35 % (one sigma); the seeds are fixed.

DRAWS = 4_000


def effects(seed: int, sigma: float, runs: int, draws: int = DRAWS) -> list[list[float]]:
    """`draws` studies of `runs` run times with median 1."""
    drawn: list[list[float]] = np.exp(sigma * np.random.default_rng(seed).standard_normal((draws, runs))).tolist()
    return drawn


def share_that_holds(truth: float, found: Iterable[Interval]) -> float:
    return float(
        np.mean([one.low <= truth <= one.high for one in found if one.low is not None and one.high is not None])
    )


@pytest.mark.parametrize("runs", [2, 3, 4, 5, 6, 7, 8, 10, 15, 20, 30])
@pytest.mark.parametrize("sigma", [0.01, 0.5])
def test_intervals_hold_the_truth_as_often_as_they_say(runs: int, sigma: float) -> None:
    studies = effects(100 * runs, sigma, runs)
    assert 0.94 < share_that_holds(1.0, map(interval, studies)) < 0.96


EQUAL_RUNS = [(runs, runs) for runs in (3, 4, 5, 6, 10, 30)]
UNEQUAL_RUNS = [(3, 5), (5, 3), (4, 10), (4, 30), (30, 5)]


@pytest.mark.parametrize(("ours", "theirs"), [*EQUAL_RUNS, *UNEQUAL_RUNS])
@pytest.mark.parametrize("sigmas", [(0.05, 0.05), (0.02, 0.1)])
def test_speedups_hold_the_truth_as_often_as_they_say(ours: int, theirs: int, sigmas: tuple[float, float]) -> None:
    """A true speedup of 1.7: of the baseline's epochs over those of more ranks, each side with its own spread."""
    baseline = effects(7 * ours + theirs, sigmas[0], ours)
    more_ranks = effects(7 * ours + theirs + 1, sigmas[1], theirs)
    found = (ratio([1.7 * b for b in base], more) for base, more in zip(baseline, more_ranks, strict=True))
    assert 0.93 < share_that_holds(1.7, found) < 0.97


def test_a_speedup_without_the_baselines_uncertainty_would_claim_too_much() -> None:
    """What the interval would hold if the baseline's mean were taken for exact: it is why both sides are in it."""
    pairs = zip(effects(1, 0.05, 5), effects(2, 0.05, 5), strict=True)
    exact = [interval([math.exp(np.mean(np.log(base))) / one for one in more]) for base, more in pairs]
    assert share_that_holds(1.0, exact) < 0.9


@pytest.mark.parametrize(("ours", "theirs"), [*EQUAL_RUNS, *UNEQUAL_RUNS])
def test_the_same_against_itself_is_no_significant_difference(ours: int, theirs: int) -> None:
    pairs = zip(effects(13 * ours + theirs, 0.03, ours), effects(17 * ours + theirs, 0.03, theirs), strict=True)
    verdicts = Counter(compare(one, other).verdict for one, other in pairs)
    assert 0.93 < verdicts["no significant difference"] / DRAWS < 0.97
    # And where one is claimed, neither side is favoured.
    assert verdicts["faster"] / (verdicts["faster"] + verdicts["slower"]) == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize(("theirs", "low", "high"), [(10, 0.93, 0.945), (30, 0.915, 0.93)])
def test_three_runs_against_many_are_the_known_limit(theirs: int, low: float, high: float) -> None:
    """Welch's degrees of freedom are estimated, for which three runs among many are few: 93.5 and 92.4 %."""
    pairs = zip(effects(1, 0.05, 3, 10_000), effects(2, 0.05, theirs, 10_000), strict=True)
    assert low < share_that_holds(1.0, (ratio(one, other) for one, other in pairs)) < high


def test_a_real_difference_is_found() -> None:
    """5 % with run effects of 1 % and 5 runs on each side: two sigma / sqrt(5) of a mean are 0.9 %."""
    pairs = zip(effects(5, 0.01, 5, 500), effects(6, 0.01, 5, 500), strict=True)
    found = [compare(one, [1.05 * x for x in other]).verdict for one, other in pairs]
    assert found.count("faster") > 490
