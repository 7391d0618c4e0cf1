"""The repeated blocks of a model, and what is done to each of them: checkpointing, compiling, sharding."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import nn
from torch.utils.checkpoint import checkpoint

from vitscale.errors import RequestError, shown
from vitscale.trial.trial import TrainSpec


def blocks_of(model: nn.Module) -> Sequence[nn.Module]:
    """The model's repeated blocks: the children of that list of like modules that holds the most parameters.

    In a vision transformer these are its layers, in a Swin transformer its stages. Empty where no list holds two
    modules of one class.
    """
    lists = [
        children
        for module in model.modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        and len(children := list(module.children())) > 1
        and len({type(child) for child in children}) == 1
    ]
    # The first of equals is the outermost.
    return max(lists, key=lambda children: sum(map(_size, children)), default=[])


def with_options(model: nn.Module, train: TrainSpec) -> nn.Module:
    """Activation checkpointing, then compiling, block by block and in place; names of parameters stay as they are.

    1. checkpointing goes innermost: what wraps a block then sees one call in forward and its repetition in backward;
    2. compiling comes after it, so that the compiler sees the repetition and may choose what to keep;
    3. whatever distributes comes later still, outside both: its hooks gather weights and must not be compiled.

    Block by block, because one compiled block serves all its like, and because FSDP2 and ZeRO-3 gather block by block.

    Raises:
        RequestError: an option is set, and the model has no repeated blocks.
    """
    if not (train.activation_checkpointing or train.compile):
        return model
    blocks = blocks_of(model)
    if not blocks:
        option = "activation_checkpointing" if train.activation_checkpointing else "compile"
        raise RequestError(
            f"train.{option} works block by block, and {shown(type(model).__name__)} has no list of two or more "
            "modules of one class",
            next_step=f"Keep the model's blocks in a torch.nn.ModuleList or Sequential, or leave {option} out",
        )
    for block in blocks:
        if train.activation_checkpointing:
            # Not the re-entrant form: that one hides parameters from DDP and needs inputs that require gradients.
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        if train.compile:
            # One graph for each of the few shapes. Left to itself the compiler makes one for all sizes of batch as soon
            # as it meets a second one, the last step's, and takes that for the full batches too from then on.
            block.compile(dynamic=False)
    return model


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
