"""What FSDP2 keeps: shards of everything, the gathered weights of a block or two, and what it scatters."""

from __future__ import annotations

from vitscale.prediction.memory.holding import STATE_BYTES, Holding, communicated_bytes, shard, sizes, weight_bytes
from vitscale.trial.model_cost import ParameterShapes
from vitscale.trial.trial import Trial


def fsdp2(trial: Trial, shapes: ParameterShapes) -> Holding:
    """Shards as of ZeRO's third stage (arXiv 1910.02054, section 5.3), gathered block by block.

    As torch 2.13 does it (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_collectives.py): what is
    gathered lands in a flat buffer, which stays until the next is gathered, and is copied out of it. In backward the
    next block is gathered meanwhile, so that two blocks are there. Gradients of a whole block are copied into a flat
    buffer to be scattered, which stays until the next block's are. Embedding and head are gathered from forward to the
    end of backward. One rank copies without a buffer.
    Of fp32 shards those of a block are cast before they are gathered.

    gloo works on a copy of its own of what it gathers and scatters (ProcessGroupGloo.cpp). Its thread lets go of a
    finished exchange, and of the tensors with it, when it is scheduled next: in about one step of eight not before
    the next gather has begun. Over a run that happens, so the peak counts what is let go of late beside what is
    gathered.
    """
    train, ranks, count = trial.train, trial.world.size, sizes(shapes)
    each = weight_bytes(train)
    kept = 4 if train.master_weights else each
    gradients = shard(count.all, ranks) * kept
    last = count.blocks[-1] if count.blocks else 0
    block, root = last * each, count.root * each
    several = ranks > 1
    copied = block if several and train.device == "cpu" else 0
    stays = train.reshard_after_forward is False
    scattered = last * communicated_bytes(train)
    fetched = block * (2 if several else 1)
    earlier = (len(count.blocks) - 1) * block if stays and block else 0
    return Holding(
        steady={
            "weights": shard(count.all, ranks) * kept,
            "optimizer states": shard(count.all, ranks) * STATE_BYTES[train.optimizer] // 4 * kept,
        },
        gradient_bytes=0 if train.grad_accum > 1 else kept / ranks,
        new_gradient_bytes=each,
        held={"gradients": gradients} if train.grad_accum > 1 else {},
        forward={"gathered weights": root + earlier + fetched, "gloo's copies": copied},
        forward_end={"gathered weights": root + earlier + fetched},
        backward={"gathered weights": root + (0 if stays else fetched)},
        kept_gathered_per_block=block if stays else 0,
        first_block={"buckets": scattered},
        between_blocks={
            "gloo's copies": (scattered if copied else 0) + (0 if stays else copied),
            "temporaries": shard(last, ranks) * each if kept > each and several else 0,
        },
        exchange={"gradients": gradients, "gathered weights": root},
        step={"gradients": gradients},
    )
