"""Keeps images back for evaluation where a dataset has no split of its own."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vitscale.sources.base import Labels

Words = NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def mix64(positions: Words, stream: int) -> Words:
    """Pseudo-random 64-bit words, one per position, same shape; each `stream` is an independent sequence.

    The output function of SplitMix64 (Steele, Lea & Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014) applied to `(positions + 1) * gamma` offset by the finalised stream number.
    """
    offset = _finalise(np.array([stream], dtype=np.uint64) * _GAMMA + np.uint64(1))
    return _finalise((positions + np.uint64(1)) * _GAMMA + offset)


def _finalise(z: Words) -> Words:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


_STREAM = 1


def held_out_count(samples: int, classes: int, share: float) -> int:
    """How many images are held out: `round(samples * share)`, at least 1, leaving one of every class."""
    return min(max(1, round(samples * share)), samples - classes)


def split_ids(labels: Labels, share: float) -> tuple[Labels, Labels]:
    """Ids of the training and of the held-out images, each ascending; always the same for the same labels.

    Every class gives about its share: within a class the images are shuffled and placed at equal distances
    in [0, 1), and the images placed lowest over all classes are held out. One image per class always stays
    in training; where no class has two images there is nothing to hold out.
    """
    shuffled = np.argsort(mix64(np.arange(len(labels), dtype=np.uint64), _STREAM), kind="stable")
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    _, starts, sizes = np.unique(labels[by_class], return_index=True, return_counts=True)
    position = np.arange(len(labels)) - np.repeat(starts, sizes)
    place = (position + 0.5) / np.repeat(sizes, sizes)
    place[starts + sizes - 1] = np.inf
    lowest = by_class[np.argsort(place, kind="stable")]
    count = held_out_count(len(labels), len(sizes), share)
    return np.sort(lowest[count:]).astype(np.int64), np.sort(lowest[:count]).astype(np.int64)
