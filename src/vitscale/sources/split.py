"""Keeps images back for evaluation where a dataset has no split of its own."""

from __future__ import annotations

import numpy as np

from vitscale.sources.base import Labels
from vitscale.sources.mixing import mix64

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
