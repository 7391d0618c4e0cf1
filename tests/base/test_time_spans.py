"""Interval arithmetic against sets of points: every operation must agree with membership, point by point."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from vitscale.base.time_spans import Interval, complement, intersection, length, union

ends = st.integers(0, 30)
many = st.lists(st.tuples(ends, ends).map(lambda pair: (float(min(pair)), float(max(pair)))), max_size=8)


def cells(intervals: list[Interval]) -> set[int]:
    """The unit cells that the intervals cover."""
    return {cell for start, end in intervals for cell in range(int(start), int(end))}


def tidy(intervals: list[Interval]) -> bool:
    return all(start < end for start, end in intervals) and all(one[1] < other[0] for one, other in pairwise(intervals))


@given(many)
def test_union_covers_the_same_points_and_is_tidy(some: list[Interval]) -> None:
    joined = union(some)
    assert cells(joined) == cells(some)
    assert tidy(joined)
    assert length(joined) == len(cells(some))


@given(many, many)
def test_intersection_is_what_lies_in_both(ones: list[Interval], others: list[Interval]) -> None:
    assert cells(intersection(union(ones), union(others))) == cells(ones) & cells(others)


@given(many, ends, ends)
def test_complement_is_the_rest_of_the_window(some: list[Interval], left: int, right: int) -> None:
    window = (float(min(left, right)), float(max(left, right)))
    assert cells(complement(union(some), window)) == cells([window]) - cells(some)


def test_union_joins_across_short_gaps_only() -> None:
    assert union([(0.0, 1.0), (1.5, 2.0), (4.0, 5.0)], join_below=0.6) == [(0.0, 2.0), (4.0, 5.0)]


def test_an_empty_interval_covers_nothing() -> None:
    assert union([(3.0, 3.0)]) == []
    assert complement([], (2.0, 2.0)) == []
