"""The user's own model, by a function of theirs."""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Callable

from torch import nn

from vitscale.errors import RequestError, shown
from vitscale.models.segmentation import auxiliary_head
from vitscale.trial.model_spec import ModelSpec


def build_factory(spec: ModelSpec) -> nn.Module:
    """What `function(num_classes=..., image_size=...)` of `module` returns, for a factory "module:function".

    A function with a parameter `channels` is told those of the images too.
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
    if spec.auxiliary_weight == 0 and (head := auxiliary_head(model)) is not None:
        head.requires_grad_(False)  # DDP would wait for its gradients
    return model


def _function(factory: str) -> Callable[..., object]:
    module_name, _, function_name = factory.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise RequestError(
            f"model.factory {shown(factory)}: no module {shown(error.name or module_name)}",
            next_step="Install it, or put its folder on PYTHONPATH",
        ) from error
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
