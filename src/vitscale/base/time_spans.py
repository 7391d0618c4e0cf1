"""Arithmetic of intervals on one axis: unions, complements, intersections."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from operator import itemgetter

Interval = tuple[float, float]
"""(start, end), start <= end."""
_END = itemgetter(1)


def union(intervals: Iterable[Interval], *, join_below: float = 0.0) -> list[Interval]:
    """The union as disjoint intervals in order; gaps of up to `join_below` are filled."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start - joined[-1][1] <= join_below:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        elif end > start:
            joined.append((start, end))
    return joined


def complement(disjoint: Sequence[Interval], within: Interval) -> list[Interval]:
    """The parts of `within` that lie in none of the intervals, which are disjoint and in order."""
    left, right = within
    gaps: list[Interval] = []
    for start, end in disjoint:
        if min(start, right) > left:
            gaps.append((left, min(start, right)))
        left = max(left, end)
    if right > left:
        gaps.append((left, right))
    return gaps


def intersection(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """The parts that lie in both; each side is disjoint and in order."""
    common: list[Interval] = []
    if not (left and right):
        return common
    # Skip ahead: most of a long profile lies before a step.
    i, j = bisect_left(left, right[0][0], key=_END), bisect_left(right, left[0][0], key=_END)
    while i < len(left) and j < len(right):
        start = max(left[i][0], right[j][0])
        end = min(left[i][1], right[j][1])
        if end > start:
            common.append((start, end))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return common


def length(disjoint: Iterable[Interval]) -> float:
    """The sum of the intervals' lengths."""
    return sum(end - start for start, end in disjoint)
