"""The moments of a step at which a rank's memory can be highest, and what lies there at each."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitscale.engines.states import Parts, RankStates, added, sizes
from vitscale.prediction.memory.activations import Activations
from vitscale.trial.model_cost import ParameterShapes

_Counts = NDArray[np.int64]
ORDER = ("last block", "end of forward", "backward", "exchange", "step")
"""The order of a step's moments."""
FC2, FC1, OUT, QKV, HEAD, EMBEDDING = range(6)
_LAYERS = {7: FC2, 6: FC1, 5: FC1, 3: OUT}
"""Layers in the order of backward; what a block holds at each of its own is in `Activations.at_layers`."""


class Flush(NamedTuple):
    """A bucket goes on its way because one more gradient does not fit into it."""

    left: int
    """Blocks whose backward is not over."""
    layer: int
    """The layer whose gradient did not fit."""
    elements: int
    """Elements in the bucket."""
    new: int
    """Elements of the gradient that did not fit."""


@lru_cache(maxsize=4096)
def flushes(shapes: ParameterShapes, bucket: int) -> tuple[Flush, ...]:
    """Every full bucket of one backward, in order; what is left in the last one is exchanged after backward.

    This follows `reduce_independent_p_g_buckets_and_remove_grads` of DeepSpeed 0.19 (runtime/zero/stage_1_and_2.py,
    stage3.py): a gradient that does not fit sends what is there; one larger than a bucket goes alone into an empty one.

    Args:
        shapes: shapes of the model's tensors.
        bucket: its size in elements.
    """
    full = []
    filled = 0
    for left, layer, elements in _gradients(shapes):
        if filled + elements > bucket and filled:
            full.append(Flush(left, layer, filled, elements))
            filled = 0
        filled += elements
    return tuple(full)


def _gradients(shapes: ParameterShapes) -> Iterator[tuple[int, int, int]]:
    """Blocks left, layer and elements of each gradient in the order in which autograd makes them."""
    repeated = shapes.blocks[1]
    left = repeated.repeats
    for block in reversed(list(shapes.each())):
        for name in reversed(block.forward):
            layer = _LAYERS.get(name, QKV) if block is repeated else HEAD if left else EMBEDDING
            yield from ((left, layer, math.prod(shape)) for shape in block.modules[name].gradients)
        left -= block is repeated


class _Backward(NamedTuple):
    """What changes from one moment of backward to another."""

    left: int
    """Blocks whose backward is not over."""
    stored: int
    """Bytes of activations that are still there."""
    passed: int
    """Bytes of gradients that are passed on."""
    done: int = 0
    """Elements of gradients that are made and stay as `RankStates.gradient_bytes` says."""
    new: int = 0
    """Elements of gradients that have just been made."""
    flushed: int = 0
    """Elements of the full bucket that is exchanged just now."""
    after_bucket: bool = False
    """Whether a bucket has been exchanged already."""
    after_block: bool = False
    """Whether the gradients of a whole block have been exchanged already."""
    between: bool = False
    """Whether the moment lies between two blocks."""


def moments(holding: RankStates, kept: Activations, shapes: ParameterShapes) -> dict[str, Parts]:
    """Name of each moment -> bytes by part; for backward those of its highest moment."""
    totals = _backward_totals(holding, kept, shapes).tolist()
    each = _backward(kept, shapes, holding.bucket, bool(holding.between_blocks))
    highest = max(zip(totals, each, strict=True))[1]
    named = _outside_backward(holding, kept, shapes) | {"backward": _parts(holding, kept, highest)}
    return {name: {part: size for part, size in named[name].items() if size} for name in ORDER}


def all_totals(
    holding: RankStates, kept: Activations, shapes: ParameterShapes, names: Container[str] = ORDER
) -> list[int]:
    """Bytes at every moment with one of `names`, also at each of backward; the order does not depend on the batch."""
    outside = () if names == ("backward",) else _outside_backward(holding, kept, shapes).items()
    totals = [sum(parts.values()) for name, parts in outside if name in names]
    return totals + (_backward_totals(holding, kept, shapes).tolist() if "backward" in names else [])


def _outside_backward(holding: RankStates, kept: Activations, shapes: ParameterShapes) -> dict[str, Parts]:
    base = added(holding.steady, {"images": kept.images})
    held = added(base, holding.held)
    blocks = shapes.blocks[1].repeats * kept.kept_of_block
    before_last = {"activations": blocks - kept.kept_of_block, "autocast's copies": kept.cast_weights}
    after_last = {"activations": blocks + kept.head, "autocast's copies": kept.cast_weights}
    return {
        "last block": added(held, holding.held_buckets, before_last, holding.forward),
        "end of forward": added(held, holding.held_buckets, after_last, holding.forward_end),
        "exchange": added(base, holding.exchange),
        "step": added(base, holding.step),
    }


