"""No engine: one rank, no wrapper, no process group. The baseline that shows what a wrapper costs."""

from __future__ import annotations

import torch
from torch import nn

from vitscale.engines.base import TorchEngine
from vitscale.trial import TrainSpec


class PlainEngine(TorchEngine):
    """The model as it is."""

    gradient_dtype = None

    @staticmethod
    def wrap(model: nn.Module, train: TrainSpec, device: torch.device) -> nn.Module:  # noqa: ARG004 - one signature
        """To the device: there is nothing else."""
        return model.to(device)

    @property
    def module(self) -> nn.Module:
        """The model itself."""
        return self.wrapped
