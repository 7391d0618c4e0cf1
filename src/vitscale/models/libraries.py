"""Classifiers of timm and torchvision by their names, with random weights or those of a safetensors file.

No weights are downloaded by the libraries themselves, no code from elsewhere is run and nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitscale.base.distribution import install_command
from vitscale.errors import RequestError, shown
from vitscale.models.hub import check_images, freeze_unused, inflated, interpolated
from vitscale.trial.library_names import Library, LibraryName
from vitscale.trial.model_spec import ModelSpec


def build_library(spec: ModelSpec) -> nn.Module:
    """Return the classifier of timm or torchvision that a resolved spec names, with random weights.

    Parameters that classification does not use are frozen, as of every model that is not vitscale's own.

    Raises:
        RequestError: the library is not installed here, cannot build the model with this image size and these
            channels, or the model does not take such images.
    """
    name = spec.library
    if name is None:
        raise ValueError(f"{spec.name} is no model of timm or torchvision")
    build = builder(name.library)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the libraries' own advice, on every rank
            model = build(spec, name.model)
    except ModuleNotFoundError as error:
        what = f"model.name {shown(spec.name)} needs {name.library}, which the rank's Python cannot import: {error}"
        raise RequestError(what, next_step=f"Run there: {install_command(name.library)}") from error
    except RequestError:
        raise
    except Exception as error:  # a library fails with errors of any type
        raise _unbuildable(spec, "cannot be built", error) from error
    check_images(model, spec)
    freeze_unused(model, spec)
    return model


def builder(library: Library) -> Callable[[ModelSpec, str], nn.Module]:
    """Return what builds a model of a library from a resolved spec and the model's name there."""
    builders: dict[Library, Callable[[ModelSpec, str], nn.Module]] = {
        "timm": _build_timm,
        "torchvision": _build_torchvision,
    }
    return builders[library]


def preload(name: LibraryName) -> None:
    """Import a model's library; one that is missing is left to `build_library`, which says so."""
    with contextlib.suppress(ImportError):
        importlib.import_module(name.library)


def _build_timm(spec: ModelSpec, name: str) -> nn.Module:
    import timm

    arguments: dict[str, Any] = {
        "pretrained": False,
        "num_classes": spec.num_classes,
        "in_chans": spec.channels,
    }
    try:
        model: nn.Module = timm.create_model(name, img_size=spec.image_size, **arguments)
    except TypeError as error:
        takes_any_size = "img_size" in str(error)
        if not takes_any_size:
            raise
        model = timm.create_model(name, **arguments)
    return model


def _build_torchvision(spec: ModelSpec, name: str) -> nn.Module:
    from torchvision import models

    model: nn.Module = models.get_model(
        name, weights=None, num_classes=spec.num_classes, **_torchvision_arguments(spec, name)
    )
    if spec.channels != _TORCHVISION_CHANNELS:
        _replace_first_convolution(model, spec.channels)
    return model


_TORCHVISION_CHANNELS = 3


def _torchvision_arguments(spec: ModelSpec, name: str) -> dict[str, Any]:
    """Return the arguments beside weights and classes that a model of torchvision needs here."""
    if name.startswith("vit_"):
        return {"image_size": spec.image_size}
    if name == "maxvit_t":
        return {"input_size": (spec.image_size, spec.image_size)}
    if name in ("googlenet", "inception_v3"):
        # Their auxiliary classifiers are left out: in training they would give three logits for an image.
        return {"aux_logits": False, "init_weights": True}
    return {}


