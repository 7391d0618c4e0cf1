"""Which scheduler a study gets, on each kind of machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from study_factory import write_study
from vitscale.errors import RequestError
from vitscale.machine.hosts import Host
from vitscale.schedulers import Hostfile, LocalHost, Scheduler, described, scheduler_for
from vitscale.schedulers.batch_system import NodesOfJob
from vitscale.schedulers.slurm import SlurmAllocation
from vitscale.schedulers.slurm_cluster import SlurmCluster
from vitscale.study.file import StudyFile
from vitscale.study.sections import NodeSection
from vitscale.trial.trial import World

ALLOCATION = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node[1-2]"}


@pytest.fixture(autouse=True)
def _outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ALLOCATION, "PBS_JOBID", "PBS_NODEFILE", "LSB_JOBID", "LSB_MCPU_HOSTS", "LSB_DJOB_HOSTFILE"):
        monkeypatch.delenv(name, raising=False)


def inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if in a job of Slurm."""
    for name, value in ALLOCATION.items():
        monkeypatch.setenv(name, value)


def scheduler(folder: Path, hosts: str | None = None, /, **launch: Any) -> Scheduler:
    if hosts is not None:
        (folder / "hosts").write_text(hosts)
    path = write_study(folder, {"launch": launch, "node": {"cores": 64, "gpus": 4, "fast_bf16": False}})
    return scheduler_for(StudyFile.read(path).study, path)


def refusal(folder: Path, hosts: str | None = None, /, **launch: Any) -> str:
    with pytest.raises(RequestError) as caught:
        scheduler(folder, hosts, **launch)
    return str(caught.value)


def test_this_machine_where_nothing_else_is_said(tmp_path: Path) -> None:
    assert isinstance(scheduler(tmp_path), LocalHost)


def test_the_allocation_around_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside(monkeypatch)
    assert isinstance(scheduler(tmp_path), SlurmAllocation)
    assert isinstance(scheduler(tmp_path, scheduler="slurm"), SlurmAllocation)
    assert isinstance(scheduler(tmp_path, scheduler="local"), LocalHost), "as it says"
    assert isinstance(scheduler(tmp_path, "node1", hostfile="hosts"), Hostfile), "as it says"


def test_the_job_of_pbs_or_lsf_around_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node_file = tmp_path / "nodes"
    node_file.write_text("node1\nnode2\n")
    monkeypatch.setenv("PBS_JOBID", "12.pbs1")
    assert isinstance(scheduler(tmp_path), LocalHost), "PBS names no nodes"
    monkeypatch.setenv("PBS_NODEFILE", str(node_file))
    found = scheduler(tmp_path)
    assert isinstance(found, NodesOfJob)
    assert (found.title, found.pool()) == ("PBS", (Host("node1"), Host("node2")))
    assert isinstance(scheduler(tmp_path, scheduler="local"), LocalHost), "as it says"
    monkeypatch.delenv("PBS_JOBID")
    monkeypatch.setenv("LSB_JOBID", "7")
    monkeypatch.setenv("LSB_MCPU_HOSTS", "node3 8")
    found = scheduler(tmp_path)
    assert isinstance(found, NodesOfJob)
    assert (found.title, found.pool()) == ("LSF", (Host("node3"),))


def test_a_heterogeneous_allocation_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As salloc sets it: without SLURM_JOB_NODELIST, so that it looked as if there were none."""
    for name, value in {"ID": "12", "NODELIST_HET_GROUP_0": "node0", "NODELIST_HET_GROUP_1": "node1"}.items():
        monkeypatch.setenv(f"SLURM_JOB_{name}", value)
    monkeypatch.setenv("SLURM_HET_SIZE", "2")
    assert "job 12 is heterogeneous (SLURM_HET_SIZE)" in refusal(tmp_path)
    assert isinstance(scheduler(tmp_path, scheduler="local"), LocalHost), "as it says"


def test_jobs_are_submitted_from_outside(tmp_path: Path) -> None:
    found = scheduler(tmp_path, scheduler="slurm")
    assert isinstance(found, SlurmCluster)
    machine = found.machine()
    assert (machine.cores, len(machine.gpus), machine.fast_bf16("cuda")) == (64, 4, False)


def test_a_hostfile_beside_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    for launch in ({"hostfile": "hosts"}, {"hostfile": str(tmp_path / "hosts"), "scheduler": "hostfile"}):
        found = scheduler(tmp_path, "node1 slots=4\nnode2 slots=4\n", **launch)
        assert isinstance(found, Hostfile)
        assert found.hosts(World(nodes=2, ranks_per_node=4, threads_per_rank=1)) == (Host("node1", 4), Host("node2", 4))
        assert len(found.machine().gpus) == 4, "as [node] describes them"


def test_one_host_may_be_this_one_by_any_name(tmp_path: Path) -> None:
    assert isinstance(scheduler(tmp_path, "localhost slots=4\n", hostfile="hosts"), Hostfile)


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
def test_localhost_beside_others_is_refused(tmp_path: Path, name: str) -> None:
    assert refusal(tmp_path, f"node1\n{name} slots=4\n", hostfile="hosts") == (
        "hostfile 'hosts' names localhost beside other hosts, to whom that is another. Write the name that the other "
        "hosts know this machine by."
    )


@pytest.mark.parametrize(
    ("launch", "said"),
    [
        ({"scheduler": "hostfile"}, "launch.scheduler = 'hostfile' needs hosts. Give launch.hostfile = \"hosts\""),
        (
            {"scheduler": "local", "hostfile": "hosts"},
            "launch.hostfile = 'hosts' has no meaning under launch.scheduler = 'local'. Remove one of the two",
        ),
        ({"scheduler": "slurm", "hostfile": "hosts"}, "has no meaning under launch.scheduler = 'slurm'"),
        ({"hostfile": "none"}, "/none' cannot be read: No such file or directory"),
    ],
)
def test_what_contradicts_itself_is_refused(tmp_path: Path, launch: dict[str, str], said: str) -> None:
    assert said in refusal(tmp_path, "node1", **launch)


def test_a_node_is_described_with_or_without_gpus() -> None:
    assert described(None) is None
    cpu = described(NodeSection(cores=8))
    assert cpu is not None
    assert (cpu.cores, cpu.gpus, cpu.fast_bf16("cpu")) == (8, (), True)
    gpu = described(NodeSection(cores=8, gpus=2))
    assert gpu is not None
    assert (len({each.uuid for each in gpu.gpus}), gpu.fast_bf16("cuda")) == (2, True)
