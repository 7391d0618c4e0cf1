"""Trains one rank: epochs of optimizer steps, each recorded; evaluation lies outside every timing window."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from vitscale.base.plugins import known
from vitscale.datasets.batches import Batches
from vitscale.engines import checks
from vitscale.engines.base import Engine
from vitscale.engines.step_schedule import windows
from vitscale.probes import EpochMeter
from vitscale.probes.gradient_norms import MicroBatchNorms, gradient_line
from vitscale.probes.traffic import NO_GROUP
from vitscale.sources import Dataset
from vitscale.store import RankLog
from vitscale.store.records import EpochLine, TrafficLine
from vitscale.trial.trial import Trial
from vitscale.worker.group import barrier, total
from vitscale.worker.meters import begin_meters, end_meters
from vitscale.worker.passes import Evaluation, Passes, means
from vitscale.worker.rank_process import RankInfo
from vitscale.worker.recorder import EpochMeasures, StepRecorder

IN_GROUPS = "ranks exchange in groups, and who waits for whom in which is not told apart"


class _StepGradients(NamedTuple):
    """What is known of a step once its gradients are there, before the optimizer's step."""

    loss: Tensor
    """This rank's mean loss (scalar)."""
    rank_images: list[int]
    """Real images of each of this rank's micro-steps."""
    step_images: int
    """Real images of the step, over all ranks."""


