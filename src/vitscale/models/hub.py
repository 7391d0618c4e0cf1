"""Models of any configuration from the Hugging Face hub or a local folder, with random weights or pretrained ones.

Pretrained weights are fitted to images of another size and other channels. Beside that: what a model shows without
computing anything, which is the parameters that it really uses and the sizes that it takes.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import interpolate

from vitscale.errors import RequestError, shown
from vitscale.models import backbones
from vitscale.models.forward_pass import forward_once, meta_tensors
from vitscale.models.named import AuxiliaryLogits, quiet_transformers
from vitscale.trial.model_spec import ModelSpec, hf_shape, read_config


def freeze_unused(model: nn.Module, spec: ModelSpec) -> None:
    """Freezes the parameters that get no gradient from the logits, those of an auxiliary head included.

    DDP stops in the second step where a parameter never becomes ready, and the alternative, `find_unused_parameters`,
    walks the graph in every step. The pass runs on meta tensors: shapes only, no memory and no time. A model that
    cannot run on them (its forward reads values) is left as it is.

    Raises `RequestError` where the logits are not `[b, spec.num_classes]`, or `[b, spec.num_classes, h, w]`.
    """
    stand_ins = meta_tensors(model)
    images = torch.empty(2, spec.channels, spec.image_size, spec.image_size, device="meta")
    auxiliary = AuxiliaryLogits(model, None)
    try:
        output = functional_call(model, stand_ins, (images,))
        logits = output if isinstance(output, Tensor) else output.logits
        wanted = {name: stand_ins[name] for name, p in model.named_parameters() if p.requires_grad}
        second = auxiliary.take()
        loss = logits.sum() if second is None else logits.sum() + second.sum()
        gradients = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    except Exception:  # whatever a foreign forward does not like about meta tensors
        return
    finally:
        auxiliary.close()
    if logits.shape[:2] != (2, spec.num_classes) or logits.ndim != (4 if spec.task == "segmentation" else 2):
        what = f"the model {shown(spec.hf or spec.name)} gives logits of shape {tuple(logits.shape)} for 2 images"
        raise RequestError(what, valid=[(2, spec.num_classes)])
    unused = {name for name, gradient in zip(wanted, gradients, strict=True) if gradient is None}
    for name, parameter in model.named_parameters():
        if name in unused:
            parameter.requires_grad_(False)


def refuse_other_sizes(model: nn.Module, spec: ModelSpec) -> None:
    """Refuses, before it trains, a segmentation model that takes only squares of `spec.image_size`.

    Images are evaluated in their own proportions. A model that cannot run without values is not refused, for nothing
    is known of it.

    Raises:
        RequestError: the model labels the pixels of such a square, but not those of a picture of 4 : 3.
    """
    side, training, stand_ins = spec.image_size, model.training, meta_tensors(model)
    model.eval()
    try:
        for width in (side, side * 4 // 3):
            with torch.no_grad():
                functional_call(model, stand_ins, (torch.empty(1, spec.channels, side, width, device="meta"),))
    except Exception as error:  # whatever a foreign forward does not like about meta tensors, or about their size
        if width == side:
            return
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise RequestError(
            f"the model {shown(spec.hf or spec.factory)} does not take pictures of {side} x {width} pixels, and "
            f"whole ones are evaluated in their own proportions ({why})",
            next_step='Set data.evaluation = "sliding"',
        ) from error
    finally:
        model.train(training)


def check_images(model: nn.Module, spec: ModelSpec) -> None:
    """Refuse a foreign model that does not take images of the spec's size and channels, before it is wrapped.

    Raises:
        RequestError: its forward fails; the message has the library's own reason.
    """
    try:
        forward_once(model, (2, spec.channels, spec.image_size, spec.image_size))
    except Exception as error:  # a foreign forward fails with errors of any type
        reason = textwrap.shorten(str(error), 300, placeholder=" ...")
        size = f"{spec.image_size} x {spec.image_size} pixels in {spec.channels} channels"
        raise RequestError(
            f"the model {shown(spec.hf or spec.name)} does not take images of {size}: {type(error).__name__}: {reason}",
            next_step="Set another model.image_size, or name another model",
        ) from error


def build_hf(spec: ModelSpec) -> nn.Module:
    """The architecture that `spec.hf` describes, at the spec's image size, channels and class count.

    Where transformers has no model of the type with a head for the task, its backbone gets one: a linear layer on its
    pooled output, or UperNet. No code from the folder or the hub is run, and no weights are read. Parameters that the
    task does not use (DINOv2's mask token) are frozen, for DDP waits for the gradient of every other one.

    Raises:
        RequestError: the configuration describes no model that can be built.
    """
    transformers = quiet_transformers()
    config = _configuration(transformers, spec)
    try:
        model = _with_head(spec, config)
    except Exception as error:  # a foreign configuration fails inside the library, with errors of any type
        raise _refused(spec, "describes no model that can be built", error) from error
    if spec.task == "classification":
        check_images(model, spec)
    freeze_unused(model, spec)
    return model


def _with_head(spec: ModelSpec, config: Any) -> nn.Module:
    """Return the model with transformers' own head for the task, else its backbone with a head on it."""
    transformers = quiet_transformers()
    has_own_head = type(config) in auto_class(spec)._model_mapping
    if has_own_head:
        if spec.task == "segmentation":
            backbones.set_four_maps(config)
        return _from_configuration(auto_class(spec), config)
    if spec.task == "segmentation":
        if type(config) in transformers.AutoBackbone._model_mapping:
            config = backbones.upernet_configuration(
                config, classes=spec.num_classes or 0, auxiliary_head=spec.auxiliary_weight != 0
            )
        return _from_configuration(auto_class(spec), config)
    vision = backbones.vision_configuration(config)
    tower = backbones.backbone_class(vision)
    if tower is None or getattr(tower, "main_input_name", "") != "pixel_values":
        return _from_configuration(auto_class(spec), config)  # which refuses it and lists the types there are
    if hasattr(vision, "mask_ratio"):
        vision.mask_ratio = 0.0  # a masked autoencoder hides patches from its encoder only while it is pretrained
    backbone = _from_class(tower, vision)
    return backbones.classifier_on(
        backbone, channels=spec.channels, image_size=spec.image_size, classes=spec.num_classes or 0
    )


def auto_class(spec: ModelSpec) -> Any:
    """The class of transformers that builds a model of the spec's task from a configuration."""
    transformers = quiet_transformers()
    if spec.task == "segmentation":
        return transformers.AutoModelForSemanticSegmentation
    return transformers.AutoModelForImageClassification


def _configuration(transformers: Any, spec: ModelSpec) -> Any:
    hf = spec.hf or ""
    local = read_config(hf) is not None
    if local and (shape := hf_shape(hf)) is not None:
        changed = [key for key, value in shape.fields().items() if getattr(spec, key) != value]
        if changed:
            what = f"config.json of model.hf {shown(hf)} differs from the planned model in {', '.join(changed)}"
            raise RequestError(what, next_step="Run the study again, so that it is planned with the file as it is now")
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(Path(hf).expanduser()) if local else hf, trust_remote_code=False
        )
        config.num_labels = spec.num_classes
        if spec.auxiliary_weight is not None and hasattr(config, "use_auxiliary_head"):
            config.use_auxiliary_head = spec.auxiliary_weight > 0
        vision = getattr(config, "vision_config", None) or getattr(config, "backbone_config", None) or config
        if hasattr(vision, "image_size"):
            is_pair = isinstance(vision.image_size, list | tuple)
            vision.image_size = [spec.image_size, spec.image_size] if is_pair else spec.image_size
        if hasattr(vision, "num_channels"):
            vision.num_channels = spec.channels
        channels = getattr(vision, "num_channels", 3)
    except Exception as error:  # as above, and whatever the network brings
        raise _refused(spec, "cannot be loaded", error) from error
    if channels != spec.channels:
        what = f"data.channels = {spec.channels}, and model.hf {shown(hf)} has no num_channels in its configuration"
        raise RequestError(what, next_step="Use images of 3 channels, or another model")
    return config


