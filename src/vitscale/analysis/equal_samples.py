"""Accuracy after equally many images: what the runs of two trials say once both have seen the same amount of data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from vitscale.store.records import Run

Split = Literal["held-out", "train"]


@dataclass(frozen=True)
class EqualSamples:
    """Accuracies of the runs of two trials after the same number of images."""

    split: Split
    images: int
    """Seen by either when the accuracy was taken: the most that every run reached."""
    reference: tuple[float, ...]
    other: tuple[float, ...]


def equal_samples(reference: Sequence[Run], other: Sequence[Run]) -> EqualSamples | None:
    """Held-out accuracy where all these runs have it, else training accuracy; None where neither is known.

    Between two epochs it is linear in the images seen.
    """
    splits: tuple[Split, ...] = ("held-out", "train")
    for split in splits:
        courses = [[_course(run, split) for run in runs] for runs in (reference, other)]
        ends = [course[-1][0] for side in courses for course in side if course]
        if not all(courses) or len(ends) < len(reference) + len(other):
            continue
        images = min(ends)
        values = [[_at(course, images) for course in side] for side in courses]
        known = [tuple(value for value in side if value is not None) for side in values]
        if all(len(some) == len(side) for some, side in zip(known, values, strict=True)):
            return EqualSamples(split, images, known[0], known[1])
    return None


def _course(run: Run, split: Split) -> list[tuple[int, float]]:
    """(Images seen so far, accuracy) after each epoch, up to the first that has none."""
    lines = {line.epoch: line for rank in sorted(run.ranks, key=lambda r: r.rank, reverse=True) for line in rank.epochs}
    found: list[tuple[int, float]] = []
    images = 0
    while (line := lines.get(len(found))) is not None:
        value = line.held_out_accuracy if split == "held-out" else line.train_accuracy
        if value is None or not math.isfinite(value) or not 0 <= value <= 1 or not line.images:
            break
        images += line.images
        found.append((images, value))
    return found


def _at(course: Sequence[tuple[int, float]], images: int) -> float | None:
    """Linear between epochs; None before the first."""
    for seen, value in course:
        if seen == images:
            return value
    for (left, before), (right, after) in pairwise(course):
        if left < images < right:
            return before + (after - before) * (images - left) / (right - left)
    return None
