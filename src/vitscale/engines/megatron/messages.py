"""The collectives of an optimizer step under Megatron-Core."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vitscale.engines.dtypes import communicated_bytes, weight_bytes
from vitscale.engines.gradients import Filled, closed_when_full, of_backward, tensors, up_to_multiple
from vitscale.engines.messages import Message
from vitscale.trial.model_cost import ParameterShapes, recorded_shapes
from vitscale.trial.trial import Trial

_MIB = 2**20
_LEAST_BUCKET_ELEMENTS = 40_000_000
_BUCKET_ELEMENTS_PER_RANK = 1_000_000
"""Where gradients go beside backward, a bucket of Megatron-Core holds so many elements for each data-parallel
rank, and at least `_LEAST_BUCKET_ELEMENTS` (distributed_data_parallel.py)."""
_TENSOR_ALIGNMENT = 64
"""Each tensor begins at a multiple of so many elements (param_and_grad_buffer.py)."""
_BUCKET_ALIGNMENT = 128
"""Each bucket ends at a multiple of so many elements and of the ranks (param_and_grad_buffer.py)."""
_NORM_BYTES = 4


def messages(trial: Trial, shapes: ParameterShapes) -> tuple[Message, ...]:
    """Return what Megatron-Core's DDP with its distributed optimizer sends, as `wrap` sets it up.

    Once in an optimizer step gradients are reduce-scattered, then the updated weights are gathered. Gradients go beside
    backward where `overlap_comm` is set, else after it in one piece. Tensor ranks have the classifier whole.
    """
    train = trial.train
    buckets = _buckets(trial, _with_whole_classifier(trial, shapes))
    scatters = [
        Message(
            "reduce_scatter",
            tensor_bytes=bucket.elements * communicated_bytes(train),
            calls=1,
            phase="backward" if train.overlap_comm else "after",
            ready=bucket.ready if train.overlap_comm else None,
            micro_steps="last",
        )
        for bucket in buckets
    ]
    norm = Message(  # taken whether gradients are clipped or not
        "all_reduce", _NORM_BYTES, calls=1, phase="after", ready=None, micro_steps="last", group="all"
    )
    gathers = [
        Message(
            "all_gather",
            tensor_bytes=bucket.elements * weight_bytes(train),
            calls=1,
            phase="after",
            ready=None,
            micro_steps="last",
        )
        for bucket in buckets
    ]
    return (*scatters, norm, *gathers)


def _with_whole_classifier(trial: Trial, shapes: ParameterShapes) -> ParameterShapes:
    if trial.parallel.tensor == 1:
        return shapes
    model_shapes = recorded_shapes(trial.model)
    if model_shapes is None:
        return shapes
    return shapes._replace(blocks=(*shapes.blocks[:-1], model_shapes.blocks[-1]))


def _buckets(trial: Trial, shapes: ParameterShapes) -> Sequence[Filled]:
    """Return the buckets of gradients, tensors and ends aligned; one where they do not go beside backward."""
    gradients = [
        Filled(up_to_multiple(gradient.elements, _TENSOR_ALIGNMENT), gradient.ready)
        for gradient in of_backward(tensors(shapes))
    ]
    all_elements = sum(gradient.elements for gradient in gradients)
    limit = _bucket_elements(trial) if trial.train.overlap_comm else all_elements
    alignment = math.lcm(trial.layout.replicas, _BUCKET_ALIGNMENT)
    return [
        Filled(up_to_multiple(bucket.elements, alignment), bucket.ready)
        for bucket in closed_when_full(gradients, [limit])
    ]


def _bucket_elements(trial: Trial) -> int:
    """Return how many elements close a bucket."""
    bucket_mib = trial.train.bucket_mib
    if bucket_mib is not None:
        return bucket_mib * _MIB // communicated_bytes(trial.train)
    return max(_LEAST_BUCKET_ELEMENTS, _BUCKET_ELEMENTS_PER_RANK * trial.layout.replicas)
