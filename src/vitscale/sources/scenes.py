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
from vitscale.sources.pictures import BrokenImage, Size, decode_labels, decode_within, size_within, verify_picture

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
        pictures = tuple(self.pictures[number] for number in numbers)
        annotations = tuple(self.annotations[number] for number in numbers)
        return ScenePairs(pictures, annotations, self.classes)

    def verify(self, number: int) -> None:
        """Checks a scene: reads the annotation wholly, and of the picture what is cheap.

        Raises:
            BrokenImage: one of the two is broken or missing, their sizes differ, or a label stands for no class.
        """
        self._read_both(number, lambda path: (None, verify_picture(path, path)))

    def decode(self, number: int, shape: ArrayShape) -> Images:
        """Decodes a scene to `[side, side, channels]`: its picture for 3 channels, its mask for 1, both for 4.

        Beyond the scene's end the picture is black, and the mask `OUTSIDE`.

        Raises:
            BrokenImage: as for `verify`; with one of the two alone, sizes are not compared.
        """
        side = shape.side
        stored = np.zeros((side, side, shape.channels), dtype=np.uint8)
        picture: Images | None = None
        mask: MaskArray | None = None
        if shape.channels == SCENE_CHANNELS:
            picture, mask = self._read_both(number, lambda path: decode_within(path, side, path))
        elif shape.channels == 1:
            mask = self._read_mask(number)
        else:
            path = self.pictures[number]
            picture = decode_within(path, side, path).pixels
        if picture is not None:
            stored[: picture.shape[0], : picture.shape[1], :3] = picture
        if mask is not None:
            scaled = nearest_within(mask, side)
            stored[..., -1] = OUTSIDE
            stored[: scaled.shape[0], : scaled.shape[1], -1] = scaled
        return stored

    def _read_both(self, number: int, read_picture: Callable[[str], tuple[T, Size]]) -> tuple[T, MaskArray]:
        """Reads the picture and the mask of a scene.

        Args:
            number: number of the scene.
            read_picture: path of a picture -> the value to return, and the picture's size in its file.

        Returns:
            The value of `read_picture`, and the mask at its own size.

        Raises:
            BrokenImage: as for `verify`. If both are broken it names both.
        """
        picture_path = self.pictures[number]
        annotation_path = self.annotations[number]
        if not annotation_path:
            raise BrokenImage(picture_path, "it has no annotation of its name")
        if not picture_path:
            raise BrokenImage(annotation_path, "it has no picture of its name")
        broken_picture: BrokenImage | None = None
        try:
            picture, size = read_picture(picture_path)
        except BrokenImage as error:
            broken_picture = error
        try:
            mask = self._read_mask(number)
        except BrokenImage as broken_mask:
            if broken_picture is None:
                raise
            what = f"{broken_picture.what}; and so is {shown(annotation_path)}: {broken_mask.what}"
            raise BrokenImage(picture_path, what) from None
        if broken_picture is not None:
            raise broken_picture
        if mask.shape != (size.height, size.width):
            picture_clause = f"{shown(picture_path)} is {size.width} x {size.height}"
            raise BrokenImage(annotation_path, f"it is {mask.shape[1]} x {mask.shape[0]} pixels, and {picture_clause}")
        return picture, mask

    def _read_mask(self, number: int) -> MaskArray:
        """Reads the mask of a scene: classes `[H, W]`, `IGNORED` where the label is 0 or 255.

        Raises:
            BrokenImage: it is broken, or a label stands for no class.
        """
        path = self.annotations[number]
        labels = decode_labels(path, path)
        labels[labels == IGNORED] = 0
        highest = int(labels.max())
        if highest > self.classes:
            raise BrokenImage(path, f"it has the label {highest}, and data.classes is {self.classes}")
        labels -= np.uint8(1)  # bytes wrap: 0 becomes 255
        return labels


def nearest_within(mask: MaskArray, side: int) -> MaskArray:
    """Scales a mask as `pictures.size_within` scales its picture: each pixel gets the label nearest to its middle."""
    height, width = mask.shape
    size = size_within(width, height, side)
    rows = _nearest_stored_pixels(height, size.height)
    columns = _nearest_stored_pixels(width, size.width)
    scaled: MaskArray = mask[rows[:, None], columns]
    return scaled


def _nearest_stored_pixels(length: int, scaled_length: int) -> NDArray[np.int64]:
    """Returns the pixel along an edge that is nearest to the middle of each pixel of the scaled edge."""
    return (2 * np.arange(scaled_length) + 1) * length // (2 * scaled_length)


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
