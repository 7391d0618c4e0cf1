"""Records the steps of a user's own loop inside a study, as the script marks them by its Probe.

They go to a `StepRecorder`, as those of vitscale's own loop do. What is of scripts alone stands here: a step begins
where the previous one has ended; images, micro-steps and precision are checked against the study; a loop over the
batches of a loader finds out by itself where its steps end.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from vitscale.engines.step_schedule import windows
from vitscale.probes.matmul import measured_matmul
from vitscale.processes.heartbeat import PROGRESS
from vitscale.store import RankLog
from vitscale.store.records import EpochLine, ModelLine, PhaseLine
from vitscale.store.results import RunHeader
from vitscale.trial.trial import samples_used, steps_per_epoch
from vitscale.worker.environment import start_line
from vitscale.worker.rank_process import RankInfo
from vitscale.worker.recorder import StepRecorder
from vitscale.worker.script_arguments import SCRIPT_PHASES, ScriptPhase, images_in_batch

if TYPE_CHECKING:
    from vitscale.models.tracing.user_module import UserModule

_UNNAMED = "the script does not name this phase of its steps: probe.phase({phase!r})"
_NO_BATCH: Any = object()
_PART_OF_PHASE = {"data": "data_wait", "forward": "forward", "backward": "backward", "optimizer": "optimizer"}


class _StepStage(Enum):
    """How far a script's loop over batches is in its step."""

    TAKING_BATCHES = auto()
    """Batches of the step are to come. So it also is between two steps."""
    TRAINING_LAST_BATCH = auto()
    """The script has the last batch of the step, and no optimizer has stepped since it got it."""
    OPTIMIZER_STEPPED = auto()
    """An optimizer has stepped since then: the step is trained."""


class _BatchLoop:
    """Follows a script's loop over the batches of one loader, and says how far its step is.

    A step is `accumulate` batches. Its stages follow each other in this order:

        TAKING_BATCHES       -> TRAINING_LAST_BATCH  by `take`, with the step's last batch
        TRAINING_LAST_BATCH  -> OPTIMIZER_STEPPED    by `note_optimizer_step`
        either of these two  -> TAKING_BATCHES       by `end_step`
    """

    def __init__(self, loader: Iterable[Any], accumulate: int) -> None:
        """`accumulate`: number of batches that make a step."""
        self._accumulate = accumulate
        self._length = _length_of(loader)
        self._batches_taken = 0
        self._step_images = 0
        """Images in the batches so far of the step under way."""
        self.stage = _StepStage.TAKING_BATCHES
        self.short_images: int | None = None
        """Images of the latest step if they were too few; None else. Too few are right only if no batch follows."""

    def has_whole_step(self) -> bool:
        """Whether the loader has enough batches for another step.

        True where its length is unknown, or where it has given more batches than its length.
        """
        if self._length is None or self._batches_taken >= self._length:
            return True
        return self._length - self._batches_taken >= self._accumulate

    def take(self, images: int) -> None:
        """Counts a batch of `images` images that goes to the script."""
        self._batches_taken += 1
        self._step_images += images
        is_last_of_step = self._batches_taken % self._accumulate == 0
        if is_last_of_step:
            self.stage = _StepStage.TRAINING_LAST_BATCH

    def note_optimizer_step(self) -> None:
        """Notes that an optimizer has stepped, which matters only after the last batch of a step."""
        if self.stage is _StepStage.TRAINING_LAST_BATCH:
            self.stage = _StepStage.OPTIMIZER_STEPPED

    def end_step(self) -> int:
        """Ends the step whose batches are all taken, and returns its images."""
        images = self._step_images
        self._step_images = 0
        self.stage = _StepStage.TAKING_BATCHES
        return images


def _length_of(loader: Iterable[Any]) -> int | None:
    """Returns the number of a loader's batches; None where it has no length."""
    try:
        return len(loader)  # type: ignore[arg-type]  # the error says whether it has a length
    except Exception:  # a loader may raise whatever it likes
        return None


