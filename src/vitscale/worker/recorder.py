"""Records the optimizer steps of one rank, whoever trains: vitscale's own loop, or a user's script through a Probe.

One object drives what goes around a step: the clock, the profiler, the counters of resources and traffic, the rank's
progress and its record. It knows nothing of models and data.

    recorder.begin_epoch(epoch, steps=range(100))  # all ranks meet, the clock starts
    for batch in batches:
        recorder.begin_step()
        loss = train(batch)
        recorder.end_step(images=len(batch), loss=loss)
        if recorder.has_profile:
            recorder.write_profile(lambda unknown: unknown)
    measures = recorder.end_epoch()

A step is timed from the end of the one before, so that the wait for its data counts wherever that is fetched. What is
no training goes between `pause` and `resume`. Steps after `count_traffic` are not recorded: what they send is counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from vitscale.engines.step_schedule import timed_stretch
from vitscale.probes.resources import ResourceProbe
from vitscale.probes.steps import (
    Explainer,
    LineOf,
    PhaseContext,
    StepClock,
    TimedStep,
    finish_device_work,
    step_clock,
)
from vitscale.probes.traffic import COUNTED_STEPS, FIRST_USUAL_STEP, NO_GROUP, TrafficCounter
from vitscale.store import RankLog
from vitscale.store.records import PhaseLine, ResourcesLine, StepLine, TrafficLine
from vitscale.trial.trial import StepWindow, Trial
from vitscale.worker import extensions
from vitscale.worker.group import barrier
from vitscale.worker.rank_process import RankInfo

_NEGLIGIBLE_SHARE = 0.01
"""Share of a stretch's time that may be in none of its steps."""


class EpochMeasures(NamedTuple):
    """Figures of an epoch that is over."""

    wall_seconds: float
    """Seconds from the start of its clock to `end_epoch`, including pauses and what came after its last step."""
    resources: ResourcesLine
    """Resources used in its longest stretch of timed steps, and its memory."""


