"""What a script hands to its Probe: names of phases, and batches whose images are counted. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

ScriptPhase = Literal["data", "h2d", "forward", "backward", "optimizer"]
SCRIPT_PHASES: tuple[str, ...] = get_args(ScriptPhase)


def images_in(batch: Any, images: int | Callable[[Any], int] | None, accumulate: int) -> int:
    """Returns the number of images in one of the batches of a step.

    Args:
        batch: the batch.
        images: number of images in the whole step, which its batches share evenly, or a function that returns the
            number in a batch. None: they are counted in the batch.
        accumulate: number of batches in a step.

    Raises:
        ValueError: they are to be counted, and the batch holds no tensor.
    """
    if callable(images):
        return images(batch)
    return images_of(batch) if images is None else images // accumulate


def images_of(batch: Any) -> int:
    """Returns the length of the first tensor in a batch.

    Raises:
        ValueError: there is none.
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
