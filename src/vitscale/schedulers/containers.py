"""The container in which ranks run, and the words that put a program into it; one type for every scheduler.

Terms:
    image: a file, or a name in a registry, as the runtime takes it.
    runtime: the program that starts a container. Apptainer, Singularity and Podman stand before the ranks' command;
        pyxis is a plug-in of srun, which starts Enroot and is called by options of srun.
    vendor: whose GPUs the container sees. Apptainer and Singularity have a flag for each vendor. Podman is given device
        files. Under pyxis an image sees AMD's devices anyway (Enroot mounts /dev), and NVIDIA's by a hook of Enroot.
    exec, run: start the ranks' command alone, or hand it to the image's own start (a runscript, an entrypoint).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from vitscale.errors import RequestError, shown
from vitscale.study.sections import ContainerCommand, ContainerFields, ContainerGpus, ContainerRuntime

_APPTAINER_FLAG_BY_VENDOR: dict[ContainerGpus, tuple[str, ...]] = {
    "nvidia": ("--nv",),
    "amd": ("--rocm",),
    "none": (),
}
_PODMAN_OPTIONS_BY_VENDOR: dict[ContainerGpus, tuple[str, ...]] = {
    # NVIDIA's Container Device Interface: https://docs.nvidia.com/datacenter/cloud-native/container-toolkit
    "nvidia": ("--device=nvidia.com/gpu=all",),
    # AMD's two device files, which members of the host's groups `video` and `render` may open.
    "amd": ("--device=/dev/kfd", "--device=/dev/dri", "--group-add=keep-groups"),
    "none": (),
}
_PODMAN_OPTIONS = (
    "--rm",
    # Ranks talk over the host's networks and shared memory, and are found by the host's process ids.
    *("--network=host", "--ipc=host", "--pid=host"),
    # The launcher says in variables which rank a process is. Variables of the image, such as PATH, win.
    "--env-host",
    # Stay in the control group of the job step, which the scheduler counts and ends.
    "--cgroups=disabled",
    # SELinux would refuse mounted folders that have no label for containers.
    "--security-opt=label=disable",
)
_PODMAN_WITHOUT_ENTRYPOINT = "--entrypoint="
_PYXIS_ENTRYPOINT = "--container-entrypoint"
PYXIS: ContainerRuntime = "pyxis"
"""The runtime that is a plug-in of srun, and that only Slurm's jobs have."""


@dataclass(frozen=True)
class RankContainer:
    """An image in which ranks run, and how it is started.

    Example: `apptainer exec --nv --bind /results:/results --pwd /work vit.sif python -m ...`.
    """

    image: str
    runtime: ContainerRuntime = "apptainer"
    command: ContainerCommand = "exec"
    vendor: ContainerGpus = "nvidia"
    mounts: tuple[str, ...] = ()
    """HOST:CONTAINER or HOST:CONTAINER:OPTIONS, besides the folders that every run needs."""

    @classmethod
    def from_section(cls, fields: ContainerFields, section: str, *, without_gpus: bool = False) -> Self | None:
        """Return the container that a scheduler's section of the study asks for; None where it asks for none.

        Args:
            fields: the section.
            section: its name, for messages: "slurm".
            without_gpus: whether the section asks for no GPUs, so that none are passed on by default.

        Raises:
            RequestError: a mount is not of the form HOST:CONTAINER.
        """
        if fields.container is None:
            return None
        default_vendor: ContainerGpus = "none" if without_gpus else "nvidia"
        mounts = tuple(_checked_mount(mount, section) for mount in fields.container_mounts)
        return cls(
            image=fields.container,
            runtime=fields.container_runtime,
            command=fields.container_command,
            vendor=fields.container_gpus or default_vendor,
            mounts=mounts,
        )

    @property
    def is_option_of_srun(self) -> bool:
        """Whether srun starts it by options of its own, so that nothing stands before the program."""
        return self.runtime == PYXIS

    def srun_options(self, folders: Sequence[Path], cwd: Path) -> tuple[str, ...]:
        """Return the options by which srun starts its program in this container; none where srun does not do it.

        Args:
            folders: folders mounted under the same paths.
            cwd: the program's working directory, also mounted.

        Raises:
            RequestError: a folder cannot be mounted.
        """
        if not self.is_option_of_srun:
            return ()
        options = (
            f"--container-image={self.image}",
            f"--container-mounts={','.join(self._all_mounts(folders, cwd))}",
            f"--container-workdir={cwd}",
        )
        return (*options, _PYXIS_ENTRYPOINT) if self.command == "run" else options

    def wrapped(self, program: Sequence[str], folders: Sequence[Path], cwd: Path) -> tuple[str, ...]:
        """Return the argv that runs a program in this container; the program itself where srun does that by options.

        Args:
            program: the argv inside the container.
            folders: folders mounted under the same paths.
            cwd: the program's working directory, also mounted.

        Raises:
            RequestError: a folder cannot be mounted.
        """
        if self.is_option_of_srun:
            return tuple(program)
        mounts = self._all_mounts(folders, cwd)
        if self.runtime == "podman":
            return (*self._podman(mounts, cwd), *program)
        return (*self._apptainer(mounts, cwd), *program)

    def _apptainer(self, mounts: Sequence[str], cwd: Path) -> list[str]:
        """Return the words of Apptainer, or of Singularity, which has the same ones, up to the image."""
        words = [self.runtime, self.command, *_APPTAINER_FLAG_BY_VENDOR[self.vendor]]
        for mount in mounts:
            words += ["--bind", mount]
        return [*words, "--pwd", str(cwd), self.image]

    def _podman(self, mounts: Sequence[str], cwd: Path) -> list[str]:
        """Return the words of Podman up to the image.

        `podman exec` is for a container that runs already: "exec" is a run without the image's entrypoint.
        """
        words = ["podman", "run", *_PODMAN_OPTIONS, *_PODMAN_OPTIONS_BY_VENDOR[self.vendor]]
        words += [f"--volume={mount}" for mount in mounts]
        words.append(f"--workdir={cwd}")
        if self.command == "exec":
            words.append(_PODMAN_WITHOUT_ENTRYPOINT)
        return [*words, self.image]

    def _all_mounts(self, folders: Sequence[Path], cwd: Path) -> list[str]:
        """Return the mounts of the folders and of the working directory, each once, and then the study's."""
        folder_mounts = dict.fromkeys(_same_path_mount(str(path)) for path in (*folders, cwd))
        return [*folder_mounts, *self.mounts]


def _same_path_mount(path: str) -> str:
    """Return the mount of a folder under the same path: "/data:/data".

    Raises:
        RequestError: the path has a separator in it.
    """
    if ":" in path or "," in path:
        raise RequestError(
            f"{shown(path)} cannot be mounted in a container: container runtimes take ':' and ',' for separators",
            next_step="Use a folder without them",
        )
    return f"{path}:{path}"


def _checked_mount(mount: str, section: str) -> str:
    """Return a mount of the study's as it is.

    Raises:
        RequestError: it is not of the form HOST:CONTAINER, both absolute paths.
    """
    host_path, colon, container_path = mount.partition(":")
    has_absolute_paths = host_path.startswith("/") and container_path.startswith("/")
    if not colon or not has_absolute_paths or "," in mount:
        raise RequestError(
            f"{section}.container_mounts has {shown(mount)}",
            valid=["HOST:CONTAINER", "HOST:CONTAINER:ro"],
            next_step="Write absolute paths without commas",
        )
    return mount
