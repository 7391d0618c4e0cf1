"""Pretrained weights: those of a model of transformers, taken wherever names and shapes are alike."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from vitscale.errors import RequestError, explain, shown
from vitscale.models.quiet import quiet_transformers

_BODIES = ("backbone", "vit", "swinv2")
"""What models of one body call it, each in its own way, at the front of their tensors' names."""
_HEADS = ("classifier", "decode_head", "auxiliary_head")
"""What is trained anew for other classes: of another shape they keep their random weights."""


def load_weights(model: nn.Module, source: str) -> None:
    """Copies what the pretrained model of a folder or of the hub has in common with `model`.

    Read from safetensors alone, and no code of the folder or the hub is run. Positions of another number of patches
    are interpolated.

    Raises:
        RequestError: it cannot be read, has nothing in common, or has another shape where it should be alike.
    """
    pretrained = _pretrained(source)
    prefix = str(getattr(pretrained, "base_model_prefix", ""))
    theirs = {_core(name, prefix): tensor for name, tensor in pretrained.state_dict().items()}
    taken, unlike = 0, []
    with torch.no_grad():
        for name, own in model.state_dict().items():
            other = theirs.get(_core(name, prefix))
            if other is not None and name.endswith("position_embeddings"):
                other = _interpolated(other, own)
            if other is None:
                continue
            if other.shape == own.shape:
                own.copy_(other)
                taken += not name.startswith(_HEADS)
            elif not name.startswith(_HEADS):
                unlike.append(f"{name} is {list(other.shape)} there and {list(own.shape)} here")
    if unlike or not taken:
        what = "; ".join(unlike[:3]) or "none of its tensors has the name of one of the model's"
        raise RequestError(
            explain(
                f"model.weights {shown(source)} are of another model: {what}",
                next_step="Name weights of the same architecture and size, or leave weights out",
            )
        )


def _pretrained(source: str) -> Any:
    transformers = quiet_transformers()
    local = Path(source).expanduser()
    place = str(local) if local.is_dir() else source
    try:
        config = transformers.AutoConfig.from_pretrained(place, trust_remote_code=False)
        kind = getattr(transformers, str((config.architectures or ["none"])[0]), None)
        if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
            raise ValueError(f"its config.json names no model of transformers in architectures: {config.architectures}")
        load: Any = kind.from_pretrained  # type: ignore[attr-defined]
        return load(place, use_safetensors=True, dtype=torch.float32)
    except Exception as error:  # whatever the library, the files or the network bring
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise RequestError(
            explain(
                f"model.weights {shown(source)} cannot be loaded: {reason}",
                next_step="Name a folder with config.json and model.safetensors, or a model of the hub",
            )
        ) from error


def _core(name: str, prefix: str) -> str:
    first, _, rest = name.partition(".")
    return rest if first in (*_BODIES, prefix) else name


def _interpolated(positions: Tensor, own: Tensor) -> Tensor:
    """Positions [1, 1 + n, h] for as many patches as `own` has; the class token's stays."""
    patches, side = positions.shape[1] - 1, math.isqrt(own.shape[1] - 1)
    if positions.shape == own.shape or positions.shape[2:] != own.shape[2:] or math.isqrt(patches) ** 2 != patches:
        return positions
    grid = positions[:, 1:].transpose(1, 2).unflatten(2, (math.isqrt(patches), -1))
    resized = interpolate(grid, size=(side, side), mode="bicubic", align_corners=False)
    return torch.cat([positions[:, :1], resized.flatten(2).transpose(1, 2)], dim=1)
