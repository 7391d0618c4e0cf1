"""Makes what a model takes from stored scenes, on the device: a random crop in training, the whole in evaluation.

Pictures of different sizes lie in squares of one size (`sources.scenes`). Crops are made for the whole batch at once,
from where each of their pixels lies in the stored picture: nothing is as large as a scaled picture, and nobody waits
for a size. The augmentation is the one that ADE20K is commonly trained with, as mmsegmentation documents it for UperNet
and Swin (https://github.com/open-mmlab/mmsegmentation, configs/_base_/datasets/ade20k.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, overload

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from vitscale.datasets.batches import Purpose, stream, uniform_integers
from vitscale.datasets.preprocess import IMAGENET, Normalisation
from vitscale.sources.base import IGNORED, OUTSIDE

LONG_SIDE = 4
"""Most times that the longer side may be `image_size`, before the random scale: 4, as in (2048, 512)."""
_LEAST_SCALE, _SCALES = 0.5, 1.5
"""Least random scale, and the range above it."""
_TRIES = 10
_LARGEST_SHARE = (3, 4)
"""Largest share of one class in a crop: less than this of what is labelled, unless no try has it."""
_COUNTED_SIDE = 128
"""Pixels along a crop's side whose labels are counted: all of a small crop, evenly spread ones of a large one."""
_WORD = 2**31
"""Random numbers are divided by this to lie in [0, 1)."""
_BRIGHTNESS, _CONTRAST, _SATURATION, _HUE = 32.0, (0.5, 1.5), (0.5, 1.5), 36.0
"""Largest distortions: brightness in byte values, contrast and saturation as factors, hue in degrees."""


class _Axis(NamedTuple):
    """Source of the pixels along one side of a crop, as places in the stored picture: each [n, side]."""

    lower: Tensor
    upper: Tensor
    share: Tensor
    """Share of `upper`, float32; `lower` has the rest."""
    nearest: Tensor
    inside: Tensor
    """False beyond the end of the scaled picture."""


class CropView(NamedTuple):
    """The part of each stored scene of a batch that a crop shows."""

    rows: _Axis
    columns: _Axis

    @property
    def inside(self) -> Tensor:
        """Whether the picture covers each pixel: bool [n, height, width]."""
        return self.rows.inside[:, :, None] & self.columns.inside[:, None, :]

    def masks(self, masks: Tensor) -> Tensor:
        """The nearest label, `IGNORED` beyond the picture's end: uint8 [n, height, width] of stored [n, H, W]."""
        return _at(masks, self.rows.nearest, self.columns.nearest).masked_fill(~self.inside, IGNORED)

    def pixels(self, images: Tensor) -> Tensor:
        """Bilinear between the four nearest pixels: float32 [n, C, height, width] from stored uint8 [n, H, W, C]."""
        corners = [
            [_at(images, row, column).float() for column in (self.columns.lower, self.columns.upper)]
            for row in (self.rows.lower, self.rows.upper)
        ]
        across = self.columns.share[:, None, :, None]
        upper, lower = (left + (right - left) * across for left, right in corners)
        return (upper + (lower - upper) * self.rows.share[:, :, None, None]).permute(0, 3, 1, 2)


