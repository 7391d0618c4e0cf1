"""What a rank holds under FSDP2, beside activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vitscale.engines.dtypes import communicated_bytes, weight_bytes
from vitscale.engines.parts import Around, InTurn, Part
from vitscale.engines.states import Parts, RankStates, added, shard, sizes, state_bytes
from vitscale.trial.model_cost import ParameterShapes
from vitscale.trial.trial import Trial


def states(trial: Trial, shapes: ParameterShapes) -> RankStates:
    """Shards as in ZeRO's third stage (arXiv 1910.02054, section 5.3), gathered block by block.

    This follows torch 2.13 (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_collectives.py).
    Gathered weights land in a flat buffer, which stays until the next gather, and are copied out of it. In backward the
    next block is gathered meanwhile, so that two blocks are there. Gradients of a whole block are copied into a flat
    buffer and scattered; it stays until the next block's gradients are scattered. Embedding and head are gathered from
    forward to the end of backward. One rank copies without a buffer. A block's fp32 shards are cast before they are
    gathered.

    gloo works on its own copy of what it gathers and scatters (ProcessGroupGloo.cpp). Its thread lets go of a finished
    exchange, and of the tensors with it, when it is scheduled next: in about one step of eight only after the next
    gather has begun. In a whole run that happens, so the peak counts what is let go of late beside what is gathered.
    """
    train, ranks, count = trial.train, trial.layout.replicas, sizes(shapes)
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
    return RankStates(
        steady={
            "weights": shard(count.all, ranks) * kept,
            "optimizer states": shard(count.all, ranks) * state_bytes(train) // 4 * kept,
        },
        gradient_bytes=0 if train.grad_accum > 1 else kept / ranks,
        new_gradient_bytes=each,
        held={"gradients": gradients} if train.grad_accum > 1 else {},
        forward={"gathered weights": root + earlier + fetched, "gloo's copies": copied},
        forward_end={"gathered weights": root + earlier + fetched},
        backward={"gathered weights": root + (0 if stays else fetched)},
        gathered_blocks=tuple(left * block for left in range(len(count.blocks) + 1)) if stays and block else (),
        first_block={"buckets": scattered},
        between_blocks={
            "gloo's copies": (scattered if copied else 0) + (0 if stays else copied),
            "temporaries": shard(last, ranks) * each if kept > each and several else 0,
        },
        exchange={"gradients": gradients, "gathered weights": root},
        step={"gradients": gradients},
    )


def stage_states(trial: Trial, shapes: ParameterShapes, *, later: bool, directly: bool) -> RankStates:
    """What FSDP2 holds of a rank's stages during one micro-batch.

    torch's schedules keep whole gradients, and the weights that backward has gathered, until the step's last backward
    is over, and scatter then (`backward_maybe_with_nosync` and `perform_reduce_grad` in
    torch/distributed/pipelining/stage.py). A forward between two backwards frees each block's weights again.

    Args:
        trial: the trial, with one micro-step or as the second of two.
        shapes: tensors of this rank's stages.
        later: whether another micro-batch's backward came before.
        directly: whether no forward lies between the two.
    """
    train, ranks, count = trial.train, trial.layout.replicas, sizes(shapes)
    alone = states(trial, shapes)
    each, summed = weight_bytes(train), communicated_bytes(train)
    blocks, block = len(count.blocks), (count.blocks[-1] if count.blocks else 0) * each
    buffer = block if ranks > 1 else 0
    copied = buffer if train.device == "cpu" else 0
    stay = directly or train.reshard_after_forward is False
    between = tuple(min(blocks, blocks - left + 1) * block + buffer for left in range(blocks + 1))
    at_last = min(1, blocks) + 1  # their backward fetches nothing ahead
    by_left = (*(blocks * block for _ in range(at_last)), *between[at_last:])
    whole, scattered = count.all * summed, max((count.root, *count.blocks)) * summed
    return replace(
        alone,
        gradient_bytes=0 if later else summed,
        held={"gradients": whole} if later else {},
        backward={"gathered weights": count.root * each},
        gathered_blocks=() if not block else (blocks * block,) * (blocks + 1) if stay else by_left,
        gathered_between=() if stay or not block else between,
        first_block={},
        between_blocks={"gloo's copies": 0 if stay else copied},
        exchange={
            "gradients": whole,
            "gathered weights": sum(count.blocks) * each,
            "buckets": scattered,
            "gloo's copies": scattered if copied else 0,
        },
    )


def around_parts(trial: Trial, rank_states: RankStates, parts: Sequence[Part], turn: InTurn | None) -> Around:
    """What FSDP2 holds around each part of a model of unlike blocks, in a pipeline's turn or outside one."""
    if turn is None:
        return _around_parts(trial, rank_states, parts)
    return _around_parts_in_turn(trial, rank_states, parts, turn)


