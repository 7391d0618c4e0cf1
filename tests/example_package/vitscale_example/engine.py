"""Gradients are summed one by one when backward is over: what DDP does, without its buckets."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch import distributed as dist
from typing_extensions import override

from vitscale.engines.base import LossOf, TorchEngine, weight_dtype, with_options
from vitscale.probes.steps import PhaseContext, no_phase
from vitscale.trial.trial import Trial


class SummedEngine(TorchEngine):
    """The base computes; what is left is when gradients travel."""

    @staticmethod
    @override
    def wrap(model: nn.Module, trial: Trial, device: torch.device) -> nn.Module:
        return with_options(model.to(device, weight_dtype(trial.train)), trial.train)

    @override
    def micro_step(self, images: Tensor, loss_of: LossOf, *, last: bool, phase: PhaseContext = no_phase) -> Tensor:
        loss = super().micro_step(images, loss_of, last=last, phase=phase)
        with phase("backward"):
            for parameter in self.module.parameters() if last else ():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()
        return loss
