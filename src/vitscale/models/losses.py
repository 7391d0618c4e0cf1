"""The loss of a micro-batch: the cross-entropy of its labels, scaled so that each label of a step counts alike."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, interpolate

NOT_COUNTED = -100
"""Label of images and pixels that do not count: torch's default for labels that cross-entropy ignores."""


def label_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the cross-entropy of each label, in the shape of the labels; 0 for labels that do not count.

    Args:
        logits: [n, classes], or [n, classes, h, w], which are resized to the labels' size if it is another.
        labels: labels from `worker.passes.counted_labels`.
    """
    return cross_entropy(resized_to_labels(logits, labels), labels, reduction="none", ignore_index=NOT_COUNTED)


def slot_loss(losses: Tensor, step_count: int | Tensor, world_size: int, grad_accum: int) -> Tensor:
    """Returns the value on which a rank calls backward: `sum(losses) * (N * A) / R`.

    A slot is what one rank trains in one micro-step; a step has N * A of them. Data-parallel engines average gradients
    over N ranks and divide them by A micro-steps. So the gradient of a step is that of `sum of slot_loss over all slots
    / (N * A)`, which is `sum of the R losses that count / R`: the mean over what counts, however unevenly that fills
    the slots. They are filled unevenly in the last step of an epoch, where faster ranks take larger shares, and where
    masks leave pixels out. The mean of the slots' own means would then be another value.

    Args:
        losses: losses from `label_losses`.
        step_count: R, the number of labels that count in the optimizer step, over all ranks and micro-steps. It is a
            scalar tensor in segmentation, where it is known on the device alone.
        world_size: N.
        grad_accum: A.
    """
    if isinstance(step_count, Tensor):
        step_count = step_count.double()  # with an int64 the quotient would be float32
    return (losses.sum() * (world_size * grad_accum / step_count)).to(losses.dtype)


def tally(losses: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """Returns [summed loss, correct answers, labels] of one micro-batch, over the labels that count: float64 [3].

    The sum of these over micro-batches is the input of `worker.passes.means`. In segmentation the correct answers are
    NaN: to count them takes as long as a part of the training, and `worker.passes.confusion` does so in evaluation.
    """
    counted = labels >= 0
    is_segmentation = labels.ndim > 1
    correct = losses.new_full((), torch.nan) if is_segmentation else (logits.argmax(dim=1) == labels).sum()
    return torch.stack([losses.sum().double(), correct.double(), counted.sum().double()])


def resized_to_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the logits, resized to the labels as transformers' models do for their own losses."""
    if logits.ndim == 4 and logits.shape[2:] != labels.shape[1:]:
        logits = interpolate(logits, size=labels.shape[1:], mode="bilinear", align_corners=False)
    return logits
