"""The random streams of a training run, numbered so that no two ever share their numbers."""

from __future__ import annotations

from enum import IntEnum


class Purpose(IntEnum):
    """What a stream decides. At most 8 of them; see `stream`."""

    SUBSET = 0
    ORDER = 1
    SHIFT_ROWS = 2
    SHIFT_COLUMNS = 3
    MIRROR = 4
    VIEW = 5
    COLOUR = 6


def stream(purpose: Purpose, seed: int, epoch: int = 0) -> int:
    """The `stream` of `mix64` for one purpose, seed (below 2^31) and epoch (below 2^28), as an unsigned 64-bit word.

    From the highest bit down: 1 (the sources number their own streams from 0), seed, epoch, purpose. If two purposes
    shared a stream the images that come first in an epoch would all be shifted alike.
    """
    if not (0 <= seed < 2**31 and 0 <= epoch < 2**28):
        raise ValueError(f"no stream for seed {seed}, epoch {epoch}")
    return 1 << 63 | seed << 31 | epoch << 3 | purpose
