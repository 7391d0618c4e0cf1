"""Hugging Face Accelerate: DDP, FSDP2 or DeepSpeed, prepared and stepped by its `Accelerator`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from vitscale.engines import base
from vitscale.engines.base import Engine, TorchEngine
from vitscale.engines.ddp.wrap import ddp_options
from vitscale.engines.deepspeed import wrap as deepspeed_wrap
from vitscale.engines.fsdp2.wrap import fsdp2_options
from vitscale.engines.shared.whole_tensors import TorchTensors, WholeTensors, deepspeed_tensors, torch_loss_scale
from vitscale.models import logits_of
from vitscale.models.blocks import blocks_of
from vitscale.trial.trial import TrainSpec, Trial


class AccelerateEngine(Engine):
    """The results of `Accelerator.prepare` for model and optimizer, used as Accelerate's own examples do."""

    def __init__(self, model: nn.Module, trial: Trial, device: torch.device) -> None:
        """The wrap order of Accelerate.

        1. to the device and the weights' dtype: `prepare` would do it too, but the optimizer comes before it;
        2. checkpointing and compiling, block by block: inside all that Accelerate adds;
        3. the `Accelerator`, which adopts the process group that exists;
        4. the optimizer on the model's own parameters: FSDP2 needs both, to replace them in the optimizer by its own;
        5. `prepare`, with both at once.

        Raises:
            RuntimeError: Accelerate wrapped the model in something other than what was asked for.
        """
        train = trial.train
        self.train_spec = train
        self.device = device
        self.uses_deepspeed = train.wrapper == "deepspeed"
        """Whether Accelerate hands the model to DeepSpeed, not to one of torch's wrappers."""
        if self.uses_deepspeed:
            deepspeed_wrap.quiet_import(device.type)
            self.input_dtype = deepspeed_wrap.INPUT_DTYPES.get(train.precision, torch.float32)
            model = base.with_options(deepspeed_wrap.constants_as(self.input_dtype, model.to(device)), train)
        else:
            self.input_dtype = base.weight_dtype(train)
            model = base.with_options(model.to(device, self.input_dtype), train)
        self.accelerator = _accelerator(model, trial, device)
        # One process on a GPU is not distributed to Accelerate (1.15, `multi_device`): it wraps nothing in DDP.
        is_single_gpu = device.type == "cuda" and self.accelerator.num_processes == 1
        self.has_no_wrapper = train.wrapper == "ddp" and is_single_gpu
        """Whether Accelerate leaves the model as it is."""
        self.wrapped, self.optimizer = self.accelerator.prepare(model, base.optimizer_of(model, trial))
        self._check_wrapper()
        if self.uses_deepspeed:
            self.gradient_dtype = deepspeed_wrap.gradient_dtype(self.wrapped, train)
        else:
            # Without a wrapper no hook converts gradients.
            without_hook = train.model_copy(update={"gradient_dtype": None})
            self.gradient_dtype = TorchEngine.sent_gradient_dtype(without_hook if self.has_no_wrapper else train)

    @staticmethod
    def preload(train: TrainSpec) -> None:
        """Import Accelerate; with DeepSpeed also that and transformers, whose settings Accelerate then looks for."""
        import accelerate  # noqa: F401 - its seconds count as imports

        if train.wrapper == "deepspeed":
            deepspeed_wrap.DeepSpeedEngine.preload(train)
            with suppress(ImportError):
                import transformers.integrations.deepspeed  # noqa: F401 - its seconds count as imports

    @override
    @contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        with self.accelerator.accumulate(self.wrapped):
            if self.accelerator.sync_gradients != last:
                raise RuntimeError(f"Accelerate counts micro-steps otherwise: last is {last}")
            yield

    @override
    def autocast(self) -> AbstractContextManager[None]:
        """The context of forward, which autocasts under FSDP2 alone.

        Accelerate 1.15 autocasts what it wraps in DDP (`prepare_model`), but not what it shards (`_prepare_fsdp2`);
        DeepSpeed does it itself.
        """
        return super().autocast() if self.train_spec.wrapper == "fsdp2" else nullcontext()

    @override
    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Go backward; Accelerate divides by the accumulation itself, and with DeepSpeed steps the optimizer here."""
        self.accelerator.backward(loss)

    @override
    def rehearse(self, images: Tensor) -> None:
        """Take a micro-batch without a trace, as the base class does; without `accumulate`, which would count it."""
        can_skip_exchange = isinstance(self.wrapped, DistributedDataParallel) and not self.train_spec.static_graph
        with self.wrapped.no_sync() if can_skip_exchange else nullcontext():
            with self.autocast():
                logits = logits_of(self.wrapped(images.to(self.input_dtype)))
            loss = logits.float().sum() * 0.0
            if self.uses_deepspeed:
                self.wrapped.set_gradient_accumulation_boundary(False)
                self.wrapped.backward(loss)
                self.wrapped.step()
            else:
                self.accelerator.backward(loss)
                self.optimizer.optimizer.zero_grad(set_to_none=True)

    @override
    def step(self) -> None:
        if self.train_spec.gradient_clipping > 0 and not self.uses_deepspeed:
            self.accelerator.clip_grad_norm_(self.wrapped.parameters(), self.train_spec.gradient_clipping)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    @override
    def unknown_parts(self) -> dict[str, str]:
        if self.uses_deepspeed:
            return {"optimizer": "Accelerate takes DeepSpeed's optimizer step inside its backward"}
        return {}

    @override
    def whole_tensors(self) -> WholeTensors:
        if self.uses_deepspeed:
            return deepspeed_tensors(self.wrapped, self.train_spec.optimizer)
        scale = torch_loss_scale(self.accelerator.scaler)
        return TorchTensors(self.module, self.optimizer.optimizer, self.train_spec.optimizer, loss_scale=scale)

    @property
    @override
    def evaluated(self) -> nn.Module:
        """The wrapper where it gathers weights, otherwise the model inside."""
        return self.module if self.train_spec.wrapper == "ddp" else self.wrapped

    @property
    @override
    def module(self) -> nn.Module:
        is_model_itself = self.train_spec.wrapper == "fsdp2" or self.has_no_wrapper
        module: nn.Module = self.wrapped if is_model_itself else self.wrapped.module
        return module

    def _check_wrapper(self) -> None:
        """Refuse what Accelerate did not wrap: on unknown hardware it drops a plugin silently and trains on.

        Raises:
            RuntimeError: it is in another wrapper than that of the backend.
        """
        if self.has_no_wrapper:
            return
        backend = self.train_spec.wrapper
        if not isinstance(self.wrapped, _wrapper_class(backend)):
            wrapper = type(self.wrapped).__name__
            raise RuntimeError(f"train.accelerate_backend = '{backend}', but Accelerate made a {wrapper} of the model")


def _wrapper_class(backend: str) -> type:
    """Return the class in which a backend of Accelerate wraps a model."""
    if backend == "deepspeed":
        from deepspeed import DeepSpeedEngine

        engine_class: type = DeepSpeedEngine
        return engine_class
    return FSDPModule if backend == "fsdp2" else DistributedDataParallel


_STATE_VARIABLES = (
    "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_TORCH_DEVICE",
)  # fmt: skip
"""Variables by which Accelerate would take another backend, precision or device than those of the trial."""


def _accelerator(model: nn.Module, trial: Trial, device: torch.device) -> Any:
    """Return the `Accelerator` that wraps as the trial's backend does."""
    from accelerate import Accelerator

    # Accelerate reads these when it makes the process's state: they must not be left from the shell of this rank.
    for name in _STATE_VARIABLES:
        os.environ.pop(name, None)
    backend = trial.train.wrapper
    if backend == "deepspeed":
        options = _deepspeed_options(trial)
    elif backend == "fsdp2":
        options = _torch_options(trial.train, device) | {"fsdp_plugin": fsdp2_plugin(model, trial.train)}
        if trial.parallel.replicate > 1:
            options["parallelism_config"] = replicas_config(trial)
    else:
        options = _torch_options(trial.train, device) | {"kwargs_handlers": [ddp_handler(trial.train)]}
    return Accelerator(gradient_accumulation_steps=trial.train.grad_accum, **options)


