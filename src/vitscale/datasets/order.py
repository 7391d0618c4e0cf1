"""Which images each rank gets in each micro-step of an epoch: the same global batches for any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitscale.datasets.hashing import Purpose, stream
from vitscale.sources.split import mix64
from vitscale.trial.trial import samples_used, steps_per_epoch

Ids = NDArray[np.int64]
Weights = NDArray[np.float32]


class Slot(NamedTuple):
    """One rank's share of one micro-step."""

    ids: Ids
    """[n], n <= the rank's micro-batch; alike in all micro-steps of a step, and on ranks of equal micro-batches."""
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
      G = sum(micro_batches) * grad_accum: with the same G a step sees the same images on any number of ranks, in
      whatever shares.
    - Within a step the slots follow one another, those of a micro-step by rank; that of rank r takes the next
      micro_batches[r] images.
    - The last step may have only R < G images. Its slots shrink alike: that of rank r then has
      ceil(micro_batches[r] * R / G) entries. So no rank is done later than it would be in a full step, and fewer
      entries than slots are padding. Padding repeats images of the step with weight 0; see `slot_loss`. With
      `drop_last` that step is left out, so `steps` may be 0.

    The order is computed from positions (`mix64`), so it does not change with numpy's version.
    """

    def __init__(
        self,
        samples: int,
        *,
        seed: int,
        epoch: int,
        micro_batches: Sequence[int],
        grad_accum: int,
        drop_last: bool = False,
        fraction: float = 1.0,
    ) -> None:
        """`samples` is the size of the whole split; 0 <= `seed` < 2^31; all sizes are at least 1.

        `micro_batches` are the images per micro-step of each rank.
        """
        self.micro_batches, self.world_size, self.grad_accum = tuple(micro_batches), len(micro_batches), grad_accum
        used = samples_used(samples, fraction)
        self.steps = steps_per_epoch(used, 1, sum(micro_batches), grad_accum, drop_last)
        subset = np.arange(samples, dtype=np.int64)
        if used < samples:
            subset = np.sort(_shuffled(subset, stream(Purpose.SUBSET, seed))[:used])
        self._ids = _shuffled(subset, stream(Purpose.ORDER, seed, epoch))

    def slot(self, step: int, micro_step: int, rank: int) -> Slot:
        """The share of `rank` in `micro_step` of optimizer `step`, each counted from 0."""
        if not (0 <= step < self.steps and 0 <= micro_step < self.grad_accum and 0 <= rank < self.world_size):
            raise IndexError(f"no slot for step {step}, micro-step {micro_step}, rank {rank}")
        global_batch = sum(self.micro_batches) * self.grad_accum
        batch = self._ids[step * global_batch : (step + 1) * global_batch]
        entries = [-(-size * len(batch) // global_batch) for size in self.micro_batches]
        first = micro_step * sum(entries) + sum(entries[:rank])
        places = np.arange(first, first + entries[rank])
        real = places < len(batch)
        return Slot(batch[places % len(batch)], real.astype(np.float32), int(real.sum()), len(batch))


def _shuffled(ids: Ids, number: int) -> Ids:
    return ids[np.argsort(mix64(ids.astype(np.uint64), number), kind="stable")]
