from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from vitscale.analysis.statistics import (
    ONE_RUN,
    TOO_FEW,
    adjusted,
    compare,
    holm,
    interval,
    jackknife,
    mean_interval,
    ratio,
)
from vitscale.present.estimate import Estimate

costs = st.floats(min_value=1e-3, max_value=1e6, allow_nan=False)
repeats = st.lists(costs, min_size=1, max_size=12)
several = st.lists(costs, min_size=2, max_size=12)

# Upper 97.5 % points of Student's t from printed tables (Fisher & Yates), to their four or five digits.
T_TABLE = {1: 12.706, 2: 4.3027, 4: 2.7764}


def test_one_run_has_no_interval() -> None:
    found = interval([1.5])
    assert (found.value, found.low, found.high, found.note) == (1.5, None, None, ONE_RUN)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_few_runs_use_student_t_on_logarithms(count: int) -> None:
    logs = [0.1 * k for k in range(count)]
    mean = sum(logs) / count
    deviation = math.sqrt(sum((x - mean) ** 2 for x in logs) / (count - 1))
    half = T_TABLE[count - 1] * deviation / math.sqrt(count)
    found = interval([math.exp(x) for x in logs])
    assert found.value == pytest.approx(math.exp(mean))
    assert found.low == pytest.approx(math.exp(mean - half), rel=1e-4)
    assert found.high == pytest.approx(math.exp(mean + half), rel=1e-4)
    assert found.note == (TOO_FEW if count == 2 else "")


@given(several, several)
def test_a_ratio_is_that_of_the_two_centres_that_are_shown(above: list[float], below: list[float]) -> None:
    assert ratio(above, below).value == pytest.approx(interval(above).value / interval(below).value)


@given(several)
def test_the_centre_of_rates_is_the_images_over_the_centre_of_the_seconds(seconds: list[float]) -> None:
    rates = interval([1437 / value for value in seconds])
    assert rates.value * interval(seconds).value == pytest.approx(1437)
    turned = interval(seconds).into(1437)
    if rates.low and turned.low:
        assert (turned.value, turned.low) == pytest.approx((rates.value, rates.low))


def test_runs_that_decided_how_many_there_are_are_left_out_of_the_spread_by_hand() -> None:
    # Logs 0, 0, 0.3 | 0, 0.3, 0.3, 0.6: mean 1.5/7; of all the sum of squares is 0.63 - 7 x (1.5/7)^2 = 0.308571, of
    # the first three 0.09 - 3 x 0.1^2 = 0.06. What the other four add, 0.248571, has 4 degrees of freedom, of which 3
    # are counted: Student's t 3.18245.
    logs = [0.0, 0.0, 0.3, 0.0, 0.3, 0.3, 0.6]
    found = interval([math.exp(log) for log in logs], deciding_runs=3)
    half = 3.18245 * math.sqrt(0.248571 / 4 / 7)
    assert found.high is not None
    assert math.log(found.value) == pytest.approx(1.5 / 7)
    assert math.log(found.high / found.value) == pytest.approx(half, rel=1e-5)
    assert ratio([math.exp(log) for log in logs], [1.0] * 3, (3, 0)).high == pytest.approx(found.high)


def test_means_of_parts_that_may_be_nothing_by_hand() -> None:
    # Mean 2, standard deviation 1, t 4.30265: 4.30265 / sqrt(3) = 2.48414 either way, and no less than nothing.
    assert mean_interval([1.0, 2.0, 3.0]).high == pytest.approx(2 + 2.48414, rel=1e-5)
    assert mean_interval([1.0, 2.0, 3.0]).low == 0.0
    assert mean_interval([1.0, 2.0, 3.0], least=-math.inf).low == pytest.approx(2 - 2.48414, rel=1e-5)
    assert mean_interval([0.5, 1.0, 0.9], most=1.0).high == 1.0
    for few in ([1.0], [1.0, 2.0]):
        assert mean_interval(few).low is mean_interval(few).high is None
        assert mean_interval(few).note


