"""A message: one collective of a training step, how often it is called, and when it may and must run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

Phase = Literal["forward", "backward", "after"]


@dataclass(frozen=True)
class Message:
    """One collective of an optimizer step, as an engine asks for it.

    It runs beside computing where `ready` is given, and else holds it up: nothing hides it.
    """

    operation: str
    """As a record names it: all_reduce, all_gather, reduce_scatter, ..."""
    tensor_bytes: float
    """Of the whole tensor, in one call."""
    calls: float
    """One right after the other."""
    phase: Phase
    """In which it is sent. After: between backward and the end of the step."""
    ready: float | None
    """The share of its phase that is computed when it may start; None: nothing is computed beside it."""
    every_micro_step: bool
    """Sent in each micro-step; else once in an optimizer step, in the last one."""
    needed: float | None = None
    """The share of its phase after which computing waits for it: weights of a block. None: the phase's end does."""

    rows: tuple[tuple[int, int], ...] = ()
    """(rows, elements of a row) of its tensors, where each is padded to whole rows on every rank, and so grows with
    them; empty: it is as large on any number of ranks."""
    padded_for: int = 1
    """The ranks for which `tensor_bytes` holds."""

    def tensor_bytes_at(self, ranks: Array) -> float | Array:
        """Of the whole tensor, in one call, on so many ranks."""
        if not self.rows:
            return self.tensor_bytes
        return self.tensor_bytes * self._elements(ranks) / self._elements(np.array([float(self.padded_for)]))

    def _elements(self, ranks: Array) -> Array:
        total: Array = sum(np.ceil(count / ranks) * ranks * size for count, size in self.rows) + np.zeros_like(ranks)
        return total

    def times(self, grad_accum: int) -> float:
        """Calls in an optimizer step of `grad_accum` micro-steps."""
        return self.calls * (grad_accum if self.every_micro_step else 1)
