"""What training needs of torch's release: who says so, before anything starts and in a rank."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

from results_factory import make_trial
from study_factory import EIGHT_CORES, summary, write_study
from vitscale.engines.building import build
from vitscale.engines.checks import check_torch, unmet_torch_needs
from vitscale.engines.torch_needs import OLDEST, TorchRelease
from vitscale.errors import RequestError
from vitscale.runner.planning import Plan, plan
from vitscale.runner.preview import finding_lines
from vitscale.runner.torch_findings import torch_findings
from vitscale.trial.trial import TrainSpec

COMPILED_STAGE_3 = {"engine": "deepspeed", "zero_stage": 3, "compile": True}


def train(**fields: Any) -> TrainSpec:
    return TrainSpec.model_validate({"precision": "fp32", "device": "cpu", "micro_batch": 8} | fields)


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("2.11.0+cu130", (2, 11)), ("2.12.0a0+git1f2e3d", (2, 12)), ("2.8", (2, 8)), ("3.0.1", (3, 0)),
        ("", None), ("main", None),
    ],
)  # fmt: skip
def test_a_release_is_read_from_a_version(version: str, release: tuple[int, int] | None) -> None:
    assert TorchRelease.of_version(version) == release


def test_releases_are_ordered_as_numbers_and_not_as_texts() -> None:
    assert TorchRelease(2, 9) < TorchRelease(2, 12) < TorchRelease(3, 0)
    assert str(TorchRelease(2, 12)) == "2.12"


@pytest.mark.parametrize(
    ("fields", "version", "whats"),
    [
        (COMPILED_STAGE_3, "2.11.0+cu130", ["train.compile with zero_stage = 3"]),
        (COMPILED_STAGE_3, "2.12.0", []),
        (COMPILED_STAGE_3, "2.12.0a0+git1f2e3d", []),
        (COMPILED_STAGE_3 | {"zero_stage": 2}, "2.11.0", []),
        (COMPILED_STAGE_3 | {"compile": False}, "2.11.0", []),
        ({"engine": "accelerate", "accelerate_backend": "deepspeed", "zero_stage": 3, "compile": True}, "2.11.0",
         ["train.compile with zero_stage = 3"]),
        ({"engine": "script", "script": "train.py", "zero_stage": 3, "compile": True}, "2.11.0", []),
        (COMPILED_STAGE_3, "of somebody", []),
        ({"engine": "fsdp2", "grad_accum": 2}, "2.9.1", ["training by vitscale", "train.grad_accum > 1 under FSDP2"]),
        ({"engine": "fsdp2", "grad_accum": 2}, "2.10.0", []),
        ({"engine": "ddp", "grad_accum": 2}, "2.9.1", ["training by vitscale"]),
    ],
)  # fmt: skip
def test_what_needs_a_later_torch(fields: dict[str, Any], version: str, whats: list[str]) -> None:
    """Compiled ZeRO-3: under 2.11 the loss of step 2 was 2.3074 for 2.3217, on a CPU and on an H200."""
    assert [need.what for need in unmet_torch_needs(train(**fields), version)] == whats


def test_below_the_bound_of_pip_every_engine_is_warned_of() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert f"torch>={OLDEST}" in project["optional-dependencies"]["train"]
    (need,) = unmet_torch_needs(train(engine="ddp"), "2.9.1")
    assert not need.is_refused
    check_torch(train(engine="ddp"), "2.9.1")


def test_a_rank_refuses_what_its_torch_trains_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = make_trial()
    compiled = trial.model_copy(update={"train": train(**COMPILED_STAGE_3)})
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu130"))
    message = (
        r"train.compile with zero_stage = 3 trains wrongly under torch 2.11.0\+cu130. "
        "Install torch 2.12 or later, or leave compile out"
    )
    with pytest.raises(RequestError, match=message):
        build(nn.Linear(1, 1), compiled, torch.device("cpu"))
    check_torch(compiled.train, "2.12.0")


def with_torch(planned: Plan, version: str | None, **slurm: str) -> Plan:
    """The same plan where another torch is installed."""
    record = planned.record.model_copy(update={"versions": {**planned.record.versions, "torch": version}})
    section = planned.context.slurm.model_copy(update=slurm)
    return replace(planned, context=replace(planned.context, record=record, slurm=section))


def test_a_plan_names_the_release_and_the_trials_that_need_it(tmp_path: Path) -> None:
    changes: dict[str, dict[str, Any]] = {
        "train": {"engine": "deepspeed", "zero_stage": 3},
        "scaling": {"gpus": [2]},
        "sweep": {"train.compile": [False, True]},
    }
    planned = plan(write_study(tmp_path, changes), EIGHT_CORES, lambda _: summary())
    (finding,) = torch_findings(with_torch(planned, "2.11.0+cu130"))
    compiled = [trial_id for trial_id, trial in planned.record.trials.items() if trial.train.compile]
    assert (finding.kind, finding.severity, list(finding.about.trials)) == ("torch-release", "error", compiled)
    assert finding_lines(planned, [finding]) == [
        "error: train.compile with zero_stage = 3 trains wrongly under torch 2.11.0+cu130, which is installed here. "
        "Fix: Install torch 2.12 or later, or leave compile out. (1 of 2 trials)"
    ]
    assert torch_findings(with_torch(planned, "2.12.0")) == ()
    assert torch_findings(with_torch(planned, None)) == ()
    assert torch_findings(with_torch(planned, "2.11.0", container="image.sif")) == ()
    assert torch_findings(with_torch(planned, "2.11.0", python="/opt/python")) == ()