def test_the_jackknife_of_a_difference_of_means_is_welch() -> None:
    ours, theirs = [1.0, 2.0, 6.0], [3.0, 3.5, 4.0, 7.0]
    means = np.mean(ours), np.mean(theirs)
    without = [
        [float(np.mean([*ours[:i], *ours[i + 1 :]]) - means[1]) for i in range(3)],
        [float(means[0] - np.mean([*theirs[:i], *theirs[i + 1 :]])) for i in range(4)],
    ]
    found = jackknife(float(means[0] - means[1]), without)
    welch = scipy_stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((welch.low, welch.high))
    assert jackknife(1.0, [[1.0, 2.0], [1.0, 2.0, 3.0]]).low is None


def test_ratio_is_welch_on_logarithms() -> None:
    # Logs (0, 0.2) and (0, 0.1, 0.2): variances 0.02 and 0.01, squared errors 0.01 and 1/300, sum 4/300.
    # Degrees of freedom (4/300)^2 / (0.01^2/1 + (1/300)^2/2) = 16/9.5 = 1.6842.
    # t(0.975; 1.6842) = 5.188, between the table's 12.706 (1) and 4.303 (2): found by bisection of its integral.
    freedom = 16 / 9.5
    found = ratio([1.0, math.exp(0.2)], [1.0, math.exp(0.1), math.exp(0.2)])
    assert found.value == pytest.approx(1.0)
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
    assert found.low * (1 - 1e-9) <= found.value <= found.high * (1 + 1e-9)


@given(repeats, st.floats(min_value=0.01, max_value=100))
def test_the_interval_scales_with_the_unit(values: list[float], factor: float) -> None:
    ours, scaled = interval(values).times(factor), interval([value * factor for value in values])
    assert scaled.value == pytest.approx(ours.value)
    if ours.low is not None:
        assert (scaled.low, scaled.high) == pytest.approx((ours.low, ours.high), rel=1e-6)


@given(several, several)
def test_a_ratio_turned_over_is_the_reciprocal(above: list[float], below: list[float]) -> None:
    one, other = ratio(above, below), ratio(below, above)
    assert one.value * other.value == pytest.approx(1.0)
    # Two-run intervals can be wider than a float: then their ends are 0 and infinity, and have no product.
    if one.low and one.high and other.high and math.isfinite(one.high) and math.isfinite(other.high):
        assert one.low * other.high == pytest.approx(1.0, rel=1e-6)


def test_bounds_beyond_all_floats_are_infinite_and_no_error() -> None:
    found = ratio([1e300, 1e-300], [1e-300, 1e300])
    assert (found.low, found.high) == (0.0, math.inf)


def test_compare_names_faster_slower_and_no_difference() -> None:
    fast, slow = [1.0, 1.01, 0.99], [2.0, 2.02, 1.98]
    assert compare(fast, slow).verdict == "faster"
    assert compare(fast, slow).ratio.value == pytest.approx(2.0, rel=1e-3)
    assert compare(slow, fast).verdict == "slower"
    assert compare(slow, fast).ratio.value == pytest.approx(0.5, rel=1e-3)
    assert compare(fast, [1.0, 1.02, 0.98]).verdict == "no significant difference"
    assert compare([1.0], slow).verdict == "too few repeats to tell"
    assert compare([1.0], slow).ratio.low is None


@given(st.lists(costs, min_size=1, max_size=2), repeats)
def test_one_or_two_runs_settle_no_direction(few: list[float], many: list[float]) -> None:
    assert compare(few, many).verdict == compare(many, few).verdict == "too few repeats to tell"
    assert ratio(few, many).side_of(1.0) is None
    assert compare(few, many).p is None


def test_two_runs_that_agree_are_not_faster() -> None:
    found = compare([1.0, 1.0], [1.001, 1.001])
    assert found.verdict == "too few repeats to tell"
    assert found.ratio.value == pytest.approx(1.001)


