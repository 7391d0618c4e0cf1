"""What an optimizer step under FSDP2 sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from vitscale.engines.dtypes import communicated_bytes, weight_bytes
from vitscale.engines.gradients import Tensor, tensors, up_to_multiple
from vitscale.engines.messages import Message, Phase
from vitscale.trial.model_cost import ParameterShapes
from vitscale.trial.trial import Trial


def messages(trial: Trial, shapes: ParameterShapes) -> tuple[Message, ...]:
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
    weights, gradients = weight_bytes(train), communicated_bytes(train)
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
    sent = [message("all_gather", root, weights, "forward", None)] if root else []
    sent += [
        gather(n, "forward", begin if n == 0 else begins[n - 1], begin) for n, begin in enumerate(begins)
    ]  # the first could be gathered only beside the embedding, which would hide next to nothing
    starts = [1.0 - block[-1].ends for block in blocks]
    for n in reversed(range(len(blocks))):
        last = n == len(blocks) - 1
        if train.reshard_after_forward is not False:
            sent.append(gather(n, "backward", starts[n] if last else starts[n + 1], starts[n]))
        if not last:
            sent.append(scatter(blocks[n + 1], 1.0 - begins[n + 1]))
    sent += [scatter(some, 1.0 - some[0].begins) for some in blocks[:1]]
    return (*sent, scatter(root, 1.0)) if root else tuple(sent)


def _padded(some: Sequence[Tensor], ranks: int) -> int:
    """Elements that are gathered, every tensor's first dimension padded to a multiple of the ranks."""
    return sum(up_to_multiple(tensor.shape[0], ranks) * (tensor.elements // tensor.shape[0]) for tensor in some)


def _rows(some: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    """(rows, elements of a row) of all tensors; those with as many rows are added up."""
    elements: Counter[int] = Counter()
    for tensor in some:
        elements[tensor.shape[0]] += tensor.elements // tensor.shape[0]
    return tuple(elements.items())
