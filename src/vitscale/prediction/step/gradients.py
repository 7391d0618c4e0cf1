"""Tensors in the order of forward and backward: what share of either is done when, and the buckets gradients fill."""

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
    """Whether DeepSpeed's autocast sends it in 16 bits: not norms, tokens, positions, transposed convolutions."""
    module: int
    """Counted through the model in the order of forward."""
    block: int | None
    """That of the wrapped ones which holds it; None: none does."""
    begins: float
    """Share of the work of a forward before its module is used."""
    ends: float
    """The same, after it is used. So 1 - begins is the share of backward after which its gradient is there."""


class Filled(NamedTuple):
    """One bucket."""

    elements: int
    ready: float
    """Share of backward after which its last gradient is there."""


def tensors(shapes: ParameterShapes) -> list[Tensor]:
    """All tensors in the order of forward, those of a module in the reverse of the order of their gradients.

    A module works for as long as its products take. Those of attention come with the last of what it takes, and so
    ahead of that in backward. Norms take no time.
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


def of_backward(found: Sequence[Tensor]) -> Iterator[Filled]:
    """Gradients in the order in which backward makes them."""
    return (Filled(tensor.elements, 1.0 - tensor.begins) for tensor in reversed(found))


def closed_when_full(gradients: Iterable[Filled], limits: Sequence[int]) -> list[Filled]:
    """Buckets that close as soon as they hold a limit's elements: the first limit, then the next, the last for all.

    As DDP makes them (`compute_bucket_assignment_by_size` in reducer.cpp of torch 2.13).
    """
    return list(_closed(gradients, limits))


def _closed(gradients: Iterable[Filled], limits: Sequence[int]) -> Iterator[Filled]:
    held, ready, made = 0, 0.0, 0
    for gradient in gradients:
        held, ready = held + gradient.elements, gradient.ready
        if held >= limits[min(made, len(limits) - 1)]:
            yield Filled(held, ready)
            held, made = 0, made + 1
    if held:
        yield Filled(held, ready)


def flushed_before_full(gradients: Iterable[Filled], limit: int) -> list[Filled]:
    """Buckets that are sent when the next gradient would not fit: as DeepSpeed does (stage_1_and_2.py, stage3.py)."""
    return list(_flushed(gradients, limit))


def _flushed(gradients: Iterable[Filled], limit: int) -> Iterator[Filled]:
    held, ready = 0, 0.0
    for gradient in gradients:
        if held and held + gradient.elements > limit:
            yield Filled(held, gradient.ready)
            held = 0
        held, ready = held + gradient.elements, gradient.ready
    if held:
        yield Filled(held, ready)