def test_p_values_are_those_of_welch_on_logarithms() -> None:
    ours, theirs = [1.0, 1.2, 1.1], [1.3, 1.5, 1.2, 1.6]
    expected = scipy_stats.ttest_ind(np.log(ours), np.log(theirs), equal_var=False).pvalue
    assert compare(ours, theirs).p == pytest.approx(expected)
    assert compare([1.0] * 3, [1.0] * 3).p == 1.0
    assert compare([1.0] * 3, [1.1] * 3).p == 0.0


def test_holm_by_hand() -> None:
    # In order 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1: 0.04, 0.06, 0.06, 0.04, none below the one before it.
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_a_difference_is_claimed_only_where_it_stands_among_all_comparisons() -> None:
    one = compare([1.0, 1.01, 0.99], [1.04, 1.05, 1.03])
    assert one.verdict == "faster"
    assert adjusted(one, 0.06).verdict == "not significant among all comparisons"
    assert adjusted(one, 0.04).verdict == "faster"
    same = compare([1.0, 1.01, 0.99], [1.0, 1.01, 0.99])
    assert adjusted(same, 1.0).verdict == "no significant difference"


def test_of_many_equal_pairs_holm_claims_a_difference_in_few_studies() -> None:
    """45 pairs of ten equal trials: without correction most studies claim one."""
    plain = corrected = 0
    for study in effects(30, 0.03, 50, 200):
        trials = [study[5 * k : 5 * k + 5] for k in range(10)]
        p_values = [p for one, other in combinations(trials, 2) if (p := compare(one, other).p) is not None]
        plain += min(p_values) < 0.05
        corrected += min(holm(p_values)) < 0.05
    assert plain / 200 > 0.4
    assert corrected / 200 < 0.08


@given(st.lists(costs, min_size=3, max_size=12))
def test_equal_work_relabelled_makes_no_difference(values: list[float]) -> None:
    assert compare(values, list(reversed(values))).verdict == "no significant difference"


# --- simulated studies ---------------------------------------------------------------------------------------------
#
# Each draw is a study: a log-normal effect for every run, of which the true centre is known. With 4,000 draws a share
# of 95 % is seen within 0.35 % (one sigma); the seeds are fixed.

DRAWS = 4_000


def effects(seed: int, sigma: float, runs: int, draws: int = DRAWS) -> list[list[float]]:
    """`draws` studies of `runs` run times with median 1."""
    drawn: list[list[float]] = np.exp(sigma * np.random.default_rng(seed).standard_normal((draws, runs))).tolist()
    return drawn


def share_that_holds(truth: float, found: Iterable[Estimate]) -> float:
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


@pytest.mark.parametrize(("runs", "low", "high"), [(3, 0.6, 0.68), (5, 0.79, 0.86), (10, 0.92, 0.96)])
def test_runs_of_two_kinds_are_a_known_limit(runs: int, low: float, high: float) -> None:
    """Three in ten, by chance, are 10 % slower: of few runs all may be of one kind, and the interval is narrow. Equal
    trials are called different no more often than others for that."""
    random, studies = np.random.default_rng(19), (2, 1_000, runs)
    one, other = (np.exp(0.005 * random.standard_normal(studies)) * 1.1 ** (random.random(studies) < 0.3)).tolist()
    assert low < share_that_holds(1.1**0.3, map(interval, one)) < high
    verdicts = Counter(compare(*pair).verdict for pair in zip(one, other, strict=True))
    assert verdicts["no significant difference"] > 940


def test_a_real_difference_is_found() -> None:
    """5 % with run effects of 1 % and 5 runs on each side: two sigma / sqrt(5) of a mean are 0.9 %."""
    pairs = zip(effects(5, 0.01, 5, 500), effects(6, 0.01, 5, 500), strict=True)
    found = [compare(one, [1.05 * x for x in other]).verdict for one, other in pairs]
    assert found.count("faster") > 490