def _from_configuration(auto_class: Any, config: Any) -> nn.Module:
    """Build the model that a class of transformers has for this type of configuration.

    Where one type has several classes, `architectures` of the configuration decides (`_model_class`).
    """
    model_class = _model_class(auto_class, config)
    if model_class is not None:
        config.architectures = [model_class.__name__]
    model: nn.Module = auto_class.from_config(config, **_build_arguments(model_class))
    return model


def _model_class(auto_class: Any, config: Any) -> Any:
    """Return the class that the configuration names, else the first of its type; None for a type without any.

    The second classes of DeiT and LeViT, with a classifier for distillation, are never taken: by transformers' own
    account they are for inference alone.
    """
    if type(config) not in auto_class._model_mapping:
        return None
    classes = auto_class._model_mapping[type(config)]
    if not isinstance(classes, tuple):
        return classes
    for model_class in classes:
        is_named = model_class.__name__ in (config.architectures or ())
        if is_named and not model_class.__name__.endswith("WithTeacher"):
            return model_class
    return classes[0]


def _from_class(model_class: Any, config: Any) -> nn.Module:
    """Build a model of one class of transformers."""
    arguments = _build_arguments(model_class)
    del arguments["trust_remote_code"]
    model: nn.Module = model_class._from_config(config, **arguments)
    return model


