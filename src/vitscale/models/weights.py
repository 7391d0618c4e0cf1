"""Pretrained weights: those of a model of transformers, fitted to images of another size and other channels."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from vitscale.errors import RequestError, shown
from vitscale.models.named import quiet_transformers

_BODIES = ("backbone", "vit", "swinv2")
"""What models of one body call it, each in its own way, at the front of their tensors' names."""
_HEADS = ("classifier", "decode_head", "auxiliary_head")
"""What is trained anew for other classes: of another shape they keep their random weights."""
_DISTANCES = "relative_coords_table"
"""Buffer of Swin V2's attention."""


def load_weights(model: nn.Module, source: str) -> None:
    """Copies what the pretrained model of a folder or of the hub has in common with `model`.

    Read from safetensors alone, and no code of the folder or the hub is run. Positions of another number of patches
    are interpolated, a first convolution over other channels is inflated, and Swin V2's position biases for windows
    of another size are sampled at the distances that they were learnt for.

    Raises:
        RequestError: it cannot be read, has nothing in common, or has another shape where it should be alike.
    """
    pretrained = _pretrained(source)
    prefix = str(getattr(pretrained, "base_model_prefix", ""))
    theirs = {_core(name, prefix): tensor for name, tensor in pretrained.state_dict().items()}
    first = next((f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Conv2d)), "")
    taken, unlike = 0, []
    with torch.no_grad():
        for name, own in model.state_dict().items():
            other = theirs.get(_core(name, prefix))
            if other is None:
                continue
            if name.endswith("position_embeddings"):
                other = interpolated(other, own.shape[1])
            elif name == first and other.shape[0::2] == own.shape[0::2]:
                other = inflated(other, own.shape[1])
            if other.shape == own.shape:
                own.copy_(other)
                taken += not name.startswith(_HEADS)
            elif not name.startswith(_HEADS):
                unlike.append(f"{name} is {list(other.shape)} there and {list(own.shape)} here")
    if unlike or not taken:
        what = "; ".join(unlike[:3]) or "none of its tensors has the name of one of the model's"
        raise RequestError(
            f"model.weights {shown(source)} are of another model: {what}",
            next_step="Name weights of the same architecture and size, or leave weights out",
        )
    _keep_distances(model, pretrained, prefix)


def _pretrained(source: str) -> Any:
    transformers = quiet_transformers()
    local = Path(source).expanduser()
    folder_or_name = str(local) if local.is_dir() else source
    try:
        config = transformers.AutoConfig.from_pretrained(folder_or_name, trust_remote_code=False)
        kind = getattr(transformers, str((config.architectures or ["none"])[0]), None)
        if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
            raise ValueError(f"its config.json names no model of transformers in architectures: {config.architectures}")
        load: Any = kind.from_pretrained  # type: ignore[attr-defined]  # every model's class has it
        return load(folder_or_name, use_safetensors=True, dtype=torch.float32)
    except Exception as error:  # whatever the library, the files or the network bring
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise RequestError(
            f"model.weights {shown(source)} cannot be loaded: {reason}",
            next_step="Name a folder with config.json and model.safetensors, or a model of the hub",
        ) from error


def _core(name: str, prefix: str) -> str:
    first, _, rest = name.partition(".")
    return rest if first in (*_BODIES, prefix) else name


def interpolated(positions: Tensor, length: int) -> Tensor:
    """Position embeddings [1, s + n, h] of a grid of n patches, resized bicubically to [1, length, h].

    Those of the s special tokens in front (a class token, DeiT's second one) stay. As `interpolate_pos_encoding` of
    transformers does it; Dosovitskiy et al., "An Image is Worth 16x16 Words" (ICLR 2021), section 3.2, interpolate to
    fine-tune at a higher resolution. Returned as they are where neither is a square grid behind as many tokens.
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

    Repeated in turn and scaled by c / channels, so that an image whose channels are all alike gives what it gave; for
    one channel their sum, which is what a grey picture in colour gave. The rule of timm (`adapt_input_conv`), after
    Carreira & Zisserman, "Quo Vadis, Action Recognition?" (CVPR 2017), section 2.4, who inflate kernels over time.
    """
    before = kernels.shape[1]
    if channels == before:
        return kernels
    if channels == 1:
        return kernels.sum(dim=1, keepdim=True)
    return kernels[:, torch.arange(channels) % before] * (before / channels)


def _keep_distances(model: nn.Module, pretrained: nn.Module, prefix: str) -> None:
    """Has Swin V2 measure distances within its windows in units of those that its weights were trained with.

    Its position biases are no table: a small network gives one for each log-spaced distance, in units of the window
    (Liu et al., "Swin Transformer V2", CVPR 2022, section 3.3). In windows of another size the same neighbour keeps
    its bias if the unit stays: what `pretrained_window_sizes` of its configuration is for.
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
