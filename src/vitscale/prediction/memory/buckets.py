"""Gradients that travel in buckets during backward: at which tensors a bucket is full, and how full it is then."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from vitscale.model_spec import ParameterShapes

FC2, FC1, OUT, QKV, HEAD, EMBEDDING = range(6)
"""Layers in the order of backward; what a block holds at each of its own is in `Activations.at_layers`."""


class Flush(NamedTuple):
    """A bucket goes on its way because one more gradient does not fit into it."""

    left: int
    """Blocks whose backward is not over."""
    layer: int
    """Whose gradient did not fit."""
    elements: int
    """In the bucket."""
    new: int
    """Elements of the gradient that did not fit."""


@lru_cache(maxsize=4096)
def flushes(shapes: ParameterShapes, bucket: int) -> tuple[Flush, ...]:
    """Every full bucket of one backward, in order; what is left in the last one is exchanged after backward.

    As `reduce_independent_p_g_buckets_and_remove_grads` of DeepSpeed 0.19 (runtime/zero/stage_1_and_2.py, stage3.py)
    has it: a gradient that does not fit sends what is there; one larger than a bucket goes into an empty one alone.

    Args:
        shapes: of the model.
        bucket: its size in elements.
    """
    found = []
    filled = 0
    for left, layer, elements in _gradients(shapes):
        if filled + elements > bucket and filled:
            found.append(Flush(left, layer, filled, elements))
            filled = 0
        filled += elements
    return tuple(found)


def _gradients(shapes: ParameterShapes) -> Iterator[tuple[int, int, int]]:
    """Blocks left, layer and elements of each gradient in the order in which autograd makes them: a bias first."""
    sizes = [math.prod(shape) for shape in shapes.block]
    norm_1, norm_2 = (sizes[-7], sizes[-8]), (sizes[-5], sizes[-6])
    block = [
        *((FC2, n) for n in (sizes[-1], sizes[-2])),
        *((FC1, n) for n in (sizes[-3], sizes[-4], *norm_2)),
        *((OUT, n) for n in (sizes[-9], sizes[-10])),
        *((QKV, n) for n in (*reversed(sizes[:-10]), *norm_1)),
    ]
    norm_weight, norm_bias, weight, bias = map(math.prod, shapes.head)
    yield from ((shapes.layers, HEAD, n) for n in (bias, weight, norm_bias, norm_weight))
    for left in range(shapes.layers, 0, -1):
        yield from ((left, layer, n) for layer, n in block)
    yield from ((0, EMBEDDING, math.prod(shape)) for shape in reversed(shapes.embedding))
