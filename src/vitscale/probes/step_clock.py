"""The clock of light steps: nothing but a timestamp at the end of each optimizer step.

On a GPU the timestamp is a CUDA event and is read only when it has long passed, together with the loss that was copied
to pinned memory before it: the clock waits for nothing inside a step.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from typing import Generic, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

Mark = TypeVar("Mark")


class StepClock(ABC, Generic[Mark]):
    """Times steps from the end of one to the end of the next."""

    @abstractmethod
    def start(self) -> None:
        """Begins an epoch: the next step is timed from here."""

    @abstractmethod
    def mark(self, mark: Mark, loss: Tensor) -> list[tuple[Mark, float, float]]:
        """Ends a step, and returns what is known by now of this and earlier steps: (mark, seconds, loss)."""

    @abstractmethod
    def drain(self) -> list[tuple[Mark, float, float]]:
        """Waits for the device and returns all that is left. Only between epochs."""


class CpuStepClock(StepClock[Mark]):
    """`time.perf_counter` after each step: on CPU a step is over when the call returns."""

    def __init__(self) -> None:
        self._last = 0.0

    @override
    def start(self) -> None:
        self._last = time.perf_counter()

    @override
    def mark(self, mark: Mark, loss: Tensor) -> list[tuple[Mark, float, float]]:
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return [(mark, seconds, float(loss))]

    @override
    def drain(self) -> list[tuple[Mark, float, float]]:
        return []


class CudaStepClock(StepClock[Mark]):
    """CUDA events on the current stream, read when they have passed."""

    def __init__(self) -> None:
        self._last: torch.cuda.Event | None = None
        self._pending: deque[tuple[Mark, torch.cuda.Event, torch.cuda.Event, Tensor]] = deque()

    @override
    def start(self) -> None:
        self._last = self._event()

    @override
    def mark(self, mark: Mark, loss: Tensor) -> list[tuple[Mark, float, float]]:
        pinned = torch.empty((), dtype=torch.float32, pin_memory=True)
        pinned.copy_(loss, non_blocking=True)
        begin, self._last = self._last or self._event(), self._event()
        self._pending.append((mark, begin, self._last, pinned))
        return self._passed()

    @override
    def drain(self) -> list[tuple[Mark, float, float]]:
        torch.cuda.synchronize()
        return self._passed()

    def _passed(self) -> list[tuple[Mark, float, float]]:
        done = []
        while self._pending and self._pending[0][2].query():
            mark, begin, end, pinned = self._pending.popleft()
            done.append((mark, begin.elapsed_time(end) / 1000, float(pinned)))
        return done

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def step_clock(device: torch.device) -> StepClock[Mark]:
    """The clock for `device`."""
    return CudaStepClock() if device.type == "cuda" else CpuStepClock()
