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
    """All tensors in the order of forward; a module's own are in the reverse of their gradients' order.

    A module takes as long as its products do, and norms take no time. Products of attention count with the last module
    that it takes from, and so come ahead of that in backward.
    """
    rows: list[tuple[Module, int | None]] = []
    blocks = count()
    for block in shapes.each():
        number = next(blocks) if block.wrapped else None
        rows += [(module, number) for module in block.in_forward]
    total = sum(module.macs for module, _ in rows)
    ends = [min(1.0, done / total) for done in accumulate(module.macs for module, _ in rows)]
    spans = zip([0.0, *ends[:-1]], ends, strict=True)
    return [
        Tensor(shape, math.prod(shape), module.cast, number, block, begins, after)
        for number, ((module, block), (begins, after)) in enumerate(zip(rows, spans, strict=True))
        for shape in reversed(module.gradients)
    ]


def of_backward(made: Sequence[Tensor]) -> Iterator[Filled]:
    """Gradients in the order in which backward makes them."""
    return (Filled(tensor.elements, 1.0 - tensor.begins) for tensor in reversed(made))


def closed_when_full(gradients: Iterable[Filled], limits: Sequence[int]) -> list[Filled]:
    """Buckets that close as soon as they hold as many elements as their limit, as DDP makes them.

    The first bucket has the first limit, the next one the next; the last limit holds for all that follow
    (`compute_bucket_assignment_by_size` in reducer.cpp of torch 2.13).
    """
    buckets: list[Filled] = []
    held, ready = 0, 0.0
    for gradient in gradients:
        held, ready = held + gradient.elements, gradient.ready
        if held >= limits[min(len(buckets), len(limits) - 1)]:
            buckets.append(Filled(held, ready))
            held = 0
    return [*buckets, Filled(held, ready)] if held else buckets


def flushed_before_full(gradients: Iterable[Filled], limit: int) -> list[Filled]:
    """Buckets that are sent when the next gradient would not fit, as DeepSpeed does (stage_1_and_2.py, stage3.py)."""
    buckets: list[Filled] = []
    held, ready = 0, 0.0
    for gradient in gradients:
        if held and held + gradient.elements > limit:
            buckets.append(Filled(held, gradient.ready))
            held = 0
        held, ready = held + gradient.elements, gradient.ready
    return [*buckets, Filled(held, ready)] if held else buckets


def up_to_multiple(elements: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `elements`."""
    return -(-elements // multiple) * multiple
