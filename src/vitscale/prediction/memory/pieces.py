"""A model taken apart, as the forecast of memory goes through it."""

from __future__ import annotations

from typing import NamedTuple

from vitscale.engines.parts import Part


class Pieces(NamedTuple):
    """A model's parts, and the bytes beside them."""

    parts: tuple[Part, ...]
    images: int
    """Images and labels, held from before forward until after backward."""
    logits: int
    """What the loop holds from the model's output until backward is over."""
    buffers: int
    """Buffers, which stay and are no parameters: Swin's distances in a block's windows, and which two tokens have which
    distance."""
