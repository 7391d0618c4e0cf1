"""Makes learnable images of any number and size, each from its id alone: no memory, no cache, no files.

For segmentation their pixels are labelled, and in every image some pixels count for nothing.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitscale.errors import RequestError
from vitscale.sources import base
from vitscale.sources.base import Dataset, Images, Labels, Split, Summary, Words
from vitscale.trial.model_spec import Task
from vitscale.trial.trial import DataSpec

_RECIPE_VERSION = 1
_SQUARES_PER_SIDE = 4
"""Coloured squares along a side of a class's pattern."""
_SQUARES = _SQUARES_PER_SIDE**2
_PATTERN_STREAM = 10
_TRAIN_STREAM = 11
_HELD_OUT_STREAM = 12
_SQUARES_STREAM = 20
"""Added to the stream of a split."""
_MARGIN_STREAM = 30
"""Added to the stream of a split."""
_MOST_MASK_CLASSES = 255
"""Most classes of masks: of a byte's 256 values, one stands for pixels that count for nothing."""


@dataclass(frozen=True, eq=False)
class SyntheticSplit:
    """Image `i` is the pattern of class `i % classes` (values 64 to 191) plus uniform noise (-64 to 63)."""

    labels: Labels
    side: int
    channels: int
    stream: int

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, ids: Labels) -> Images:
        """Makes the images; see `Split.take`."""
        base.require_ids(ids, len(self))
        classes, pattern_of_image = np.unique(self.labels[ids], return_inverse=True)
        squares = 64 + (_random_bytes(classes, _SQUARES * self.channels, _PATTERN_STREAM) >> 1)  # 64 to 191
        squares = squares.reshape(-1, _SQUARES_PER_SIDE, _SQUARES_PER_SIDE, self.channels)  # of each different class
        square_of_pixel = np.arange(self.side) * _SQUARES_PER_SIDE // self.side  # along either side: 0, 0, ..., 3, 3
        patterns = squares[:, square_of_pixel[:, None], square_of_pixel]  # [different classes, side, side, channels]
        shape = (self.side, self.side, self.channels)
        noise = _random_bytes(ids, math.prod(shape), self.stream).reshape(-1, *shape)
        # In uint8, which wraps in between (191 + 127) and comes out right: 0 to 254.
        return patterns[pattern_of_image] + (noise >> 1) - np.uint8(64)


@dataclass(frozen=True, eq=False)
class SegmentedSplit:
    """Image `i` is 4 x 4 squares of classes that `i` draws, each in its class's colour, plus uniform noise.

    A mask's topmost rows count for nothing: up to a quarter of all rows, as many as `i` draws.
    """

    samples: int
    classes: int
    side: int
    channels: int
    stream: int

    def __len__(self) -> int:
        return self.samples

    @property
    def labels(self) -> SegmentedSplit:
        """An object that gives masks uint8 `[n, side, side]` when indexed by ids."""
        return self

    def __getitem__(self, ids: Labels) -> NDArray[np.uint8]:
        """Makes masks; see `Split.labels`."""
        masks = self._pixel_classes(ids).astype(np.uint8)
        margins = _random_bytes(ids, 1, self.stream + _MARGIN_STREAM).astype(np.int64) * (self.side // 4) // 255
        masks[np.arange(self.side) < margins] = base.IGNORED
        return masks

    def take(self, ids: Labels) -> Images:
        """Makes the images; see `Split.take`."""
        base.require_ids(ids, len(self))
        colours = 64 + (_random_bytes(np.arange(self.classes), self.channels, _PATTERN_STREAM) >> 1)
        shape = (self.side, self.side, self.channels)
        noise = _random_bytes(ids, math.prod(shape), self.stream).reshape(-1, *shape)
        return colours[self._pixel_classes(ids)] + (noise >> 1) - np.uint8(64)

    def _pixel_classes(self, ids: Labels) -> NDArray[np.int64]:
        """Returns the class of each pixel, `[n, side, side]`."""
        words = _random_bytes(ids, _SQUARES * 8, self.stream + _SQUARES_STREAM).view("<u8")
        squares = (words % np.uint64(self.classes)).astype(np.int64).reshape(-1, _SQUARES_PER_SIDE, _SQUARES_PER_SIDE)
        square_of_pixel = np.arange(self.side) * _SQUARES_PER_SIDE // self.side
        return squares[:, square_of_pixel[:, None], square_of_pixel]


def _random_bytes(ids: Labels, count: int, stream: int) -> NDArray[np.uint8]:
    """Returns uniform bytes `[len(ids), count]`, one row per id."""
    words = -(-count // 8)  # of 8 bytes each, rounded up
    positions: Words = np.add.outer(ids.astype(np.uint64) * np.uint64(words), np.arange(words, dtype=np.uint64))
    return base.mix64(positions, stream).astype("<u8").view(np.uint8)[:, :count]


class Synthetic:
    """The dataset `synthetic`, and for segmentation `synthetic-masks`.

    `samples`, `classes` and `source_size` decide everything.
    """

    def __init__(self, task: Task = "classification") -> None:
        self.task = task

    def check(self, spec: DataSpec) -> Summary:
        """Needs nothing but the numbers in `spec`.

        Raises:
            RequestError: more classes than a mask has values.
        """
        base.refuse_other_keys(spec, ("channels",))
        has_masks = self.task == "segmentation"
        classes = base.class_count(spec)
        if has_masks and classes > _MOST_MASK_CLASSES:
            raise RequestError(
                f"data.classes = {spec.classes} do not fit into masks", valid=[f"at most {_MOST_MASK_CLASSES}"]
            )
        name = "synthetic masks" if has_masks else "synthetic"
        recipe = f"{name} {_RECIPE_VERSION} {spec.samples} {spec.classes} {spec.source_size} {spec.held_out}"
        if spec.channels != 3:
            recipe += f" {spec.channels} channels"
        return Summary(
            train_samples=spec.samples,
            held_out_samples=math.ceil(spec.samples * Fraction(str(spec.held_out))),
            classes=tuple(f"class {number}" for number in range(classes)),
            image_shape=(spec.source_size, spec.source_size, spec.channels),
            fingerprint=hashlib.sha256(recipe.encode()).hexdigest(),
            task=self.task,
            notes=base.unused_root_notes(spec),
        )

    def load(self, spec: DataSpec, cache_root: Path) -> Dataset:  # noqa: ARG002  one signature for every source
        """Makes only the labels; images are made when taken."""
        summary = self.check(spec)
        statistics: base.ChannelStatistics | None = None
        if spec.channels != 3:
            # A pattern and its noise have 128 equally likely values each: a variance of (128^2 - 1) / 12, twice.
            statistics = base.ChannelStatistics(mean=(127.0,) * spec.channels, std=(52.25,) * spec.channels)

        def split(samples: int, stream: int) -> Split:
            if self.task == "segmentation":
                return SegmentedSplit(samples, base.class_count(spec), spec.source_size, spec.channels, stream)
            labels = np.arange(samples, dtype=np.int64) % base.class_count(spec)
            return SyntheticSplit(labels, spec.source_size, spec.channels, stream)

        train = split(summary.train_samples, _TRAIN_STREAM)
        held_out = split(summary.held_out_samples, _HELD_OUT_STREAM)
        return Dataset(summary, train, held_out, statistics)


SYNTHETIC = Synthetic()
SYNTHETIC_MASKS = Synthetic("segmentation")
