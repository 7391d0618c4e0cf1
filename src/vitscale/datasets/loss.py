"""The loss of a micro-step, scaled so that every image, or every pixel, of an optimizer step counts alike.

Labels are of images [n] or of pixels [n, H, W]. Those that count are 0 or more: padding images, and pixels that are to
be ignored, are `NOT_COUNTED`, which torch's cross-entropy leaves out of the loss and of the gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, interpolate

from vitscale.sources.base import IGNORED

NOT_COUNTED = -100


def counted_labels(labels: Tensor, weights: Tensor) -> Tensor:
    """Labels as int64, `NOT_COUNTED` where they do not count.

    Args:
        labels: int64 [n], or masks uint8 [n, H, W] with `IGNORED`.
        weights: [n], 1 or 0; see `Slot`.
    """
    if labels.ndim > 1:
        labels = labels.long().masked_fill(labels == IGNORED, NOT_COUNTED)
    return labels.masked_fill(weights.view(-1, *(1,) * (labels.ndim - 1)) == 0, NOT_COUNTED)


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
