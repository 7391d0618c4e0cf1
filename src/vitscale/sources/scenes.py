"""Scenes: pictures of different sizes with a label for each pixel, which a second picture holds.

A scene is stored in the upper left corner of a square: three channels of its picture, and one of its mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from vitscale.errors import shown
from vitscale.sources.arrays import ArrayShape
from vitscale.sources.base import IGNORED, OUTSIDE, Encoded, Images, Labels, Split
from vitscale.sources.pictures import BrokenImage, decode_labels, decode_within, verify_picture, within

T = TypeVar("T")
MaskArray = NDArray[np.uint8]

SCENE_CHANNELS = 4
"""Red, green, blue, label."""


@dataclass(frozen=True, eq=False)
class ScenePairs(Encoded):
    """Pictures and their annotations, in which 0 stands for no label and k for class k - 1. See `Encoded`."""

    pictures: tuple[str, ...]
    """Paths of pictures; "" where an annotation has no picture."""
    annotations: tuple[str, ...]
    """Paths of annotations; "" where a picture has none."""
    classes: int

    def __len__(self) -> int:
        return len(self.pictures)

    def name(self, number: int) -> str:
        """See `Encoded`."""
        return self.pictures[number] or self.annotations[number]

    content = name

    def some(self, numbers: Labels) -> ScenePairs:
        """See `Encoded`."""
        pictures, annotations = (
            tuple(paths[number] for number in numbers) for paths in (self.pictures, self.annotations)
        )
        return ScenePairs(pictures, annotations, self.classes)

    def verify(self, number: int) -> None:
        """Checks a scene: reads the annotation wholly, and of the picture what is cheap.

        Raises:
            BrokenImage: one of the two is broken or missing, their sizes differ, or a label stands for no class.
        """
        self._both(number, lambda path: (None, verify_picture(path, path)))

    def decode(self, number: int, shape: ArrayShape) -> Images:
        """A scene as `[side, side, channels]`: its picture for 3 channels, its mask for 1, both for 4.

        Beyond the scene's end the picture is black, and the mask `OUTSIDE`.

        Raises:
            BrokenImage: as for `verify`; with one of the two alone, sizes are not compared.
        """
        side, channels = shape.side, shape.channels
        stored = np.zeros((side, side, channels), dtype=np.uint8)
        picture, mask = None, None
        if channels == SCENE_CHANNELS:
            picture, mask = self._both(number, lambda path: decode_within(path, side, path))
        elif channels == 1:
            mask = self._mask(number)
        else:
            picture, _ = decode_within(self.pictures[number], side, self.pictures[number])
        if picture is not None:
            stored[: picture.shape[0], : picture.shape[1], :3] = picture
        if mask is not None:
            scaled = nearest_within(mask, side)
            stored[..., -1] = OUTSIDE
            stored[: scaled.shape[0], : scaled.shape[1], -1] = scaled
        return stored

    def _both(self, number: int, read: Callable[[str], tuple[T, tuple[int, int]]]) -> tuple[T, MaskArray]:
        """The result of `read` for the picture, without width and height, and the mask at its own size."""
        name, annotation = self.pictures[number], self.annotations[number]
        if not name or not annotation:
            raise BrokenImage(name or annotation, f"it has no {'annotation' if name else 'picture'} of its name")
        broken = None
        try:
            picture, (width, height) = read(name)
        except BrokenImage as error:
            broken = error
        try:
            mask = self._mask(number)
        except BrokenImage as error:
            if broken is None:
                raise
            raise BrokenImage(name, f"{broken.what}; and so is {shown(annotation)}: {error.what}") from None
        if broken is not None:
            raise broken
        if mask.shape != (height, width):
            labelled = f"{shown(name)} is {width} x {height}"
            raise BrokenImage(annotation, f"it is {mask.shape[1]} x {mask.shape[0]} pixels, and {labelled}")
        return picture, mask

    def _mask(self, number: int) -> MaskArray:
        """Classes `[H, W]`; `IGNORED` where the label is 0 or 255."""
        path = self.annotations[number]
        labels = decode_labels(path, path)
        labels[labels == IGNORED] = 0
        if (most := int(labels.max())) > self.classes:
            raise BrokenImage(path, f"it has the label {most}, and data.classes is {self.classes}")
        labels -= np.uint8(1)  # bytes wrap: 0 becomes 255
        return labels


def nearest_within(mask: MaskArray, side: int) -> MaskArray:
    """A mask scaled as `pictures.within` scales its picture: each pixel gets the label nearest to its middle."""
    size = within(mask.shape[1], mask.shape[0], side)
    columns, rows = ((2 * np.arange(n) + 1) * whole // (2 * n) for n, whole in zip(size, mask.shape[::-1], strict=True))
    scaled: MaskArray = mask[rows[:, None], columns]
    return scaled


@dataclass(frozen=True, eq=False)
class SceneSplit:
    """A split with its pictures and its masks as separate splits."""

    pictures: Split
    masks: Split

    def __len__(self) -> int:
        return len(self.pictures)

    @property
    def labels(self) -> SceneSplit:
        """An object that gives masks uint8 `[n, side, side]` when indexed by ids."""
        return self

    def __getitem__(self, ids: Labels) -> Images:
        """Masks; see `Split.labels`."""
        return self.masks.take(ids)[..., 0]

    def take(self, ids: Labels) -> Images:
        """See `Split.take`."""
        return self.pictures.take(ids)
