"""Builds the model of a request on meta tensors, as it trains: in its dtype, with its frozen and checkpointed parts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

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
    model = _built(request.model.model_copy(update={"weights": None}))
    if request.model.task == "segmentation":
        over_real_images(model, synchronised=False)  # as engines do before anything else
    model.to(DTYPES[request.weight_dtype])
    _move_to_meta(model)
    return model.train()


def _built(spec: ModelSpec) -> nn.Module:
    """Build on meta, which takes no memory; where the building reads values, on the CPU."""
    with suppress(Exception), torch.device("meta"):
        return build(spec)
    return build(spec)


def _move_to_meta(model: nn.Module) -> None:
    """Move parameters and buffers to meta, in place; those that modules share stay shared (`Module.to` unties them)."""
    moved: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                if parameter not in moved:
                    on_meta = torch.empty_like(parameter, device="meta")
                    moved[parameter] = nn.Parameter(on_meta, requires_grad=parameter.requires_grad)
                module._parameters[name] = moved[parameter]  # type: ignore[assignment]  # made above
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                if buffer not in moved:
                    moved[buffer] = torch.empty_like(buffer, device="meta")
                module._buffers[name] = moved[buffer]


def checkpoint_blocks(model: nn.Module, inner_context: Callable[[], AbstractContextManager[None]]) -> None:
    """Make the model's blocks compute their forward again in backward, as engines do.

    Args:
        model: its blocks are changed in place.
        inner_context: entered around a block's forward, in forward and in the repetition.

    Raises:
        TraceError: the model has no repeated blocks.
    """
    blocks = blocks_of(model)
    if not blocks:
        raise TraceError("checkpointing works block by block, and the model has no list of two or more like modules")
    for block in blocks:
        _enter_around_forward(block, inner_context)
        checkpoint_block(block)


def _enter_around_forward(block: nn.Module, context: Callable[[], AbstractContextManager[None]]) -> None:
    forward = block.forward

    def forward_in_context(*arguments: object, **options: object) -> object:
        with context():
            return forward(*arguments, **options)

    block.forward = forward_in_context
