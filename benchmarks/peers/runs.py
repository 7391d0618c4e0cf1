"""What a peer may see of measured runs, and where it is asked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Places:
    """Rank counts, with the work that an epoch has there. One entry per run."""

    gpus: Array
    images: Array
    """Of an epoch, all ranks together."""
    steps: Array
    """Of an epoch, rounded."""

    def take(self, chosen: Array | slice) -> Places:
        """Those of an index array, a mask or a slice."""
        return Places(self.gpus[chosen], self.images[chosen], self.steps[chosen])


def places(gpus: object, images: object, steps: object) -> Places:
    """From any sequences of numbers."""
    return Places(*(np.asarray(each, dtype=float) for each in (gpus, images, steps)))
