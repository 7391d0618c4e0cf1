"""What a script hands to its Probe: names of phases, and batches whose images are counted. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

ScriptPhase = Literal["data", "h2d", "forward", "backward", "optimizer"]
SCRIPT_PHASES: tuple[str, ...] = get_args(ScriptPhase)


def images_in_batch(batch: Any, images: int | Callable[[Any], int] | None, accumulate: int) -> int:
    """Returns the number of images in one of the batches of a step.

    Args:
        batch: the batch.
        images: what `Probe.steps` got. A number is that of the whole step, which its batches share evenly. A function
            returns the number in a batch. None: the images are counted in the batch.
        accumulate: number of batches in a step.

    Raises:
        ValueError: they are to be counted, and the batch holds no tensor.
    """
    if images is None:
        return images_of(batch)
    if callable(images):
        return images(batch)
    return images // accumulate


def images_of(batch: Any) -> int:
    """Returns the number of images in a batch: the length of its first tensor, as 8 for one of [8, 3, 224, 224].

    Raises:
        ValueError: the batch holds no tensor.
    """
    shape = _first_shape(batch)
    if shape is None:
        raise ValueError("this batch holds no tensor to count its images by: give probe.steps(..., images=...)")
    return int(shape[0])


def _first_shape(batch: Any) -> Any:
    """Returns the shape of the first value that has a dimension, in lists and dicts at any depth; None without one."""
    if hasattr(batch, "shape"):
        return batch.shape or None
    values: Iterable[Any] = batch if isinstance(batch, (list, tuple)) else ()
    if hasattr(batch, "values"):
        values = batch.values()
    for value in values:
        shape = _first_shape(value)
        if shape is not None:
            return shape
    return None
