"""An allocation of a real Slurm: its hosts, the commands to the letter, and that nothing is left on any node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from driving import processes_naming
from lab.slurm_cluster import SlurmCluster, slurm_cluster
from needs import root_and
from vitscale.errors import RequestError
from vitscale.launchers import LAUNCHERS
from vitscale.launchers.base import Spawn
from vitscale.machine.hosts import Host
from vitscale.schedulers import slurm
from vitscale.schedulers.slurm import SlurmAllocation
from vitscale.study.sections import NodeSection, SlurmSection
from vitscale.trial.trial import World

HOSTS = (Host("node0"), Host("node1"))
RUN = Path("/shared/results/runs/0123456789ab-r0-a0")
TWO = World(nodes=2, ranks_per_node=1, threads_per_rank=2)


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster() as running:
        yield running


@pytest.fixture
def allocation(monkeypatch: pytest.MonkeyPatch) -> SlurmAllocation:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    return SlurmAllocation(SlurmSection(python="/opt/python"), None)


def commands(allocation: SlurmAllocation, launcher: str) -> list[list[str]]:
    spawn = Spawn((("/opt/python", "-P", "-m", "vitscale.worker", str(RUN)),), RUN, HOSTS, 29511)
    return [*map(list, allocation.adapt(LAUNCHERS[launcher].launch(TWO, spawn)).commands)]


def test_srun_is_a_step_of_the_runs_name(allocation: SlurmAllocation) -> None:
    assert commands(allocation, "srun") == [
        [
            *("srun", "--job-name=0123456789ab-r0-a0", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1"),
            *("--nodelist=node0,node1", "--distribution=block", "--overlap"),
            *("--cpu-bind=none", "--mpi=none", "--export=ALL", "--kill-on-bad-exit=1"),
            *("/opt/python", "-P", "-m", "vitscale.worker", str(RUN)),
        ]
    ]


def test_torchrun_has_an_agent_on_each_node(allocation: SlurmAllocation) -> None:
    assert commands(allocation, "torchrun") == [
        [
            *("srun", "--job-name=0123456789ab-r0-a0", f"--nodelist=node{node}", "--nodes=1", "--ntasks=1"),
            *("--overlap", "--cpu-bind=none", "--mpi=none", "--export=ALL"),
            *("/opt/python", "-P", "-m", "vitscale.processes.host_agent", str(RUN), "--"),
            *("/opt/python", "-P", "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}"),
            *("--rdzv-backend=static", "--rdzv-conf=timeout=300", "--master-addr=node0", "--master-port=29511"),
            *("--nproc-per-node=1", "--max-restarts=0", "-m", "vitscale.worker", str(RUN)),
        ]
        for node in (0, 1)
    ]


def test_a_container_stands_before_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    allocation = SlurmAllocation(SlurmSection(python="python3", container="vit.sif", gpus="none"), None)
    first, _ = commands(allocation, "torchrun")
    start = first.index("apptainer")
    assert first[start : start + 2] == ["apptainer", "exec"]
    assert first[first.index("vit.sif") + 1 :][:4] == ["python3", "-P", "-m", "vitscale.processes.host_agent"]
    assert allocation.refuses("mpirun", TWO) is not None


def test_runs_side_by_side_have_nodes_of_their_own(
    allocation: SlurmAllocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[0-3]")
    monkeypatch.setattr(slurm, "host_names", lambda nodelist: tuple(f"node{n}" for n in range(4)))
    pool = allocation.pool()
    assert pool == tuple(Host(f"node{n}") for n in range(4))
    assert allocation.limited_to(pool[2:]).hosts(TWO) == pool[2:]
    assert allocation.hosts(TWO) == pool[:2]
    with pytest.raises(RequestError, match="2 nodes are needed, and job 12 has 1"):
        allocation.limited_to(pool[:1]).hosts(TWO)


def test_what_is_refused(allocation: SlurmAllocation) -> None:
    assert "past Slurm" in (allocation.refuses("deepspeed", TWO) or "")
    assert [allocation.refuses(name, TWO) for name in ("srun", "torchrun", "mpirun")] == [None] * 3


def test_tasks_per_node_limit_the_ranks_where_they_were_asked_for(
    allocation: SlurmAllocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "4(x2),3")
    monkeypatch.delenv("SLURM_NTASKS", raising=False)
    assert allocation.slots() is None
    monkeypatch.setenv("SLURM_NTASKS", "11")
    assert allocation.slots() == 3


def test_a_node_that_the_study_describes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "48(x2)")
    machine = SlurmAllocation(SlurmSection(), NodeSection(cores=64, gpus=4)).machine()
    assert (machine.cores, len(machine.gpus)) == (48, 4)


def in_allocation(cluster: SlurmCluster, program: str, *arguments: Path | str) -> str:
    """What a program prints that runs in an allocation of both nodes."""
    salloc = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2"]
    answer = subprocess.run(
        cluster.command([*salloc, sys.executable, "-c", program, *map(str, arguments)]),
        env=os.environ | cluster.environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


FACTS = """
import json
from vitscale.errors import RequestError
from vitscale.schedulers import slurm
from vitscale.schedulers.slurm import SlurmAllocation
from vitscale.schedulers.slurm_cluster import SlurmCluster
from vitscale.study.sections import SlurmSection
from vitscale.trial.trial import World
def refused(**world):
    try:
        allocation.hosts(World(**world))
    except RequestError as error:
        return str(error)
