"""Each rank trains by itself, and every few steps all take the mean of their parameters (local SGD)."""

from __future__ import annotations

import torch
from torch import distributed as dist
from torch import nn
from typing_extensions import override

from vitscale.engines.base import TorchEngine, weight_dtype, with_options
from vitscale.trial.trial import Trial

from .facts import EVERY


class AveragedEngine(TorchEngine):
    """The base computes; what is left is when parameters travel."""

    steps = 0

    @staticmethod
    @override
    def wrap(model: nn.Module, trial: Trial, device: torch.device) -> nn.Module:
        return with_options(model.to(device, weight_dtype(trial.train)), trial.train)

    @override
    def step(self) -> None:
        super().step()
        self.steps += 1
        if self.steps % EVERY == 0:
            with torch.no_grad():
                for parameter in self.module.parameters():
                    dist.all_reduce(parameter)
                    parameter.div_(dist.get_world_size())
