"""The loss of a micro-step, scaled so that every image of an optimizer step counts alike."""

from __future__ import annotations

from torch import Tensor


def slot_loss(losses: Tensor, weights: Tensor, step_real: int, world_size: int, grad_accum: int) -> Tensor:
    """What a rank calls backward on: `sum(w_i * l_i) * (N * A) / R`.

    Data-parallel engines average gradients over N ranks and divide by A micro-steps. Summed over all N * A slots of a
    step that is `sum over slots of slot_loss / (N * A) = sum of the R real losses / R`: exactly the mean over the
    images that count, however unevenly they fill the slots: in the last step of an epoch, or because ranks of unlike
    speed take unequal shares. The mean of each slot's own mean would not be that. Padding has w = 0 and adds nothing to
    the gradient. (A model that mixes images, as batch norm does, still sees it.)

    Args:
        losses: [n], one loss per entry of the slot.
        weights: [n], 1 or 0; see `Slot`.
        step_real: R, images that count in the optimizer step.
        world_size: N.
        grad_accum: A.
    """
    return (losses * weights).sum() * (world_size * grad_accum / step_real)
