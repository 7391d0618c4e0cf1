"""The exact argv with which ranks start in a container."""

from __future__ import annotations

from pathlib import Path

import pytest

from vitscale.errors import RequestError
from vitscale.schedulers.slurm import srun_in_container
from vitscale.study.sections import SlurmSection

SRUN = ["srun", "--nodes=2", "--ntasks=4", "python", "-m", "vitscale.worker", "/shared/results/runs/x"]
RESULTS = Path("/shared/results")
CWD = Path("/home/user/my work")


def of(**slurm: object) -> list[str]:
    return list(srun_in_container(SRUN, SlurmSection.model_validate(slurm), (RESULTS,), CWD))


def test_without_one() -> None:
    assert of() == SRUN


def test_apptainer() -> None:
    assert of(container="/images/vit.sif", container_mounts=["/data:/data:ro"]) == [
        *("srun", "--nodes=2", "--ntasks=4", "apptainer", "exec", "--nv"),
        *("--bind", "/shared/results:/shared/results"),
        *("--bind", "/home/user/my work:/home/user/my work"),
        *("--bind", "/data:/data:ro"),
        *("--pwd", "/home/user/my work", "/images/vit.sif"),
        *("python", "-m", "vitscale.worker", "/shared/results/runs/x"),
    ]


def test_apptainer_without_gpus() -> None:
    assert "--nv" not in of(container="vit.sif", gpus="none")


def test_pyxis() -> None:
    found = of(container="registry.example#vit/torch:1.0", container_runtime="pyxis", container_mounts=["/data:/data"])
    assert found == [
        *("srun", "--nodes=2", "--ntasks=4", "--container-image=registry.example#vit/torch:1.0"),
        "--container-mounts=/shared/results:/shared/results,/home/user/my work:/home/user/my work,/data:/data",
        "--container-workdir=/home/user/my work",
        *("python", "-m", "vitscale.worker", "/shared/results/runs/x"),
    ]


@pytest.mark.parametrize("mount", ["/data", "data:/data", "/a:b", "/a,b:/c", ""])
def test_mounts_that_are_none(mount: str) -> None:
    with pytest.raises(RequestError, match=r"slurm\.container_mounts has"):
        of(container="vit.sif", container_mounts=[mount])


def test_a_folder_that_cannot_be_mounted() -> None:
    with pytest.raises(RequestError, match="cannot be mounted"):
        srun_in_container(SRUN, SlurmSection(container="vit.sif"), (Path("/a:b"),), CWD)
