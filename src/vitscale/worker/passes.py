"""What a rank does with images, micro-batch by micro-batch; nothing is measured here, its phases are only named.

The loss is scaled so that every image, or every pixel, of an optimizer step counts alike. Labels are of images [n] or
of pixels [n, H, W]. Those that count are 0 or more: padding images, and pixels that are to be ignored, are
`NOT_COUNTED`, which torch's cross-entropy leaves out of the loss and of the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, interpolate

from vitscale.datasets.batches import Batch, Batches, EpochOrder
from vitscale.datasets.preprocess import Preprocess
from vitscale.datasets.scenes import Scenes, sliding
from vitscale.engines.base import Engine
from vitscale.errors import RequestError
from vitscale.models.batch_norm import average_statistics, norms_of
from vitscale.models.named import AuxiliaryLogits
from vitscale.probes.steps import Phase, no_phase
from vitscale.sources import Dataset, Split
from vitscale.sources.base import IGNORED
from vitscale.trial.parallel import even_parts
from vitscale.trial.rank_batches import micro_batches
from vitscale.trial.trial import Trial
from vitscale.worker.group import total
from vitscale.worker.rank_process import RankInfo


class MicroBatch(NamedTuple):
    """A slot's images and labels on the device."""

    images: Callable[[], Tensor]
    """Turns the images, which are kept as they are stored, into what the model takes."""
    labels: Tensor
    """Labels as `counted_labels` gives them."""
    real: int
    """Images that count in this slot."""
    step_real: int
    """Images that count in the whole optimizer step, over all ranks."""
    step_count: int | Tensor
    """What the step's loss is divided by: its real images, or those of their pixels that count."""


class Evaluation(NamedTuple):
    """Figures of the held-out images, each counted once; one is None where it does not exist or has no meaning."""

    loss: float | None = None
    accuracy: float | None = None
    """Share of images, or of pixels, that are classified right."""
    mean_iou: float | None = None


