"""Each rule: a configuration that breaks it, and the one next to it that does not."""

from __future__ import annotations

from typing import Any

import pytest

from lint_examples import B16, BREAKS, QUIET, zero
from vitscale.deepspeed_lint import LintTarget, lint


def found(config: dict[str, Any], **setting: Any) -> set[tuple[str, str, str]]:
    return {(f.kind, f.severity, f.about.key) for f in lint(config, LintTarget(**setting))}


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert found(QUIET) == set()
    assert found(QUIET, parameters=B16, gpus=8) == set()


@pytest.mark.parametrize(("part", "rule", "severity", "key"), BREAKS)
def test_what_breaks_a_rule_is_found(part: dict[str, Any], rule: str, severity: str, key: str) -> None:
    assert (rule, severity, key) in found(QUIET | part, parameters=B16, gpus=8)
    assert rule not in {name for name, _, _ in found(QUIET, parameters=B16, gpus=8)}


@pytest.mark.parametrize(
    ("rule", "part"),
    [
        ("unknown-key", {"_comment": "mine", "//": "too", "optimizer": {"type": "AdamW", "params": {"own": 1}}}),
        ("unknown-key", {"pipeline": {"own": 1}, "autotuning": {"own": 1}}),
        ("wrong-type", zero(overlap_comm="true", reduce_bucket_size=8e6, sub_group_size="1000")),
        ("wrong-type", {"flops_profiler": {"enabled": 0}, "prescale_gradients": 0, "steps_per_print": 10.0}),
        ("wrong-value", zero(stage=2.0)),
        ("no-reduced-precision", {"torch_autocast": {}, "bf16": {"enabled": "auto"}}),
        ("no-reduced-precision", {"torch_autocast": "auto"}),
        ("fp16-loss-scale", {"fp16": {"enabled": True, "initial_scale_power": 12}}),
        ("fp16-loss-scale", {"fp16": {"enabled": "auto", "loss_scale": 128}}),
        ("communication-type", {"communication_data_type": "bf16"}),
        ("accumulation-type", zero(stage=0) | {"data_types": {"grad_accum_dtype": "torch.float32"}}),
        ("low-precision-states", {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}),
        ("low-precision-states", zero(stage=0) | {"bf16": {"bf16_master_weights_and_grads": False}}),
        ("synchronising-throughput-timer", {"timers": {"throughput": {"synchronized": False}}}),
        ("synchronising-comms-logger", {"comms_logger": {"enabled": False}}),
        ("no-overlap", zero(stage="auto", overlap_comm=False)),
        ("no-overlap", zero(overlap_comm="auto")),
        ("one-bucket", zero(reduce_bucket_size="auto")),
        ("one-bucket", zero(reduce_bucket_size=B16, overlap_comm=False)),
        ("bucket-memory", zero(reduce_bucket_size=5e8, contiguous_gradients=False)),
        ("offload-cannot-pay", zero(offload_optimizer={"device": "none"})),
        ("parameters-gathered-once", zero(stage=3, stage3_max_reuse_distance=2 * B16 - 1)),
        ("parameters-gathered-once", zero(stage=3, max_reuse_distance=1000)),
        ("clipping-omitted", {"gradient_clipping": 0.0}),
        ("optimizer-type", {"optimizer": {"type": "SGD"}, "zero_allow_untested_optimizer": True}),
        ("optimizer-type", {"optimizer": {"type": "ADAMW"}}),
        ("adam-is-adamw", {"optimizer": {"type": "Adam", "params": {"lr": 1}}}),
        ("adam-is-adamw", {"optimizer": {"type": "Adam", "params": {"weight_decay": 1, "adam_w_mode": False}}}),
        ("scheduler-type", {"scheduler": {"type": "StepLR", "params": {}}}),
        ("scaling-before-reduction", zero(stage=2, reduce_scatter=False) | {"prescale_gradients": True}),
        ("refused-value", zero(stage=2, compute_grad_norm=False) | {"gradient_clipping": 0.0}),
        ("refused-value", zero(stage=2) | {"gradient_allreduce_op": "sum", "checkpoint": {"tag_validation": "FAIL"}}),
        ("refused-value", zero(stage=3, offload_param={"device": "nvme", "nvme_path": "/x"})),
        ("refused-value", {"steps_per_print": None}),
        ("unknown-key", {"data_parallel_size": 4, "sequence_parallel_size": 2}),
        ("batch-arithmetic", {"train_batch_size": 64, "sequence_parallel_size": 2}),
        ("communication-type", zero(stage=0) | {"communication_data_type": "fp32"}),
        (
            "low-precision-states",
            zero(offload_optimizer={"device": "cpu"}) | {"bf16": {"bf16_master_weights_and_grads": True}},
        ),
        (
            "no-effect-at-this-stage",
            {"zero_optimization": {"stage": 0, "compute_grad_norm": False, "zenflow": {"topk_ratio": 0.1}}},
        ),
        ("needs-the-program", {"activation_checkpointing": {}}),
    ],
)  # fmt: skip
def test_what_keeps_a_rule_is_not(rule: str, part: dict[str, Any]) -> None:
    assert rule not in {name for name, _, _ in found(QUIET | part, parameters=B16, gpus=8)}


