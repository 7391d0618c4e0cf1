from __future__ import annotations

import sys
from pathlib import Path

import pytest

from launching import FOLDER, hosts, launch, world
from study_factory import EIGHT_CORES, gpus
from vitscale.errors import RequestError
from vitscale.launchers.srun import Srun
from vitscale.machine.hardware import Machine
from vitscale.schedulers import LoginNode

NODE = Machine(cores=64, cpu_quota_cores=None, gpus=gpus(4), cpu_has_fast_bf16=True)


def test_trials_are_planned_for_the_node_that_is_described() -> None:
    assert LoginNode(NODE, None).machine() is NODE
    with pytest.raises(RequestError) as caught:
        LoginNode(None, None).machine()
    assert "nodes that this machine knows nothing of" in str(caught.value)
    assert "[node] with cores = 64 and gpus = 4" in str(caught.value)


def test_a_node_takes_a_rank_on_each_gpu_and_without_any_as_many_as_the_study_says() -> None:
    assert LoginNode(NODE, None).slots() == 4
    assert LoginNode(EIGHT_CORES, None).slots() is None


def test_the_interpreter_is_that_of_the_nodes() -> None:
    assert LoginNode(NODE, "/opt/python").python == "/opt/python"
    assert LoginNode(NODE, None).python == sys.executable


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
    said = LoginNode(NODE, None).refuses(launcher, world(nodes, 1))
    assert said == (None if taken else "jobs of Slurm start their ranks by srun; use launcher = 'srun'")


def test_hosts_are_known_only_in_the_job_and_nothing_starts_here(tmp_path: Path) -> None:
    scheduler = LoginNode(NODE, None)
    assert scheduler.hosts(world(2, 2)) == ()
    made = launch(Srun(), world(2, 2))
    assert scheduler.commands(made, world(2, 2), (), FOLDER) == [list(made.commands[0])]
    with pytest.raises(RequestError, match="not started on a login node"):
        scheduler.start([["true"]], hosts(1), token="0", log=tmp_path / "log", cwd=tmp_path, environment={})  # noqa: S106
    assert not [*tmp_path.iterdir()]
