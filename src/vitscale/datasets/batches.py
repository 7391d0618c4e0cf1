"""Orders the images of an epoch, and reads one rank's batches of it, ahead by threads or not at all.

The global batches are the same for any number of ranks.

The random words of their order are those of `sources.base.mix64` on a device: the same, bit for bit, on every device.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from enum import IntEnum
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitscale.sources.base import Meter, Spent, Split, mix64
from vitscale.trial.trial import samples_used, steps_per_epoch

# The constants of SplitMix64, see `sources.base.mix64`.
_GAMMA = 0x9E3779B97F4A7C15
_FIRST_FACTOR = 0xBF58476D1CE4E5B9
_SECOND_FACTOR = 0x94D049BB133111EB


def device_mix64(positions: Tensor, stream: int) -> Tensor:
    """Returns pseudo-random 64-bit words (as int64), one per position (int64, any shape), on the positions' device.

    torch multiplies and adds int64 modulo 2^64, as unsigned integers do; only its shift to the right fills with the
    sign, which `_logical_shift` masks away. Copies nothing between host and device.
    """
    offset = _finalise_int((stream * _GAMMA + 1) % 2**64)
    z = positions * _signed(_GAMMA) + _signed((_GAMMA + offset) % 2**64)
    z = (z ^ _logical_shift(z, 30)) * _signed(_FIRST_FACTOR)
    z = (z ^ _logical_shift(z, 27)) * _signed(_SECOND_FACTOR)
    return z ^ _logical_shift(z, 31)


def uniform_integers(positions: Tensor, stream: int, count: int) -> Tensor:
    """Draws integers in `0 <= n < count` (int64), one per position.

    Args:
        positions: int64, any shape.
        stream: number of the sequence.
        count: at most 2^32; the bias is below count / 2^31.
    """
    words_31_bits = _logical_shift(device_mix64(positions, stream), 33)
    return (words_31_bits * count) >> 31  # below 2^63, so that int64 holds the product


def _finalise_int(z: int) -> int:
    """Mixes the bits of one Python integer below 2^64, as SplitMix64 does at its end (`sources.base._finalise`)."""
    z = (z ^ (z >> 30)) * _FIRST_FACTOR % 2**64
    z = (z ^ (z >> 27)) * _SECOND_FACTOR % 2**64
    return z ^ (z >> 31)


def _signed(word: int) -> int:
    """Returns the int64 that has the bits of an unsigned 64-bit word."""
    return word - 2**64 if word >= 2**63 else word


def _logical_shift(z: Tensor, bits: int) -> Tensor:
    """Shifts int64 to the right, and fills with zeros."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


class Purpose(IntEnum):
    """What a stream of random words decides. At most 8 purposes; see `stream`."""

    SUBSET = 0
    ORDER = 1
    SHIFT_ROWS = 2
    SHIFT_COLUMNS = 3
    MIRROR = 4
    VIEW = 5
    COLOUR = 6


def stream(purpose: Purpose, seed: int, epoch: int = 0) -> int:
    """Returns the `stream` of `mix64` for one purpose, seed (below 2^31) and epoch (below 2^28): below 2^64.

    From the highest bit down: 1 (the sources number their own streams from 0), seed, epoch, purpose. If two purposes
    shared a stream the images that come first in an epoch would all be shifted alike.

    Raises:
        ValueError: the seed or the epoch is out of its range.
    """
    if not (0 <= seed < 2**31 and 0 <= epoch < 2**28):
        raise ValueError(f"no stream for seed {seed}, epoch {epoch}")
    return 1 << 63 | seed << 31 | epoch << 3 | purpose


Ids = NDArray[np.int64]


class Slot(NamedTuple):
    """One rank's share of one micro-step."""

    ids: Ids
    """Ids of its images [n]; n is at most the rank's micro-batch.

    n is the same in all micro-steps of a step, and on all ranks that have the same micro-batch.
    """
    real: int
    """Number of images that count in this slot, the first ones; may be 0. The others are padding."""
    step_real: int
    """Images that count in the whole optimizer step, over all ranks and micro-steps."""