SIZED = ("one-bucket", "offload-cannot-pay", "stage-saves-little", "parameters-gathered-once")


def test_rules_that_need_a_size_say_nothing_without() -> None:
    config = QUIET | zero(stage=3, reduce_bucket_size=1e9, offload_optimizer={"device": "cpu"})
    assert {rule for rule, _, _ in found(config)}.isdisjoint(SIZED)
    assert {rule for rule, _, _ in found(config, parameters=B16)} >= set(SIZED)
    assert {rule for rule, _, _ in found(config, parameters=10**12)}.isdisjoint(SIZED)


def test_one_gpu_sends_nothing_worth_overlapping() -> None:
    config = QUIET | zero(stage=2, overlap_comm=False) | {"gradient_accumulation_steps": 4}
    assert {"no-overlap", "gradients-sent-every-micro-step"} <= {rule for rule, _, _ in found(config, gpus=2)}
    rules = {rule for rule, _, _ in found(config, gpus=1, parameters=B16)}
    assert rules.isdisjoint({"no-overlap", "one-bucket", "gradients-sent-every-micro-step", "stage-saves-little"})


def message_of(rule: str, config: dict[str, Any], **setting: Any) -> str:
    return next(f.message for f in lint(config, LintTarget(**setting)) if f.kind == rule)


def test_the_arithmetic_stands_in_the_message() -> None:
    """By hand: 2 x 5e8 x (4 + 4) bytes; 16 x 86,567,656; 12 x 86,567,656 / 8; of 16 x 2^30; GiB are 2^30."""
    config = QUIET | zero(stage=2, reduce_bucket_size=5e8, offload_optimizer={"device": "cpu"})
    said = message_of("bucket-memory", config, parameters=B16)
    assert "2 buffers of 500,000,000 elements x 8 bytes (4 for each of the two types sent) take 7.45 GiB" in said
    half = config | {"torch_autocast": {}, "bf16": {"enabled": True}}
    assert "x 2 bytes take 1.86 GiB" in message_of("bucket-memory", half, parameters=B16)
    third = QUIET | zero(stage=3, reduce_bucket_size=1e9)
    assert "1 buffer of 1,000,000,000 elements x 6 bytes" in message_of("bucket-memory", third, parameters=B16)
    third |= {"communication_data_type": "fp32", "torch_autocast": {}, "bf16": {"enabled": True}}
    assert "x 4 bytes take 3.73 GiB" in message_of("bucket-memory", third, parameters=B16)
    assert "16 bytes x 86,567,656 parameters = 1.29 GiB" in said
    said = message_of("offload-cannot-pay", config, parameters=B16, gpus=8)
    assert "12 bytes x 86,567,656 parameters / 8 GPUs = 124 MiB" in said
    assert "0.8 % of even a 16 GiB GPU" in said
    assert "= 1.29 GiB, 8.1 %" in message_of("stage-saves-little", config, parameters=B16)
    power = QUIET | {"fp16": {"enabled": True, "initial_scale_power": 32, "hysteresis": 4}}
    assert "above 1.5e-05 overflow" in message_of("fp16-loss-scale", power)
    assert "some 19 steps lost" in message_of("fp16-loss-scale", power)  # 32 - 16 halvings, and 3 without


