"""Bytes that a rank holds under FSDP2, beside activations, where the model's blocks are alike."""

from __future__ import annotations

from dataclasses import replace

from vitscale.engines.fsdp2.sharding import Sharding
from vitscale.engines.states import RankStates, Sizes, added, shard, sizes, state_bytes
from vitscale.trial.model_cost import ParameterShapes
from vitscale.trial.trial import Trial


def states(trial: Trial, shapes: ParameterShapes) -> RankStates:
    """Return what FSDP2 holds of a model: shards, and weights that are gathered block by block.

    Shards are those of ZeRO's third stage (arXiv 1910.02054, section 5.3). All else follows torch 2.13
    (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_collectives.py).

    Gathered weights land in a flat buffer, which stays until the next gather, and are copied out of it. In backward the
    next block is gathered meanwhile, so that two blocks are there. Gradients of a whole block are copied into a flat
    buffer and scattered; it stays until the next block's gradients are scattered. Embedding and head are gathered from
    forward to the end of backward. One rank copies without a buffer. A block's fp32 shards are cast before they are
    gathered.

    With replicas (`Sharding.reduced_bytes`) the shards of a block's gradients are all-reduced in the buffer that they
    were scattered into. Where gradients are cast or accumulated, FSDP2 holds these buffers until backward is over
    (`_all_reduce_state`).

    gloo works on its own copy of what it gathers and scatters (ProcessGroupGloo.cpp). Its thread lets go of a finished
    exchange, and of the tensors with it, when it is scheduled next: in about one step of eight only after the next
    gather has begun. In a whole run that happens, so the peak counts what is let go of late beside what is gathered.

    With shards on the host (`CPUOffloadPolicy`) the device holds none: they are copied to it to be gathered, and
    scattered gradients go to the host at once (`all_gather_inputs` in _fsdp_param.py, `foreach_reduce`).
    """
    train = trial.train
    sharding = Sharding.of(trial)
    count = sizes(shapes)
    blocks = len(count.blocks)
    block_elements = _block_elements(count)
    block_bytes = block_elements * sharding.weight_bytes
    root_bytes = count.root * sharding.weight_bytes
    shard_elements = shard(count.all, sharding.ranks)
    gradients = {"gradients": shard_elements * sharding.shard_bytes}
    accumulates = train.grad_accum > 1
    shards = {
        "weights": shard_elements * sharding.shard_bytes,
        "optimizer states": shard_elements * state_bytes(train) // 4 * sharding.shard_bytes,
    }
    # On the device there are gradients until they are scattered, block by block; the step is on the host.
    device_gradients = {"gradients": 0} if sharding.has_shards_on_host else gradients

    reduced = {"buckets": shard_elements * sharding.reduced_bytes}
    fetched_bytes = 2 * block_bytes if sharding.has_buffers else block_bytes
    has_gathered_blocks = sharding.stays_gathered and block_bytes > 0
    earlier_bytes = (blocks - 1) * block_bytes if has_gathered_blocks else 0
    forward_bytes = root_bytes + earlier_bytes + fetched_bytes
    gathered_blocks: tuple[int, ...] = ()
    if has_gathered_blocks:
        gathered_blocks = tuple(open_blocks * block_bytes for open_blocks in range(blocks + 1))
    backward_bytes = root_bytes if sharding.stays_gathered else root_bytes + fetched_bytes
    scatter_buffer_bytes = block_elements * sharding.sent_bytes
    return RankStates(
        steady={} if sharding.has_shards_on_host else shards,
        gradient_bytes=sharding.scattered_bytes(accumulates=accumulates),
        new_gradient_bytes=sharding.weight_bytes,
        held=device_gradients if accumulates else {},
        forward={"gathered weights": forward_bytes, "gloo's copies": block_bytes if sharding.has_gloo else 0},
        forward_end={"gathered weights": forward_bytes},
        backward={"gathered weights": backward_bytes},
        gathered_blocks=gathered_blocks,
        gathered_between=_copy_of_last_block(sharding, blocks, block_bytes),
        first_block={"buckets": scatter_buffer_bytes},
        between_blocks=_bytes_between_blocks(sharding, block_elements),
        exchange=device_gradients | {"gathered weights": root_bytes} | reduced,
        step=device_gradients,
        host=added(shards, gradients) if sharding.has_shards_on_host else {},
    )