class EpochOrder:
    """The order of one epoch's images.

    - With `fraction` < 1 only `trial.samples_used` images are used. `seed` alone chooses them, so they are the same for
      any world size and in each epoch. The choice for a smaller fraction lies within that for a larger one.
    - An epoch is a permutation of these images, by `seed` and `epoch`. Each optimizer step takes the next G of them,
      where G = sum(micro_batches) * grad_accum. With the same G a step sees the same images on any number of ranks,
      however they share them.
    - A step is divided into slots, one for each micro-step and rank: first those of micro-step 0 in the order of ranks,
      then those of micro-step 1. The slot of rank r takes the next micro_batches[r] images.
    - The last step may have only R < G images. All its slots then shrink: that of rank r has
      ceil(micro_batches[r] * R / G) entries. So no rank takes longer than in a full step. Entries that are left over,
      fewer than there are slots, are padding: they repeat images of the step with weight 0 (see `slot_loss`). With
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
        """Draws the order.

        Args:
            samples: number of images of the split.
            seed: 0 <= seed < 2^31.
            epoch: number of the epoch, from 0.
            micro_batches: images per micro-step of each rank, 1 at least.
            grad_accum: micro-steps of a step.
            drop_last: whether a last step of fewer images is left out.
            fraction: share of the images that is used.
        """
        self.micro_batches = tuple(micro_batches)
        self.world_size = len(micro_batches)
        self.grad_accum = grad_accum
        used_samples = samples_used(samples, fraction)
        self.steps = steps_per_epoch(used_samples, 1, sum(micro_batches), grad_accum, drop_last)
        used_ids = np.arange(samples, dtype=np.int64)
        if used_samples < samples:
            used_ids = np.sort(_shuffled(used_ids, stream(Purpose.SUBSET, seed))[:used_samples])
        self._ids = _shuffled(used_ids, stream(Purpose.ORDER, seed, epoch))
        """Ids of the used images, in the order of the epoch."""

    def slot(self, step: int, micro_step: int, rank: int) -> Slot:
        """Returns the images that `rank` takes in `micro_step` of optimizer `step`, each counted from 0.

        Raises:
            IndexError: the epoch has no such step, micro-step or rank.
        """
        if not (0 <= step < self.steps and 0 <= micro_step < self.grad_accum and 0 <= rank < self.world_size):
            raise IndexError(f"no slot for step {step}, micro-step {micro_step}, rank {rank}")
        global_batch = sum(self.micro_batches) * self.grad_accum
        step_ids = self._ids[step * global_batch : (step + 1) * global_batch]
        step_real = len(step_ids)  # less than global_batch in a last step that is not full
        # Entries of each rank's slot: micro-batches [8, 4] stay [8, 4] in a full step, and are [4, 2] in a half one.
        slot_entries = [-(-size * step_real // global_batch) for size in self.micro_batches]  # rounded up
        entries_before = micro_step * sum(slot_entries) + sum(slot_entries[:rank])
        entries = np.arange(entries_before, entries_before + slot_entries[rank])  # numbers within the step
        is_real = entries < step_real  # the entries behind the step's images are padding, and repeat its first ones
        return Slot(ids=step_ids[entries % step_real], real=int(is_real.sum()), step_real=step_real)


def _shuffled(ids: Ids, random_stream: int) -> Ids:
    """Returns the ids in the order of their random words, which depend on the stream and on each id alone."""
    random_words = mix64(ids.astype(np.uint64), random_stream)
    return ids[np.argsort(random_words, kind="stable")]


_BATCHES_AHEAD_PER_WORKER = 2
"""Batches per thread that are being read or wait to be taken: one of each."""


class Batch(NamedTuple):
    """One slot's images on the host, pinned if asked for; `Slot` explains weights and counts."""

    images: Tensor
    """uint8, uint16 or float32 [n, H, W, C]."""
    labels: Tensor
    """int64 [n], or masks uint8 [n, H, W]."""
    ids: Tensor
    """int64 [n]."""
    real: int
    step_real: int


