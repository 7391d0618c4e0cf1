"""Amounts at two numbers of images as lines, and the lines that are highest for some number of images."""

from __future__ import annotations

from collections.abc import Iterable

from vitscale.models.tracing.errors import TraceError
from vitscale.trial.model_card import PerImage

FEW_IMAGES = 2
"""The smaller of the two traced batches. One image deviates: torch takes other paths for it."""
MANY_IMAGES = 4


def line(at_few: int, at_many: int) -> PerImage:
    """Return the line through an amount at `FEW_IMAGES` and at `MANY_IMAGES` images.

    Raises:
        TraceError: it grows by a fraction for each image, so that it is no line.
    """
    per_image, remainder = divmod(at_many - at_few, MANY_IMAGES - FEW_IMAGES)
    if remainder:
        raise TraceError(f"an amount is {at_few:,} at {FEW_IMAGES} images and {at_many:,} at {MANY_IMAGES}: no line")
    return PerImage(at_few - per_image * FEW_IMAGES, per_image)


def upper_envelope(lines: Iterable[PerImage]) -> tuple[PerImage, ...]:
    """Return the lines that are the highest for some whole number of images, from 1 on; the flattest first.

    Example: of 100 + n, 50 + 10n and 60 + 5n the last one is nowhere the highest.
    """
    steepest_last = sorted(set(lines), key=lambda amount: (amount.per_image, amount.fixed))
    hull: list[PerImage] = []
    for candidate in steepest_last:
        while hull and candidate.of(1) >= hull[-1].of(1):
            hull.pop()
        while len(hull) > 1 and _passes(hull[-1], candidate) <= _passes(hull[-2], hull[-1]):
            hull.pop()
        hull.append(candidate)
    return tuple(hull)


def _passes(flat: PerImage, steep: PerImage) -> int:
    """Return the first number of images at which `steep` is at least as high as `flat`."""
    lead = flat.fixed - steep.fixed
    return -(-lead // (steep.per_image - flat.per_image))
