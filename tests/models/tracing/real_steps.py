"""What a real step on the CPU keeps for backward: the truth that traces are held against."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from vitscale import models
from vitscale.models.batch_norm import over_real_images
from vitscale.models.blocks import blocks_of, checkpoint_block
from vitscale.models.losses import label_losses, slot_loss
from vitscale.models.named import AuxiliaryLogits
from vitscale.models.tracing import trace
from vitscale.trial.model_card import ModelCard, TraceRequest
from vitscale.trial.model_spec import ModelSpec, resolve

CLASSES = 7

VIT: dict[str, Any] = {
    "name": "vit-ti16",
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 64,
    "layers": 3,
    "heads": 4,
}
SWIN: dict[str, Any] = {
    "name": "swinv2-t", "image_size": 32, "patch_size": 2, "hidden_size": 24, "heads": 3, "depths": (2, 1, 1),
    "window_size": 4,
}  # fmt: skip
PYRAMID: dict[str, Any] = VIT | {"task": "segmentation", "decoder_size": 12}
UPERNET: dict[str, Any] = SWIN | {"task": "segmentation", "decoder_size": 12}

_ENCODER = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
HF_CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "dinov2": {"model_type": "dinov2", **_ENCODER, "mlp_ratio": 2},
    "convnext": {"model_type": "convnext", "hidden_sizes": [16, 32, 64, 96], "depths": [1, 1, 2, 1], "image_size": 64},
    "beit": {"model_type": "beit", **_ENCODER, "use_relative_position_bias": True},
    "siglip": {"model_type": "siglip", "vision_config": _ENCODER, "text_config": {"num_hidden_layers": 1}},
}
"""Name -> a small configuration of transformers; all take images of 32 pixels, ConvNeXt of 64."""


def named(shape: Mapping[str, Any]) -> ModelSpec:
    """A resolved named model."""
    return resolve(ModelSpec(**shape), CLASSES)


def configured(name: str, folder: Path) -> ModelSpec:
    """A resolved model of one of `HF_CONFIGURATIONS`, which is written into `folder`."""
    configuration = HF_CONFIGURATIONS[name]
    (folder / "config.json").write_text(json.dumps(configuration))
    return resolve(ModelSpec(hf=str(folder), image_size=configuration.get("image_size", 32)), CLASSES)


@cache
def card_of(spec: ModelSpec, **options: Any) -> ModelCard:
    """The card of a model, traced once by this process; options are fields of the request."""
    return trace(TraceRequest(model=spec, **options))


class RealStep(NamedTuple):
    """What a real forward has done."""

    kept_bytes: int
    """What autograd has saved, and the logits; without weights, their copies and the inputs."""
    dtypes: list[str]
    """Operations of the model's forward, each with the dtype of its output."""


class _Saved:
    """A tensor that autograd has saved; it goes with the graph that needs it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # an operation's own output would keep its graph in a cycle


class Watch(TorchDispatchMode):
    """Notes the casts of weights, and the dtypes of results."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.weights = {address(each) for each in (*model.parameters(), *model.buffers())}
        self.trained = {address(each) for each in model.parameters()}
        self.copies: list[Tensor] = []
        self.dtypes: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "_to_copy" and address(args[0]) in self.trained:
            self.copies.append(output)
        first = output[0] if isinstance(output, tuple) else output
        # Hooks of saved tensors detach them.
        if isinstance(first, Tensor) and first.is_floating_point() and name != "detach":
            self.dtypes.append(f"{name} {first.dtype}")
        return output


def address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@cache
def real_step(
    spec: ModelSpec, images: int, *, autocast: torch.dtype | None = None, checkpointing: bool = False
) -> RealStep:
    """Take a forward of the real model on the CPU."""
    model = models.build(spec)
    if spec.task == "segmentation":
        over_real_images(model, synchronised=False)
    if checkpointing:
        for block in blocks_of(model):
            checkpoint_block(block)
    batch = torch.randn(images, spec.channels, spec.image_size, spec.image_size)
    shape = (images, spec.image_size, spec.image_size) if spec.task == "segmentation" else (images,)
    labels = torch.zeros(shape, dtype=torch.int64)
    saved: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def pack(tensor: Tensor) -> _Saved:
        packed = _Saved(tensor)
        saved.add(packed)
        return packed

    auxiliary = AuxiliaryLogits(model, spec.auxiliary_weight if spec.task == "segmentation" else 0.0)
    watch = Watch(model)
    with saved_tensors_hooks(pack, lambda packed: packed.tensor), watch:
        with nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast):
            logits = models.logits_of(model(batch))
        dtypes = [*watch.dtypes]
        losses = label_losses(logits.float(), labels)
        second = auxiliary.take()
        if second is not None:
            losses = losses + auxiliary.weight * label_losses(second.float(), labels)
        loss = slot_loss(losses, labels.numel(), 1, 1)
    auxiliary.close()
    others = watch.weights | {address(batch), address(labels)} | {address(copy) for copy in watch.copies}
    tensors = [*(packed.tensor for packed in saved), logits, loss]
    kept = {address(tensor): tensor.untyped_storage().nbytes() for tensor in tensors if address(tensor) not in others}
    return RealStep(sum(kept.values()), dtypes)


def real_peak_bytes(spec: ModelSpec, images: int, *, checkpointing: bool = False) -> int:
    """The most that torch's CPU allocator hands out in a step beside weights and inputs, by torch's profiler."""
    model = models.build(spec)
    if checkpointing:
        for block in blocks_of(model):
            checkpoint_block(block)
    batch = torch.randn(images, spec.channels, spec.image_size, spec.image_size)
    labels = torch.zeros(images, dtype=torch.int64)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        logits = models.logits_of(model(batch))
        loss = slot_loss(label_losses(logits.float(), labels), labels.numel(), 1, 1)
        loss.backward()
        del logits, loss
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes: list[int] = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(changes))
