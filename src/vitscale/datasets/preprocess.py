"""Makes a model's inputs from stored images of one size, on the device, for every dataset.

Images travel as uint8 at their stored size (an image of CIFAR is 3 kB, at 224 pixels in fp32 it is 602 kB).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from vitscale.datasets.batches import Purpose, stream, uniform_integers
from vitscale.sources import ChannelStatistics
from vitscale.sources.base import IGNORED

IMAGENET = ChannelStatistics((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
STATISTICS: dict[str, ChannelStatistics] = {
    "cifar10": ChannelStatistics((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ChannelStatistics((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "digits": ChannelStatistics((0.3053, 0.3053, 0.3053), (0.3760, 0.3760, 0.3760)),
}
"""Statistics of training images scaled to 0..1, published or computed. Other 8-bit colour datasets take ImageNet's."""

# A mirrored digit is another sign, so digits are not flipped.
_DATASETS_NOT_MIRRORED = frozenset({"digits"})


class Normalisation:
    """`(x / full scale - mean) / std` of each channel of float images [n, C, H, W]."""

    def __init__(self, statistics: ChannelStatistics, full_scale: float) -> None:
        """`full_scale`: stored value that stands for 1 in the units of `statistics`."""
        self._statistics = statistics
        self._full_scale = full_scale
        self._scale_and_offset: dict[torch.device, tuple[Tensor, Tensor]] = {}
        """Scale and offset by device, copied there once."""

    def __call__(self, pixels: Tensor) -> Tensor:
        """Normalises float images; the shape stays."""
        if pixels.device not in self._scale_and_offset:
            mean = torch.tensor(self._statistics.mean, dtype=torch.float64).view(1, -1, 1, 1)
            std = torch.tensor(self._statistics.std, dtype=torch.float64).view(1, -1, 1, 1)
            self._scale_and_offset[pixels.device] = (
                (1 / (self._full_scale * std)).to(pixels.device, torch.float32),
                (-mean / std).to(pixels.device, torch.float32),
            )
        scale, offset = self._scale_and_offset[pixels.device]
        return pixels * scale + offset


