"""Findings on the file of `accelerate launch`: what it refuses, what has no effect, what a study leaves out.

The rules follow Accelerate 1.15 (commands/config/config_args.py, commands/launch.py, utils/launch.py and
utils/dataclasses.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitscale.engines.accelerate.config import flag, fsdp_version, load, section, sharding_strategy, whole_number, word
from vitscale.engines.accelerate.settings import carried_settings
from vitscale.errors import nearest, shown
from vitscale.present.document import About, Document, Finding, Paragraph, Severity, counts_of, most_severe_first

RELEASE = "1.15"
"""Accelerate's release whose code the rules were taken from."""
_KNOWN_KEYS = (
    "command_file", "commands", "compute_environment", "debug", "deepspeed_config", "distributed_type", "downcast_bf16",
    "dynamo_backend", "dynamo_config", "enable_cpu_affinity", "fp16", "fp8_config", "fsdp_config", "gpu_ids",
    "machine_rank", "main_process_ip", "main_process_port", "main_training_function", "megatron_lm_config",
    "mixed_precision", "mpirun_config", "num_machines", "num_processes", "parallelism_config", "rdzv_backend",
    "same_network", "tpu_env", "tpu_name", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_zone", "use_cpu",
)  # fmt: skip
"""Keys of `ClusterConfig`, and the two of earlier releases that it converts."""
_DISTRIBUTED_TYPES = (
    "DEEPSPEED", "FSDP", "MEGATRON_LM", "MULTI_CPU", "MULTI_GPU", "MULTI_HPU", "MULTI_MLU", "MULTI_MUSA",
    "MULTI_NEURON", "MULTI_NPU", "MULTI_SDAA", "MULTI_XPU", "NO", "XLA",
)  # fmt: skip
_WITHOUT_EFFECT_IN_FSDP2 = {
    "fsdp_sharding_strategy": "write fsdp_reshard_after_forward: true (FULL_SHARD) or false (SHARD_GRAD_OP)",
    "fsdp_backward_prefetch": "Remove it",
    "fsdp_forward_prefetch": "Remove it",
    "fsdp_use_orig_params": "Remove it",
    "fsdp_sync_module_states": "Remove it",
}
"""Key of version 1 that version 2 does not read -> what to do."""
_SETTLED_BY_DEEPSPEED_FILE = (
    "gradient_accumulation_steps", "gradient_clipping", "offload_optimizer_device", "offload_optimizer_nvme_path",
    "offload_param_device", "offload_param_nvme_path", "zero3_save_16bit_model", "zero_stage",
)  # fmt: skip
"""Keys of deepspeed_config that must not stand beside deepspeed_config_file."""

_Rule = Callable[[dict[str, Any]], Iterator[Finding]]


def accelerate_findings(path: Path) -> tuple[Finding, ...]:
    """Read an Accelerate file and return the findings on it, the most severe first, each with the line of its key.

    Raises:
        RequestError: the file cannot be read.
    """
    file = load(path)
    findings = []
    for rule in _RULES:
        for finding in rule(file.values):
            line = file.line_by_key.get(finding.about.key)
            findings.append(replace(finding, about=replace(finding.about, line=line)))
    return most_severe_first(findings)


def accelerate_document(file: str, findings: tuple[Finding, ...]) -> Document:
    """Return a document with a file's findings and their number."""
    return Document("", (Paragraph(f"{file}: {counts_of(findings)} (Accelerate {RELEASE})", "strong"), *findings))


def _finding(kind: str, severity: Severity, key: str, message: str, advice: str, source: str = "") -> Finding:
    """Return a finding on a key."""
    where = f"Accelerate {RELEASE}, {source}" if source else ""
    return Finding(kind, severity, message, advice, About(key=key, source=where))


def _unknown_keys(values: dict[str, Any]) -> Iterator[Finding]:
    """Find keys for which Accelerate refuses the whole file."""
    for key in map(str, values):
        if key in _KNOWN_KEYS:
            continue
        hint = nearest(key, _KNOWN_KEYS)
        advice = f"Remove it.{hint}"
        message = "Accelerate does not know this key, and refuses the whole file."
        yield _finding("unknown-key", "error", key, message, advice, "commands/config/config_args.py")


def _distributed_type(values: dict[str, Any]) -> Iterator[Finding]:
    """Find a distributed_type that is missing, unknown or not the text that it looks like."""
    key = "distributed_type"
    source = "commands/config/config_args.py"
    advice = f"Write one of {', '.join(_DISTRIBUTED_TYPES)}"
    value = values.get(key)
    if value is None:
        yield _finding("missing-key", "error", key, "Accelerate refuses a file without it.", advice, source)
    elif value is False:
        message = "YAML reads an unquoted NO as false, which is none of Accelerate's types."
        yield _finding("unquoted-no", "error", key, message, 'Write distributed_type: "NO"', source)
    elif word(value) not in _DISTRIBUTED_TYPES:
        yield _finding("wrong-value", "error", key, f"Accelerate has no type {shown(value)}.", advice, source)