@lru_cache(maxsize=1024)
def _backward(kept: Activations, shapes: ParameterShapes, bucket: int, between: bool) -> tuple[_Backward, ...]:
    """The moments that can be highest, with buckets of `bucket` elements.

    They are in each block where it is widest and when its MLP is done, between blocks, and wherever a bucket is full.
    From block to block activations fall and gradients rise, so the highest is mostly in the first block or the last.
    `between` says whether the holding has more between blocks.
    """
    return tuple(_going_through_backward(kept, shapes, bucket, between))


@lru_cache(maxsize=1024)
def _columns(kept: Activations, shapes: ParameterShapes, bucket: int, between: bool) -> dict[str, _Counts]:
    """Each field of `_Backward`, with an array of all moments."""
    columns = zip(*_backward(kept, shapes, bucket, between), strict=True)
    return {name: np.array(column, dtype=np.int64) for name, column in zip(_Backward._fields, columns, strict=True)}


def _going_through_backward(
    kept: Activations, shapes: ParameterShapes, bucket: int, between: bool
) -> Iterator[_Backward]:
    embedding, block, head = shapes.blocks
    layers, largest = block.repeats, max(math.prod(shape) for module in block.modules for shape in module.tensors)
    everything = sizes(shapes).all
    full = flushes(shapes, bucket) if bucket else ()
    for index, flush in enumerate(full):
        stored, passed = _at_layer(kept, flush)
        during = _Backward(flush.left, stored, passed, 0, flush.new, flush.elements, after_bucket=index > 0)
        yield during
        if index == 0:
            yield during._replace(flushed=0, after_bucket=True)
    first_full = (full[0].left + (full[0].layer == HEAD)) if full else 0
    gone, passed = kept.at_layers[FC1]
    if between:
        yield _Backward(
            layers, layers * kept.kept_of_block, kept.stream - kept.handed_back, head.elements, between=True
        )
    for left in range(layers, 0, -1):
        done = head.elements + (layers - left) * block.elements
        stored = left * kept.kept_of_block + kept.recomputed
        after = (left < first_full, left < layers)
        stored -= 0 if left < layers else kept.handed_back
        yield _Backward(left, stored, kept.backward_of_block, done, largest, 0, *after)
        of_last = math.prod(block.modules[-1].tensors[0])
        yield _Backward(left, stored - gone, passed, done + of_last, largest, 0, *after)
        if between:
            below = (left - 1) * kept.kept_of_block
            yield _Backward(left - 1, below, kept.stream, done + block.elements, after_block=True, between=True)
    yield _Backward(0, 0, 2 * kept.stream, everything, embedding.elements, 0, bool(full), after_block=True)


def _at_layer(kept: Activations, flush: Flush) -> tuple[int, int]:
    """Bytes of activations stored and of gradients passed on when the gradient that did not fit is there."""
    blocks = flush.left * kept.kept_of_block
    if flush.layer == HEAD:
        return blocks + kept.stream, kept.stream
    if flush.layer == EMBEDDING:
        return 0, 2 * kept.stream
    gone, passed = kept.at_layers[flush.layer]
    return blocks + kept.recomputed - gone, passed


def _parts(holding: RankStates, kept: Activations, moment: _Backward) -> Parts:
    return added(
        holding.steady,
        holding.backward,
        holding.in_backward(moment.done, moment.new, flushed=moment.flushed, after=moment.after_bucket),
        holding.first_block if moment.after_block else {},
        holding.between_blocks if moment.between else {},
        {
            "images": kept.images,
            "activations": moment.stored,
            "passed on in backward": moment.passed,
            "autocast's copies": moment.left * kept.cast_weights_of_block + kept.cast_weights_of_ends,
            "gathered weights": _gathered(holding, moment),
        },
    )


def _gathered(holding: RankStates, moment: _Backward) -> int:
    by_left = (holding.gathered_between if moment.between else ()) or holding.gathered_blocks
    return by_left[moment.left] if by_left else 0


def _backward_totals(holding: RankStates, kept: Activations, shapes: ParameterShapes) -> _Counts:
    """The sum of `_parts` at each of `_backward`, without the parts."""
    at = _columns(kept, shapes, holding.bucket, bool(holding.between_blocks))
    gathered = np.array(holding.gathered_blocks or (0,) * (shapes.blocks[1].repeats + 1))
    gathered_between = np.array(holding.gathered_between or gathered)
    always = sum(_parts(holding, kept, _Backward(0, 0, 0)).values()) - gathered[0]
    flush, after_bucket, after_block, between = (
        sum(parts.values())
        for parts in (holding.flush, holding.from_first_flush, holding.first_block, holding.between_blocks)
    )
    new = holding.new_gradient_bytes
    totals: _Counts = (
        always + at["stored"] + at["passed"] + at["left"] * kept.cast_weights_of_block
        + (at["done"] * holding.gradient_bytes).astype(np.int64) + at["new"] * new
        + at["flushed"] * np.where(at["flushed"] > holding.bucket, flush + new, flush)
        + np.where(at["between"], gathered_between[at["left"]], gathered[at["left"]])
        + at["after_bucket"] * after_bucket + at["after_block"] * after_block + at["between"] * between
    )  # fmt: skip
    return totals
