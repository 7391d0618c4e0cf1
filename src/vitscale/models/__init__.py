"""Builds the real model that a `ModelSpec` describes, with random weights from torch's global generator."""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Callable, Mapping

from torch import Tensor, nn

from vitscale.errors import RequestError, shown
from vitscale.models import hub, libraries, named
from vitscale.models.hub import refuse_other_sizes
from vitscale.trial.model_spec import ModelSpec

__all__ = ["BUILDERS", "build", "logits_of", "preload", "refuse_other_sizes"]


def build_factory(spec: ModelSpec) -> nn.Module:
    """What `function(num_classes=..., image_size=...)` of `module` returns, for a factory "module:function".

    A function with a parameter `channels` is also told the images' number of channels.

    Raises:
        RequestError: the function takes other arguments, raises, or returns no module.
    """
    function = _function(spec.factory or "")
    arguments = {"num_classes": spec.num_classes, "image_size": spec.image_size}
    try:
        signature = inspect.signature(function)
        if "channels" in signature.parameters:
            arguments["channels"] = spec.channels
        signature.bind(**arguments)
    except (TypeError, ValueError) as error:
        raise RequestError(
            f"model.factory {shown(spec.factory)} does not take the keyword arguments num_classes and image_size: "
            f"{error}"
        ) from error
    try:
        model = function(**arguments)
    except Exception as error:  # the user's code may raise anything
        raise _raised(spec.factory, error) from error
    if not isinstance(model, nn.Module):
        raise RequestError(
            f"model.factory {shown(spec.factory)} returned {shown(type(model).__name__)}", valid=["a torch.nn.Module"]
        )
    if spec.auxiliary_weight == 0 and (head := named.auxiliary_head(model)) is not None:
        head.requires_grad_(False)  # DDP would wait for its gradients
    return model


def _function(factory: str) -> Callable[..., object]:
    module_name, _, function_name = factory.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        what = f"model.factory {shown(factory)}: no module {shown(error.name or module_name)}"
        raise RequestError(what, next_step="Install it, or put its folder on PYTHONPATH") from error
    except Exception as error:  # the user's code may raise anything
        raise _raised(factory, error) from error
    function: Callable[..., object] | None = getattr(module, function_name, None)
    if not callable(function):
        functions = [name for name, _ in inspect.getmembers(module, inspect.isfunction) if not name.startswith("_")]
        raise RequestError(
            f"model.factory {shown(factory)}: no function of that name in the module", valid=functions[:20]
        )
    return function


def _raised(factory: str | None, error: Exception) -> RequestError:
    """The user's own error, with the line it came from; the whole traceback stays attached as the cause."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    message = " ".join(str(error).split())[:300]
    return RequestError(f"model.factory {shown(factory)} raised {type(error).__name__}: {message}{where}")


BUILDERS: Mapping[str, Callable[[ModelSpec], nn.Module]] = {
    "name": lambda spec: _named(spec)(spec),
    "hf": hub.build_hf,
    "factory": build_factory,
}
"""The key of `[model]` that says which model -> what builds it."""


def _named(spec: ModelSpec) -> Callable[[ModelSpec], nn.Module]:
    if spec.library is not None:
        return libraries.build_library
    if spec.task == "segmentation":
        return named.build_named_segmentation
    return named.VisionTransformer if spec.depths is None else named.build_swin


def build(spec: ModelSpec) -> nn.Module:
    """The model of a resolved spec, on the CPU, in fp32, in training mode, with any pretrained weights that it names.

    Called as `model(images)` with float images `[b, c, H, W]`; see `logits_of` for what comes back. Seed torch before
    the call: ranks that start from the same seed start from the same weights.

    Raises `RequestError` where the spec cannot be built, with the reason.
    """
    key = next(key for key in BUILDERS if getattr(spec, key) is not None)
    model = BUILDERS[key](spec)
    if spec.weights is not None and spec.library is not None:
        libraries.load_library_weights(model, spec.weights, spec.library)
    elif spec.weights is not None:
        hub.load_weights(model, spec.weights)
    return model.train()


def preload(spec: ModelSpec) -> None:
    """Imports the model's library now, so that its seconds count as imports and not as building the model."""
    if spec.library is not None:
        libraries.preload(spec.library)
    # Naming the class loads its module, and most of transformers with it.
    if spec.depths is not None:
        _ = named.quiet_transformers().Swinv2ForImageClassification
    if spec.own_name is not None and spec.task == "segmentation":
        _ = named.quiet_transformers().UperNetForSemanticSegmentation
    if spec.hf is not None:
        _ = hub.auto_class(spec)


def logits_of(output: Tensor | object) -> Tensor:
    """Logits `[b, classes]`, in segmentation `[b, classes, h, w]`: a model's output itself, or its `logits`.

    Raises:
        TypeError: the output is no tensor and has no `logits`.
    """
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise TypeError(f"the model returned {type(output).__name__}: neither a tensor nor an object with .logits")
    return logits
