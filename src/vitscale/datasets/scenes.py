"""Makes a model's inputs from stored scenes, on the device: a random crop in training, the whole in evaluation.

Pictures of different sizes lie in squares of one size (`sources.scenes`). Crops are made for the whole batch at once,
from where each of their pixels lies in the stored picture: nothing is as large as a scaled picture, and nobody waits
for a size. The augmentation is the one that ADE20K is commonly trained with, as mmsegmentation documents it for UperNet
and Swin (https://github.com/open-mmlab/mmsegmentation, configs/_base_/datasets/ade20k.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction
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
_SMALLEST_SCALE = 0.5
"""Least random scale."""
_SCALE_RANGE = 1.5
"""Largest random scale, less the least one."""
_CROP_TRIES = 10
"""Random crops that are tried before one is taken in which a single class dominates."""
_LARGEST_CLASS_SHARE = Fraction(3, 4)
"""Largest share of one class in a crop: less than this of what is labelled, unless no try has it."""
_COUNTED_SIDE = 128
"""Pixels along a crop's side whose labels are counted: all of a small crop, evenly spread ones of a large one."""
_DRAW_LIMIT = 2**31
"""Random numbers are whole and below this; divided by it, they lie in [0, 1)."""


class _Range(NamedTuple):
    """Bounds of a random distortion, and the value that changes nothing."""

    least: float
    most: float
    neutral: float


_BRIGHTNESS = _Range(-32.0, 32.0, neutral=0.0)
"""Byte values that are added."""
_CONTRAST = _Range(0.5, 1.5, neutral=1.0)
"""Factors."""
_SATURATION = _Range(0.5, 1.5, neutral=1.0)
"""Factors."""
_HUE = _Range(-36.0, 36.0, neutral=0.0)
"""Degrees."""


class _AxisNeighbours(NamedTuple):
    """The two stored pixels between which each pixel along one side of a crop lies: each field is [n, side]."""

    lower: Tensor
    """Index of the stored pixel whose middle lies just before."""
    upper: Tensor
    """Index of the stored pixel whose middle lies just after; at an end of the picture the same as `lower`."""
    upper_share: Tensor
    """Weight of `upper` in an interpolation, float32 from 0 to 1; `lower` has the rest."""
    nearest: Tensor
    """Index of the stored pixel that covers the middle of the crop's pixel."""
    is_inside: Tensor
    """Whether the scaled picture covers the crop's pixel; False beyond its end."""


class CropView(NamedTuple):
    """The part of each stored scene of a batch that a crop shows."""

    rows: _AxisNeighbours
    columns: _AxisNeighbours

    @property
    def inside(self) -> Tensor:
        """Whether the picture covers each pixel of the crop: bool [n, height, width]."""
        return self.rows.is_inside[:, :, None] & self.columns.is_inside[:, None, :]

    def masks(self, masks: Tensor) -> Tensor:
        """Returns the nearest labels, `IGNORED` beyond the picture's end: uint8 [n, height, width] of [n, H, W]."""
        return _pixels_at(masks, self.rows.nearest, self.columns.nearest).masked_fill(~self.inside, IGNORED)

    def pixels(self, images: Tensor) -> Tensor:
        """Interpolates between the four nearest pixels: float32 [n, C, height, width] of stored uint8 [n, H, W, C]."""
        row_above = self._interpolated_along_rows(images, self.rows.lower)
        row_below = self._interpolated_along_rows(images, self.rows.upper)
        share_below = self.rows.upper_share[:, :, None, None]
        pixels = row_above + (row_below - row_above) * share_below  # [n, height, width, C]
        return pixels.permute(0, 3, 1, 2)

    def _interpolated_along_rows(self, images: Tensor, rows: Tensor) -> Tensor:
        """Interpolates between columns in the stored rows `rows` [n, height]: float32 [n, height, width, C]."""
        left = _pixels_at(images, rows, self.columns.lower).float()
        right = _pixels_at(images, rows, self.columns.upper).float()
        share_of_right = self.columns.upper_share[:, None, :, None]
        return left + (right - left) * share_of_right


