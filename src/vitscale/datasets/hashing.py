"""`sources.mixing.mix64` on a device: the same words, bit for bit, on every device and for any split into ranks."""

from __future__ import annotations

from enum import IntEnum

from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def device_mix64(positions: Tensor, stream: int) -> Tensor:
    """Pseudo-random 64-bit words (as int64), one per position (int64, any shape), on the positions' device.

    torch multiplies and adds int64 modulo 2^64, as unsigned integers do; only its shift to the right fills with the
    sign, which `_logical_shift` masks away. Copies nothing between host and device.
    """
    offset = _finalise_int((stream * _GAMMA + 1) % 2**64)
    z = positions * _signed(_GAMMA) + _signed((_GAMMA + offset) % 2**64)
    z = (z ^ _logical_shift(z, 30)) * _signed(_FIRST)
    z = (z ^ _logical_shift(z, 27)) * _signed(_SECOND)
    return z ^ _logical_shift(z, 31)


def uniform_integers(positions: Tensor, stream: int, count: int) -> Tensor:
    """Integers in `0 <= n < count` (int64), one per position; `count` at most 2^32, bias below count / 2^31."""
    return (_logical_shift(device_mix64(positions, stream), 33) * count) >> 31


def _finalise_int(z: int) -> int:
    z = (z ^ (z >> 30)) * _FIRST % 2**64
    z = (z ^ (z >> 27)) * _SECOND % 2**64
    return z ^ (z >> 31)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _logical_shift(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


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
