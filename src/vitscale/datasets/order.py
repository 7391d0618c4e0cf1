"""Which images each rank gets in each micro-step of an epoch: the same global batches for any number of ranks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitscale.datasets.streams import Purpose, stream
from vitscale.sources.mixing import mix64
from vitscale.trial import samples_used, steps_per_epoch

Ids = NDArray[np.int64]
Weights = NDArray[np.float32]


class Slot(NamedTuple):
    """One rank's share of one micro-step."""

    ids: Ids
    """[n], n <= micro_batch and alike on all ranks of a step."""
    weights: Weights
    """[n], 1 for an image that counts, 0 for padding."""
    real: int
    """Images that count in this slot; may be 0."""
    step_real: int
    """Images that count in the whole optimizer step, over all ranks and micro-steps."""


class EpochOrder:
    """The order of one epoch's images.

    - `fraction` < 1 uses a fixed choice of `trial.samples_used` images, made by `seed` alone: whatever the world size
      and the epoch, and the choice for a smaller fraction lies within that for a larger one.
    - An epoch is a permutation of these by `seed` and `epoch`. Optimizer step s takes run s of G images, where
      G = world_size * micro_batch * grad_accum: with the same G a step sees the same images on any number of ranks.
    - Within a step slot k = micro_step * world_size + rank takes run k of micro_batch images.
    - The last step may have only R < G images. All its slots then have c = ceil(R / (world_size * grad_accum)) entries:
      ranks stay in step, and no more than a slot's worth of padding is computed. Padding repeats images of the
      step with weight 0; see `slot_loss`. With `drop_last` that step is left out, so `steps` may be 0.

    The order is computed from positions (`mix64`), so it does not change with numpy's version.
    """

    def __init__(
        self,
        samples: int,
        *,
        seed: int,
        epoch: int,
        world_size: int,
        micro_batch: int,
        grad_accum: int,
        drop_last: bool = False,
        fraction: float = 1.0,
    ) -> None:
        """`samples` is the size of the whole split; 0 <= `seed` < 2^31; all sizes are at least 1."""
        self.world_size, self.micro_batch, self.grad_accum = world_size, micro_batch, grad_accum
        used = samples_used(samples, fraction)
        self.steps = steps_per_epoch(used, world_size, micro_batch, grad_accum, drop_last)
        subset = np.arange(samples, dtype=np.int64)
        if used < samples:
            subset = np.sort(_shuffled(subset, stream(Purpose.SUBSET, seed))[:used])
        self._ids = _shuffled(subset, stream(Purpose.ORDER, seed, epoch))

    def slot(self, step: int, micro_step: int, rank: int) -> Slot:
        """The share of `rank` in `micro_step` of optimizer `step`, each counted from 0."""
        slots = self.world_size * self.grad_accum
        number = micro_step * self.world_size + rank
        if not (0 <= step < self.steps and 0 <= micro_step < self.grad_accum and 0 <= rank < self.world_size):
            raise IndexError(f"no slot for step {step}, micro-step {micro_step}, rank {rank}")
        global_batch = slots * self.micro_batch
        batch = self._ids[step * global_batch : (step + 1) * global_batch]
        entries = -(-len(batch) // slots)
        places = np.arange(number * entries, (number + 1) * entries)
        real = places < len(batch)
        return Slot(batch[places % len(batch)], real.astype(np.float32), int(real.sum()), len(batch))


def _shuffled(ids: Ids, number: int) -> Ids:
    return ids[np.argsort(mix64(ids.astype(np.uint64), number), kind="stable")]