def _deepspeed_options(trial: Trial) -> dict[str, Any]:
    from accelerate.utils import DeepSpeedPlugin

    return {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=deepspeed_wrap.configuration(trial))}


def _torch_options(train: TrainSpec, device: torch.device) -> dict[str, Any]:
    """Return arguments of an `Accelerator` of torch's own wrappers, which DeepSpeed has in its configuration."""
    is_autocast = train.precision in ("bf16", "fp16")
    return {"mixed_precision": train.precision if is_autocast else "no", "cpu": device.type == "cpu"}


_BLOCK_CLASS = "VitscaleBlock"
"""Name of the class of a model's blocks, by which Accelerate finds them."""


def _give_own_class(blocks: Sequence[nn.Module]) -> None:
    """Give a model's blocks a subclass of their class, of which nothing else in the model is.

    Accelerate wraps all modules of the class that a name stands for, and of its subclasses (`fsdp2_prepare_model`). The
    class of blocks may occur outside of them too: timm's EfficientNet has stages of one block, which are no list.
    `fully_shard` itself changes the classes of what it wraps like this.
    """
    if blocks:
        block_class = type(blocks[0])  # all blocks are of one class (`blocks_of`)
        own_class = type(_BLOCK_CLASS, (block_class,), {})
        for block in blocks:
            block.__class__ = own_class


