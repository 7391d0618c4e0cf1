"""A rank's passes over images: training by micro-batches, and evaluation. Nothing is measured here; phases are named.

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

from vitscale.datasets.batches import Batch, Batches, EpochOrder
from vitscale.datasets.preprocess import Preprocess
from vitscale.datasets.scenes import Scenes, sliding
from vitscale.engines.base import Engine
from vitscale.errors import RequestError
from vitscale.models.batch_norm import average_statistics, norms_of
from vitscale.models.losses import NOT_COUNTED, label_losses, resized_to_labels, slot_loss, tally
from vitscale.models.named import AuxiliaryLogits
from vitscale.probes.steps import PhaseContext, no_phase
from vitscale.sources import Dataset, Split
from vitscale.sources.base import IGNORED
from vitscale.trial.parallel import even_parts
from vitscale.trial.rank_batches import micro_batches
from vitscale.trial.trial import Trial
from vitscale.worker.group import total
from vitscale.worker.rank_process import RankInfo


class MicroBatch(NamedTuple):
    """One rank's images and labels of one micro-step on the device. Behind the images that count may lie padding."""

    images: Callable[[], Tensor]
    """Turns the images, which are kept as they are stored, into what the model takes."""
    labels: Tensor
    """Labels as `counted_labels` gives them."""
    real_images: int
    """Images that count in this micro-batch."""
    step_images: int
    """Images that count in the whole optimizer step, over all ranks."""
    loss_divisor: int | Tensor
    """Number by which the step's loss is divided: `step_images` or, in segmentation, the pixels that count in it."""


class Evaluation(NamedTuple):
    """Figures over the held-out images, each image counted once. A figure that does not exist for the task is None."""

    loss: float | None = None
    accuracy: float | None = None
    """Share of images, or of pixels, that are classified right."""
    mean_iou: float | None = None


