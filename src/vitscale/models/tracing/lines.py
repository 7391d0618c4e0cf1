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

    Each line of the result is the highest from where it overtakes the one before it to where the next one overtakes it.

    Example: of 100 + n, 60 + 5n and 50 + 10n the second one is left out. It overtakes the first at 10 images, where the
    third has overtaken it already, at 2.
    """
    flattest_first = sorted(set(lines), key=lambda amount: (amount.per_image, amount.fixed))
    envelope: list[PerImage] = []
    for steeper in flattest_first:
        while envelope and _is_never_highest(envelope, steeper):
            envelope.pop()
        envelope.append(steeper)
    return tuple(envelope)


def _is_never_highest(envelope: list[PerImage], steeper: PerImage) -> bool:
    """Whether the last line of an envelope is nowhere the highest, once a line that is steeper is added behind it."""
    last = envelope[-1]
    if steeper.of(1) >= last.of(1):
        return True  # the steeper one is as high from the first image on
    if len(envelope) == 1:
        return False
    begin = _overtaking_images(envelope[-2], last)
    end = _overtaking_images(last, steeper)
    return end <= begin


def _overtaking_images(flatter: PerImage, steeper: PerImage) -> int:
    """Return the smallest number of images at which `steeper` is at least as high as `flatter`."""
    lead = flatter.fixed - steeper.fixed
    gain_per_image = steeper.per_image - flatter.per_image
    return -(-lead // gain_per_image)  # rounded up