class Batches(Iterator[Batch]):
    """Iterates over an epoch: all micro-steps of step 0, then of step 1, and so on.

    With `workers` = 0 each batch is read when it is asked for, in the calling thread. With more, that many threads
    read ahead (numpy's copying and torch's pinning leave Python free), at most two batches each; order is kept. What
    a thread raises is raised by `next` at that batch, with the thread's traceback. Use it in a `with` statement:
    `close` ends the threads, and nothing is left to read after it.
    """

    def __init__(self, split: Split, order: EpochOrder, *, rank: int, workers: int = 0, pin: bool = False) -> None:
        """Reads nothing yet.

        Args:
            split: the images.
            order: their order in the epoch.
            rank: number of the rank whose batches these are.
            workers: number of threads that read ahead; 0: none.
            pin: whether batches lie in page-locked memory, for copies to a CUDA device that do not block.
        """
        self._split = split
        self._order = order
        self._rank = rank
        self._pin = pin
        self._micro_steps = itertools.product(range(order.steps), range(order.grad_accum))
        """Step and micro-step of the batches that nobody has begun to read."""
        self._ahead: deque[Future[Batch]] = deque()
        """Batches that are being read, or wait to be taken, in order."""
        self._workers = workers
        self._read_images: list[int] = []
        """Number of images of each batch that has been read; threads add to it."""
        self._read_seconds: list[float] = []
        """Seconds that each of these took."""
        self._meter = Meter()
        self.spent: Spent | None = None
        """Seconds spent on reading and decoding, known after `close`; None where they are unknown."""
        self._most_ahead = workers * _BATCHES_AHEAD_PER_WORKER
        self._may_begin = threading.Event()
        """Set while threads may begin another batch: not between `hold` and `go_on`."""
        self._may_begin.set()
        self._pool = ThreadPoolExecutor(workers, "vitscale-batches") if workers else None

    def __enter__(self) -> Self:
        self._read_ahead()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __next__(self) -> Batch:
        if self._pool is None:
            return self._read(*next(self._micro_steps))
        self._read_ahead()
        if not self._ahead:
            raise StopIteration
        batch = self._ahead.popleft().result()
        self._read_ahead()
        return batch

    @property
    def images_per_second(self) -> float | None:
        """Rate at which all threads together read images while they read; None before the first batch."""
        seconds = sum(self._read_seconds)
        if seconds <= 0:
            return None
        return sum(self._read_images) * max(1, self._workers) / seconds

    def hold(self) -> None:
        """Keeps threads from beginning another batch, until `go_on`.

        A pause of training must not give the loader a head start.
        """
        self._may_begin.clear()

    def go_on(self) -> None:
        """Lets threads begin batches again, after `hold`."""
        self._may_begin.set()

    def close(self) -> None:
        """Ends the threads after what they are reading; may be called again."""
        self.go_on()
        self._micro_steps = itertools.product(range(0), range(0))
        self._ahead.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self.spent = self.spent or self._meter.read()

    def _read_ahead(self) -> None:
        """Gives the threads as many batches as they may read ahead."""
        while self._pool is not None and len(self._ahead) < self._most_ahead:
            micro_step = next(self._micro_steps, None)
            if micro_step is None:
                return
            self._ahead.append(self._pool.submit(self._wait_and_read, *micro_step))

    def _wait_and_read(self, step: int, micro_step: int) -> Batch:
        """Reads a batch in a thread, once `hold` is over."""
        self._may_begin.wait()
        return self._read(step, micro_step)

    def _read(self, step: int, micro_step: int) -> Batch:
        """Reads a batch, and notes how long it took."""
        start_seconds = time.perf_counter()
        slot = self._order.slot(step, micro_step, self._rank)
        images = torch.from_numpy(self._split.take(slot.ids))
        labels = torch.from_numpy(self._split.labels[slot.ids])
        ids = torch.from_numpy(slot.ids)
        if self._pin:
            images = images.pin_memory()
            labels = labels.pin_memory()
            ids = ids.pin_memory()
        self._read_images.append(len(slot.ids))
        self._read_seconds.append(time.perf_counter() - start_seconds)
        return Batch(images, labels, ids, slot.real, slot.step_real)
