"""PyTorch's FSDP2 (`fully_shard`): weights, gradients and optimizer states are sharded, block by block."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from typing_extensions import override

from vitscale.engines.base import COMMUNICATED, TorchEngine, blocks_of, weight_dtype, with_options
from vitscale.engines.shared.splits import split
from vitscale.engines.shared.stages import Stages, stage_plan
from vitscale.trial.trial import Trial


class Fsdp2Engine(TorchEngine):
    """Each block gathers its weights before its forward and its backward, and scatters its gradients after it.

    Gradients are scattered after every micro-step, which is FSDP2's default: keeping them until the last one would take
    the memory of a whole gradient on every rank, which sharding is there to save.
    """

    @staticmethod
    @override
    def wrap(model: nn.Module, trial: Trial, device: torch.device) -> nn.Module:
        """The wrap order of FSDP2.

        1. to the device and the weights' dtype: `fully_shard` cuts the shards out of the weights where they are;
        2. matrices and tokens over the ranks that share a model: what is left on each rank is sharded;
        3. checkpointing and compiling, block by block: FSDP2's hooks gather and free weights outside both;
        4. stages, where other ranks hold the other blocks: each is wrapped by itself;
        5. `fully_shard` on each block: one block is gathered at a time;
        6. `fully_shard` on the model: embedding, last norm and head, and the order of all the blocks.

        `bf16` is autocast here as on every engine, so that weights are gathered in fp32. FSDP2's own mixed precision
        would gather them in bf16 and compute norms in it too. That is another precision, `bf16-params`, where
        `master_weights` keeps the shards that are updated in fp32.
        """
        train = trial.train
        computed = weight_dtype(train)
        model = model.to(device, torch.float32 if train.master_weights else computed)
        plan = stage_plan(model, trial)
        mesh = split(model, trial, device)
        own_blocks = plan.blocks_of(model, trial) if plan else None
        model = with_options(model, train, own_blocks)
        reduced = COMMUNICATED[train.gradient_dtype] if train.gradient_dtype else None
        cast = computed if train.master_weights else None
        mixed = MixedPrecisionPolicy(param_dtype=cast, reduce_dtype=reduced)
        offloaded = CPUOffloadPolicy() if train.offload == "parameters" else OffloadPolicy()
        again = True if train.reshard_after_forward is None else train.reshard_after_forward
        # Stages that hand on maps cause this warning; what they hand on is never changed in place.
        warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(FSDPStage\) returned a view tensor")
        blocks = set(blocks_of(model) if own_blocks is None else own_blocks)

        def sharded(module: nn.Module) -> nn.Module:
            for block in filter(blocks.__contains__, module.modules()):
                fully_shard(block, mesh=mesh, reshard_after_forward=again, mp_policy=mixed, offload_policy=offloaded)
            # Backward needs the root first, so FSDP2 keeps it gathered unless it is told otherwise.
            fully_shard(module, mesh=mesh, mp_policy=mixed, offload_policy=offloaded)
            return module

        return sharded(model) if plan is None else Stages(model, plan, trial, sharded)
