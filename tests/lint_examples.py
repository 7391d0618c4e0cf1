"""Configurations that break a rule each, and one that breaks none."""

from __future__ import annotations

from typing import Any

B16 = 86_567_656
QUIET: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 16,
    "gradient_clipping": 1.0,
    "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
    "zero_optimization": {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 8_000_000},
    "timers": {"throughput": {"enabled": False}},
}
"""Nothing is wrong with it."""


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 8_000_000} | keys}


BREAKS: list[tuple[dict[str, Any], str, str, str]] = [
    # keys
    ({"train_micro_batch_size_per_gpus": 1}, "unknown-key", "error", "train_micro_batch_size_per_gpus"),
    ({"my_own_note": 1}, "unknown-key", "warning", "my_own_note"),
    (zero(stage=3, aio={"block_size": 262144}), "unknown-key", "error", "zero_optimization.aio"),
    ({"fp16": {"enable": False}}, "unknown-key", "error", "fp16.enable"),
    ({"torch_autocast": {"enabled": True, "dtyp": "x"}}, "unknown-key", "error", "torch_autocast.dtyp"),
    (zero(xyzzy=1), "unknown-key", "error", "zero_optimization.xyzzy"),
    ({"offload_optimizer": {"device": "cpu"}}, "unknown-key", "error", "offload_optimizer"),
    ({"elasticity": {}}, "removed-key", "error", "elasticity"),
    (zero(mics_shard_size=-1), "removed-key", "error", "zero_optimization.mics_shard_size"),
    ({"seq_parallel_comm_data_type": "fp32"}, "key-of-another-release", "warning", "seq_parallel_comm_data_type"),
    ({"aio": {"thread_count": 1}}, "key-of-another-release", "warning", "aio.thread_count"),
    (zero(cpu_offload=False), "deprecated-key", "warning", "zero_optimization.cpu_offload"),
    (zero(cpu_offload=False, offload_optimizer={}), "deprecated-key", "error", "zero_optimization.cpu_offload"),
    # values
    ({"train_micro_batch_size_per_gpu": "16"}, "wrong-type", "error", "train_micro_batch_size_per_gpu"),
    ({"train_micro_batch_size_per_gpu": True}, "wrong-type", "error", "train_micro_batch_size_per_gpu"),
    ({"gradient_clipping": "1.0"}, "wrong-type", "error", "gradient_clipping"),
    ({"wall_clock_breakdown": "no"}, "wrong-type", "error", "wall_clock_breakdown"),
    ({"wall_clock_breakdown": 1.0}, "wrong-type", "error", "wall_clock_breakdown"),
    ({"train_micro_batch_size_per_gpu": 16.5}, "wrong-type", "error", "train_micro_batch_size_per_gpu"),
    ({"train_micro_batch_size_per_gpu": 16.0}, "wrong-type", "note", "train_micro_batch_size_per_gpu"),
    (
        {"activation_checkpointing": {"cpu_checkpointing": "false"}},
        "wrong-type", "error", "activation_checkpointing.cpu_checkpointing",
    ),
    ({"fp16": True}, "wrong-type", "error", "fp16"),
    ({"optimizer": "AdamW"}, "wrong-type", "error", "optimizer"),
    ({"bf16": {"enabled": "perhaps"}}, "wrong-type", "error", "bf16.enabled"),
    (zero(overlap_comm=2), "wrong-type", "error", "zero_optimization.overlap_comm"),
    (zero(sub_group_size=1.5), "wrong-type", "error", "zero_optimization.sub_group_size"),
    (zero(reduce_bucket_size=0), "wrong-value", "error", "zero_optimization.reduce_bucket_size"),
    (zero(stage=4), "wrong-value", "error", "zero_optimization.stage"),
    (
        zero(stage=3, offload_param={"device": "cuda"}),
        "wrong-value", "error", "zero_optimization.offload_param.device",
    ),
    ({"gradient_clipping": "auto"}, "auto-value", "note", "gradient_clipping"),
    (
        {"optimizer": {"type": "AdamW", "params": {"betas": "auto"}}},
        "auto-value", "note", "optimizer.params.betas",
    ),
    # precision
    ({"torch_autocast": {"enabled": False}}, "no-reduced-precision", "warning", "torch_autocast.enabled"),
    ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "several-precisions", "error", "fp16.enabled"),
    ({"bf16": {"enabled": True}}, "several-precisions", "warning", "torch_autocast.enabled"),
    ({"torch_autocast": {}, "bf16": {"enabled": True}}, "bf16-is-not-autocast", "note", "bf16.enabled"),
    ({"fp16": {"enabled": True}}, "fp16-loss-scale", "note", "fp16.initial_scale_power"),
    (
        {"fp16": {"enabled": True, "initial_scale_power": 32}},
        "fp16-loss-scale", "warning", "fp16.initial_scale_power",
    ),
    ({"fp16": {"enabled": True, "loss_scale": 128}}, "fp16-loss-scale", "warning", "fp16.loss_scale"),
    ({"fp16": {"enabled": True, "loss_scale": -1}}, "fp16-loss-scale", "error", "fp16.loss_scale"),
    ({"fp16": {"enabled": True, "loss_scale": True}}, "fp16-loss-scale", "error", "fp16.loss_scale"),
    ({"fp16": {"enabled": True, "loss_scale_window": 20}}, "fp16-loss-scale", "warning", "fp16.loss_scale_window"),
    ({"fp16": {"enabled": True, "loss_scale_window": 0}}, "fp16-loss-scale", "error", "fp16.loss_scale_window"),
    ({"fp16": {"enabled": True, "min_loss_scale": 0}}, "fp16-loss-scale", "error", "fp16.min_loss_scale"),
    ({"communication_data_type": "int8"}, "communication-type", "error", "communication_data_type"),
    ({"communication_data_type": "fp16"}, "communication-type", "warning", "communication_data_type"),
    (
        {"communication_data_type": "FP32", "torch_autocast": {}, "bf16": {"enabled": True}},
        "communication-type", "note", "communication_data_type",
    ),
    (
        zero(stage=0) | {"data_types": {"grad_accum_dtype": "bf16"}},
        "accumulation-type", "error", "data_types.grad_accum_dtype",
    ),
    (
        zero(stage=0) | {"bf16": {"bf16_master_weights_and_grads": True}},
        "low-precision-states", "error", "bf16.bf16_master_weights_and_grads",
    ),
    ({"bf16": {"bf16_optimizer_states": True}}, "low-precision-states", "error", "bf16.bf16_optimizer_states"),
    # timing
    ({"wall_clock_breakdown": True}, "synchronising-breakdown", "warning", "wall_clock_breakdown"),
    ({"timers": {}}, "synchronising-throughput-timer", "note", "timers.throughput"),
    (
        {"timers": {"throughput": {"enabled": True}}},
        "synchronising-throughput-timer", "warning", "timers.throughput.enabled",
    ),
    ({"comms_logger": {"enabled": True}}, "synchronising-comms-logger", "warning", "comms_logger.enabled"),
    ({"flops_profiler": {"enabled": True}}, "synchronising-flops-profiler", "warning", "flops_profiler.enabled"),
    ({"memory_breakdown": True}, "memory-breakdown", "warning", "memory_breakdown"),
    ({"autotuning": {"enabled": True}}, "autotuning", "warning", "autotuning.enabled"),
    # overlap
    (zero(stage=0, overlap_comm=True), "no-overlap", "warning", "zero_optimization.overlap_comm"),
    ({"zero_optimization": {}}, "no-overlap", "warning", "zero_optimization.stage"),
    ({"zero_optimization": {"stage": 2}}, "no-overlap", "warning", "zero_optimization.overlap_comm"),
    (zero(overlap_comm=False), "no-overlap", "warning", "zero_optimization.overlap_comm"),
    (zero(reduce_bucket_size=B16), "one-bucket", "warning", "zero_optimization.reduce_bucket_size"),
    (
        {"zero_optimization": {"stage": 3}},
        "one-bucket", "warning", "zero_optimization.reduce_bucket_size",
    ),
    (
        zero(stage=2) | {"gradient_accumulation_steps": 2},
        "gradients-sent-every-micro-step", "note", "gradient_accumulation_steps",
    ),
    # memory
    (zero(reduce_bucket_size=5e8), "bucket-memory", "warning", "zero_optimization.reduce_bucket_size"),
    (
        zero(offload_optimizer={"device": "cpu"}),
        "offload-cannot-pay", "warning", "zero_optimization.offload_optimizer",
    ),
    (
        zero(stage=3, offload_param={"device": "nvme"}),
        "offload-cannot-pay", "warning", "zero_optimization.offload_param",
    ),
    (zero(offload_param={"device": "cpu"}), "offload-without-effect", "warning", "zero_optimization.offload_param"),
    (
        zero(stage=0, offload_optimizer={"device": "cpu"}),
        "offload-without-effect", "warning", "zero_optimization.offload_optimizer",
    ),
    (zero(offload_optimizer={"ratio": 0.5}), "offload-ratio", "error", "zero_optimization.offload_optimizer.ratio"),
    (zero(stage=2), "stage-saves-little", "note", "zero_optimization.stage"),
    (zero(stage=3), "parameters-gathered-once", "note", "zero_optimization.stage3_max_reuse_distance"),
    (
        # What limits fetching ahead releases nothing.
        zero(stage=3, stage3_max_live_parameters=0, max_reuse_distance=2 * B16),
        "parameters-gathered-once", "note", "zero_optimization.max_reuse_distance",
    ),
    # the optimizer
    ({"optimizer": {"type": "OneBitAdam"}}, "optimizer-type", "error", "optimizer.type"),
    ({"optimizer": {"type": "sgd"}}, "optimizer-type", "error", "optimizer.type"),
    ({"optimizer": {"type": "AdemW"}}, "optimizer-type", "error", "optimizer.type"),
    ({"optimizer": {"type": "SGD"}}, "optimizer-type", "error", "optimizer.type"),
    (
        {"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}},
        "clipping-in-the-optimizer", "error", "optimizer.params.max_grad_norm",
    ),
    ({"optimizer": {"type": "Adam", "params": {"weight_decay": 1}}}, "adam-is-adamw", "warning", "optimizer.type"),
    ({"scheduler": {"type": "CosineLR", "params": {}}}, "scheduler-type", "error", "scheduler.type"),
    ({"scheduler": {"type": "WarmupLR"}}, "scheduler-type", "error", "scheduler.params"),
    # parts
    (zero(stage=2) | {"prescale_gradients": True}, "scaling-before-reduction", "error", "prescale_gradients"),
    (
        zero(stage=3) | {"gradient_predivide_factor": 2.0},
        "scaling-before-reduction", "error", "gradient_predivide_factor",
    ),
    (
        zero(stage3_max_live_parameters=1), "no-effect-at-this-stage", "note",
        "zero_optimization.stage3_max_live_parameters",
    ),
    ({"zero_optimization": True}, "old-form", "warning", "zero_optimization"),
    # what DeepSpeed refuses, or does otherwise (0.19.8, each seen in a run of it on a CPU rank)
    ({"bf16.enabled": True}, "unknown-key", "error", "bf16.enabled"),
    (
        zero(stage=3, prefetch_bucket_size=1, stage3_prefetch_bucket_size=2),
        "two-names", "error", "zero_optimization.stage3_prefetch_bucket_size",
    ),
    (
        zero(stage=3, stage3_gather_fp16_weights_on_model_save=True, gather_16bit_weights_on_model_save=True),
        "deprecated-key", "error", "zero_optimization.stage3_gather_fp16_weights_on_model_save",
    ),
    (
        zero(stage=3, stage3_gather_fp16_weights_on_model_save=True, stage3_gather_16bit_weights_on_model_save=1),
        "deprecated-key", "error", "zero_optimization.stage3_gather_fp16_weights_on_model_save",
    ),
    (
        {"torch_autocast": {}, "bfloat16": {"enabled": True}},
        "bf16-is-not-autocast", "note", "bfloat16.enabled",
    ),
    (
        {"bf16": {"enabled": False}, "bfloat16": {"enabled": True}, "torch_autocast": {}},
        "no-reduced-precision", "warning", "bf16.enabled",
    ),
    ({"communication_data_type": "fp32"}, "communication-type", "warning", "communication_data_type"),
    ({"train_batch_size": 96, "sequence_parallel_size": 2}, "batch-arithmetic", "error", "train_batch_size"),
    ({"sequence_parallel_size": 3}, "batch-arithmetic", "error", "sequence_parallel_size"),
    ({"optimizer": {"type": "FusedAdam"}}, "optimizer-type", "error", "optimizer.type"),
    ({"scheduler": {"type": "WarmupDecayLR", "params": {}}}, "scheduler-type", "error", "scheduler.params"),
    (
        {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1}}},
        "scheduler-type", "error", "scheduler.params",
    ),
    (
        {"bf16": {"bf16_master_weights_and_grads": True}},
        "low-precision-states", "error", "bf16.bf16_master_weights_and_grads",
    ),
    (zero(stage=0, compute_grad_norm=False), "refused-value", "error", "zero_optimization.compute_grad_norm"),
    (zero(stage=2, compute_grad_norm=False), "refused-value", "error", "zero_optimization.compute_grad_norm"),
    (zero(stage=0, zenflow={"topk_ratio": 0.1}), "refused-value", "error", "zero_optimization.zenflow"),
    (zero(legacy_stage1=True), "refused-value", "error", "zero_optimization.legacy_stage1"),
    (zero(stage=3) | {"gradient_allreduce_op": "sum"}, "refused-value", "error", "gradient_allreduce_op"),
    (zero(allgather_bucket_size=5_000_001), "refused-value", "error", "zero_optimization.allgather_bucket_size"),
    ({"checkpoint": {"tag_validation": "warning"}}, "refused-value", "error", "checkpoint.tag_validation"),
    ({"gradient_clipping": None}, "refused-value", "error", "gradient_clipping"),
    ({"steps_per_print": 0}, "refused-value", "error", "steps_per_print"),
    (
        zero(stage=3, offload_optimizer={"device": "nvme"}),
        "refused-value", "error", "zero_optimization.offload_optimizer.nvme_path",
    ),
    (
        zero(stage=2, offload_optimizer={"device": "nvme", "nvme_path": "/x"}),
        "offload-without-effect", "warning", "zero_optimization.offload_optimizer.device",
    ),
    (
        {"activation_checkpointing": {"partition_activations": True}},
        "needs-the-program", "note", "activation_checkpointing",
    ),
]  # fmt: skip
"""(part that is added to `QUIET`, rule, severity, key) of a finding that vit-b16 on 8 GPUs has then."""
