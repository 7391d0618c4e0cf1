"""Jobs of others: the files are as they were looked at, and as the projects' own schemas want them."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from advice.test_study_text import scripted
from advice_factory import advised
from vitscale.advice.job_files import JOB_FORMATS, job_text
from vitscale.advice.request import Option
from vitscale.advice.study_text import study_text
from vitscale.errors import RequestError
from vitscale.trial.trial import Trial

WHEEL = Path("/home/me/vitscale-0.1.0-py3-none-any.whl")
GOLDEN = Path(__file__).parent / "golden"


def advice_on(nodes: int) -> tuple[str, Option, Trial]:
    """A study, and how it would run on so many hosts of two GPUs."""
    advice = advised()
    chosen = advice.chosen
    assert chosen is not None
    option = replace(chosen, candidate=replace(chosen.candidate, gpus=2 * nodes, ranks_per_node=2))
    trial = advice.trials[option.series]
    trial = trial.model_copy(update={"train": trial.train.model_copy(update={"device": "cuda"})})
    return study_text("My ViT_advised", option, trial, advice.work), option, trial


def written(kind: str, nodes: int, devices: tuple[str, ...] = ("NVIDIA A100-SXM4-80GB",)) -> str:
    study, option, trial = advice_on(nodes)
    return job_text(kind, study, option, trial, devices, WHEEL)


@pytest.mark.parametrize("kind", JOB_FORMATS)
@pytest.mark.parametrize("nodes", [1, 3])
def test_the_files_are_as_they_were_looked_at(kind: str, nodes: int) -> None:
    assert written(kind, nodes) == (GOLDEN / f"{kind}-{nodes}.yaml").read_text()


@pytest.mark.parametrize("nodes", [1, 3])
def test_the_study_arrives_as_it_is(nodes: int, tmp_path: Path) -> None:
    """By the shell that a task's commands go to, and in the map that pods see as files."""
    study, *_ = advice_on(nodes)
    (config, _) = yaml.safe_load_all(written("jobset", nodes))
    assert config["data"]["study.toml"] == study
    run = yaml.safe_load(written("skypilot", nodes))["run"]
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin", "vitscale", 'echo "$@" > arguments')
    around = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "HOME": "/home/x", "SKYPILOT_NODE_RANK": "0"}
    around["SKYPILOT_NODE_IPS"] = "10.0.0.1\n10.0.0.2\n10.0.0.3"
    subprocess.run(["bash", "-ec", run], cwd=tmp_path, env=around, check=True)
    assert (tmp_path / "study.toml").read_text() == study
    hosts = "" if nodes == 1 else "--hostfile hosts "
    results = "/home/x/results" if nodes == 1 else "/shared/results"
    assert (tmp_path / "arguments").read_text() == f"run study.toml {hosts}-o {results}\n"
    if nodes > 1:
        assert (tmp_path / "hosts").read_text() == "10.0.0.1 slots=2\n10.0.0.2 slots=2\n10.0.0.3 slots=2\n"


def program(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("nodes", [1, 3])
def test_each_host_is_a_pod_that_runs_the_study_with_a_launcher_that_needs_no_ssh(nodes: int) -> None:
    config, job_set = yaml.safe_load_all(written("jobset", nodes))
    (job,) = job_set["spec"]["replicatedJobs"]
    assert job["template"]["spec"]["completions"] == len(config["data"]["hosts"].splitlines()) == nodes
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == [
        "python3", "-P", "-m", "vitscale.runner.pod", "/shared/results/my-vit-advised", "/study/study.toml",
        "--scheduler", "kubernetes", "--launcher", "torchrun",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("device", "resource"),
    [
        ("NVIDIA A100-SXM4-80GB", "nvidia.com/gpu"), ("AMD Instinct MI300X", "amd.com/gpu"), ("MI250X", "amd.com/gpu"),
        ("AMD Radeon PRO W7900", "amd.com/gpu"), ("", "nvidia.com/gpu"), ("Tesla V100-SXM2-16GB", "nvidia.com/gpu"),
    ],
)  # fmt: skip
def test_gpus_are_asked_for_by_their_vendors_name(device: str, resource: str) -> None:
    _, job_set = yaml.safe_load_all(written("jobset", 3, (device,)))
    for job in job_set["spec"]["replicatedJobs"]:
        (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
        assert container["resources"]["limits"] == {resource: 2}


@pytest.mark.parametrize(
    ("device", "theirs"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"), ("NVIDIA A100-SXM4-40GB", "A100"), ("NVIDIA A10G", "A10G"),
        ("NVIDIA H100 80GB HBM3", "H100"), ("Tesla T4", "T4"), ("NVIDIA L4", "L4"), ("NVIDIA L40S", "L40S"),
        ("NVIDIA H200", "H200"), ("NVIDIA GH200 480GB", "GH200"), ("NVIDIA GB200", "REPLACE-BY-A-GPU"),
        ("Tesla V100-SXM2-16GB", "V100"), ("Something New", "REPLACE-BY-A-GPU"),
    ],
)  # fmt: skip
def test_gpus_by_the_names_that_skypilot_has_for_them(device: str, theirs: str) -> None:
    task = yaml.safe_load(written("skypilot", 1, (device,)))
    assert task["resources"]["accelerators"] == f"{theirs}:2"


def test_a_hostile_study_stays_a_text(tmp_path: Path) -> None:
    _, option, trial = advice_on(1)
    evil = trial.data.model_copy(
        update={"root": "x'\nEND_OF_STUDY\ntouch escaped\n$(touch escaped)`touch escaped`\u2028x: y"}
    )
    text = study_text("x", option, trial.model_copy(update={"data": evil}), advised().work)
    for kind in JOB_FORMATS:
        documents: list[Any] = [*yaml.safe_load_all(job_text(kind, text, option, trial, (), WHEEL))]
        if kind == "jobset":
            assert documents[0]["data"]["study.toml"] == text
            continue
        subprocess.run(["bash", "-c", documents[0]["run"]], cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}, check=False)
        assert [path.name for path in tmp_path.iterdir()] == ["study.toml"]
        assert (tmp_path / "study.toml").read_text() == text


def test_a_script_goes_along(tmp_path: Path) -> None:
    """With its folder, or as what the image must have; the study names it as it lies there."""
    advice = advised()
    option = advice.chosen
    assert option is not None
    trial = scripted(advice.trial, tmp_path / "own.py")
    study = study_text("own", option, trial, advice.work)
    task = yaml.safe_load(job_text("skypilot", study, option, trial, (), WHEEL))
    assert task["workdir"] == str(tmp_path)
    assert '\nscript = "own.py"\n' in task["run"]
    assert f"the script '{tmp_path}/own.py'" in job_text("jobset", study, option, trial, (), WHEEL).splitlines()[0]


def test_an_unknown_format_is_named() -> None:
    study, option, trial = advice_on(1)
    with pytest.raises(RequestError, match=r"unknown format of a job 'skypilo'.*Did you mean 'skypilot'"):
        job_text("skypilo", study, option, trial, (), WHEEL)


@pytest.mark.parametrize("nodes", [1, 3])
def test_skypilot_takes_its_task(nodes: int) -> None:
    schemas = pytest.importorskip("sky.utils.schemas", reason="SkyPilot is not installed")
    jsonschema = pytest.importorskip("jsonschema")
    task = yaml.safe_load(written("skypilot", nodes))
    jsonschema.validate(task, schemas.get_task_schema())
    jsonschema.validate(task["resources"], schemas.get_resources_schema())