class Scenes:
    """Crops and distorts the scenes of a batch.

    The result depends only on the seed, the epoch and the scene's id: not on its batch, the rank or the device.
    """

    def __init__(self, image_size: int, *, augment: bool, seed: int) -> None:
        """`image_size`, in pixels: the side of a crop, and of a scaled picture's shorter side."""
        self.image_size = image_size
        self.augment = augment
        self.seed = seed
        self._normalise = Normalisation(IMAGENET, 255.0)

    def prepare(
        self, images: Tensor, labels: Tensor, ids: Tensor, *, epoch: int, training: bool
    ) -> tuple[Callable[[], Tensor], Tensor]:
        """Returns a function that makes the images ready for the model, and the labels; see `Preprocess.prepare`.

        In evaluation one scene at a time, whose labels keep their stored size.
        """
        if training:
            view = self.view(labels, ids, epoch=epoch)
            return partial(self.images, images, view, ids, epoch=epoch), view.masks(labels)
        height, width = _stored_sizes(labels)[0].tolist()
        return partial(self.whole, images[:, :height, :width]), labels[:, :height, :width]

    def view(self, masks: Tensor, ids: Tensor, *, epoch: int) -> CropView:
        """Draws the crop of each scene in training; without `augment` the middle of the picture, at scale 1.

        Args:
            masks: stored, uint8 [n, H, W]; `OUTSIDE` begins where a scene ends.
            ids: int64 [n], each scene's number in its split.
            epoch: number of the epoch, from 0.
        """
        stored = _stored_sizes(masks)
        if not self.augment:
            scaled = _scaled_sizes(stored, self.image_size, torch.ones_like(ids, dtype=torch.float64))
            corner = (scaled - self.image_size).clamp(min=0) // 2
            return self._crop(stored, scaled, corner, torch.zeros_like(ids, dtype=torch.bool))
        draws = _draw_crops(ids, stream(Purpose.VIEW, self.seed, epoch))
        scale = _SMALLEST_SCALE + _SCALE_RANGE * (draws.scale.double() / _DRAW_LIMIT)
        scaled = _scaled_sizes(stored, self.image_size, scale)
        # A crop of 512 pixels begins at one of 189 pixels along a side of 700, and only at 0 along a side of 400.
        possible_corners = (scaled - self.image_size).clamp(min=0) + 1  # along each axis, [n, 2]
        # In the scaled picture, [n, tries + 1, 2]; the last one is taken if no other is good.
        corners = (draws.corners * possible_corners[:, None]) // _DRAW_LIMIT
        first_mixed_try = self._first_mixed_try(masks, stored, scaled, corners[:, :_CROP_TRIES])  # [n]
        corner_index = first_mixed_try[:, None, None].expand(-1, 1, 2)  # the same for row and column
        corner = corners.gather(1, corner_index).squeeze(1)  # [n, 2]
        return self._crop(stored, scaled, corner, draws.is_mirrored)

    def images(self, images: Tensor, view: CropView, ids: Tensor, *, epoch: int) -> Tensor:
        """Makes crops ready for the model: float32 [n, 3, image_size, image_size], black beyond the picture's end.

        Black, not 0 after normalisation: a patch of 0 is embedded as the bias, which is 0 in a fresh model, and Swin
        V2's attention divides by its length. Gradients were 1e13 times as large.
        """
        pixels = view.pixels(images)
        if self.augment:
            pixels = _distorted(pixels, _random_draws(ids, stream(Purpose.COLOUR, self.seed, epoch), 9))
        return self._normalise(pixels.masked_fill(~view.inside[:, None], 0.0))

    def whole(self, images: Tensor) -> Tensor:
        """Scales scenes of one size for evaluation: [n, 3, h, w] from uint8 [n, H, W, 3]."""
        stored = torch.tensor([images.shape[1:3]] * len(images), device=images.device)
        scaled = _scaled_sizes(
            stored, self.image_size, torch.ones(len(images), dtype=torch.float64, device=images.device)
        )
        height, width = scaled[0].tolist()
        all_rows = torch.arange(height, device=images.device).expand(len(images), -1)
        all_columns = torch.arange(width, device=images.device).expand(len(images), -1)
        rows = _axis_neighbours(stored[:, 0], scaled[:, 0], all_rows)
        columns = _axis_neighbours(stored[:, 1], scaled[:, 1], all_columns)
        return self._normalise(CropView(rows, columns).pixels(images))

    def _crop(self, stored: Tensor, scaled: Tensor, corner: Tensor, is_mirrored: Tensor) -> CropView:
        """Returns the view of one crop of each picture.

        Args:
            stored: height and width of the stored pictures, [n, 2].
            scaled: height and width of the scaled ones, [n, 2].
            corner: row and column of the crop's upper left corner in the scaled picture, [n, 2].
            is_mirrored: whether columns are in opposite order, bool [n].
        """
        offsets = torch.arange(self.image_size, device=stored.device)  # from the crop's first pixel on, [side]
        covered = scaled.clamp(max=self.image_size)  # height and width that the picture covers of the crop, [n, 2]
        covered_height, covered_width = covered.split(1, dim=1)  # each [n, 1]
        first_row, first_column = corner.split(1, dim=1)  # each [n, 1]
        rows = first_row + offsets  # [n, side]
        mirrored_offsets = covered_width - 1 - offsets
        columns = first_column + torch.where(is_mirrored[:, None], mirrored_offsets, offsets)  # [n, side]
        return CropView(
            _axis_neighbours(stored[:, 0], scaled[:, 0], rows, offsets < covered_height),
            _axis_neighbours(stored[:, 1], scaled[:, 1], columns, offsets < covered_width),
        )

    def _first_mixed_try(self, masks: Tensor, stored: Tensor, scaled: Tensor, corners: Tensor) -> Tensor:
        """Returns the number [n] of each scene's first crop that no class dominates, or the number of tries.

        Args:
            masks: stored, uint8 [n, H, W].
            stored: height and width of the stored pictures, [n, 2].
            scaled: height and width of the scaled ones, [n, 2].
            corners: row and column of the corner of each try in the scaled picture, [n, tries, 2].
        """
        scenes, tries = corners.shape[:2]
        counted = min(self.image_size, _COUNTED_SIDE)
        # The middle pixels of `counted` equal parts of a crop's side: 2, 6, 10, ... for 128 of 512 pixels.
        offsets = (2 * torch.arange(counted, device=masks.device) + 1) * self.image_size // (2 * counted)
        rows = _counted_pixels(stored[:, 0], scaled[:, 0], corners[:, :, 0], offsets)
        columns = _counted_pixels(stored[:, 1], scaled[:, 1], corners[:, :, 1], offsets)
        # All tries of all scenes in one go: [n * tries, counted, counted].
        scene_of_try = torch.arange(scenes, device=masks.device).repeat_interleave(tries)  # 0, 0, ..., 1, 1, ...
        labels = masks[scene_of_try[:, None, None], rows.nearest[:, :, None], columns.nearest[:, None, :]]
        is_inside = rows.is_inside[:, :, None] & columns.is_inside[:, None, :]
        is_mixed = _is_mixed(labels, is_inside).view(scenes, tries)
        try_numbers = torch.arange(tries, device=masks.device)
        return torch.where(is_mixed, try_numbers, tries).amin(1)


