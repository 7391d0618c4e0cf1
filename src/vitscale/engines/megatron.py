"""Megatron-Core's data parallelism: gradients in flat buffers, optimizer states sharded by its own optimizer."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from vitscale.engines.base import COMMUNICATED, Engine, with_options
from vitscale.trial.trial import TrainSpec, Trial

_WEIGHTS = {"bf16-params": torch.bfloat16}


class MegatronEngine(Engine):
    """Megatron-Core's `DistributedDataParallel` with its distributed optimizer.

    Gradients are reduce-scattered once per optimizer step, and the updated weights all-gathered. Its `bf16-params`
    keeps fp32 master weights in the sharded optimizer, as DeepSpeed's does. Megatron-Core allocates its buffers on the
    current CUDA device, so this engine needs one.
    """

    def __init__(self, model: nn.Module, trial: Trial, device: torch.device) -> None:
        """The wrap order of Megatron-Core.

        1. its process groups, all of them data parallel: wrapper and optimizer ask for them;
        2. to the device and the weights' dtype: the wrapper moves weights and gradients into flat buffers of it;
        3. checkpointing and compiling, block by block: the wrapper's hooks hang on the parameters, outside both;
        4. the wrapper, and only then the optimizer: it shards the wrapper's buffers.
        """
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel
        from megatron.core.optimizer import get_megatron_optimizer

        self.train_spec = train = trial.train
        self.device = device
        if not parallel_state.is_initialized():
            parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        self.input_dtype = _WEIGHTS.get(train.precision, torch.float32)
        model = with_options(model.to(device, self.input_dtype), train)
        self.wrapped = DistributedDataParallel(_transformer(), _wrapper_options(train), model)
        self.optimizer = get_megatron_optimizer(
            _optimizer_options(trial), [self.wrapped], use_gloo_process_groups=False
        )
        for group in self.optimizer.param_groups:
            # In Megatron-Core it is the scheduler that spares biases and norms the weight decay.
            group["weight_decay"] = train.weight_decay * group.get("wd_mult", 1.0)
        self.gradient_dtype = str(self.wrapped.buffers[0].grad_dtype).removeprefix("torch.")
        self.wrapped.zero_grad_buffer()

    @staticmethod
    def preload(train: TrainSpec) -> None:
        """Imports Megatron-Core."""
        del train
        import megatron.core.distributed
        import megatron.core.optimizer  # noqa: F401 - their seconds count as imports

    @override
    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.wrapped.no_sync()

    @override
    def backward(self, loss: Tensor, *, last: bool) -> None:
        super().backward(loss, last=last)
        if last:
            self.wrapped.finish_grad_sync()  # waits for what overlaps, or sends all at once

    @override
    def step(self) -> None:
        self.optimizer.step()  # clips, updates this rank's shard, gathers the weights
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()


def _transformer() -> Any:
    """The configuration that the wrapper asks for; if a model is not Megatron's, it reads only switches, no shape."""
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1)


def _wrapper_options(train: TrainSpec) -> Any:
    """Megatron-Core's defaults, except for its distributed optimizer and for what the study sets."""
    from megatron.core.distributed import DistributedDataParallelConfig

    dtype = COMMUNICATED[train.gradient_dtype] if train.gradient_dtype else _WEIGHTS.get(train.precision, torch.float32)
    elements = None if train.bucket_mib is None else train.bucket_mib * 2**20 // dtype.itemsize
    return DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=bool(train.overlap_comm),
        grad_reduce_in_fp32=dtype is torch.float32,
        bucket_size=elements,
    )


def _optimizer_options(trial: Trial) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    train = trial.train
    return OptimizerConfig(
        optimizer="sgd" if train.optimizer == "sgd" else "adam",
        lr=trial.peak_learning_rate,
        weight_decay=train.weight_decay,
        sgd_momentum=train.momentum,
        clip_grad=train.gradient_clipping,
        bf16=train.precision == "bf16-params",
        params_dtype=_WEIGHTS.get(train.precision, torch.float32),
        use_distributed_optimizer=True,
    )
