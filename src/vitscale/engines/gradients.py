"""Tensors in the order of forward and backward: when each is used, and the buckets that gradients fill."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, count
from typing import NamedTuple

from vitscale.trial.model_cost import ParameterShapes
from vitscale.trial.model_counts import Module


class Tensor(NamedTuple):
    """One trainable tensor."""

    shape: tuple[int, ...]
    elements: int
    cast: bool
    """Whether DeepSpeed's autocast sends it in 16 bits: all but norms, tokens, positions, transposed convolutions."""
    module: int
    """Its module's number in the order of forward."""
    block: int | None
    """Number of the wrapped block that holds it; None: no wrapped block does."""
    begins: float
    """Share of a forward's work that is done before its module is used."""
    ends: float
    """The same after its module is used. Its gradient is there after a share of 1 - begins of backward."""


class Filled(NamedTuple):
    """A bucket of gradients, or one gradient."""

    elements: int
    ready: float
    """Share of backward after which its last gradient is there."""


def tensors(shapes: ParameterShapes) -> list[Tensor]:
    """Return all tensors in the order of forward; a module's own are in the reverse of their gradients' order.

    A module takes as long as its products do, and norms take no time. Products of attention count with the last module
    that it takes from, and so come ahead of that in backward.
    """
    modules: list[Module] = []
    block_of_module: list[int | None] = []
    wrapped_blocks = count()
    for block in shapes.each():
        block_number = next(wrapped_blocks) if block.wrapped else None
        modules += block.in_forward
        block_of_module += [block_number] * len(block.in_forward)
    total_macs = sum(module.macs for module in modules)
    macs_so_far = accumulate(module.macs for module in modules)
    ends = [min(1.0, macs / total_macs) for macs in macs_so_far]
    begins = [0.0, *ends[:-1]]  # each module begins where the one before it ends
    model_tensors = []
    for number, module in enumerate(modules):
        for shape in reversed(module.gradients):
            tensor = Tensor(
                shape=shape,
                elements=math.prod(shape),
                cast=module.cast,
                module=number,
                block=block_of_module[number],
                begins=begins[number],
                ends=ends[number],
            )
            model_tensors.append(tensor)
    return model_tensors


def of_backward(forward_tensors: Sequence[Tensor]) -> Iterator[Filled]:
    """Yield the gradient of each tensor, in the order in which backward makes them."""
    return (Filled(tensor.elements, ready=1.0 - tensor.begins) for tensor in reversed(forward_tensors))


def closed_when_full(gradients: Iterable[Filled], limits: Sequence[int]) -> list[Filled]:
    """Return buckets that close as soon as they have as many elements as their limit, as DDP makes them.

    The first bucket has the first limit, the next one the next; the last limit holds for all that follow
    (`compute_bucket_assignment_by_size` in reducer.cpp of torch 2.13).
    """
    buckets: list[Filled] = []
    bucket_elements = 0
    ready = 0.0
    for gradient in gradients:
        bucket_elements += gradient.elements
        ready = gradient.ready
        has_own_limit = len(buckets) < len(limits)
        limit = limits[len(buckets)] if has_own_limit else limits[-1]
        if bucket_elements >= limit:
            buckets.append(Filled(bucket_elements, ready))
            bucket_elements = 0
    if bucket_elements:
        buckets.append(Filled(bucket_elements, ready))
    return buckets


def flushed_before_full(gradients: Iterable[Filled], limit: int) -> list[Filled]:
    """Return buckets that are sent when the next gradient would not fit, as DeepSpeed does it.

    That is in stage_1_and_2.py and stage3.py. A bucket is ready when the gradient that does not fit is there.
    """
    buckets: list[Filled] = []
    bucket_elements = 0
    ready = 0.0
    for gradient in gradients:
        is_too_large = bucket_elements + gradient.elements > limit
        if bucket_elements and is_too_large:
            buckets.append(Filled(bucket_elements, gradient.ready))
            bucket_elements = 0
        bucket_elements += gradient.elements
        ready = gradient.ready
    if bucket_elements:
        buckets.append(Filled(bucket_elements, ready))
    return buckets


def up_to_multiple(elements: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is not below `elements`: 100 up to a multiple of 64 is 128."""
    return -(-elements // multiple) * multiple
