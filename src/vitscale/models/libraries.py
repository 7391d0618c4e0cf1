"""Classifiers of timm and torchvision by their names, with random weights or those of a safetensors file.

No weights are downloaded by the libraries themselves, no code from elsewhere is run and nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
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
        raise _missing_library(spec, name.library, error) from error
    except RequestError:
        raise
    except Exception as error:  # a library fails with errors of any type
        raise _unbuildable(spec, error) from error
    check_images(model, spec)
    freeze_unused(model, spec)
    return model


def _missing_library(spec: ModelSpec, library: Library, error: ModuleNotFoundError) -> RequestError:
    return RequestError(
        f"model.name {shown(spec.name)} needs {library}, which the rank's Python cannot import: {error}",
        next_step=f"Run there: {install_command(library)}",
    )


def _unbuildable(spec: ModelSpec, error: Exception) -> RequestError:
    reason = _reason(error)
    return RequestError(
        f"model.name {shown(spec.name)} cannot be built: {type(error).__name__}: {reason}",
        next_step="Set another model.image_size, or name another model",
    )


def _reason(error: Exception) -> str:
    """Return the message of an error in one short line; the name of its type where it has no message."""
    return textwrap.shorten(str(error), 300, placeholder=" ...") or type(error).__name__


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
    """Build a model of timm for the spec's image size; one that takes any size has no argument for it."""
    import timm

    arguments: dict[str, Any] = {
        "pretrained": False,
        "num_classes": spec.num_classes,
        "in_chans": spec.channels,
    }
    try:
        model: nn.Module = timm.create_model(name, img_size=spec.image_size, **arguments)
    except TypeError as error:
        has_no_such_argument = "img_size" in str(error)
        if not has_no_such_argument:
            raise
        model = timm.create_model(name, **arguments)
    return model


