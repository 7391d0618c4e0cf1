"""Ranks in a container: Apptainer before the program, or pyxis (enroot) as options of srun."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vitscale.errors import RequestError, explain, shown
from vitscale.study.sections import SlurmSection


def contained(srun: Sequence[str], slurm: SlurmSection, folders: Sequence[Path], cwd: Path) -> list[str]:
    """An srun argv whose program runs in `slurm.container`; as it is where there is none.

    Args:
        srun: `srun`, its options as one word each, then the program.
        slurm: of the study.
        folders: seen in the container under the same paths, besides `slurm.container_mounts`.
        cwd: the program's working directory, likewise.

    Raises:
        RequestError: a path cannot be mounted.
    """
    if slurm.container is None:
        return list(srun)
    mounts = [*dict.fromkeys(_mount(str(path)) for path in (*folders, cwd)), *map(_checked, slurm.container_mounts)]
    start = next(place for place in range(1, len(srun)) if not srun[place].startswith("--"))
    options, program = list(srun[:start]), list(srun[start:])
    if slurm.container_runtime == "pyxis":
        image = [f"--container-image={slurm.container}", f"--container-mounts={','.join(mounts)}"]
        return [*options, *image, f"--container-workdir={cwd}", *program]
    binds = [word for mount in mounts for word in ("--bind", mount)]
    gpus = ["--nv"] if slurm.gpus != "none" else []
    return [*options, "apptainer", "exec", *gpus, *binds, "--pwd", str(cwd), slurm.container, *program]


def _mount(path: str) -> str:
    if ":" in path or "," in path:
        raise RequestError(
            explain(
                f"{shown(path)} cannot be mounted in a container: container runtimes take ':' and ',' for separators",
                next_step="Use a folder without them",
            )
        )
    return f"{path}:{path}"


def _checked(mount: str) -> str:
    host, colon, inside = mount.partition(":")
    if not (host.startswith("/") and colon and inside.startswith("/")) or "," in mount:
        raise RequestError(
            explain(
                f"slurm.container_mounts has {shown(mount)}",
                valid=["HOST:CONTAINER", "HOST:CONTAINER:ro"],
                next_step="Write absolute paths without commas",
            )
        )
    return mount
