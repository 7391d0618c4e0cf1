"""The dtype in which autocast multiplies on a device; on meta tensors, that of the device for which a trace counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_device_of_meta: ContextVar[str | None] = ContextVar("device_of_meta", default=None)
"""The device that meta tensors stand for; None: they stand for none."""


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype in which autocast multiplies on a device ("cuda", "cpu", "meta"); None where it is off."""
    device = _device_of_meta.get() if device_type == "meta" else device_type
    if device is None or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


@contextmanager
def meta_as(device: str) -> Iterator[None]:
    """The context in which `autocast_dtype("meta")` is that of `device`, whose autocast is emulated on meta tensors."""
    token = _device_of_meta.set(device)
    try:
        yield
    finally:
        _device_of_meta.reset(token)
