"""No engine: one rank, no wrapper, no process group."""

from __future__ import annotations

import torch
from torch import nn
from typing_extensions import override

from vitscale.engines.base import TorchEngine, weight_dtype, with_options
from vitscale.trial.trial import TrainSpec, Trial


class PlainEngine(TorchEngine):
    """Training on one rank, with which everything distributed is compared."""

    @staticmethod
    @override
    def wrap(model: nn.Module, trial: Trial, device: torch.device) -> nn.Module:
        """The wrap order without a wrapper: to the device and the weights' dtype, then the blocks' options."""
        return with_options(model.to(device, weight_dtype(trial.train)), trial.train)

    @staticmethod
    @override
    def sent_gradient_dtype(train: TrainSpec) -> None:
        """None: no gradients travel."""