class _CropDraws(NamedTuple):
    """Random numbers that decide on the crops of a batch; those that are integers are below 2^31."""

    scale: Tensor
    """int64 [n]."""
    is_mirrored: Tensor
    """bool [n]."""
    corners: Tensor
    """int64 [n, tries + 1, 2]: row and column of each try's corner; the last one is taken if no try is good."""


def _draw_crops(ids: Tensor, random_stream: int) -> _CropDraws:
    """Draws the numbers of each scene's crop, for ids int64 [n], from a stream of `datasets.batches.stream`."""
    corners = _CROP_TRIES + 1
    draws = _random_draws(ids, random_stream, 2 + 2 * corners)
    return _CropDraws(
        scale=draws[:, 0],
        is_mirrored=draws[:, 1] < _DRAW_LIMIT // 2,
        corners=draws[:, 2:].unflatten(1, (corners, 2)),
    )


class _CountedPixels(NamedTuple):
    """The pixels along one axis of each try of a crop whose labels are counted: each [n * tries, counted]."""

    nearest: Tensor
    """Nearest pixel of the stored picture."""
    is_inside: Tensor
    """False beyond the end of the scaled picture."""


def _counted_pixels(stored: Tensor, scaled: Tensor, corners: Tensor, offsets: Tensor) -> _CountedPixels:
    """Returns the pixels at which the labels of each try are counted, along one axis.

    Args:
        stored: length of the stored pictures, [n].
        scaled: length of the scaled ones, [n].
        corners: first pixel of each try in the scaled picture, [n, tries].
        offsets: the pixels of a crop that are counted, from its first pixel on, [counted].
    """
    positions = (corners[:, :, None] + offsets).flatten(1)  # [n, tries * counted]
    nearest = _axis_neighbours(stored, scaled, positions).nearest  # [n, tries * counted]
    # The same for all tries of a scene: a crop begins beyond 0 only where the picture fills it.
    is_inside = offsets < scaled[:, None]  # [n, counted]
    tries = corners.shape[1]
    return _CountedPixels(
        nearest=nearest.unflatten(1, (-1, len(offsets))).flatten(0, 1),
        is_inside=is_inside.repeat_interleave(tries, 0),
    )