class StepRecorder:
    """Records one rank's steps. All ranks call `begin_epoch`, `resume` and `write_profile` at the same steps.

    The recorder is in one of three states; in two of them its clock runs:

        paused         from the start, and from `pause` until `resume` or `begin_epoch`; the clock stands still
        between steps  the clock runs: the next step is timed from here
        in a step      from `begin_step` until `end_step`, or until `drop_step` or `pause` drops the step

    Steps are light (timed alone), or explained: in a block of steps that follow each other, under the profiler. After
    such a block `has_profile` is set until the caller calls `write_profile`.
    """

    step: int
    """Number of the step under way, and between two steps that of the next one."""
    window: StepWindow
    """Window of that step."""
    epoch: int
    """Epoch that is written beside each step."""
    step_seconds: float
    """Seconds of all steps written so far."""
    is_paused: bool
    """Whether the clock stands still: `resume` comes before the next step."""
    has_profile: bool
    """Whether a block of explained steps is over, so that `write_profile` is to be called before the next step."""
    phase: PhaseContext
    """Context for a part of a step, by its name."""
    resources: ResourceProbe

    def __init__(
        self, trial: Trial, rank: RankInfo, device: torch.device, log: RankLog, planned_windows: Sequence[StepWindow]
    ) -> None:
        """Opens the counters of this rank's machine, and starts the profiler once if steps are to be explained.

        The process group exists by now, if there is to be one.

        Args:
            trial: gives the number of warm-up steps, and whether traces are kept.
            rank: which rank this is.
            device: what it computes on.
            log: gets a line for each step, and the lines of profiles and traffic.
            planned_windows: window of each step, from the first on; steps beyond are like the last one.
        """
        self._windows = planned_windows
        self._warmup_steps = trial.window.warmup_steps
        self._rank = rank
        self._device = device
        self._log = log

        # What measures.
        self._clock: StepClock[LineOf] = step_clock(device)
        self._explainer = Explainer(device, rank.world_size, log.path.parent if trial.window.traces else None)
        self.phase = self._explainer.phase
        self.resources = ResourceProbe(device, rank.local_rank)
        self._traffic = _TrafficSteps()

        # Where training is.
        self.step = 0
        self.window = self._window_of(0)
        self.epoch = 0
        self.step_seconds = 0.0
        self.is_paused = True
        self._epoch_began = 0.0
        self._stretch = TimedStretch(self.resources, epoch=0, planned=range(0))

        # The step under way.
        self._step_context: AbstractContextManager[object] | None = None
        """Context around it; None between two steps."""
        self._first_step: _FirstStep | None = None
        """What is watched in the first step; None in all others."""

        # Blocks of explained steps.
        self.has_profile = False
        self._met_before_step: int | None = None
        """First step of the latest block of explained steps, before which all ranks waited for each other."""
        if "explained" in planned_windows:
            self._explainer.warm_up()

    # Epochs and pauses

    def begin_epoch(self, epoch: int, steps: range) -> None:
        """Starts the clock before an epoch's first step, on all ranks together.

        Args:
            epoch: its number.
            steps: numbers of its steps. A script's are one epoch here, whatever it calls one.
        """
        self.epoch = epoch
        finish_device_work(self._device)
        self.resources.begin_epoch()
        planned = timed_stretch(self._windows, self._warmup_steps, steps)
        self._stretch = TimedStretch(self.resources, epoch, planned)
        self.resume()
        self._epoch_began = time.perf_counter()

    def pause(self, *, step_has_work: bool = True) -> None:
        """Stops the clock for what is no training, and drops the step under way.

        Args:
            step_has_work: whether anything of that step has been trained; False where it has only waited for its data.
        """
        drops_work = self.is_in_step and step_has_work
        self._undo_step()
        finish_device_work(self._device)
        dropped_seconds = self._clock.seconds_since_mark() if drops_work else 0.0
        self._stretch.end(self.step, dropped_seconds)
        self.is_paused = True

    def resume(self) -> None:
        """Starts the clock, on all ranks together."""
        self.is_paused = False
        finish_device_work(self._device)
        if not self.is_counting:
            # Before the barrier: a driver's time to answer one rank must not let the others wait in a step.
            self._stretch.begin_if_planned(self.step)
        barrier()
        finish_device_work(self._device)
        self._stretch.start_clocks()
        self._clock.start()

    def end_epoch(self) -> EpochMeasures:
        """Waits for the device, and writes what is known of the epoch's steps only now."""
        finish_device_work(self._device)
        wall_seconds = time.perf_counter() - self._epoch_began
        self._stretch.end(self.step)
        resources = self.resources.with_memory(self._stretch.line())
        self._write_steps(self._clock.drain())
        return EpochMeasures(wall_seconds, resources)

    def close(self) -> None:
        """Ends the threads that watch the machine; steps may still be counted."""
        self.resources.close()

    # Steps

    @property
    def is_counting(self) -> bool:
        """Whether the steps from here on are trained for their traffic, and not recorded: see `count_traffic`."""
        return self._traffic.steps_to_come > 0

    @property
    def is_in_step(self) -> bool:
        """Whether a step has begun and is not over."""
        return self._step_context is not None

    def begin_first_step(self) -> None:
        """Begins to watch what the first step compiles, and how long it takes.

        `begin_step` does so itself, unless something that belongs to the first step comes before it.
        """
        self._first_step = _FirstStep()

    def begin_step(self) -> None:
        """Begins the next step; does nothing within a step."""
        if self._step_context is not None:
            return
        if self.is_counting:
            self._step_context = self._traffic.context(self.step)
            self._step_context.__enter__()
            return
        if self.step == self._stretch.planned.stop:
            self._stretch.end(self.step)
        if self.window == "explained" and not self._explainer.explaining:
            self._begin_block()
        if self.step == 0 and self._first_step is None:
            self.begin_first_step()
        self._step_context = self._explainer.step(self.step)
        self._step_context.__enter__()

    def end_step(self, images: int, loss: Tensor) -> None:
        """Ends the step when all of its work has been issued.

        Args:
            images: its images on this rank.
            loss: this rank's mean loss (scalar); it is read later, so that nothing waits for the device.

        Raises:
            OSError: the record cannot be written any more.
        """
        if self.is_counting:
            self._end_counted_step()
            return
        next_step = self.step + 1
        if next_step == self._stretch.planned.start:
            # Reading the counters takes time, so it is done in this step, which is not timed.
            self._stretch.begin_if_planned(next_step)
        warmup = self.step < self._warmup_steps
        # The line lacks `seconds` and `loss`, which a GPU's clock knows some steps later.
        line_of = partial(StepLine, step=self.step, epoch=self.epoch, images=images, warmup=warmup, window=self.window)
        self._write_steps(self._clock.mark(line_of, loss))
        self._leave_step()
        if self._first_step is not None:
            self._log.write(self._first_step.end(self._device))
            self._first_step = None
        was_explained = self.window == "explained"
        self.step += 1
        self.window = self._window_of(self.step)
        if was_explained:
            is_end_of_plan = self.step == len(self._windows)
            self.has_profile = self.window != "explained" or is_end_of_plan
        self._log.check()

    def drop_step(self) -> None:
        """Drops the step under way, and the profile that it is in: the step may then begin again.

        The clock starts anew.
        """
        if self._step_context is None:
            return
        self._undo_step()
        if self._stretch.is_sampled:  # the counters hold what this step has used, together with the steps before
            self._stretch.discard()
            self._stretch.begin_if_planned(self.step)
        self._clock.start()  # without a barrier: it may be this rank alone that goes on after an error

    def abort(self) -> None:
        """Undoes what the step under way has changed in this process, as after an error. It waits for nothing."""
        context = self._step_context
        self._step_context = None
        if context is not None:
            # As if an error had ended the block, or the counter of traffic would take the step for a whole one.
            context.__exit__(_StepDropped, _StepDropped(), None)
        if self._first_step is not None:
            self._first_step.end_watch()
            self._first_step = None

    def _undo_step(self) -> None:
        """Drops the step under way, if there is one, and the profile that it is in; the clock is left as it is."""
        if self._step_context is not None:
            self.abort()
            self._explainer.drop_block()

    def _leave_step(self) -> None:
        """Leaves the context of a step that is over; does nothing between two steps."""
        context = self._step_context
        self._step_context = None
        if context is not None:
            context.__exit__(None, None, None)

    def _window_of(self, step: int) -> StepWindow:
        """Returns the window of a step; one beyond the plan is like the plan's last."""
        if step < len(self._windows):
            return self._windows[step]
        return self._windows[-1] if self._windows else "light"

    def _write_steps(self, steps: Sequence[TimedStep[LineOf]]) -> None:
        """Writes a line for each step whose time is known. A step's mark makes its line."""
        for step in steps:
            self.step_seconds += step.seconds
            self._log.write(step.mark(seconds=step.seconds, loss=step.loss))

    # Profiles

    def _begin_block(self) -> None:
        """Starts the profiler, waits until all ranks have started theirs, and starts the clock.

        Else the explained step would wait for a rank whose profiler is slower to start. A block that begins a second
        time at the same step, because its step was dropped, waits for no rank: this rank may be the only one that has
        dropped it.
        """
        self._explainer.begin_block()
        if self._met_before_step != self.step:
            barrier()
            self._met_before_step = self.step
        self._clock.start()

    @property
    def named_phases(self) -> frozenset[str]:
        """Phases that were named in the block of explained steps."""
        return self._explainer.named_phases

    def write_profile(self, with_reasons: Callable[[Mapping[str, str]], Mapping[str, str]]) -> None:
        """Writes a line for each step of the block of explained steps that is over; clears `has_profile`.

        This takes tens of milliseconds, which must be in no step: so the ranks then wait for each other, and the clock
        starts anew. In a pause neither is done here, because `resume` does both.

        Args:
            with_reasons: is called with the parts of a step that the profile does not show, as {"forward": "why"}.
                Returns them together with the parts that the caller knows to be missing.
        """
        self.has_profile = False
        for line in self._explainer.end_block(self._rank.rank):
            unknown_parts = dict(with_reasons(line.unknown))
            self._log.write(line.model_copy(update={"unknown": unknown_parts}))
        if not self.is_paused:
            barrier()
            self._clock.start()

    # Traffic

    @property
    def backend(self) -> str | None:
        """Backend of the process group; None where this rank is in none."""
        return self._traffic.backend

    def count_traffic(self, unusual_steps: int = 0) -> int:
        """Records no more steps: counts what some steps to come send.

        Args:
            unusual_steps: how many of the steps to come send something else than later ones, for a reason that the
                caller knows. They are not counted, nor are the first steps of a process (`FIRST_USUAL_STEP`).

        Returns:
            The number of steps that the caller has to train for this. It is 0 without a process group.
        """
        self.window = "light"
        return self._traffic.plan(self.step, unusual_steps)

    def _end_counted_step(self) -> None:
        """Ends a step that is not recorded; after the last one writes what they sent."""
        self._leave_step()
        self.step += 1
        self._traffic.steps_to_come -= 1
        self._log.alive()
        if self._traffic.steps_to_come == 0:
            for line in self._traffic.lines():
                self._log.write(line)
        self._log.check()


