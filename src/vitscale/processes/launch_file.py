"""launch.json in a run's folder: values that every process of the run needs, and that no launcher surely passes on.

Launchers pass variables from host to host through shells, each with its own list of names that it lets through. Ranks
read them from this file instead, so that a launcher needs to pass only the rank's argv.

The module also has the one table of the variables by which launchers give a process its rank.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from pydantic import Field

from vitscale.base.files import read_record
from vitscale.base.interpreter import safe_path
from vitscale.trial.fields import Spec

NAME = "launch.json"
TOKEN_VARIABLE = "VITSCALE_JOB"  # noqa: S105 - the variable's name
"""Variable with the run's token in every process of the run, so that processes that left the process tree are found and
ended too. The token is a secret: who knows it speaks for a rank. Only the user reads it (launch.json has mode 0600, and
the kernel shows a process's variables to its owner alone), and it stands in no argv, which every user can read: there
`name_of` stands for it."""
COMPLETE_VARIABLE = "VITSCALE_JOB_COMPLETE"
"""Variable of a process that began with all of its run's variables, with the run's token: it does not begin again where
an import, or the interpreter's start, has since changed them."""


def name_of(token: str) -> str:
    """Return a name for the run with this token, for all to read: nobody finds the token by it (SHA-256)."""
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()


class LaunchFile(Spec):
    """How the driver started one run."""

    token: str
    """Identifies this run. A secret: a process must send it to be heard by the driver."""
    commands: tuple[tuple[str, ...], ...]
    """The commands that the driver started: one argv, or one for each host."""
    hosts: tuple[str, ...] = ()
    master_address: str | None = None
    """Address where rank 0 listens; null where the launcher gives it to ranks itself, or one rank has no launcher."""
    master_port: int | None = None
    lifeline: str | None = None
    """ADDRESS:PORT of the driver: ranks end when it falls silent (`vitscale.processes.heartbeat`)."""
    silence_seconds: float | None = None
    """Longest time for which the driver lets a run go on without a sign of any rank. Collectives end later than that,
    so that it is the driver who says which rank the others wait for."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables of every rank."""
    study_variables: tuple[str, ...] = ()
    """Names of those that the study sets itself ([launch.environment]), which no launcher may replace."""
    import_folders: tuple[str, ...] = ()
    """Folders in which ranks look for a user's modules, behind all that is installed."""
    prepared_seconds: float | None = None
    """Seconds before `started_ns` that the driver waited for the imports of the process that ranks are forked from;
    null where these were done already, or ranks are no forks."""
    cold: str | None = None
    """Why ranks that could be forked from a prepared process were started anew."""
    driver_pid: int
    host_id: str
    """`host_id` of the driver's host, the only one on which its clock and process id mean anything."""
    started_ns: int
    """Time of the start, on the driver's monotonic clock."""


def read(run_folder: Path) -> LaunchFile | None:
    """Read the run's launch file; None where there is none (a rank started by hand).

    Raises:
        ValueError: the file is not one that this version writes.
    """
    try:
        return LaunchFile.model_validate_json(read_record(run_folder / NAME))
    except FileNotFoundError:
        return None


def boot_id() -> str:
    """Return a text that identifies this boot of this machine, in its containers too. Empty where unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def host_id() -> str:
    """Return a text that identifies this boot and this process's namespace of process ids. Empty where unknown.

    Monotonic clocks and process ids may be compared where it is the same.
    """
    try:
        return f"{boot_id()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def completed_environment(launch: LaunchFile) -> dict[str, str]:
    """Return this process's environment, to which the launch file's variables and the run's token are added.

    The variables by which a launcher has given this process its rank stay as they are.
    """
    environment = os.environ | _without_rank_variables(launch.environment) | {TOKEN_VARIABLE: launch.token}
    return environment | safe_path(environment)


def is_complete(launch: LaunchFile) -> bool:
    """Whether this process has the run's variables, so that it need not begin again with `completed_environment`.

    It has them if the launcher has passed on the run's token, and has replaced nothing that the study sets itself. A
    process that began again has had them then, whatever has changed since (`COMPLETE_VARIABLE`).
    """
    if os.environ.get(TOKEN_VARIABLE) != launch.token:
        return False
    if os.environ.get(COMPLETE_VARIABLE) == launch.token:
        return True
    set_by_study = _without_rank_variables({name: launch.environment[name] for name in launch.study_variables})
    return all(os.environ.get(name) == value for name, value in set_by_study.items())


def _without_rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables but for those by which launchers give a process its rank."""
    return {name: value for name, value in environment.items() if name not in ALL_NAMES}


@dataclass(frozen=True)
class RankVariables:
    """Names of the variables that one family of launchers uses."""

    rank: str
    world_size: str
    local_rank: str
    others: tuple[str, ...] = ()
    """Further names that would mislead processes for which they are not meant."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names of this family."""
        return (self.rank, self.world_size, self.local_rank, *self.others)

    def are_in(self, environment: Mapping[str, str]) -> bool:
        """Whether a launcher of this family has started the process."""
        return self.rank in environment and self.world_size in environment

    def variables(self, rank: int, world_size: int, local_rank: int) -> dict[str, str]:
        """Return the variables that give a process these numbers."""
        return {self.rank: str(rank), self.world_size: str(world_size), self.local_rank: str(local_rank)}


TORCH = RankVariables(
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    ("LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT", "CROSS_RANK", "CROSS_SIZE"),
)
"""Variables of torchrun and DeepSpeed's launcher."""
OPEN_MPI = RankVariables(
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", ("OMPI_COMM_WORLD_LOCAL_SIZE",)
)
SLURM = RankVariables("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ("SLURM_NODEID", "SLURM_STEP_ID"))
"""Variables of srun."""

FAMILIES = (TORCH, OPEN_MPI, SLURM)
"""Innermost launchers first: torchrun may be started by srun, and mpirun within a Slurm allocation."""

ALL_NAMES = tuple(chain.from_iterable(family.names for family in FAMILIES))
"""All these names: if left over from a launcher around the driver, they would make a rank join another world."""

RECORDER_RING = ("TORCH_FR_BUFFER_SIZE", "16384")
"""The variable for the number of entries in torch's flight recorder, and its value. Entries of about 800 bytes each
are allocated as they come (torch 2.13). Two steps of ZeRO-3 that accumulate can exceed torch's default of 2,000."""

LIBRARY_SETTINGS = (
    "NCCL_", "GLOO_", "OMP_", "MKL_", "KMP_", "CUDA_", "TORCH_", "PYTORCH_", "DS_", "NVIDIA_TF32_",
)  # fmt: skip
"""Prefixes of variables that libraries read: passed to all ranks, and recorded with each run."""