def _build_arguments(model_class: Any) -> dict[str, Any]:
    """Return what is said to transformers in place of the configuration, which may ask for 16-bit weights, name a
    kernel to download, or bring code. Attention is PyTorch's fused one where the class has it."""
    has_fused_attention = getattr(model_class, "_supports_sdpa", False)
    return {
        "dtype": torch.float32,
        "attn_implementation": "sdpa" if has_fused_attention else "eager",
        "trust_remote_code": False,
    }


def _refused(spec: ModelSpec, what: str, error: Exception) -> RequestError:
    reason = textwrap.shorten(str(error), 300, placeholder=" ...") or type(error).__name__
    return RequestError(
        f"model.hf {shown(spec.hf)} {what}: {reason}",
        next_step=f"Name a configuration for {spec.task}: a local folder, or a model of the hub where there is a "
        "network",
    )


_BODIES = ("backbone", "vit", "swinv2")
"""Names that models have for the same body, at the front of their tensors' names."""
_HEADS = (
    "classifier", "cls_classifier", "distillation_classifier", "decode_head", "auxiliary_head", "segmentation_head",
    "head", "dist_head",
)  # fmt: skip
"""Names of heads, which are trained anew for other classes: where the shape differs they keep their random weights."""
_DISTANCES = "relative_coords_table"
"""Buffer of Swin V2's attention."""


def load_weights(model: nn.Module, source: str) -> None:
    """Copies what the pretrained model of a folder or of the hub has in common with `model`.

    Only safetensors are read, and no code of the folder or the hub is run. Positions of another number of patches
    are interpolated, a first convolution over other channels is inflated, and Swin V2's position biases for windows
    of another size are sampled at the distances that they were learnt for.

    Raises:
        RequestError: it cannot be read, has nothing in common, or has another shape where both should be alike; or one
            of them lacks parameters of the other's blocks, or of what precedes them.
    """
    pretrained, missing = _pretrained(source)
    if isinstance(model, backbones.PooledClassifier):
        pretrained, missing = _vision_tower(pretrained, missing)
    prefix = str(getattr(pretrained, "base_model_prefix", ""))
    weights = {name: tensor for name, tensor in pretrained.state_dict().items() if name not in missing}
    copied, differences = _copy_weights(model, weights, prefix)
    if copied:
        parameter_names = [name for name, _ in pretrained.named_parameters() if name in weights]
        differences += _unmatched(model, parameter_names, prefix)
    else:
        differences = differences or ["none of its tensors has the name of one of the model's"]
    if differences:
        raise RequestError(
            f"model.weights {shown(source)} are of another model: {'; '.join(differences[:3])}",
            next_step="Name weights of the same architecture and size, or leave weights out",
        )
    _keep_distances(model, pretrained, prefix)


class _Copied(NamedTuple):
    """What `_copy_weights` has done."""

    tensors: int
    """Number of tensors of the body that were copied."""
    differences: list[str]
    """Tensors of the body that have another shape, in words."""


