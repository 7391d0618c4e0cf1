"""Shares: how many images of a micro-step each rank takes, where ranks differ in speed.

A micro-step takes as long as its slowest rank: with a share of a images and a speed of v images per second on each
rank, max(a / v) seconds. Whole images cannot follow the speeds exactly. Of all shares with the same sum and at least
one image each, `shares` returns those with the shortest time.

Method: each image in turn is given to the rank that would be done with it first, that is with the least (a + 1) / v
(D'Hondt's method). Proof: a rank's images end at 1/v, 2/v, 3/v, ..., which rise, so the images that are given are those
with the earliest ends of all. To replace one of them by an image that is not given can only lengthen the micro-step
(Ibaraki and Katoh, "Resource Allocation Problems", 1988, on minimax problems). Rounding by largest remainders does
worse: 7 images at speeds 1 and 0.31 become 5 and 2, which take 6.5 s, where 6 and 1 take 6 s.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import groupby
from typing import Any, NamedTuple

from vitscale.trial.trial import TrainSpec, exact

_SPEED_DECIMALS = 2
_SLOWEST_SPEED = 0.01
"""Smallest rank speed that a study accepts."""


def speeds_from_rates(rates: Sequence[float]) -> tuple[float, ...]:
    """Return values for `train.rank_speeds` from the rates of the ranks: 1 for the fastest one, two decimals for all.

    Example: 100 and 31 images per second give (1.0, 0.31).
    """
    fastest_rate = max(rates)
    speeds = [round(rate / fastest_rate, _SPEED_DECIMALS) for rate in rates]
    return tuple(max(_SLOWEST_SPEED, speed) for speed in speeds)


def shares(images: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Return the images of each rank, at least one, with which all ranks together are done with `images` soonest.

    The result is exact, and the same on every machine: if two ranks would be done at the same time, the first one takes
    the image. Example: 7 images and speeds 1 and 0.31 give (6, 1).

    Args:
        images: images of all ranks together, at least as many as there are ranks.
        speeds: speed of each rank, above 0; only their ratios matter.

    Raises:
        ValueError: there are fewer images than ranks.
    """
    if images < len(speeds):
        raise ValueError(f"{images} images do not go round {len(speeds)} ranks")
    exact_speeds = [exact(speed) for speed in speeds]
    images_by_rank = _sure_images(images, exact_speeds)

    def end_of_next_image(rank: int) -> _ImageEnd:
        return _ImageEnd((images_by_rank[rank] + 1) / exact_speeds[rank], rank)

    next_ends = [end_of_next_image(rank) for rank in range(len(speeds))]
    heapq.heapify(next_ends)
    remaining_images = images - sum(images_by_rank)
    for _ in range(remaining_images):
        soonest_rank = next_ends[0].rank
        images_by_rank[soonest_rank] += 1
        heapq.heapreplace(next_ends, end_of_next_image(soonest_rank))
    return tuple(images_by_rank)


def _sure_images(images: int, exact_speeds: Sequence[Fraction]) -> list[int]:
    """Return images that each rank gets for sure, so that few remain to be given one by one.

    In T = (images - ranks) / (sum of the speeds) seconds rank r is done with floor(T v_r) images. These are at most
    images - ranks in all, and end before all others, so that one by one they would be given first. A rank that is done
    with none gets its one image. With that, each rank has at most T v_r + 1 images, and all have at most `images`.

    Example: 7 images and speeds 1 and 1/4: T is 4 seconds, and the ranks get 4 and 1.
    """
    seconds = (images - len(exact_speeds)) / sum(exact_speeds)
    return [max(1, math.floor(seconds * speed)) for speed in exact_speeds]


class _ImageEnd(NamedTuple):
    """When a rank would be done with one more image; ordered by time, then by rank."""

    seconds: Fraction
    rank: int


def largest_divisor(number: int, *, at_most: int) -> int:
    """Return the largest divisor of a number above 0 that is not larger than `at_most`."""
    divisor = min(number, at_most)
    while number % divisor:
        divisor -= 1
    return divisor


def longest(sizes: Sequence[int], speeds: Sequence[float]) -> float:
    """Return the seconds that the longest of the ranks takes for a micro-step, and so the micro-step.

    Args:
        sizes: images of each rank.
        speeds: speed of each rank in images per second.
    """
    return max(size / speed for size, speed in zip(sizes, speeds, strict=True))


def micro_batches(train: TrainSpec, ranks: int) -> tuple[int, ...]:
    """Return the images per micro-step of each rank."""
    return train.micro_batches or (train.micro_batch,) * ranks


def largest_micro_batch(train: TrainSpec) -> int:
    """Return the images per micro-step of the rank that takes most, on which the peak of memory depends."""
    images_by_rank = train.micro_batches or ()
    return max((train.micro_batch, *images_by_rank))


def in_words(values: Sequence[Any], between: str = " + ") -> str:
    """Return values in words, with equal neighbours as one term: "2 x 10 + 4" for 10, 10 and 4."""
    terms = []
    for value, equal_neighbours in groupby(values):
        text = str(value).removesuffix(".0")
        count = len(list(equal_neighbours))
        terms.append(f"{count} x {text}" if count > 1 else text)
    return between.join(terms)


def needless_micro_steps(train: TrainSpec, largest_micro_batch: int) -> str:
    """Return a clause that a rank's share is cut into more micro-steps than necessary; empty where it is not.

    Example: "37 x 1 of 37 images a rank, where 3 micro-steps would hold them". A prime number of images can only be cut
    into micro-steps of one image each.

    Args:
        train: training of a trial under strong-global.
        largest_micro_batch: the largest that its study allows.
    """
    share = train.micro_batch * train.grad_accum
    fewest_micro_steps = -(-share // largest_micro_batch)  # rounded up
    if train.grad_accum <= fewest_micro_steps:
        return ""
    cut = f"{train.grad_accum} x {train.micro_batch} of {share} images a rank"
    return f"{cut}, where {fewest_micro_steps} micro-steps would hold them"