class Preprocess:
    """Augments, scales and normalises a batch on its device.

    What happens to an image depends only on the seed, the epoch and the image's id, not on its batch, rank or device.
    """

    def __init__(
        self,
        dataset: str,
        image_size: int,
        *,
        augment: bool,
        seed: int,
        statistics: ChannelStatistics | None = None,
    ) -> None:
        """Prepares nothing on a device yet.

        Args:
            dataset: name of the dataset, as in [data].
            image_size: side of the model's images in pixels.
            augment: whether to augment in training.
            seed: seed of the augmentation.
            statistics: mean and deviation of the stored values (`Dataset.statistics`); None: the published ones of the
                dataset.
        """
        self.size = (image_size, image_size)
        self.augment = augment
        self.seed = seed
        self.flip = dataset not in _DATASETS_NOT_MIRRORED
        if statistics is None:
            self._normalise = Normalisation(STATISTICS.get(dataset, IMAGENET), full_scale=255.0)
        else:
            self._normalise = Normalisation(statistics, full_scale=1.0)

    def prepare(
        self, images: Tensor, labels: Tensor, ids: Tensor, *, epoch: int, training: bool
    ) -> tuple[Callable[[], Tensor], Tensor]:
        """Returns a function that makes the images ready for the model, and the labels.

        The arguments are those of `__call__`, and labels: int64 `[n]`, which are returned as they are, or masks uint8
        `[n, H, W]`, which are shifted, mirrored and scaled like their images.
        """
        if labels.ndim > 1:
            labels = self.masks(labels, ids, epoch=epoch, training=training)
        return partial(self, images, ids, epoch=epoch, training=training), labels

    def __call__(self, images: Tensor, ids: Tensor, *, epoch: int, training: bool) -> Tensor:
        """Makes images ready for the model: float32 `[n, C, image_size, image_size]`.

        Args:
            images: uint8, uint16 or float32 `[n, H, W, C]`.
            ids: number of each image in its split, int64 `[n]`, on the same device.
            epoch: number of the epoch, from 0; each draws other random numbers.
            training: whether to augment, if this object augments at all.
        """
        if images.dtype == torch.uint16:  # few kernels take uint16
            images = images.float()
        if training and self.augment:
            images = self._shift_and_mirror(images, ids, epoch, outside=0)
        # Normalised before it is resized: both are linear, so the result is the same, and stored images are mostly
        # smaller. One name for both, so that the memory of the first is free again.
        pixels = self._normalise(images.permute(0, 3, 1, 2).float())  # [n, C, H, W]
        if pixels.shape[2:] != self.size:
            pixels = interpolate(pixels, size=self.size, mode="bilinear", antialias=True, align_corners=False)
        return pixels.contiguous()

    def masks(self, masks: Tensor, ids: Tensor, *, epoch: int, training: bool) -> Tensor:
        """Shifts, mirrors and scales masks like their images, to uint8 `[n, image_size, image_size]`.

        In evaluation masks stay as they are: a model's answers are compared with them at the masks' own size.

        Args:
            masks: uint8 `[n, H, W]`.
            ids: the same as for the images.
            epoch: the same as for the images.
            training: the same as for the images.
        """
        if not training:
            return masks
        if self.augment:
            masks = self._shift_and_mirror(masks, ids, epoch, outside=IGNORED)
        if masks.shape[1:] != self.size:
            masks = interpolate(masks[:, None], size=self.size, mode="nearest-exact")[:, 0]
        return masks

    def _shift_and_mirror(self, images: Tensor, ids: Tensor, epoch: int, *, outside: int) -> Tensor:
        """Shifts each image by up to 1/8 of its side along each axis, and mirrors every other one.

        As usual on CIFAR since He et al. (2016), "Deep residual learning", section 4.2: 32 pixels are shifted by up
        to 4.

        Args:
            images: `[n, H, W, C]`, or masks `[n, H, W]`.
            ids: number of each image in its split, int64 `[n]`.
            epoch: number of the epoch.
            outside: value of the pixels that come from beyond the image's edge.

        Returns:
            New images of the same shape and dtype.
        """
        height, width = images.shape[1:3]
        rows = _shifted_positions(ids, stream(Purpose.SHIFT_ROWS, self.seed, epoch), height)
        columns = _shifted_positions(ids, stream(Purpose.SHIFT_COLUMNS, self.seed, epoch), width)
        if self.flip:
            is_mirrored = uniform_integers(ids, stream(Purpose.MIRROR, self.seed, epoch), 2).bool()[:, None]
            columns = columns.mirrored(where=is_mirrored)
        # Indices that broadcast to [n, H, W].
        image = torch.arange(len(images), device=images.device)[:, None, None]
        row = rows.pixel[:, :, None]
        column = columns.pixel[:, None, :]
        is_inside = rows.is_inside[:, :, None] & columns.is_inside[:, None, :]  # [n, H, W]
        channel_axes = (1,) * (images.ndim - 3)  # (1,) for images, () for masks
        return images[image, row, column].masked_fill(~is_inside.view(*is_inside.shape, *channel_axes), outside)


class _Positions(NamedTuple):
    """For each pixel along one axis of the new images, the pixel of the old image that it shows."""

    pixel: Tensor
    """int64 `[n, side]`; where that is beyond the image's edge, the pixel at the edge."""
    is_inside: Tensor
    """bool `[n, side]`: whether it is inside of the image."""

    def mirrored(self, where: Tensor) -> _Positions:
        """Returns the positions in the opposite order for the images in which `where`, bool `[n, 1]`, is true."""
        return _Positions(
            pixel=torch.where(where, self.pixel.flip(1), self.pixel),
            is_inside=torch.where(where, self.is_inside.flip(1), self.is_inside),
        )


def _shifted_positions(ids: Tensor, stream_number: int, side: int) -> _Positions:
    """Returns the positions of images that are shifted along one axis by up to 1/8 of their side.

    Args:
        ids: number of each image in its split, int64 `[n]`.
        stream_number: stream of random numbers that the shifts are drawn from.
        side: pixels of an image along the axis.
    """
    longest_shift = side // 8
    shift = uniform_integers(ids, stream_number, 2 * longest_shift + 1) - longest_shift  # [n]
    position = torch.arange(side, device=ids.device) + shift[:, None]  # [n, side]
    return _Positions(pixel=position.clamp(0, side - 1), is_inside=(position >= 0) & (position < side))
