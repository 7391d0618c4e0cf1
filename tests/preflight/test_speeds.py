"""Relative speeds, by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from check_factory import checked, compute, record
from vitscale.preflight.pace_verdicts import checked_rank_speeds, rates, relative_speeds


def test_a_rate_is_the_median_over_repeats_of_the_same_work() -> None:
    ranks = [
        checked(0, 3, compute=compute(100.0, 1.0, 90.0)),
        checked(1, 3, compute=compute(50.0)),
        checked(2, 3, compute=compute(7.0, work="another piece")),
    ]
    assert rates(ranks) == {0: 90.0, 1: 50.0}


@pytest.mark.parametrize(
    ("found", "relative"),
    [
        ({0: 100.0, 1: 31.0}, {0: 100 / 31, 1: 0.31}),
        ({0: 100.0, 1: 100.0, 2: 50.0}, {0: 100 / 75, 1: 100 / 75, 2: 0.5}),
        ({0: 100.0, 1: 90.0, 2: 110.0, 3: 50.0}, {0: 100 / 90, 1: 0.9, 2: 110 / 90, 3: 0.5}),
        ({0: 5.0}, {}),
        ({}, {}),
    ],
)
def test_each_rank_is_held_against_the_median_of_the_others(
    found: dict[int, float], relative: dict[int, float]
) -> None:
    assert relative_speeds(found) == pytest.approx(relative)


@given(st.dictionaries(st.integers(0, 50), st.floats(1e-3, 1e6), min_size=2))
def test_others_leave_the_rank_itself_out(found: dict[int, float]) -> None:
    import statistics

    for rank, relative in relative_speeds(found).items():
        others = [rate for other, rate in found.items() if other != rank]
        assert relative == pytest.approx(found[rank] / statistics.median(others))


def test_the_line_for_the_study_has_the_fastest_at_one() -> None:
    whole = record(checked(0, pace=100.0), checked(1, pace=31.0))
    assert checked_rank_speeds(whole) == (1.0, 0.31)


def test_without_all_ranks_there_is_no_line_for_the_study() -> None:
    assert checked_rank_speeds(record(checked(0), checked(1, compute=None))) is None
    assert checked_rank_speeds(record()) is None


def test_a_rank_that_hardly_moves_still_has_a_speed_that_a_study_takes() -> None:
    assert checked_rank_speeds(record(checked(0, pace=1e6), checked(1, pace=1.0))) == (1.0, 0.01)
