"""The exact argv of job steps, with the study's options and container; and options that srun may not have."""

from __future__ import annotations

from pathlib import Path

import pytest

from vitscale.errors import RequestError
from vitscale.schedulers.slurm_steps import launcher_refusal, srun_on_host, step_command
from vitscale.study.sections import SlurmSection

SRUN = ["srun", "--nodes=2", "--overlap", "--cpu-bind=none", "--mpi=none"]
PROGRAM = ["python", "-m", "vitscale.worker", "--", "--cpu-bind=none"]
RESULTS = Path("/shared/results")
CWD = Path("/home/user")


def step(**slurm: object) -> list[str]:
    return list(step_command([*SRUN, *PROGRAM], SlurmSection.model_validate(slurm), (RESULTS,), CWD))


def test_without_anything_it_stays_as_it_is() -> None:
    assert step() == [*SRUN, *PROGRAM]


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


def test_a_step_on_a_host_that_is_known_and_on_one_that_is_not() -> None:
    ending = ("--nodes=1", "--ntasks=1", "--overlap", "--cpu-bind=none", "--mpi=none", "--export=ALL", "true")
    assert srun_on_host("node7", "run", ["true"]) == ("srun", "--job-name=run", "--nodelist=node7", *ending)
    assert srun_on_host(None, "run", ["true"]) == ("srun", "--job-name=run", *ending)


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
