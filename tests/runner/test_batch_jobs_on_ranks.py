"""The same study trained for real on two nodes of Slurm: by srun in an allocation, and in a batch job."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from driving import processes_naming
from lab.slurm_cluster import SlurmCluster, slurm_cluster
from vitscale import store
from vitscale.store.results import Run

pytestmark = [pytest.mark.long(17), pytest.mark.ranks]

STUDY = Path(__file__).parents[2] / "examples" / "two_hosts.toml"
"""Also run under torchrun, deepspeed and mpirun: tests/lab/test_launchers_across_hosts.py."""
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
    site = tmp_path / "site.toml"
    site.write_text(SITE)
    salloc = ("salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1")
    inside = trained(cluster, tmp_path, "inside", "--launcher", "srun", within=salloc)
    submitted = trained(cluster, tmp_path, "submitted", "--site", str(site), "--scheduler", "slurm")
    for run in (inside, submitted):
        check_two_ranks(run)
        assert run.header.command[:2] == ("srun", f"--job-name={run.header.trial_id}-r0-a0")
    losses = [[[step.loss for step in record.steps] for record in run.ranks] for run in (inside, submitted)]
    assert losses[0] == losses[1]
    assert processes_naming(tmp_path) == []
