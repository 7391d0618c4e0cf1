"""What a rank does with images, micro-batch by micro-batch; nothing is measured here, only named as it passes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vitscale.datasets import Batch, Batches, EpochOrder, Preprocess, slot_loss
from vitscale.engines import Engine
from vitscale.probes.explainer import Phase, no_phase
from vitscale.shares import micro_batches
from vitscale.sources import Dataset, Split
from vitscale.trial import Trial
from vitscale.worker.group import total
from vitscale.worker.place import Place


class Passes:
    """One rank's passes over its share of the images."""

    def __init__(
        self, trial: Trial, place: Place, dataset: Dataset, engine: Engine, device: torch.device, seed: int
    ) -> None:
        """`seed`: of this run, for the order and the augmentation."""
        self.trial, self.place, self.dataset, self.engine, self.device, self.seed = (
            trial, place, dataset, engine, device, seed,
        )  # fmt: skip
        self.preprocess = Preprocess(
            trial.data.name,
            trial.model.image_size,
            augment=trial.data.augment,
            seed=seed,
            statistics=dataset.statistics,
        )

    def order(self, epoch: int) -> EpochOrder:
        """The order of the training images in an epoch."""
        train = self.trial.train
        return self._order(
            len(self.dataset.train),
            epoch,
            fraction=self.trial.data.fraction,
            grad_accum=train.grad_accum,
            drop_last=train.drop_last,
        )

    def batches(self, order: EpochOrder) -> Batches:
        """This rank's batches of an epoch of training."""
        return self._batches(self.dataset.train, order)

    def micro_step(self, batch: Batch, sums: Tensor, *, epoch: int, last: bool, phase: Phase) -> Tensor:
        """Forward and backward of one micro-batch; adds to `sums` [3] what `means` takes.

        Returns:
            The detached loss (scalar).
        """
        images, labels, weights = self._on_device(batch, epoch=epoch, training=True, phase=phase)

        def loss_of(logits: Tensor) -> Tensor:
            losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
            with torch.no_grad():
                sums.add_(_sums(losses, logits, labels, weights))
            return slot_loss(losses, weights, batch.step_real, self.place.world_size, self.trial.train.grad_accum)

        return self.engine.micro_step(images, loss_of, last=last, phase=phase)

    def rehearse_last_step(self) -> None:
        """Takes a micro-batch as small as those of an epoch's last step, where that is smaller, through the engine.

        So that compiled blocks know its shape before any step is timed. Weights, gradients, buffers and random numbers
        are afterwards as they were. All ranks do it, or none.
        """
        order = self.order(epoch=0)
        if order.steps == 0:
            return
        last = order.slot(order.steps - 1, 0, self.place.rank)
        if last.step_real == order.slot(0, 0, self.place.rank).step_real:
            return
        with self.batches(order) as batches:
            batch = next(batches)
        n = len(last.ids)
        small = batch._replace(
            images=batch.images[:n], labels=batch.labels[:n], ids=batch.ids[:n], weights=batch.weights[:n]
        )
        images, _, _ = self._on_device(small, epoch=0, training=True, phase=no_phase)
        buffers = [(buffer, buffer.clone()) for buffer in self.engine.module.buffers()]
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            self.engine.rehearse(images)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)

    def evaluate(self, alive: Callable[[], None]) -> tuple[float | None, float | None]:
        """Loss and accuracy on the held-out images, each counted once, over all ranks; `alive` is called per batch."""
        order = self._order(len(self.dataset.held_out), 0, fraction=1.0, grad_accum=1, drop_last=False)
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        with self._batches(self.dataset.held_out, order) as batches:
            for batch in batches:
                alive()
                images, labels, weights = self._on_device(batch, epoch=0, training=False, phase=no_phase)
                logits = self.engine.evaluate(images)
                losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
                sums += _sums(losses, logits, labels, weights)
        loss, accuracy, _ = means(total(sums))
        return loss, accuracy

    def _order(self, samples: int, epoch: int, *, fraction: float, grad_accum: int, drop_last: bool) -> EpochOrder:
        return EpochOrder(
            samples=samples,
            fraction=fraction,
            seed=self.seed,
            epoch=epoch,
            micro_batches=micro_batches(self.trial.train, self.place.world_size),
            grad_accum=grad_accum,
            drop_last=drop_last,
        )

    def _batches(self, split: Split, order: EpochOrder) -> Batches:
        return Batches(
            split, order, rank=self.place.rank, workers=self.trial.data.workers, pin=self.device.type == "cuda"
        )

    def _on_device(self, batch: Batch, *, epoch: int, training: bool, phase: Phase) -> tuple[Tensor, Tensor, Tensor]:
        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(self.device, non_blocking=True)

        with phase("h2d"):
            source, ids, labels, weights = map(moved, (batch.images, batch.ids, batch.labels, batch.weights))
        with phase("forward"):
            images = self.preprocess(source, ids, epoch=epoch, training=training)
        return images, labels, weights


def means(sums: Tensor) -> tuple[float | None, float | None, int]:
    """Loss, accuracy and images from [loss summed over real images, correct among them, real images]."""
    loss, correct, images = sums.tolist()
    if images == 0:
        return None, None, 0
    return loss / images, correct / images, int(images)


def _sums(losses: Tensor, logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """[3]: summed loss, correct answers and real images of one micro-batch; padding has weight 0."""
    correct = (logits.argmax(dim=1) == labels) * weights
    return torch.stack([(losses * weights).sum(), correct.sum(), weights.sum()]).double()