class _TrafficSteps:
    """The steps after the recorded ones. What the last `COUNTED_STEPS` of them send is counted.

    The others come first, because they may send something else. `plan` begins these steps, and `steps_to_come` falls
    to 0 with the last one.
    """

    def __init__(self) -> None:
        """Looks at the process group, which exists by now if there is to be one."""
        self._counter = TrafficCounter()
        self.steps_to_come = 0
        """Number of these steps that are not over; 0 before `plan`."""

    @property
    def backend(self) -> str | None:
        """Backend of the process group; None where this rank is in none."""
        return None if self._counter.backend == NO_GROUP else self._counter.backend

    def plan(self, next_step: int, unusual_steps: int) -> int:
        """Sets `steps_to_come`, and returns it; see `StepRecorder.count_traffic`.

        Example: before step 1 of a process, whose steps are usual from step 3 on, 4 steps come. Steps 3 and 4 count.
        """
        if self.backend is not None:
            first_counted = max(next_step + unusual_steps, FIRST_USUAL_STEP)
            self.steps_to_come = first_counted + COUNTED_STEPS - next_step
        return self.steps_to_come

    def context(self, step: int) -> AbstractContextManager[object]:
        """Returns the context around one of these steps, which counts what is sent if it is among the last."""
        is_usual = self.steps_to_come <= COUNTED_STEPS
        return self._counter.step(step) if is_usual else nullcontext()

    def lines(self) -> list[TrafficLine]:
        """Returns the record of what each counted step sent."""
        return self._counter.lines()


