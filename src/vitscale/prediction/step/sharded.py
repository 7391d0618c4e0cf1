"""What FSDP2 sends: each block's weights before its forward and its backward, each block's gradients after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from vitscale.prediction.memory.holding import communicated_bytes, weight_bytes
from vitscale.prediction.step.gradients import Tensor, tensors
from vitscale.prediction.step.message import Message, Phase
from vitscale.trial.model_cost import ParameterShapes
from vitscale.trial.trial import Trial


def fsdp2(trial: Trial, shapes: ParameterShapes) -> tuple[Message, ...]:
    """FSDP2 in every micro-step: a gather of each block in forward and another in backward, and of the root once.

    A block is gathered while the one before is computed (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py);
    the first of forward and of backward, and the root, are waited for. Gradients of a block are scattered while the
    next ones are made. On a CPU every call waits for its end, for there are no streams to wait in its stead.

    Tensors are cut along their first dimension and padded to a multiple of the ranks: a class token or positions, 1
    long, grow with every rank. That is how FSDP2 sends them (docs/traffic.md), and at a thousand ranks it is much.
    """
    train, ranks = trial.train, trial.world.size
    everything = tensors(shapes)
    blocks = [list(own) for number, own in groupby(everything, lambda one: one.block) if number is not None]
    root = [one for one in everything if one.block is None]
    weights, gradients = weight_bytes(train), communicated_bytes(train)
    streams = train.device == "cuda"

    def message(operation: str, some: Sequence[Tensor], each: int, phase: Phase, ready: float | None) -> Message:
        size = _padded(some, ranks) * each
        return Message(operation, size, 1, phase, ready, True, rows=_rows(some), padded_for=ranks)

    def gather(n: int, phase: Phase, ready: float, needed: float) -> Message:
        found = message("all_gather", blocks[n], weights, phase, ready if streams else None)
        return replace(found, needed=needed)

    def scatter(some: Sequence[Tensor], ready: float) -> Message:
        return message("reduce_scatter", some, gradients, "backward", ready if streams else None)

    begins = [block[0].begins for block in blocks]
    found = [message("all_gather", root, weights, "forward", None)]
    found += [
        gather(n, "forward", begin if n == 0 else begins[n - 1], begin) for n, begin in enumerate(begins)
    ]  # the first while the embedding is computed would hide next to nothing
    starts = [1.0 - block[-1].ends for block in blocks]
    for n in reversed(range(len(blocks))):
        last = n == len(blocks) - 1
        if train.reshard_after_forward is not False:
            found.append(gather(n, "backward", starts[n] if last else starts[n + 1], starts[n]))
        if not last:
            found.append(scatter(blocks[n + 1], 1.0 - begins[n + 1]))
    found += [scatter(some, 1.0 - some[0].begins) for some in blocks[:1]]
    return (*found, scatter(root, 1.0))


def _padded(some: Sequence[Tensor], ranks: int) -> int:
    """Elements of what is gathered: every tensor's first dimension a multiple of the ranks."""
    return sum(-(-one.shape[0] // ranks) * ranks * (one.elements // one.shape[0]) for one in some)


def _rows(some: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    """(rows, elements of a row) of all tensors, those of as many rows together."""
    found: Counter[int] = Counter()
    for one in some:
        found[one.shape[0]] += one.elements // one.shape[0]
    return tuple(found.items())
