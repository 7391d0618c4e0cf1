"""Gradients that travel in buckets during backward: at which tensors a bucket is full, and how full it is then."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from vitscale.trial.model_spec import ParameterShapes

FC2, FC1, OUT, QKV, HEAD, EMBEDDING = range(6)
_LAYERS = {7: FC2, 6: FC1, 5: FC1, 3: OUT}
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
    """Blocks left, layer and elements of each gradient in the order in which autograd makes them."""
    repeated = shapes.blocks[1]
    left = repeated.repeats
    for block in reversed(list(shapes.each())):
        for place in reversed(block.forward):
            layer = _LAYERS.get(place, QKV) if block is repeated else HEAD if left else EMBEDDING
            yield from ((left, layer, math.prod(shape)) for shape in block.modules[place].gradients)
        left -= block is repeated
