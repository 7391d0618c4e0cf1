"""A manifest's containers, as processes on two hosts of a lab: real torchrun and gloo, one results folder, a report.

What a cluster would do stands here: the ConfigMap's files in a folder, the volume as another, the variables that
Kubernetes, JobSet and Kubeflow set, and restarts. The lab's hosts have names of their own instead of the pods'.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

import needs
from driving import TINY_MODEL
from processes import wait_until
from vitscale import analysis, report
from vitscale.api import planning
from vitscale.api.arguments import LaunchOptions
from vitscale.lab import Laboratory, laboratory

pytestmark = [pytest.mark.ranks, pytest.mark.long(6)]

STUDY = f"""
name = "In_pods"
{TINY_MODEL}
[data]
name = "digits"
[train]
engine = "ddp"
precision = "fp32"
micro_batch = 8
device = "cpu"
[scaling]
gpus = [1, 2]
gpus_per_node = 1
[launch]
threads_per_rank = 1
[measure]
repeats = 1
steps = 6
"""
"""A trial in the first pod alone, and one in both."""
SITE = """
[launch]
scheduler = "kubernetes"
[node]
cores = 1
[kubernetes]
image = "vitscale"
claim = "vitscale"
manifest = "{kind}"
"""
KUBEFLOWS: Mapping[str, str] = {
    "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "in-pods-node-0-0.in-pods",
    "PET_MASTER_PORT": "29500",
}  # fmt: skip
"""What the runtime torch-distributed sets in all pods of a TrainJob, besides PET_NODE_RANK."""
SECONDS = 300


@pytest.fixture(scope="module")
def lab() -> Iterator[Laboratory]:
    needs.root_and("ip", "tc", "unshare", "nsenter")
    with laboratory(hosts=2, slots=1) as lab:
        yield lab


class Pods(NamedTuple):
    """The pods of one manifest, started as often as a cluster would."""

    lab: Laboratory
    kind: str
    argv: list[str]
    """The containers' program."""
    environment: dict[str, str]
    results: Path

    def start(self, number: int, folder: Path) -> subprocess.Popen[bytes]:
        """Start a pod; what it prints goes to a file of its own."""
        variables = {"JOB_COMPLETION_INDEX": str(number)}
        if self.kind == "trainjob":
            variables |= {**KUBEFLOWS, "PET_NODE_RANK": str(number)}
        with (folder / f"pod-{number}.log").open("ab") as log:
            return subprocess.Popen(
                self.lab.command(number, self.argv),
                env=os.environ | self.environment | variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
            )


def pods_of(lab: Laboratory, kind: str, folder: Path, *overrides: str) -> Pods:
    """Print a study's manifest, and put its files and its volume where the lab's hosts see them."""
    study = folder / "laptop" / "study.toml"
    site = study.with_name("site.toml")
    study.parent.mkdir()
    study.write_text(STUDY)
    site.write_text(SITE.format(kind=kind))
    text = planning.commands(study, overrides, launch=LaunchOptions(site=site))
    config_map, started = yaml.safe_load_all(text)
    for name, content in config_map["data"].items():
        (folder / "study").mkdir(exist_ok=True)
        (folder / "study" / name).write_text(content)
    assert len(config_map["data"]["hosts"].splitlines()) == 2
    (folder / "study" / "hosts").write_text(lab.hostfile.read_text())
    container = _container(started)

    def inside(text: str) -> str:
        for name in ("/study", "/shared"):
            if text == name or text.startswith(f"{name}/"):
                return f"{folder}{text}"
        return text

    (folder / "shared").mkdir()
    argv = [inside(word) for word in (*container["command"], *container.get("args", ()))]
    argv = [word.replace("--chdir=/shared", f"--chdir={folder}/shared") for word in argv]
    argv[argv.index("python3")] = sys.executable
    environment = {variable["name"]: inside(variable["value"]) for variable in container["env"]}
    return Pods(lab, kind, argv, environment, folder / "shared/results/in-pods")


def _container(started: dict[str, Any]) -> dict[str, Any]:
    """The container that runs the study."""
    if started["kind"] == "TrainJob":
        trainer: dict[str, Any] = started["spec"]["trainer"]
        return trainer
    pod = started["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    container: dict[str, Any] = pod["containers"][0]
    return container


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_the_containers_run_every_size_of_a_study_and_leave_results_that_report_reads(
    lab: Laboratory, kind: str, tmp_path: Path
) -> None:
    pods = pods_of(lab, kind, tmp_path)
    running = [pods.start(number, tmp_path) for number in (1, 0)]  # they begin in any order
    codes = [pod.wait(SECONDS) for pod in running]
    assert codes == [0, 0], (tmp_path / "pod-0.log").read_text()
    analysed = analysis.analyse_folder(pods.results)
    assert [run.outcome.kind for run in analysed.runs] == ["completed", "completed"]
    assert sorted(run.header.hosts for run in analysed.runs) == [("host0",), ("host0", "host1")]
    assert report(pods.results).summary


def test_a_driver_that_is_killed_is_started_again_and_the_run_has_one_outcome(lab: Laboratory, tmp_path: Path) -> None:
    """As a TrainJob does, whose other pods stay: the run under way is cut off, and done again to its end."""
    pods = pods_of(lab, "trainjob", tmp_path, "scaling.gpus=[2]", "measure.steps=1000")
    other = pods.start(1, tmp_path)
    first = pods.start(0, tmp_path)
    wait_until(lambda: list(pods.results.glob("runs/*/rank-1.jsonl")), "a run is under way on both pods")
    kill_all(lab, 0)
    first.wait(SECONDS)
    wait_until(lambda: ranks_on(lab, 1) == 0, "the other pod has ended its rank")
    assert other.poll() is None
    again = pods.start(0, tmp_path)
    codes = [again.wait(SECONDS), other.wait(SECONDS)]
    assert codes == [0, 0], (tmp_path / "pod-0.log").read_text()
    outcomes = [path.parent.name[-3:] for path in pods.results.glob("runs/*/outcome.json")]
    analysed = analysis.analyse_folder(pods.results)
    assert [run.outcome.kind for run in analysed.runs] == ["completed"]
    assert len(outcomes) == 1, outcomes


def test_a_study_that_is_wrong_ends_all_pods_with_its_code(lab: Laboratory, tmp_path: Path) -> None:
    """For which a JobSet fails at once; nothing is left that could begin again."""
    pods = pods_of(lab, "jobset", tmp_path)
    (tmp_path / "study" / "study.toml").write_text("name = 'In_pods'\nwrong = 1\n")
    running = [pods.start(number, tmp_path) for number in (0, 1)]
    assert [pod.wait(SECONDS) for pod in running] == [2, 2]


def kill_all(lab: Laboratory, host: int) -> None:
    """End every process of a host at once, as its loss does."""
    for pid in lab.processes(host):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def ranks_on(lab: Laboratory, host: int) -> int:
    """How many processes of a host are ranks of a run."""
    ranks = 0
    for pid in lab.processes(host):
        with contextlib.suppress(OSError):  # it has just ended
            ranks += b"vitscale.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return ranks