def test_what_is_offloaded_and_what_waits_is_worked_out_by_type() -> None:
    """By hand: 2 x 86,567,656 / 8 bytes; 12 x 86,567,656 / 8 x 0.25; MiB are 2^20. Stage 0 lets no overflow pass."""
    offloaded = zero(stage=3, offload_param={"device": "cpu"}, offload_optimizer={"device": "cpu", "ratio": 0.25})
    halved = QUIET | offloaded | {"torch_autocast": {}, "bf16": {"enabled": True}}
    said = [f.message for f in lint(halved, LintTarget(parameters=B16, gpus=8)) if f.kind == "offload-cannot-pay"]
    assert "12 bytes x 86,567,656 parameters / 8 GPUs x 0.25 = 31.0 MiB" in said[0]
    assert "2 bytes x 86,567,656 parameters / 8 GPUs = 20.6 MiB" in said[1]
    power = QUIET | zero(stage=0) | {"fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 4}}
    said = [message_of("fp16-loss-scale", power)]
    assert "training. Each halves the scale: expect some 8 steps lost" in said[0]


def test_values_left_open_are_told_at_any_depth() -> None:
    config = QUIET | zero(stage=2, offload_optimizer={"device": "auto"}) | {"train_batch_size": "auto"}
    said = message_of("auto-value", config)
    assert "zero_optimization.offload_optimizer.device" in said


def test_what_a_study_sets_itself_is_not_left_open_at_any_depth() -> None:
    left = QUIET | zero(stage=2, overlap_comm="auto") | {"steps_per_print": "auto"}
    said = message_of("auto-value", left, settled=frozenset({"zero_optimization.overlap_comm"}), in_a_study=True)
    assert "zero_optimization.overlap_comm" not in said
    assert "steps_per_print" in said
    assert "zero_optimization.overlap_comm" in message_of("auto-value", left, in_a_study=True)


def test_a_studys_precision_counts_where_the_file_leaves_it_open() -> None:
    """A bucket's element takes 4 bytes in fp32, and 2 in bf16 weights."""
    config = QUIET | zero(reduce_bucket_size=5e8) | {"torch_autocast": {}}
    for precision, taken in (("fp32", "x 4 bytes"), ("bf16", "x 2 bytes"), ("autocast", "x 8 bytes")):
        assert taken in message_of("bucket-memory", config, parameters=B16, precision=precision)


def test_releases_differ() -> None:
    def rules(config: dict[str, Any], version: str) -> set[str]:
        return {rule for rule, _, _ in found(config, deepspeed=version)}

    onebit = {"optimizer": {"type": "OneBitAdam"}}
    assert "optimizer-type" in rules(QUIET | onebit, "0.16.9")  # refused under ZeRO
    assert "optimizer-type" not in rules(QUIET | onebit | zero(stage=0), "0.16.9")
    assert "optimizer-type" in rules(QUIET | onebit | zero(stage=0), "0.19.7")
    assert "removed-key" not in rules(QUIET | {"elasticity": {"enabled": False}}, "0.16.9")
    assert "key-of-another-release" in rules(QUIET, "0.9.5")  # torch_autocast and timers
    assert "wrong-value" not in rules(QUIET | zero(reduce_bucket_size=0), "0.16.9")
    assert "deepspeed-version" in rules(QUIET, "0.17.1")
    assert "deepspeed-version" in {rule for rule, _, _ in found(QUIET, installed=False)}


def test_nothing_is_said_twice() -> None:
    """No two findings of one lint say the same."""
    config = QUIET | zero(stage=3, x=1, y=2) | {"wall_clock_breakdown": True, "a": 1, "b": 2}
    findings = lint(config, LintTarget(parameters=B16, gpus=8))
    assert len(findings) == len(set(findings))


def test_most_severe_first() -> None:
    severities = [f.severity for f in lint({"fp16": {"x": 1}, "y": 1}, LintTarget())]
    assert severities == sorted(severities, key=["error", "warning", "note"].index)
    assert set(severities) == {"error", "warning", "note"}


def batch(
    total: Any = None, micro: Any = None, accumulation: Any = None, gpus: int | None = None
) -> set[tuple[str, str]]:
    sizes = {
        "train_batch_size": total,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }
    rest = {key: value for key, value in QUIET.items() if key not in sizes}
    config = rest | {key: value for key, value in sizes.items() if value is not None}
    return {(severity, key) for rule, severity, key in found(config, gpus=gpus) if rule == "batch-arithmetic"}


TOTAL = "train_batch_size"


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"micro": 16}, set()),
        ({"total": 32}, set()),
        ({}, {("error", "")}),
        ({"accumulation": 2}, {("error", "")}),
        ({"total": 32, "micro": 16}, set()),
        ({"total": 33, "micro": 16}, {("error", TOTAL)}),
        ({"total": 8, "micro": 16}, {("error", TOTAL)}),
        ({"total": 33, "accumulation": 2}, {("error", TOTAL)}),
        ({"total": 32, "micro": 16, "accumulation": 1}, {("note", TOTAL)}),
        ({"total": 32, "micro": 16, "accumulation": 1, "gpus": 2}, set()),
        ({"total": 32, "micro": 16, "accumulation": 1, "gpus": 4}, {("error", TOTAL)}),
        ({"total": 64, "micro": 16, "accumulation": 1, "gpus": 2}, {("error", TOTAL)}),
        ({"total": 64, "micro": 16, "gpus": 2}, set()),
        ({"total": 32, "gpus": 3}, {("error", TOTAL)}),
        ({"total": 32, "gpus": 8}, set()),
        ({"total": 32, "accumulation": 4, "gpus": 16}, {("error", TOTAL)}),
        ({"micro": 16, "accumulation": 2, "gpus": 7}, set()),
        ({"total": 0}, {("error", TOTAL)}),
        ({"micro": -1}, {("error", "train_micro_batch_size_per_gpu")}),
        ({"total": "auto", "micro": 16, "accumulation": 3, "gpus": 5}, set()),
        ({"total": "32", "micro": 7}, set()),  # wrong-type tells
    ],
)
def test_batch_sizes_close_or_not(sizes: dict[str, Any], expected: set[tuple[str, str]]) -> None:
    assert batch(**sizes) == expected


