"""Counts a model: its card, from a forward and a backward on meta tensors at two numbers of images."""

from __future__ import annotations

import importlib.metadata
import traceback
from pathlib import Path

import torch
from torch import nn

from vitscale.errors import VitscaleError
from vitscale.models.tracing.building import meta_model
from vitscale.models.tracing.cards import TracePair, card, first_difference
from vitscale.models.tracing.errors import TraceError
from vitscale.models.tracing.lines import FEW_IMAGES, MANY_IMAGES
from vitscale.models.tracing.passes import TracedPasses
from vitscale.models.tracing.recorder import Recording
from vitscale.trial.model_card import TRACER_VERSION, ModelCard, TraceRequest

_LIBRARIES = ("torch", "transformers", "timm", "torchvision")
_LONGEST_REASON = 200
_FOLDERS_WITHOUT_MODELS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
"""Folders of torch and of this package: their files run a model's code, and are none of it."""


def trace(request: TraceRequest) -> ModelCard:
    """Return the card of the request's model, without running it: no weights, no images, no device.

    Raises:
        RequestError: the model cannot be built.
        TraceError: it cannot run on meta tensors, as where its control flow reads values; the message names the
            operation.
    """
    model = meta_model(request)
    passes = TracedPasses(model, request)
    pair = _traced_pair(passes)
    return card(request, model, pair, _versions(model))


def _traced_pair(passes: TracedPasses) -> TracePair:
    """Run the model at both numbers of images, with the parameters frozen that get no gradient."""
    few = _run(passes, FEW_IMAGES)
    unused_parameters = passes.without_gradient()
    if unused_parameters:
        _freeze(unused_parameters)
        few = _run(passes, FEW_IMAGES)
    pair = TracePair(few, _run(passes, MANY_IMAGES))
    if first_difference(pair) is not None:
        # A model may keep what its first forward has made, such as positions.
        pair = TracePair(_run(passes, FEW_IMAGES), pair.many)
    return pair


def _freeze(parameters: list[nn.Parameter]) -> None:
    """Freeze parameters that get no gradient: DDP would wait for it, and no optimizer has a state of them."""
    for parameter in parameters:
        parameter.requires_grad_(False)


def _run(passes: TracedPasses, images: int) -> Recording:
    """Run the model once; an error of its own becomes a `TraceError`."""
    try:
        return passes.run(images)
    except VitscaleError:
        raise
    except Exception as error:  # a foreign model fails with errors of any type
        raise _stopped(passes.attempted, error) from error


def _stopped(operation: str | None, error: Exception) -> TraceError:
    """Return the error of a trace that an operation, or the model's own code, has stopped."""
    reason = " ".join(str(error).split())[:_LONGEST_REASON].rstrip(".")
    code_line = _code_line(error)
    location = code_line if operation is None else f"the operation {operation} ({code_line})"
    return TraceError(f"counting the model without running it stopped at {location}: {type(error).__name__}: {reason}")


def _code_line(error: Exception) -> str:
    """Return the line of the model's code that an error came through last, as "modeling_vit.py, line 12"."""
    frames = traceback.extract_tb(error.__traceback__)
    model_frames = [frame for frame in frames if not frame.filename.startswith(_FOLDERS_WITHOUT_MODELS)]
    if not model_frames:
        return "the loss or its backward"
    last_frame = model_frames[-1]
    return f"{Path(last_frame.filename).name}, line {last_frame.lineno}"


def _versions(model: nn.Module) -> dict[str, str]:
    """Library or "tracer" -> version, of the libraries whose modules the model is made of."""
    packages = {type(module).__module__.partition(".")[0] for module in model.modules()}
    packages.add("torch")
    versions = {library: importlib.metadata.version(library) for library in _LIBRARIES if library in packages}
    return versions | {"tracer": TRACER_VERSION}
