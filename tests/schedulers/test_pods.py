"""Pods as hosts: what is sent to them, what is planned for them, and who reaches none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from launching import FOLDER, launch, world
from vitscale.errors import RequestError
from vitscale.launchers.base import Spawn
from vitscale.launchers.torchrun import Torchrun
from vitscale.machine.hosts import Host
from vitscale.runner.one_run import refuse_elsewhere
from vitscale.schedulers import scheduler_for
from vitscale.schedulers.pods import PlannedPods, Pods, make_pods
from vitscale.study.sections import NodeSection, Study

HERE = Host("localhost", 4)
OTHER = Host("198.51.100.7", 4)  # set aside for documentation (RFC 5737): nobody has it
NODE = NodeSection(cores=64, gpus=8)


@pytest.fixture
def hostfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process is in the first of two pods."""
    path = tmp_path / "hosts"
    path.write_text("vit-node-0-0.vit slots=8\nvit-node-0-1.vit slots=8\n")
    monkeypatch.setenv("VITSCALE_PODS", str(path))
    monkeypatch.setenv("VITSCALE_PODS_KEY_FILE", "/shared/results/.vit.pods-key")
    return path


def adapted(nodes: int) -> Spawn:
    hosts = (HERE, OTHER)[:nodes]
    return Pods((HERE, OTHER)).adapt(launch(Torchrun(), world(nodes, 2), hosts))


@pytest.mark.usefixtures("hostfile")
def test_an_agent_runs_here_as_it_is_and_in_another_pod_by_its_shell() -> None:
    plain = launch(Torchrun(), world(2, 2), (HERE, OTHER))
    here, there = adapted(2).commands
    assert here == plain.commands[0]
    assert there == (
        sys.executable, "-P", "-m", "vitscale.processes.pod_shell", "/shared/results/.vit.pods-key",
        "198.51.100.7", "--",
        sys.executable, "-P", "-m", "vitscale.processes.host_agent", str(FOLDER), "--", *plain.commands[1],
    )  # fmt: skip


@pytest.mark.parametrize("nodes", [1, 2])
def test_torchrun_does_not_see_what_kubeflow_sets_for_all_pods(nodes: int) -> None:
    """Beside `--standalone` it would take PET_NNODES and wait for pods that a smaller trial does not use."""
    assert adapted(nodes).drop_variables == ("PET_",)


def test_pods_are_those_of_the_set_around_this_process(hostfile: Path) -> None:
    pods = make_pods(None)
    names = [line.split()[0] for line in hostfile.read_text().splitlines()]
    assert isinstance(pods, Pods)
    assert [host.name for host in pods.hosts(world(2, 8))] == names
    assert [host.name for host in pods.hosts(world(1, 8))] == names[:1]
    assert [host.name for host in pods.limited_to(pods.pool()[1:]).pool()] == names[1:]
    with pytest.raises(RequestError, match="3 hosts with room for 1 rank each are needed"):
        pods.hosts(world(3, 1))


@pytest.mark.usefixtures("hostfile")
def test_a_study_that_names_no_scheduler_runs_on_them(study: Study) -> None:
    assert isinstance(scheduler_for(study, Path("study.toml")), Pods)


@pytest.fixture
def study() -> Study:
    return Study.model_validate({"name": "vit", "model": {"name": "vit-ti16"}, "data": {"name": "digits"}})


def test_a_pod_without_its_hostfile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITSCALE_PODS", "/nowhere/hosts")
    with pytest.raises(RequestError, match="hostfile '/nowhere/hosts'"):
        make_pods(None)


def test_elsewhere_they_are_planned_for_as_the_study_describes_one() -> None:
    pods = make_pods(NODE)
    assert isinstance(pods, PlannedPods)
    assert (pods.machine().cores, len(pods.machine().gpus), pods.slots()) == (64, 8, 8)
    assert [host.name for host in pods.hosts(world(2, 8))] == ["pod0.invalid", "pod1.invalid"]


def test_nobody_guesses_what_a_pod_offers() -> None:
    with pytest.raises(RequestError, match=r"'kubernetes' plans for pods .* add \[node\]"):
        make_pods(None).machine()


def test_nothing_is_started_on_planned_pods() -> None:
    with pytest.raises(RequestError, match=r"started by a cluster, and not from here.*kubectl apply"):
        refuse_elsewhere(make_pods(NODE))


def test_runs_side_by_side_are_refused_where_pods_are_planned() -> None:
    with pytest.raises(RequestError, match=r"measure\.parallel_runs"):
        make_pods(NODE).pool()


@pytest.mark.parametrize("placement", [Pods((HERE, OTHER)), PlannedPods(None)])
@pytest.mark.parametrize(
    ("launcher", "nodes", "reason"),
    [
        ("torchrun", 2, None), ("deepspeed", 1, None), ("mpirun", 1, None),
        ("deepspeed", 2, "deepspeed reaches other hosts by ssh, and pods serve none; use torchrun"),
        ("mpirun", 2, "mpirun reaches other hosts by ssh, and pods serve none; use torchrun"),
        ("srun", 1, "srun takes its hosts from Slurm, and pods are none; use torchrun"),
    ],
)  # fmt: skip
def test_launchers_that_need_ssh_or_slurm_are_refused(
    placement: Pods | PlannedPods, launcher: str, nodes: int, reason: str | None
) -> None:
    assert placement.refuses(launcher, world(nodes, 1)) == reason
