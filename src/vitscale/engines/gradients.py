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
    """A bucket of gradients, or a single gradient."""

    elements: int
    ready: float
    """Share of backward after which its last gradient is there."""


def tensors(shapes: ParameterShapes) -> list[Tensor]:
    """Return all tensors in the order of forward; a module's own are in the reverse of their gradients' order.

    A module takes as long as its products do, and norms take no time. Products of attention count with the last module
    that it takes from, and so come ahead of that in backward.
    """
    modules: list[Module] = []
    block_by_module: list[int | None] = []
    wrapped_block_numbers = count()
    for block in shapes.each():
        block_number = next(wrapped_block_numbers) if block.wrapped else None
        modules += block.in_forward
        block_by_module += [block_number] * len(block.in_forward)
    total_macs = max(1, sum(module.macs for module in modules))  # a model may multiply nothing
    macs_until_end = accumulate(module.macs for module in modules)
    ends = [min(1.0, macs / total_macs) for macs in macs_until_end]
    begins = [0.0, *ends[:-1]]  # each module begins where the one before it ends
    model_tensors = []
    for number, module in enumerate(modules):
        for shape in reversed(module.gradients):
            tensor = Tensor(
                shape=shape,
                elements=math.prod(shape),
                cast=module.cast,
                module=number,
                block=block_by_module[number],
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

    Example: gradients of 3, 4, 5 and 6 elements with the limits [5, 10] make two buckets, of 7 and 11 elements.

    Args:
        gradients: in the order in which backward makes them.
        limits: elements at which the first bucket closes, the next one, and so on; the last limit holds for all that
            follow (`compute_bucket_assignment_by_size` in reducer.cpp of torch 2.13).
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

    Example: gradients of 3, 4, 5 and 6 elements with a limit of 8 make three buckets, of 7, 5 and 6 elements.

    Args:
        gradients: in the order in which backward makes them.
        limit: most elements of a bucket, unless a single gradient has more.
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
