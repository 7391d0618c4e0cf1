"""Tensors in the order of forward and backward: what share of either is done when, and the buckets gradients fill."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from vitscale.model_spec import ParameterShapes

_AFTER_ATTENTION = 10
"""From the end of a block's shapes: the output projection, what follows it and the norms, which hold no attention."""
_NORMS = slice(-8, -4)
"""Of a block's shapes."""


class Tensor(NamedTuple):
    """One trainable tensor."""

    shape: tuple[int, ...]
    elements: int
    lone: bool
    """Of a norm, a token or a position: what autocast leaves in fp32."""
    begins: float
    """Share of the work of a forward before it is used."""
    ends: float
    """The same, after it is used. So 1 - begins is the share of backward after which its gradient is there."""


class Filled(NamedTuple):
    """One bucket."""

    elements: int
    ready: float
    """Share of backward after which its last gradient is there."""


def tensors(shapes: ParameterShapes) -> list[Tensor]:
    """All tensors in the order of forward.

    A matrix works in proportion to its elements, on every token; the classifier on one token alone. Attention itself
    (2 s h products of s tokens, h wide) comes with the last of the tensors before the output projection, and so ahead
    of them in backward. Vectors take no time.
    """
    token_count, hidden = shapes.embedding[-3][1:]
    attention = len(shapes.block) - _AFTER_ATTENTION - 1
    lone_of_block = set(range(len(shapes.block))[_NORMS])
    rows: list[tuple[tuple[int, ...], float, bool]] = []
    for place, shape in enumerate(shapes.embedding):
        rows.append((shape, _work(shape), place < len(shapes.embedding) - 2))
    for _ in range(shapes.layers):
        for place, shape in enumerate(shapes.block):
            extra = 2.0 * token_count * hidden if place == attention else 0.0
            rows.append((shape, _work(shape) + extra, place in lone_of_block))
    for place, shape in enumerate(shapes.head):
        rows.append((shape, _work(shape) / token_count, place < 2))
    total = sum(work for _, work, _ in rows)
    ends = [min(1.0, done / total) for done in accumulate(work for _, work, _ in rows)]
    begins = [0.0, *ends[:-1]]
    return [
        Tensor(shape, math.prod(shape), lone, before, after)
        for (shape, _, lone), before, after in zip(rows, begins, ends, strict=True)
    ]


def _work(shape: tuple[int, ...]) -> float:
    """Products per token; tokens and positions are (1, s, h) and multiply nothing."""
    return float(math.prod(shape)) if len(shape) in (2, 4) else 0.0


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
    for one in gradients:
        held, ready = held + one.elements, one.ready
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
    for one in gradients:
        if held and held + one.elements > limit:
            yield Filled(held, one.ready)
            held = 0
        held, ready = held + one.elements, one.ready
    if held:
        yield Filled(held, ready)
