"""What training keeps beside activations, between steps and at each stage of a step: plain, under DDP and FSDP2."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from vitscale.trial.model_cost import ParameterShapes
from vitscale.trial.trial import TrainSpec, Trial

Parts = Mapping[str, int]
"""What bytes are for -> their number."""

STATE_BYTES = {"adamw": 8, "lamb": 8, "sgd": 4}
"""Bytes of optimizer state per fp32 parameter: two moments, or one momentum. ZeRO (arXiv 1910.02054), section 3.1."""


_FLAT_COPIES = ("fp16", "bf16-params")
"""Precisions in which DeepSpeed at stage 0 keeps other copies for an optimizer of its own than for one of torch's."""


def optimizer_of_states(train: TrainSpec) -> str:
    """The optimizer of `STATE_BYTES` that keeps the same states; the name of another one as it is.

    Adam and AdamW of a user's DeepSpeed file are DeepSpeed's FusedAdam: two fp32 moments, as torch's AdamW has.
    """
    if train.optimizer != "deepspeed_config":
        return train.optimizer
    part = (train.deepspeed_config or {}).get("optimizer")
    named = str(part.get("type")) if isinstance(part, dict) else train.optimizer
    has_flat_copies = not train.zero_stage and train.precision in _FLAT_COPIES
    return "adamw" if named.lower() in ("adam", "adamw") and not has_flat_copies else named


def state_bytes(train: TrainSpec) -> int:
    """Bytes of optimizer state per fp32 parameter: SGD without momentum keeps none."""
    optimizer = optimizer_of_states(train)
    return 0 if optimizer == "sgd" and not train.momentum else STATE_BYTES[optimizer]


class Sizes(NamedTuple):
    """Parameter counts."""

    all: int
    """Parameters of the whole model."""
    blocks: tuple[int, ...]
    """Parameters of each block that engines wrap."""
    largest_of_block: int
    """Parameters of the largest tensor in a block."""

    @property
    def root(self) -> int:
        """Parameters outside the blocks."""
        return self.all - sum(self.blocks)


@lru_cache(maxsize=256)
def sizes(shapes: ParameterShapes) -> Sizes:
    """Parameter counts of a model with these shapes."""
    wrapped = [block for block in shapes.each() if block.wrapped]
    largest = max(
        (math.prod(shape) for block in wrapped for module in block.modules for shape in module.tensors), default=0
    )
    return Sizes(sum(block.elements for block in shapes.each()), tuple(block.elements for block in wrapped), largest)


@dataclass(frozen=True)
class Holding:
    """Bytes on one rank. Everything but `steady` comes on top of `steady`."""

    steady: Parts
    """What stays from one step to the next."""
    gradient_bytes: float
    """What stays until the step, per parameter whose gradient backward has made."""
    new_gradient_bytes: int
    """What a gradient takes per element when it is just made, before anything is done with it."""
    held: Parts = field(default_factory=dict)
    """Gradients of earlier micro-steps, in forward and backward of the later ones."""
    held_buckets: Parts = field(default_factory=dict)
    """Buckets that an earlier micro-step's backward has allocated, in the forward of the later ones."""
    forward: Parts = field(default_factory=dict)
    """What is there before the last block's forward: gathered weights, and those on their way."""
    forward_end: Parts = field(default_factory=dict)
    """What is there when the last block's forward is over."""
    backward: Parts = field(default_factory=dict)
    """What is there during all of backward."""
    gathered_blocks: tuple[int, ...] = ()
    """Weights of blocks that are gathered in backward, by the number of blocks whose backward is not over; empty: none,
    or as many throughout, which are then in `backward`."""
    gathered_between: tuple[int, ...] = ()
    """The same between two blocks, while the next block's weights are copied out of their buffer; empty: as in
    `gathered_blocks`."""
    bucket: int = 0
    """Elements of a bucket that is exchanged during backward as soon as it is full; 0: there is none."""
    flush: Parts = field(default_factory=dict)
    """What an exchange takes per element of its full bucket."""
    from_first_flush: Parts = field(default_factory=dict)
    """What is there during backward once the first bucket has been exchanged."""
    first_block: Parts = field(default_factory=dict)
    """What is there during backward once the gradients of the first whole block have been exchanged."""
    between_blocks: Parts = field(default_factory=dict)
    """What comes on top after a block's gradients have been scattered, while another block is gathered."""
    exchange: Parts = field(default_factory=dict)
    """All there is beside `steady` when backward is over and gradients are exchanged."""
    step: Parts = field(default_factory=dict)
    """All there is beside `steady` while the optimizer works."""

    def in_backward(self, made: int, new: int, *, flushed: int = 0, after: bool) -> Parts:
        """Gradients and their exchange at one moment of backward.

        Args:
            made: elements of gradients that are made and stay as `gradient_bytes` says.
            new: elements of gradients that have just been made.
            flushed: elements of the full bucket that is exchanged just now.
            after: whether a bucket has been exchanged already.
        """
        outside_bucket = flushed if flushed > self.bucket else 0
        gradients = int(made * self.gradient_bytes) + (new + outside_bucket) * self.new_gradient_bytes
        exchanged = {part: flushed * each for part, each in self.flush.items()}
        return added(self.held, {"gradients": gradients}, exchanged, self.from_first_flush if after else {})