def _copy_weights(model: nn.Module, weights: Mapping[str, Tensor], prefix: str) -> _Copied:
    """Copies each tensor of `weights` into the model's tensor of the same name, fitted to its shape.

    A head's tensors keep their random weights where the shapes differ, as for other classes.

    Args:
        model: gets the weights.
        weights: the pretrained tensors by their names.
        prefix: the name of the pretrained model's body, which precedes its tensors' names.
    """
    weights_by_core_name = {_core(name, prefix): tensor for name, tensor in weights.items()}
    first_kernels = _first_convolution(model)
    copied = 0
    differences = []
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            weight = weights_by_core_name.get(_core(name, prefix))
            if weight is None:
                continue
            if name.endswith("position_embeddings"):
                weight = interpolated(weight, length=tensor.shape[1])
            elif name.endswith("position_embedding.weight"):  # CLIP's and SigLIP's, [tokens, h]
                weight = interpolated(weight[None], length=len(tensor))[0]
            elif name == first_kernels and _differ_in_channels_alone(weight, tensor):
                weight = inflated(weight, channels=tensor.shape[1])
            is_head = name.startswith(_HEADS)
            if weight.shape == tensor.shape:
                tensor.copy_(weight)
                copied += 0 if is_head else 1
            elif not is_head:
                differences.append(f"{name} is {list(weight.shape)} there and {list(tensor.shape)} here")
    return _Copied(copied, differences)


def _first_convolution(model: nn.Module) -> str | None:
    """The name of the kernels that take the image's channels; None in a model without convolutions."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            return f"{name}.weight"
    return None


def _differ_in_channels_alone(weight: Tensor, tensor: Tensor) -> bool:
    """Whether both are kernels [outputs, channels, height, width] of the same outputs and height."""
    return weight.shape[0::2] == tensor.shape[0::2]  # a slice, for a weight may have fewer dimensions


def _pretrained(source: str) -> tuple[Any, set[str]]:
    """The pretrained model, and the names of its tensors that its files lack: the library fills these at random."""
    transformers = quiet_transformers()
    local = Path(source).expanduser()
    folder_or_name = str(local) if local.is_dir() else source
    try:
        config = transformers.AutoConfig.from_pretrained(folder_or_name, trust_remote_code=False)
        kind = getattr(transformers, str((config.architectures or ["none"])[0]), None)
        if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
            raise ValueError(f"its config.json names no model of transformers in architectures: {config.architectures}")
        load: Any = kind.from_pretrained  # type: ignore[attr-defined]  # every model's class has it
        pretrained, told = load(folder_or_name, use_safetensors=True, dtype=torch.float32, output_loading_info=True)
        return pretrained, set(told["missing_keys"])
    except Exception as error:  # whatever the library, the files or the network bring
        reason = textwrap.shorten(str(error), 300, placeholder=" ...") or type(error).__name__
        raise RequestError(
            f"model.weights {shown(source)} cannot be loaded: {reason}",
            next_step="Name a folder with config.json and model.safetensors, or a model of the hub",
        ) from error


def _vision_tower(pretrained: Any, missing: set[str]) -> tuple[Any, set[str]]:
    """The part of a composite of image and text that takes images, with the names that its files lack.

    Other models are returned as they are.
    """
    if getattr(pretrained.config, "vision_config", None) is None:
        return pretrained, missing
    for name, child in pretrained.named_children():
        if getattr(child, "main_input_name", "") == "pixel_values":
            return child, {key.removeprefix(f"{name}.") for key in missing if key.startswith(f"{name}.")}
    return pretrained, missing


def _core(name: str, prefix: str) -> str:
    """The name without those of the bodies that it lies in: "layer.0.norm1.weight" of "backbone.model.layer.0..."."""
    first, _, rest = name.partition(".")
    while rest and first in (*_BODIES, prefix):
        name = rest
        first, _, rest = name.partition(".")
    return name


def _unmatched(model: nn.Module, pretrained: list[str], prefix: str) -> list[str]:
    """Return, as sentences, the parameters that one of two bodies has and the other lacks.

    What follows the model's last block may be missing in the pretrained one: norms, poolers and pyramids come with some
    heads only. Of the pretrained model only such lists of blocks count as the model has too, for it may have a decoder
    (ViT-MAE) or another tower (CLIP).

    Args:
        model: the model that is to be trained.
        pretrained: names of the pretrained model's parameters.
        prefix: name of the attribute in which the model has its body.
    """
    own_cores = {name: _core(name, prefix) for name, _ in model.named_parameters()}
    pretrained_cores = {name: _core(name, prefix) for name in pretrained}
    body = _body_names(list(own_cores), prefix)
    own_lists = {_block_list(own_cores[name]) for name in body} - {None}
    pretrained_lists = {_block_list(core) for core in pretrained_cores.values()}
    common_lists = own_lists & pretrained_lists or own_lists
    while body and _block_list(own_cores[body[-1]]) not in common_lists:  # what follows the last block
        body.pop()

    cores_there = set(pretrained_cores.values())
    missing_there = [name for name in body if own_cores[name] not in cores_there]
    cores_here = {_core(name, prefix) for name in model.state_dict()}
    missing_here = [
        name for name, core in pretrained_cores.items() if _block_list(core) in common_lists and core not in cores_here
    ]
    return [
        *(f"there is no {name} there" for name in missing_there),
        *(f"there is no {name} here" for name in missing_here),
    ]


def _body_names(names: list[str], prefix: str) -> list[str]:
    """Return those of a model's parameters that lie in its body; all but the head's where none is named as a body."""
    in_body = [name for name in names if name.partition(".")[0] in (*_BODIES, prefix)]
    return [name for name in in_body or names if not name.startswith(_HEADS)]


def _block_list(name: str) -> str | None:
    """The list that a parameter's block lies in, the outermost one: "encoder.layers" of "encoder.layers.0.weight"."""
    steps = name.split(".")
    return next((".".join(steps[:at]) for at, step in enumerate(steps) if step.isdecimal()), None)


