"""The linter against the installed DeepSpeed: what it calls wrong is refused or ignored, all else is accepted."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from vitscale.deepspeed_lint import LintTarget, lint
from vitscale.deepspeed_lint.view import Release

INSTALLED = metadata.version("deepspeed")
BATCH = {"train_micro_batch_size_per_gpu": 1}
VALUES: tuple[Any, ...] = (True, 0, 1, 2, -1, 1.5, 2.0, 1e30, "2", "1.0", "1e3", "true", "perhaps", "cpu", None, [], {})

FREE_OF_ERRORS: list[dict[str, Any]] = [
    BATCH,
    {"train_batch_size": 32},
    BATCH | {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1e9, "offload_param": {"device": "cpu"}}},
    BATCH | {"zero_optimization": True, "allgather_size": 1000},
    BATCH | {"zero_optimization": {"stage": "2", "cpu_offload": True, "overlap_comm": "auto"}},
    BATCH | {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 32}, "communication_data_type": "fp32"},
    BATCH | {"optimizer": {"type": "OneCycle"}, "scheduler": {"type": "WarmupLR", "params": {}}},
    BATCH | {"comms_logger": {"enabled": True}, "timers": {"throughput": {"synchronized": False}}},
    {"train_batch_size": 4.0, "flops_profiler": {"enabled": 1}, "wall_clock_breakdown": 0, "memory_breakdown": 1},
    BATCH | {"flops_profiler": {"enabled": True}, "aio": {}, "activation_checkpointing": {"profile": True}},
    BATCH | {"tensorboard": {"enabled": False}, "csv_monitor": {}, "wandb": {"team": "x"}, "pipeline": {"stages": 2}},
    BATCH | {"data_types": {"grad_accum_dtype": "fp32"}, "checkpoint": {"tag_validation": "Warn"}},
]
REFUSED: list[dict[str, Any]] = [
    {},
    {"train_batch_size": 33, "train_micro_batch_size_per_gpu": 16},
    {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 2},
    {"train_batch_size": "32"},
    BATCH | {"fp16": {"enable": True}},
    BATCH | {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
    BATCH | {"fp16": {"enabled": True, "loss_scale_window": 0}},
    BATCH | {"communication_data_type": "int8"},
    BATCH | {"elasticity": {"enabled": False}},
    BATCH | {"zero_optimization": {"stage": 2, "mics_shard_size": -1}},
    BATCH | {"zero_optimization": {"stage": 2, "offload_optimizer": {"ratio": 0.5}}},
    BATCH | {"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "cpu"}}},
    BATCH | {"zero_optimization": {"stage": 3, "offload_param": {"device": "cuda"}}},
]
IGNORED: list[tuple[dict[str, Any], str]] = [
    (BATCH | {"micro_batch_per_gpu": 16}, "micro_batch_per_gpu"),
    (BATCH | {"pin_memory": True}, "pin_memory"),
    (BATCH | {"offload_optimizer": {"device": "cpu"}}, "offload_optimizer"),
    (BATCH | {"torch_autocast": {"enabled": True, "dtyp": "bfloat16"}}, "torch_autocast.dtyp"),
    (BATCH | {"flops_profiler": {"enable": True}}, "flops_profiler.enable"),
]


def errors_in(config: dict[str, Any]) -> list[str]:
    """The keys of the errors that need no optimizer or model to show: those are the configuration's own."""
    setting = LintTarget(gpus=1, deepspeed=INSTALLED)
    return [f.about.key for f in lint(config, setting) if f.severity == "error" and f.kind not in _OF_THE_ENGINE]


_OF_THE_ENGINE = ("optimizer-type", "scheduler-type", "auto-value")
"""And those on "auto", on which not DeepSpeed fails but the integrations that fill it in."""


def held_keys() -> list[str]:
    """The keys that the table says pydantic holds to a type."""
    release = Release(INSTALLED)
    parts = (
        "zero_optimization",
        "bf16",
        "comms_logger",
        "timers.throughput",
        "tensorboard",
        "compile",
        "hybrid_engine",
    )
    keys = [f"{part}.{name}" for part in parts for name in release.children(part)]
    keys += [
        f"zero_optimization.{part}.{name}"
        for part in _OFFLOADS
        for name in release.children(f"zero_optimization.{part}")
    ]
    return [key for key in keys if (release.fact(key) or "").split(" ")[0] in ("bool", "int", "float", "str", "one")]


