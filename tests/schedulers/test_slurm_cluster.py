from __future__ import annotations

import sys

import pytest

from launching import launch, world
from vitscale.errors import RequestError
from vitscale.launchers.srun import Srun
from vitscale.schedulers import Placement, described
from vitscale.schedulers.slurm_cluster import SlurmCluster
from vitscale.study.sections import NodeSection, SlurmSection

NODE = NodeSection(cores=64, gpus=4)
SLURM = SlurmSection()


def test_trials_are_planned_for_the_node_that_is_described() -> None:
    assert SlurmCluster(SLURM, NODE).machine() == described(NODE)
    with pytest.raises(RequestError) as caught:
        SlurmCluster(SLURM, None).machine()
    assert "nodes that this machine knows nothing of" in str(caught.value)
    assert "[node] with cores = 64 and gpus = 4" in str(caught.value)


def test_a_node_takes_a_rank_on_each_gpu_and_without_any_as_many_as_the_study_says() -> None:
    assert SlurmCluster(SLURM, NODE).slots() == 4
    assert SlurmCluster(SLURM, NodeSection(cores=8)).slots() is None


def test_the_interpreter_is_that_of_the_nodes() -> None:
    assert SlurmCluster(SlurmSection(python="/opt/python"), NODE).python == "/opt/python"
    assert SlurmCluster(SLURM, NODE).python == sys.executable


@pytest.mark.parametrize(
    ("launcher", "nodes", "taken"),
    [
        ("srun", 1, True),
        ("srun", 2, True),
        ("torchrun", 1, True),
        ("in-process", 1, True),
        ("torchrun", 2, False),
        ("mpirun", 1, False),
        ("deepspeed", 2, False),
    ],
)
def test_jobs_start_their_ranks_by_srun(launcher: str, nodes: int, taken: bool) -> None:
    said = SlurmCluster(SLURM, NODE).refuses(launcher, world(nodes, 1))
    assert said == (None if taken else "jobs of Slurm start their ranks by srun; use launcher = 'srun'")


def test_hosts_are_known_only_in_the_job_and_nothing_starts_here() -> None:
    scheduler = SlurmCluster(SLURM, NODE)
    assert scheduler.hosts(world(2, 2)) == ()
    made = launch(Srun(), world(2, 2))
    assert scheduler.adapt(made).commands == made.commands
    assert not isinstance(scheduler, Placement)
    assert not hasattr(scheduler, "start")