def _is_mixed(labels: Tensor, is_inside: Tensor) -> Tensor:
    """Whether crops have several classes, none with `_LARGEST_CLASS_SHARE` of the labelled pixels or more: bool [m].

    Args:
        labels: uint8 [m, h, w].
        is_inside: whether the picture covers a pixel, bool [m, h, w].
    """
    pixels_by_label = torch.zeros(len(labels), 256, dtype=torch.int64, device=labels.device)  # [m, 256]
    pixels_by_label.scatter_add_(1, labels.flatten(1).long(), is_inside.flatten(1).long())
    pixels_by_class = pixels_by_label[:, :OUTSIDE]  # without the labels that are no class
    has_several_classes = (pixels_by_class > 0).sum(1) > 1
    largest_class = pixels_by_class.amax(1)
    labelled = pixels_by_class.sum(1)
    # largest_class / labelled < 3 / 4, in whole numbers so that all devices agree.
    is_share_small = _LARGEST_CLASS_SHARE.denominator * largest_class < _LARGEST_CLASS_SHARE.numerator * labelled
    return has_several_classes & is_share_small


@overload
def sliding(evaluate: Callable[[Tensor], Tensor], images: Tensor, size: int) -> Tensor: ...
@overload
def sliding(evaluate: Callable[[Tensor], Tensor | None], images: Tensor, size: int) -> Tensor | None: ...
def sliding(evaluate: Callable[[Tensor], Tensor | None], images: Tensor, size: int) -> Tensor | None:
    """Evaluates whole images by windows of `size` x `size` pixels, all in one forward.

    Windows begin two thirds of their side apart; the last ones end with the image. Where windows overlap, the mean of
    their logits is returned. A side shorter than a window is padded with 0.

    Args:
        evaluate: windows [m, 3, size, size] -> logits [m, classes, h, w], or None.
        images: [n, 3, H, W].
        size: side of a window, in pixels.

    Returns:
        Logits [n, classes, H, W]; None where `evaluate` gives none.
    """
    height, width = images.shape[2:]
    right = max(0, size - width)
    bottom = max(0, size - height)
    padded = pad(images, (0, right, 0, bottom))
    corners = itertools.product(_window_starts(padded.shape[2], size), _window_starts(padded.shape[3], size))
    windows = [_Window(slice(row, row + size), slice(column, column + size)) for row, column in corners]
    logits = evaluate(torch.cat([padded[:, :, window.rows, window.columns] for window in windows]))
    if logits is None:
        return None
    if logits.shape[2:] != (size, size):
        logits = interpolate(logits, size=(size, size), mode="bilinear", align_corners=False)
    summed_logits = logits.new_zeros(len(images), logits.shape[1], *padded.shape[2:])
    windows_by_pixel = logits.new_zeros(padded.shape[2:])
    for window, window_logits in zip(windows, logits.split(len(images)), strict=True):
        summed_logits[:, :, window.rows, window.columns] += window_logits
        windows_by_pixel[window.rows, window.columns] += 1
    mean_logits = summed_logits / windows_by_pixel
    return mean_logits[:, :, :height, :width]