_OFFLOADS = ("offload_optimizer", "offload_param")
_SECTIONS = (
    *("zero_optimization", "bf16", "fp16", "torch_autocast", "optimizer", "scheduler", "timers", "flops_profiler"),
    *("comms_logger", "activation_checkpointing", "pipeline", "optimizer.params", "timers.throughput"),
    *("zero_optimization.offload_optimizer", "zero_optimization.offload_param"),
)
_CROSS_CHECKED = ("zero_optimization.compute_grad_norm", "zero_optimization.offload_optimizer.ratio")
"""Refused for their values together with another key's."""


def with_value(key: str, value: object) -> dict[str, Any]:
    """A configuration with `value` at a dotted key, and nothing else but the batch size."""
    first, *inner = key.split(".")
    for name in reversed(inner):
        value = {name: value}
    return BATCH | {first: value}


@cache
def verdicts() -> list[dict[str, Any]]:
    """Of all configurations of this file, by one process."""
    judge = Path(__file__).parent / "deepspeed_judges.py"
    answer = subprocess.run(
        [sys.executable, judge], input=json.dumps(ALL), capture_output=True, text=True, timeout=300, check=True
    )
    found: list[dict[str, Any]] = json.loads(answer.stdout.splitlines()[-1])
    return found


SINGLE = [with_value(key, value) for key in held_keys() if key not in _CROSS_CHECKED for value in VALUES]
EVERY_PART = BATCH | {
    "optimizer": {"type": "Adam", "params": {}},
    "scheduler": {"type": "WarmupLR", "params": {}},
    "flops_profiler": {}, "aio": {}, "activation_checkpointing": {}, "data_types": {},
    "checkpoint": {"writer": {}, "parallel_write": {}},
    "torch_autocast": {"dtype": "bfloat16", "lower_precision_safe_modules": []},
    "timers": {"throughput": {}},
}  # fmt: skip
NOTHINGS: tuple[Any, ...] = (None, True, 3, "x", [], [1], {})
SECTIONS = [with_value(part, value) for part in _SECTIONS for value in NOTHINGS]
ALL = [*SECTIONS, *FREE_OF_ERRORS, *REFUSED, *[config for config, _ in IGNORED], *SINGLE, EVERY_PART]


def verdict_on(config: dict[str, Any]) -> dict[str, Any]:
    verdict: dict[str, Any] = verdicts()[next(place for place, held in enumerate(ALL) if held is config)]
    return verdict


def test_what_is_free_of_errors_is_accepted() -> None:
    for config in FREE_OF_ERRORS:
        assert errors_in(config) == []
        assert verdict_on(config)["refused"] is None, config


def test_what_is_an_error_is_refused_or_ignored() -> None:
    for config in REFUSED:
        assert errors_in(config) != [], config
        assert verdict_on(config)["refused"] is not None, config
    for config, key in IGNORED:
        assert errors_in(config) == [key]
        verdict = verdict_on(config)
        assert verdict["refused"] is None
        assert key not in verdict["seen"]


def test_every_value_is_judged_as_the_models_judge_it() -> None:
    assert len(SINGLE) > 1000
    differ = [
        (config, verdict["refused"])
        for config, verdict in zip(SINGLE, verdicts()[-len(SINGLE) - 1 : -1], strict=True)
        if (errors_in(config) == []) != (verdict["refused"] is None)
    ]
    assert differ == []


def test_a_part_without_errors_is_accepted() -> None:
    """Of the others DeepSpeed refuses most, and ignores some, such as "timers": []."""
    passed = [config for config in SECTIONS if errors_in(config) == []]
    assert len(_SECTIONS) <= len(passed) <= len(_SECTIONS) + 6
    assert [config for config in passed if verdict_on(config)["refused"] is not None] == []


def test_the_table_holds_what_is_read() -> None:
    """Keys that DeepSpeed looks at one by one; those of its models are in the test above."""
    release = Release(INSTALLED)
    seen = set(verdict_on(EVERY_PART)["seen"])
    parts = ("", *(part for part in EVERY_PART if release.fact(part) == "read"), "checkpoint.writer")
    known = {f"{part}.{name}" if part else name for part in parts for name in release.children(part)}
    looked_at = {key for key in seen if key.rpartition(".")[0] in parts}
    refused = {key for key in known if release.fact(key) == "refused"}
    old_forms = {"allgather_size", "sequence_parallel_size"}  # looked at only in other configurations
    assert looked_at - known == set()
    assert known - looked_at - refused - old_forms == set()
    assert refused <= seen
