"""Builds the real model that a `ModelSpec` describes, with random weights from torch's global generator."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from vitscale.models.dry_run import refuse_other_sizes
from vitscale.models.factory import build_factory
from vitscale.models.hub import auto_class, build_hf
from vitscale.models.named import VisionTransformer, build_swin, quiet_transformers
from vitscale.models.segmentation import build_named_segmentation
from vitscale.models.weights import load_weights
from vitscale.trial.model_spec import ModelSpec

__all__ = ["BUILDERS", "build", "logits_of", "preload", "refuse_other_sizes"]

BUILDERS: Mapping[str, Callable[[ModelSpec], nn.Module]] = {
    "name": lambda spec: _named(spec)(spec),
    "hf": build_hf,
    "factory": build_factory,
}
"""The key of `[model]` that says which model -> what builds it."""


def _named(spec: ModelSpec) -> Callable[[ModelSpec], nn.Module]:
    if spec.task == "segmentation":
        return build_named_segmentation
    return VisionTransformer if spec.depths is None else build_swin


def build(spec: ModelSpec) -> nn.Module:
    """The model of a resolved spec, on the CPU, in fp32, in training mode, with pretrained weights where it names some.

    Called as `model(images)` with float images `[b, c, H, W]`; see `logits_of` for what comes back. Seed torch before
    the call: ranks that start from the same seed start from the same weights.

    Raises `RequestError` where the spec cannot be built, with the reason.
    """
    key = next(key for key in BUILDERS if getattr(spec, key) is not None)
    model = BUILDERS[key](spec)
    if spec.weights is not None:
        load_weights(model, spec.weights)
    return model.train()


def preload(spec: ModelSpec) -> None:
    """Imports the model's library now, so that its seconds count as imports and not as building the model."""
    # Naming the class is what loads its module, and most of transformers with it.
    if spec.depths is not None:
        _ = quiet_transformers().Swinv2ForImageClassification
    if spec.name is not None and spec.task == "segmentation":
        _ = quiet_transformers().UperNetForSemanticSegmentation
    if spec.hf is not None:
        _ = auto_class(spec)


def logits_of(output: Tensor | object) -> Tensor:
    """Logits `[b, classes]`, in segmentation `[b, classes, h, w]`, of a model's output: itself, or its `logits`."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise TypeError(f"the model returned {type(output).__name__}: neither a tensor nor an object with .logits")
    return logits
