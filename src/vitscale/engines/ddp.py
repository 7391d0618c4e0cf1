"""PyTorch's DistributedDataParallel: gradients are averaged in buckets while backward goes on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from vitscale.engines.base import TorchEngine, compressed_to, weight_dtype, with_options
from vitscale.engines.splits import split
from vitscale.engines.stages import in_stages, stage_plan
from vitscale.trial.trial import Trial

_COMPRESSED = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}


class DdpEngine(TorchEngine):
    """DDP at its defaults, but for what the study sets."""

    wrapped: DistributedDataParallel

    @staticmethod
    @override
    def wrap(model: nn.Module, trial: Trial, device: torch.device) -> nn.Module:
        """The wrap order of DDP.

        1. to the device and the weights' dtype: DDP broadcasts rank 0's weights from where they are, and its buckets
           live there, in their dtype;
        2. tokens over the ranks that share an image, where there are such: gradients are averaged over them too;
        3. checkpointing and compiling, block by block: DDP's hooks hang on the parameters, outside the compiled code;
        4. stages, where other ranks hold the other blocks: each is wrapped by itself;
        5. DDP: from here on the parameters must not be replaced;
        6. the hook that sends gradients in another dtype: it belongs to DDP's own reducer.
        """
        train = trial.train
        model = model.to(device, weight_dtype(train))
        plan = stage_plan(model, trial)
        mesh = split(model, trial, device) if trial.parallel.ranks_per_model > 1 else None

        def distributed(module: nn.Module) -> nn.Module:
            wrapped = DistributedDataParallel(
                module,
                device_ids=[device.index] if device.type == "cuda" else None,
                process_group=None if mesh is None else mesh.get_group(),
                bucket_cap_mb=train.bucket_mib,
                gradient_as_bucket_view=train.gradient_as_bucket_view,
                static_graph=train.static_graph,
            )
            if dtype := compressed_to(train):
                wrapped.register_comm_hook(None, _COMPRESSED[dtype])
            return wrapped

        model = with_options(model, train, plan.blocks_of(model) if plan else ())
        return in_stages(model, plan, trial, distributed)

    @override
    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Gradients travel once per optimizer step. Around forward too, in which DDP decides whether the coming
        backward reduces."""
        return nullcontext() if last else self.wrapped.no_sync()

    @property
    @override
    def module(self) -> nn.Module:
        model: nn.Module = self.wrapped.module
        return model
