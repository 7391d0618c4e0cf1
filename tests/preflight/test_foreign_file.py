"""`init --from`: studies that do what a file of Accelerate or DeepSpeed does, and a word on what they leave out."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

import vitscale
from study_factory import gpus
from vitscale.errors import RequestError
from vitscale.machine.hardware import Machine
from vitscale.preflight.first_study import look_around

WHERE = look_around(
    None, Path("/nowhere"), Machine(cores=64, cpu_quota_cores=None, gpus=gpus(8), cpu_has_fast_bf16=False)
)


@pytest.fixture(autouse=True)
def _eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The study is planned for this machine, whatever it has."""
    monkeypatch.setattr("vitscale.api.starting.runner.plan", lambda _: type("Planned", (), {"tasks": ()}))


def study_from(folder: Path, text: str, name: str = "config.yaml") -> tuple[dict[str, Any], dict[str, str]]:
    """The study, and each key that it leaves out with the reason."""
    (folder / name).write_text(text)
    written = vitscale.init(folder / "study.toml", from_file=folder / name, where=WHERE)
    left_out = dict(line.partition(" = ")[::2] for line in written.uncarried)
    return tomllib.loads((folder / "study.toml").read_text()), left_out


def test_ddp_on_two_hosts(tmp_path: Path) -> None:
    text = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_machines: 2\n"
        "num_processes: 8\nmachine_rank: 1\nmain_process_ip: 10.0.0.1\nrdzv_backend: static\ngpu_ids: all\n"
        "dynamo_config: {dynamo_backend: INDUCTOR, dynamo_mode: reduce-overhead}\n"
    )
    study, left_out = study_from(tmp_path, text)
    train = study["train"]
    assert (train["engine"], train["accelerate_backend"], train["precision"]) == ("accelerate", "ddp", "bf16")
    assert (train["compile"], train["compile_mode"]) == (True, "reduce-overhead")
    assert study["scaling"]["gpus"] == [1, 2, 4, 8]
    assert study["scaling"]["gpus_per_node"] == 4
    assert left_out.keys() == {"main_process_ip"}


@pytest.mark.parametrize(
    ("settings", "fields", "left_out"),
    [
        ("fsdp_version: 2, fsdp_reshard_after_forward: false", {"reshard_after_forward": False}, set()),
        ("fsdp_version: 2, fsdp_offload_params: true", {"offload": "parameters"}, set()),
        ("fsdp_sharding_strategy: SHARD_GRAD_OP", {"reshard_after_forward": False}, {"fsdp_config.fsdp_version"}),
        ("fsdp_sharding_strategy: 1", {"reshard_after_forward": True}, {"fsdp_config.fsdp_version"}),
        (
            "fsdp_reshard_after_forward: SHARD_GRAD_OP",
            {"reshard_after_forward": True},
            {"fsdp_config.fsdp_version", "fsdp_config.fsdp_reshard_after_forward"},
        ),
        (
            "fsdp_version: 2, fsdp_activation_checkpointing: true, fsdp_auto_wrap_policy: SIZE_BASED_WRAP, "
            "fsdp_min_num_params: 9",
            {"activation_checkpointing": True},
            {"fsdp_config.fsdp_auto_wrap_policy", "fsdp_config.fsdp_min_num_params"},
        ),
        (
            "fsdp_backward_prefetch: NO_PREFETCH, fsdp_forward_prefetch: true",
            {},
            {"fsdp_config.fsdp_version", "fsdp_config.fsdp_backward_prefetch", "fsdp_config.fsdp_forward_prefetch"},
        ),
    ],
)
def test_fsdp_of_both_versions(tmp_path: Path, settings: str, fields: dict[str, Any], left_out: set[str]) -> None:
    study, left = study_from(tmp_path, f"distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {{{settings}}}\n")
    assert study["train"]["engine"] == "fsdp2"
    assert study["train"].items() >= fields.items()
    assert study["scaling"]["gpus"] == [1, 2, 4]
    assert left.keys() == left_out


def test_fsdp_that_shards_nothing_is_ddp(tmp_path: Path) -> None:
    study, _ = study_from(tmp_path, "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: NO_SHARD}\n")
    assert (study["train"]["engine"], study["train"]["accelerate_backend"]) == ("accelerate", "ddp")


def test_deepspeed_by_accelerates_own_settings(tmp_path: Path) -> None:
    settings = "zero_stage: 3, offload_optimizer_device: cpu, gradient_accumulation_steps: 4, gradient_clipping: 1.0"
    study, left_out = study_from(tmp_path, f"distributed_type: DEEPSPEED\ndeepspeed_config: {{{settings}}}\n")
    train = study["train"]
    assert (train["engine"], train["accelerate_backend"], train["zero_stage"]) == ("accelerate", "deepspeed", 3)
    assert (train["offload"], train["grad_accum"], train["gradient_clipping"]) == ("optimizer", 4, 1.0)
    assert not left_out


DS_FILE = '{"zero_optimization": {"stage": 1}, "gradient_clipping": 1.0}'


def test_deepspeed_by_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(DS_FILE)
    text = "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json, zero_stage: 2}\n"
    study, left_out = study_from(tmp_path, text)
    assert (study["train"]["engine"], study["train"]["deepspeed_config"]) == ("deepspeed", "ds.json")
    assert left_out.keys() == {"deepspeed_config.deepspeed_config_file", "deepspeed_config.zero_stage"}


def test_a_deepspeed_file_by_itself(tmp_path: Path) -> None:
    study, left_out = study_from(tmp_path, DS_FILE, "ds.json")
    assert (study["train"]["engine"], study["train"]["deepspeed_config"]) == ("deepspeed", "ds.json")
    assert not left_out


def test_what_has_no_counterpart_is_named(tmp_path: Path) -> None:
    study, left_out = study_from(
        tmp_path, 'distributed_type: "NO"\nmixed_precision: fp8\nfp8_config: {backend: TE}\ngpu_ids: "0"\n'
    )
    assert study["train"]["engine"] == "none"
    assert study["scaling"]["gpus"] == [1]
    assert left_out.keys() == {"mixed_precision", "fp8_config", "gpu_ids"}


def test_a_missing_deepspeed_file_is_said_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        study_from(tmp_path, "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}\n")
    assert not (tmp_path / "study.toml").exists()
