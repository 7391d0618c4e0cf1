"""The same study trained for real on two nodes of Slurm: by srun in an allocation, and in a batch job."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from driving import processes_naming
from lab.slurm_cluster import SlurmCluster, slurm_cluster
from vitscale import store
from vitscale.store.results import Run

pytestmark = [pytest.mark.long(26), pytest.mark.ranks]

STUDY = Path(__file__).parents[2] / "examples" / "two_hosts.toml"
"""Also run under torchrun, deepspeed and mpirun: tests/lab/test_launchers_across_hosts.py."""
SALLOC = ("salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1")
SITE = """
[launch]
launcher = "srun"
[node]
cores = 4
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster() as running:
        yield running


def trained(cluster: SlurmCluster, folder: Path, results: str, *arguments: str, within: tuple[str, ...] = ()) -> Run:
    """The one run of the study, done by `vitscale run`."""
    command = [*within, sys.executable, "-m", "vitscale", "run", str(STUDY), "-o", results, *arguments]
    answer = done_in(cluster, folder, command)
    logs = "".join(path.read_text() for path in (folder / results).glob("runs/*/log.txt"))
    assert answer.returncode == 0, answer.stdout + logs
    (run,) = store.load(folder / results).runs
    return run


def done_in(cluster: SlurmCluster, folder: Path, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """A command's end, in a folder, where the nodes' names are known; stdout has both streams."""
    return subprocess.run(
        cluster.command(command, cwd=folder),
        env=os.environ | cluster.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )


def check_two_ranks(run: Run) -> None:
    assert run.outcome.kind == "completed"
    assert run.header.hosts == ("node0", "node1")
    assert [record.rank for record in run.ranks] == [0, 1]
    assert all(len(record.steps) == 4 for record in run.ranks)
    assert all(record.start is not None and record.start.world_size == 2 for record in run.ranks)


def test_an_allocation_and_a_batch_job(cluster: SlurmCluster, tmp_path: Path) -> None:
    site = tmp_path / "site.toml"
    site.write_text(SITE)
    inside = trained(cluster, tmp_path, "inside", "--launcher", "srun", within=SALLOC)
    submitted = trained(cluster, tmp_path, "submitted", "--site", str(site), "--scheduler", "slurm")
    for run in (inside, submitted):
        check_two_ranks(run)
        assert run.header.command[:2] == ("srun", f"--job-name={run.header.trial_id}-r0-a0")
    assert losses(inside) == losses(submitted)
    assert processes_naming(tmp_path) == []


def losses(run: Run) -> list[list[float | None]]:
    """The losses of each rank's steps."""
    return [[step.loss for step in record.steps] for record in run.ranks]


def test_torchrun_in_a_batch_job_of_two_nodes(cluster: SlurmCluster, tmp_path: Path) -> None:
    """An agent on each node, started by srun: what users write as `srun torchrun --nnodes=2 ...`."""
    site = tmp_path / "site.toml"
    site.write_text(SITE)
    options = ("--site", str(site), "--scheduler", "slurm", "--launcher", "torchrun")
    run = trained(cluster, tmp_path, "submitted", *options)
    check_two_ranks(run)
    assert run.header.command[:3] == ("srun", f"--job-name={run.header.trial_id}-r0-a0", "--nodelist=node0")
    assert "--master-addr=node0" in run.header.command
    assert processes_naming(tmp_path) == []


SCRIPT = """
import os
import torch.distributed as dist
from vitscale import Probe

dist.init_process_group("gloo")
probe = Probe()
steps = sum(1 for batch in probe.steps([1, 2, 3]))
rank, ranks, node = dist.get_rank(), dist.get_world_size(), os.environ["SLURMD_NODENAME"]
print(f"rank {rank} of {ranks} on {node}: {steps} steps, {probe.done}")
dist.destroy_process_group()
"""


def test_a_script_with_a_probe_that_srun_and_torchrun_start_trains_as_ever(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    batch_line = (
        f"srun --ntasks-per-node=1 {sys.executable} -m torch.distributed.run --nnodes=$SLURM_NNODES "
        "--nproc-per-node=1 --rdzv-backend=c10d "
        f"--rdzv-endpoint=$(scontrol show hostnames | head -n 1):{port} train.py"
    )
    answer = done_in(cluster, tmp_path, [*SALLOC, "sh", "-c", batch_line])
    assert answer.returncode == 0, answer.stdout
    printed = sorted(line for line in answer.stdout.splitlines() if line.startswith("rank "))
    assert [line.partition(" on ")[0] for line in printed] == ["rank 0 of 2", "rank 1 of 2"]
    # The rendezvous decides which node has the first rank.
    assert {line.partition(" on ")[2] for line in printed} == {"node0: 3 steps, False", "node1: 3 steps, False"}
    assert list(tmp_path.iterdir()) == [tmp_path / "train.py"], "nothing is measured"


def test_vitscale_run_that_srun_starts_on_each_node_is_refused(cluster: SlurmCluster, tmp_path: Path) -> None:
    """On the second node; on the first it would go on, as in a shell of `srun --pty`."""
    second_alone = ["sh", "-c", '[ "$SLURM_PROCID" = 0 ] || exec "$@"', "sh"]
    command = [sys.executable, "-m", "vitscale", "run", str(STUDY), "-o", "results"]
    answer = done_in(cluster, tmp_path, [*SALLOC, "srun", "--ntasks=2", *second_alone, *command])
    assert "this is process 1 of several that srun has started" in answer.stdout
    assert list(tmp_path.iterdir()) == []
