"""The exact argv of job steps, with the study's options and container; and options that srun may not have."""

from __future__ import annotations

from pathlib import Path

import pytest

from vitscale.errors import RequestError
from vitscale.launchers.base import Spawn
from vitscale.schedulers import described
from vitscale.schedulers.slurm_steps import launcher_refusal, most_gpus, srun_on_host, step_command
from vitscale.study.sections import NodeSection, SlurmSection

SRUN = ["srun", "--nodes=2", "--overlap", "--cpu-bind=none", "--mpi=none"]
PROGRAM = ["python", "-m", "vitscale.worker", "--", "--cpu-bind=none"]
RESULTS = Path("/shared/results")
CWD = Path("/home/user")


def step(*, gpus_per_node: int = 0, **slurm: object) -> list[str]:
    section = SlurmSection.model_validate(slurm)
    srun = [*SRUN, *PROGRAM]
    return list(step_command(srun, section, gpus_per_node=gpus_per_node, folders=(RESULTS,), cwd=CWD))


def test_without_anything_it_stays_as_it_is() -> None:
    assert step() == [*SRUN, *PROGRAM]


def test_its_gpus_stand_first() -> None:
    assert step(gpus_per_node=4) == ["srun", "--gpus-per-node=4", *SRUN[1:], *PROGRAM]


@pytest.mark.parametrize(("node_gpus", "gpus"), [(None, 6), (0, 6), (8, 6), (4, 4)])
def test_a_step_gets_a_gpu_for_each_rank_and_no_more_than_a_node_has(node_gpus: int | None, gpus: int) -> None:
    node = described(None if node_gpus is None else NodeSection(cores=64, gpus=node_gpus))
    assert most_gpus(Spawn((("python",),), RESULTS, gpus_per_node=6), node) == gpus


def test_further_options_come_before_the_program() -> None:
    assert step(srun_options=["--network=single_node_vni", "--mem-bind=local"]) == [
        *SRUN,
        "--network=single_node_vni",
        "--mem-bind=local",
        *PROGRAM,
    ]


def test_the_studys_binding_replaces_ours_and_not_a_word_of_the_program() -> None:
    mask = "--cpu-bind=mask_cpu:fe000000000000,fe00000000000000"
    assert step(srun_options=[mask]) == ["srun", "--nodes=2", "--overlap", "--mpi=none", mask, *PROGRAM]


def test_options_then_the_container() -> None:
    apptainer = ["apptainer", "exec", "--bind", "/shared/results:/shared/results", "--bind", "/home/user:/home/user"]
    assert step(container="vit.sif", gpus="none", srun_options=["--mem=0"]) == [
        *SRUN,
        "--mem=0",
        *apptainer,
        *("--pwd", "/home/user", "vit.sif"),
        *PROGRAM,
    ]


def test_pyxis_after_the_options() -> None:
    assert step(container="vit.sqsh", container_runtime="pyxis", srun_options=["--mem=0"]) == [
        *SRUN,
        *("--mem=0", "--container-image=vit.sqsh"),
        "--container-mounts=/shared/results:/shared/results,/home/user:/home/user",
        "--container-workdir=/home/user",
        *PROGRAM,
    ]


@pytest.mark.parametrize(
    ("option", "part"),
    [
        ("--nodes=1", "it follows from each trial's world"),
        ("--gpus-per-task=1", "say slurm.gpus"),
        ("--nodelist=node1", "say slurm.nodelist"),
        ("--job-name=mine", "vitscale sets what concerns it"),
        ("--mpi=pmix", "vitscale sets what concerns it"),
        ("--container-image=x", "say slurm.container"),
        ("-n4", "Write one each, by its long name"),
        ("--cpu-bind=none --mem=0\n", "Write one each"),
        ("echo", "Write one each"),
        ("", "Write one each"),
    ],
)
def test_options_that_are_refused(option: str, part: str) -> None:
    with pytest.raises(RequestError) as caught:
        step(srun_options=[option])
    assert "slurm.srun_options has" in str(caught.value)
    assert part in str(caught.value)


def test_a_step_on_a_host() -> None:
    assert srun_on_host("node7", "run", ["true"]) == (
        *("srun", "--job-name=run", "--nodelist=node7", "--nodes=1", "--ntasks=1", "--overlap"),
        *("--cpu-bind=none", "--mpi=none", "--export=ALL", "true"),
    )


@pytest.mark.parametrize(
    ("slurm", "launcher", "part"),
    [
        ({"container": "vit.sif"}, "mpirun", "ranks are started by srun"),
        ({"srun_options": ["--mem=0"]}, "mpirun", "without slurm.srun_options"),
        ({"srun_options": ["--mem=0", "--cpu-bind=cores"]}, "torchrun", "'--cpu-bind=cores', which binds each task"),
        ({"srun_options": ["--mem=0"]}, "torchrun", None),
        ({"srun_options": ["--cpu-bind=cores"], "container": "vit.sif"}, "srun", None),
        ({}, "mpirun", None),
    ],
)
def test_launchers_that_do_not_go_with_it(slurm: dict[str, object], launcher: str, part: str | None) -> None:
    refusal = launcher_refusal(SlurmSection.model_validate(slurm), launcher)
    if part is None:
        assert refusal is None
    else:
        assert part in (refusal or "")


def test_a_hydra_mpirun_is_refused_inside_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps have no name by which they could be ended."""
    monkeypatch.setattr("vitscale.schedulers.slurm_steps.mpirun_name", lambda: "MPICH")
    refusal = launcher_refusal(SlurmSection(), "mpirun")
    assert refusal is not None
    assert "this is MPICH's; use launcher = 'srun'" in refusal
    assert launcher_refusal(SlurmSection(), "srun") is None
