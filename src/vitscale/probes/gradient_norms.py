"""Measures squared norms of the gradients of one micro-batch and of a whole step, for the gradient noise scale."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vitscale.store.records import GradientLine


class MicroBatchNorms:
    """Sums the squared norms of the gradients of single micro-batches on this rank, as backward makes them.

    Use it in a `with` statement around the micro-steps of one optimizer step. A hook on each parameter sees what this
    very backward adds to the parameter's gradient: before earlier micro-steps are added to it, and before any engine
    exchanges it. Outside the statement nothing is left of the hooks.
    """

    def __init__(self, module: nn.Module) -> None:
        """`module` is the model that is trained, without any wrapper."""
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._handles: list[RemovableHandle] = []
        self._squares: list[Tensor] = []
        """Squared norms (scalars on the device), one for each parameter and micro-batch."""

    def __enter__(self) -> Self:
        self._squares.clear()
        self._handles = [parameter.register_hook(self._add_gradient) for parameter in self._parameters]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        for parameter in self._parameters:
            # torch keeps the empty table of a removed hook and looks into it in every later backward.
            if not parameter._backward_hooks:
                parameter._backward_hooks = None

    def total(self) -> float:
        """Returns the sum over all micro-batches since `__enter__`; nan where there was none. Waits for the device."""
        return _sum_of_squares(self._squares)

    def _add_gradient(self, gradient: Tensor) -> None:
        """Takes what a backward adds to a parameter's gradient; torch calls this as a hook."""
        self._squares.append(_squared_norm(gradient))


def squared_norm(gradients: Iterable[Tensor | None]) -> float:
    """Returns the squared L2 norm of all gradients as one vector; nan where there is none. Waits for the device."""
    return _sum_of_squares([_squared_norm(gradient) for gradient in gradients if gradient is not None])


def gradient_line(
    step: int, *, images: int, own_images: Sequence[int], world_size: int, unreduced: float, reduced: float
) -> GradientLine:
    """Returns the record of a step's norms, for gradients that are means over their images.

    With N = `world_size`, R = `images`, n = the images of a micro-batch and A = the number of micro-steps: backward
    starts from the sum of a micro-batch's n losses times N / R (that is `slot_loss` / A). So a hook sees the mean
    gradient of these n images times n N / R. Over A micro-steps, the mean of the squared norms of the mean gradients is
    `unreduced * (R / (n N))**2 / A`.

    Args:
        step: its number.
        images: real images of the step, over all ranks and micro-steps.
        own_images: real images of each of this rank's micro-steps.
        world_size: number of ranks.
        unreduced: `MicroBatchNorms.total` of the step.
        reduced: the squared norm of the gradient that the optimizer got.
    """
    reason = _why_no_norms(own_images, unreduced, reduced)
    small_images = max(1, own_images[0])
    small_norm = unreduced * (images / (small_images * world_size)) ** 2 / len(own_images)
    return GradientLine(
        step=step,
        small_images=small_images,
        small_squared_norm=None if reason else small_norm,
        big_images=images,
        big_squared_norm=None if reason else reduced,
        reason=reason,
    )


def _why_no_norms(own_images: Sequence[int], unreduced: float, reduced: float) -> str | None:
    """Returns why the norms of a step say nothing of its gradients' noise; None where they do."""
    if 0 in own_images or len(set(own_images)) > 1:
        return "the step holds padding: its gradients are not of equally many images"
    if not (math.isfinite(unreduced) and math.isfinite(reduced)):
        return "the gradient was not finite"
    return None


def _squared_norm(gradient: Tensor) -> Tensor:
    """Returns the squared L2 norm of one tensor (scalar, float64), without waiting for the device."""
    # float64, because squares of bfloat16 gradients underflow, and millions of them are summed.
    norm: Tensor = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64)
    return norm.square()


def _sum_of_squares(squares: list[Tensor]) -> float:
    """Returns the sum of scalars; nan where there are none. Waits for the device."""
    return float(torch.stack(squares).sum()) if squares else math.nan