class Training:
    """Trains one rank to the end of its trial, and writes its record."""

    def __init__(
        self,
        trial: Trial,
        rank: RankInfo,
        dataset: Dataset,
        engine: Engine,
        device: torch.device,
        log: RankLog,
        seed: int,
    ) -> None:
        """Prepares to train; nothing is read or computed yet.

        Args:
            trial: the trial.
            rank: which rank this is.
            dataset: its images.
            engine: holds the model and its optimizer.
            device: what it computes on.
            log: its record.
            seed: this run's seed, for the order and the augmentation.
        """
        self.trial = trial
        self.rank = rank
        self.engine = engine
        self.device = device
        self.log = log
        self.passes = Passes(trial, rank, dataset, engine, device, seed)
        self.step_limit = None if trial.window.steps is None else trial.window.warmup_steps + trial.window.steps
        """Number of steps to train; None: whole epochs."""
        per_epoch = self.passes.order(epoch=0).steps
        self.rehearses = trial.train.compile and (self.step_limit is None or self.step_limit >= per_epoch)
        """Whether steps of another shape would else be compiled among the timed ones."""
        planned_steps = self.step_limit
        if planned_steps is None:
            planned_steps = per_epoch * (trial.train.epochs or 0)
        self.recorder = StepRecorder(trial, rank, device, log, windows(trial, planned_steps, per_epoch))
        self.meters: dict[str, EpochMeter] = {
            name: known("meter", name, {}, "begin", "end") for name in trial.window.meters
        }
        self.held_out_accuracy: float | None = None

    @property
    def step(self) -> int:
        """Number of the step under way, and between two steps that of the next one."""
        return self.recorder.step

    def run(self) -> None:
        """Trains all epochs or all steps, whichever the trial names, or until its target accuracy is reached.

        Then it trains some steps more, to count what they send.
        """
        epoch = 0
        try:
            while not self._is_over(epoch):
                self._train_epoch(epoch)
                epoch += 1
            self._count_traffic(epoch)
        except BaseException:
            self.recorder.abort()
            raise
        self.recorder.close()

    def _is_over(self, epoch: int) -> bool:
        """Whether training ends before epoch number `epoch`."""
        if self.step_limit is not None:
            return self.step >= self.step_limit
        target = self.trial.train.target_accuracy
        # Accuracy is reduced over the ranks, so all of them decide alike.
        if target is not None and self.held_out_accuracy is not None and self.held_out_accuracy >= target:
            return True
        return epoch >= (self.trial.train.epochs or 0)

    def _train_epoch(self, epoch: int) -> None:
        """Trains an epoch, or as much of it as the trial has steps left; evaluates; records both."""
        order = self.passes.order(epoch)
        steps = order.steps
        if self.step_limit is not None:
            steps = min(steps, self.step_limit - self.step)
        sums = self._zero_sums()
        images = 0
        with self.passes.batches(order) as batches:
            failures = begin_meters(self.meters, self.device)
            self.recorder.begin_epoch(epoch, range(self.step, self.step + steps))
            if self.rehearses and self.step == 0:
                self._rehearse()
            for _ in range(steps):
                images += self._train_step(batches, epoch, sums)
            barrier()
            measures = self.recorder.end_epoch()
            for line in end_meters(self.meters, epoch, failures):
                self.log.write(line)
        self._evaluate_and_record(
            epoch, batches, sums, measures, steps=steps, images=images, complete=steps == order.steps
        )

    def _train_step(self, batches: Batches, epoch: int, sums: Tensor) -> int:
        """Trains one optimizer step, and records it.

        Args:
            batches: the epoch's batches; those of the step are next.
            epoch: number of the epoch.
            sums: sum [3] of `tally`s of the epoch so far, to which the step's are added.

        Returns:
            Its real images, over all ranks.
        """
        recorder = self.recorder
        step = recorder.step
        recorder.begin_step()
        warmup_steps = self.trial.train.learning_rate_warmup_steps
        if warmup_steps > 0 and step <= warmup_steps:  # without a warm-up a DeepSpeed file's scheduler may set the rate
            # Before anything else: one engine takes the optimizer's step inside its last backward.
            self.engine.set_learning_rate(self.trial.learning_rate_at(step))
        norms = MicroBatchNorms(self.engine.module) if recorder.window == "gradients" else None
        with norms or nullcontext():
            gradients = self._accumulate_gradients(batches, epoch, sums)
        with recorder.phase("optimizer"):
            if norms is None:
                self.engine.step()
            else:
                reduced_squared_norm = self.engine.step_with_norm()
        recorder.end_step(sum(gradients.rank_images), gradients.loss)
        if norms is not None:
            self.log.write(
                gradient_line(
                    step,
                    images=gradients.step_images,
                    own_images=gradients.rank_images,
                    world_size=self.rank.world_size,
                    unreduced=norms.total(),
                    reduced=reduced_squared_norm,
                )
            )
        if recorder.has_profile:
            self._write_profile(batches)
        return gradients.step_images

    def _accumulate_gradients(self, batches: Batches, epoch: int, sums: Tensor) -> _StepGradients:
        """Does forward and backward of a step's micro-steps; arguments as in `_train_step`.

        No batch is left on the device at the optimizer's step.
        """
        grad_accum = self.trial.train.grad_accum
        phase = self.recorder.phase
        step_loss = torch.zeros((), device=self.device)
        rank_images: list[int] = []
        for batch in self.passes.step(batches, epoch=epoch, phase=phase):
            is_last = len(rank_images) == grad_accum - 1
            loss = self.passes.micro_step(batch, sums, last=is_last, phase=phase)
            step_loss += loss / grad_accum
            rank_images.append(batch.real_images)
        return _StepGradients(step_loss, rank_images, batch.step_images)

    def _rehearse(self) -> None:
        """Lets compiled blocks know the shape of an epoch's last step; its time counts as part of the first step."""
        self.recorder.begin_first_step()
        self.passes.rehearse_last_step()
        self.log.alive()

    def _write_profile(self, batches: Batches) -> None:
        """Records the explained steps that are over. The loader's threads stand still meanwhile."""
        unknown_parts = dict(self.engine.unknown_parts)
        if checks.exchanges_in_groups(self.trial):
            unknown_parts |= {"wait": IN_GROUPS, "wire": IN_GROUPS}
        batches.hold()
        self.recorder.write_profile(lambda unknown: {**unknown, **unknown_parts})
        batches.go_on()

    def _evaluate_and_record(
        self,
        epoch: int,
        batches: Batches,
        sums: Tensor,
        measures: EpochMeasures,
        *,
        steps: int,
        images: int,
        complete: bool,
    ) -> None:
        """Evaluates the model after an epoch, if the trial asks for it, and records the epoch.

        Args:
            epoch: its number.
            batches: its batches, closed.
            sums: its sum of `tally`s, on the device.
            measures: what was measured.
            steps: its optimizer steps.
            images: real images in them, over all ranks.
            complete: whether all images were trained on.
        """
        train_means = means(total(sums))
        began = time.perf_counter()
        held_out = self.passes.evaluate(self.log.alive) if self.trial.window.evaluate else Evaluation()
        evaluation_seconds = time.perf_counter() - began
        loader_seconds = batches.spent
        reading_seconds = loader_seconds.reading if loader_seconds is not None else None
        decoding_seconds = loader_seconds.decoding if loader_seconds is not None else None
        self.held_out_accuracy = held_out.accuracy
        self.log.write(measures.resources)
        self.log.write(
            EpochLine(
                epoch=epoch,
                steps=steps,
                images=images,
                seconds=measures.wall_seconds,
                complete=complete,
                train_loss=train_means.loss,
                train_accuracy=train_means.accuracy,
                held_out_loss=held_out.loss,
                held_out_accuracy=held_out.accuracy,
                mean_iou=held_out.mean_iou,
                peak_bytes=self.recorder.resources.peak_bytes(measures.resources),
                evaluation_seconds=evaluation_seconds if self.trial.window.evaluate else None,
                loader_images_per_second=batches.images_per_second,
                loader_reading_seconds=reading_seconds,
                loader_decoding_seconds=decoding_seconds,
            )
        )

    def _count_traffic(self, epoch: int) -> None:
        """Trains some steps more, on all ranks, to count what they send; these steps are not recorded.

        Args:
            epoch: number of the first epoch whose order of images has not been used.
        """
        if self.recorder.backend is None:
            self.log.write(TrafficLine(step=self.step, backend=NO_GROUP, collectives=()))
            return
        has_evaluated = self.held_out_accuracy is not None
        # FSDP2 keeps the weights of its root gathered after an evaluation, and does not gather them in the next step.
        steps = self.recorder.count_traffic(unusual_steps=1 if has_evaluated else 0)
        sums = self._zero_sums()
        while steps > 0:
            order = self.passes.order(epoch)
            epoch_steps = min(order.steps, steps)
            with self.passes.batches(order) as batches:
                for _ in range(epoch_steps):
                    self._train_step(batches, epoch, sums)
            steps -= epoch_steps
            epoch += 1

    def _zero_sums(self) -> Tensor:
        """Returns zeros [3] to which the `tally`s of an epoch are added; they stay on the device until it is over."""
        return torch.zeros(3, dtype=torch.float64, device=self.device)
