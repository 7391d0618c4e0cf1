"""Engines: what makes training distributed. One file each; `trial.engines.ENGINES` is the whole list."""

from __future__ import annotations

import importlib

import torch
from torch import nn

from vitscale.base.plugins import referred
from vitscale.engines.base import Engine
from vitscale.models.batch_norm import over_real_images
from vitscale.trial.engines import known
from vitscale.trial.trial import TrainSpec, Trial


def _named(engine: str) -> type[Engine]:
    """Its file is loaded now, and no other: DeepSpeed takes seconds to import."""
    kind: type[Engine] = referred(known(engine).engine)
    return kind


def preload(train: TrainSpec) -> None:
    """Imports an engine's libraries now, so that their seconds count as imports.

    Of torch too: the first optimizer and the first DDP module load its compiler, used or not (`torch._disable_dynamo`).
    """
    importlib.import_module("torch._dynamo")
    _named(train.engine).preload(train)


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
    kind = _named(trial.train.engine)
    if trial.parallel.pipeline == 1:
        return kind(model, trial, device)
    from vitscale.engines.pipeline import pipelined  # takes a second to import

    return pipelined(kind)(model, trial, device)


__all__ = ["Engine", "build", "preload"]