def _bytes_between_blocks(sharding: Sharding, block_elements: int) -> dict[str, int]:
    """Return the bytes of copies that backward holds for a moment: between a block and the one that it gathers next.

    gloo exchanges copies of its own, and lets go of them late (see `states`). So it may still hold the gradients of the
    block, which have been scattered (without replicas: `Sharding.keeps_scattered`), and its weights, where backward has
    gathered them.

    The next block's weights are gathered in the precision of computing. A rank whose shards are wider, as fp32 master
    weights are in bf16 training, casts its shard of the block for that. A rank whose shards lie on the host copies its
    shard of the block to the device first. A single rank gathers nothing.

    Args:
        sharding: how the ranks shard.
        block_elements: elements of a block.
    """
    scattered_bytes = block_elements * sharding.sent_bytes if sharding.keeps_scattered else 0
    gathered_bytes = 0 if sharding.stays_gathered else block_elements * sharding.weight_bytes
    return {
        "gloo's copies": scattered_bytes + gathered_bytes if sharding.has_gloo else 0,
        "temporaries": shard(block_elements, sharding.ranks) * sharding.copied_shard_bytes,
    }


def _copy_of_last_block(sharding: Sharding, blocks: int, block_bytes: int) -> tuple[int, ...]:
    """Return the bytes of gloo's copy of the last block's weights, by the number of blocks whose backward is not over.

    Backward gathers the last block and at once the one before it, so that gloo may still hold both copies then. Where
    gloo may hold a copy of scattered gradients later, `_bytes_between_blocks` is as much already. Empty: no such copy.

    Example: three blocks of 10 bytes are (0, 0, 0, 10).
    """
    is_counted_elsewhere = sharding.keeps_scattered or not sharding.has_gloo
    if is_counted_elsewhere or sharding.stays_gathered or block_bytes == 0:
        return ()
    return (0,) * blocks + (block_bytes,)


def stage_states(trial: Trial, shapes: ParameterShapes, *, later: bool, directly: bool) -> RankStates:
    """Return what FSDP2 holds of a rank's stages during one micro-batch.

    torch's schedules keep whole gradients, and the weights that backward has gathered, until the step's last backward
    is over, and scatter then (`backward_maybe_with_nosync` and `perform_reduce_grad` in
    torch/distributed/pipelining/stage.py). A forward between two backwards frees each block's weights again.

    Args:
        trial: the trial, with one micro-step or as the second of two.
        shapes: tensors of this rank's stages.
        later: whether another micro-batch's backward came before.
        directly: whether no forward lies between the two.
    """
    sharding = Sharding.of(trial)
    count = sizes(shapes)
    blocks = len(count.blocks)
    block_bytes = _block_elements(count) * sharding.weight_bytes
    gradients = {"gradients": count.all * sharding.sent_bytes}
    scatter_buffer_bytes = max((count.root, *count.blocks)) * sharding.sent_bytes
    is_all_gathered = directly or sharding.stays_gathered
    gathered_blocks: tuple[int, ...] = ()
    gathered_between: tuple[int, ...] = ()
    if block_bytes > 0:
        gathered_blocks = (blocks * block_bytes,) * (blocks + 1)
    if block_bytes > 0 and not is_all_gathered:
        buffer_bytes = block_bytes if sharding.has_buffers else 0
        gathered_between = _gathered_between(blocks, block_bytes, buffer_bytes=buffer_bytes)
        # While the last two run backward, nothing is fetched ahead.
        gathered_blocks = gathered_blocks[:2] + gathered_between[2:]
    has_gloo_block = sharding.has_gloo and block_bytes > 0
    has_late_gather = has_gloo_block and not is_all_gathered
    return replace(
        states(trial, shapes),
        gradient_bytes=0 if later else sharding.sent_bytes,
        held=gradients if later else {},
        backward={"gathered weights": count.root * sharding.weight_bytes},
        gathered_blocks=gathered_blocks,
        gathered_between=gathered_between,
        first_block={},
        between_blocks={"gloo's copies": block_bytes if has_late_gather else 0},
        exchange=gradients
        | {
            "gathered weights": sum(count.blocks) * sharding.weight_bytes,
            "buckets": scatter_buffer_bytes,
            "gloo's copies": scatter_buffer_bytes if has_gloo_block else 0,
        },
    )


def _gathered_between(blocks: int, block_bytes: int, *, buffer_bytes: int) -> tuple[int, ...]:
    """Return the bytes of blocks while another is gathered, by the number of blocks whose backward is not over.

    Those whose backward is over stay gathered.

    Example: three blocks of 10 bytes without a buffer are (30, 30, 20, 10), for 0 to 3 blocks that are not over.

    Args:
        blocks: number of blocks.
        block_bytes: bytes of each.
        buffer_bytes: bytes of the buffer that a block arrives in.
    """
    gathered_counts = (min(blocks, blocks - open_blocks + 1) for open_blocks in range(blocks + 1))
    return tuple(block_count * block_bytes + buffer_bytes for block_count in gathered_counts)


def _block_elements(count: Sizes) -> int:
    """Return the elements of a block, all of which are alike; 0 where the model has none."""
    return count.blocks[-1] if count.blocks else 0
