"""DeepSpeed, through its own engine."""

from __future__ import annotations

import copy
import logging
import math
import os
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from vitscale.engines.base import Engine, optimizer_of, with_options
from vitscale.engines.dtypes import communicated_bytes, weight_bytes
from vitscale.engines.shared.splits import split
from vitscale.engines.shared.whole_tensors import WholeTensors, deepspeed_tensors
from vitscale.trial.trial import TrainSpec, Trial

_MIB = 2**20


def configuration(trial: Trial) -> dict[str, Any]:
    """Return the dictionary that `deepspeed.initialize` takes.

    What the user's file says stays, except the batch sizes and the clipping: those have already been checked against
    the study. What neither file nor study says is set like this:

    - `gradient_clipping`: always written out, for DeepSpeed's default was 0.0 and became 1.0 in 2026;
    - bf16 is `torch_autocast` (fp32 weights), as on the other engines: `bf16.enabled` would be another precision;
    - `train_micro_batch_size_per_gpu` is the mean where ranks take unequal shares: DeepSpeed insists that it times
      ranks and accumulation is `train_batch_size`, which is true only of the mean (`_batch_assertion` in
      runtime/config.py, 0.19). DeepSpeed's own data loader, pipelines and printed rates read it; none is used here;
    - the throughput timer is off: it synchronises the device on every step (DeepSpeed's `timers.throughput`).
    """
    train = trial.train
    config: dict[str, Any] = _with_auto_replaced(
        copy.deepcopy(train.deepspeed_config or {}),
        {"lr": trial.peak_learning_rate, "weight_decay": train.weight_decay},
    )
    # DeepSpeed takes every rank to have its own images, even ranks that share an image's tokens.
    config["train_batch_size"] = trial.world.size * train.micro_batch * train.grad_accum
    config["train_micro_batch_size_per_gpu"] = train.micro_batch
    config["gradient_accumulation_steps"] = train.grad_accum
    config["gradient_clipping"] = train.gradient_clipping
    config.setdefault("zero_optimization", {}).update(_zero_section(train))
    _rename_bfloat16(config)
    if train.precision in _SECTION_BY_PRECISION:
        section = _SECTION_BY_PRECISION[train.precision]
        config[section.key] = {**section.defaults} | config.get(section.key, {}) | {"enabled": True}
    if train.gradient_dtype is not None:
        config["communication_data_type"] = train.gradient_dtype
    config.setdefault("timers", {}).setdefault("throughput", {}).setdefault("enabled", False)
    config.setdefault("steps_per_print", 2**31 - 1)
    # The optimizers are torch's own, offloaded or not; DeepSpeed asks for a declaration that this is meant.
    config.setdefault("zero_allow_untested_optimizer", True)
    config.setdefault("zero_force_ds_cpu_optimizer", False)
    return config


def _rename_bfloat16(config: dict[str, Any]) -> None:
    """Move the section `bfloat16` to `bf16`, in whose absence DeepSpeed reads it: the study may write a `bf16`."""
    old_section = config.pop("bfloat16", None)
    if config.get("bf16") is not None:
        return
    config.pop("bf16", None)
    if old_section is not None:
        config["bf16"] = old_section


class _PrecisionSection(NamedTuple):
    """A section of DeepSpeed's configuration that switches a precision on."""

    key: str
    defaults: Mapping[str, Any]
    """What the section needs beside `enabled`, unless the user's file says otherwise."""


_SECTION_BY_PRECISION = {
    "bf16": _PrecisionSection("torch_autocast", {"dtype": "bfloat16"}),
    "bf16-params": _PrecisionSection("bf16", {}),
    "fp16": _PrecisionSection("fp16", {}),
}


def _zero_section(train: TrainSpec) -> dict[str, Any]:
    """Return the study's part of `zero_optimization`. DeepSpeed counts its buckets in elements, the study in MiB."""
    zero: dict[str, Any] = {"stage": train.zero_stage}
    if train.overlap_comm is not None:
        zero["overlap_comm"] = train.overlap_comm
    if train.bucket_mib is not None:
        zero["reduce_bucket_size"] = train.bucket_mib * _MIB // communicated_bytes(train)
    if train.gather_bucket_mib is not None:
        zero["stage3_prefetch_bucket_size"] = train.gather_bucket_mib * _MIB // weight_bytes(train)
    if train.hpz > 1:
        zero["zero_hpz_partition_size"] = train.hpz
    if train.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if train.offload == "parameters":
        zero["offload_param"] = {"device": "cpu"}
    return zero


def _with_auto_replaced(value: Any, study_values: dict[str, float]) -> Any:
    """Return a value of the file with each "auto" of Hugging Face's integration replaced.

    A key that the study does not set is left out, so that DeepSpeed's default holds.

    Args:
        value: the file, or any value in it.
        study_values: the study's values by key: "lr" and "weight_decay".
    """
    if not isinstance(value, dict):
        return value
    replaced = {}
    for key, item in value.items():
        if item != "auto":
            replaced[key] = _with_auto_replaced(item, study_values)
        elif key in study_values:
            replaced[key] = study_values[key]
    return replaced


INPUT_DTYPES = {"bf16-params": torch.bfloat16, "fp16": torch.float16}
"""The dtype of images, by precision, where DeepSpeed keeps weights in another dtype than fp32."""


