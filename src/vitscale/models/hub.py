"""Any configuration for the task of the Hugging Face hub or of a local folder, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitscale.errors import RequestError, shown
from vitscale.models.dry_run import freeze_unused
from vitscale.models.named import quiet_transformers
from vitscale.trial.hf_config import hf_shape, read_config
from vitscale.trial.model_spec import ModelSpec


def build_hf(spec: ModelSpec) -> nn.Module:
    """The architecture that `spec.hf` describes, at the spec's image size, channels and class count.

    No code from the folder or the hub is run, and no weights are read. Parameters that classification does not use
    (DINOv2's mask token) are frozen, for DDP waits for the gradient of every other one.
    """
    transformers = quiet_transformers()
    config = _configuration(transformers, spec)
    try:
        model: nn.Module = auto_class(spec).from_config(
            config,
            # Both written out: the configuration itself may ask for 16-bit weights or name a kernel to be downloaded.
            dtype=torch.float32,
            attn_implementation=_attention(spec, config),
            trust_remote_code=False,
        )
    except Exception as error:  # a foreign configuration fails inside the library, with errors of any type
        raise _refused(spec, "describes no model that can be built", error) from error
    freeze_unused(model, spec)
    return model


def auto_class(spec: ModelSpec) -> Any:
    """What builds a model of the spec's task from a configuration."""
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
            raise RequestError(
                f"config.json of model.hf {shown(hf)} differs from the planned model in {', '.join(changed)}",
                next_step="Run the study again, so that it is planned with the file as it is now",
            )
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(Path(hf).expanduser()) if local else hf, trust_remote_code=False
        )
        config.num_labels = spec.num_classes
        if spec.auxiliary_weight is not None and hasattr(config, "use_auxiliary_head"):
            config.use_auxiliary_head = spec.auxiliary_weight > 0
        vision = getattr(config, "vision_config", None) or getattr(config, "backbone_config", None) or config
        if hasattr(vision, "image_size"):
            vision.image_size = spec.image_size
        if hasattr(vision, "num_channels"):
            vision.num_channels = spec.channels
        channels = getattr(vision, "num_channels", 3)
    except Exception as error:  # as above, and whatever the network brings
        raise _refused(spec, "cannot be loaded", error) from error
    if channels != spec.channels:
        raise RequestError(
            f"data.channels = {spec.channels}, and model.hf {shown(hf)} has no num_channels in its configuration",
            next_step="Use images of 3 channels, or another model",
        )
    return config


def _attention(spec: ModelSpec, config: Any) -> str:
    """PyTorch's fused attention where the architecture has it.

    Of several classes for one type the first is taken, which is the plain one: DeiT's other has a second classifier
    that is there for distillation.
    """
    mapping = auto_class(spec)._model_mapping
    if type(config) not in mapping:
        return "eager"  # from_config refuses it and lists the types there are
    model_class = mapping[type(config)]
    if isinstance(model_class, tuple):
        model_class = model_class[0]
    config.architectures = [model_class.__name__]
    return "sdpa" if getattr(model_class, "_supports_sdpa", False) else "eager"


def _refused(spec: ModelSpec, what: str, error: Exception) -> RequestError:
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    return RequestError(
        f"model.hf {shown(spec.hf)} {what}: {reason}",
        next_step=f"Name a configuration for {spec.task}: a local folder, or a model of the hub where there is a "
        "network",
    )