class Passes:
    """One rank's passes over its share of the images."""

    def __init__(
        self, trial: Trial, own: RankInfo, dataset: Dataset, engine: Engine, device: torch.device, seed: int
    ) -> None:
        """`seed`: this run's seed for the order and the augmentation."""
        self.trial, self.dataset, self.engine, self.device, self.seed = trial, dataset, engine, device, seed
        # Ranks that share a model take the same images.
        self.data_ranks, self.at = trial.layout.data, trial.layout.coordinates(own.rank)
        self.segments, self.classes = trial.model.task == "segmentation", trial.model.num_classes
        self.labelling = trial.layout.sequence if self.segments else 1
        """Number of ranks that share the tokens of every image, and label the pixels of some images each."""
        self.norms = norms_of(engine.module)
        self.auxiliary = AuxiliaryLogits(engine.module, trial.model.auxiliary_weight if self.segments else 0.0)
        size, augment = trial.model.image_size, trial.data.augment
        self.preprocess: Preprocess | Scenes = (
            Scenes(size, augment=augment, seed=seed)
            if dataset.summary.sizes_vary
            else Preprocess(trial.data.name, size, augment=augment, seed=seed, statistics=dataset.statistics)
        )

    def order(self, epoch: int) -> EpochOrder:
        """The order of the training images in an epoch."""
        train = self.trial.train
        return EpochOrder(
            len(self.dataset.train),
            fraction=self.trial.data.fraction,
            seed=self.seed,
            epoch=epoch,
            micro_batches=micro_batches(train, self.data_ranks),
            grad_accum=train.grad_accum,
            drop_last=train.drop_last,
        )

    def batches(self, order: EpochOrder) -> Batches:
        """This rank's batches of an epoch of training."""
        return self._batches(self.dataset.train, order)

    def step(self, batches: Iterator[Batch], *, epoch: int, phase: Phase) -> Iterator[MicroBatch]:
        """The micro-batches of an optimizer step.

        Each is taken when it is asked for. In segmentation all are taken at once: what the loss is divided by must be
        known before the first backward, and only the masks of all ranks tell it.
        """
        grad_accum = self.trial.train.grad_accum
        at_once = grad_accum if self.segments else 1
        for _ in range(grad_accum // at_once):
            with phase("data"):
                taken = [next(batches) for _ in range(at_once)]
            ready = [self._on_device(batch, epoch=epoch, training=True, phase=phase) for batch in taken]
            if not self.segments:
                yield from ready
                continue
            with phase("forward"):
                # The number stays on the device, so nobody waits for it. A step without any such pixel has a loss of 0.
                pixels = total(torch.stack([(batch.labels >= 0).sum() for batch in ready]).sum())
                count = (pixels // self.trial.parallel.ranks_per_model).clamp(min=1)
            yield from (batch._replace(step_count=count) for batch in ready)

    def micro_step(self, batch: MicroBatch, sums: Tensor, *, last: bool, phase: Phase) -> Tensor:
        """Forward and backward of one micro-batch; adds to `sums` [3] what `means` takes.

        Returns:
            The detached loss (scalar).
        """
        with phase("forward"):
            images = batch.images()
        labels = batch.labels[self._labelled(len(batch.labels))]
        self._tell_norms(batch.real, len(batch.labels))

        def loss_of(logits: Tensor) -> Tensor:
            if self.classes is not None and logits.shape[1] != self.classes:
                what = f"the model tells {logits.shape[1]:,} classes apart, and model.num_classes is {self.classes:,}"
                raise RequestError(what, next_step="Give it one logit for each class of the data")
            losses = label_losses(logits, labels)
            with torch.no_grad():
                sums.add_(tally(losses, logits, labels))
            if (second := self.auxiliary.take()) is not None:
                losses = losses + self.auxiliary.weight * label_losses(second.float(), labels)
            ranks = self.data_ranks * self.labelling
            return slot_loss(losses, batch.step_count, ranks, self.trial.train.grad_accum)

        return self.engine.micro_step(images, loss_of, last=last, phase=phase)

    def rehearse_last_step(self) -> None:
        """Takes a micro-batch as small as those of an epoch's last step, where that is smaller, through the engine.

        Compiled blocks then know its shape before any step is timed, and that of what batch norms in them leave out of
        it in each micro-step. Weights, gradients, buffers and random numbers are afterwards as they were. All ranks do
        it, or none.
        """
        order = self.order(epoch=0)
        if order.steps == 0:
            return
        last = order.slot(order.steps - 1, 0, self.at.data)
        if last.step_real == order.slot(0, 0, self.at.data).step_real:
            return
        with self.batches(order) as batches:
            batch = next(batches)
        n = len(last.ids)
        small = batch._replace(images=batch.images[:n], labels=batch.labels[:n], ids=batch.ids[:n])
        images = self._on_device(small, epoch=0, training=True, phase=no_phase).images()
        buffers = [(buffer, buffer.clone()) for buffer in self.engine.module.buffers()]
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            for micro_step in range(self.trial.train.grad_accum if self.norms else 1):
                self._tell_norms(order.slot(order.steps - 1, micro_step, self.at.data).real, n)
                self.engine.rehearse(images)
                self.auxiliary.take()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)

    def evaluate(self, alive: Callable[[], None]) -> Evaluation:
        """Measures the model on the held-out images over all ranks; `alive` is called per batch."""
        order = self._held_out_order()
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        classes = (self.trial.model.num_classes or 0) if self.segments else 0
        confused = torch.zeros(classes, classes, dtype=torch.int64, device=self.device)
        average_statistics(self.norms)
        with self._batches(self.dataset.held_out, order) as batches:
            for batch in batches:
                alive()
                moved = self._on_device(batch, epoch=0, training=False, phase=no_phase)
                logits = self._logits(moved.images())
                if logits is None:
                    continue  # the rank of the last stage counts
                labels = moved.labels if self._slides else moved.labels[self._labelled(len(moved.labels))]
                sums += tally(label_losses(logits, labels), logits, labels)
                if self.segments:
                    confused += confusion(logits, labels, classes)
        loss, accuracy = means(total(sums))
        if not self.segments:
            return Evaluation(loss, accuracy)
        mean_iou, accuracy = scores(total(confused))
        return Evaluation(loss, accuracy, mean_iou)

    def _held_out_order(self) -> EpochOrder:
        samples = len(self.dataset.held_out)
        if self.dataset.summary.sizes_vary:
            # One at a time, each in its own size: no image's scores depend on what it is evaluated with, and all ranks
            # call the model, which may gather its weights, equally often.
            return EpochOrder(samples, seed=0, epoch=0, micro_batches=[1] * self.data_ranks, grad_accum=1)
        sizes = micro_batches(self.trial.train, self.data_ranks)
        return EpochOrder(samples, seed=self.seed, epoch=0, micro_batches=sizes, grad_accum=1)

    def _logits(self, images: Tensor) -> Tensor | None:
        """Logits of held-out images, as the trial evaluates them."""
        if not self._slides:
            return self.engine.evaluate(images)
        heads: list[Any] = [module for module in self.engine.module.modules() if hasattr(module, "every_image")]
        for head in heads:  # each rank joins the windows of a whole image
            head.every_image = True
        logits = sliding(self.engine.evaluate, images, self.trial.model.image_size)
        for head in heads:
            head.every_image = False
        return logits

    @property
    def _slides(self) -> bool:
        return self.trial.data.evaluation == "sliding"

    def _tell_norms(self, real: int, images: int) -> None:
        """Tells batch norms how many images count of those that this rank labels of the coming `images`."""
        part = self._labelled(images)
        for norm in self.norms:
            norm.real = min(max(0, real - part.start), part.stop - part.start)

    def _labelled(self, images: int) -> slice:
        """The part of `images` images that this rank labels."""
        return even_parts(images, self.labelling)[self.at.sequence % self.labelling]

    def _batches(self, split: Split, order: EpochOrder) -> Batches:
        return Batches(split, order, rank=self.at.data, workers=self.trial.data.workers, pin=self.device.type == "cuda")

    def _on_device(self, batch: Batch, *, epoch: int, training: bool, phase: Phase) -> MicroBatch:
        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(self.device, non_blocking=True)

        with phase("h2d"):
            images, ids, labels = map(moved, (batch.images, batch.ids, batch.labels))
        with phase("forward"):
            ready, labels = self.preprocess.prepare(images, labels, ids, epoch=epoch, training=training)
            labels = counted_labels(labels, batch.real)
        return MicroBatch(ready, labels, batch.real, batch.step_real, batch.step_real)


NOT_COUNTED = -100


def counted_labels(labels: Tensor, real: int) -> Tensor:
    """Labels as int64, `NOT_COUNTED` where they do not count.

    Args:
        labels: int64 [n], or masks uint8 [n, H, W] with `IGNORED`.
        real: how many images count, from the first on.
    """
    if labels.ndim > 1:
        labels = labels.long().masked_fill(labels == IGNORED, NOT_COUNTED)
    return torch.cat([labels[:real], torch.full_like(labels[real:], NOT_COUNTED)])


def label_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of each label, in the shape of the labels; 0 where they do not count.

    Args:
        logits: [n, classes], or [n, classes, h, w], resized to the labels' size where that is another.
        labels: labels from `counted_labels`.
    """
    return cross_entropy(_resized(logits, labels), labels, reduction="none", ignore_index=NOT_COUNTED)


def slot_loss(losses: Tensor, step_count: int | Tensor, world_size: int, grad_accum: int) -> Tensor:
    """The value on which a rank calls backward: `sum(l_i) * (N * A) / R`.

    Data-parallel engines average gradients over N ranks and divide by A micro-steps. Summed over all N * A slots of a
    step that is `sum over slots of slot_loss / (N * A) = sum of the R losses that count / R`: exactly the mean over
    what counts, however unevenly it fills the slots: in the last step of an epoch, because ranks of unlike speed take
    unequal shares, or because masks leave pixels out. The mean of each slot's own mean would not be that.

    Args:
        losses: losses from `label_losses`.
        step_count: R, labels that count in the optimizer step, over all ranks and micro-steps; a scalar tensor where
            only the masks tell.
        world_size: N.
        grad_accum: A.
    """
    if isinstance(step_count, Tensor):
        step_count = step_count.double()  # with an int64 the quotient would be float32
    return (losses.sum() * (world_size * grad_accum / step_count)).to(losses.dtype)


def tally(losses: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """[3]: summed loss, correct answers and labels of one micro-batch, over the labels that count; input of `means`.

    Correct pixels are not looked for here: that takes as long as some of the training, and `confusion` counts them.
    """
    counted = labels >= 0
    correct = (logits.argmax(dim=1) == labels).sum() if labels.ndim == 1 else losses.new_full((), torch.nan)
    return torch.stack([losses.sum().double(), correct.double(), counted.sum().double()])


def means(sums: Tensor) -> tuple[float | None, float | None]:
    """Loss and accuracy from the sum of `tally`s; None where nothing counts, or where it is not known."""
    loss, correct, count = sums.tolist()
    if count == 0:
        return None, None
    return loss / count, None if math.isnan(correct) else correct / count


def confusion(logits: Tensor, labels: Tensor, classes: int) -> Tensor:
    """[classes, classes] int64: how often each class (column) answered each label (row), for labels that count."""
    answers = _resized(logits, labels).argmax(dim=1)
    counted = labels >= 0
    return torch.bincount((labels * classes + answers)[counted], minlength=classes**2).view(classes, classes)


def scores(confused: Tensor) -> tuple[float | None, float | None]:
    """Mean IoU and accuracy from a confusion matrix; None where nothing was counted.

    A class's intersection over union is TP / (TP + FP + FN) (Everingham et al., "The PASCAL Visual Object Classes
    Challenge", IJCV 2010, section 4.4); the mean is over the classes that are in a label or in an answer.
    """
    right = confused.diagonal().double()
    unions = confused.sum(dim=0) + confused.sum(dim=1) - right
    there = unions > 0
    if not there.any():
        return None, None
    return float((right[there] / unions[there]).mean()), float(right.sum() / confused.sum())


def _resized(logits: Tensor, labels: Tensor) -> Tensor:
    """Logits resized to the labels, as transformers' models do for their own losses."""
    if logits.ndim == 4 and logits.shape[2:] != labels.shape[1:]:
        logits = interpolate(logits, size=labels.shape[1:], mode="bilinear", align_corners=False)
    return logits