def test_a_short_name_is_told_its_place_too() -> None:
    """NVMe settings stand inside `zero_optimization` in many files of the web."""
    (said,) = [f for f in lint(QUIET | zero(stage=3, aio={}), LintTarget()) if f.kind == "unknown-key"]
    assert said.advice == "It is known as aio: write it there if that is meant"


def test_switches_of_0_and_1_and_numbers_in_quotes_are_what_deepspeed_makes_of_them() -> None:
    quoted = QUIET | {"flops_profiler": {"enabled": 1}} | zero(reduce_bucket_size="500000000")
    assert {rule for rule, _, _ in found(quoted, parameters=B16, gpus=8)} == {
        "synchronising-flops-profiler", "one-bucket", "bucket-memory",
    }  # fmt: skip


BY_ITSELF = zero(overlap_comm=True, reduce_bucket_size=5e8) | {
    "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"},
}  # fmt: skip


def test_an_optimizer_that_sends_by_itself_is_given_no_advice_on_buckets() -> None:
    """BF16_Optimizer, which DeepSpeed takes for bf16 with fp32 accumulation at stage 1, has none."""
    rules = {(rule, key) for rule, _, key in found(QUIET | BY_ITSELF, parameters=B16, gpus=8)}
    assert ("no-overlap", "data_types.grad_accum_dtype") in rules
    assert not {"one-bucket", "bucket-memory"} & {rule for rule, _ in rules}
    assert "BF16_Optimizer" in message_of("no-overlap", BY_ITSELF, gpus=8)
    on_host = BY_ITSELF | zero(overlap_comm=True, offload_optimizer={"device": "cpu"})
    assert "no-overlap" not in {rule for rule, _, _ in found(QUIET | on_host, parameters=B16, gpus=8)}


@pytest.mark.parametrize(("optimizer", "severity"), [("AdamW", "error"), ("Lion", "error"), ("Lamb", "warning")])
def test_an_offloaded_optimizer_without_partitions_is_one_for_the_cpu(optimizer: str, severity: str) -> None:
    """DeepSpeed looks at the device alone, and its CPU optimizers refuse parameters on a GPU."""
    part = zero(stage=0, offload_optimizer={"device": "cpu"}) | {"optimizer": {"type": optimizer, "params": {}}}
    key = "zero_optimization.offload_optimizer"
    assert ("offload-without-effect", severity, key) in found(QUIET | part, parameters=B16, gpus=8)
