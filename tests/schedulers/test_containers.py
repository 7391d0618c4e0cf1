"""The exact words that put a program into a container."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from vitscale.errors import RequestError
from vitscale.schedulers.containers import RankContainer
from vitscale.study.sections import ContainerFields

PROGRAM = ("python", "-m", "vitscale.worker", "/shared/results/runs/x")
FOLDERS = (Path("/shared/results"),)
CWD = Path("/home/user/my work")


def container(*, without_gpus: bool = False, **fields: object) -> RankContainer:
    found = RankContainer.from_section(ContainerFields.model_validate(fields), "slurm", without_gpus=without_gpus)
    assert found is not None
    return found


def wrapped(*, without_gpus: bool = False, **fields: object) -> tuple[str, ...]:
    return container(without_gpus=without_gpus, **fields).wrapped(PROGRAM, FOLDERS, CWD)


def test_none() -> None:
    assert RankContainer.from_section(ContainerFields(), "slurm") is None
    # A site file may say how, and a study whether.
    fields = ContainerFields(container_runtime="podman", container_mounts=["/data:/data"])
    assert RankContainer.from_section(fields, "slurm") is None


@pytest.mark.parametrize("runtime", ["apptainer", "singularity"])
def test_apptainer_and_singularity(runtime: str) -> None:
    assert wrapped(container="/images/vit.sif", container_runtime=runtime, container_mounts=["/data:/data:ro"]) == (
        *(runtime, "exec", "--nv"),
        *("--bind", "/shared/results:/shared/results"),
        *("--bind", "/home/user/my work:/home/user/my work"),
        *("--bind", "/data:/data:ro"),
        *("--pwd", "/home/user/my work", "/images/vit.sif"),
        *PROGRAM,
    )


@pytest.mark.parametrize(
    ("fields", "flags"),
    [
        ({}, ["--nv"]),
        ({"container_gpus": "amd"}, ["--rocm"]),
        ({"container_gpus": "none"}, []),
        ({"without_gpus": True}, []),
        ({"without_gpus": True, "container_gpus": "nvidia"}, ["--nv"]),
    ],
)
def test_the_flag_of_each_vendor(fields: dict[str, object], flags: list[str]) -> None:
    words = wrapped(container="vit.sif", **fields)  # type: ignore[arg-type]  # fields of a section, and one flag
    assert list(words[2 : words.index("--bind")]) == flags


def test_the_images_own_start() -> None:
    assert wrapped(container="vit.sif", container_command="run")[:3] == ("apptainer", "run", "--nv")


PODMAN = (
    *("podman", "run", "--rm", "--network=host", "--ipc=host", "--pid=host", "--env-host", "--cgroups=disabled"),
    "--security-opt=label=disable",
)
VOLUMES = (
    *("--volume=/shared/results:/shared/results", "--volume=/home/user/my work:/home/user/my work"),
    "--workdir=/home/user/my work",
)


@pytest.mark.parametrize(
    ("fields", "devices", "start"),
    [
        ({}, ("--device=nvidia.com/gpu=all",), ("--entrypoint=",)),
        (
            {"container_gpus": "amd", "container_command": "run"},
            ("--device=/dev/kfd", "--device=/dev/dri", "--group-add=keep-groups"),
            (),
        ),
        ({"container_gpus": "none"}, (), ("--entrypoint=",)),
    ],
)
def test_podman(fields: dict[str, object], devices: tuple[str, ...], start: tuple[str, ...]) -> None:
    words = wrapped(container="registry.example/vit:1.0", container_runtime="podman", **fields)  # type: ignore[arg-type]  # as above
    assert words == (*PODMAN, *devices, *VOLUMES, *start, "registry.example/vit:1.0", *PROGRAM)


@pytest.mark.parametrize(("command", "entrypoint"), [("exec", ()), ("run", ("--container-entrypoint",))])
def test_pyxis_has_options_of_srun(command: str, entrypoint: tuple[str, ...]) -> None:
    image = container(
        container="registry.example#vit/torch:1.0",
        container_runtime="pyxis",
        container_command=command,
        container_mounts=["/data:/data"],
    )
    assert image.wrapped(PROGRAM, FOLDERS, CWD) == PROGRAM
    assert image.srun_options(FOLDERS, CWD) == (
        "--container-image=registry.example#vit/torch:1.0",
        "--container-mounts=/shared/results:/shared/results,/home/user/my work:/home/user/my work,/data:/data",
        "--container-workdir=/home/user/my work",
        *entrypoint,
    )


def test_other_runtimes_have_no_options_of_srun() -> None:
    assert container(container="vit.sif").srun_options(FOLDERS, CWD) == ()


def test_a_folder_is_mounted_once() -> None:
    words = container(container="vit.sif").wrapped(PROGRAM, (CWD,), CWD)
    assert words.count("--bind") == 1


@pytest.mark.parametrize("mount", ["/data", "data:/data", "/a:b", "/a,b:/c", ""])
def test_mounts_that_are_none(mount: str) -> None:
    with pytest.raises(RequestError, match=r"slurm\.container_mounts has"):
        container(container="vit.sif", container_mounts=[mount])


def test_a_folder_that_cannot_be_mounted() -> None:
    with pytest.raises(RequestError, match="cannot be mounted"):
        container(container="vit.sif").wrapped(PROGRAM, (Path("/a:b"),), CWD)


@pytest.mark.parametrize(
    "field", [{"container_runtime": "docker"}, {"container_command": "start"}, {"container_gpus": "intel"}]
)
def test_words_that_are_none(field: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        ContainerFields.model_validate(field)