class _StepDropped(Exception):
    """Raised into the context of a step that is dropped, so that nothing of it is recorded."""


class _FirstStep:
    """The first step, which may compile: a phase of start-up."""

    def __init__(self) -> None:
        """Begins to watch what is compiled."""
        self._began = time.perf_counter()
        self._watch = extensions.watched()
        self._compiled = self._watch.__enter__()

    def end(self, device: torch.device) -> PhaseLine:
        """Ends it once the device has done its work; returns its record."""
        finish_device_work(device)
        self.end_watch()
        seconds = time.perf_counter() - self._began
        return PhaseLine(name="first_step", seconds=seconds, compiled=tuple(self._compiled))

    def end_watch(self) -> None:
        """Stops watching what is compiled."""
        self._watch.__exit__(None, None, None)


class TimedStretch:
    """Measures the resources that a rank uses in the longest unbroken stretch of an epoch's timed steps.

    One stretch is planned: the light steps after the warm-up. A pause ends it; the rest of the planned steps is then
    another stretch. `begin_if_planned` and `start_clocks` begin one; `end` or `discard` ends it.
    """

    def __init__(self, probe: ResourceProbe, epoch: int, planned: range) -> None:
        """`planned`: the steps that would be one stretch without pauses."""
        self.planned = planned
        self._probe = probe
        self._epoch = epoch
        self._first_step: int | None = None
        """First step of the stretch that is sampled now; None between stretches."""
        self._longest = range(0)
        self._line: ResourcesLine | None = None
        """The record of the longest stretch so far."""

    @property
    def is_sampled(self) -> bool:
        """Whether a stretch has begun and not ended."""
        return self._first_step is not None

    def begin_if_planned(self, step: int) -> None:
        """Begins to sample before this step, if it is a planned one, or if no steps are planned at all."""
        if step in self.planned or step == self.planned.start:  # an epoch without steps has an empty range here
            self._probe.begin()
            self._first_step = step

    def start_clocks(self) -> None:
        """Begins the stretch's time here, after ranks have met since it began."""
        if self._first_step is not None:
            self._probe.start_clocks()

    def end(self, next_step: int, dropped_seconds: float = 0.0) -> None:
        """Ends the stretch under way, if there is one, and keeps its record if none before it was longer.

        Args:
            next_step: number of the first step that is not in it.
            dropped_seconds: time at the end of the stretch that belongs to no step. The counters hold what was used in
                this time, so the record is not kept if it is more than 1 % of the stretch.
        """
        if self._first_step is None:
            return
        steps = range(self._first_step, next_step)
        self._first_step = None
        line = self._probe.end(self._epoch, steps)
        if dropped_seconds > 0 and dropped_seconds > _NEGLIGIBLE_SHARE * line.seconds:
            return
        if len(steps) >= len(self._longest):
            self._longest = steps
            self._line = line

    def discard(self) -> None:
        """Ends the stretch under way without a record: what was used in it is not that of its steps."""
        self._first_step = None

    def line(self) -> ResourcesLine:
        """Returns the record of the longest stretch; a record of no steps where no step was timed."""
        return self._line if self._line is not None else self._probe.end(self._epoch, range(0))
