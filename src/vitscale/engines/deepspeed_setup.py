"""What DeepSpeed is given: the user's file, completed, with every default that would make it differ written out."""

from __future__ import annotations

import copy
from typing import Any

from vitscale.trial.trial import TrainSpec, Trial


def configuration(trial: Trial) -> dict[str, Any]:
    """The dictionary given to `deepspeed.initialize`.

    What the user's file says stays, except the batch sizes and the clipping, which the study has already been held
    against. What neither says:

    - `gradient_clipping`: always written out, for DeepSpeed's default was 0.0 and became 1.0 in 2026;
    - bf16 is `torch_autocast` (fp32 weights), as on the other engines: `bf16.enabled` would be another precision;
    - `train_micro_batch_size_per_gpu` is the mean where ranks take unequal shares: DeepSpeed insists that it times
      ranks and accumulation is `train_batch_size`, which is true of the mean alone. Its own data loader, pipelines and
      printed rates read it, none of which is used here (`_batch_assertion` in runtime/config.py, 0.19);
    - the throughput timer is off: it synchronises the device on every step (DeepSpeed's `timers.throughput`).
    """
    train = trial.train
    config: dict[str, Any] = _without_auto(
        copy.deepcopy(train.deepspeed_config or {}),
        {"lr": trial.peak_learning_rate, "weight_decay": train.weight_decay},
    )
    config["train_batch_size"] = trial.global_batch
    config["train_micro_batch_size_per_gpu"] = train.micro_batch
    config["gradient_accumulation_steps"] = train.grad_accum
    config["gradient_clipping"] = train.gradient_clipping
    config.setdefault("zero_optimization", {}).update(_zero(train))
    if train.precision in _SECTION_OF:
        section, settings = _SECTION_OF[train.precision]
        config[section] = settings | config.get(section, {}) | {"enabled": True}
    if train.gradient_dtype is not None:
        config["communication_data_type"] = train.gradient_dtype
    if train.optimizer in ONE_BIT:
        config["optimizer"] = _one_bit(trial)
    config.setdefault("timers", {}).setdefault("throughput", {}).setdefault("enabled", False)
    config.setdefault("steps_per_print", 2**31 - 1)
    # The optimizers are torch's own, offloaded or not; DeepSpeed asks for a declaration that this is meant.
    config.setdefault("zero_allow_untested_optimizer", True)
    config.setdefault("zero_force_ds_cpu_optimizer", False)
    return config


_SECTION_OF: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("torch_autocast", {"dtype": "bfloat16"}),
    "bf16-params": ("bf16", {}),
    "fp16": ("fp16", {}),
}
"""The section of DeepSpeed's configuration that switches a precision on, and what it needs beside `enabled`."""

ONE_BIT = {"onebit-adam": "OneBitAdam", "onebit-lamb": "OneBitLamb"}
"""The optimizers that DeepSpeed builds itself, by its own names."""


def _zero(train: TrainSpec) -> dict[str, Any]:
    """What the study sets of `zero_optimization`. DeepSpeed counts its buckets in elements, the study in MiB."""
    zero: dict[str, Any] = {"stage": train.zero_stage}
    if train.overlap_comm is not None:
        zero["overlap_comm"] = train.overlap_comm
    if train.bucket_mib is not None:
        zero["reduce_bucket_size"] = train.bucket_mib * 2**20 // _gradient_bytes(train)
    if train.gather_bucket_mib is not None:
        key = "stage3_prefetch_bucket_size" if train.zero_stage == 3 else "allgather_bucket_size"
        zero[key] = train.gather_bucket_mib * 2**20 // _weight_bytes(train)
    if train.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if train.offload == "parameters":
        zero["offload_param"] = {"device": "cpu"}
    return zero


def _weight_bytes(train: TrainSpec) -> int:
    return 2 if train.precision in ("bf16-params", "fp16") else 4


def _gradient_bytes(train: TrainSpec) -> int:
    return {"fp32": 4, "bf16": 2, "fp16": 2, None: _weight_bytes(train)}[train.gradient_dtype]


def _one_bit(trial: Trial) -> dict[str, Any]:
    """DeepSpeed's own optimizers, which compress what they exchange once their first steps are over.

    Left to itself DeepSpeed begins after 100,000 steps, which most runs never reach.
    """
    train = trial.train
    params = {"lr": trial.peak_learning_rate, "weight_decay": train.weight_decay}
    return {"type": ONE_BIT[train.optimizer], "params": params | {"freeze_step": train.onebit_freeze_steps}}


def _without_auto(value: Any, known: dict[str, float]) -> Any:
    """Replaces the Hugging Face integration's "auto" by the study's value, or leaves the key to DeepSpeed's default."""
    if not isinstance(value, dict):
        return value
    kept = {key: known[key] if item == "auto" and key in known else item for key, item in value.items()}
    return {key: _without_auto(item, known) for key, item in kept.items() if item != "auto"}