def interpolated(positions: Tensor, length: int) -> Tensor:
    """Position embeddings [1, s + n, h] of a grid of n patches, resized bicubically to [1, length, h].

    Those of the s special tokens in front (a class token, DeiT's second one) stay. This is what
    `interpolate_pos_encoding` of transformers does; Dosovitskiy et al., "An Image is Worth 16x16 Words" (ICLR 2021),
    section 3.2, interpolate to fine-tune at a higher resolution. The embeddings are returned as they are unless both
    are square grids behind the same number of special tokens.
    """
    before = positions.shape[1]
    for special in (1, 2, 0):
        old, new = (math.isqrt(max(0, tokens - special)) for tokens in (before, length))
        if before != length and old**2 + special == before and new**2 + special == length:
            grid = positions[:, special:].transpose(1, 2).unflatten(2, (old, old))
            resized = interpolate(grid, size=(new, new), mode="bicubic", align_corners=False)
            return torch.cat([positions[:, :special], resized.flatten(2).transpose(1, 2)], dim=1)
    return positions


def inflated(kernels: Tensor, channels: int) -> Tensor:
    """Kernels [o, c, k, k] of a convolution over c channels, for one over `channels`.

    They are repeated in turn and scaled by c / channels, so that an image whose channels are all alike gives what it
    gave before. For one channel it is their sum, which is what a grey picture in colour gave. This is timm's rule
    (`adapt_input_conv`), after Carreira & Zisserman, "Quo Vadis, Action Recognition?" (CVPR 2017), section 2.4, who
    inflate kernels over time.
    """
    before = kernels.shape[1]
    if channels == before:
        return kernels
    if channels == 1:
        return kernels.sum(dim=1, keepdim=True)
    return kernels[:, torch.arange(channels) % before] * (before / channels)


def _keep_distances(model: nn.Module, pretrained: nn.Module, prefix: str) -> None:
    """Makes Swin V2 measure distances in units of the windows that its weights were trained with.

    Its position biases are no table: a small network gives one for each log-spaced distance, in units of the window
    (Liu et al., "Swin Transformer V2", CVPR 2022, section 3.3). In windows of another size the same neighbour keeps
    its bias if the unit stays; `pretrained_window_sizes` of its configuration is there for that.
    """
    learnt: dict[str, Any] = {
        _core(name, prefix): module for name, module in pretrained.named_modules() if hasattr(module, _DISTANCES)
    }
    attention: Any
    for name, attention in model.named_modules():
        other = learnt.get(_core(name, prefix))
        if other is None or not hasattr(attention, _DISTANCES):
            continue
        unit = other.pretrained_window_size if min(other.pretrained_window_size) > 0 else other.window_size
        if tuple(unit) != tuple(attention.window_size) and min(unit) > 1:
            attention.pretrained_window_size = tuple(unit)
            attention.relative_coords_table.copy_(attention.create_coords_table_and_index()[0])
