"""What a rank holds under DDP, beside activations."""

from __future__ import annotations

from vitscale.engines.dtypes import communicated_bytes, weight_bytes
from vitscale.engines.states import RankStates, added, sizes, whole_states
from vitscale.trial.model_cost import ParameterShapes
from vitscale.trial.trial import Trial


def states(trial: Trial, shapes: ParameterShapes) -> RankStates:
    """What plain training holds and, whatever the rank count, the buckets that gradients travel in: one more copy.

    Buckets are allocated at construction, again in the order of the first backward, and then stay (torch/nn/parallel/
    distributed.py, reducer.cpp); `gradient_as_bucket_view` makes the gradients views of them, from the backward on that
    exchanges them: those of earlier micro-steps are tensors of their own. Where gradients travel in another dtype than
    they are, each bucket is copied into it (torch/distributed/algorithms/ddp_comm_hooks/default_hooks.py).

    On a GPU those of construction are there in the second step too: calls of NCCL hold what they work on until its
    watchdog, which looks every tenth of a second, has seen them end (ProcessGroupNCCL.cpp; seen under torch 2.11).
    Where copies travel it is these.
    """
    train = trial.train
    alone = whole_states(trial, shapes)
    if train.engine == "accelerate" and train.device == "cuda" and trial.world.size == 1:
        return alone  # Accelerate does not wrap it
    elements = sizes(shapes).all
    gradients = elements * weight_bytes(train)
    views = train.gradient_as_bucket_view and train.grad_accum == 1
    own = "bf16" if train.precision == "bf16-params" else "fp32"
    cast = elements * communicated_bytes(train) if train.gradient_dtype not in (None, own) else 0
    of_step = {name: size for name, size in alone.step.items() if name != "gradients"}
    return RankStates(
        steady=added(alone.steady, {"buckets": gradients + (cast or gradients if train.device == "cuda" else 0)}),
        gradient_bytes=0 if views else alone.gradient_bytes,
        new_gradient_bytes=alone.new_gradient_bytes,
        held={} if views else alone.held,
        exchange=added({} if views else alone.exchange, {"buckets": cast} if cast else {}),
        step=of_step if train.gradient_as_bucket_view else alone.step,
    )
