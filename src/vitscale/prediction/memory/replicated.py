"""What plain training and DDP keep: everything, on every rank."""

from __future__ import annotations

from vitscale.prediction.memory.holding import STATE_BYTES, Holding, added, sizes, weight_bytes
from vitscale.trial.model_cost import ParameterShapes
from vitscale.trial.trial import Trial


def plain(trial: Trial, shapes: ParameterShapes) -> Holding:
    """Weights, gradients and the optimizer's states in one dtype: ZeRO (arXiv 1910.02054), section 3.1, without the
    masters that mixed precision keeps there; autocast's fp32 weights are their own."""
    train, elements = trial.train, sizes(shapes).all
    each = weight_bytes(train)
    states = STATE_BYTES[train.optimizer] // 4 * each
    gradients = elements * each
    return Holding(
        steady={"weights": elements * each, "optimizer states": elements * states},
        gradient_bytes=0 if train.grad_accum > 1 else each,
        new_gradient_bytes=each,
        held={"gradients": gradients} if train.grad_accum > 1 else {},
        exchange={"gradients": gradients},
        step={"gradients": gradients},
    )


def ddp(trial: Trial, shapes: ParameterShapes) -> Holding:
    """Plain training and, whatever the rank count, one more copy of the gradients: the buckets they travel in.

    Buckets are allocated at construction, once more in the order of the first backward, and stay (torch/nn/parallel/
    distributed.py, reducer.cpp); `gradient_as_bucket_view` makes the gradients views of them.
    """
    train = trial.train
    alone = plain(trial, shapes)
    gradients = sizes(shapes).all * weight_bytes(train)
    views = train.gradient_as_bucket_view
    return Holding(
        steady=added(alone.steady, {"buckets": gradients}),
        gradient_bytes=0 if views else alone.gradient_bytes,
        new_gradient_bytes=alone.new_gradient_bytes,
        held={} if views else alone.held,
        exchange={} if views else alone.exchange,
        step={} if views else alone.step,
    )