def _build_torchvision(spec: ModelSpec, name: str) -> nn.Module:
    """Build a model of torchvision, which always takes three channels, and adapt it to the spec's channels."""
    from torchvision import models

    arguments = _torchvision_arguments(spec, name)
    model: nn.Module = models.get_model(name, weights=None, num_classes=spec.num_classes, **arguments)
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
    """Put a convolution over `channels` in place of the model's first one.

    Its weights are random, with a standard deviation that keeps the variance of its outputs: that variance is the sum
    over all channels of the weights' variance times the channel's, and all channels are taken to have the same.
    """
    convolutions = {path: module for path, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    path, first = next(iter(convolutions.items()))
    replacement = nn.Conv2d(
        channels,
        first.out_channels,
        kernel_size=first.kernel_size,  # type: ignore[arg-type]  # torch's stubs say a tuple of any length
        stride=first.stride,  # type: ignore[arg-type]
        padding=first.padding,  # type: ignore[arg-type]
        bias=first.bias is not None,
    )
    first_deviation = first.weight.detach().std().item()
    deviation = first_deviation * (first.in_channels / channels) ** 0.5
    nn.init.normal_(replacement.weight, std=deviation)
    if first.bias is not None and replacement.bias is not None:
        replacement.bias.data.copy_(first.bias.data)
    model.set_submodule(path, replacement)


class _AdaptedTensors(NamedTuple):
    """Names of a model's tensors that pretrained weights may have in another shape."""

    heads: tuple[str, ...]
    """Modules that give the logits: their weights stay random where the number of classes differs."""
    first_kernels: str | None
    """The weight of the convolution that takes the image's channels; None where the model has none."""

    def is_of_head(self, name: str) -> bool:
        """Whether a tensor such as "head.weight" belongs to a head."""
        return name.rpartition(".")[0] in self.heads


def load_library_weights(model: nn.Module, source: str, name: LibraryName) -> None:
    """Copy the pretrained weights of a safetensors file, of a folder with one, or for timm of the hub into the model.

    Positions and position biases for another image size are resized as the library itself does it, a first convolution
    over other channels is inflated (`hub.inflated`), and heads of other classes keep their random weights.

    Raises:
        RequestError: the file cannot be read, or is of another model.
    """
    stored_weights = _read_weights(source)
    adapted = _adapted_tensors(model, name)
    with torch.no_grad():
        weights = _filtered_by_timm(model, stored_weights, name)
        differences = _copy_weights(model, weights, adapted)
        differences += _surplus_weights(model, weights, adapted)
    if differences:
        raise RequestError(
            f"model.weights {shown(source)} are of another model than {name.without_tag}: {'; '.join(differences[:3])}",
            next_step="Name weights of the same model, or leave weights out",
        )


def _read_weights(source: str) -> dict[str, Tensor]:
    """Return the tensors of a file, of all safetensors files of a folder, or of model.safetensors on the hub."""
    try:
        return _load_files(_weight_files(source))
    except Exception as error:  # whatever the file or the network brings
        raise RequestError(
            f"model.weights {shown(source)} cannot be loaded: {_reason(error)}",
            next_step="Name a safetensors file, a folder with one, or for timm a model of the hub",
        ) from error


def _weight_files(source: str) -> list[Path]:
    """Return the file itself, the safetensors files of a folder, or the downloaded file of a name on the hub."""
    path = Path(source).expanduser()
    if path.is_dir():
        return sorted(path.glob("*.safetensors"))
    if path.is_file():
        return [path]
    import huggingface_hub

    return [Path(huggingface_hub.hf_hub_download(source, "model.safetensors"))]


def _load_files(files: Iterable[Path]) -> dict[str, Tensor]:
    """Return the tensors of safetensors files by name."""
    from safetensors.torch import load_file

    weights: dict[str, Tensor] = {}
    for file in files:
        weights |= load_file(file)
    return weights


def _adapted_tensors(model: nn.Module, name: LibraryName) -> _AdaptedTensors:
    """Return the names of a model's heads and of its first convolution's weight.

    timm records these modules with a model. In others the last linear layer is the head.
    """
    settings = getattr(model, "pretrained_cfg", None)
    if name.library == "timm" and settings is not None:
        heads = _names_in(settings.get("classifier"))
        convolutions = _names_in(settings.get("first_conv"))
    else:
        convolutions = _paths_of(model, nn.Conv2d)
        layers = _paths_of(model, nn.Linear) or convolutions  # SqueezeNet classifies by its last convolution
        heads = layers[-1:]
    first_kernels = f"{convolutions[0]}.weight" if convolutions else None
    return _AdaptedTensors(heads, first_kernels)


def _names_in(setting: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the modules that a setting of timm names: one, several or none."""
    if not setting:
        return ()
    return (setting,) if isinstance(setting, str) else tuple(setting)


def _paths_of(model: nn.Module, module_class: type[nn.Module]) -> tuple[str, ...]:
    """Return the dotted names of all modules of a class, in the order of registration."""
    return tuple(path for path, module in model.named_modules() if isinstance(module, module_class))


def _filtered_by_timm(model: nn.Module, weights: dict[str, Tensor], name: LibraryName) -> dict[str, Tensor]:
    """Return weights with timm's own changes for another image size and for older names of tensors."""
    if name.library != "timm":
        return weights
    filter_weights: Callable[..., dict[str, Tensor]] | None
    filter_weights = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if filter_weights is None:
        return weights
    return dict(filter_weights(dict(weights), model))


def _copy_weights(model: nn.Module, weights: Mapping[str, Tensor], adapted: _AdaptedTensors) -> list[str]:
    """Copy weights into the model's tensors of the same names, and return what does not fit, in words.

    Heads stay as they are where the weights have none, or one of other classes; so do buffers that they lack.
    """
    differences: list[str] = []
    buffers = {name for name, _ in model.named_buffers()}
    for name, tensor in model.state_dict().items():
        weight = weights.get(name)
        is_head = adapted.is_of_head(name)
        if weight is None:
            if not is_head and name not in buffers:
                differences.append(f"there is no {name} there")
            continue
        resized = _resized(weight, tensor, name=name, adapted=adapted)
        if resized.shape == tensor.shape:
            tensor.copy_(resized)
        elif not is_head:
            differences.append(f"{name} is {list(resized.shape)} there and {list(tensor.shape)} here")
    return differences


def _resized(weight: Tensor, tensor: Tensor, *, name: str, adapted: _AdaptedTensors) -> Tensor:
    """Return a weight for the channels or the image size of the model's tensor; other weights as they are."""
    if name == adapted.first_kernels and weight.ndim == tensor.ndim:
        return inflated(weight, channels=tensor.shape[1])
    if name.endswith(("pos_embedding", "pos_embed")) and weight.ndim == 3:
        return interpolated(weight, length=tensor.shape[1])
    return weight


def _surplus_weights(model: nn.Module, weights: Mapping[str, Tensor], adapted: _AdaptedTensors) -> list[str]:
    """Return the weights for which the model has no tensor, in words; heads are left out."""
    tensors = model.state_dict()
    return [
        f"there is no {name} here"
        for name in weights
        if name not in tensors and not (adapted.is_of_head(name) or _is_of_auxiliary_head(name))
    ]


def _is_of_auxiliary_head(name: str) -> bool:
    """Whether a tensor is of a classifier that torchvision's Inception and GoogLeNet have in the middle."""
    return name.lower().startswith(("aux", "auxlogits"))
