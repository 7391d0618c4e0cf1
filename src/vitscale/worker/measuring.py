"""What a Probe measures inside a study: the steps of a user's own loop, recorded like those of vitscale's loop.

It has the same clock, windows, profiled blocks, resources and counted traffic. A step begins where the previous one has
ended. If the script pauses within a profiled block, the profile is dropped and begun again with the same step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, get_args

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from vitscale.engines.step_schedule import timed_stretch, windows
from vitscale.probes.matmul import measured_matmul
from vitscale.probes.resources import ResourceProbe
from vitscale.probes.steps import Explainer, LineOf, StepClock, finish_device_work, step_clock
from vitscale.probes.traffic import COUNTED_STEPS, FIRST_USUAL_STEP, NO_GROUP, TrafficCounter
from vitscale.processes.heartbeat import PROGRESS
from vitscale.store import RankLog
from vitscale.store.records import EpochLine, ModelLine, PhaseLine, PhaseName, ResourcesLine, StepLine
from vitscale.store.results import RunHeader
from vitscale.trial.trial import StepWindow, samples_used, steps_per_epoch
from vitscale.worker import environment, extensions, rank_process
from vitscale.worker.group import barrier
from vitscale.worker.probe import GaveUp, Phase, images_of

_UNNAMED = "the script does not name this phase of its steps: probe.phase({phase!r})"
_PART_OF_PHASE = {"data": "data_wait", "forward": "forward", "backward": "backward", "optimizer": "optimizer"}
_PHASES = get_args(Phase)


class _LongestStretch:
    """The resources that a rank used in its longest stretch of timed steps without a pause."""

    def __init__(self, probe: ResourceProbe) -> None:
        self._probe = probe
        self._first_step: int | None = None
        """First step of the stretch that is sampled now; None between stretches."""
        self._longest = range(0)
        self._line: ResourcesLine | None = None
        """The record of the longest stretch so far."""

    @property
    def is_sampled(self) -> bool:
        """Whether a stretch has begun and not ended."""
        return self._first_step is not None

    def begin(self, step: int) -> None:
        """Begins to sample, before this step."""
        self._probe.begin()
        self._first_step = step

    def end(self, next_step: int) -> None:
        """Ends the stretch before `next_step`, and keeps its record if it is as long as the longest so far."""
        steps = range(self._first_step or 0, next_step)
        self._first_step = None
        line = self._probe.end(0, steps)
        if len(steps) >= max(1, len(self._longest)):
            self._longest = steps
            self._line = line

    def line(self) -> ResourcesLine:
        """The record of the longest stretch; of no steps where none was timed."""
        return self._line if self._line is not None else self._probe.end(0, range(0))


class Measuring:
    """One rank's measurement of a script."""

    def __init__(self, header: RunHeader, own: rank_process.RankInfo, log: RankLog, began: float) -> None:
        """`began`: `time.perf_counter()` as the script began."""
        self._header, self._trial, self._own, self._log, self._began = header, header.trial, own, log, began
        trial = self._trial
        self._expected = trial.train.micro_batch * trial.train.grad_accum
        train, images = trial.train, samples_used(trial.data.samples, trial.data.fraction)
        per_epoch = steps_per_epoch(images, own.world_size, train.micro_batch, train.grad_accum, train.drop_last)
        asked = trial.window.steps
        self.last_step = None if asked is None else asked + trial.window.warmup_steps
        """Number of steps to record; None: as many as the script takes."""
        length = self.last_step or per_epoch * (train.epochs or 0)
        self._windows = windows(trial, length, per_epoch)
        self._stretch = timed_stretch(self._windows, trial.window.warmup_steps, range(length))
        self.step = 0
        self._epoch = self._epoch_began = 0
        """Number of the stretch of steps between two pauses, and its first step."""
        self._model = ModelLine(
            parameters=None,
            gradient_dtype=None,
            synchronised_timing=None,
            dataset_fingerprint=header.dataset_fingerprint,
            train_samples=trial.data.samples,
            held_out_samples=None,
        )
        self._started = self._finished = False
        self._open: ExitStack | None = None
        """Contexts around the step under way; None between steps."""
        self._in_hand: int | None = None
        """Images of the step whose last batch a loop over `batches` has in hand."""
        self._short = 0
        """Images of such a loop's latest step if they are too few; 0 if they are not."""
        self._optimized = self._clock_is_off = False
        """Whether an optimizer has stepped since that batch, and whether the clock holds time that is in no step."""
        self._given_up = 0
        """Steps that a pause ended before they were over."""
        self._met: int | None = None
        """The step before whose profile the ranks have waited for each other."""
        self._losses: list[torch.Tensor | float] = []
        self._named: set[str] = set()
        self._seconds = 0.0

    # What the script calls

    @property
    def done(self) -> bool:
        """Whether nothing more is to be measured."""
        return self._finished

    @contextmanager
    def one_step(self, images: int | Callable[[], int], *, last: bool = False) -> Iterator[None]:
        """Measures one optimizer step.

        Args:
            images: its images on this rank; or a function that is asked for them once the step is trained.
            last: whether it is its loader's last, which may have fewer images than the others.
        """
        self._begin()
        try:
            yield
        except BaseException:
            self._abandon()
            self._clock.start()  # ranks do not meet: it may be this one alone that goes on after an error
            raise
        trained = images() if callable(images) else images
        if not (last and 0 < trained < self._expected):
            self._check_images(trained)
        self._end(trained)

    def batches(
        self, loader: Iterable[Any], accumulate: int, images: int | Callable[[Any], int] | None
    ) -> Iterator[Any]:
        """Yields a loader's batches, and ends a step after every `accumulate` of them.

        Raises:
            ValueError: `accumulate` is not what the trial has.
        """
        if accumulate != self._trial.train.grad_accum:
            raise ValueError(
                f"probe.steps(accumulate={accumulate}), and this trial has train.grad_accum = "
                f'{self._trial.train.grad_accum}: hand it on to the script by "{{grad_accum}}"'
            )
        self._restart()
        self._short = 0
        try:
            batches = iter(loader)
            while not self._finished:
                self._begin()
                trained = 0
                for left in reversed(range(accumulate)):
                    with self.phase("data"):
                        try:
                            batch = next(batches)
                        except StopIteration:
                            return
                    if self._short:
                        self._check_images(self._short)
                    trained += _images_in(batch, images, accumulate)
                    if not left:
                        self._in_hand, self._optimized = trained, False
                    yield batch
                # A pause before the optimizer's step has given this one up; what came after it belongs to none.
                self._clock_is_off |= self._in_hand is not None and self._open is None
                self._end_in_hand()
        finally:
            self._in_hand = None
            self._abandon()

    def _end_in_hand(self) -> None:
        """Ends the step whose last batch a loop has in hand, unless a pause has ended it."""
        images, self._in_hand = self._in_hand, None
        if images is None:
            return
        if images < self._expected:
            self._short = images  # an error unless this was the loader's last step
        else:
            self._check_images(images)
        self._end(images)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leaves out what is not training. A step that is under way is given up, unless its optimizer has stepped."""
        if self._optimized:
            self._end_in_hand()
        self._given_up += self._open is not None
        self._abandon()
        # Ranks meet after a pause. If it fails they do so before the next step: the others may wait for this rank.
        self._clock_is_off = True
        yield
        self._restart()

    @contextmanager
    def phase(self, name: PhaseName) -> Iterator[None]:
        """Marks a part of a step.

        Raises:
            ValueError: no phase has this name: its time would be in no part.
        """
        if name not in _PHASES:
            raise ValueError(f"probe.phase({name!r}): a phase is one of {', '.join(map(repr, _PHASES))}")
        if not self._started:
            yield
            return
        self._named.add(name)
        with self._explainer.phase(name):
            yield
        if name in ("data", "h2d"):
            PROGRESS.phase = "script"

    def tell_loss(self, value: torch.Tensor | float) -> None:
        """Takes the loss of a micro-step."""
        if self._finished:  # no step would ever take it
            return
        self._losses.append(value.detach() if isinstance(value, torch.Tensor) else value)

    def describe(self, parameters: int | None, flops_per_image: float | None, precision: str | None) -> None:
        """Takes what is known of the model that is trained.

        Raises:
            ValueError: `precision` is not what the trial has.
        """
        if precision is not None and precision != self._trial.train.precision:
            raise ValueError(
                f"probe.describe(precision={precision!r}), and this trial has train.precision = "
                f"{self._trial.train.precision!r}: correct one of the two"
            )
        told = {
            "parameters": parameters,
            "flops_per_image": None if flops_per_image is None else round(flops_per_image),
        }
        self._model = self._model.model_copy(update={key: value for key, value in told.items() if value is not None})
        if self._started:
            self._log.write(self._model)

    # One step

    def _begin(self) -> None:
        """Opens the next step; does nothing where it is open already."""
        if self._open is not None or self._finished:
            return
        if not self._started:
            self._start()
        if self._clock_is_off:
            self._restart()
        self._open = ExitStack()
        if self._beyond:
            if self.step >= self._first_counted:
                self._open.enter_context(self._counter.step(self.step))
            return
        if self._window == "explained" and not self._explainer.explaining:
            self._explainer.begin_block()
            self._named = set()
            if self._met != self.step:
                barrier()  # else the explained step would wait for a rank whose profiler takes longer to start
                self._met = self.step
            self._clock.start()
        if self.step == 0:
            self._first = (time.perf_counter(), self._open.enter_context(extensions.watched()))
        self._open.enter_context(self._explainer.step(self.step))
        PROGRESS.phase = "script"

    def _end(self, images: int) -> None:
        """Ends a step and begins the next one."""
        if self._open is None:  # enough was measured before the step began
            return
        if self._beyond:
            self._close()
            self.step += 1
            self._log.alive()
            if self.step == self._first_counted + COUNTED_STEPS:
                for line in self._counter.lines():
                    self._log.write(line)
                self._finish()
        else:
            self._end_recorded(images)
        self._log.check()
        self._begin()

    def _end_recorded(self, images: int) -> None:
        window = self._window
        if self.step + 1 == self._stretch.start:
            self._stretch_resources.begin(self.step + 1)
        warmup = self.step < self._trial.window.warmup_steps
        line = partial(StepLine, step=self.step, epoch=self._epoch, images=images, warmup=warmup, window=window)
        self._record(self._clock.mark(line, self._loss()))
        self._close()
        if self.step == 0:
            began, compiled = self._first
            finish_device_work(self._device)
            seconds = time.perf_counter() - began
            self._log.write(PhaseLine(name="first_step", seconds=seconds, compiled=tuple(compiled)))
        self.step += 1
        if self._stretch_resources.is_sampled and self.step == self._stretch.stop:
            self._stretch_resources.end(self.step)
        over = self.step == self.last_step
        if self._explainer.explaining and (over or self._window != "explained"):
            self._read_profile()
        if over:
            self._finish_recording()
            if self._counter.backend == NO_GROUP:
                self._finish()

    def _abandon(self) -> None:
        """Leaves the step under way as if it had not begun."""
        if self._open is None:
            return
        self._close(GaveUp())  # else the counter of traffic would keep it, and the same step once more
        if self._explainer.explaining:
            self._explainer.drop_block()
        self._losses = []

    def _close(self, why: GaveUp | None = None) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.__exit__(None if why is None else GaveUp, why, None)

    def _restart(self) -> None:
        """Continues training after something else: the ranks' clocks start together."""
        self._clock_is_off = False
        if self._finished or not self._started:
            return
        if self._stretch_resources.is_sampled:
            self._stretch_resources.end(self.step)
        finish_device_work(self._device)
        barrier()
        if self.step > self._epoch_began:  # two pauses without a step between them are no epoch
            self._epoch, self._epoch_began = self._epoch + 1, self.step
        if self.step in self._stretch:
            self._stretch_resources.begin(self.step)
        self._clock.start()

    @property
    def _beyond(self) -> bool:
        """Whether all steps that are to be recorded have been."""
        return self.last_step is not None and self.step >= self.last_step

    @property
    def _window(self) -> StepWindow:
        """The window of the step under way; beyond the planned steps, that of the last one."""
        return self._windows[min(self.step, len(self._windows) - 1)] if self._windows else "light"

    # From the first step to the last

    def _start(self) -> None:
        """Sets up before the first step: only now do the device and the process group exist."""
        trial, own = self._trial, self._own
        self._device = device_of(self._header)
        self._counter = TrafficCounter()
        backend = None if self._counter.backend == NO_GROUP else self._counter.backend
        self._log.write(environment.start_line(self._header, own, self._device, backend))
        self._log.write(PhaseLine(name="script", seconds=time.perf_counter() - self._began))
        self._log.write(self._model)
        self._clock: StepClock[LineOf] = step_clock(self._device)
        self._first_counted = max(self.last_step or 0, FIRST_USUAL_STEP)
        self._explainer = Explainer(
            self._device, own.world_size, self._log.path.parent if trial.window.traces else None
        )
        if "explained" in self._windows:
            self._explainer.warm_up()
        self._resources = ResourceProbe(self._device, own.local_rank)
        self._resources.begin_epoch()
        self._stretch_resources = _LongestStretch(self._resources)
        if self._stretch.start == 0 and self._stretch:
            self._stretch_resources.begin(0)
        self._started, self._clock_is_off = True, False
        register_optimizer_step_post_hook(self._note_optimizer)
        barrier()
        finish_device_work(self._device)
        self._clock.start()

    def _note_optimizer(self, *_: object) -> None:
        """Notes that an optimizer has stepped: torch calls this after each of its steps."""
        self._optimized = True

    def _finish_recording(self) -> None:
        finish_device_work(self._device)
        self._record(self._clock.drain())
        if self._stretch_resources.is_sampled:
            self._stretch_resources.end(self.step)
        resources = self._resources.with_memory(self._stretch_resources.line())
        self._log.write(resources)
        self._log.write(
            EpochLine(
                epoch=0,
                steps=self.step,
                images=None,
                seconds=self._seconds,
                complete=False,
                train_loss=None,
                train_accuracy=None,
                held_out_loss=None,
                held_out_accuracy=None,
                peak_bytes=self._resources.peak_bytes(resources),
            )
        )
        self._resources.close()

    def _finish(self) -> None:
        self._close()
        self._finished = True
        PROGRESS.phase = "script, measured"

    def end(self) -> None:
        """Ends the measurement after the script.

        Raises:
            RuntimeError: it has ended too early.
        """
        self._abandon()
        if self.last_step is not None and self.step < self.last_step:
            advice = "let it train until probe.done, or set measure.steps lower"
            if self.step + self._given_up >= self.last_step:
                advice = (
                    f"{self._given_up} more were left out because probe.pause() came before they were over. After an "
                    "optimizer that is not torch's a loop over probe.steps cannot tell: mark each step by "
                    "`with probe.step(images):`, and pause behind it"
                )
            raise RuntimeError(
                f"the script ended after {self.step} of {self.last_step} optimizer steps (measure.warmup_steps + "
                f"measure.steps): {advice}"
            )
        if not self._started:
            raise RuntimeError("the script made a Probe and took no step with it: see docs/own-script.md")
        if self.last_step is None:
            self._finish_recording()
        if (rate := measured_matmul(self._device, self._trial.train.precision)) is not None:
            self._log.write(rate)

    # Parts of the record

    def _record(self, timed: list[tuple[LineOf, float, float]]) -> None:
        for line_of, seconds, loss in timed:
            self._seconds += seconds
            self._log.write(line_of(seconds=seconds, loss=loss))

    def _loss(self) -> torch.Tensor:
        """Mean of the losses told in this step; NaN, which a record has as null, where none was told."""
        told, self._losses = self._losses, []
        if not told:
            return torch.tensor(math.nan)
        return torch.stack([torch.as_tensor(loss, dtype=torch.float32, device=self._device) for loss in told]).mean()

    def _read_profile(self) -> None:
        for line in self._explainer.end_block(self._own.rank):
            phases = _PART_OF_PHASE.items()
            unnamed = {part: _UNNAMED.format(phase=name) for name, part in phases if name not in self._named}
            self._log.write(line.model_copy(update={"unknown": unnamed | line.unknown}))
        barrier()
        self._clock.start()

    def _check_images(self, images: int) -> None:
        if images != self._expected:
            train = self._trial.train
            raise ValueError(
                f"the script trains {images} images in this optimizer step of rank {self._own.rank}, and the study "
                f"says {self._expected} (train.micro_batch = {train.micro_batch} x train.grad_accum = "
                f'{train.grad_accum}): hand both on by "{{micro_batch}}" and "{{grad_accum}}"'
            )


def device_of(header: RunHeader) -> torch.device:
    """The device that the script has chosen, of the trial's kind."""
    kind = header.trial.train.device
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _images_in(batch: Any, images: int | Callable[[Any], int] | None, accumulate: int) -> int:
    """Number of images in one of the `accumulate` batches of a step."""
    if callable(images):
        return images(batch)
    return images_of(batch) if images is None else images // accumulate
