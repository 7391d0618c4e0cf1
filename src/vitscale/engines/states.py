"""Bytes that a rank holds beside activations, between steps and at each moment of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from vitscale.engines.dtypes import weight_bytes
from vitscale.trial.model_cost import ParameterShapes
from vitscale.trial.model_counts import ModelBlock
from vitscale.trial.trial import TrainSpec, Trial

Parts = Mapping[str, int]
"""Purpose of some bytes, such as "weights" -> their number."""

STATE_BYTES = {"adamw": 8, "lamb": 8, "sgd": 4}
"""Bytes of optimizer state per fp32 parameter: two moments, or one momentum. ZeRO (arXiv 1910.02054), section 3.1."""


_FLAT_COPIES = ("fp16", "bf16-params")
"""Precisions in which DeepSpeed at stage 0 keeps other copies for an optimizer of its own than for one of torch's."""


def optimizer_of_states(train: TrainSpec) -> str:
    """Return the optimizer of `STATE_BYTES` that keeps the same states; the name of another one as it is.

    Adam and AdamW of a user's DeepSpeed file are DeepSpeed's FusedAdam: two fp32 moments, as torch's AdamW has.
    """
    if train.optimizer != "deepspeed_config":
        return train.optimizer
    section = (train.deepspeed_config or {}).get("optimizer")
    name = str(section.get("type")) if isinstance(section, dict) else train.optimizer
    has_flat_copies = train.zero_stage == 0 and train.precision in _FLAT_COPIES
    is_adam = name.lower() in ("adam", "adamw")
    return "adamw" if is_adam and not has_flat_copies else name


def state_bytes(train: TrainSpec) -> int:
    """Return the bytes of optimizer state per fp32 parameter: SGD without momentum keeps none."""
    optimizer = optimizer_of_states(train)
    if optimizer == "sgd" and train.momentum == 0:
        return 0
    return STATE_BYTES[optimizer]


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
    """Return the parameter counts of a model with these shapes."""
    wrapped = [block for block in shapes.each() if block.wrapped]
    return Sizes(
        all=sum(block.elements for block in shapes.each()),
        blocks=tuple(block.elements for block in wrapped),
        largest_of_block=max(map(_largest_tensor, wrapped), default=0),
    )


def _largest_tensor(block: ModelBlock) -> int:
    return max((math.prod(shape) for module in block.modules for shape in module.tensors), default=0)


@dataclass(frozen=True)
class RankStates:
    """Bytes on one rank. Everything but `steady` comes on top of `steady`, at the moment that its name says.

    A moment that is left out has nothing on top.
    """

    steady: Parts
    """At all moments."""
    gradient_bytes: float
    """Bytes of a gradient from when backward has made it until the step, per element."""
    new_gradient_bytes: int
    """Bytes of a gradient when it is just made, before anything is done with it, per element."""
    held: Parts = field(default_factory=dict)
    """Gradients of earlier micro-steps, in forward and backward of the later ones."""
    held_buckets: Parts = field(default_factory=dict)
    """Buckets that an earlier micro-step's backward has allocated, in the forward of the later ones."""
    backward: Parts = field(default_factory=dict)
    """During all of backward."""
    bucket: int = 0
    """Elements of a bucket that is exchanged during backward as soon as it is full; 0: there is none."""
    flush: Parts = field(default_factory=dict)
    """During the exchange of a full bucket, per element of it."""
    from_first_flush: Parts = field(default_factory=dict)
    """During backward once the first bucket has been exchanged."""
    exchange: Parts = field(default_factory=dict)
    """All beside `steady` when backward is over and gradients are exchanged."""
    step: Parts = field(default_factory=dict)
    """All beside `steady` while the optimizer works."""
    host: Parts = field(default_factory=dict)
    """In the host's memory at all moments, for a rank on a GPU; on a CPU, where both are one, it is in `steady`."""

    def in_backward(self, kept_elements: int, new_elements: int, *, flushed: int = 0, after: bool) -> Parts:
        """Return the bytes of gradients, and of their exchange among ranks, at one moment of backward.

        Backward makes a new gradient, of `new_gradient_bytes` an element. Then the gradient is kept until the step, or
        copied into a bucket, whose own bytes are part of `backward`. A full bucket is flushed: exchanged among ranks.

        Example: let fp32 gradients be exchanged in a bucket of 100 elements (`new_gradient_bytes` 4, `flush`
        {"temporaries": 4}). When a gradient of 30 elements does not fit beside the 80 in the bucket,
        `in_backward(0, 30, flushed=80, after=False)` is {"gradients": 120, "temporaries": 320}.

        Args:
            kept_elements: elements of the gradients that are kept until the step.
            new_elements: elements of the gradients that have just been made.
            flushed: elements that are being exchanged; 0 where no bucket is full.
            after: whether a bucket has been exchanged before in this backward.
        """
        # More elements than a bucket has are one large tensor. It is not copied into the bucket, but exchanged where
        # backward has put it, so it still has the bytes of a new gradient.
        unbucketed_elements = flushed if flushed > self.bucket else 0
        kept_bytes = int(kept_elements * self.gradient_bytes)
        new_bytes = (new_elements + unbucketed_elements) * self.new_gradient_bytes
        exchange_copies = {part: flushed * element_bytes for part, element_bytes in self.flush.items()}
        exchanged_before = self.from_first_flush if after else {}
        return added(self.held, {"gradients": kept_bytes + new_bytes}, exchange_copies, exchanged_before)


def shard(elements: int, ranks: int) -> int:
    """Return the elements of one of `ranks` equal parts, the last of which is padded."""
    return -(-elements // ranks)


def added(*parts: Parts) -> dict[str, int]:
    """Return the sum of parts, name by name."""
    total: dict[str, int] = {}
    for summand in parts:
        for name, part_bytes in summand.items():
            total[name] = total.get(name, 0) + part_bytes
    return total


def whole_states(trial: Trial, shapes: ParameterShapes) -> RankStates:
    """Return weights, gradients and the optimizer's states in one dtype, as in ZeRO (arXiv 1910.02054), section 3.1.

    The masters that mixed precision keeps there are left out: autocast's fp32 weights are their own masters.
    """
    train = trial.train
    elements = sizes(shapes).all
    element_bytes = weight_bytes(train)
    element_state_bytes = state_bytes(train) // 4 * element_bytes
    gradients = {"gradients": elements * element_bytes}
    # LAMB's updates are made of all parameters at once, and are as large (pytorch_optimizer's `_step_foreach`).
    updates = {"temporaries": elements * element_bytes} if train.optimizer == "lamb" else {}
    accumulates = train.grad_accum > 1
    return RankStates(
        steady={"weights": elements * element_bytes, "optimizer states": elements * element_state_bytes},
        gradient_bytes=0 if accumulates else element_bytes,
        new_gradient_bytes=element_bytes,
        held=gradients if accumulates else {},
        exchange=gradients,
        step=gradients | updates,
    )