def _around_parts(trial: Trial, rank_states: RankStates, parts: Sequence[Part]) -> Around:
    """What `states` describes, block by block.

    The root's weights and gradients stay whole from forward to the end of backward; its weights are let go of before
    its gradients are scattered (`post_backward`). The root's buffer is there while the root begins. While the parts
    behind the blocks run, the last block's buffer is there: in forward until the next gather, in backward because the
    last block is fetched ahead. In forward gloo has let go of its copy by the second part of a block: in none of 24
    steps was it still there at the end of a stage of two.
    """
    train, ranks = trial.train, trial.layout.replicas
    each, sent = weight_bytes(train), communicated_bytes(train)
    kept = 0.0 if train.grad_accum > 1 else (4 if train.master_weights else each) / ranks
    buffers, gloo = ranks > 1, ranks > 1 and train.device == "cpu"
    stays = train.reshard_after_forward is False
    numbers = range(1, max((part.block for part in parts), default=0) + 1)
    sizes = [0, *(sum(part.elements for part in parts if part.block == number) for number in numbers), 0]
    last = len(sizes) - 2
    root = sum(part.elements for part in parts if part.block < 1)
    behind = sum(part.elements for part in parts if part.block < 0)

    def gathered(block: int, arriving: int, late: int = 0) -> Parts:
        """`block`: the one whose weights are there; `arriving`, `late`: elements in a buffer, and in gloo's copies."""
        there = sum(sizes[1 : block + 1]) if stays else sizes[block]
        return {"gathered weights": (root + there + buffers * arriving) * each, "gloo's copies": gloo * late * each}

    def scattered(block: int, copies: int = 1) -> Parts:
        return {"buckets": sizes[block] * sent, "gloo's copies": gloo * (copies - 1) * sizes[block] * sent}

    def made(block: int, done: int, new: int) -> Parts:
        earlier = sum(sizes[block + 1 :]) if block >= 0 else 0
        whole = (behind if block >= 0 else 0) + done + new
        return {"gradients": whole * each + int(earlier * kept)}

    forward: list[Parts] = []
    backward: list[Parts] = []
    between: list[tuple[int, float, Parts]] = []
    for number, part in enumerate(parts):
        block = part.block
        if block > 0:
            forward.append(gathered(block, sizes[block], sizes[block] if parts[number - 1].block != block else 0))
        elif part.modules:
            forward.append(gathered(last if stays and block else 0, sizes[last] if block else root))
        else:  # the loss: the model's forward is over, and its backward has not begun
            forward.append(gathered(last if stays else 0, 0))
            backward.append(forward[-1])
            continue
        index = block if block >= 0 else last + 1
        done = sum(other.elements for other in parts[number + 1 :] if other.block == block)
        fetched = 0 if stays or index < 1 else sizes[index - 1]
        whole = index if stays or block > 0 else 0
        now = added(gathered(min(whole, last), fetched), made(block, done, max(part.tensors)))
        backward.append(added(now, scattered(index + 1)) if block >= 0 else now)
        if block > 0 and (number + 1 == len(parts) or parts[number + 1].block != block):
            own = sizes[block] if block == last else 0  # the last block's own copy is late: it was fetched ahead too
            late = added(gathered(block, fetched, fetched + own), made(block, 0, 0), scattered(block + 1, 2))
            cast = shard(sizes[block + 1], ranks) * each if buffers and train.master_weights else 0
            between.append((number, 0.0, added(late, {"temporaries": cast})))
        if block > 0 and parts[number - 1].block != block:
            copied = added(gathered(0, fetched), made(block, sizes[block], 0), scattered(block))
            between.append((number - 1, 0.0, copied))
    exchange = {"gradients": rank_states.exchange["gradients"] + root * each, "buckets": root * sent}
    return Around(
        [added(rank_states.held, own) for own in forward],
        [added(rank_states.held, own) for own in backward],
        [(number, gone, added(rank_states.held, own)) for number, gone, own in between],
        exchange,
    )


def _around_parts_in_turn(trial: Trial, rank_states: RankStates, parts: Sequence[Part], turn: InTurn) -> Around:
    """What `stage_states` describes, for a stage whose blocks are not alike; each is a part by itself.

    Gradients stay whole, and so do weights that backward has gathered; a forward frees them block by block.
    """
    ranks, each, summed = trial.layout.replicas, weight_bytes(trial.train), communicated_bytes(trial.train)
    buffers, gloo = ranks > 1, ranks > 1 and trial.train.device == "cpu"
    stays = trial.train.reshard_after_forward is False
    sizes = [part.elements if part.block > 0 else 0 for part in parts]
    root = sum(part.elements for part in parts) - sum(sizes)
    last = max((number for number, size in enumerate(sizes) if size), default=0)
    forward: list[Parts] = []
    backward: list[Parts] = []
    between: list[tuple[int, float, Parts]] = []

    def gathered(there: int, arriving: int, late: int = 0) -> Parts:
        arrived = {"gathered weights": (root + there + buffers * arriving) * each}
        return added(rank_states.held, arrived, {"gloo's copies": gloo * late * each})

    for number, part in enumerate(parts):
        own, earlier, from_here = sizes[number], sum(sizes[:number]), sum(sizes[number:])
        if turn.whole:
            forward.append(gathered(from_here, 0))
        elif own:
            forward.append(gathered(own + stays * earlier, own, own))
        else:
            forward.append(gathered(stays * earlier, sizes[last] if number else root))
        fetched = 0 if turn.whole or stays or number == 0 else sizes[number - 1]
        there = sum(sizes) if turn.whole or stays else from_here
        made = 0 if rank_states.held else sum(part.elements for part in parts[number + 1 :])
        new = {"gradients": made * summed + max(part.tensors, default=0) * each}
        backward.append(added(gathered(there, fetched), new))
        if own and not (turn.whole or stays):
            late = fetched + (own if number == last or not fetched else 0)
            between.append((number, 0.0, added(gathered(there, fetched or own, late), {"gradients": made * summed})))
    return Around(forward, backward, between, rank_states.exchange)
