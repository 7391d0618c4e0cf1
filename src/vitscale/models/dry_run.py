"""A forward and backward pass without computing anything: which parameters does a model really use?"""

from __future__ import annotations

import torch
from torch import nn
from torch.func import functional_call

from vitscale.errors import RequestError, shown
from vitscale.models.segmentation import AuxiliaryLogits
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
