"""The training of one rank: epochs of optimizer steps, each recorded; evaluation outside every timing window."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from vitscale.datasets import Batch, Batches, EpochOrder, Preprocess, slot_loss
from vitscale.engines import Engine
from vitscale.probes.step_clock import StepClock, step_clock
from vitscale.record import EpochLine, PhaseLine, StepLine
from vitscale.sources import Dataset, Split
from vitscale.store import RankLog
from vitscale.trial import Trial
from vitscale.worker.group import barrier, total
from vitscale.worker.place import Place


@dataclass(frozen=True)
class _Mark:
    step: int
    epoch: int
    images: int


class Training:
    """Trains one rank to the end of its trial and writes what it sees to `log`."""

    def __init__(
        self, trial: Trial, place: Place, dataset: Dataset, engine: Engine, device: torch.device, log: RankLog
    ) -> None:
        self.trial, self.place, self.dataset, self.engine, self.device, self.log = (
            trial, place, dataset, engine, device, log,
        )  # fmt: skip
        self.clock: StepClock[_Mark] = step_clock(device)
        self.preprocess = Preprocess(
            trial.data.name, trial.model.image_size, augment=trial.data.augment, seed=trial.train.seed
        )
        self.step = 0
        steps = trial.window.steps
        self.last_step = trial.window.warmup_steps + steps if steps is not None else None

    def run(self) -> None:
        """All epochs, or all steps, whichever the trial names."""
        epoch = 0
        while not self._over(epoch):
            self._epoch(epoch)
            epoch += 1

    def _over(self, epoch: int) -> bool:
        if self.last_step is not None:
            return self.step >= self.last_step
        return epoch >= (self.trial.train.epochs or 0)

    def _epoch(self, epoch: int) -> None:
        order = self._order(len(self.dataset.train), epoch, fraction=self.trial.data.fraction)
        steps = order.steps
        if self.last_step is not None:
            steps = min(steps, self.last_step - self.step)
        # [loss summed over real images, correct among them, real images], on the device until the epoch is over.
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        batches = self._batches(self.dataset.train, order)
        with batches:
            barrier()
            self._finish_device_work()
            started = time.perf_counter()
            self.clock.start()
            for _ in range(steps):
                self._step(epoch, batches, sums)
            barrier()
            self._finish_device_work()
            seconds = time.perf_counter() - started
        self._record(self.clock.drain())
        loss, accuracy, images = _means(total(sums))
        held_out_loss, held_out_accuracy = self._evaluate() if self.trial.window.evaluate else (None, None)
        self.log.write(
            EpochLine(
                epoch=epoch,
                steps=steps,
                images=images,
                seconds=seconds,
                complete=steps == order.steps,
                train_loss=loss,
                train_accuracy=accuracy,
                held_out_loss=held_out_loss,
                held_out_accuracy=held_out_accuracy,
                peak_bytes=self._peak_bytes(),
            )
        )

    def _step(self, epoch: int, batches: Batches, sums: Tensor) -> None:
        began = time.perf_counter()
        grad_accum = self.trial.train.grad_accum
        step_loss = torch.zeros((), device=self.device)
        real_images = 0
        for micro_step in range(grad_accum):
            batch = next(batches)
            loss = self._micro_step(epoch, batch, sums, last=micro_step == grad_accum - 1)
            step_loss += loss / grad_accum
            real_images += batch.real
        self.engine.step()
        self._record(self.clock.mark(_Mark(self.step, epoch, real_images), step_loss))
        if self.step == 0:
            self._finish_device_work()
            self.log.write(PhaseLine(name="first_step", seconds=time.perf_counter() - began))
        self.step += 1
        self.log.check()

    def _micro_step(self, epoch: int, batch: Batch, sums: Tensor, *, last: bool) -> Tensor:
        images, labels, weights = self._on_device(batch, epoch=epoch, training=True)

        def loss_of(logits: Tensor) -> Tensor:
            losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
            with torch.no_grad():
                sums.add_(_sums(losses, logits, labels, weights))
            return slot_loss(losses, weights, batch.step_real, self.place.world_size, self.trial.train.grad_accum)

        return self.engine.micro_step(images, loss_of, last=last)

    def _evaluate(self) -> tuple[float | None, float | None]:
        """Loss and accuracy on the held-out images, each counted once, over all ranks."""
        order = self._order(len(self.dataset.held_out), 0, fraction=1.0, grad_accum=1, drop_last=False)
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        with self._batches(self.dataset.held_out, order) as batches:
            for batch in batches:
                self.log.alive()
                images, labels, weights = self._on_device(batch, epoch=0, training=False)
                logits = self.engine.evaluate(images)
                losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
                sums += _sums(losses, logits, labels, weights)
        loss, accuracy, _ = _means(total(sums))
        return loss, accuracy

    def _order(
        self, samples: int, epoch: int, *, fraction: float, grad_accum: int | None = None, drop_last: bool | None = None
    ) -> EpochOrder:
        train = self.trial.train
        return EpochOrder(
            samples=samples,
            fraction=fraction,
            seed=train.seed,
            epoch=epoch,
            world_size=self.place.world_size,
            micro_batch=train.micro_batch,
            grad_accum=train.grad_accum if grad_accum is None else grad_accum,
            drop_last=train.drop_last if drop_last is None else drop_last,
        )

    def _batches(self, split: Split, order: EpochOrder) -> Batches:
        return Batches(
            split, order, rank=self.place.rank, workers=self.trial.data.workers, pin=self.device.type == "cuda"
        )

    def _on_device(self, batch: Batch, *, epoch: int, training: bool) -> tuple[Tensor, Tensor, Tensor]:
        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(self.device, non_blocking=True)

        images = self.preprocess(moved(batch.images), moved(batch.ids), epoch=epoch, training=training)
        return images, moved(batch.labels), moved(batch.weights)

    def _record(self, timed: list[tuple[_Mark, float, float]]) -> None:
        for mark, seconds, loss in timed:
            warmup = mark.step < self.trial.window.warmup_steps
            self.log.write(
                StepLine(
                    step=mark.step, epoch=mark.epoch, seconds=seconds, images=mark.images, loss=loss, warmup=warmup
                )
            )

    def _finish_device_work(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _peak_bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _sums(losses: Tensor, logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """[3]: summed loss, correct answers and real images of one micro-batch; padding has weight 0."""
    correct = (logits.argmax(dim=1) == labels) * weights
    return torch.stack([(losses * weights).sum(), correct.sum(), weights.sum()]).double()


def _means(sums: Tensor) -> tuple[float | None, float | None, int]:
    loss, correct, images = sums.tolist()
    if images == 0:
        return None, None, 0
    return loss / images, correct / images, int(images)
