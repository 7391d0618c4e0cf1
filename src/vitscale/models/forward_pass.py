"""One forward pass that shows what a model gives for images of a size, without memory or time where that can be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


def meta_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a tensor without values for each parameter and buffer of a model, by name."""
    return {
        name: torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }


def forward_once(model: nn.Module, shape: tuple[int, int, int, int]) -> Any:
    """Return what a model gives for images of shape [b, c, H, W], in evaluation and without gradients.

    The pass is on meta tensors, which have a shape and no values. Where it fails, it is made again with zeros: some
    models read values, for instance to count tokens.

    Raises:
        Exception: the model does not take such images; any type, from its forward.
    """
    was_training = model.training
    model.eval()  # the running statistics of batch norms stay as they are
    try:
        with torch.no_grad():
            try:
                images_on_meta = torch.empty(shape, device="meta")
                return functional_call(model, meta_tensors(model), (images_on_meta,))
            except Exception:  # whatever a foreign forward does not like about meta tensors
                return model(torch.zeros(shape))
    finally:
        model.train(was_training)
