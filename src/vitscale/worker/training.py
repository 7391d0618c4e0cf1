"""The training of one rank: epochs of optimizer steps, each recorded; evaluation outside every timing window."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from vitscale.base.plugins import fault, known
from vitscale.datasets.batches import Batches
from vitscale.engines.base import Engine
from vitscale.engines.step_schedule import timed_stretch, windows
from vitscale.errors import shown
from vitscale.probes import Probe
from vitscale.probes.gradient_norms import MicroBatchNorms, gradient_line
from vitscale.probes.resources import ResourceProbe
from vitscale.probes.steps import Explainer, LineOf, StepClock, finish_device_work, step_clock
from vitscale.probes.traffic import COUNTED_STEPS, FIRST_USUAL_STEP, NO_GROUP, TrafficCounter
from vitscale.sources import Dataset
from vitscale.store import RankLog
from vitscale.store.records import EpochLine, PhaseLine, ProbeLine, ResourcesLine, StepLine, TrafficLine
from vitscale.trial.trial import StepWindow, Trial
from vitscale.worker import extensions, rank_process
from vitscale.worker.group import barrier, total
from vitscale.worker.passes import Evaluation, Passes, means

IN_GROUPS = "ranks that share a model exchange in groups, and who waits for whom in which is not told apart"


class Training:
    """Trains one rank to the end of its trial, and writes what it sees to `log`."""

    def __init__(
        self,
        trial: Trial,
        own: rank_process.RankInfo,
        dataset: Dataset,
        engine: Engine,
        device: torch.device,
        log: RankLog,
        seed: int,
    ) -> None:
        """`seed`: that of this run, for the order and the augmentation."""
        self.trial, self.own, self.engine, self.device, self.log = trial, own, engine, device, log
        self.passes = Passes(trial, own, dataset, engine, device, seed)
        self.clock: StepClock[LineOf] = step_clock(device)
        self.step = 0
        steps = trial.window.steps
        self.last_step = trial.window.warmup_steps + steps if steps is not None else None
        per_epoch = self.passes.order(epoch=0).steps
        self.rehearses = trial.train.compile and (self.last_step is None or self.last_step >= per_epoch)
        """Whether steps of another shape would else be compiled among the timed ones."""
        self.windows = windows(trial, self.last_step or per_epoch * (trial.train.epochs or 0), per_epoch)
        traces = log.path.parent if trial.window.traces else None
        self.explainer = Explainer(device, own.world_size, traces)
        # Containers on one machine have their own hostnames, but share its counters of energy.
        self.resources = ResourceProbe(device, own.local_rank)
        self.probes: dict[str, Probe] = {name: known("probe", name, {}, "begin", "end") for name in trial.window.probes}
        self.held_out_accuracy: float | None = None

    def run(self) -> None:
        """Trains all epochs or all steps, whichever the trial names, or as many epochs as its target accuracy takes."""
        if "explained" in self.windows:
            self.explainer.warm_up()
        epoch = 0
        while not self._over(epoch):
            self._epoch(epoch)
            epoch += 1
        # After an evaluation FSDP2 keeps its root's weights gathered, so the following step is not a usual one.
        usual = self.step + (self.held_out_accuracy is not None)
        for line in counted_traffic(self.passes, self._unrecorded_step, self.step, usual, epoch, self.log.alive):
            self.log.write(line)

    def _over(self, epoch: int) -> bool:
        if self.last_step is not None:
            return self.step >= self.last_step
        target = self.trial.train.target_accuracy
        # Accuracy is reduced over the ranks, so all of them decide alike.
        if target is not None and self.held_out_accuracy is not None and self.held_out_accuracy >= target:
            return True
        return epoch >= (self.trial.train.epochs or 0)

    def _epoch(self, epoch: int) -> None:
        order = self.passes.order(epoch)
        steps = order.steps
        if self.last_step is not None:
            steps = min(steps, self.last_step - self.step)
        # Sums of `tally`, on the device until the epoch is over.
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        stretch = timed_stretch(self.windows, self.trial.window.warmup_steps, range(self.step, self.step + steps))
        used: ResourcesLine | None = None
        images = 0
        with self.passes.batches(order) as batches:
            finish_device_work(self.device)
            self.resources.begin_epoch()
            unprobed = {name: _not_begun(probe, self.device) for name, probe in self.probes.items()}
            if stretch.start == self.step:
                # Before the barrier: a driver's time to answer one rank must not let the others wait in a step.
                self.resources.begin()
            barrier()
            finish_device_work(self.device)
            started = time.perf_counter()
            self.resources.start_clocks()
            self.clock.start()
            for _ in range(steps):
                if self.step == stretch.stop:
                    used = self.resources.end(epoch, stretch)
                # The last step before the stretch is not timed, so the counters may be asked in it.
                before_end = self.resources.begin if self.step + 1 == stretch.start else None
                images += self._step(epoch, batches, sums, before_end)
            barrier()
            finish_device_work(self.device)
            seconds = time.perf_counter() - started
            resources = self.resources.with_memory(used or self.resources.end(epoch, stretch))
            for name, probe in self.probes.items():
                self.log.write(probe_line(name, probe, epoch, unprobed[name]))
        self._record(self.clock.drain())
        loss, accuracy = means(total(sums))
        evaluates = time.perf_counter()
        held_out = self.passes.evaluate(self.log.alive) if self.trial.window.evaluate else Evaluation()
        self.held_out_accuracy = held_out.accuracy
        evaluated = time.perf_counter() - evaluates
        self.log.write(resources)
        self.log.write(
            EpochLine(
                epoch=epoch,
                steps=steps,
                images=images,
                seconds=seconds,
                complete=steps == order.steps,
                train_loss=loss,
                train_accuracy=accuracy,
                held_out_loss=held_out.loss,
                held_out_accuracy=held_out.accuracy,
                mean_iou=held_out.mean_iou,
                peak_bytes=self.resources.peak_bytes(resources),
                evaluation_seconds=evaluated if self.trial.window.evaluate else None,
                loader_images_per_second=batches.images_per_second,
                loader_reading_seconds=batches.spent.reading if batches.spent else None,
                loader_decoding_seconds=batches.spent.decoding if batches.spent else None,
            )
        )

    def _step(self, epoch: int, batches: Batches, sums: Tensor, before_end: Callable[[], None] | None) -> int:
        """Trains one optimizer step; `before_end` is called inside it, when all of it has been issued.

        Returns:
            Its real images, over all ranks.
        """
        window = self.windows[self.step]
        if window == "explained" and not self.explainer.explaining:
            self.explainer.begin_block()
            barrier()  # else the explained step would wait for a rank whose profiler takes longer to start
            self.clock.start()
        with nullcontext() if self.step else self._start_up_phase(), self.explainer.step(self.step):
            images = self._train_step(epoch, window, batches, sums, before_end)
        self.step += 1
        if window == "explained" and (self.step == len(self.windows) or self.windows[self.step] != "explained"):
            self._read_profile(batches)
        self.log.check()
        return images

    @contextmanager
    def _start_up_phase(self) -> Iterator[None]:
        """Records the first step, which may compile, as a phase of start-up."""
        began = time.perf_counter()
        with extensions.watched() as compiled:
            if self.rehearses:
                self.passes.rehearse_last_step()
                self.log.alive()
            yield
            finish_device_work(self.device)
        self.log.write(PhaseLine(name="first_step", seconds=time.perf_counter() - began, compiled=tuple(compiled)))

    def _train_step(
        self, epoch: int, window: StepWindow, batches: Batches, sums: Tensor, before_end: Callable[[], None] | None
    ) -> int:
        if 0 < self.trial.train.learning_rate_warmup_steps >= self.step:  # else a DeepSpeed file's scheduler sets it
            # Before anything else: one engine takes the optimizer's step inside its last backward.
            self.engine.set_learning_rate(self.trial.learning_rate_at(self.step))
        norms = MicroBatchNorms(self.engine.module) if window == "gradients" else None
        with norms or nullcontext():
            step_loss, own_images, step_images = self._micro_steps(epoch, batches, sums)
        with self.explainer.phase("optimizer"):
            if norms is None:
                self.engine.step()
            else:
                reduced = self.engine.step_with_norm()
        if before_end is not None:
            before_end()
        warmup = self.step < self.trial.window.warmup_steps
        line = partial(StepLine, step=self.step, epoch=epoch, images=sum(own_images), warmup=warmup, window=window)
        self._record(self.clock.mark(line, step_loss))
        if norms is not None:
            self._record_norms(step_images, own_images, norms.total(), reduced)
        return step_images

    def _micro_steps(self, epoch: int, batches: Batches, sums: Tensor) -> tuple[Tensor, list[int], int]:
        """Forward and backward of a step: this rank's mean loss, the real images of its micro-steps, and of all."""
        grad_accum = self.trial.train.grad_accum
        step_loss = torch.zeros((), device=self.device)
        own_images: list[int] = []
        for batch in self.passes.step(batches, epoch=epoch, phase=self.explainer.phase):
            last = len(own_images) == grad_accum - 1
            loss = self.passes.micro_step(batch, sums, last=last, phase=self.explainer.phase)
            step_loss += loss / grad_accum
            own_images.append(batch.real)
        return step_loss, own_images, batch.step_real

    def _unrecorded_step(self, epoch: int, batches: Batches) -> None:
        self._micro_steps(epoch, batches, torch.zeros(3, dtype=torch.float64, device=self.device))
        self.engine.step()

    def _read_profile(self, batches: Batches) -> None:
        """Ends an explained block and pauses training: the loader is held, and the ranks go on together."""
        batches.hold()
        unknown = dict(self.engine.unknown_parts)
        if self.trial.layout.exchanges_in_groups:
            unknown |= {"wait": IN_GROUPS, "wire": IN_GROUPS}
        for line in self.explainer.end_block(self.own.rank):
            self.log.write(line.model_copy(update={"unknown": line.unknown | unknown}))
        barrier()
        batches.go_on()
        self.clock.start()

    def _record(self, timed: list[tuple[LineOf, float, float]]) -> None:
        for line_of, seconds, loss in timed:
            self.log.write(line_of(seconds=seconds, loss=loss))

    def _record_norms(self, images: int, own_images: list[int], unreduced: float, reduced: float) -> None:
        self.log.write(
            gradient_line(
                self.step,
                images=images,
                own_images=own_images,
                world_size=self.own.world_size,
                unreduced=unreduced,
                reduced=reduced,
            )
        )