def _replace_first_convolution(model: nn.Module, channels: int) -> None:
    """Put a convolution over `channels` in place of the model's first, whose weights have the scale for theirs.

    The variance of its outputs stays as it is where all channels have the same variance.
    """
    convolutions = {path: module for path, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    path, module = next(iter(convolutions.items()))
    replacement = nn.Conv2d(
        channels,
        module.out_channels,
        kernel_size=module.kernel_size,  # type: ignore[arg-type]  # torch's stubs say a tuple of any length
        stride=module.stride,  # type: ignore[arg-type]
        padding=module.padding,  # type: ignore[arg-type]
        bias=module.bias is not None,
    )
    deviation = module.weight.detach().std().item() * (module.in_channels / channels) ** 0.5
    nn.init.normal_(replacement.weight, std=deviation)
    if module.bias is not None and replacement.bias is not None:
        replacement.bias.data.copy_(module.bias.data)
    model.set_submodule(path, replacement)


def _unbuildable(spec: ModelSpec, problem: str, error: Exception) -> RequestError:
    reason = textwrap.shorten(str(error), 300, placeholder=" ...") or type(error).__name__
    return RequestError(
        f"model.name {shown(spec.name)} {problem}: {type(error).__name__}: {reason}",
        next_step="Set another model.image_size, or name another model",
    )


class _Tensors(NamedTuple):
    """Names of a model's tensors that pretrained weights may have in another shape."""

    heads: tuple[str, ...]
    """Modules that give the logits: their weights stay random where the number of classes differs."""
    first_convolution: str | None
    """The kernels that take the image's channels."""


def load_library_weights(model: nn.Module, source: str, name: LibraryName) -> None:
    """Copy the pretrained weights of a safetensors file, of a folder with one, or for timm of the hub into the model.

    Positions and position biases for another image size are resized as the library itself does it, a first convolution
    over other channels is inflated (`hub.inflated`), and heads of other classes keep their random weights.

    Raises:
        RequestError: the file cannot be read, or is of another model.
    """
    weights = _read_weights(source)
    special = _special_tensors(model, name)
    with torch.no_grad():
        weights = _fitted(model, weights, name)
        differences = list(_copy(model, weights, special))
    if differences:
        raise RequestError(
            f"model.weights {shown(source)} are of another model than {name.without_tag}: {'; '.join(differences[:3])}",
            next_step="Name weights of the same model, or leave weights out",
        )


def _read_weights(source: str) -> dict[str, Tensor]:
    """Return the tensors of a file, of all safetensors files of a folder, or of model.safetensors on the hub."""
    from safetensors.torch import load_file

    path = Path(source).expanduser()
    try:
        if path.is_dir():
            files = sorted(path.glob("*.safetensors"))
        elif path.is_file():
            files = [path]
        else:
            import huggingface_hub

            files = [Path(huggingface_hub.hf_hub_download(source, "model.safetensors"))]
        weights: dict[str, Tensor] = {}
        for file in files:
            weights |= load_file(file)
    except Exception as error:  # whatever the file or the network brings
        reason = textwrap.shorten(str(error), 300, placeholder=" ...") or type(error).__name__
        raise RequestError(
            f"model.weights {shown(source)} cannot be loaded: {reason}",
            next_step="Name a safetensors file, a folder with one, or for timm a model of the hub",
        ) from error
    return weights


def _special_tensors(model: nn.Module, name: LibraryName) -> _Tensors:
    """Return the names of a model's heads and of its first convolution."""
    settings = getattr(model, "pretrained_cfg", None)
    if name.library == "timm" and settings is not None:
        heads = settings.get("classifier") or ()
        first = settings.get("first_conv")
        first_names = [first] if isinstance(first, str) else list(first or ())
        return _Tensors(
            heads=(heads,) if isinstance(heads, str) else tuple(heads),
            first_convolution=f"{first_names[0]}.weight" if first_names else None,
        )
    linear = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    convolutions = [path for path, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    # SqueezeNet classifies by its last convolution.
    heads = linear[-1:] or convolutions[-1:]
    return _Tensors(tuple(heads), f"{convolutions[0]}.weight" if convolutions else None)


def _fitted(model: nn.Module, weights: Mapping[str, Tensor], name: LibraryName) -> dict[str, Tensor]:
    """Return weights with timm's own changes for another image size and for older names of tensors."""
    fit: Callable[..., dict[str, Tensor]] | None = None
    if name.library == "timm":
        fit = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if fit is None:
        return dict(weights)
    return dict(fit(dict(weights), model))


def _copy(model: nn.Module, weights: Mapping[str, Tensor], special: _Tensors) -> Iterator[str]:
    """Copy weights into the model's tensors of the same names, and yield what does not fit, in words."""
    own_tensors = model.state_dict()
    saved_buffers = {name for name, _ in model.named_buffers()}
    for name, tensor in own_tensors.items():
        weight = weights.get(name)
        is_head = name.rpartition(".")[0] in special.heads
        if weight is None:
            if not is_head and name not in saved_buffers:
                yield f"there is no {name} there"
            continue
        if name == special.first_convolution and weight.ndim == tensor.ndim:
            weight = inflated(weight, channels=tensor.shape[1])
        elif name.endswith(("pos_embedding", "pos_embed")) and weight.ndim == 3:
            weight = interpolated(weight, length=tensor.shape[1])
        if weight.shape == tensor.shape:
            tensor.copy_(weight)
        elif not is_head:
            yield f"{name} is {list(weight.shape)} there and {list(tensor.shape)} here"
    for name in weights:
        is_head = name.rpartition(".")[0] in special.heads
        if name not in own_tensors and not is_head and not _is_of_auxiliary_head(name):
            yield f"there is no {name} here"


def _is_of_auxiliary_head(name: str) -> bool:
    """Whether a tensor is of a classifier that torchvision's Inception and GoogLeNet have in the middle."""
    return name.lower().startswith(("aux", "auxlogits"))
