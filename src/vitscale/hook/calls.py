"""Times functions of torch that are called as they are: backward, and the saving of checkpoints."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .marks import BACKWARD, CHECKPOINT

if TYPE_CHECKING:
    from .hooking import Hook


def time_backward(autograd: ModuleType, hook: Hook) -> None:
    """Time `torch.autograd.backward`, which `Tensor.backward` calls by this name."""
    _time_function(autograd, "backward", BACKWARD, hook)


def time_checkpoints(serialization: ModuleType, hook: Hook) -> None:
    """Time `torch.save`, which torch takes from this module once that is loaded."""
    _time_function(serialization, "save", CHECKPOINT, hook)


def _time_function(module: ModuleType, name: str, kind: str, hook: Hook) -> None:
    function = getattr(module, name)

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        opening = hook.enter(kind)
        if opening is None:
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        finally:
            hook.leave(opening)

    setattr(module, name, timed)
