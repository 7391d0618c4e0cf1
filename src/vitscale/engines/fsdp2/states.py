"""Bytes that a rank holds under FSDP2 beside activations and the weights that it gathers part by part (`parts`)."""

from __future__ import annotations

from dataclasses import replace

from vitscale.engines.fsdp2.sharding import Sharding
from vitscale.engines.states import RankStates, added, shard, sizes, state_bytes
from vitscale.trial.model_cost import ParameterShapes
from vitscale.trial.trial import Trial


def states(trial: Trial, shapes: ParameterShapes) -> RankStates:
    """Return what FSDP2 holds of a model: shards, and gradients once they are scattered.

    Shards are those of ZeRO's third stage (arXiv 1910.02054, section 5.3). All else follows torch 2.13
    (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_collectives.py).

    Weights that are gathered block by block, with the buffers in which they travel, are in `fsdp2.parts`.

    With shards on the host (`CPUOffloadPolicy`) the device holds none, and scattered gradients go to the host at once
    (`foreach_reduce`); the step is there.
    """
    train = trial.train
    sharding = Sharding.of(trial)
    count = sizes(shapes)
    root_bytes = count.root * sharding.weight_bytes
    shard_elements = shard(count.all, sharding.ranks)
    gradients = {"gradients": shard_elements * sharding.shard_bytes}
    accumulates = train.grad_accum > 1
    shards = {
        "weights": shard_elements * sharding.shard_bytes,
        "optimizer states": shard_elements * state_bytes(train) // 4 * sharding.shard_bytes,
    }
    device_gradients = {"gradients": 0} if sharding.has_shards_on_host else gradients
    reduced = {"buckets": shard_elements * sharding.reduced_bytes}
    return RankStates(
        steady={} if sharding.has_shards_on_host else shards,
        gradient_bytes=sharding.scattered_bytes(accumulates=accumulates),
        new_gradient_bytes=sharding.weight_bytes,
        held=device_gradients if accumulates else {},
        exchange=device_gradients | {"gathered weights": root_bytes} | reduced,
        step=device_gradients,
        host=added(shards, gradients) if sharding.has_shards_on_host else {},
    )


def stage_states(trial: Trial, shapes: ParameterShapes, *, later: bool) -> RankStates:
    """Return what FSDP2 holds of a rank's stages during one micro-batch.

    torch's schedules keep whole gradients, and the weights that backward has gathered, until the step's last backward
    is over, and scatter then (`backward_maybe_with_nosync` and `perform_reduce_grad` in
    torch/distributed/pipelining/stage.py). A forward between two backwards frees each block's weights again.

    Args:
        trial: the trial, with one micro-step or as the second of two.
        shapes: tensors of this rank's stages.
        later: whether another micro-batch's backward came before.
    """
    sharding = Sharding.of(trial)
    count = sizes(shapes)
    gradients = {"gradients": count.all * sharding.sent_bytes}
    scatter_buffer_bytes = max((count.root, *count.blocks)) * sharding.sent_bytes
    return replace(
        states(trial, shapes),
        gradient_bytes=0 if later else sharding.sent_bytes,
        held=gradients if later else {},
        exchange=gradients
        | {
            "gathered weights": sum(count.blocks) * sharding.weight_bytes,
            "buckets": scatter_buffer_bytes,
            "gloo's copies": scatter_buffer_bytes if sharding.has_gloo else 0,
        },
    )
