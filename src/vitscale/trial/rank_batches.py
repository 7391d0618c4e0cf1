"""Shares: how many images of a micro-step each rank takes, where ranks differ in speed.

A step takes as long as its slowest rank: with shares a and speeds v, in images per second, max(a / v). Whole images
cannot follow the speeds exactly; of all shares with the same sum and at least one image each, `shares` has the least
such maximum. It gives image after image to the rank that would be done with it first, whose (a + 1) / v is least
(D'Hondt's method). A rank's values 1/v, 2/v, 3/v rise, so the images taken are those of the least values there are: to
take another one instead of any of them can only raise the maximum (Ibaraki and Katoh, "Resource Allocation Problems",
1988, on minimax problems). Rounding by largest remainders does worse: 7 images at speeds 1 and 0.31 become 5 and 2,
which take 6.5, where 6 and 1 take 6.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import groupby
from typing import Any

from vitscale.trial.trial import TrainSpec, exact

_SPEED_DECIMALS = 2
_SLOWEST_SPEED = 0.01
"""Smallest rank speed that a study accepts."""


def speeds_from_rates(rates: Sequence[float]) -> tuple[float, ...]:
    """Return values for `train.rank_speeds` from the rates of one rank or more: the fastest has 1.

    Example: 100 and 31 images per second give (1.0, 0.31).
    """
    fastest = max(rates)
    speeds = [round(rate / fastest, _SPEED_DECIMALS) for rate in rates]
    return tuple(max(_SLOWEST_SPEED, speed) for speed in speeds)


def shares(images: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Return the images of each rank, at least one, which add up to `images` and are done soonest.

    Exact, and the same everywhere: if two ranks would be done at once, the first takes the image. For 7 images and
    speeds 1 and 0.31 it is (6, 1).

    Args:
        images: images of all ranks together, at least as many as there are ranks.
        speeds: speed of each rank, above 0; only their ratios matter.

    Raises:
        ValueError: there are fewer images than ranks.
    """
    if images < len(speeds):
        raise ValueError(f"{images} images do not go round {len(speeds)} ranks")
    exact_speeds = [exact(speed) for speed in speeds]
    # At this moment the ranks together have done all images but one per rank, so one each on top is not too many.
    moment = (images - len(speeds)) / sum(exact_speeds)
    shares = [max(1, math.floor(moment * speed)) for speed in exact_speeds]

    def time_with_another_image(rank: int) -> tuple[Fraction, int]:
        return (shares[rank] + 1) / exact_speeds[rank], rank

    soonest = [time_with_another_image(rank) for rank in range(len(speeds))]
    heapq.heapify(soonest)
    for _ in range(images - sum(shares)):
        _, rank = soonest[0]
        shares[rank] += 1
        heapq.heapreplace(soonest, time_with_another_image(rank))
    return tuple(shares)


def largest_divisor(number: int, *, at_most: int) -> int:
    """Return the largest divisor of a number above 0 that is not larger than `at_most`."""
    divisor = min(number, at_most)
    while number % divisor:
        divisor -= 1
    return divisor


def longest(sizes: Sequence[int], speeds: Sequence[float]) -> float:
    """Return the time of a micro-step with these shares, max(share / speed): seconds for speeds in images/s."""
    return max(size / speed for size, speed in zip(sizes, speeds, strict=True))


def micro_batches(train: TrainSpec, ranks: int) -> tuple[int, ...]:
    """Return the images per micro-step of each rank."""
    return train.micro_batches or (train.micro_batch,) * ranks


def largest_micro_batch(train: TrainSpec) -> int:
    """Return the images per micro-step of the rank that takes most; memory depends on it."""
    shares = train.micro_batches or ()
    return max((train.micro_batch, *shares))


def in_words(values: Sequence[Any], between: str = " + ") -> str:
    """Return values in words, equal neighbours counted: "2 x 10 + 4" for 10, 10 and 4."""
    terms = []
    for value, equal_neighbours in groupby(values):
        text = str(value).removesuffix(".0")
        count = len(list(equal_neighbours))
        terms.append(f"{count} x {text}" if count > 1 else text)
    return between.join(terms)


def needless_micro_steps(train: TrainSpec, largest_micro_batch: int) -> str:
    """Say that a rank's share is cut into more micro-steps than necessary; empty where it is not.

    A prime share of 37 images can only be cut into 37 micro-steps of one image, where 3 of at most 16 would hold it.

    Args:
        train: training of a trial under strong-global.
        largest_micro_batch: the largest that its study allows.
    """
    share = train.micro_batch * train.grad_accum
    fewest = -(-share // largest_micro_batch)
    if train.grad_accum <= fewest:
        return ""
    return (
        f"{train.grad_accum} x {train.micro_batch} of {share} images a rank, where {fewest} micro-steps would hold them"
    )