def _uneven_hosts(values: dict[str, Any]) -> Iterator[Finding]:
    """Find processes that the hosts cannot share equally."""
    machines = whole_number(values.get("num_machines"))
    processes = whole_number(values.get("num_processes"))
    if machines is None or processes is None or processes % machines == 0:
        return
    started = processes // machines * machines
    message = (
        f"num_processes counts all hosts together: each of {machines} starts {processes // machines}, in all {started} "
        f"of {processes}."
    )
    advice = f"Write num_processes: {started or machines}"
    yield _finding("uneven-hosts", "error", "num_processes", message, advice, "utils/launch.py")


def _fsdp(values: dict[str, Any]) -> Iterator[Finding]:
    """Find settings of FSDP that its version does not read, or reads otherwise."""
    if word(values.get("distributed_type")) != "FSDP":
        return
    if fsdp_version(values) == 1:
        yield from _fsdp_1(values)
    else:
        yield from _fsdp_2(section(values, "fsdp_config"))
    policy = section(values, "fsdp_config").get("fsdp_auto_wrap_policy", "NO_WRAP")
    if word(policy) == "NO_WRAP":
        message = "The whole model is one unit: all weights are gathered at once, and nothing overlaps."
        advice = "Write fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"
        yield _finding(
            "one-unit", "warning", "fsdp_config.fsdp_auto_wrap_policy", message, advice, "utils/dataclasses.py"
        )


def _fsdp_1(values: dict[str, Any]) -> Iterator[Finding]:
    """Find a strategy that FSDP1 does not know, or that stands where it is not read."""
    source = "utils/dataclasses.py"
    strategy = sharding_strategy(values)
    if strategy is None:
        message = "FSDP1 has no such strategy."
        key = "fsdp_config.fsdp_sharding_strategy"
        yield _finding("wrong-value", "error", key, message, "Write FULL_SHARD or SHARD_GRAD_OP", source)
    elsewhere = section(values, "fsdp_config").get("fsdp_reshard_after_forward")
    if elsewhere is not None and strategy is not None and word(elsewhere) != strategy:
        message = f"FSDP1 does not read it: the strategy is fsdp_sharding_strategy's, {strategy}."
        advice = f"Write fsdp_sharding_strategy: {shown(elsewhere)}, or fsdp_version: 2"
        key = "fsdp_config.fsdp_reshard_after_forward"
        yield _finding("no-effect", "error", key, message, advice, source)
    message = (
        "This is torch's FSDP1, which gets no more than repairs; FSDP2 needs less memory and keeps parameters whole."
    )
    advice = "Write fsdp_version: 2, or convert the file: accelerate to-fsdp2"
    yield _finding("old-fsdp", "note", "fsdp_config.fsdp_version", message, advice, source)


def _fsdp_2(settings: dict[str, Any]) -> Iterator[Finding]:
    """Find settings that FSDP2 does not read. Args: settings: fsdp_config."""
    source = "utils/dataclasses.py"
    reshards = settings.get("fsdp_reshard_after_forward")
    if reshards is not None and flag(reshards) is None:
        key = "fsdp_config.fsdp_reshard_after_forward"
        message = f"FSDP2 takes true or false; {shown(reshards)} is refused."
        yield _finding("wrong-value", "error", key, message, "Write true (FULL_SHARD) or false (SHARD_GRAD_OP)", source)
    for name, advice in _WITHOUT_EFFECT_IN_FSDP2.items():
        if settings.get(name) is not None:
            message = "FSDP2 does not read it."
            yield _finding("no-effect", "warning", f"fsdp_config.{name}", message, advice, source)


def _deepspeed(values: dict[str, Any]) -> Iterator[Finding]:
    """Find settings that stand beside a DeepSpeed file, for which Accelerate refuses to start."""
    settings = section(values, "deepspeed_config")
    file = settings.get("deepspeed_config_file")
    if word(values.get("distributed_type")) != "DEEPSPEED" or file is None:
        return
    message = "Accelerate refuses to start with it beside deepspeed_config_file."
    advice = "Remove it, and write it in the DeepSpeed file"
    source = "utils/dataclasses.py (_deepspeed_config_checks)"
    keys = [f"deepspeed_config.{name}" for name in _SETTLED_BY_DEEPSPEED_FILE if name in settings]
    if values.get("mixed_precision") is not None:
        keys.append("mixed_precision")
    for key in keys:
        yield _finding("set-twice", "error", key, message, advice, source)
    key = "deepspeed_config.deepspeed_config_file"
    yield _finding(
        "another-file", "note", key, "All else of DeepSpeed is in that file.", f"Run vitscale lint {shown(file)}"
    )


def _uncarried(values: dict[str, Any]) -> Iterator[Finding]:
    """Find settings that a study does not take over as they stand (`vitscale init --from`)."""
    for left in carried_settings(values).uncarried:
        message = f"vitscale init --from does not take it over as it stands: {left.reason}."
        yield _finding("not-in-a-study", "note", left.key, message, "Nothing to do unless you write a study")


_RULES: tuple[_Rule, ...] = (_unknown_keys, _distributed_type, _uneven_hosts, _fsdp, _deepspeed, _uncarried)
