"""The collectives of an optimizer step under DDP."""

from __future__ import annotations

from vitscale.engines.dtypes import communicated_bytes, weight_bytes
from vitscale.engines.gradients import closed_when_full, of_backward, tensors
from vitscale.engines.messages import Message
from vitscale.trial.model_cost import ParameterShapes
from vitscale.trial.trial import Trial

_MIB = 2**20
_FIRST_BUCKET_MIB = 1
"""DDP's default size of the first bucket (torch/nn/parallel/distributed.py)."""
_BUCKET_MIB = 25
"""DDP's default size of all other buckets."""


def messages(trial: Trial, shapes: ParameterShapes) -> tuple[Message, ...]:
    """Return an all-reduce for each bucket, once in an optimizer step, in the order in which backward fills them.

    They start while backward goes on (Li et al., arXiv 2006.15704, section 3.2). Buckets are laid out in the weights'
    dtype, whatever dtype a hook sends.
    """
    train = trial.train
    bucket_mib = [_FIRST_BUCKET_MIB, _BUCKET_MIB] if train.bucket_mib is None else [train.bucket_mib]
    element_bytes = weight_bytes(train)
    bucket_elements = [mib * _MIB // element_bytes for mib in bucket_mib]
    buckets = closed_when_full(of_backward(tensors(shapes)), bucket_elements)
    return tuple(
        Message(
            "all_reduce",
            tensor_bytes=bucket.elements * communicated_bytes(train),
            calls=1,
            phase="backward",
            ready=bucket.ready,
            micro_steps="last",
        )
        for bucket in buckets
    )
