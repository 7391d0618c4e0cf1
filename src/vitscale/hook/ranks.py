"""A process that trains: closes its steps, learns its model, follows the driver's plan and ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from .ending import clean_up, exit_now, exit_reason
from .facts import host_name, rank_line
from .guarding import describe_error
from .line_file import LineFile
from .lines import RANKS_FOLDER, TRACES_FOLDER, HookedEndLine, HookPlan, HookSettings
from .marks import FORWARD, Mark, StepMarks
from .models import ModelDescriber
from .plans import PlanReader
from .profiling import StepProfiler
from .recorder import RankRecorder
from .roots import can_time_modules
from .steps import ClosedStep, Pause

if TYPE_CHECKING:
    from .guarding import Switch
    from .hooking import ProgramParts


class RecordingRank:
    """The rank from its first closed step on."""

    def __init__(
        self, settings: HookSettings, plans: PlanReader, parts: ProgramParts, marks: StepMarks, switch: Switch
    ) -> None:
        """Create the rank's file and begin to write it.

        Raises:
            OSError: the file exists, or cannot be created.
        """
        name = f"{host_name()}-{os.getpid()}"
        file = LineFile(os.path.join(settings.results, RANKS_FOLDER, f"{name}.jsonl"))
        traces = os.path.join(settings.results, TRACES_FOLDER)
        self._recorder = RankRecorder(file, marks, parts.loaders, switch, settings.sample_seconds)
        self._profiler = StepProfiler(traces, name, record_shapes=settings.profile_shapes)
        self._plans = plans
        self._parts = parts
        self._marks = marks
        self._switch = switch
        self._describer = ModelDescriber()
        self._number = 0
        self._begin_ns: int | None = None
        self._pause = Pause(begin_ns=0, end_ns=0)
        self._can_time_modules = can_time_modules()
        if not self._can_time_modules:
            switch.notes.append("forwards are not timed: this torch is older than 2.1")
        self._were_roots_timed = False
        """Whether calls of the model were timed from the begin of the open step."""
        self._is_over = False
        self._recorder.put(rank_line(_trained_parameter(parts)))
        self._recorder.start()

    def close_step(self, marks: Sequence[Mark], end_ns: int) -> None:
        """Hand a step over to be written; then do what takes time: learn the model, profile.

        Args:
            marks: of the step, in the order in which they ended.
            end_ns: end of its last optimizer call.
        """
        closed_ns = monotonic_ns()
        self._put_step(marks, end_ns)
        self._learn(marks)
        self._follow_plan()
        self._pause = Pause(closed_ns, monotonic_ns())

    def finish(self, marks: Sequence[Mark], end_ns: int | None) -> None:
        """Write the last lines when the interpreter ends.

        Args:
            marks: of a last step that nothing has closed; empty without one.
            end_ns: its end; None without one.
        """
        if self._is_over:
            return
        self._is_over = True
        if end_ns is not None and self._switch.is_on:
            self._put_step(marks, end_ns)
        self._recorder.finish([HookedEndLine(step=self._number, reason=exit_reason(), cleaned=[])])

    def _put_step(self, marks: Sequence[Mark], end_ns: int) -> None:
        self._number += 1
        step = ClosedStep(
            number=self._number,
            begin_ns=self._begin_ns,
            end_ns=end_ns,
            pause=self._pause,
            marks=marks,
            is_forward_timed=self._were_roots_timed and self._parts.roots.is_timing,
            backward_times=self._describer.backward_times(),
            profiled=self._profiler.is_running,
        )
        self._recorder.put(step)
        self._begin_ns = end_ns

    def _learn(self, marks: Sequence[Mark]) -> None:
        """Find the optimizers and the model, and write their lines where they are new."""
        for optimizer_line in self._parts.optimizers.take_new_lines():
            self._recorder.put(optimizer_line)
        self._learn_model(has_forward=any(mark.kind == FORWARD for mark in marks))

    def _learn_model(self, *, has_forward: bool) -> None:
        roots = self._parts.roots
        if self._can_time_modules:
            roots.after_step(has_forward=has_forward, optimizers=self._parts.optimizers)
        self._were_roots_timed = roots.is_in_place and not self._marks.is_closed_late
        root = roots.called_root()
        if root is not None:
            model_line = self._describer.describe(root, roots.modules(), self._parts.autocast.dtype)
            if model_line is not None:
                self._recorder.put(model_line)

    def _follow_plan(self) -> None:
        """Begin or go on to profile; after the last step, have the process end before its next forward."""
        plan = self._plans.read()
        if self._profiler.is_running:
            self._go_on_profiling()
        elif self._is_profile_due(plan):
            self._start_profile(plan.profile_steps)
        if plan.stop_after is not None and self._number >= plan.stop_after:
            self._marks.before_next_pass = self._end

    def _is_profile_due(self, plan: HookPlan) -> bool:
        """Whether the next step is the first profiled one, or a later one where the plan came too late."""
        if plan.profile_from is None or self._profiler.was_started:
            return False
        return self._number + 1 >= plan.profile_from

    def _start_profile(self, steps: int) -> None:
        try:
            obstacle = self._profiler.start(first_step=self._number + 1, steps=steps)
        except Exception as error:
            obstacle = f"no step is profiled: {describe_error(error)}"
        if obstacle is not None:
            self._switch.notes.append(obstacle)

    def _go_on_profiling(self) -> None:
        try:
            profile_line = self._profiler.end_step()
        except Exception as error:
            self._switch.notes.append(f"the profile is lost: {describe_error(error)}")
            return
        if profile_line is not None:
            self._recorder.put(profile_line)

    def _end(self) -> None:
        """End the process; never returns."""
        self._is_over = True
        cleaned: list[str] = []
        try:
            profile_line = self._profiler.finish()
            if profile_line is not None:
                self._recorder.put(profile_line)
            cleaned = clean_up(self._parts.loaders.end_workers)
        except Exception as error:
            self._switch.notes.append(f"not all was cleaned up at the end: {describe_error(error)}")
        self._recorder.finish([HookedEndLine(step=self._number, reason="agreed step", cleaned=cleaned)])
        exit_now()


def finish_with_multiprocessing(finish: Any) -> None:
    """Have a process that multiprocessing started finish too: a forked one ends without atexit."""
    processes = sys.modules.get("multiprocessing.process")
    util = sys.modules.get("multiprocessing.util")
    if processes is not None and util is not None and processes.parent_process() is not None:
        util.Finalize(None, finish, exitpriority=100)


def _trained_parameter(parts: ProgramParts) -> Any:
    """The first parameter of the optimizers.

    Raises:
        ValueError: none of them has any.
    """
    for optimizer in parts.optimizers.alive():
        for group in optimizer.param_groups:
            if group["params"]:
                return group["params"][0]
    raise ValueError("no optimizer has a parameter")
