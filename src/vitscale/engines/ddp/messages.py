"""What an optimizer step under DDP sends."""

from __future__ import annotations

from vitscale.engines.dtypes import communicated_bytes, weight_bytes
from vitscale.engines.gradients import closed_when_full, of_backward, tensors
from vitscale.engines.messages import Message
from vitscale.trial.model_cost import ParameterShapes
from vitscale.trial.trial import Trial

_MIB = 2**20
_FIRST_MIB, _USUAL_MIB = 1, 25
"""Sizes of DDP's first bucket and of the others (torch/nn/parallel/distributed.py)."""


def messages(trial: Trial, shapes: ParameterShapes) -> tuple[Message, ...]:
    """DDP (Li et al., arXiv 2006.15704, section 3.2): an all-reduce per bucket while backward goes on.

    That happens once in an optimizer step. Buckets are laid out in the weights' dtype, whatever dtype a hook sends.
    """
    train = trial.train
    each = weight_bytes(train)
    mib = (_FIRST_MIB, _USUAL_MIB) if train.bucket_mib is None else (train.bucket_mib,)
    limits = tuple(size * _MIB // each for size in mib)
    return tuple(
        Message("all_reduce", filled.elements * communicated_bytes(train), 1, "backward", filled.ready, False)
        for filled in closed_when_full(of_backward(tensors(shapes)), limits)
    )
