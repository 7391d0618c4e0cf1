"""Builds the real model that a `ModelSpec` describes, with random weights from torch's global generator."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from vitscale.model_spec import ModelSpec
from vitscale.models.factory import build_factory
from vitscale.models.hub import build_hf
from vitscale.models.quiet import quiet_transformers
from vitscale.models.vit import VisionTransformer

__all__ = ["BUILDERS", "build", "logits_of", "preload"]

BUILDERS: Mapping[str, Callable[[ModelSpec], nn.Module]] = {
    "name": VisionTransformer,
    "hf": build_hf,
    "factory": build_factory,
}
"""The key of `[model]` that says which model -> what builds it."""


def build(spec: ModelSpec) -> nn.Module:
    """The model of a resolved spec, on the CPU, in fp32, in training mode.

    Called as `model(images)` with float images `[b, 3, H, W]`; see `logits_of` for what comes back. Seed torch before
    the call: ranks that start from the same seed start from the same weights.

    Raises `RequestError` where the spec cannot be built, with the reason.
    """
    key = next(key for key in BUILDERS if getattr(spec, key) is not None)
    return BUILDERS[key](spec).train()


def preload(spec: ModelSpec) -> None:
    """Imports the model's library now, so that its seconds count as imports and not as building the model."""
    if spec.hf is not None:
        # Naming the class is what loads its module, and most of transformers with it.
        _ = quiet_transformers().AutoModelForImageClassification


def logits_of(output: Tensor | object) -> Tensor:
    """Logits `[b, classes]` of a model's output: the output itself, or its `logits` as transformers' models have it."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise TypeError(f"the model returned {type(output).__name__}: neither a tensor nor an object with .logits")
    return logits
