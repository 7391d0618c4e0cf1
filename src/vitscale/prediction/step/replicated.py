"""What engines send whose every rank holds all weights: DDP, and Megatron-Core, which shards but the optimizer."""

from __future__ import annotations

from vitscale.prediction.memory.holding import communicated_bytes, sizes, weight_bytes
from vitscale.prediction.step.gradients import closed_when_full, of_backward, tensors
from vitscale.prediction.step.message import Message
from vitscale.trial.model_cost import ParameterShapes
from vitscale.trial.trial import Trial

_MIB = 2**20
_FIRST_MIB, _USUAL_MIB = 1, 25
"""Of DDP's buckets (torch/nn/parallel/distributed.py)."""
_LEAST_ELEMENTS, _ELEMENTS_PER_RANK = 40_000_000, 1_000_000
"""Of Megatron-Core's buckets where it overlaps (distributed_data_parallel.py): the greater, with all ranks."""
_SCALAR_BYTES = 4


def plain(trial: Trial, shapes: ParameterShapes) -> tuple[Message, ...]:  # noqa: ARG001 - one signature for all
    """Without a wrapper nothing is sent."""
    return ()


def ddp(trial: Trial, shapes: ParameterShapes) -> tuple[Message, ...]:
    """DDP (Li et al., arXiv 2006.15704, section 3.2): an all-reduce per bucket while backward goes on.

    Once in an optimizer step. Buckets are laid out in the weights' dtype, whatever dtype a hook sends them in.
    """
    train = trial.train
    each = weight_bytes(train)
    mib = (_FIRST_MIB, _USUAL_MIB) if train.bucket_mib is None else (train.bucket_mib,)
    limits = tuple(size * _MIB // each for size in mib)
    return tuple(
        Message("all_reduce", filled.elements * communicated_bytes(train), 1, "backward", filled.ready, False)
        for filled in closed_when_full(of_backward(tensors(shapes)), limits)
    )


def megatron(trial: Trial, shapes: ParameterShapes) -> tuple[Message, ...]:
    """Megatron-Core's DDP with its distributed optimizer, as engines/megatron.py sets it up.

    Once in an optimizer step gradients are reduce-scattered, beside backward where `overlap_comm` is set and else after
    it in one piece, and the updated weights are gathered. (Not among what docs/traffic.md counted: it needs a GPU.)
    """
    train = trial.train
    count = sizes(shapes).all
    each = communicated_bytes(train)
    after = [
        Message("all_reduce", _SCALAR_BYTES, 1, "after", None, False),  # the norm
        Message("all_gather", count * weight_bytes(train), 1, "after", None, False),
    ]
    if not train.overlap_comm:
        return (Message("reduce_scatter", count * each, 1, "after", None, False), *after)
    limit = max(_LEAST_ELEMENTS, _ELEMENTS_PER_RANK * trial.world.size)
    if train.bucket_mib is not None:
        limit = train.bucket_mib * _MIB // each
    scattered = [
        Message("reduce_scatter", filled.elements * each, 1, "backward", filled.ready, False)
        for filled in closed_when_full(of_backward(tensors(shapes)), (limit,))
    ]
    return (*scattered, *after)
