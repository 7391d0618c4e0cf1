"""What training keeps beside activations, as a wrapper has it: between steps, and more at each stage of one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from vitscale.trial.model_cost import ParameterShapes
from vitscale.trial.trial import TrainSpec

Parts = Mapping[str, int]
"""Bytes by what they are for."""

STATE_BYTES = {"adamw": 8, "lamb": 8, "sgd": 4}
"""Of optimizer state per parameter in fp32: two moments, or one momentum. ZeRO (arXiv 1910.02054), section 3.1."""


class Sizes(NamedTuple):
    """Parameter counts."""

    all: int
    """Of the whole model."""
    blocks: tuple[int, ...]
    """Of each block that engines wrap."""
    largest_of_block: int
    """Of the largest tensor of a block."""

    @property
    def root(self) -> int:
        """Of all but the blocks."""
        return self.all - sum(self.blocks)


@lru_cache(maxsize=256)
def sizes(shapes: ParameterShapes) -> Sizes:
    """Counts of a model's shapes."""
    wrapped = [block for block in shapes.each() if block.wrapped]
    largest = max(
        (math.prod(shape) for block in wrapped for module in block.modules for shape in module.tensors), default=0
    )
    return Sizes(sum(block.elements for block in shapes.each()), tuple(block.elements for block in wrapped), largest)


@dataclass(frozen=True)
class Holding:
    """Bytes on one rank. Everything but `steady` is on top of it."""

    steady: Parts
    """From one step to the next."""
    gradient_bytes: float
    """Per parameter whose gradient backward has made: what stays of it until the step."""
    new_gradient_bytes: int
    """Per element of a gradient just made, before anything is done with it."""
    held: Parts = field(default_factory=dict)
    """Gradients of earlier micro-steps, in forward and backward of the later ones."""
    held_buckets: Parts = field(default_factory=dict)
    """Buckets that an earlier micro-step's backward has allocated, in the forward of the later ones."""
    forward: Parts = field(default_factory=dict)
    """Before the last block's forward: gathered weights, and those on their way."""
    forward_end: Parts = field(default_factory=dict)
    """When the last block's forward is over."""
    backward: Parts = field(default_factory=dict)
    """During all of backward."""
    kept_gathered_per_block: int = 0
    """Gathered weights of each block whose backward is still to come."""
    bucket: int = 0
    """Elements of a bucket that is exchanged during backward as soon as it is full; 0: there is none."""
    flush: Parts = field(default_factory=dict)
    """Per element of a full bucket, while it is exchanged."""
    from_first_flush: Parts = field(default_factory=dict)
    """During backward, when the first bucket has been exchanged."""
    first_block: Parts = field(default_factory=dict)
    """During backward, when the gradients of the first whole block have been exchanged."""
    between_blocks: Parts = field(default_factory=dict)
    """Beside all of the above, after a block's gradients have been scattered, while a block is gathered."""
    exchange: Parts = field(default_factory=dict)
    """When backward is over and gradients are exchanged: all there is beside `steady`."""
    step: Parts = field(default_factory=dict)
    """While the optimizer works: all there is beside `steady`."""


def weight_bytes(train: TrainSpec) -> int:
    """Of a weight that forward computes with; autocast casts fp32 weights, DeepSpeed's fp16 keeps them in fp16."""
    deepspeed_fp16 = train.precision == "fp16" and train.wrapper == "deepspeed"
    return 2 if train.precision == "bf16-params" or deepspeed_fp16 else 4


def communicated_bytes(train: TrainSpec) -> int:
    """Of a gradient as it travels: the weights' own dtype unless the study names another."""
    return {"fp32": 4, "bf16": 2, "fp16": 2, None: weight_bytes(train)}[train.gradient_dtype]


def shard(elements: int, ranks: int) -> int:
    """Elements of the largest of `ranks` equal parts."""
    return -(-elements // ranks)


def added(*parts: Parts) -> dict[str, int]:
    """Parts of like name added up."""
    total: dict[str, int] = {}
    for each in parts:
        for name, amount in each.items():
            total[name] = total.get(name, 0) + amount
    return total
