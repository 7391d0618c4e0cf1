"""Images in the arguments of a model's call."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

_MOST_DEPTH = 4


def first_tensor(arguments: Any, depth: int = 0) -> Any:
    """The first tensor in arguments, lists and dicts; None if there is none."""
    if hasattr(arguments, "shape") and hasattr(arguments, "device"):
        return arguments
    if depth == _MOST_DEPTH:
        return None
    values: Any = ()
    if isinstance(arguments, Mapping):
        values = arguments.values()
    elif isinstance(arguments, Sequence) and not isinstance(arguments, str):
        values = arguments
    for value in values:
        tensor = first_tensor(value, depth + 1)
        if tensor is not None:
            return tensor
    return None


def count_images(arguments: Sequence[Any], tensor: Any) -> int | None:
    """Images of a call: the first dimension of its first tensor, or the length of a list of pictures.

    Detection models take a list of tensors (channels, height, width) or of dicts, one for each picture.

    Args:
        arguments: of the call.
        tensor: the first one in them; None without one.
    """
    first = arguments[0] if arguments else None
    if isinstance(first, (list, tuple)) and all(_is_picture(item) for item in first):
        return len(first)
    shape: Sequence[int] = () if tensor is None else tensor.shape
    return int(shape[0]) if len(shape) else None


class LastBatch:
    """The tensor that the model was called with last: a second forward on it is no further batch."""

    def __init__(self) -> None:
        self._tensor: weakref.ref[Any] | None = None

    def is_new(self, tensor: Any) -> bool:
        """Whether the call's first tensor is another one than that of the call before; remembers it."""
        last = self._tensor() if self._tensor is not None else None
        if tensor is None:
            return True
        self._tensor = weakref.ref(tensor)
        return tensor is not last


def _is_picture(item: Any) -> bool:
    """Whether a list's item is one picture: a tensor of three dimensions, or a dict that describes one."""
    return isinstance(item, Mapping) or len(getattr(item, "shape", ())) == 3
