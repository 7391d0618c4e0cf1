"""The dtype in which autocast multiplies on a device; on meta tensors, that of the device for which a trace counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_dtype_on_meta: ContextVar[torch.dtype | None] = ContextVar("dtype_on_meta", default=None)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype in which autocast multiplies on a device ("cuda", "cpu", "meta"); None where it is off."""
    if device_type == "meta":
        return _dtype_on_meta.get()
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


@contextmanager
def on_meta(dtype: torch.dtype) -> Iterator[None]:
    """The context in which autocast is emulated on meta tensors: `autocast_dtype("meta")` is `dtype`."""
    token = _dtype_on_meta.set(dtype)
    try:
        yield
    finally:
        _dtype_on_meta.reset(token)
