"""Engines: what makes training distributed. One file each; the table below is the whole list."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import nn

from vitscale.engines.base import Engine
from vitscale.models.batch_norm import over_real_images
from vitscale.trial.trial import TrainSpec, Trial


def _plain() -> type[Engine]:
    from vitscale.engines.plain import PlainEngine

    return PlainEngine


def _ddp() -> type[Engine]:
    from vitscale.engines.ddp import DdpEngine

    return DdpEngine


def _fsdp2() -> type[Engine]:
    from vitscale.engines.fsdp2 import Fsdp2Engine

    return Fsdp2Engine


def _deepspeed() -> type[Engine]:
    from vitscale.engines.deepspeed import DeepSpeedEngine

    return DeepSpeedEngine


def _accelerate() -> type[Engine]:
    from vitscale.engines.accelerate import AccelerateEngine

    return AccelerateEngine


def _megatron() -> type[Engine]:
    from vitscale.engines.megatron import MegatronEngine

    return MegatronEngine


ENGINES: dict[str, Callable[[], type[Engine]]] = {
    "none": _plain,
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "deepspeed": _deepspeed,
    "accelerate": _accelerate,
    "megatron": _megatron,
}
"""Each loads its file when named, and no other: DeepSpeed takes seconds to import."""


def preload(train: TrainSpec) -> None:
    """Imports an engine's libraries now, so that their seconds count as imports.

    Of torch too: the first optimizer and the first DDP module load its compiler, used or not (`torch._disable_dynamo`).
    """
    importlib.import_module("torch._dynamo")
    ENGINES[train.engine]().preload(train)


def build(model: nn.Module, trial: Trial, device: torch.device) -> Engine:
    """Wraps `model` as the trial's engine does. Of all engines alike, fp32 is multiplied in fp32, never in TF32.

    Of all alike too, and before anything else holds a module: batch norms are those of the trial. Where it classifies
    with local ones they stay torch's own, which sees padding.
    """
    if trial.model.task == "segmentation" or trial.train.batch_norm == "synchronised":
        over_real_images(model, synchronised=trial.train.batch_norm == "synchronised")
    # Torch leaves convolutions to TF32 (on Ampere and later), and containers may set it for matrix products too. Where
    # a library takes it for one size of micro-batch and not for another, losses differ by 1e-4 at the first step.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    return ENGINES[trial.train.engine]()(model, trial, device)


__all__ = ["ENGINES", "Engine", "build", "preload"]