class Passes:
    """One rank's passes over its share of the images."""

    def __init__(
        self, trial: Trial, rank: RankInfo, dataset: Dataset, engine: Engine, device: torch.device, seed: int
    ) -> None:
        """`seed`: this run's seed for the order and the augmentation."""
        self.trial = trial
        self.dataset = dataset
        self.engine = engine
        self.device = device
        self.seed = seed
        self.data_ranks = trial.layout.data
        """Number of ranks, or of groups that share a model, that take images of their own."""
        self.coordinates = trial.layout.coordinates(rank.rank)
        """This rank's index along each axis by which ranks share the work: data, sequence, tensor, pipeline."""
        self.is_segmentation = trial.model.task == "segmentation"
        """Whether pixels rather than images have labels."""
        self.classes = trial.model.num_classes
        self.labelling_ranks = trial.layout.sequence if self.is_segmentation else 1
        """Number of ranks that share the tokens of every image, and label the pixels of some images each."""
        self.norms = norms_of(engine.module)
        auxiliary_weight = trial.model.auxiliary_weight if self.is_segmentation else 0.0
        self.auxiliary = AuxiliaryLogits(engine.module, auxiliary_weight)
        self.preprocess = _preprocess_for(trial, dataset, seed)

    def order(self, epoch: int) -> EpochOrder:
        """Returns the order of the training images in an epoch."""
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
        """Returns this rank's batches of an epoch of training."""
        return self._batches_of_split(self.dataset.train, order)

    def step(self, batches: Iterator[Batch], *, epoch: int, phase: PhaseContext) -> Iterator[MicroBatch]:
        """Yields the micro-batches of an optimizer step on the device.

        Each batch is read when its micro-batch is asked for. In segmentation all are read at once: the loss is divided
        by the number of labelled pixels of all ranks, which must be known before the first backward.
        """
        grad_accum = self.trial.train.grad_accum
        if self.is_segmentation:
            yield from self._segmentation_step(batches, grad_accum, epoch=epoch, phase=phase)
            return
        for _ in range(grad_accum):
            with phase("data"):
                batch = next(batches)
            yield self._on_device(batch, epoch=epoch, training=True, phase=phase)

    def _segmentation_step(
        self, batches: Iterator[Batch], grad_accum: int, *, epoch: int, phase: PhaseContext
    ) -> Iterator[MicroBatch]:
        """Yields a step's micro-batches, whose loss is divided by the step's pixels that count, over all ranks."""
        with phase("data"):
            on_host = [next(batches) for _ in range(grad_accum)]
        on_device = [self._on_device(batch, epoch=epoch, training=True, phase=phase) for batch in on_host]
        with phase("forward"):
            # The number stays on the device, so nobody waits for it. A step without any such pixel has a loss of 0.
            rank_pixels = torch.stack([(batch.labels >= 0).sum() for batch in on_device]).sum()
            # All ranks that share a model count the same pixels.
            step_pixels = (total(rank_pixels) // self.trial.parallel.ranks_per_model).clamp(min=1)
        for batch in on_device:
            yield batch._replace(loss_divisor=step_pixels)

    def micro_step(self, batch: MicroBatch, sums: Tensor, *, last: bool, phase: PhaseContext) -> Tensor:
        """Does forward and backward of one micro-batch, and adds its loss and its correct answers to `sums`.

        Args:
            batch: the micro-batch.
            sums: sum [3] of `tally`s of the epoch so far, on the device.
            last: whether it is its step's last one, after which gradients are there.
            phase: context that names what is done.

        Returns:
            The detached loss (scalar).
        """
        with phase("forward"):
            images = batch.images()
        labels = batch.labels[self._images_labelled_here(len(batch.labels))]
        self._set_counted_images(batch.real_images, len(batch.labels))

        def loss_of(logits: Tensor) -> Tensor:
            if self.classes is not None and logits.shape[1] != self.classes:
                message = (
                    f"the model tells {logits.shape[1]:,} classes apart, and model.num_classes is {self.classes:,}"
                )
                raise RequestError(message, next_step="Give it one logit for each class of the data")
            losses = label_losses(logits, labels)
            with torch.no_grad():
                sums.add_(tally(losses, logits, labels))
            auxiliary_logits = self.auxiliary.take()
            if auxiliary_logits is not None:
                losses = losses + self.auxiliary.weight * label_losses(auxiliary_logits.float(), labels)
            ranks = self.data_ranks * self.labelling_ranks
            return slot_loss(losses, batch.loss_divisor, ranks, self.trial.train.grad_accum)

        return self.engine.micro_step(images, loss_of, last=last, phase=phase)

    def rehearse_last_step(self) -> None:
        """Sends a micro-batch of the size of an epoch's last step through the engine, where that step is smaller.

        Blocks are then compiled for its shape, and for the number of images that count in batch norms, before any step
        is timed. Afterwards weights, gradients, buffers and random numbers are as before. All ranks do it, or none.
        """
        order = self.order(epoch=0)
        if order.steps == 0:
            return
        data_rank = self.coordinates.data
        last_step = order.steps - 1
        first_slot = order.slot(0, 0, data_rank)
        last_slot = order.slot(last_step, 0, data_rank)
        if last_slot.step_real == first_slot.step_real:
            return
        slot_images = len(last_slot.ids)
        images = self._first_images(order, slot_images)
        buffers_and_copies = [(buffer, buffer.clone()) for buffer in self.engine.module.buffers()]
        micro_steps = self.trial.train.grad_accum if self.norms else 1
        cuda_devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(cuda_devices):
            for micro_step in range(micro_steps):
                self._set_counted_images(order.slot(last_step, micro_step, data_rank).real, slot_images)
                self.engine.rehearse(images)
                self.auxiliary.take()
        with torch.no_grad():
            for buffer, copy_before in buffers_and_copies:
                buffer.copy_(copy_before)

    def _first_images(self, order: EpochOrder, count: int) -> Tensor:
        """Returns the first `count` images of this rank in an epoch, ready for the model."""
        with self.batches(order) as batches:
            batch = next(batches)
        part = batch._replace(images=batch.images[:count], labels=batch.labels[:count], ids=batch.ids[:count])
        return self._on_device(part, epoch=0, training=True, phase=no_phase).images()

    def evaluate(self, alive: Callable[[], None]) -> Evaluation:
        """Measures the model on the held-out images over all ranks; `alive` is called per batch."""
        order = self._held_out_order()
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        classes = (self.trial.model.num_classes or 0) if self.is_segmentation else 0
        confusions = torch.zeros(classes, classes, dtype=torch.int64, device=self.device)
        average_statistics(self.norms)
        with self._batches_of_split(self.dataset.held_out, order) as batches:
            for batch in batches:
                alive()
                on_device = self._on_device(batch, epoch=0, training=False, phase=no_phase)
                logits = self._held_out_logits(on_device.images())
                if logits is None:
                    continue  # the rank of the last stage counts
                labels = on_device.labels
                if not self._evaluates_by_windows:
                    labels = labels[self._images_labelled_here(len(labels))]
                sums += tally(label_losses(logits, labels), logits, labels)
                if self.is_segmentation:
                    confusions += confusion(logits, labels, classes)
        held_out = means(total(sums))
        if not self.is_segmentation:
            return Evaluation(held_out.loss, held_out.accuracy)
        pixels = scores(total(confusions))
        return Evaluation(held_out.loss, pixels.accuracy, pixels.mean_iou)

    def _held_out_order(self) -> EpochOrder:
        """Returns the order of the held-out images, each once."""
        samples = len(self.dataset.held_out)
        if self.dataset.summary.sizes_vary:
            # One at a time, each in its own size: no image's scores depend on what it is evaluated with, and all ranks
            # call the model, which may gather its weights, equally often.
            return EpochOrder(samples, seed=0, epoch=0, micro_batches=[1] * self.data_ranks, grad_accum=1)
        sizes = micro_batches(self.trial.train, self.data_ranks)
        return EpochOrder(samples, seed=self.seed, epoch=0, micro_batches=sizes, grad_accum=1)

    def _held_out_logits(self, images: Tensor) -> Tensor | None:
        """Returns the logits of held-out images, whole or by sliding windows; None where this rank has none."""
        if not self._evaluates_by_windows:
            return self.engine.evaluate(images)
        heads: list[Any] = [module for module in self.engine.module.modules() if hasattr(module, "every_image")]
        for head in heads:  # each rank joins the windows of a whole image
            head.every_image = True
        logits = sliding(self.engine.evaluate, images, self.trial.model.image_size)
        for head in heads:
            head.every_image = False
        return logits

    @property
    def _evaluates_by_windows(self) -> bool:
        """Whether held-out images are evaluated by windows that slide over them."""
        return self.trial.data.evaluation == "sliding"

    def _set_counted_images(self, real: int, images: int) -> None:
        """Sets in batch norms how many of the coming images count, of those that this rank labels.

        Args:
            real: images that count, over the ranks that share their tokens; they come first.
            images: all images, padding included.
        """
        if not self.norms:
            return
        labelled = self._images_labelled_here(images)
        # Of 8 images of which the first 5 count, a rank that labels 4 to 7 labels 1 that counts.
        real_images = min(max(0, real - labelled.start), labelled.stop - labelled.start)
        for norm in self.norms:
            norm.real = real_images

    def _images_labelled_here(self, images: int) -> slice:
        """Returns the positions, among `images` images, of those that this rank labels.

        Ranks that share the tokens of every image (`labelling_ranks`) label equal parts of the images.
        """
        return even_parts(images, self.labelling_ranks)[self.coordinates.sequence % self.labelling_ranks]

    def _batches_of_split(self, split: Split, order: EpochOrder) -> Batches:
        """Returns this rank's batches of a split; pinned for copies to a GPU."""
        pin = self.device.type == "cuda"
        return Batches(split, order, rank=self.coordinates.data, workers=self.trial.data.workers, pin=pin)

    def _on_device(self, batch: Batch, *, epoch: int, training: bool, phase: PhaseContext) -> MicroBatch:
        """Copies a batch to the device without waiting for it, and prepares its images and labels there."""
        with phase("h2d"):
            images = batch.images.to(self.device, non_blocking=True)
            ids = batch.ids.to(self.device, non_blocking=True)
            labels = batch.labels.to(self.device, non_blocking=True)
        with phase("forward"):
            make_images, labels = self.preprocess.prepare(images, labels, ids, epoch=epoch, training=training)
            labels = counted_labels(labels, batch.real)
        return MicroBatch(
            images=make_images,
            labels=labels,
            real_images=batch.real,
            step_images=batch.step_real,
            loss_divisor=batch.step_real,
        )


def _preprocess_for(trial: Trial, dataset: Dataset, seed: int) -> Preprocess | Scenes:
    """Returns what makes the model's inputs of stored images: crops where their sizes vary."""
    image_size = trial.model.image_size
    augment = trial.data.augment
    if dataset.summary.sizes_vary:
        return Scenes(image_size, augment=augment, seed=seed)
    return Preprocess(trial.data.name, image_size, augment=augment, seed=seed, statistics=dataset.statistics)


def counted_labels(labels: Tensor, real: int) -> Tensor:
    """Returns labels as int64 in which those that do not count are `NOT_COUNTED`; the shape stays.

    Args:
        labels: int64 [n], or masks uint8 [n, H, W] with `IGNORED`.
        real: how many images count, from the first on; the others are padding.
    """
    if labels.ndim > 1:
        labels = labels.long().masked_fill(labels == IGNORED, NOT_COUNTED)
    return torch.cat([labels[:real], torch.full_like(labels[real:], NOT_COUNTED)])


class Means(NamedTuple):
    """Mean loss and accuracy over the labels that count; None where there are none, or where it is not known."""

    loss: float | None
    accuracy: float | None


def means(sums: Tensor) -> Means:
    """Returns the mean loss and accuracy from the sum [3] of `tally`s. Waits for the device."""
    loss, correct, count = sums.tolist()
    if count == 0:
        return Means(loss=None, accuracy=None)
    accuracy = None if math.isnan(correct) else correct / count
    return Means(loss / count, accuracy)


def confusion(logits: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Returns how often each class (column) was the answer to each label (row): int64 [classes, classes].

    Only labels that count are in it.
    """
    answers = resized_to_labels(logits, labels).argmax(dim=1)
    counted = labels >= 0
    cells = labels * classes + answers  # indices into the flattened matrix: with 4 classes, label 2 and answer 1 give 9
    return torch.bincount(cells[counted], minlength=classes**2).view(classes, classes)


class PixelScores(NamedTuple):
    """Figures of segmentation; None where no pixel counts."""

    mean_iou: float | None
    accuracy: float | None


def scores(confusions: Tensor) -> PixelScores:
    """Returns mean IoU and accuracy from a confusion matrix [classes, classes]. Waits for the device.

    A class's intersection over union is TP / (TP + FP + FN) (Everingham et al., "The PASCAL Visual Object Classes
    Challenge", IJCV 2010, section 4.4); the mean is over the classes that are in a label or in an answer.
    """
    true_positives = confusions.diagonal().double()  # [classes], as the next two
    unions = confusions.sum(dim=0) + confusions.sum(dim=1) - true_positives
    occurs = unions > 0
    if not occurs.any():
        return PixelScores(mean_iou=None, accuracy=None)
    mean_iou = float((true_positives[occurs] / unions[occurs]).mean())
    return PixelScores(mean_iou, accuracy=float(true_positives.sum() / confusions.sum()))
