"""`plan STUDY --commands` for pods of Kubernetes: a manifest, or one message on what it lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from study_factory import toml
from vitscale import RequestError, run
from vitscale.api import planning, running
from vitscale.api.arguments import LaunchOptions

SITE = """
[launch]
scheduler = "kubernetes"
[node]
cores = 96
gpus = 8
[kubernetes]
image = "registry.example/vitscale:1"
claim = "vitscale"
"""


class Asked:
    """A study and a site file, and what `plan --commands` says of them."""

    def __init__(self, folder: Path) -> None:
        self.study = folder / "study.toml"
        self.site = folder / "site.toml"
        self.write()

    def write(self, changes: dict[str, dict[str, Any]] | None = None, site: str = SITE) -> None:
        """A study of one GPU, a whole pod and two pods, with changes by section."""
        sizes: dict[str, dict[str, Any]] = {"scaling": {"gpus": [1, 8, 16]}, "data": {"name": "synthetic"}}
        self.study.write_text(toml(sizes | (changes or {}), "ViT_1"))
        self.site.write_text(site)

    def manifest(self, *overrides: str, launcher: str | None = None, **options: Any) -> list[dict[str, Any]]:
        launch = LaunchOptions(launcher, site=self.site)
        return [*yaml.safe_load_all(planning.commands(self.study, overrides, launch=launch, **options))]

    def refusal(self, *overrides: str) -> str:
        with pytest.raises(RequestError) as caught:
            self.manifest(*overrides)
        return str(caught.value)


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    return Asked(tmp_path)


def container(started: dict[str, Any]) -> dict[str, Any]:
    job = started["spec"]["replicatedJobs"][0]["template"]["spec"]
    found: dict[str, Any] = job["template"]["spec"]["containers"][0]
    return found


def test_pods_suffice_for_the_largest_trial_and_bring_the_study_as_it_is(asked: Asked) -> None:
    config_map, job_set = asked.manifest()
    assert config_map["data"]["study.toml"] == asked.study.read_text()
    assert config_map["data"]["site.toml"] == asked.site.read_text()
    assert config_map["data"]["hosts"].splitlines() == [f"vit-1-node-0-{pod}.vit-1 slots=8" for pod in (0, 1)]
    assert job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"] == 2
    resources = container(job_set)["resources"]
    assert resources == {"limits": {"nvidia.com/gpu": 8}, "requests": {"cpu": 96}}


def test_what_the_command_line_says_goes_into_the_pods(asked: Asked) -> None:
    _, job_set = asked.manifest(
        "scaling.gpus=[8]", "train.micro_batch=64", launcher="torchrun", gpu_memory=80_000_000_000
    )
    assert container(job_set)["command"][5:] == [
        "/study/study.toml", "--site", "/study/site.toml", "--scheduler", "kubernetes", "--launcher", "torchrun",
        "--gpu-memory", "80000000000B", "scaling.gpus=[8]", "train.micro_batch=64",
    ]  # fmt: skip
    assert job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"] == 1


def test_a_train_job_of_amd_gpus_with_the_study_in_its_image(asked: Asked) -> None:
    keys = 'manifest = "trainjob"\ngpu_resource = "amd.com/gpu"\nstudy = "/opt/study.toml"\nruntime = "own"\n'
    asked.write(site=SITE + keys)
    config_map, train_job = asked.manifest()
    assert "study.toml" not in config_map["data"]
    trainer = train_job["spec"]["trainer"]
    assert "/opt/study.toml" in trainer["args"]
    assert trainer["resourcesPerNode"]["limits"] == {"amd.com/gpu": 8}
    assert train_job["spec"]["runtimeRef"]["name"] == "own"


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ('image = "registry.example/vitscale:1"\n', "kubernetes.image is not given, which a manifest needs"),
        ('claim = "vitscale"\n', "kubernetes.claim is not given, which a manifest needs"),
        ("[node]\ncores = 96\ngpus = 8\n", "plans for pods on nodes that this machine knows nothing of"),
    ],
)
def test_what_nobody_can_know_is_asked_for(asked: Asked, missing: str, message: str) -> None:
    asked.write(site=SITE.replace(missing, ""))
    assert message in asked.refusal()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("image", "a b"), ("image", "-x"), ("claim", "Up"), ("claim", "a/b"), ("gpu_resource", "gpu"),
        ("gpu_resource", "nvidia.com/gpu: 8"), ("shared_memory", "16 GB"), ("study", "study.toml"), ("queue", "a\nb"),
        ("manifest", "pod"),
    ],
)  # fmt: skip
def test_values_that_kubernetes_would_not_take_are_refused(asked: Asked, key: str, value: str) -> None:
    asked.write({"kubernetes": {key: value}}, site=SITE.partition("[kubernetes]")[0])
    assert f"kubernetes.{key}" in asked.refusal()


def test_a_study_that_names_files_must_lie_in_the_image(asked: Asked, tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text("{}")
    asked.write({"train": {"engine": "deepspeed", "micro_batch": 32, "epochs": 3, "deepspeed_config": str(config)}})
    refusal = asked.refusal()
    assert "names files of this machine (train.deepspeed_config)" in refusal
    assert "kubernetes.study" in refusal
    asked.site.write_text(SITE + 'study = "/opt/study.toml"\n')
    assert len(asked.manifest()) == 2


@pytest.mark.parametrize("launcher", ["deepspeed", "mpirun"])
def test_a_launcher_that_needs_ssh_is_refused_before_a_pod_starts(asked: Asked, launcher: str) -> None:
    asked.write({"launch": {"launcher": launcher}})
    assert f"{launcher} reaches other hosts by ssh, and pods serve none; use torchrun" in asked.refusal()


def test_nothing_runs_from_outside(asked: Asked, tmp_path: Path) -> None:
    launch = LaunchOptions(site=asked.site)
    with pytest.raises(RequestError, match=r"started by a cluster.*plan STUDY --commands.*kubectl apply"):
        run(asked.study, output=tmp_path / "results", launch=launch)
    assert not (tmp_path / "results").exists()
    with pytest.raises(RequestError, match="plan STUDY --commands"):
        running.commands_to_do(asked.study, launch=launch)
