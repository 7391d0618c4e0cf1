"""Images that are made: stripes that lie or stand."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vitscale.sources.base import ArraySplit, Dataset, Summary, refuse_other_keys
from vitscale.trial.trial import DataSpec

_TRAIN, _HELD_OUT, _SIDE = 64, 16, 8


class Stripes:
    """80 images of 8 x 8 pixels in two classes."""

    def check(self, spec: DataSpec) -> Summary:
        refuse_other_keys(spec)
        return Summary(_TRAIN, _HELD_OUT, ("lying", "standing"), (_SIDE, _SIDE, 3), fingerprint="5712" * 16)

    def load(self, spec: DataSpec, cache_root: Path) -> Dataset:
        return Dataset(self.check(spec), _split(_TRAIN), _split(_HELD_OUT))


def _split(samples: int) -> ArraySplit:
    labels = np.arange(samples, dtype=np.int64) % 2
    lines = (np.arange(_SIDE, dtype=np.uint8) % 2 * 255)[None, :, None, None] + np.zeros((samples, _SIDE, _SIDE, 3))
    images = np.where(labels[:, None, None, None] == 0, lines, lines.transpose(0, 2, 1, 3))
    return ArraySplit(images.astype(np.uint8), labels)