class _Window(NamedTuple):
    """The rows and columns of an image that one window covers."""

    rows: slice
    columns: slice


def _window_starts(length: int, size: int) -> list[int]:
    """Returns the first pixels of the windows along a side of `length` pixels, `size` at least.

    Example: windows of 512 pixels on a side of 1000 begin at 0, 341 and 488.
    """
    stride = max(1, size * 2 // 3)
    last_start = length - size
    return [*range(0, last_start, stride), last_start]


def _stored_sizes(masks: Tensor) -> Tensor:
    """Returns height and width [n, 2] of stored scenes, whose masks [n, H, W] are `OUTSIDE` below and to the right."""
    heights = (masks[:, :, 0] != OUTSIDE).sum(1)
    widths = (masks[:, 0, :] != OUTSIDE).sum(1)
    return torch.stack([heights, widths], dim=1)


def _scaled_sizes(stored: Tensor, image_size: int, scale: Tensor) -> Tensor:
    """Returns height and width [n, 2] at which pictures fit into (4 x `image_size`, `image_size`) times `scale` [n]."""
    sides = stored.double()
    longest_shorter_side = (scale * image_size).floor().clamp(min=1)
    longest_longer_side = (scale * (LONG_SIDE * image_size)).floor().clamp(min=1)
    factor = torch.minimum(longest_shorter_side / sides.amin(1), longest_longer_side / sides.amax(1))
    return (sides * factor[:, None] + 0.5).floor().clamp(min=1).long()


def _axis_neighbours(
    stored: Tensor, scaled: Tensor, positions: Tensor, is_inside: Tensor | None = None
) -> _AxisNeighbours:
    """Returns between which stored pixels the pixels of scaled pictures lie, along one side.

    Both pictures show the same, so that pixel p of the scaled one has its middle (p + 1/2) stored / scaled pixels
    behind the edge of the stored one, and stored pixel q has its own at q + 1/2. Lengths are counted in ticks of
    1 / (2 scaled) of a stored pixel: all of them are whole numbers then, and all devices agree.

    Example: of 4 stored and 8 scaled pixels a stored pixel has 16 ticks. Scaled pixel 3 has its middle at 28 ticks, 4
    after the middle of stored pixel 1 (at 24) and 12 before that of stored pixel 2 (at 40). So it lies between 1 and 2,
    with a share of 4 / 16 of pixel 2; pixel 1 is the nearest.

    Args:
        stored: length of the stored pictures, [n].
        scaled: length of the scaled ones, [n].
        positions: pixels of the scaled ones, [n, side].
        is_inside: which of these the picture covers, bool [n, side]; None: all.
    """
    ticks_per_pixel = 2 * scaled[:, None]  # [n, 1]
    ticks_to_first_middle = scaled[:, None]  # half of stored pixel 0, [n, 1]
    middle_ticks = (2 * positions + 1) * stored[:, None]  # [n, side]
    ticks_from_first_middle = middle_ticks - ticks_to_first_middle
    lower = ticks_from_first_middle // ticks_per_pixel  # -1 before the middle of stored pixel 0
    ticks_from_lower_middle = ticks_from_first_middle - lower * ticks_per_pixel
    last_pixel = stored[:, None] - 1
    return _AxisNeighbours(
        lower=lower.clamp(min=0).minimum(last_pixel),
        upper=(lower + 1).clamp(min=0).minimum(last_pixel),
        upper_share=ticks_from_lower_middle.float() / ticks_per_pixel.float(),
        nearest=(middle_ticks // ticks_per_pixel).clamp(min=0).minimum(last_pixel),
        is_inside=torch.ones_like(positions, dtype=torch.bool) if is_inside is None else is_inside,
    )


def _pixels_at(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Returns pixels `[n, height, width, ...]` of images `[n, H, W, ...]`, at rows [n, height], columns [n, width]."""
    image_numbers = torch.arange(len(images), device=images.device)
    return images[image_numbers[:, None, None], rows[:, :, None], columns[:, None, :]]


def _random_draws(ids: Tensor, random_stream: int, count: int) -> Tensor:
    """Draws numbers from 0 to 2^31 - 1, `count` for each id, of a stream: int64 [n, count]."""
    positions = ids[:, None] * count + torch.arange(count, device=ids.device)  # in the stream, [n, count]
    return uniform_integers(positions, random_stream, _DRAW_LIMIT)


def _distorted(pixels: Tensor, draws: Tensor) -> Tensor:
    """Changes brightness, contrast, saturation and hue, each in half of the crops.

    Contrast comes second or last, equally often. Nothing is rounded to bytes in between.

    Args:
        pixels: crops [n, 3, h, w], in 0 to 255.
        draws: numbers [n, 9] from `_random_draws`. Columns 0 and 1 decide whether brightness changes and how much; 2
            and 3 are for contrast, 4 and 5 for saturation, 6 and 7 for hue. Column 8 decides whether contrast is last.
    """
    is_chosen = draws[:, 0::2] < _DRAW_LIMIT // 2  # columns 0, 2, 4, 6, 8: [n, 5]
    strength = draws[:, 1::2].float() / _DRAW_LIMIT  # columns 1, 3, 5, 7, in [0, 1): [n, 4]
    brightness = _distortion(is_chosen[:, 0], strength[:, 0], _BRIGHTNESS)
    contrast = _distortion(is_chosen[:, 1], strength[:, 1], _CONTRAST)
    saturation = _distortion(is_chosen[:, 2], strength[:, 2], _SATURATION)
    hue = _distortion(is_chosen[:, 3], strength[:, 3], _HUE)
    contrast_is_last = is_chosen[:, 4, None, None, None]
    # One name for all stages, so that the memory of each is free after the next.
    pixels = (pixels + brightness).clamp(0, 255)
    pixels = torch.where(contrast_is_last, pixels, (pixels * contrast).clamp(0, 255))
    pixels = _hue_turned(_saturated(pixels, saturation), hue)
    return torch.where(contrast_is_last, (pixels * contrast).clamp(0, 255), pixels)


def _distortion(is_changed: Tensor, strength: Tensor, bounds: _Range) -> Tensor:
    """Returns the summand or factor by which each crop is changed, [n, 1, 1, 1].

    Args:
        is_changed: whether it is changed at all, bool [n].
        strength: random numbers in [0, 1), float32 [n].
        bounds: the summands or factors that 0 and 1 stand for, and the one that changes nothing.
    """
    changing = bounds.least + (bounds.most - bounds.least) * strength
    return torch.where(is_changed, changing, bounds.neutral)[:, None, None, None]


def _saturated(pixels: Tensor, factor: Tensor) -> Tensor:
    """Multiplies HSV's saturation, (max - min) / max, by a factor, to at most 1; value and hue stay."""
    value = pixels.amax(1, keepdim=True)
    chroma = value - pixels.amin(1, keepdim=True)
    factor = torch.minimum(factor, value / chroma.clamp(min=1e-6))
    return value - (value - pixels) * factor


def _hue_turned(pixels: Tensor, degrees: Tensor) -> Tensor:
    """Turns HSV's hue; value and saturation stay (Smith, "Color Gamut Transform Pairs", SIGGRAPH 1978).

    Back from hue h (in sixths), value V and chroma C each channel is V - C max(0, min(k, 4 - k, 1)), where k is
    (5 + h) mod 6 for red, (3 + h) mod 6 for green and (1 + h) mod 6 for blue.
    """
    red, green, blue = pixels.split(1, 1)
    value = pixels.amax(1, keepdim=True)
    chroma = value - pixels.amin(1, keepdim=True)
    divisor = torch.where(chroma > 0, chroma, torch.ones_like(chroma))  # grey has no hue: any divisor does
    # Hue in sixths of the circle, from red over green to blue.
    hue = torch.where(
        value == red,
        (green - blue) / divisor,
        torch.where(value == green, (blue - red) / divisor + 2, (red - green) / divisor + 4),
    )
    hue = hue + degrees / 60
    k_by_channel = torch.cat([torch.remainder(hue + start, 6.0) for start in (5.0, 3.0, 1.0)], dim=1)
    return value - chroma * torch.minimum(k_by_channel, 4 - k_by_channel).clamp(0, 1)
