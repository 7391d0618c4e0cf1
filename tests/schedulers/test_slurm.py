"""An allocation of a real Slurm: its hosts, the commands to the letter, and that nothing is left on any node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import pytest

from driving import processes_naming
from lab.slurm_cluster import SlurmCluster, slurm_cluster
from needs import root_and
from vitscale.errors import RequestError
from vitscale.launchers import LAUNCHERS
from vitscale.launchers.base import Spawn
from vitscale.machine.hosts import Host
from vitscale.processes import launch_file
from vitscale.schedulers import slurm
from vitscale.schedulers.base import SchedulerSilentError, described
from vitscale.schedulers.prepared import ranks_environment
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


def adapted(allocation: SlurmAllocation, launcher: str, gpus_per_node: int = 0) -> Spawn:
    rank = ("/opt/python", "-P", "-m", "vitscale.worker", str(RUN))
    spawn = Spawn((rank,), RUN, HOSTS, 29511, gpus_per_node=gpus_per_node)
    return allocation.adapt(LAUNCHERS[launcher].launch(TWO, spawn))


def commands(allocation: SlurmAllocation, launcher: str) -> list[list[str]]:
    return [*map(list, adapted(allocation, launcher).commands)]


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


def gpu_options(words: Iterable[str]) -> list[str]:
    return [word for word in words if "gpu" in word or "gres" in word]


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_step_gets_a_gpu_for_each_rank_where_slurm_has_given_the_job_gpus(
    monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "64")
    monkeypatch.setenv("SLURM_GPUS", "16")
    allocation = SlurmAllocation(SlurmSection(python="/opt/python"), NodeSection(cores=64, gpus=8))
    without = commands(allocation, launcher)
    spawn = adapted(allocation, launcher, gpus_per_node=2)
    assert [list(command) for command in spawn.commands] == [
        ["srun", "--gpus-per-node=2", *command[1:]] for command in without
    ]
    # More ranks than GPUs share them.
    assert {command[1] for command in adapted(allocation, launcher, gpus_per_node=9).commands} == {"--gpus-per-node=8"}


@pytest.mark.parametrize("launcher", ["srun", "torchrun", "mpirun"])
def test_ranks_on_cpus_and_jobs_without_gpus_ask_for_none(monkeypatch: pytest.MonkeyPatch, launcher: str) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setattr(slurm, "job_fields", lambda _: {"JobState": "RUNNING", "NumNodes": "2"})
    allocation = SlurmAllocation(SlurmSection(), NodeSection(cores=64, gpus=8))
    for gpus_per_node in (0, 4):  # 4: a cluster whose GPUs Slurm does not manage
        spawn = adapted(allocation, launcher, gpus_per_node)
        assert gpu_options([*chain(*spawn.commands), *spawn.environment.values()]) == []
    monkeypatch.setenv("SLURM_GPUS", "16")
    spawn = adapted(allocation, launcher)
    assert gpu_options([*chain(*spawn.commands), *spawn.environment.values()]) == []


def test_mpirun_passes_the_option_on_to_its_own_srun(
    allocation: SlurmAllocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_GPUS_PER_NODE", "a100:4")
    monkeypatch.setattr(SlurmAllocation, "machine", lambda _: described(NodeSection(cores=64, gpus=4)))
    monkeypatch.setenv("OMPI_MCA_plm_slurm_args", "--exclude=node9")
    environment = adapted(allocation, "mpirun", gpus_per_node=2).environment
    assert environment["OMPI_MCA_plm_slurm_args"] == (
        "--exclude=node9 --job-name=0123456789ab-r0-a0 --overlap --gpus-per-node=2"
    )


@pytest.mark.parametrize(
    ("fields", "has_gpus"),
    [
        ({"TresPerJob": "gres:gpu:8"}, True),
        ({"TresPerNode": "gres:gpu:a100:4"}, True),
        ({"TresPerTask": "gres/gpu=1"}, True),
        ({"TresPerNode": "gres:shard:4", "CpusPerTres": "gres:gpu:1"}, False),
        ({"JobState": "RUNNING"}, False),
    ],
)
def test_slurmctld_says_whether_a_job_has_gpus(fields: dict[str, str], has_gpus: bool) -> None:
    assert slurm.asks_for_gpus(fields) is has_gpus


def test_a_job_of_which_slurmctld_says_nothing_is_taken_to_have_no_gpus(
    allocation: SlurmAllocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked again for the next run: silence passes."""
    answers: list[dict[str, str] | None] = [None, {"TresPerNode": "gres:gpu:4"}]

    def answer(_: str) -> dict[str, str]:
        fields = answers.pop(0)
        if fields is None:
            raise SchedulerSilentError("slurmctld does not answer")
        return fields

    monkeypatch.setattr(slurm, "job_fields", answer)
    monkeypatch.setattr(SlurmAllocation, "machine", lambda _: described(NodeSection(cores=64, gpus=4)))
    commands_in_turn = [adapted(allocation, "srun", gpus_per_node=2).commands[0] for _ in range(3)]
    assert [gpu_options(command) for command in commands_in_turn] == [[], *[["--gpus-per-node=2"]] * 2]


