"""Reads scikit-learn's handwritten digits: 1,797 real images of 8 x 8 pixels that need no download."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path

import numpy as np

from vitscale.errors import RequestError
from vitscale.sources import base
from vitscale.sources.base import Dataset, Images, Labels, Summary
from vitscale.sources.cache import Room, cached, in_memory
from vitscale.trial.trial import DataSpec

_SAMPLES = 1797
_SIDE = 8
_CLASSES = tuple(str(digit) for digit in range(10))
_SHA256 = "0b7e9c3202d7bcd255d6a19a238d3743bf5e320ba74812a6679958a017c55382"
"""SHA-256 of the uint8 images `[1797, 8, 8]` (0 to 255), followed by the labels as little-endian int64."""


class Digits:
    """The dataset `digits`, always split the same way by `held_out`."""

    def check(self, spec: DataSpec) -> Summary:
        """Needs no scikit-learn: all facts about its images are known."""
        base.refuse_other_keys(spec)
        held_out = base.held_out_count(_SAMPLES, len(_CLASSES), spec.held_out)
        return Summary(
            train_samples=_SAMPLES - held_out,
            held_out_samples=held_out,
            classes=_CLASSES,
            image_shape=(_SIDE, _SIDE, 3),
            fingerprint=_SHA256,
            notes=base.unused_root_notes(spec),
        )

    def load(self, spec: DataSpec, cache_root: Path) -> Dataset:
        """Reads through the cache, so that only the first rank imports scikit-learn."""
        summary = self.check(spec)
        build = partial(_fill_splits, spec.held_out)
        decoded = cached(cache_root, f"digits-{_SHA256[:12]}-{spec.held_out}", build) or in_memory(build)
        return Dataset(summary, decoded.train, decoded.held_out)


def _fill_splits(held_out: float, room: Room) -> tuple[str, ...]:
    """Fills both splits, of which `held_out` is a share; returns the names of the classes."""
    grey, labels = _read_digits()
    split_ids = base.split_ids(labels, held_out)
    for split, ids in (("train", split_ids.train), ("held_out", split_ids.held_out)):
        images, split_labels = room(split, len(ids), (_SIDE, _SIDE, 3))
        images[:] = grey[ids, :, :, None]
        split_labels[:] = labels[ids]
    return _CLASSES


def _read_digits() -> tuple[Images, Labels]:
    """Returns images uint8 `[1797, 8, 8]`, the original 0..16 scaled to 0..255 and rounded, and their labels."""
    bunch = base.library("sklearn.datasets", "the dataset 'digits'", "train").load_digits()
    grey = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    labels = bunch.target.astype(np.int64)
    if hashlib.sha256(grey.tobytes() + labels.astype("<i8").tobytes()).hexdigest() != _SHA256:
        raise RequestError(
            "scikit-learn's digits are not the images that 'digits' stands for", next_step="Reinstall scikit-learn"
        )
    return grey, labels


DIGITS = Digits()
