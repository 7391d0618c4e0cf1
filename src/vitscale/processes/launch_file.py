"""launch.json in a run's folder: what every process of the run must know and no launcher can be trusted to pass on.

Launchers hand variables from host to host through shells, each with its own list of those it lets through. Ranks
read them from this file instead; a launcher needs to carry nothing but the rank's argv.

Below it stand the variables by which each launcher tells a process which rank it is: the one table of outside names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from vitscale.trial.facts import Spec

NAME = "launch.json"
TOKEN_VARIABLE = "VITSCALE_JOB"  # noqa: S105 - names processes, protects nothing
"""In the environment of every process of a run, so that those that left the process tree are found and ended too."""


class LaunchFile(Spec):
    """How one run was started."""

    token: str
    """Of this run alone; also what a process must say to be heard by the driver."""
    commands: tuple[tuple[str, ...], ...]
    """What the driver started: one argv, or one for each host."""
    hosts: tuple[str, ...] = ()
    master_address: str | None = None
    """Where rank 0 listens; null where the launcher says so itself, or there is one rank without a launcher."""
    master_port: int | None = None
    lifeline: str | None = None
    """ADDRESS:PORT of the driver: ranks end when it falls silent (`vitscale.processes.heartbeat`)."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables of every rank."""
    mpi_discovery: bool = False
    prepared_seconds: float | None = None
    """What the driver waited before `started_ns` until the process that ranks are forked from had imported everything;
    null where it was there already, or ranks are none of its forks."""
    cold: str | None = None
    """Why ranks that could be forked from a prepared process were started anew."""
    driver_pid: int
    host_id: str
    """Of the driver's host: its clock and its process id mean something there alone (`host_id`)."""
    started_ns: int
    """On the driver's monotonic clock."""


def read(run_folder: Path) -> LaunchFile | None:
    """The run's launch file; None where there is none (a rank started by hand).

    Raises:
        ValueError: it is not what this version writes.
    """
    try:
        return LaunchFile.model_validate_json((run_folder / NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def boot_id() -> str:
    """Identifies this boot of this machine, in its containers too. Empty where unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def host_id() -> str:
    """Identifies this boot and which processes are seen from here: monotonic clocks and process ids may be compared
    within it. Empty where unknown.
    """
    try:
        return f"{boot_id()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def completed_environment(launch: LaunchFile) -> dict[str, str]:
    """This process's environment with what the file says put in."""
    return os.environ | launch.environment | {TOKEN_VARIABLE: launch.token}


@dataclass(frozen=True)
class RankVariables:
    """The names that one family of launchers uses."""

    rank: str
    world_size: str
    local_rank: str
    others: tuple[str, ...] = ()
    """Further names that would mislead a process they were not meant for."""

    def given(self, environment: Mapping[str, str]) -> bool:
        """Whether a launcher of this family has started the process."""
        return self.rank in environment and self.world_size in environment


TORCH = RankVariables(
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    ("LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT", "CROSS_RANK", "CROSS_SIZE"),
)
"""torchrun and DeepSpeed's launcher."""
OPEN_MPI = RankVariables(
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", ("OMPI_COMM_WORLD_LOCAL_SIZE",)
)
SLURM = RankVariables("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ("SLURM_NODEID", "SLURM_STEP_ID"))
"""srun."""

FAMILIES = (TORCH, OPEN_MPI, SLURM)
"""The innermost launcher first: torchrun may be started by srun, mpirun within a Slurm allocation."""

ALL_NAMES = tuple(
    name for family in FAMILIES for name in (family.rank, family.world_size, family.local_rank, *family.others)
)
"""Left over from a launcher around the driver, they would make a rank join a world that is not its own."""

RECORDER_RING = ("TORCH_FR_BUFFER_SIZE", "16384")
"""The variable that tells torch's flight recorder how many entries to keep, of about 800 bytes each, taken as they come
(torch 2.13). Two steps of ZeRO-3 that accumulates can exceed torch's own 2,000."""

LIBRARY_SETTINGS = (
    "NCCL_", "GLOO_", "OMP_", "MKL_", "KMP_", "CUDA_", "TORCH_", "PYTORCH_", "DS_", "NVIDIA_TF32_",
)  # fmt: skip
"""Beginnings of the names of variables that libraries read: handed to all ranks, and recorded with each run."""