def test_a_step_does_not_see_the_jobs_request_for_gpus(allocation: SlurmAllocation) -> None:
    requests = dict.fromkeys(
        (
            *("SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_GPUS_PER_NODE"),
            *("SLURM_GPU_BIND", "SLURM_NTASKS_PER_GPU", "SLURM_TRES_PER_TASK"),
        ),
        "1",
    )
    left = ranks_environment(requests, adapted(allocation, "srun").drop_variables)
    assert not requests.keys() & left.keys()
    assert left.keys() >= os.environ.keys() - {*launch_file.ALL_NAMES, "_RJEM_MALLOC_CONF"}


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
    return printed_in(cluster, [*salloc, sys.executable, "-c", program, *map(str, arguments)])


def printed_in(cluster: SlurmCluster, argv: list[str]) -> str:
    """What a command prints where the nodes' names are known."""
    answer = subprocess.run(
        cluster.command(argv),
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
from vitscale.processes import launch_file
from vitscale.schedulers import slurm
from vitscale.schedulers.base import SchedulerSilentError, described
from vitscale.schedulers.prepared import ranks_environment
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
from vitscale.processes import launch_file
from vitscale.schedulers import slurm
from vitscale.schedulers.base import SchedulerSilentError, described
from vitscale.schedulers.prepared import ranks_environment
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


GPUS = """
import sys
from pathlib import Path
from vitscale.launchers import LAUNCHERS
from vitscale.launchers.base import Spawn
from vitscale.processes.heartbeat_server import HeartbeatServer
from vitscale.schedulers.slurm import SlurmAllocation
from vitscale.study.sections import NodeSection, SlurmSection
from vitscale.trial.trial import World
allocation = SlurmAllocation(SlurmSection(), NodeSection(cores=8, gpus=4))
show = 'echo $SLURM_PROCID $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES > "$0/$SLURM_PROCID"'
for nodes in (1, 2):
    folder = Path(sys.argv[1]) / "runs" / f"0123456789ab-r{nodes}-a0"
    folder.mkdir(parents=True)
    world = World(nodes=nodes, ranks_per_node=2, threads_per_rank=1)
    rank = ("sh", "-c", show, str(folder))
    spawn = Spawn((rank,), folder, allocation.hosts(world), token="t" * 32, cwd=folder, gpus_per_node=2)
    spawn = allocation.adapt(LAUNCHERS["srun"].launch(world, spawn))
    job = allocation.start(spawn, HeartbeatServer(spawn.token, "127.0.0.1"))
    job.wait(60.0)
    job.end()
    if job.exit_code != 0:
        sys.exit(spawn.log.read_text())
    for rank in range(world.size):
        print((folder / str(rank)).read_text(), end="")
"""


@pytest.fixture(scope="module")
def gpu_cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster(cpus=8, gpus=4) as running:
        yield running


@pytest.mark.parametrize(
    "request_options",
    [
        ["--gpus=8", "--ntasks-per-node=4"],
        ["--gpus-per-task=1", "--ntasks-per-node=4"],
        ["--gpus=8", "--ntasks-per-gpu=1"],
        ["--gpus=8", "--gpu-bind=single:1", "--ntasks-per-node=4"],
        ["--gres=gpu:4", "--ntasks-per-node=4"],
    ],
    ids=" ".join,
)
def test_each_rank_sees_the_gpus_of_all_ranks_on_its_node(
    gpu_cluster: SlurmCluster, tmp_path: Path, request_options: list[str]
) -> None:
    """Two ranks a node, on one node and on both of a job with four GPUs each, however these were asked for."""
    salloc = ["salloc", "--quiet", "--nodes=2", *request_options]
    printed = printed_in(gpu_cluster, [*salloc, sys.executable, "-c", GPUS, str(tmp_path)])
    one_node = ["0 node0 0,1", "1 node0 0,1"]
    assert printed.splitlines() == [*one_node, *one_node, "2 node1 0,1", "3 node1 0,1"]