allocation = SlurmAllocation(SlurmSection(), None)
print(json.dumps({
    "here": SlurmCluster(SlurmSection(), None).own_job() is not None,
    "slots": allocation.slots(),
    "cores": allocation.machine().cores,
    "hosts": [host.name for host in allocation.hosts(World(nodes=2, ranks_per_node=1, threads_per_rank=2))],
    "nodes": refused(nodes=3, ranks_per_node=1, threads_per_rank=1),
    "threads": refused(nodes=1, ranks_per_node=1, threads_per_rank=3),
}))
"""


def test_what_an_allocation_offers(cluster: SlurmCluster) -> None:
    found = json.loads(in_allocation(cluster, FACTS))
    assert found["here"] is True
    assert found["hosts"] == ["node0", "node1"]
    assert (found["slots"], found["cores"]) == (1, 2)
    assert found["nodes"].startswith("3 nodes are needed, and job ")
    assert "1 x 3 threads are needed on each node, and job" in found["threads"]


# The sleepers take the run's token off, so that only Slurm can find them, as on another host.
ORPHANS = """
import os, re, sys, time
from pathlib import Path
import psutil
from vitscale.launchers import Spawn
from vitscale.processes.heartbeat_server import HeartbeatServer
from vitscale.schedulers import slurm
from vitscale.schedulers.slurm import SlurmAllocation
from vitscale.schedulers.slurm import steps_named
from vitscale.study.sections import SlurmSection
from vitscale.trial.trial import World
folder, launcher = Path(sys.argv[1]), sys.argv[2:]
program = ["sh", "-c", 'touch "$0/$SLURM_PROCID" && exec env -u VITSCALE_JOB sleep 600.25', str(folder)]
allocation = SlurmAllocation(SlurmSection(), None)
hosts = allocation.hosts(World(nodes=2, ranks_per_node=1, threads_per_rank=2))
spawn = allocation.adapt(Spawn((tuple(launcher + program),), folder, hosts=hosts, token="t" * 32, cwd=folder))
job = allocation.start(spawn, HeartbeatServer(spawn.token, "127.0.0.1"))
while not all((folder / rank).exists() for rank in "01"):
    time.sleep(0.01)
# Children first: srun has one that ends the step when srun is gone.
for process in reversed(psutil.Process().children(recursive=True)):
    if process.name() == launcher[0]:
        process.kill()
job.wait(60.0)
job_id = os.environ["SLURM_JOB_ID"]
"""
ENDED = (
    ORPHANS
    + """
print(job.exit_code, len(steps_named(job_id, folder.name)), job.end(), len(steps_named(job_id, folder.name)))
"""
)
SILENT = (
    ORPHANS
    + """
slurm._END_SECONDS = 1.0
known = os.environ["SLURM_CONF"]
(daemon,) = (
    process for process in psutil.process_iter()
    if process.name() == "slurmd" and "node1" in process.cmdline() and process.environ().get("SLURM_CONF") == known
)
daemon.suspend()
try:
    print(allocation.end_elsewhere(spawn, -9), len(steps_named(job_id, folder.name)))
    slurm.ask("scontrol", "update", "nodename=node1", "state=noresp")
    print(allocation.end_elsewhere(spawn, -9), len(steps_named(job_id, folder.name)))
    unanswered = folder / "slurm.conf"
    unanswered.write_text(re.sub("SlurmctldPort=[0-9]+", "SlurmctldPort=1", Path(known).read_text()))
    os.environ["SLURM_CONF"] = str(unanswered)
    print(allocation.end_elsewhere(spawn, -9))
finally:
    daemon.resume()
os.environ["SLURM_CONF"] = known
slurm._END_SECONDS = 60.0
print(job.end(), len(steps_named(job_id, folder.name)))
"""
)


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_a_step_whose_launcher_was_killed_is_ended(cluster: SlurmCluster, tmp_path: Path, launcher: str) -> None:
    root_and(launcher)
    (tmp_path / "hosts").write_text("node0 slots=1\nnode1 slots=1\n")
    command = {
        "srun": ["srun", f"--job-name={tmp_path.name}", "--nodes=2", "--ntasks=2", "--overlap"],
        "mpirun": [
            *("mpirun", "-np", "2", "--hostfile", str(tmp_path / "hosts"), "--map-by", "ppr:1:node"),
            *("--bind-to", "none", "--allow-run-as-root"),
        ],
    }
    assert in_allocation(cluster, ENDED, tmp_path, *command[launcher]) == "-9 1 () 0\n"
    assert processes_naming("600.25") == []


def test_of_hosts_whose_step_does_not_end_those_are_told_that_are_silent(cluster: SlurmCluster, tmp_path: Path) -> None:
    """None as long as slurmctld takes the node for one that answers: it looks every hundred seconds, and is told here.
    Nor where it does not answer itself."""
    root_and("srun")
    srun = ["srun", f"--job-name={tmp_path.name}", "--nodes=2", "--ntasks=2", "--overlap"]
    assert in_allocation(cluster, SILENT, tmp_path, *srun) == "() 1\n('node1',) 1\n()\n() 0\n"
    assert processes_naming("600.25") == []
