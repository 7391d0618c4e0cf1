"""Any configuration for the task of the Hugging Face hub or of a local folder, with random weights; and what a
model shows without computing anything: which parameters it really uses, which sizes it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from vitscale.errors import RequestError, shown
from vitscale.models.named import quiet_transformers
from vitscale.models.segmentation import AuxiliaryLogits
from vitscale.trial.hf_config import hf_shape, read_config
from vitscale.trial.model_spec import ModelSpec


def freeze_unused(model: nn.Module, spec: ModelSpec) -> None:
    """Freezes the parameters that get no gradient from the logits, those of an auxiliary head included.

    DDP stops in the second step where a parameter never becomes ready, and the alternative, `find_unused_parameters`,
    walks the graph in every step. The pass runs on meta tensors: shapes only, no memory and no time. A model that
    cannot run so (its forward reads values) is left as it is.

    Raises `RequestError` where the logits are not `[b, spec.num_classes]`, or `[b, spec.num_classes, h, w]`.
    """
    stand_ins = _stand_ins(model)
    images = torch.empty(2, spec.channels, spec.image_size, spec.image_size, device="meta")
    auxiliary = AuxiliaryLogits(model, None)
    try:
        output = functional_call(model, stand_ins, (images,))
        logits = output if isinstance(output, torch.Tensor) else output.logits
        wanted = {name: stand_ins[name] for name, p in model.named_parameters() if p.requires_grad}
        second = auxiliary.take()
        loss = logits.sum() if second is None else logits.sum() + second.sum()
        gradients = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    except Exception:  # whatever a foreign forward does not like about meta tensors
        return
    finally:
        auxiliary.close()
    if logits.shape[:2] != (2, spec.num_classes) or logits.ndim != (4 if spec.task == "segmentation" else 2):
        raise RequestError(
            f"the model {shown(spec.hf)} gives logits of shape {tuple(logits.shape)} for 2 images",
            valid=[(2, spec.num_classes)],
        )
    unused = {name for name, gradient in zip(wanted, gradients, strict=True) if gradient is None}
    for name, parameter in model.named_parameters():
        if name in unused:
            parameter.requires_grad_(False)


def refuse_other_sizes(model: nn.Module, spec: ModelSpec) -> None:
    """Refuses a model of segmentation that takes squares of `spec.image_size` alone, before it trains: images are
    evaluated in their own proportions. Of one that cannot run without values nothing is known, and nothing refused.

    Raises:
        RequestError: it labels the pixels of such a square, and not those of a picture of 4 : 3.
    """
    side, training, stand_ins = spec.image_size, model.training, _stand_ins(model)
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


def _stand_ins(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }


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