class DeepSpeedEngine(Engine):
    """ZeRO at the trial's stage."""

    def __init__(self, model: nn.Module, trial: Trial, device: torch.device) -> None:
        """The wrap order of DeepSpeed.

        1. to the device: at stages 0 to 2 DeepSpeed flattens the parameters where they are. It sets their dtype, but
           not that of constants (Swin V2's table of positions), which must have the dtype of what they are used with;
        2. tokens over the ranks that share an image, where there are any: gradients are averaged over them too;
        3. checkpointing and compiling, block by block: DeepSpeed's hooks hang on modules and parameters, outside both;
        4. the optimizer on the model's own parameters: DeepSpeed wraps it;
        5. `initialize` adopts the process group that exists and sets the hooks.
        """
        deepspeed = quiet_import(device.type)
        if device.type == "cuda":
            # From here on a rank may open the GPU, so NVML is as DeepSpeed would have it (see `known_gpu`).
            with suppress(AttributeError):
                deepspeed.get_accelerator()._init_pynvml()
        # Autocast converts by itself; weights in bf16 or fp16 need images and constants in their own dtype.
        self.input_dtype = INPUT_DTYPES.get(trial.train.precision, torch.float32)
        model = constants_as(self.input_dtype, model.to(device))
        if trial.parallel.ranks_per_model > 1:
            split(model, trial, device)
        model = with_options(model, trial.train)
        is_in_file = trial.train.optimizer == "deepspeed_config"
        optimizer = None if is_in_file else optimizer_of(model, trial)
        self.wrapped, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=configuration(trial), dist_init_required=False
        )
        self.train_spec = trial.train
        self.device = device
        self.optimizer = self.wrapped.optimizer
        self.gradient_dtype = gradient_dtype(self.wrapped, trial.train)

    @staticmethod
    def preload(train: TrainSpec) -> None:
        """Import DeepSpeed, and torch's whole compiler, which its stages import in their first backward, for Muon."""
        quiet_import(train.device)
        if train.zero_stage:
            with suppress(ImportError):
                import deepspeed.runtime.zero.muon.original_muon  # noqa: F401 - its seconds count as imports

    @override
    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        self.wrapped.set_gradient_accumulation_boundary(last)
        return nullcontext()

    @override
    def autocast(self) -> AbstractContextManager[None]:
        """No context: DeepSpeed has its own autocast."""
        return nullcontext()

    @override
    def backward(self, loss: Tensor, *, last: bool) -> None:
        self.wrapped.backward(loss)  # it divides by the accumulation itself
        if not last:
            self.wrapped.step()  # counts the micro-step; updates nothing before the boundary

    @override
    def step(self) -> None:
        self.wrapped.step()

    @override
    def step_with_norm(self) -> float:
        """Take a step; from ZeRO stage 1 on, where no rank holds the whole gradient, the norm is DeepSpeed's own.

        Stages 1 and 2 take it in every step unless `compute_grad_norm` is off, stage 3 always. It is taken before
        clipping (`step` in stage_1_and_2.py, stage3.py and bf16_optimizer.py of DeepSpeed 0.19).
        """
        if self.train_spec.zero_stage == 0:
            return super().step_with_norm()
        self.wrapped.step()
        norm = self.wrapped.get_global_grad_norm()
        return math.nan if norm is None else float(norm) ** 2

    @override
    def whole_tensors(self) -> WholeTensors:
        return deepspeed_tensors(self.wrapped, self.train_spec.optimizer)

    @property
    @override
    def evaluated(self) -> nn.Module:
        """The wrapper, because ZeRO-3 gathers weights in it."""
        engine: nn.Module = self.wrapped
        return engine


def gradient_dtype(engine: Any, train: TrainSpec) -> str:
    """Return the dtype in which DeepSpeed sends gradients, as torch names it.

    Under its autocast, stages 1 to 3 send gradients of linear and convolution layers in autocast's dtype, whatever
    `communication_data_type` says (`init_autocast_params` in torch_autocast.py, `ipg_buckets` in stage_1_and_2.py and
    stage3.py of DeepSpeed 0.19). Those of norms and lone parameters, a thousandth of a ViT, stay in fp32.
    """
    if train.precision == "bf16" and train.zero_stage > 0:
        return "bfloat16"
    return str(engine.communication_data_type).removeprefix("torch.")


def constants_as(dtype: torch.dtype, model: nn.Module) -> nn.Module:
    """Return the model with its buffers in `dtype`, in place; a norm's running statistics stay as they are."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and not name.startswith("running_"):
                buffer.data = buffer.to(dtype)
    return model


_DEPRECATION_WARNING = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"


def quiet_import(device_type: str) -> Any:
    """Import DeepSpeed with its log at warnings, fewer of torch's, and without compiling what training never calls.

    A variable chooses the accelerator before the import, which then fixes it for the process.
    """
    os.environ["DS_ACCELERATOR"] = device_type
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    import deepspeed

    for handler in logging.getLogger("DeepSpeed").handlers:
        handler.setLevel(logging.WARNING)
    # It calls them by names that torch has replaced. Python forgets that it has said so whenever anybody enters
    # `catch_warnings`, so that a run's log would have it for every step.
    warnings.filterwarnings("ignore", message=_DEPRECATION_WARNING, category=FutureWarning)
    # On a CPU DeepSpeed would compile a kernel with g++ (a minute) for shared memory, which only inference uses. That
    # is all it looks up here; were it not written whole, looking would try every kernel, and open a GPU.
    vars(deepspeed.ops)["__compatible_ops__"] = {"deepspeed_shm_comm": False}
    return deepspeed
