"""Builds the engine that a trial names, inside a rank."""

from __future__ import annotations

import importlib

import torch
from torch import nn

from vitscale.base.plugins import referred
from vitscale.engines import known
from vitscale.engines.base import Engine, known_gpu
from vitscale.models.batch_norm import over_real_images
from vitscale.probes.matmul import forbid_tf32
from vitscale.trial.trial import TrainSpec, Trial


def _engine_class(engine: str) -> type[Engine]:
    """Return the class of an engine; only this engine is imported, because DeepSpeed takes seconds."""
    engine_class: type[Engine] = referred(known(engine).engine)
    return engine_class


def preload(train: TrainSpec) -> None:
    """Import an engine's libraries now, so that their seconds count as imports.

    torch's compiler is among them: the first optimizer and the first DDP module load it, used or not
    (`torch._disable_dynamo`).
    """
    with known_gpu(train.device):
        importlib.import_module("torch._dynamo")
        _engine_class(train.engine).preload(train)


def build(model: nn.Module, trial: Trial, device: torch.device) -> Engine:
    """Return `model` in the trial's engine.

    What must be the same in all engines is done here: which batch norms the model has, and that fp32 is multiplied in
    fp32, never in TF32.
    """
    is_synchronised = trial.train.batch_norm == "synchronised"
    # Norms that leave padding out replace torch's before anything else holds a module. Only a model that classifies
    # with local norms keeps torch's own, which count the images of padding too.
    keeps_torch_norms = trial.model.task == "classification" and not is_synchronised
    if not keeps_torch_norms:
        over_real_images(model, synchronised=is_synchronised)
    # torch lets convolutions use TF32 (on Ampere and later), and containers may allow it for matrix products too. Where
    # a library uses it for one size of micro-batch and not for another, losses differ by 1e-4 at the first step.
    forbid_tf32()
    engine_class = _engine_class(trial.train.engine)
    if trial.parallel.pipeline == 1:
        return engine_class(model, trial, device)
    from vitscale.engines.shared.pipeline import pipelined  # takes a second to import

    return pipelined(engine_class)(model, trial, device)
