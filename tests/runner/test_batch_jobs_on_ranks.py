"""The same study trained for real on two nodes: by agents of torchrun in an allocation, and by srun in a batch job."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from driving import TINY_MODEL, processes_naming
from lab.slurm_cluster import SlurmCluster, slurm_cluster
from vitscale import store
from vitscale.record import Run

pytestmark = pytest.mark.ranks

STUDY = f"""
name = "two-nodes"
{TINY_MODEL}
[data]
name = "digits"
[train]
precision = "fp32"
device = "cpu"
micro_batch = 8
[scaling]
gpus = [2]
gpus_per_node = 1
[launch]
launcher = "srun"
threads_per_rank = 1
[node]
cores = 4
[measure]
steps = 3
warmup_steps = 1
repeats = 1
explain = false
evaluate = false
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster() as running:
        yield running


def trained(cluster: SlurmCluster, folder: Path, results: str, *arguments: str, within: tuple[str, ...] = ()) -> Run:
    """The one run of the study, done by `vitscale run`."""
    (folder / "study.toml").write_text(STUDY)
    command = [*within, sys.executable, "-m", "vitscale", "run", "study.toml", "-o", results, *arguments]
    answer = subprocess.run(
        cluster.command(command, cwd=folder),
        env=os.environ | cluster.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    logs = "".join(path.read_text() for path in (folder / results).glob("runs/*/log.txt"))
    assert answer.returncode == 0, answer.stdout + logs
    (run,) = store.load(folder / results).runs
    return run


def check_two_ranks(run: Run) -> None:
    assert run.outcome.kind == "completed"
    assert run.header.hosts == ("node0", "node1")
    assert [record.rank for record in run.ranks] == [0, 1]
    assert all(len(record.steps) == 4 for record in run.ranks)
    assert all(record.start is not None and record.start.world_size == 2 for record in run.ranks)


def test_an_allocation_and_a_batch_job(cluster: SlurmCluster, tmp_path: Path) -> None:
    salloc = ("salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1")
    inside = trained(cluster, tmp_path, "inside", "--launcher", "torchrun", within=salloc)
    check_two_ranks(inside)
    assert inside.header.command[0] == "srun"
    assert "torch.distributed.run" in inside.header.command
    submitted = trained(cluster, tmp_path, "submitted", "--scheduler", "slurm")
    check_two_ranks(submitted)
    assert submitted.header.command[:2] == ("srun", f"--job-name={submitted.header.trial_id}-r0-a0")
    assert processes_naming(tmp_path) == []
