"""Marks of the training thread: when it fetched data, ran the model, its backward and the optimizer. The hot path.

A *mark* is one such call with its begin and end. A *step* ends with the last optimizer call before the next fetch or
forward; which call that was is known only when the next one begins, and then the step is *closed*.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from time import monotonic_ns
from typing import NamedTuple

DATA = "data"
FORWARD = "forward"
BACKWARD = "backward"
OPTIMIZER = "optimizer"
EVALUATION = "evaluation"
"""A forward of the model without gradients."""
CHECKPOINT = "checkpoint"
OTHER = "other"
"""Outside all marks."""

_PASSES = (FORWARD, BACKWARD)
_INSIDE_OPTIMIZER = _PASSES
"""Calls that count as themselves inside an optimizer's call, which runs them as its closure."""
_MOST_MARKS = 100_000
"""Marks that are remembered where no step ends, as in a long evaluation."""


class Mark(NamedTuple):
    """One call of the training thread that takes part in a step or in a break."""

    kind: str
    begin_ns: int
    end_ns: int
    nested_ns: int = 0
    """Time of the marks inside this one: an optimizer's closure."""
    source: int = 0
    """Number of the loader (data), or identity of the optimizer."""
    is_batch: bool = True
    """Data: a batch came back; False where an iterator began or ended. Forward: not the batch of the forward before."""
    images: int | None = None
    """Forward: images of the batch."""

    @property
    def own_ns(self) -> int:
        """Time of the call without the marks inside it."""
        return self.end_ns - self.begin_ns - self.nested_ns


class Opening(NamedTuple):
    """A call that has begun and has not yet ended."""

    kind: str
    outer: str
    """Part in which it began: OTHER, or OPTIMIZER for a closure."""
    begin_ns: int


class StepMarks:
    """Marks of the open step, and the end of the step that the next call may close."""

    def __init__(self, close_step: Callable[[], None]) -> None:
        """Keep marks of the calling thread.

        Args:
            close_step: called in the training thread when the step before `step_end_ns` is complete; takes its marks.
        """
        self.part = OTHER
        """Kind of the outermost open call, which the stack sampler reads."""
        self.thread_id = get_ident()
        self.step_end_ns: int | None = None
        """End of the last optimizer call, if a step may be closed there."""
        self.before_next_pass: Callable[[], None] | None = None
        """Called before the next forward with gradients, or backward: ends the process where all ranks do so.

        Until then the program may save what the last step made, evaluate it, or wait for other ranks that do.
        """
        self.is_closed_late = False
        """Whether the last step was closed only by a backward or an optimizer: forwards of the next one are missing."""
        self._close_step = close_step
        self._marks: list[Mark] = []
        self._nested_ns = 0
        self._has_backward = False
        """Whether a backward ended since `step_end_ns`, or since the last closed step."""
        self._stepped: set[int] = set()
        """Optimizers that have been called in the open step."""
        self._previous_stepped: set[int] = set()

    def enter(self, kind: str) -> Opening | None:
        """Begin a call; None if it is part of another one, or of another thread, and counts as nothing of its own."""
        if get_ident() != self.thread_id:
            return None
        outer = self.part
        if outer == OTHER:
            if self.step_end_ns is not None and self._begins_next_step(kind):
                self.is_closed_late = kind == BACKWARD
                self._close_step()
            if self.before_next_pass is not None and kind in _PASSES:
                self.before_next_pass()
        elif outer != OPTIMIZER or kind not in _INSIDE_OPTIMIZER:
            return None
        self.part = kind
        return Opening(kind, outer, monotonic_ns())

    def leave(self, opening: Opening, *, source: int = 0, is_batch: bool = True, images: int | None = None) -> None:
        """End a call that is none of an optimizer."""
        end_ns = monotonic_ns()
        kind = opening.kind
        self.part = opening.outer
        if opening.outer == OPTIMIZER:
            self._nested_ns += end_ns - opening.begin_ns
        if kind == BACKWARD:
            self._has_backward = True
        self._append(Mark(kind, opening.begin_ns, end_ns, 0, source, is_batch, images))

    def drop(self, opening: Opening) -> None:
        """End a call that counts as nothing after all."""
        self.part = opening.outer

    def enter_optimizer(self, optimizer_id: int) -> Opening | None:
        """Begin an optimizer's call; closes the step before, if the same optimizer has already ended that."""
        is_outermost = self.part == OTHER and get_ident() == self.thread_id
        steps_again = optimizer_id in self._stepped and self._has_backward
        if is_outermost and steps_again:
            self.is_closed_late = True
            self._close_step()
        return self.enter(OPTIMIZER)

    def leave_optimizer(self, opening: Opening, optimizer_id: int, *, ends_step: bool = True) -> bool:
        """End an optimizer's call; True if a step may end with it, for which it needs a backward before it.

        Args:
            ends_step: False for a call that only accumulates, as DeepSpeed's engine has them.
        """
        end_ns = monotonic_ns()
        self.part = OTHER
        nested_ns = self._nested_ns
        self._nested_ns = 0
        self._append(Mark(OPTIMIZER, opening.begin_ns, end_ns, nested_ns, optimizer_id))
        continues_step_end = self.step_end_ns is not None
        if not ends_step or not (self._has_backward or continues_step_end):
            return False
        self.step_end_ns = end_ns
        self._has_backward = False
        self._stepped.add(optimizer_id)
        return True

    def take_step(self) -> list[Mark]:
        """Marks up to `step_end_ns` in order of their end; those after it stay for the next step."""
        end_ns = self.step_end_ns
        if end_ns is None:
            return []
        step = self._marks
        self._marks = []
        if step[-1].begin_ns >= end_ns:
            self._marks = [mark for mark in step if mark.begin_ns >= end_ns]
            step = [mark for mark in step if mark.begin_ns < end_ns]
        self._previous_stepped = self._stepped
        self._stepped = set()
        self.step_end_ns = None
        self._has_backward = any(mark.kind == BACKWARD for mark in self._marks)
        return step

    def abandon_open_call(self) -> None:
        """Forget an optimizer's call that never ended because it raised."""
        if self.part == OPTIMIZER and get_ident() == self.thread_id:
            self.part = OTHER
            self._nested_ns = 0

    def follow_this_thread(self) -> None:
        """Make the calling thread the training thread; marks of another one are dropped."""
        if self.thread_id != get_ident():
            self.thread_id = get_ident()
            self.part = OTHER
            self._marks.clear()

    def _begins_next_step(self, kind: str) -> bool:
        """Whether this call belongs to the next step.

        Each fetch does. A forward does not while an optimizer of the last step is still to come: two models that are
        trained in turn on the same batch are one step.
        """
        if kind == OPTIMIZER:
            return False
        if kind in _INSIDE_OPTIMIZER:
            return self._stepped >= self._previous_stepped
        return True

    def _append(self, mark: Mark) -> None:
        self._marks.append(mark)
        if len(self._marks) > _MOST_MARKS:
            del self._marks[: _MOST_MARKS // 2]
