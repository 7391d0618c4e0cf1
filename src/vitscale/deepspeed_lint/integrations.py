"""Which keys of a DeepSpeed file the Hugging Face integrations fill in where it has the value "auto".

Read from the source of transformers 5.23 (`HfTrainerDeepSpeedConfig` in integrations/deepspeed.py) and accelerate 1.15
(`DeepSpeedPlugin.__post_init__` and `set_mixed_precision` in utils/dataclasses.py, `_prepare_deepspeed` in
accelerator.py); a test compares the table with the installed versions. The Trainer calls Accelerate, so that it fills
in what either does. `DeepSpeedPlugin.fill_match` raises a ValueError ("not found in kwargs") for every other "auto" in
the file, so that a program with either of them ends at its start.
"""

from __future__ import annotations

_BY_BOTH = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("bf16.enabled", "fp16.enabled", "optimizer.params.lr", "optimizer.params.weight_decay"),
    *("scheduler.params.warmup_min_lr", "scheduler.params.warmup_max_lr"),
    *("scheduler.params.warmup_num_steps", "scheduler.params.total_num_steps"),
    *("zero_optimization.reduce_bucket_size", "zero_optimization.stage3_prefetch_bucket_size"),
    "zero_optimization.stage3_param_persistence_threshold",
)
_BY_TRAINER_ALONE = ("optimizer.params.betas", "optimizer.params.eps")
_TRAINER_UNTIL_4 = ("amp.enabled", "amp.opt_level")
"""What the Trainer of transformers 4 filled in too."""
_BY_ACCELERATE = (
    *("zero_optimization.stage", "zero_optimization.stage3_gather_16bit_weights_on_model_save"),
    *("zero_optimization.offload_optimizer.device", "zero_optimization.offload_optimizer.nvme_path"),
    *("zero_optimization.offload_param.device", "zero_optimization.offload_param.nvme_path"),
)
"""What Accelerate fills in beyond `_BY_BOTH`, and the Trainer through it."""

TRAINER = "the Hugging Face Trainer"
ACCELERATE = "Accelerate"

FILLED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*_BY_BOTH, *_BY_ACCELERATE), (TRAINER, ACCELERATE)),
    **dict.fromkeys((*_BY_TRAINER_ALONE, *_TRAINER_UNTIL_4), (TRAINER,)),
}
"""Dotted key -> the integrations that fill it in."""

DEEPSPEEDS_OWN = (
    *("zero_optimization.zenflow.select_strategy", "zero_optimization.zenflow.select_interval"),
    *("zero_optimization.zenflow.update_interval", "data_types.keep_in_fp32_modules", "pipeline.stages"),
)
"""Keys for which DeepSpeed 0.19.8 itself accepts "auto", so that nobody has to fill them in."""
