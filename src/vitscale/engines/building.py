"""Builds the engine that a trial names, inside a rank."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from vitscale.base.plugins import referred
from vitscale.engines import known
from vitscale.engines.base import Engine, known_gpu
from vitscale.engines.checks import check_torch
from vitscale.models.batch_norm import over_real_images
from vitscale.probes.matmul import forbid_tf32
from vitscale.trial.trial import TrainSpec, Trial


def _engine_class(engine: str) -> type[Engine]:
    """Return the class of an engine; only this engine is imported, because DeepSpeed takes seconds."""
    engine_class: type[Engine] = referred(known(engine).engine)
    return engine_class


_WARM_POOL = "TORCH_WARM_POOL"
"""The variable that decides whether torch starts processes that compile before there is anything to compile."""


@contextmanager
def _no_compile_workers() -> Iterator[None]:
    """A context of imports that start no processes to compile in.

    torch up to 2.8 starts them as its compiler is imported (`AsyncCompile.warm_pool`), with a thread that reads from
    them, so that no rank could be a fork. Compiling starts them otherwise.
    """
    earlier = os.environ.get(_WARM_POOL)
    os.environ[_WARM_POOL] = "0"
    try:
        yield
    finally:
        if earlier is None:
            del os.environ[_WARM_POOL]
        else:
            os.environ[_WARM_POOL] = earlier


def preload(train: TrainSpec) -> None:
    """Import an engine's libraries now, so that their seconds count as imports.

    torch's compiler is among them: the first optimizer and the first DDP module load it, used or not
    (`torch._disable_dynamo`).
    """
    with known_gpu(train.device), _no_compile_workers():
        importlib.import_module("torch._dynamo")
        _engine_class(train.engine).preload(train)


def build(model: nn.Module, trial: Trial, device: torch.device) -> Engine:
    """Return `model` in the trial's engine.

    What must be the same in all engines is done here: which batch norms the model has, and that fp32 is multiplied in
    fp32, never in TF32.

    Raises:
        RequestError: this torch trains wrongly what the trial asks for, or the engine cannot train the model.
    """
    check_torch(trial.train, torch.__version__)
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
