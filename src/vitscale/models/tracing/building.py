"""Builds the model of a request on meta tensors, as it trains: in its dtype, with its frozen and checkpointed parts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from vitscale.models import build
from vitscale.models.batch_norm import over_real_images
from vitscale.models.blocks import blocks_of, checkpoint_block
from vitscale.models.tracing.errors import TraceError
from vitscale.trial.model_card import TraceRequest
from vitscale.trial.model_spec import ModelSpec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def meta_model(request: TraceRequest) -> nn.Module:
    """Return the request's model on meta, in its weights' dtype, in training mode; checkpointing is not yet applied.

    Raises:
        RequestError: the model cannot be built.
    """
    model = _build(request.model.model_copy(update={"weights": None}))
    if request.model.task == "segmentation":
        over_real_images(model, synchronised=False)  # as engines do before anything else
    model.to(DTYPES[request.weight_dtype])
    _move_to_meta(model)
    return model.train()


def _build(spec: ModelSpec) -> nn.Module:
    """Build a model on meta, which takes no memory; where that fails, as for code that reads values, on the CPU."""
    with suppress(Exception), torch.device("meta"):
        return build(spec)
    return build(spec)


def _move_to_meta(model: nn.Module) -> None:
    """Move parameters and buffers to meta, in place; those that modules share stay shared (`Module.to` unties them)."""
    moved: dict[Tensor, Tensor] = {}
    for module in model.modules():
        _move_each(module._parameters, moved)
        _move_each(module._buffers, moved)


def _move_each(tensors_by_name: dict[str, Any], moved: dict[Tensor, Tensor]) -> None:
    """Replace tensors by those on meta.

    Args:
        tensors_by_name: a module's parameters or buffers, None where it has no such tensor; changed in place.
        moved: tensors that were moved before -> the same on meta; those that are moved now are added.
    """
    for name, tensor in tensors_by_name.items():
        if tensor is None or tensor.is_meta:
            continue
        if tensor not in moved:
            moved[tensor] = _on_meta(tensor)
        tensors_by_name[name] = moved[tensor]


def _on_meta(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape and dtype on meta; a parameter for a parameter."""
    on_meta = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(on_meta, requires_grad=tensor.requires_grad)
    return on_meta


def checkpoint_blocks(model: nn.Module, inner_context: Callable[[nn.Module], AbstractContextManager[None]]) -> None:
    """Make the model's blocks compute their forward again in backward, as engines do.

    Args:
        model: its blocks are changed in place.
        inner_context: block -> the context that is entered around its forward, in forward and in the repetition.

    Raises:
        TraceError: the model has no repeated blocks.
    """
    blocks = blocks_of(model)
    if not blocks:
        raise TraceError("checkpointing works block by block, and the model has no list of two or more like modules")
    for block in blocks:
        _enter_around_forward(block, inner_context)
        checkpoint_block(block)


def _enter_around_forward(block: nn.Module, context: Callable[[nn.Module], AbstractContextManager[None]]) -> None:
    """Replace a block's forward by one that runs inside a new `context` of the block."""
    forward = block.forward

    def forward_in_context(*arguments: object, **options: object) -> object:
        with context(block):
            return forward(*arguments, **options)

    block.forward = forward_in_context