def shard(elements: int, ranks: int) -> int:
    """Elements of the largest of `ranks` equal parts."""
    return -(-elements // ranks)


def added(*parts: Parts) -> dict[str, int]:
    """The sum of parts, name by name."""
    total: dict[str, int] = {}
    for each in parts:
        for name, amount in each.items():
            total[name] = total.get(name, 0) + amount
    return total


def plain(trial: Trial, shapes: ParameterShapes) -> Holding:
    """Weights, gradients and the optimizer's states in one dtype, as in ZeRO (arXiv 1910.02054), section 3.1.

    The masters that mixed precision keeps there are left out: autocast's fp32 weights are their own masters.
    """
    train, elements = trial.train, sizes(shapes).all
    each = train.weight_bytes
    states = state_bytes(train) // 4 * each
    gradients = elements * each
    # LAMB's updates are made of all parameters at once, and are as large (pytorch_optimizer's `_step_foreach`).
    updates = {"temporaries": gradients} if train.optimizer == "lamb" else {}
    return Holding(
        steady={"weights": elements * each, "optimizer states": elements * states},
        gradient_bytes=0 if train.grad_accum > 1 else each,
        new_gradient_bytes=each,
        held={"gradients": gradients} if train.grad_accum > 1 else {},
        exchange={"gradients": gradients},
        step={"gradients": gradients} | updates,
    )


def ddp(trial: Trial, shapes: ParameterShapes) -> Holding:
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
    alone = plain(trial, shapes)
    if train.engine == "accelerate" and train.device == "cuda" and trial.world.size == 1:
        return alone  # Accelerate does not wrap it
    elements = sizes(shapes).all
    gradients = elements * train.weight_bytes
    views = train.gradient_as_bucket_view and train.grad_accum == 1
    own = "bf16" if train.precision == "bf16-params" else "fp32"
    cast = elements * train.communicated_bytes if train.gradient_dtype not in (None, own) else 0
    of_step = {name: size for name, size in alone.step.items() if name != "gradients"}
    return Holding(
        steady=added(alone.steady, {"buckets": gradients + (cast or gradients if train.device == "cuda" else 0)}),
        gradient_bytes=0 if views else alone.gradient_bytes,
        new_gradient_bytes=alone.new_gradient_bytes,
        held={} if views else alone.held,
        exchange=added({} if views else alone.exchange, {"buckets": cast} if cast else {}),
        step=of_step if train.gradient_as_bucket_view else alone.step,
    )


def fsdp2(trial: Trial, shapes: ParameterShapes) -> Holding:
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
    each = train.weight_bytes
    kept = 4 if train.master_weights else each
    gradients = shard(count.all, ranks) * kept
    last = count.blocks[-1] if count.blocks else 0
    block, root = last * each, count.root * each
    several = ranks > 1
    copied = block if several and train.device == "cpu" else 0
    stays = train.reshard_after_forward is False
    scattered = last * train.communicated_bytes
    fetched = block * (2 if several else 1)
    earlier = (len(count.blocks) - 1) * block if stays and block else 0
    return Holding(
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


def fsdp2_in_stages(trial: Trial, shapes: ParameterShapes, *, later: bool, directly: bool) -> Holding:
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
    alone = fsdp2(trial, shapes)
    each, summed = train.weight_bytes, train.communicated_bytes
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
