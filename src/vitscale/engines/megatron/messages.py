"""What an optimizer step under Megatron-Core sends."""

from __future__ import annotations

import math

from vitscale.engines.dtypes import communicated_bytes, weight_bytes
from vitscale.engines.gradients import Filled, closed_when_full, of_backward, tensors, up_to_multiple
from vitscale.engines.messages import Message, Phase
from vitscale.trial.model_cost import ParameterShapes, recorded_shapes
from vitscale.trial.trial import Trial

_MIB = 2**20
_LEAST_ELEMENTS, _ELEMENTS_PER_RANK = 40_000_000, 1_000_000
"""Megatron-Core's buckets where it overlaps hold the greater of the first and of the second times the data-parallel
ranks (distributed_data_parallel.py)."""
_SCALAR_BYTES = 4


def messages(trial: Trial, shapes: ParameterShapes) -> tuple[Message, ...]:
    """Megatron-Core's DDP with its distributed optimizer, as `wrap` sets it up.

    Once in an optimizer step gradients are reduce-scattered, then the updated weights are gathered. Gradients go beside
    backward where `overlap_comm` is set, else after it in one piece. Each tensor begins at a multiple of 64 elements,
    and each bucket ends at one of the ranks and 128 (param_and_grad_buffer.py). Tensor ranks have the classifier whole.
    """
    train, ranks = trial.train, trial.layout.replicas
    if trial.parallel.tensor > 1 and (whole := recorded_shapes(trial.model)) is not None:
        shapes = shapes._replace(blocks=(*shapes.blocks[:-1], whole.blocks[-1]))
    each = communicated_bytes(train)
    limit = max(_LEAST_ELEMENTS, _ELEMENTS_PER_RANK * ranks)
    if train.bucket_mib is not None:
        limit = train.bucket_mib * _MIB // each
    aligned = [Filled(up_to_multiple(filled.elements, 64), filled.ready) for filled in of_backward(tensors(shapes))]
    buckets = closed_when_full(aligned, (limit if train.overlap_comm else sum(elements for elements, _ in aligned),))
    held = [(up_to_multiple(filled.elements, math.lcm(ranks, 128)), filled.ready) for filled in buckets]
    phase: Phase = "backward" if train.overlap_comm else "after"
    return (
        *(
            Message("reduce_scatter", elements * each, 1, phase, ready if train.overlap_comm else None, False)
            for elements, ready in held
        ),
        Message("all_reduce", _SCALAR_BYTES, 1, "after", None, False, group="all"),  # the norm, clipped by or not
        *(Message("all_gather", elements * weight_bytes(train), 1, "after", None, False) for elements, _ in held),
    )
