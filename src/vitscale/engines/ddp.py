"""PyTorch's DistributedDataParallel: gradients are averaged in buckets while backward goes on."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vitscale.engines.base import TorchEngine
from vitscale.trial import TrainSpec


class DdpEngine(TorchEngine):
    """DDP at its defaults, but for the size of its buckets where the study sets it."""

    gradient_dtype = "float32"
    wrapped: DistributedDataParallel

    @staticmethod
    def wrap(model: nn.Module, train: TrainSpec, device: torch.device) -> DistributedDataParallel:
        """The wrap order of DDP.

        1. to the device: DDP broadcasts rank 0's weights from where they are, and its buckets live there;
        2. DDP: from here on the parameters must not be replaced.
        """
        model = model.to(device)
        device_ids = [device.index] if device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=device_ids, bucket_cap_mb=train.bucket_mib)

    def gradients_stay(self) -> AbstractContextManager[None]:
        """Accumulates locally: gradients travel once per optimizer step, as in every other engine."""
        return self.wrapped.no_sync()

    @property
    def module(self) -> nn.Module:
        """The model inside the wrapper: evaluation needs no exchange."""
        model: nn.Module = self.wrapped.module
        return model
