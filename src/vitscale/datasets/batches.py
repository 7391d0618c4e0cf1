"""One rank's batches of an epoch, in order, read ahead by threads or not at all."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Self

import torch
from torch import Tensor

from vitscale.datasets.order import EpochOrder
from vitscale.sources.base import Meter, Spent, Split

# Batches per thread that are being made or wait to be taken: one of each.
_AHEAD_PER_WORKER = 2


class Batch(NamedTuple):
    """One slot's images on the host, pinned if asked for; `Slot` explains weights and counts."""

    images: Tensor
    """uint8, uint16 or float32 [n, H, W, C]."""
    labels: Tensor
    """int64 [n], or masks uint8 [n, H, W]."""
    ids: Tensor
    """int64 [n]."""
    weights: Tensor
    """float32 [n], 0 for padding."""
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
        """`pin` puts batches in page-locked memory, for copies to a CUDA device that do not block."""
        self._split, self._order, self._rank, self._pin = split, order, rank, pin
        self._micro_steps = ((step, micro) for step in range(order.steps) for micro in range(order.grad_accum))
        self._ahead: deque[Future[Batch]] = deque()
        self._workers = workers
        self._reads: list[tuple[int, float]] = []
        self._meter = Meter()
        self.spent: Spent | None = None
        """Seconds spent on reading and decoding, known after `close`; None where they cannot be told."""
        self._limit = workers * _AHEAD_PER_WORKER
        self._going = threading.Event()
        self._going.set()
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
        """Rate of reading alone, as if no thread ever waited; None before the first batch."""
        images, seconds = (sum(column) for column in zip(*self._reads, strict=True)) if self._reads else (0, 0.0)
        return images * max(1, self._workers) / seconds if seconds > 0 else None

    def hold(self) -> None:
        """Keeps threads from beginning another batch: a pause of training must not give the loader a head start."""
        self._going.clear()

    def go_on(self) -> None:
        """Ends `hold`."""
        self._going.set()

    def close(self) -> None:
        """Ends the threads after what they are reading; may be called again."""
        self.go_on()
        self._micro_steps = ((0, 0) for _ in ())
        self._ahead.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self.spent = self.spent or self._meter.read()

    def _read_ahead(self) -> None:
        while self._pool is not None and len(self._ahead) < self._limit:
            micro_step = next(self._micro_steps, None)
            if micro_step is None:
                return
            self._ahead.append(self._pool.submit(self._read_unless_held, *micro_step))

    def _read_unless_held(self, step: int, micro_step: int) -> Batch:
        self._going.wait()
        return self._read(step, micro_step)

    def _read(self, step: int, micro_step: int) -> Batch:
        began = time.perf_counter()
        slot = self._order.slot(step, micro_step, self._rank)
        tensors = (
            torch.from_numpy(self._split.take(slot.ids)),
            torch.from_numpy(self._split.labels[slot.ids]),
            torch.from_numpy(slot.ids),
            torch.from_numpy(slot.weights),
        )
        if self._pin:
            tensors = tuple(tensor.pin_memory() for tensor in tensors)  # type: ignore[assignment]  # as many as before
        self._reads.append((len(slot.ids), time.perf_counter() - began))
        return Batch(*tensors, slot.real, slot.step_real)
