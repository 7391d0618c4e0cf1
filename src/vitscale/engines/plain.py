"""No engine: one rank, no wrapper, no process group. The baseline that shows what a wrapper costs."""

from __future__ import annotations

import torch
from torch import nn

from vitscale.engines.base import TorchEngine


class PlainEngine(TorchEngine):
    """The model as it is."""

    gradient_dtype = None

    @staticmethod
    def wrap(model: nn.Module, device: torch.device) -> nn.Module:
        """To the device: there is nothing else."""
        return model.to(device)

    @property
    def module(self) -> nn.Module:
        """The model itself."""
        return self.wrapped