def _not_begun(probe: Probe, device: torch.device) -> str | None:
    """Begins a probe; returns why it failed, or None."""
    try:
        probe.begin(device)
    except Exception as error:
        return f"begin: {fault(error)}"
    return None


def probe_line(name: str, probe: Probe, epoch: int, failed: str | None) -> ProbeLine:
    """Ends a probe of another package, whose failure ends nothing: what it does not tell is null, with the reason.

    Args:
        name: the probe's name.
        probe: the probe.
        epoch: number of the epoch that is over.
        failed: why it has not begun; None where it has.
    """
    if failed is not None:
        return ProbeLine(probe=name, epoch=epoch, values={}, reason=f"probe {shown(name)}: {failed}")
    values: dict[str, float | None] = {}
    reasons: list[str] = []
    try:
        told: object = probe.end()
        if not isinstance(told, Mapping):
            reasons = [f"end returned {shown(told)}, and no mapping of names to numbers"]
        for key, value in told.items() if isinstance(told, Mapping) else ():
            values[str(key)] = number = _finite(value)
            if number is None:
                reasons.append(f"{shown(str(key))} is {shown(value)}, and no finite number")
    except Exception as error:
        values, reasons = {}, [f"end: {fault(error)}"]
    reason = f"probe {shown(name)}: {'; '.join(reasons)}" if reasons else None
    return ProbeLine(probe=name, epoch=epoch, values=values, reason=reason)