class Scenes:
    """Crops and distorts the scenes of a batch.

    The result depends only on the seed, the epoch and the scene's id: not on its batch, the rank or the device.
    """

    def __init__(self, image_size: int, *, augment: bool, seed: int) -> None:
        """`image_size`, in pixels: the side of a crop, and of a scaled picture's shorter side."""
        self.image_size, self.augment, self.seed = image_size, augment, seed
        self._normalise = Normalisation(IMAGENET, 255.0)

    def prepare(
        self, images: Tensor, labels: Tensor, ids: Tensor, *, epoch: int, training: bool
    ) -> tuple[Callable[[], Tensor], Tensor]:
        """See `Preprocess.prepare`. In evaluation one scene at a time, whose labels keep their stored size."""
        if training:
            view = self.view(labels, ids, epoch=epoch)
            return partial(self.images, images, view, ids, epoch=epoch), view.masks(labels)
        height, width = _sizes(labels)[0].tolist()
        return partial(self.whole, images[:, :height, :width]), labels[:, :height, :width]

    def view(self, masks: Tensor, ids: Tensor, *, epoch: int) -> CropView:
        """The crop of each scene in training; without `augment` the middle of the picture, at scale 1.

        Args:
            masks: stored, uint8 [n, H, W]; their `OUTSIDE` tells how large each scene is.
            ids: int64 [n], each scene's place in its split.
            epoch: number of the epoch, from 0.
        """
        stored = _sizes(masks)
        if not self.augment:
            scaled = _scaled(stored, self.image_size, torch.ones_like(ids, dtype=torch.float64))
            first = (scaled - self.image_size).clamp(min=0) // 2
            return self._crop(stored, scaled, first, torch.zeros_like(ids, dtype=torch.bool))
        draws = _draws(ids, stream(Purpose.VIEW, self.seed, epoch), 2 * _TRIES + 4)
        scaled = _scaled(stored, self.image_size, _LEAST_SCALE + _SCALES * (draws[:, 0].double() / _WORD))
        offsets = (scaled - self.image_size).clamp(min=0) + 1
        tries = (draws[:, 2:].unflatten(1, (_TRIES + 1, 2)) * offsets[:, None]) // _WORD
        chosen = self._first_of_several_classes(masks, stored, scaled, tries[:, :_TRIES])
        first = tries.gather(1, chosen[:, None, None].expand(-1, 1, 2))[:, 0]
        return self._crop(stored, scaled, first, draws[:, 1] < _WORD // 2)

    def images(self, images: Tensor, view: CropView, ids: Tensor, *, epoch: int) -> Tensor:
        """Crops ready for the model: float32 [n, 3, image_size, image_size], black beyond the picture's end.

        Black, not 0 after normalisation: a patch of 0 is embedded as the bias, which is 0 in a fresh model, and Swin
        V2's attention divides by its length. Gradients were 1e13 times as large.
        """
        pixels = view.pixels(images)
        if self.augment:
            pixels = _distorted(pixels, _draws(ids, stream(Purpose.COLOUR, self.seed, epoch), 9))
        return self._normalise(pixels.masked_fill(~view.inside[:, None], 0.0))

    def whole(self, images: Tensor) -> Tensor:
        """Scenes of one size, scaled for evaluation: [n, 3, h, w] from uint8 [n, H, W, 3]."""
        stored = torch.tensor([images.shape[1:3]] * len(images), device=images.device)
        scaled = _scaled(stored, self.image_size, torch.ones(len(images), dtype=torch.float64, device=images.device))
        rows, columns = (
            _axis(stored[:, n], scaled[:, n], torch.arange(side, device=images.device).expand(len(images), -1))
            for n, side in enumerate(scaled[0].tolist())
        )
        return self._normalise(CropView(rows, columns).pixels(images))

    def _crop(self, stored: Tensor, scaled: Tensor, first: Tensor, mirrored: Tensor) -> CropView:
        side = torch.arange(self.image_size, device=stored.device)
        seen = scaled.clamp(max=self.image_size)
        rows = first[:, :1] + side
        columns = first[:, 1:] + torch.where(mirrored[:, None], seen[:, 1:] - 1 - side, side)
        return CropView(
            _axis(stored[:, 0], scaled[:, 0], rows, side < seen[:, :1]),
            _axis(stored[:, 1], scaled[:, 1], columns, side < seen[:, 1:]),
        )

    def _first_of_several_classes(self, masks: Tensor, stored: Tensor, scaled: Tensor, tries: Tensor) -> Tensor:
        """Number [n] of the first crop of `tries` [n, tries, 2] that no class dominates; else the number of tries."""
        size = self.image_size
        counted = min(size, _COUNTED_SIDE)
        side = (2 * torch.arange(counted, device=masks.device) + 1) * size // (2 * counted)
        nearest, inside = [], []
        for axis in (0, 1):
            pixels = _axis(stored[:, axis], scaled[:, axis], (tries[:, :, axis, None] + side).flatten(1))
            nearest.append(pixels.nearest.unflatten(1, (-1, counted)).flatten(0, 1))
            inside.append((side < scaled[:, axis, None]).repeat_interleave(tries.shape[1], 0))
        scene = torch.arange(len(masks), device=masks.device).repeat_interleave(tries.shape[1])
        labels = masks[scene[:, None, None], nearest[0][:, :, None], nearest[1][:, None, :]].flatten(1).long()
        there = (inside[0][:, :, None] & inside[1][:, None, :]).flatten(1).long()
        counts = torch.zeros(len(labels), 256, dtype=torch.int64, device=masks.device).scatter_add_(1, labels, there)
        counts = counts[:, :OUTSIDE]
        most, of = _LARGEST_SHARE
        fine = ((counts > 0).sum(1) > 1) & (of * counts.amax(1) < most * counts.sum(1))
        numbers = torch.arange(tries.shape[1], device=masks.device)
        return torch.where(fine.view(tries.shape[:2]), numbers, tries.shape[1]).amin(1)


@overload
def sliding(evaluate: Callable[[Tensor], Tensor], images: Tensor, size: int) -> Tensor: ...
@overload
def sliding(evaluate: Callable[[Tensor], Tensor | None], images: Tensor, size: int) -> Tensor | None: ...
def sliding(evaluate: Callable[[Tensor], Tensor | None], images: Tensor, size: int) -> Tensor | None:
    """Logits [n, classes, H, W] of whole images [n, 3, H, W], from windows of `size` x `size` pixels in one forward;
    None where `evaluate` gives none.

    Windows lie two thirds of their side apart; the last ones end with the image. Where they overlap, their mean counts.
    A side shorter than a window is padded with 0.
    """
    height, width = images.shape[2:]
    images = pad(images, (0, max(0, size - width), 0, max(0, size - height)))
    corners = [(y, x) for y in _starts(images.shape[2], size) for x in _starts(images.shape[3], size)]
    logits = evaluate(torch.cat([images[:, :, y : y + size, x : x + size] for y, x in corners]))
    if logits is None:
        return None
    if logits.shape[2:] != (size, size):
        logits = interpolate(logits, size=(size, size), mode="bilinear", align_corners=False)
    total = logits.new_zeros(len(images), logits.shape[1], *images.shape[2:])
    windows = logits.new_zeros(images.shape[2:])
    for (y, x), of_window in zip(corners, logits.split(len(images)), strict=True):
        total[:, :, y : y + size, x : x + size] += of_window
        windows[y : y + size, x : x + size] += 1
    return (total / windows)[:, :, :height, :width]


def _starts(length: int, size: int) -> list[int]:
    stride = max(1, size * 2 // 3)
    count = -(-(length - size) // stride) + 1
    return [min(number * stride, length - size) for number in range(count)]


def _sizes(masks: Tensor) -> Tensor:
    """Height and width [n, 2] of stored scenes."""
    return torch.stack([(masks[:, :, 0] != OUTSIDE).sum(1), (masks[:, 0, :] != OUTSIDE).sum(1)], dim=1)


def _scaled(stored: Tensor, image_size: int, scale: Tensor) -> Tensor:
    """Height and width [n, 2] at which a picture fits into (4 x `image_size`, `image_size`) times `scale` [n]."""
    sides = stored.double()
    shorter, longer = (scale * image_size).floor(), (scale * (LONG_SIDE * image_size)).floor()
    factor = torch.minimum(shorter.clamp(min=1) / sides.amin(1), longer.clamp(min=1) / sides.amax(1))
    return (sides * factor[:, None] + 0.5).floor().clamp(min=1).long()


def _axis(stored: Tensor, scaled: Tensor, positions: Tensor, inside: Tensor | None = None) -> _Axis:
    """Places in pictures `stored` [n] long of pixels `positions` [n, side] of the same pictures scaled to `scaled` [n].

    The middle of pixel p is at (p + 1/2) stored / scaled, in whole numbers so that all devices agree.
    """
    stored, scaled = stored[:, None], scaled[:, None]
    middle = (2 * positions + 1) * stored
    lower = (middle - scaled) // (2 * scaled)
    rest = middle - scaled - lower * 2 * scaled
    last = stored - 1
    return _Axis(
        lower=lower.clamp(min=0).minimum(last),
        upper=(lower + 1).clamp(min=0).minimum(last),
        share=rest.float() / (2 * scaled).float(),
        nearest=(middle // (2 * scaled)).clamp(min=0).minimum(last),
        inside=torch.ones_like(positions, dtype=torch.bool) if inside is None else inside,
    )


def _at(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    return images[torch.arange(len(images), device=images.device)[:, None, None], rows[:, :, None], columns[:, None, :]]


def _draws(ids: Tensor, number: int, count: int) -> Tensor:
    """Random numbers from 0 to 2^31 - 1, `count` for each id: int64 [n, count]."""
    return uniform_integers(ids[:, None] * count + torch.arange(count, device=ids.device), number, _WORD)


def _distorted(pixels: Tensor, draws: Tensor) -> Tensor:
    """Pixels [n, 3, h, w] in 0 to 255 whose brightness, contrast, saturation and hue are each changed in half of them.

    Contrast comes second or last, equally often. Nothing is rounded to bytes in between.

    Args:
        pixels: pixels of crops.
        draws: numbers [n, 9] from `_draws`.
    """
    happens = draws[:, 0::2] < _WORD // 2
    drawn = draws[:, 1::2].float() / _WORD
    plain = torch.zeros_like(drawn[:, 0])

    def strength(number: int, least: float, most: float, neutral: float) -> Tensor:
        value = torch.where(happens[:, number], least + (most - least) * drawn[:, number], plain + neutral)
        return value[:, None, None, None]

    contrast, late = strength(1, *_CONTRAST, 1.0), happens[:, 4, None, None, None]
    pixels = (pixels + strength(0, -_BRIGHTNESS, _BRIGHTNESS, 0.0)).clamp(0, 255)
    pixels = torch.where(late, pixels, (pixels * contrast).clamp(0, 255))
    pixels = _hue_turned(_saturated(pixels, strength(2, *_SATURATION, 1.0)), strength(3, -_HUE, _HUE, 0.0))
    return torch.where(late, (pixels * contrast).clamp(0, 255), pixels)


def _saturated(pixels: Tensor, factor: Tensor) -> Tensor:
    """Multiplies HSV's saturation, (max - min) / max, by a factor, to at most 1; value and hue stay."""
    value = pixels.amax(1, keepdim=True)
    chroma = value - pixels.amin(1, keepdim=True)
    factor = torch.minimum(factor, value / chroma.clamp(min=1e-6))
    return value - (value - pixels) * factor


def _hue_turned(pixels: Tensor, degrees: Tensor) -> Tensor:
    """Turns HSV's hue; value and saturation stay (Smith, "Color Gamut Transform Pairs", SIGGRAPH 1978)."""
    red, green, blue = pixels.split(1, 1)
    value = pixels.amax(1, keepdim=True)
    chroma = value - pixels.amin(1, keepdim=True)
    divisor = torch.where(chroma > 0, chroma, torch.ones_like(chroma))
    # Hue in sixths of the circle, from red over green to blue.
    hue = torch.where(
        value == red,
        (green - blue) / divisor,
        torch.where(value == green, (blue - red) / divisor + 2, (red - green) / divisor + 4),
    )
    hue = hue + degrees / 60
    sixths = torch.cat([torch.remainder(hue + start, 6.0) for start in (5.0, 3.0, 1.0)], dim=1)
    return value - chroma * torch.minimum(sixths, 4 - sixths).clamp(0, 1)
