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
from itertools import groupby
from typing import Any

from vitscale.trial.trial import TrainSpec, exact

_SPEED_DECIMALS = 2
_SLOWEST_SPEED = 0.01
"""Smallest rank speed that a study accepts."""


def speeds_from_rates(rates: Sequence[float]) -> tuple[float, ...]:
    """Values for `train.rank_speeds` from each rank's rate, at least one: the fastest has 1.

    Example: 100 and 31 images per second give (1.0, 0.31).
    """
    fastest = max(rates)
    return tuple(max(_SLOWEST_SPEED, round(rate / fastest, _SPEED_DECIMALS)) for rate in rates)


def shares(images: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """The images of each rank, at least one, which add up to `images` and are done soonest.

    Exact, and the same everywhere: if two ranks would be done at once, the first takes the image.

    Args:
        images: images of all ranks together, at least as many as there are ranks.
        speeds: speed of each rank, above 0; only their ratios matter.

    Raises:
        ValueError: there are fewer images than ranks.
    """
    if images < len(speeds):
        raise ValueError(f"{images} images do not go round {len(speeds)} ranks")
    exactly = [exact(speed) for speed in speeds]
    # At this moment the ranks together have done all images but one per rank, so one each on top is not too many.
    moment = (images - len(speeds)) / sum(exactly)
    taken = [max(1, math.floor(moment * speed)) for speed in exactly]
    done = [((count + 1) / speed, rank) for rank, (count, speed) in enumerate(zip(taken, exactly, strict=True))]
    heapq.heapify(done)
    for _ in range(images - sum(taken)):
        _, rank = done[0]
        taken[rank] += 1
        heapq.heapreplace(done, ((taken[rank] + 1) / exactly[rank], rank))
    return tuple(taken)


def longest(sizes: Sequence[int], speeds: Sequence[float]) -> float:
    """Time of a micro-step with these shares, max(share / speed), in seconds where speeds are in images per second."""
    return max(size / speed for size, speed in zip(sizes, speeds, strict=True))


def micro_batches(train: TrainSpec, ranks: int) -> tuple[int, ...]:
    """Images per micro-step of each rank."""
    return train.micro_batches or (train.micro_batch,) * ranks


def largest_micro_batch(train: TrainSpec) -> int:
    """Images per micro-step of the rank that takes most; memory depends on it."""
    return max((train.micro_batch, *(train.micro_batches or ())))


def in_words(values: Sequence[Any], between: str = " + ") -> str:
    """Values in words, equal neighbours counted: "2 x 10 + 4"."""
    groups = [(str(value).removesuffix(".0"), len(list(same))) for value, same in groupby(values)]
    return between.join(f"{count} x {value}" if count > 1 else value for value, count in groups)


def needless_micro_steps(train: TrainSpec, largest_micro_batch: int) -> str:
    """Says that a rank's share is cut into more micro-steps than necessary; empty where it is not.

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
