"""A message, one collective of a training step; and what of a step's messages sticks out of its computing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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


def exposed_seconds(
    messages: Sequence[Message],
    collective: Callable[[str, float], Array],
    forward_seconds: Array,
    backward_seconds: Array,
    grad_accum: int,
) -> Array:
    """Exposed transfer time of one optimizer step, (draws, configs): what the step takes longer than its computing.

    Messages of a phase pass one after the other, in their order. Message i may start at `r_i = T F_i`, the time T of
    the phase times its share `ready`, plus what computing has waited so far; it ends at `e_i = max(r_i, e_(i-1)) +
    T_coll(S_i)` (Li et al., arXiv 2006.15704, section 3.2.3). Where computing needs it (`needed`), it waits for `e_i`.
    What the last message sticks out of the phase is exposed, and so are messages that nothing hides.

    Never less than 0, never more than all transfers; 0 where they take no time; all of them where nothing is computed.

    Args:
        messages: of the step, as `messages.messages` makes them.
        collective: seconds of one call: operation, bytes of the whole tensor -> (draws, configs).
        forward_seconds: of one micro-step.
        backward_seconds: of one micro-step.
        grad_accum: micro-steps.
    """
    known: dict[tuple[str, float], Array] = {}

    def seconds(message: Message) -> Array:
        key = (message.operation, message.tensor_bytes)
        if key not in known:
            known[key] = collective(*key)
        return known[key] * message.calls

    lengths = {"forward": forward_seconds, "backward": backward_seconds, "after": np.zeros_like(backward_seconds)}
    total: Array = np.zeros(np.broadcast_shapes(forward_seconds.shape, backward_seconds.shape))
    for phase, length in lengths.items():
        of_phase = [message for message in messages if message.phase == phase]
        each = [message for message in of_phase if message.every_micro_step]
        if len(each) == len(of_phase):
            total = total + grad_accum * _sticking_out(each, seconds, length)
            continue
        total = total + _sticking_out(of_phase, seconds, length)
        if each and grad_accum > 1:
            total = total + (grad_accum - 1) * _sticking_out(each, seconds, length)
    return total


def _sticking_out(messages: Iterable[Message], seconds: Callable[[Message], Array], length: Array) -> Array:
    """What a phase of `length` seconds of computing takes longer.

    Messages that computing needs are taken to hold up the later ones too, which is so where each is asked for when the
    one before has come.
    """
    serial: Array = np.zeros_like(length)
    waited: Array = np.zeros_like(length)
    ended: Array = np.zeros_like(length)
    for message in messages:
        if message.ready is None:
            serial = serial + seconds(message)
            continue
        ended = np.maximum(length * message.ready + waited, ended) + seconds(message)
        if message.needed is not None:
            waited = np.maximum(waited, ended - length * message.needed)
    return serial + np.maximum(waited, ended - length)