def _answer_without_embeddings(model: nn.Module) -> None:
    """Let models of transformers that know no embeddings of theirs (ConvNeXt, UperNet) answer that they have none.

    They raise an error where Accelerate 1.15 asks for the embeddings, which it wraps by themselves.
    """
    for question in ("get_input_embeddings", "get_output_embeddings"):
        ask = getattr(model, question, None)
        if ask is None:
            continue
        try:
            ask()
        except NotImplementedError:
            setattr(model, question, lambda: None)


def fsdp2_plugin(model: nn.Module, train: TrainSpec) -> Any:
    """Return Accelerate's settings of FSDP2, with which it wraps the blocks that `Fsdp2Engine.wrap` does.

    From 1.15 on it also wraps what `get_input_embeddings` returns, and the last norm that is a direct child of the
    model. Forecasts count both to the root, all that is in no block: they are too high by the embeddings at most.

    Args:
        model: its blocks get a class of their own.
        train: the study's options.
    """
    from accelerate.utils import FullyShardedDataParallelPlugin

    blocks = blocks_of(model)
    _give_own_class(blocks)
    _answer_without_embeddings(model)
    options = fsdp2_options(train)
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=options.reshard_after_forward,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[_BLOCK_CLASS] if blocks else [],
        cpu_offload=options.offloads_to_host,
        # The weights are the same on every rank already, so rank 0's need not be sent around.
        cpu_ram_efficient_loading=False,
        # Without a policy Accelerate makes one of `mixed_precision`, under which weights are gathered, norms computed
        # and gradients reduced in that dtype (`AcceleratorState` of 1.15): that is not autocast over fp32 weights.
        mixed_precision_policy=options.mixed_precision,
    )


def replicas_config(trial: Trial) -> Any:
    """Return Accelerate's settings of replicas, of which it makes the mesh that `Fsdp2Engine.wrap` has.

    Accelerate 1.15 refuses them on a CPU, and replicas of one rank (`ParallelismConfig._validate_accelerator`).
    """
    from accelerate import ParallelismConfig

    layout = trial.layout
    return ParallelismConfig(
        dp_replicate_size=layout.replicate,
        dp_shard_size=layout.sharding_ranks,
        # Given, for otherwise the shell's PARALLELISM_CONFIG_* decide.
        tp_size=1,
        cp_size=1,
        sp_size=1,
    )


def ddp_handler(train: TrainSpec) -> Any:
    """Return Accelerate's settings of DDP, with which it does what `DdpEngine.wrap` does."""
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    options = ddp_options(train)
    hook = DDPCommunicationHookType.NO
    if options.hook_dtype is not None:
        hook = {"bf16": DDPCommunicationHookType.BF16, "fp16": DDPCommunicationHookType.FP16}[options.hook_dtype]
    return DistributedDataParallelKwargs(comm_hook=hook, **options.arguments)
