"""Arithmetic of intervals on one axis: unions, complements, intersections."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice
from operator import itemgetter

Interval = tuple[float, float]
"""(start, end), start <= end."""
_END = itemgetter(1)


def union(intervals: Iterable[Interval], *, join_below: float = 0.0) -> list[Interval]:
    """Return the union as disjoint intervals in order; gaps of up to `join_below` are filled.

    Example: (0, 2), (1, 3) and (5, 6) give [(0, 3), (5, 6)].
    """
    joined: list[Interval] = []
    # The interval that is being joined. Before the first one it is a placeholder, which `joined` then begins with.
    current_start = -math.inf
    current_end = -math.inf
    for start, end in sorted(intervals):
        if start - current_end <= join_below:
            if end > current_end:
                current_end = end
        elif end > start:
            joined.append((current_start, current_end))
            current_start = start
            current_end = end
    if current_end == -math.inf:
        return []
    without_placeholder = joined[1:]
    return [*without_placeholder, (current_start, current_end)]


def complement(disjoint: Sequence[Interval], within: Interval) -> list[Interval]:
    """Return the parts of `within` that lie in none of the intervals, which are disjoint and in order.

    Example: for (1, 2) within (0, 3) they are [(0, 1), (2, 3)].
    """
    gap_start, within_end = within
    gaps: list[Interval] = []
    for start, end in disjoint:
        if start >= within_end:
            break
        if start > gap_start:
            gaps.append((gap_start, start))
        if end > gap_start:
            gap_start = end
    if within_end > gap_start:
        gaps.append((gap_start, within_end))
    return gaps


def intersection(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """Return the parts that lie in both; each side is disjoint and in order.

    Example: (0, 2) and (4, 6) have with (1, 5) in common [(1, 2), (4, 5)].
    """
    common: list[Interval] = []
    if not (left and right):
        return common
    # Skip ahead: most of a long profile lies before a step.
    lefts = islice(left, bisect_left(left, right[0][0], key=_END), None)
    rights = islice(right, bisect_left(right, left[0][0], key=_END), None)
    # Without calls of `max` and `min`: a step may have tens of thousands of pieces on each rank.
    with suppress(StopIteration):
        (left_start, left_end), (right_start, right_end) = next(lefts), next(rights)
        while True:
            start = left_start if left_start > right_start else right_start
            if left_end <= right_end:
                if left_end > start:
                    common.append((start, left_end))
                left_start, left_end = next(lefts)
            else:
                if right_end > start:
                    common.append((start, right_end))
                right_start, right_end = next(rights)
    return common


def length(disjoint: Iterable[Interval]) -> float:
    """Return the sum of the intervals' lengths."""
    return sum(end - start for start, end in disjoint)
