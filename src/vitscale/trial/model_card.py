"""The card of a model: what tracing it once counts, for any number of images.

A model is traced on meta tensors at two batch sizes (`vitscale.models.tracing`). Every count is then a straight line
in the number of images (`PerImage`). The card needs neither torch nor the model: it is part of a study's record, so
that a laptop that has neither plans, reports and predicts with it.

A model is traced as it runs through its parts, in the order of forward: what comes before the first repeated block,
each block, what lies between two blocks, what follows the last one, and the loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from vitscale.trial.model_spec import ModelSpec

ComputeDtype = Literal["fp32", "bf16", "fp16"]
TRACER_VERSION = "3"
"""Raised with every change of what a trace counts, so that cards of before are made anew."""


_Amount = Annotated[int, Field(ge=-(2**62), le=2**62)]
_Count = Annotated[int, Field(ge=0, le=2**50)]
_Size = Annotated[int, Field(ge=1, le=2**40)]
_Shape = Annotated[tuple[_Size, ...], Field(max_length=8)]
_MOST_PARTS = 10_000
"""Limits, for a card is input and may say anything: parts of a model, and modules of a part."""


class PerImage(NamedTuple):
    """An amount that is `fixed + per_image * images`: bytes, FLOPs or elements.

    Example: a convolution's weights are cast once whatever the batch (`fixed`), its output grows with it
    (`per_image`). `PerImage(100, 20).of(8)` is 260.
    """

    fixed: _Amount = 0
    per_image: _Amount = 0

    def of(self, images: int) -> int:
        """Return the amount for so many images."""
        return self.fixed + self.per_image * images


_Lines = Annotated[tuple[PerImage, ...], Field(min_length=1, max_length=64)]


class _CardRecord(BaseModel):
    """Base of a card and its parts: immutable; unknown keys are refused, for a card is input."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


class TraceRequest(_CardRecord):
    """All that a card depends on, but for the versions of the libraries that build the model.

    The micro-batch, the engine and the number of ranks are no part of it.
    """

    model: ModelSpec
    """Resolved, without pretrained weights."""
    model_digest: str | None = None
    """SHA-256 of the configuration or of the factory's module, where the model has such a file."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Kind of device to count for: it decides how attention computes, and what autocast casts."""
    weight_dtype: ComputeDtype = "fp32"
    autocast_dtype: ComputeDtype | None = None
    """The dtype in which autocast multiplies; None without autocast."""
    checkpointing: bool = False
    """Whether blocks keep only their input, and compute the rest again in backward."""


class CardModule(_CardRecord):
    """A module with trainable tensors of its own."""

    name: str
    """Dotted, as `named_modules` has it; "" for the model itself."""
    shapes: tuple[_Shape, ...] = Field(min_length=1, max_length=1000)
    """Shapes of these tensors, in the order of registration."""
    is_cast: bool = False
    """Whether it is a linear layer or a convolution, whose weights autocast casts."""
    cast_elements: _Count = 0
    """Elements of these tensors of which autocast makes a copy in its dtype, once in each forward."""

    @property
    def elements(self) -> int:
        """Elements of all these tensors."""
        return sum(math.prod(shape) for shape in self.shapes)


class CardPart(_CardRecord):
    """One part of a model, in the order of forward.

    Bytes are those of one micro-batch, without its images and labels, and without weights, gradients of weights and
    autocast's copies of weights, which depend on the engine. At a moment of a part's forward or backward, the bytes
    that are there are the sum of `kept` over this part and those before it, and the part's line for that moment. In
    backward a line may be negative: a block's output, which counts as kept by the block that has made it, is given
    back before that block's own backward begins.
    """

    name: str
    """The block's dotted name, or "before the blocks", "between blocks", "after the blocks", "loss"."""
    block: Annotated[int, Field(ge=-1, le=_MOST_PARTS)]
    """The number of the repeated block, from 1 on; 0 for what lies before or between blocks, -1 behind the last."""
    modules: tuple[CardModule, ...] = Field(default=(), max_length=_MOST_PARTS)
    """In the order of forward; a module that is used in several parts stands in the first."""
    kept: PerImage = PerImage()
    """Bytes that the part's forward makes, and that are there when backward begins: each tensor counts once, in the
    part that makes it. (With checkpointing a part keeps its output, which is the next block's input.)"""
    forward: _Lines = (PerImage(),)
    """Bytes beside what is kept so far (this part's `kept` included), at the moments of its forward that can be the
    highest. Which one is the highest depends on the number of images."""
    backward: _Lines = (PerImage(),)
    """The same in its backward: gradients that are passed on, temporaries (16-bit gradients of weights before autocast
    turns them into fp32 among them), and what checkpointing computes again."""
    largest_batch_norm: PerImage = PerImage()
    """Bytes in fp32 of the largest input of the part's batch norms: norms over several ranks work on copies of it."""
    forward_flops: PerImage = PerImage()
    """FLOPs of the part's forward: its share of the work decides when gradients are ready to be sent."""


class ModelCard(_CardRecord):
    """Counts of one model under one request."""

    request: TraceRequest
    versions: dict[str, str]
    """Library or "tracer" -> version with which it was traced."""
    parts: tuple[CardPart, ...] = Field(min_length=1, max_length=_MOST_PARTS)
    frozen_elements: _Count = 0
    """Elements of parameters that are not trained."""
    buffer_bytes: _Count = 0
    """Bytes of the buffers, such as a batch norm's running mean, in the weights' dtypes."""
    batch_norm_channels: tuple[_Size, ...] = Field(default=(), max_length=_MOST_PARTS)
    """Channels of each batch norm, in the order of forward."""
    logits: PerImage = PerImage()
    """Bytes of the model's output, which the loop holds until backward is over."""
    forward_flops: dict[str, PerImage] = Field(default={})
    """Kind of operation ("matmul", "convolution", "attention") -> FLOPs of a forward; 1 multiply-add is 2 FLOP."""
    backward_flops: dict[str, PerImage] = Field(default={})
    """The same of a backward, without what checkpointing computes again."""
    recomputed_flops: PerImage = PerImage()
    """FLOPs that checkpointing computes again."""

    @cached_property
    def trainable_parameters(self) -> int:
        """Number of parameters that get a gradient."""
        return sum(module.elements for module in self.modules())

    @cached_property
    def parameters(self) -> int:
        """Number of all parameters, frozen ones included, as `sum(p.numel() for p in model.parameters())` counts."""
        return self.trainable_parameters + self.frozen_elements

    def modules(self) -> Iterator[CardModule]:
        """Yield all modules with trainable tensors, in the order of forward."""
        for part in self.parts:
            yield from part.modules

    def flops(self, direction: Literal["forward", "backward"]) -> PerImage:
        """Return the FLOPs of a forward or of a backward, all kinds of operation together."""
        by_kind = self.forward_flops if direction == "forward" else self.backward_flops
        fixed = sum(amount.fixed for amount in by_kind.values())
        per_image = sum(amount.per_image for amount in by_kind.values())
        return PerImage(fixed, per_image)
