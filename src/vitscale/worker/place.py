"""Before torch is imported: which rank this is, whose death ends it, and which cores are its own."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from vitscale.machine.cores import bound_by_launcher, node_distances, physical_cores, share_of_cores
from vitscale.machine.gpus import GpusUnreadable, visible_gpus
from vitscale.processes import launch_file
from vitscale.processes.launch_file import TOKEN_VARIABLE, LaunchFile
from vitscale.processes.parent_death import end_with_parent
from vitscale.processes.rank_variables import FAMILIES, TORCH
from vitscale.trial.trial import Device, World


@dataclass(frozen=True)
class Place:
    """A rank's place in the world, from the launcher's environment."""

    rank: int
    world_size: int
    local_rank: int
    launch_seconds: float | None
    """From the driver's start of the launcher to here; None where the driver runs on another boot or host."""


def with_environment(launch: LaunchFile | None) -> None:
    """Starts this very program again with the run's environment, where the launcher has not brought it here.

    Libraries and the interpreter read variables as they start, and those who look for a run's processes see only what a
    program began with.
    """
    if launch is not None and os.environ.get(TOKEN_VARIABLE) != launch.token:
        environment = launch_file.completed_environment(launch)
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)  # noqa: S606 - no shell is wanted


def own_place(arrived_ns: int, launch: LaunchFile | None) -> Place:
    """Reads the rank from the environment, in any launcher's words; without a launcher this is the only rank.

    Where the launcher does not tell torch of the rank and of rank 0's address, this does. Ends the process, with a
    message, where the launcher's numbers are none.
    """
    start_up = None
    if launch is not None and launch.host_id and launch.host_id == launch_file.host_id():
        start_up = max(0.0, (arrived_ns - launch.started_ns) / 1e9)
    family = next((family for family in FAMILIES if family.given(os.environ)), None)
    if family is None:
        return Place(rank=0, world_size=1, local_rank=0, launch_seconds=start_up)
    names = (family.rank, family.world_size, family.local_rank)
    try:
        rank, world_size, local_rank = (int(os.environ.get(name, "0")) for name in names)
    except ValueError:
        said = ", ".join(f"{name}={os.environ.get(name, '')!r}" for name in names)
        sys.exit(f"vitscale: the launcher's numbers of this rank are none: {said}")
    if family is not TORCH and launch is not None and not launch.mpi_discovery:
        _tell_torch(rank, world_size, local_rank, launch)
    return Place(rank, world_size, local_rank, start_up)


def _tell_torch(rank: int, world_size: int, local_rank: int, launch: LaunchFile) -> None:
    if launch.master_address is not None and launch.master_port is not None:
        os.environ |= {"MASTER_ADDR": launch.master_address, "MASTER_PORT": str(launch.master_port)}
    numbers = (rank, world_size, local_rank)
    os.environ |= {
        name: str(number)
        for name, number in zip((TORCH.rank, TORCH.world_size, TORCH.local_rank), numbers, strict=True)
    }


def die_with_parent(launch: LaunchFile | None) -> None:
    """Asks the kernel to end this rank when its launcher dies, whatever it is doing then; the launcher is tied to the
    driver in the same way, so ranks end with their driver even when that is killed by SIGKILL. On other hosts than the
    driver's the heartbeat does it.
    """
    # The launcher may have died before the call: then nobody is left to send the signal.
    end_with_parent(os.getppid())
    if (
        launch is not None
        and launch.host_id == launch_file.host_id()
        and not Path(f"/proc/{launch.driver_pid}").exists()
    ):
        sys.exit("vitscale: the driver is gone")


def pin(place: Place, world: World, device: Device) -> None:
    """Pins this rank to cores of its own and says how many threads to compute with, before any library asks.

    Nothing is pinned where the launcher has bound the rank already (srun --cpu-bind, mpirun --bind-to), and where the
    cores do not suffice (oversubscription).
    """
    os.environ["OMP_NUM_THREADS"] = str(world.threads_per_rank)
    if bound_by_launcher():
        return
    nodes: list[int | None] = []
    if device == "cuda":
        with contextlib.suppress(GpusUnreadable):
            nodes = [gpu.numa_node for gpu in visible_gpus()]
    cores = share_of_cores(
        place.local_rank, world.ranks_per_node, world.threads_per_rank, physical_cores(), nodes, node_distances()
    )
    if cores is not None:
        os.sched_setaffinity(0, cores)


def now_ns() -> int:
    """The clock that driver and ranks of one host share."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)
