"""Shares, scores and paired differences of the benchmarks: known truths go in and come out."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from paired import (
    OURS,
    Point,
    clopper_pearson,
    difference,
    errors,
    intervals_of_other_sources,
    same_intervals,
    units,
)


def point(series: str, source: str, ours: float, peer: float = 1.0, measured: float = 1.0, gpus: int = 8) -> Point:
    """Ours within 20 % either way."""
    predicted = {OURS: ours, "peer": peer}
    return Point(
        series, source, series, gpus, "extrapolated", measured, measured, predicted, ours / 1.2, ours * 1.2, ours, ours
    )


@pytest.mark.parametrize(
    ("held", "of", "low", "high"),
    # scipy.stats.binomtest(held, of).proportion_ci(0.90), method "exact"
    [(39, 50, 0.66223, 0.87144), (52, 60, 0.77226, 0.93189), (0, 10, 0.0, 0.25887), (10, 10, 0.74113, 1.0)],
)
def test_the_exact_interval_of_a_share(held: int, of: int, low: float, high: float) -> None:
    assert clopper_pearson(held, of) == pytest.approx((low, high), abs=5e-6)


def test_ninety_of_a_hundred_hold_ninety_percent_and_thirty_nine_of_fifty_do_not() -> None:
    assert clopper_pearson(90, 100)[0] < 0.9 < clopper_pearson(90, 100)[1]
    assert clopper_pearson(39, 50)[1] < 0.9


def test_errors_are_of_the_median_run_and_too_fast_is_positive() -> None:
    found = errors([replace(point("a", "s", 1.1), run=5.0), point("b", "s", 0.5)], OURS)
    assert found == pytest.approx([math.log(1.1), -math.log(2)])


def test_a_peer_gets_the_same_width_about_its_own_middle() -> None:
    points = [point("a", "s", 1.5, peer=1.1), point("b", "s", 1.0, peer=1.3)]
    ours, peer = same_intervals(points, OURS), same_intervals(points, "peer")
    assert peer.high - peer.low == pytest.approx(ours.high - ours.low)
    assert ours.held.tolist() == [False, True]
    assert peer.held.tolist() == [True, False]


def test_the_score_is_the_width_and_twenty_times_what_sticks_out() -> None:
    ours = same_intervals([point("a", "s", 1.0), point("b", "s", 1.5)], OURS)
    width = 2 * math.log(1.2)
    assert ours.scores == pytest.approx([width, width + 20 * (math.log(1.5) - math.log(1.2))])


def test_own_intervals_are_the_errors_on_the_other_sources() -> None:
    """21 errors of -10 to 10 %: 5th and 95th percentile -9 and 9 %. Of the point's own source none counts."""
    others = [point(f"{n}", "other", 1.0, peer=math.exp(n / 100)) for n in range(-10, 11)]
    asked = [point("x", "asked", 1.0, peer=math.exp(0.08)), point("y", "asked", 1.0, peer=math.exp(0.7))]
    found = intervals_of_other_sources([*others, *asked], "peer")
    assert found.low[-2:] == pytest.approx([0.08 - 0.09, 0.7 - 0.09])
    assert found.high[-2:] == pytest.approx([0.08 + 0.09, 0.7 + 0.09])
    assert found.low[0] == pytest.approx(-0.10 - (0.08 + 0.95 * 0.62))
    assert np.isnan(intervals_of_other_sources(asked, "peer").low).all()


def test_the_difference_is_between_units_and_each_counts_once() -> None:
    points = [point(name, "s", 1.0) for name in ("a", "a", "a", "b")]
    found = difference(np.array([0.3, 0.2, 0.1, 0.0]), np.array([0.0, 0.0, 0.0, 0.1]), points, seed=1)
    assert found is not None
    assert found.units == 2
    assert found.mean == pytest.approx((0.2 - 0.1) / 2)
    assert found.standard_error == pytest.approx(0.15)
    assert found.low == pytest.approx(-0.1)
    assert found.high == pytest.approx(0.2)
    assert not found.behind
    assert difference(np.ones(3), np.zeros(3), points[:3], seed=1) is None


def test_a_paired_difference_is_seen_through_much_larger_errors() -> None:
    """Errors of 1 to 40 %, the second always 1 % less: unpaired they could not be told apart."""
    points = [point(f"{n}", "s", 1.0) for n in range(40)]
    first = np.linspace(0.01, 0.40, 40)
    found = difference(first, first - 0.01 + 0.002 * (-1.0) ** np.arange(40), points, seed=0)
    assert found is not None
    assert found.mean == pytest.approx(0.01)
    assert 0.009 < found.low < found.high < 0.011
    assert found.behind
    again = difference(first, first - 0.01 + 0.002 * (-1.0) ** np.arange(40), points, seed=0)
    assert again == found


def test_the_bootstrap_has_the_standard_error_of_the_mean() -> None:
    points = [point(f"{n}", "s", 1.0) for n in range(200)]
    found = difference(np.random.default_rng(3).standard_normal(200), np.zeros(200), points, seed=0)
    assert found is not None
    assert (found.high - found.low) / (2 * 1.645) == pytest.approx(found.standard_error, rel=0.05)


def test_series_that_share_figures_are_one_unit_at_any_remove() -> None:
    """b has one figure in common with a: by chance."""
    figures = [("a", {1, 2, 3}), ("b", {3, 9}), ("c", {4, 5}), ("d", {1, 2, 4, 5}), ("e", {6})]
    assert units([(name, frozenset(own)) for name, own in figures]) == ["a", "b", "a", "a", "e"]
