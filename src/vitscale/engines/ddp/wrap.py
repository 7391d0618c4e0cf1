"""PyTorch's DistributedDataParallel: gradients are averaged in buckets while backward goes on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from vitscale.engines.base import TORCH_DTYPES, TorchEngine, weight_dtype, with_options
from vitscale.engines.shared.splits import split
from vitscale.engines.shared.stages import StagedModel, stage_plan
from vitscale.trial.trial import TrainSpec, Trial

Hook = Callable[[Any, Any], Future[Tensor]]
"""DDP's communication hook: takes a process group and a bucket (`dist.GradBucket`)."""
_COMPRESSING_HOOKS: dict[str, Hook] = {
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
}


class DdpOptions(NamedTuple):
    """A study's options of DDP, whether vitscale wraps the model or Accelerate does."""

    arguments: dict[str, Any]
    """Arguments of `DistributedDataParallel`, and by the same names of Accelerate's `DistributedDataParallelKwargs`."""
    hook_dtype: str | None
    """The dtype, such as "bf16", to which a hook converts gradients that travel; None: they travel as they are."""


def ddp_options(train: TrainSpec) -> DdpOptions:
    """Return the options of DDP that the study sets; what it leaves out stays at DDP's default."""
    arguments: dict[str, Any] = {
        "gradient_as_bucket_view": train.gradient_as_bucket_view,
        "static_graph": train.static_graph,
    }
    if train.bucket_mib is not None:
        arguments["bucket_cap_mb"] = train.bucket_mib
    return DdpOptions(arguments, hook_dtype=_hook_dtype(train))


def _hook_dtype(train: TrainSpec) -> str | None:
    """Return the dtype to which gradients must be converted; None where the weights, and so they, have it already."""
    dtype = train.gradient_dtype
    if dtype is None or TORCH_DTYPES[dtype] is weight_dtype(train):
        return None
    return dtype


class _BucketExchange(NamedTuple):
    """The exchange of one bucket, which may be under way."""

    done: Future[Tensor]
    parameters: list[Tensor]
    means: list[Tensor]
    """Views of the bucket, one for each parameter; its mean gradient once the exchange is done."""


class StageDdp(DistributedDataParallel):
    """DDP around a pipeline stage, whose gradients may still travel when its last backward is over.

    DDP by itself waits for them there, and torch's schedules hand the stage's own gradient on afterwards
    (`backward_one_chunk`, then `get_bwd_send_ops`, in torch 2.13): each stage's exchange would hold up all stages
    before it. `end_exchange` waits instead, once all is handed on.
    """

    def __init__(self, module: nn.Module, hook: Hook, **options: Any) -> None:
        """Wrap a stage.

        Args:
            module: the stage.
            hook: begins the exchange of a bucket; its future gives the mean, in the bucket itself.
            options: arguments of `DistributedDataParallel`.
        """
        super().__init__(module, **options)
        exchanges: list[_BucketExchange] = []
        self._exchanges = exchanges
        """The exchanges that have begun since the last `end_exchange`."""

        # torch compares annotations with its own types. It keeps the function, which therefore does not keep `self`.
        def begin_exchange(group, bucket):  # type: ignore[no-untyped-def]
            parameters = list(bucket.parameters())
            means = list(bucket.gradients())
            exchanges.append(_BucketExchange(hook(group, bucket), parameters, means))
            # DDP gets a future that is done at once, so that it does not wait for the exchange.
            buffer = bucket.buffer()
            done_at_once: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
            done_at_once.set_result(buffer)
            return done_at_once

        self.register_comm_hook(self.process_group, begin_exchange)

    def end_exchange(self) -> None:
        """Wait until every gradient is the mean over the ranks of the group."""
        for exchange in self._exchanges:
            exchange.done.wait()
            for parameter, mean in zip(exchange.parameters, exchange.means, strict=True):
                # With gradient_as_bucket_view both are the same memory.
                if parameter.grad is not None and parameter.grad.data_ptr() != mean.data_ptr():
                    parameter.grad.copy_(mean)
        self._exchanges.clear()


class DdpEngine(TorchEngine):
    """DDP at its defaults, except for what the study sets."""

    wrapped: DistributedDataParallel

    @staticmethod
    @override
    def wrap(model: nn.Module, trial: Trial, device: torch.device) -> nn.Module:
        """The wrap order of DDP.

        1. to the device and the weights' dtype: DDP broadcasts rank 0's weights from where they are, and its buckets
           live there, in their dtype;
        2. tokens over the ranks that share an image, where there are any: gradients are averaged over them too;
        3. checkpointing and compiling, block by block: DDP's hooks hang on the parameters, outside the compiled code;
        4. stages, where other ranks hold the other blocks: each is wrapped by itself;
        5. DDP: from here on the parameters must not be replaced;
        6. the hook that sends gradients in another dtype, or beside what other stages do: it belongs to DDP's reducer.
        """
        train = trial.train
        model = model.to(device, weight_dtype(train))
        plan = stage_plan(model, trial)
        mesh = split(model, trial, device) if trial.parallel.ranks_per_model > 1 else None

        options = ddp_options(train)
        hook = _COMPRESSING_HOOKS[options.hook_dtype] if options.hook_dtype else None
        arguments = options.arguments | {
            "device_ids": [device.index] if device.type == "cuda" else None,
            "process_group": None if mesh is None else mesh.get_group(),
        }

        def wrap_model(module: nn.Module) -> nn.Module:
            wrapped = DistributedDataParallel(module, **arguments)
            if hook:
                wrapped.register_comm_hook(wrapped.process_group, hook)
            return wrapped

        def wrap_stage(stage: nn.Module) -> nn.Module:
            return StageDdp(stage, hook or default_hooks.allreduce_hook, **arguments)

        if plan is None:
            return wrap_model(with_options(model, train))
        model = with_options(model, train, plan.blocks_of(model, trial))
        return StagedModel(model, plan, trial, wrap_stage)

    @override
    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """The context of a micro-step: gradients travel once per optimizer step.

        It is around forward too, where DDP decides whether the coming backward reduces.
        """
        return nullcontext() if last else self.wrapped.no_sync()

    @property
    @override
    def module(self) -> nn.Module:
        model: nn.Module = self.wrapped.module
        return model
