"""Tensors in the order of forward and backward: when each is used, and the buckets that gradients fill.

Also what DDP, Megatron-Core (whose ranks hold all weights) and FSDP2 send of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, count, groupby
from typing import NamedTuple

from vitscale.prediction.step.messages import Message, Phase
from vitscale.trial.model_cost import ParameterShapes, recorded_shapes
from vitscale.trial.model_counts import Module
from vitscale.trial.trial import Trial


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


_MIB = 2**20
_FIRST_MIB, _USUAL_MIB = 1, 25
"""Sizes of DDP's first bucket and of the others (torch/nn/parallel/distributed.py)."""
_LEAST_ELEMENTS, _ELEMENTS_PER_RANK = 40_000_000, 1_000_000
"""Megatron-Core's buckets where it overlaps hold the greater of the first and of the second times the data-parallel
ranks (distributed_data_parallel.py)."""
_SCALAR_BYTES = 4


def plain(trial: Trial, shapes: ParameterShapes) -> tuple[Message, ...]:  # noqa: ARG001 - one signature for all
    """Without a wrapper nothing is sent."""
    return ()


def ddp(trial: Trial, shapes: ParameterShapes) -> tuple[Message, ...]:
    """DDP (Li et al., arXiv 2006.15704, section 3.2): an all-reduce per bucket while backward goes on.

    That happens once in an optimizer step. Buckets are laid out in the weights' dtype, whatever dtype a hook sends.
    """
    train = trial.train
    each = train.weight_bytes
    mib = (_FIRST_MIB, _USUAL_MIB) if train.bucket_mib is None else (train.bucket_mib,)
    limits = tuple(size * _MIB // each for size in mib)
    return tuple(
        Message("all_reduce", filled.elements * train.communicated_bytes, 1, "backward", filled.ready, False)
        for filled in closed_when_full(of_backward(tensors(shapes)), limits)
    )


def megatron(trial: Trial, shapes: ParameterShapes) -> tuple[Message, ...]:
    """Megatron-Core's DDP with its distributed optimizer, as engines/megatron.py sets it up.

    Once in an optimizer step gradients are reduce-scattered, then the updated weights are gathered. Gradients go beside
    backward where `overlap_comm` is set, else after it in one piece. Each tensor begins at a multiple of 64 elements,
    and each bucket ends at one of the ranks and 128 (param_and_grad_buffer.py). Tensor ranks have the classifier whole.
    """
    train, ranks = trial.train, trial.layout.replicas
    if trial.parallel.tensor > 1 and (whole := recorded_shapes(trial.model)) is not None:
        shapes = shapes._replace(blocks=(*shapes.blocks[:-1], whole.blocks[-1]))
    each = train.communicated_bytes
    limit = max(_LEAST_ELEMENTS, _ELEMENTS_PER_RANK * ranks)
    if train.bucket_mib is not None:
        limit = train.bucket_mib * _MIB // each
    aligned = [Filled(_up_to(filled.elements, 64), filled.ready) for filled in of_backward(tensors(shapes))]
    buckets = closed_when_full(aligned, (limit if train.overlap_comm else sum(elements for elements, _ in aligned),))
    held = [(_up_to(filled.elements, math.lcm(ranks, 128)), filled.ready) for filled in buckets]
    phase: Phase = "backward" if train.overlap_comm else "after"
    return (
        *(
            Message("reduce_scatter", elements * each, 1, phase, ready if train.overlap_comm else None, False)
            for elements, ready in held
        ),
        Message("all_reduce", _SCALAR_BYTES, 1, "after", None, False, group="all"),  # the norm, clipped by or not
        *(Message("all_gather", elements * train.weight_bytes, 1, "after", None, False) for elements, _ in held),
    )


def _up_to(elements: int, multiple: int) -> int:
    return -(-elements // multiple) * multiple


def fsdp2(trial: Trial, shapes: ParameterShapes) -> tuple[Message, ...]:
    """FSDP2 in every micro-step: each block is gathered in forward and again in backward, and the root once.

    A block is gathered while the one before is computed (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py).
    The first gathers of forward and of backward, and the root's, are waited for. Gradients of a block are scattered
    while the next ones are made. On a CPU, which has no streams, every call is waited for.

    In stages of a pipeline a block stays gathered from a backward to the next forward. A step then gathers it in each
    forward and once more; it gathers the root once, and scatters gradients once.

    Tensors are cut along their first dimension and padded to a multiple of the ranks. So a class token or positions,
    whose first dimension is 1, grow with every rank: FSDP2 sends them like that (docs/traffic.md), which is much at a
    thousand ranks.
    """
    train, ranks = trial.train, trial.layout.replicas
    everything = tensors(shapes)
    blocks = [list(own) for number, own in groupby(everything, lambda tensor: tensor.block) if number is not None]
    root = [tensor for tensor in everything if tensor.block is None]
    weights, gradients = train.weight_bytes, train.communicated_bytes
    streams, staged = train.device == "cuda", trial.parallel.pipeline > 1

    def message(operation: str, some: Sequence[Tensor], each: int, phase: Phase, ready: float | None) -> Message:
        size = _padded(some, ranks) * each
        return Message(operation, size, 1, phase, ready, not staged, rows=_rows(some), padded_for=ranks)

    def gather(n: int, phase: Phase, ready: float, needed: float) -> Message:
        gathered = message("all_gather", blocks[n], weights, phase, ready if streams else None)
        return replace(gathered, needed=needed, every_micro_step=not staged or phase == "forward")

    def scatter(some: Sequence[Tensor], ready: float) -> Message:
        phase: Phase = "after" if staged else "backward"
        return message("reduce_scatter", some, gradients, phase, ready if streams and not staged else None)

    begins = [block[0].begins for block in blocks]
    messages = [message("all_gather", root, weights, "forward", None)] if root else []
    messages += [
        gather(n, "forward", begin if n == 0 else begins[n - 1], begin) for n, begin in enumerate(begins)
    ]  # the first could be gathered only beside the embedding, which would hide next to nothing
    starts = [1.0 - block[-1].ends for block in blocks]
    for n in reversed(range(len(blocks))):
        last = n == len(blocks) - 1
        if train.reshard_after_forward is not False:
            messages.append(gather(n, "backward", starts[n] if last else starts[n + 1], starts[n]))
        if not last:
            messages.append(scatter(blocks[n + 1], 1.0 - begins[n + 1]))
    messages += [scatter(some, 1.0 - some[0].begins) for some in blocks[:1]]
    return (*messages, scatter(root, 1.0)) if root else tuple(messages)


def _padded(some: Sequence[Tensor], ranks: int) -> int:
    """Elements that are gathered, every tensor's first dimension padded to a multiple of the ranks."""
    return sum(_up_to(tensor.shape[0], ranks) * (tensor.elements // tensor.shape[0]) for tensor in some)


def _rows(some: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    """(rows, elements of a row) of all tensors; those with as many rows are added up."""
    elements: Counter[int] = Counter()
    for tensor in some:
        elements[tensor.shape[0]] += tensor.elements // tensor.shape[0]
    return tuple(elements.items())