class _ScriptWork:
    """The work that the script has done in the step under way."""

    def __init__(self) -> None:
        self.has_begun = False
        """Whether the script has begun to train the step, rather than wait for its data."""
        self._losses: list[torch.Tensor | float] = []
        """Losses of the micro-steps."""

    def clear(self) -> None:
        """Forgets the work, as where its step is dropped."""
        self.has_begun = False
        self._losses = []

    def add_loss(self, value: torch.Tensor | float) -> None:
        """Takes the loss of a micro-step (scalar) without waiting for the device."""
        self._losses.append(value.detach() if isinstance(value, torch.Tensor) else value)

    def take_losses(self) -> list[torch.Tensor | float]:
        """Returns the losses so far (scalars), and forgets them."""
        losses = self._losses
        self._losses = []
        return losses


class ScriptSteps:
    """Records one rank's steps of a script.

    A script marks them by its Probe: as blocks (`one_step`), as a loop over batches (`batches`), or by a library's
    events (`begin_step`, `end_step`, `drop_step`). At any time this is in one of four states:

        not started  no step has begun; `_recorder` is None, since the script may not have chosen its device yet
        in a step    a step is timed. `end_step` begins the next one at once, so that the wait for its data is in it
        paused       the clock stands still: the script evaluates, saves, or has left its loop over batches
        done         as many steps are recorded and counted as the study asks for; marking steps does nothing now

    `begin_step` leads from "not started" and from "paused" into a step; `_pause` leads out of it and drops the step
    under way. `_resume` starts the clock after a pause, which all ranks do together.
    """

    def __init__(self, header: RunHeader, rank: RankInfo, log: RankLog, began: float) -> None:
        """Does not look at the machine: the script may choose its device and its process group until its first step.

        Args:
            header: the run's trial.
            rank: which rank this is.
            log: its record.
            began: `time.perf_counter()` when the script began.
        """
        trial = header.trial
        self._header = header
        self._trial = trial
        self._rank = rank
        self._log = log
        self._began = began
        self._step_images = trial.train.micro_batch * trial.train.grad_accum
        """Images of this rank in each step, as the study says."""
        self.step_limit = None if trial.window.steps is None else trial.window.steps + trial.window.warmup_steps
        """Number of steps to record; None: as many as the script takes."""
        self.done = False
        """Whether nothing more is to be measured."""
        self._recorder: StepRecorder | None = None
        """None before the first step: only then do the device and the process group exist."""
        self._loop: _BatchLoop | None = None
        """The loop over batches that the script is in."""
        self._work = _ScriptWork()
        self._epoch_first_step = 0
        """Number of the first step of the epoch under way: epochs of a script lie between its pauses."""
        self._steps_dropped_by_pauses = 0
        self._steps_dropped_by_breaks = 0
        """Steps whose optimizer had not stepped when the script left its loop over batches."""
        self._user_module: UserModule | None = None
        """The model that the script has described, without its FLOPs."""
        self._late_error: Exception | None = None
        """Error of a step that ended where nothing can be raised."""
        self._model = ModelLine(
            parameters=None,
            gradient_dtype=None,
            synchronised_timing=None,
            dataset_fingerprint=header.dataset_fingerprint,
            train_samples=trial.data.samples,
            held_out_samples=None,
        )

    # What a script calls by its Probe

    @property
    def step(self) -> int:
        """Number of the step under way, and between two steps that of the next one."""
        return 0 if self._recorder is None else self._recorder.step

    @contextmanager
    def one_step(self, images: int) -> Iterator[None]:
        """Measures one optimizer step of `images` images on this rank.

        Raises:
            ValueError: the study says other images.
        """
        self.begin_step()
        self._work.has_begun = True
        try:
            yield
        except BaseException:
            self.drop_step()
            raise
        self.end_step(images)

    def batches(
        self, loader: Iterable[Any], accumulate: int, images: int | Callable[[Any], int] | None
    ) -> Iterator[Any]:
        """Yields a loader's batches, and records every `accumulate` of them as a step; see `Probe.steps`.

        It is over in one of four ways. In the first two it pauses: what comes next is not training.
        - No batch is left, or enough is measured.
        - The loader raises, or a batch has other images than the study says.
        - The script leaves its loop (`break`, or an error there): see `_leave_loop`.
        - The script begins another loop, or ends, while it still holds this generator. `_leave_loop` is then called
          from there, and `self._loop` is no longer this loop. When Python closes the generator later, nothing is left
          to do here.

        Args:
            loader: gives this rank's batches.
            accumulate: number of batches in a step.
            images: as in `images_in_batch`.

        Raises:
            ValueError: the number of micro-steps or of images is not the study's.
        """
        self._check_accumulation(accumulate)
        self._leave_loop()
        self._resume()
        loop = _BatchLoop(loader, accumulate)
        self._loop = loop
        try:
            batches = iter(loader)  # kept until the step is over: ending it may wait for a DataLoader's processes
            yield from self._batches_of_steps(loop, batches, accumulate, images)
        except GeneratorExit:  # how Python closes a generator that nobody reads from any more
            if self._loop is loop:
                self._leave_loop_quietly()
            raise
        finally:
            if self._loop is loop:
                self._loop = None
                self._pause()

    def _batches_of_steps(
        self, loop: _BatchLoop, batches: Iterator[Any], accumulate: int, images: int | Callable[[Any], int] | None
    ) -> Iterator[Any]:
        """Yields a loader's batches; begins a step before the first batch of each and ends it after the last.

        Code after the `yield` runs when the script asks for the next batch: it has then trained the one before.

        Args:
            loop: counts the batches.
            batches: what is left of the loader's batches.
            accumulate: number of batches in a step.
            images: as in `images_in_batch`.
        """
        while not self.done:
            if loop.has_whole_step():
                self.begin_step()
            else:
                self._pause()  # the last batches are too few for a step: the script trains them, and they are in none
            for _micro_step in range(accumulate):
                with self.phase("data"):
                    batch = next(batches, _NO_BATCH)
                if batch is _NO_BATCH:
                    return
                if loop.short_images is not None:
                    self._check_images(loop.short_images)  # a batch follows: that step was not the loader's last
                loop.take(images_in_batch(batch, images, accumulate))
                self._work.has_begun = True
                yield batch
            self._end_step_of(loop)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leaves what is not training out of all steps; see `Probe.pause`.

        In a loop over batches a step whose optimizer has stepped ends here. Any other step under way is dropped.
        """
        loop = self._loop
        if loop is not None and loop.stage is _StepStage.OPTIMIZER_STEPPED:
            self._end_step_of(loop)
        if self._has_trained_in_step:
            self._steps_dropped_by_pauses += 1
        # Ranks meet after a pause. If it fails they do so before the next step: the others may wait for this rank.
        self._pause()
        yield
        self._resume()

    @contextmanager
    def phase(self, name: ScriptPhase) -> Iterator[None]:
        """Marks a part of a step.

        Raises:
            ValueError: no phase has this name: its time would be in no part.
        """
        if name not in SCRIPT_PHASES:
            raise ValueError(f"probe.phase({name!r}): a phase is one of {', '.join(map(repr, SCRIPT_PHASES))}")
        if self._recorder is None:
            yield
            return
        with self._recorder.phase(name):
            yield
        if name in ("data", "h2d"):
            PROGRESS.phase = "script"

    def add_loss(self, value: torch.Tensor | float) -> None:
        """Takes the loss of a micro-step (scalar); it is read only when its step is recorded."""
        if not self.done:  # else no step would ever take it
            self._work.add_loss(value)

    def describe(
        self,
        parameters: int | None,
        flops_per_image: float | None,
        precision: str | None,
        module: torch.nn.Module | None = None,
        *,
        parameters_source: Literal["measured", "told"] = "told",
    ) -> None:
        """Takes what is known of the model that is trained; None changes nothing.

        Without `flops_per_image` the FLOPs of `module` are counted. `parameters_source`: whether the parameters were
        counted of `module`, or the script states their number.

        Raises:
            ValueError: `precision` is not what the trial has.
        """
        if precision is not None and precision != self._trial.train.precision:
            raise ValueError(
                f"probe.describe(precision={precision!r}), and this trial has train.precision = "
                f"{self._trial.train.precision!r}: correct one of the two"
            )
        changes: dict[str, int | str] = {}
        if parameters is not None:
            changes |= {"parameters": parameters, "parameters_source": parameters_source}
        if flops_per_image is not None:
            changes |= {"flops_per_image": round(flops_per_image), "flops_source": "told"}
        self._model = self._model.model_copy(update=changes)
        if self._recorder is not None:
            self._log.write(self._model)
        if module is not None and flops_per_image is None:
            self._watch_first_call(module)

    def _watch_first_call(self, module: torch.nn.Module) -> None:
        """Has the FLOPs of a module counted at the end, by its first call; does nothing where it cannot be copied.

        Ranks compute alike: rank 0 alone counts.
        """
        if self._rank.rank != 0:
            return
        from vitscale.models.tracing.user_module import UserModule  # only scripts that describe a module need it

        try:
            self._user_module = UserModule(module)
        except Exception as error:  # a user's module may be of any kind
            print(f"vitscale: the model's FLOPs are not counted: {type(error).__name__}: {error}", file=sys.stderr)

    def _record_flops_of_module(self) -> None:
        """Writes the FLOPs of the described module, where it was called and can run on meta tensors."""
        if self._user_module is None or self._model.flops_per_image is not None:
            return
        try:
            flops = self._user_module.training_flops_per_image()
        except Exception as error:  # a user's module may raise anything
            print(f"vitscale: the model's FLOPs are not counted: {type(error).__name__}: {error}", file=sys.stderr)
            return
        if flops:
            self._model = self._model.model_copy(update={"flops_per_image": flops, "flops_source": "traced"})
            self._log.write(self._model)

    # One step

    def begin_step(self) -> None:
        """Begins the next step, unless it has begun or enough is measured."""
        if self.done:
            return
        if self._recorder is None:
            self._recorder = self._start_recorder()
        if self._recorder.is_paused:
            self._resume()
        self._recorder.begin_step()
        PROGRESS.phase = "script"

    def end_step(self, images: int, *, allow_fewer_images: bool = False) -> None:
        """Ends the step under way, and begins the next one.

        Args:
            images: its images on this rank.
            allow_fewer_images: whether it may have fewer than the others, as a loader's last step has. A loop over
                batches allows it for any step, and refuses it when another batch follows (`_BatchLoop.short_images`).

        Raises:
            ValueError: the study says other images.
        """
        self._check_images(images, allow_fewer=allow_fewer_images)
        recorder = self._recorder
        self._work.has_begun = False
        if recorder is None or not recorder.is_in_step:
            self._pause()  # an earlier pause has dropped this step; what came after it belongs to none
            return
        recorder.end_step(images, self._take_mean_loss())
        self._after_step(recorder)
        self.begin_step()

    def drop_step(self) -> None:
        """Leaves the step under way as if it had not begun."""
        self._work.clear()
        if self._recorder is not None:
            self._recorder.drop_step()

    def _end_step_of(self, loop: _BatchLoop) -> None:
        """Ends the step whose batches the script has all taken; does nothing if a pause has ended it already."""
        if loop.stage is _StepStage.TAKING_BATCHES:
            return
        images = loop.end_step()
        is_short = images < self._step_images
        loop.short_images = images if is_short else None
        self.end_step(images, allow_fewer_images=is_short)

    def _after_step(self, recorder: StepRecorder) -> None:
        """Writes what the step that has just ended completes: a profile, or the record of all steps.

        With a limit, a script's first steps are recorded. Then, in a process group, come a few whose traffic is counted
        instead (`StepRecorder.count_traffic`). After the last of either kind the measurement is done.
        """
        if recorder.has_profile:
            recorder.write_profile(self._with_unnamed_phases)
        if self.step_limit is None:
            return
        steps_ended = recorder.step
        if steps_ended < self.step_limit:
            return
        if steps_ended == self.step_limit:
            self._record_epoch(recorder)
            recorder.count_traffic()
        if not recorder.is_counting:  # no step is left whose traffic is to be counted
            self.done = True
            PROGRESS.phase = "script, measured"

    @property
    def _has_trained_in_step(self) -> bool:
        """Whether a step is under way that the script has begun to train."""
        return self._work.has_begun and self._recorder is not None and self._recorder.is_in_step

    def _leave_loop(self) -> None:
        """Pauses after a loop over batches that the script has left early, if there is one.

        A step that the script has begun to train is recorded if all of its batches are taken and its optimizer has
        stepped. Else it is dropped, and `end` prints how many were. This waits for no other rank: an error may have
        ended the loop on this rank alone.

        Raises:
            ValueError: the study says other images than those of the step in hand.
        """
        loop = self._loop
        self._loop = None
        if loop is None:
            return
        recorder = self._recorder
        if recorder is None or not self._has_trained_in_step:
            self._pause()
        elif loop.stage is _StepStage.OPTIMIZER_STEPPED:
            images = loop.end_step()
            self._check_images(images, allow_fewer=True)
            recorder.end_step(images, self._take_mean_loss())
            self._pause()  # and not `begin_step`, which would wait for other ranks
            self._after_step(recorder)
        else:
            if not recorder.is_counting:
                self._steps_dropped_by_breaks += 1
            self._pause()

    def _leave_loop_quietly(self) -> None:
        """Leaves a loop whose generator is thrown away.

        Python would only print an exception that is raised there, so it is kept, and `end` raises it.
        """
        try:
            self._leave_loop()
        except Exception as error:
            self._late_error = error
            self._pause()

    def _pause(self) -> None:
        """Stops the clock, and drops the step under way."""
        has_work = self._work.has_begun
        self._work.clear()
        if self._recorder is not None and not self.done:
            self._recorder.pause(step_has_work=has_work)

    def _resume(self) -> None:
        """Starts the clock after something that was no training, on all ranks together; counts the epochs between."""
        recorder = self._recorder
        if recorder is None or self.done:
            return
        recorder.pause(step_has_work=self._work.has_begun)  # a step may have begun: `end_step` begins the next one
        if recorder.step > self._epoch_first_step:  # two pauses without a step between them are no epoch
            recorder.epoch += 1
            self._epoch_first_step = recorder.step
        recorder.resume()

    # From the first step to the last

    def _start_recorder(self) -> StepRecorder:
        """Begins to record, before the first step."""
        trial = self._trial
        train = trial.train
        rank = self._rank
        script_seconds = time.perf_counter() - self._began
        device = device_of(self._header)
        images = samples_used(trial.data.samples, trial.data.fraction)
        per_epoch = steps_per_epoch(images, rank.world_size, train.micro_batch, train.grad_accum, train.drop_last)
        planned_steps = self.step_limit
        if planned_steps is None:
            planned_steps = per_epoch * (train.epochs or 0)
        recorder = StepRecorder(trial, rank, device, self._log, windows(trial, planned_steps, per_epoch))
        self._log.write(start_line(self._header, rank, device, recorder.backend))
        self._log.write(PhaseLine(name="script", seconds=script_seconds))
        self._log.write(self._model)
        register_optimizer_step_post_hook(self._note_optimizer_step)
        recorder.begin_epoch(0, range(planned_steps))
        return recorder

    def _note_optimizer_step(self, *_: object) -> None:
        """Notes that an optimizer has stepped: torch calls this after each step of any optimizer."""
        if self._loop is not None:
            self._loop.note_optimizer_step()

    def _record_epoch(self, recorder: StepRecorder) -> None:
        """Records all steps as one epoch, and ends the threads that watch the machine.

        A script does not say which images are an epoch, nor how accurate the model is: these fields are empty.
        """
        used_resources = recorder.end_epoch().resources
        peak_bytes = recorder.resources.peak_bytes(used_resources)
        self._log.write(used_resources)
        self._log.write(
            EpochLine(
                epoch=0,
                steps=recorder.step,
                images=None,
                seconds=recorder.step_seconds,
                complete=False,
                train_loss=None,
                train_accuracy=None,
                held_out_loss=None,
                held_out_accuracy=None,
                peak_bytes=peak_bytes,
            )
        )
        recorder.close()

    def end(self) -> None:
        """Ends the measurement after the script.

        Raises:
            RuntimeError: it has ended too early.
            ValueError: the study says other images than those of a step in which the script has left its loop.
        """
        self._leave_loop()
        self._pause()
        if self._late_error is not None:
            raise self._late_error
        if self._steps_dropped_by_breaks > 0:
            steps = f"{self._steps_dropped_by_breaks} optimizer step(s) of rank {self._rank.rank}"
            reason = "the script left its loop over probe.steps before their optimizer had stepped"
            print(f"vitscale: {steps} are not in the record: {reason}", file=sys.stderr)
        if self.step_limit is not None and self.step < self.step_limit:
            raise RuntimeError(
                f"the script ended after {self.step} of {self.step_limit} optimizer steps (measure.warmup_steps + "
                f"measure.steps): {self._advice_for_more_steps(self.step_limit)}"
            )
        recorder = self._recorder
        if recorder is None:
            raise RuntimeError("the script made a Probe and took no step with it: see docs/own-script.md")
        if self.step_limit is None:
            self._record_epoch(recorder)
        rate = measured_matmul(device_of(self._header), self._trial.train.precision)
        if rate is not None:
            self._log.write(rate)
        self._record_flops_of_module()

    def _advice_for_more_steps(self, step_limit: int) -> str:
        """Returns the end of a message: how to get to `step_limit` steps."""
        if self.step + self._steps_dropped_by_pauses < step_limit:
            return "let it train until probe.done, or set measure.steps lower"
        dropped = self._steps_dropped_by_pauses
        return (
            f"{dropped} more were left out because probe.pause() came before they were over. After an "
            "optimizer that is not torch's a loop over probe.steps cannot tell: mark each step by "
            "`with probe.step(images):`, and pause behind it"
        )

    # Parts of the record

    def _take_mean_loss(self) -> torch.Tensor:
        """Returns the mean of the losses of this step (scalar), and forgets them.

        Returns NaN, which becomes null in the record, where the script has given none.
        """
        losses = self._work.take_losses()
        if not losses:
            return torch.tensor(math.nan)
        device = device_of(self._header)
        return torch.stack([torch.as_tensor(loss, dtype=torch.float32, device=device) for loss in losses]).mean()

    def _with_unnamed_phases(self, unknown: Mapping[str, str]) -> dict[str, str]:
        """Returns `unknown` together with the parts whose phase the script does not name, each with a reason.

        Args:
            unknown: the parts of a step that a profile does not show -> why. Its reasons come first.
        """
        named_phases = frozenset[str]() if self._recorder is None else self._recorder.named_phases
        reasons: dict[str, str] = {}
        for phase, part in _PART_OF_PHASE.items():
            if phase not in named_phases:
                reasons[part] = _UNNAMED.format(phase=phase)
        return {**reasons, **unknown}

    # Checks against the study

    def _check_accumulation(self, accumulate: int) -> None:
        """Refuses other micro-steps than the trial's."""
        if accumulate != self._trial.train.grad_accum:
            raise ValueError(
                f"probe.steps(accumulate={accumulate}), and this trial has train.grad_accum = "
                f'{self._trial.train.grad_accum}: hand it on to the script by "{{grad_accum}}"'
            )

    def _check_images(self, images: int, *, allow_fewer: bool = False) -> None:
        """Refuses a step of other images than the trial's, or with `allow_fewer` one of more or of none."""
        is_allowed_rest = allow_fewer and 0 < images < self._step_images
        if images == self._step_images or is_allowed_rest:
            return
        train = self._trial.train
        raise ValueError(
            f"the script trains {images} images in this optimizer step of rank {self._rank.rank}, and the study "
            f"says {self._step_images} (train.micro_batch = {train.micro_batch} x train.grad_accum = "
            f'{train.grad_accum}): hand both on by "{{micro_batch}}" and "{{grad_accum}}"'
        )


def device_of(header: RunHeader) -> torch.device:
    """Returns the device that the script has chosen, of the trial's kind."""
    kind = header.trial.train.device
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
