"""`init --from` writes studies that `plan` takes, on this machine."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

import vitscale


@pytest.mark.parametrize(
    ("config", "section", "expected"),
    [
        ({"train_micro_batch_size_per_gpu": 8}, "train", {"micro_batch": 8}),
        ({"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2}, "train", {"grad_accum": 2}),
        ({"train_batch_size": 32}, "train", {"global_batch": 32}),
        ({"train_batch_size": 32}, "scaling", {"mode": "strong-global"}),
        ({"train_micro_batch_size_per_gpu": "auto"}, "train", {"engine": "deepspeed"}),
    ],
)
def test_numbers_of_a_deepspeed_file_are_the_study_s(
    tmp_path: Path, config: dict[str, Any], section: str, expected: dict[str, Any]
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(config))
    written = vitscale.init(
        tmp_path / "study.toml", from_file=tmp_path / "ds.json", model="vit-ti16", data="digits", gpus=[1]
    )
    assert written.runs == 3
    study = tomllib.loads((tmp_path / "study.toml").read_text())
    assert study[section].items() >= expected.items()


def test_another_engine_drops_the_settings_of_the_file_s_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 1\nmixed_precision: 'no'\n"
        "deepspeed_config: {zero_stage: 3, gradient_clipping: 0.5, gradient_accumulation_steps: 4}\n"
    )
    written = vitscale.init(
        tmp_path / "study.toml", from_file=tmp_path / "config.yaml", engine="ddp", model="vit-ti16", data="digits"
    )
    study = tomllib.loads((tmp_path / "study.toml").read_text())
    assert study["train"]["engine"] == "ddp"
    assert study["train"].keys().isdisjoint({"zero_stage", "clip_norm", "grad_accum"})
    said = " ".join(written.uncarried)
    assert "train.zero_stage = 3: it belongs to the engine" in said
    assert "and ddp is asked for" in said


def test_rank_counts_are_those_of_the_engine_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("distributed_type: 'NO'\nnum_processes: 1\n")
    vitscale.init(tmp_path / "study.toml", from_file=tmp_path / "config.yaml", model="vit-ti16", data="digits")
    assert tomllib.loads((tmp_path / "study.toml").read_text())["scaling"]["gpus"] == [1]
