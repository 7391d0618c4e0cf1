"""The hook of one process: around each call of the program that counts, and a rank from the first step on.

Methods whose names begin with enter and leave stand around the program's own calls. They never raise: the first error
turns the hook off.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping, Sequence
from threading import get_ident
from typing import Any

from .autocast import AutocastProbe
from .batches import LastBatch, count_images, first_tensor
from .guarding import Switch, guarded
from .loaders import Loaders
from .marks import DATA, EVALUATION, FORWARD, Opening, StepMarks
from .optimizers import LiveOptimizers, OpenOptimizerCalls
from .plans import PlanReader, read_settings
from .ranks import RecordingRank, finish_with_multiprocessing
from .roots import RootFinder, TimedCall


class ProgramParts:
    """What the hook knows of the program: its loaders, its optimizers and its model."""

    def __init__(self, hook: ProcessHook) -> None:
        self.loaders = Loaders()
        self.optimizers = LiveOptimizers()
        self.roots = RootFinder(hook)
        self.autocast = AutocastProbe()


class ProcessHook:
    """State of the hook in this process; a forked child begins anew."""

    def __init__(self, folder: str) -> None:
        """Read the settings.

        Args:
            folder: of the hook.

        Raises:
            OSError, ValueError: the settings cannot be read; then nothing is hooked.
        """
        self._torch = sys.modules["torch"]
        self._folder = folder
        self._settings = read_settings(folder)
        self.switch = Switch()
        self._begin_anew()
        self.enter = guarded(self.switch, self._enter)
        self.leave = guarded(self.switch, self._leave)
        self.enter_fetch = guarded(self.switch, self._enter_fetch)
        self.leave_fetch = guarded(self.switch, self._leave_fetch)
        self.leave_iteration_begin = guarded(self.switch, self._leave_iteration_begin)
        self.enter_forward = guarded(self.switch, self._enter_forward)
        self.leave_forward = guarded(self.switch, self._leave_forward)
        self.enter_optimizer = guarded(self.switch, self._enter_optimizer)
        self.leave_optimizer = guarded(self.switch, self._leave_optimizer)
        self.enter_engine = guarded(self.switch, self._enter_engine)
        self.leave_engine = guarded(self.switch, self._leave_engine)
        atexit.register(self._finish)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin_anew)

    def is_compiling(self) -> bool:
        """Whether torch.compile traces this call; it sees this as a constant and leaves the hook out."""
        compiler = getattr(self._torch, "compiler", None)
        ask = getattr(compiler, "is_compiling", None)
        return False if ask is None else bool(ask())

    def _begin_anew(self) -> None:
        self._marks = StepMarks(self._close_step)
        self._parts = ProgramParts(self)
        self._optimizer_calls = OpenOptimizerCalls()
        self._last_batch = LastBatch()
        self._rank: RecordingRank | None = None

    def _close_step(self) -> None:
        """Close the step that the last optimizer call ended; the process is a rank from the first one on."""
        end_ns = self._marks.step_end_ns
        if end_ns is None:
            return
        if self._rank is None:
            plans = PlanReader(self._folder)
            self._rank = RecordingRank(self._settings, plans, self._parts, self._marks, self.switch)
            finish_with_multiprocessing(self._finish)
        self._rank.close_step(self._marks.take_step(), end_ns)

    def _finish(self) -> None:
        """Write the rank's last lines, the last step among them."""
        try:
            if self._rank is None and self._marks.step_end_ns is not None and self.switch.is_on:
                self._close_step()
            if self._rank is not None:
                end_ns = self._marks.step_end_ns
                self._rank.finish(self._marks.take_step(), end_ns)
        except Exception:  # noqa: S110, the interpreter ends as it would without the hook
            pass

    def _enter(self, kind: str) -> Opening | None:
        return self._marks.enter(kind)

    def _leave(self, opening: Opening) -> None:
        self._marks.leave(opening)

    def _enter_fetch(self) -> Opening | None:
        if self._optimizer_calls and get_ident() == self._marks.thread_id:
            self._optimizer_calls.clear()
            self._marks.abandon_open_call()
        return self._marks.enter(DATA)

    def _leave_fetch(self, opening: Opening, iterator: Any, is_batch: bool) -> None:
        self._marks.leave(opening, source=self._parts.loaders.number_of(iterator), is_batch=is_batch)

    def _leave_iteration_begin(self, opening: Opening, iterator: Any) -> None:
        """End the begin of an iteration; an iterator that is none of torch's counts when it fetches."""
        if not hasattr(iterator, "_index_sampler"):
            self._marks.drop(opening)
            return
        self._parts.loaders.remember(iterator)
        self._leave_fetch(opening, iterator, is_batch=False)

    def _enter_forward(self) -> Opening | None:
        return self._marks.enter(FORWARD if self._torch.is_grad_enabled() else EVALUATION)

    def _leave_forward(self, opening: Opening, call: TimedCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if opening.kind == EVALUATION:
            self._marks.leave(opening)
            return
        arguments = [*args, *kwargs.values()]
        tensor = first_tensor(arguments)
        is_new = self._last_batch.is_new(tensor)
        self._marks.leave(opening, is_batch=is_new, images=count_images(arguments, tensor))
        if not call.was_called:
            call.was_called = True
            self._parts.autocast.place_in(call.module)

    def _enter_optimizer(self, optimizer: Any) -> None:
        if self._rank is None:
            self._marks.follow_this_thread()
        if get_ident() == self._marks.thread_id:
            self._optimizer_calls.push(id(optimizer), self._marks.enter_optimizer(id(optimizer)))

    def _leave_optimizer(self, optimizer: Any) -> None:
        if get_ident() != self._marks.thread_id:
            return
        opening = self._optimizer_calls.pop(id(optimizer))
        if opening is not None and self._marks.leave_optimizer(opening, id(optimizer)):
            self._parts.optimizers.add(optimizer)

    def _enter_engine(self, engine: Any) -> Opening | None:
        """Begin DeepSpeed's step; the optimizers that it calls inside count as part of it."""
        if self._rank is None:
            self._marks.follow_this_thread()
        return self._marks.enter_optimizer(id(engine))

    def _leave_engine(self, opening: Opening, engine: Any, is_boundary: bool) -> None:
        self._optimizer_calls.clear()
        if self._marks.leave_optimizer(opening, id(engine), ends_step=is_boundary):
            self._parts.optimizers.add(engine.optimizer)
