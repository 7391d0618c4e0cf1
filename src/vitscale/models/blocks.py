"""A model's repeated blocks: which modules they are, and activation checkpointing of one of them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint as recomputed

from vitscale.models import named

_HEAD_NAMES = (named.DECODE_HEAD, named.AUXILIARY_HEAD, "neck", "head", "segmentation_head")
"""Names that models of transformers, and others, have for what follows their layers."""


def blocks_of(model: nn.Module) -> Sequence[nn.Module]:
    """Return the model's repeated blocks; [] where no list of modules holds two or more, all of one class.

    They are the modules of such a list, outside heads, that has the most parameters, and those of their class in other
    such lists. In a vision transformer these are its layers, in a Swin transformer its stages, in a MobileViT the
    layers of all its stages. The convolutions of a decoder's head are none, though they may outweigh all layers of a
    small one.
    """
    lists = list(_uniform_lists(model))
    if not lists:
        return []
    # Among equals the first is the outermost.
    largest = max(lists, key=lambda modules: sum(map(_parameter_count, modules)))
    block_class = type(largest[0])
    blocks = dict.fromkeys(module for module in chain(*lists) if type(module) is block_class)
    inner_modules: set[nn.Module] = set()
    for block in blocks:
        inner_modules.update(module for module in block.modules() if module is not block)
    return [block for block in blocks if block not in inner_modules]


def _uniform_lists(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield the modules of each list outside heads that holds two or more, all of one class."""
    in_heads: set[nn.Module] = set()
    for name in _HEAD_NAMES:
        head = getattr(model, name, None)
        if isinstance(head, nn.Module):
            in_heads.update(head.modules())
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and module not in in_heads:
            children = list(_called_modules(module))
            classes = {type(child) for child in children}
            if len(children) > 1 and len(classes) == 1:
                yield children


def _called_modules(container: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a container that are called.

    They are its children. A list or dict among them that has no forward is not called itself, but its children are.
    """
    for child in container.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict) and type(child).forward is nn.Module.forward:
            yield from _called_modules(child)
        else:
            yield child


def _parameter_count(module: nn.Module) -> int:
    """Return the elements of all parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters())


def checkpoint_block(block: nn.Module) -> None:
    """Make a block keep only its inputs in forward, and compute the rest again in backward; it is changed in place."""
    # The re-entrant form would hide parameters from DDP, and it needs inputs that require gradients.
    options: dict[str, Any] = {"use_reentrant": False}
    norms = counting_norms(block)
    if norms:
        options["context_fn"] = lambda: (nullcontext(), _statistics_set_aside(norms))
    block.forward = functools.partial(recomputed, block.forward, **options)


def counting_norms(block: nn.Module) -> list[nn.Module]:
    """Return all norms of a block if one of them keeps running statistics, which a repetition would count again."""
    norms = [module for module in block.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    return [*norms] if any(norm.track_running_stats for norm in norms) else []


@contextmanager
def _statistics_set_aside(norms: Sequence[nn.Module]) -> Iterator[None]:
    """The context in which norms update copies of their buffers; behind it they have the buffers of before."""
    originals = [norm._buffers for norm in norms]
    for norm in norms:
        norm._buffers = {name: None if buffer is None else buffer.clone() for name, buffer in norm._buffers.items()}
    try:
        yield
    finally:
        for norm, buffers in zip(norms, originals, strict=True):
            norm._buffers = buffers