def _finite(value: object) -> float | None:
    """The number, also that of an array or tensor of one; None where it is none, or not finite."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return number if abs(number) < float("inf") else None


def counted_traffic(
    passes: Passes,
    take_step: Callable[[int, Batches], None],
    done: int,
    first_usual: int,
    epoch: int,
    alive: Callable[[], None],
) -> list[TrafficLine]:
    """Counts what some steps send; all ranks take these steps together.

    Args:
        passes: this rank's way through the images.
        take_step: trains one optimizer step on the next batches of an epoch.
        done: steps taken before.
        first_usual: the first step that sends what all later ones do, as far as what came before it goes.
        epoch: the first whose order of images has not been used.
        alive: called after each step.
    """
    counter = TrafficCounter()
    if counter.backend == NO_GROUP:
        return [TrafficLine(step=done, backend=NO_GROUP, collectives=())]
    first = max(first_usual, FIRST_USUAL_STEP)
    step = done
    while step < first + COUNTED_STEPS:
        order = passes.order(epoch)
        with passes.batches(order) as batches:
            for _ in range(min(order.steps, first + COUNTED_STEPS - step)):
                with counter.step(step) if step >= first else nullcontext():
                    take_step(epoch, batches)
                alive()
                step += 1
        epoch += 1
    return counter.lines()
