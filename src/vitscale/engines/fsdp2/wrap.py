"""PyTorch's FSDP2 (`fully_shard`): weights, gradients and optimizer states are sharded, block by block."""

from __future__ import annotations

import functools
import warnings
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from typing_extensions import override

from vitscale.engines.base import TORCH_DTYPES, TorchEngine, weight_dtype, with_options
from vitscale.engines.shared.splits import split
from vitscale.engines.shared.stages import StagedModel, stage_plan
from vitscale.models.blocks import blocks_of
from vitscale.trial.trial import TrainSpec, Trial


class Fsdp2Options(NamedTuple):
    """A study's options of FSDP2, whether vitscale shards the model or Accelerate does."""

    reshard_after_forward: bool
    """Whether a block's weights are freed after its forward, and gathered again for its backward."""
    offloads_to_host: bool
    """Whether shards of weights, gradients and optimizer states lie in the host's memory."""
    mixed_precision: MixedPrecisionPolicy


def fsdp2_options(train: TrainSpec) -> Fsdp2Options:
    """Return the options of FSDP2 that the study sets, with FSDP2's defaults for what it leaves out."""
    return Fsdp2Options(
        reshard_after_forward=train.reshard_after_forward is not False,
        offloads_to_host=train.offload == "parameters",
        mixed_precision=MixedPrecisionPolicy(
            param_dtype=weight_dtype(train) if train.master_weights else None,
            reduce_dtype=TORCH_DTYPES[train.gradient_dtype] if train.gradient_dtype else None,
        ),
    )


class Fsdp2Engine(TorchEngine):
    """Each block gathers its weights before its forward and its backward, and scatters its gradients after it.

    With replicas (hybrid sharding) it does so among the ranks of one replica, and all-reduces the shards of its
    gradients among replicas.

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
        model = model.to(device, torch.float32 if train.master_weights else weight_dtype(train))
        plan = stage_plan(model, trial)
        mesh = split(model, trial, device)
        own_blocks = plan.blocks_of(model, trial) if plan else None
        model = with_options(model, train, own_blocks)
        blocks = set(blocks_of(model) if own_blocks is None else own_blocks)
        options = fsdp2_options(train)
        offload_policy = CPUOffloadPolicy() if options.offloads_to_host else OffloadPolicy()
        shard = functools.partial(
            fully_shard, mesh=mesh, mp_policy=options.mixed_precision, offload_policy=offload_policy
        )
        # Stages that hand on maps cause this warning; what they hand on is never changed in place.
        warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(FSDPStage\) returned a view tensor")

        def shard_by_block(module: nn.Module) -> nn.Module:
            for submodule in module.modules():
                if submodule in blocks:
                    shard(submodule, reshard_after_forward=options.reshard_after_forward)
            # Backward needs the root first, so FSDP2 keeps it gathered unless an option says otherwise.
            shard(module)
            return module

        return shard_by_block(model) if plan is None else StagedModel(model, plan, trial, shard_by_block)
