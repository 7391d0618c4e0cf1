"""Random-looking numbers computed from a position instead of drawn in order.

Any sample can be made alone, in any process, and comes out the same with every version of numpy (whose
`Generator` methods may change their streams between releases).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def mix64(positions: Words, stream: int) -> Words:
    """Pseudo-random 64-bit words, one per position, same shape; each `stream` is an independent sequence.

    The output function of SplitMix64 (Steele, Lea & Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014) applied to `(positions + 1) * gamma` offset by the finalised stream number.
    """
    offset = _finalise(np.array([stream], dtype=np.uint64) * _GAMMA + np.uint64(1))
    return _finalise((positions + np.uint64(1)) * _GAMMA + offset)


def _finalise(z: Words) -> Words:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
