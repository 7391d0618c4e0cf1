"""Swin V2 (Liu et al., "Swin Transformer V2", CVPR 2022) of transformers, without dropout and stochastic depth."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vitscale.models.quiet import quiet_transformers
from vitscale.trial.model_spec import ModelSpec


def build_swin(spec: ModelSpec) -> nn.Module:
    """The classifier that a resolved spec of Swin describes."""
    model: nn.Module = quiet_transformers().Swinv2ForImageClassification(
        configuration(spec, num_labels=spec.num_classes)
    )
    # Its buffers are constants, made of the shape. DDP would broadcast them in every forward, and in a rooted operation
    # a wait cannot be told from a transfer.
    names = [name for name, _ in model.named_buffers()]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return model.to(torch.float32)


def configuration(spec: ModelSpec, **fields: Any) -> Any:
    """transformers' `Swinv2Config` of a resolved spec.

    Nothing is dropped, as in the named ViTs: what a rank drops out would be another thing on every number of ranks.
    """
    if spec.depths is None or spec.heads is None:
        raise ValueError("a model is built of a resolved spec: call resolve(spec, dataset_classes) first")
    return quiet_transformers().Swinv2Config(
        image_size=spec.image_size,
        patch_size=spec.patch_size,
        num_channels=spec.channels,
        embed_dim=spec.hidden_size,
        depths=spec.depths,
        num_heads=tuple(spec.heads << stage for stage in range(len(spec.depths))),
        window_size=spec.window_size,
        drop_path_rate=0.0,
        **fields,
    )
