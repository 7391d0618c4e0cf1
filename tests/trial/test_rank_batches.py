"""Shares by speed: done as soon as any shares of whole images can be, whatever the speeds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from results_factory import make_trial
from vitscale.trial.rank_batches import (
    in_words,
    largest_micro_batch,
    longest,
    micro_batches,
    shares,
    speeds_from_rates,
)
from vitscale.trial.trial import exact

speeds = st.lists(st.sampled_from([1.0, 0.31, 0.5, 0.1, 2.0, 7.0, 0.999, 1 / 3]) | st.floats(0.01, 100.0), min_size=1)


def done(sizes: tuple[int, ...], of: list[float]) -> Fraction:
    return max(size / exact(speed) for size, speed in zip(sizes, of, strict=True))


def all_shares(images: int, ranks: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, images), ranks - 1):
        yield tuple(end - start for start, end in itertools.pairwise((0, *cuts, images)))


@settings(deadline=None)
@given(speeds.filter(lambda some: len(some) <= 4), st.integers(0, 12))
def test_no_other_shares_are_done_sooner(of: list[float], more: int) -> None:
    images = len(of) + more
    assert done(shares(images, of), of) == min(done(other, of) for other in all_shares(images, len(of)))


@given(speeds, st.integers(0, 5000))
def test_all_images_are_taken_and_every_rank_takes_one(of: list[float], more: int) -> None:
    found = shares(len(of) + more, of)
    assert sum(found) == len(of) + more
    assert min(found) >= 1
    # A faster rank never takes less, and of two alike the first never takes less.
    for left, right in itertools.combinations(range(len(of)), 2):
        if exact(of[left]) >= exact(of[right]):
            assert found[left] >= found[right]


@given(speeds, st.integers(0, 500))
def test_one_image_more_takes_none_from_anybody(of: list[float], more: int) -> None:
    """Rounding by largest remainders does that (the Alabama paradox)."""
    images = len(of) + more
    before, after = shares(images, of), shares(images + 1, of)
    assert sorted(b - a for a, b in zip(before, after, strict=True)) == [0] * (len(of) - 1) + [1]


@given(st.integers(1, 40), st.integers(1, 64), st.floats(0.01, 100.0))
def test_equal_speeds_have_equal_shares(ranks: int, micro_batch: int, speed: float) -> None:
    assert shares(ranks * micro_batch, [speed] * ranks) == (micro_batch,) * ranks


@pytest.mark.parametrize(
    ("images", "of", "expected"),
    [
        (24, [1.0, 1.0, 0.31], (11, 10, 3)),  # 10.4, 10.4 and 3.2 if images could be cut
        (24, [1.0, 0.5], (16, 8)),
        (24, [10.0, 5.0], (16, 8)),  # only ratios matter
        (7, [1.0, 0.31], (6, 1)),  # largest remainders: 5 and 2
        (3, [1.0, 0.001, 0.001], (1, 1, 1)),
        (9, [1.0, 0.001, 0.001], (7, 1, 1)),
        (10, [0.1, 0.2, 0.7], (1, 2, 7)),  # as decimals, not as the floats next to them
        (8, [1.0], (8,)),
    ],
)
def test_by_hand(images: int, of: list[float], expected: tuple[int, ...]) -> None:
    assert shares(images, of) == expected


def test_fewer_images_than_ranks_are_a_bug() -> None:
    with pytest.raises(ValueError, match="1 images do not go round 2 ranks"):
        shares(1, [1.0, 1.0])


def test_a_thousand_ranks_of_a_million_images_are_no_work() -> None:
    """Image by image they would take an hour."""
    assert sum(shares(10**9, [1.0, 0.31] * 500)) == 10**9


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    assert longest((12, 12), (1.0, 0.5)) == 24.0
    assert longest((16, 8), (1.0, 0.5)) == 16.0


def test_without_unequal_shares_all_take_the_micro_batch() -> None:
    equal, unequal = make_trial("ddp", 3).train, make_trial("ddp", 3, micro_batches=(11, 10, 3)).train
    assert (micro_batches(equal, 3), largest_micro_batch(equal)) == ((8, 8, 8), 8)
    assert (micro_batches(unequal, 3), largest_micro_batch(unequal)) == ((11, 10, 3), 11)


def test_in_words() -> None:
    assert in_words((10, 10, 4)) == "2 x 10 + 4"
    assert in_words((12, 4, 4, 4, 12)) == "12 + 3 x 4 + 12"
    assert in_words((1.0, 1.0, 0.31), " : ") == "2 x 1 : 0.31"


@pytest.mark.parametrize(
    ("rates", "speeds"),
    [((100.0, 31.0), (1.0, 0.31)), ((31.0, 100.0), (0.31, 1.0)), ((1e6, 1.0), (1.0, 0.01)), ((0.2,), (1.0,))],
)
def test_speeds_are_rates_over_the_largest_and_never_too_small_for_a_study(
    rates: tuple[float, ...], speeds: tuple[float, ...]
) -> None:
    assert speeds_from_rates(rates) == speeds
