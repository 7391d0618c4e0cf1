"""Before torch is imported: which rank this is, whose death ends it, and which cores are its own."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from vitscale.hardware import cores_in_order, share_of_cores
from vitscale.trial import World

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Place:
    """A rank's place in the world, from the launcher's environment."""

    rank: int
    world_size: int
    local_rank: int
    launch_seconds: float | None
    """From the driver's start of the launcher to here; None where the driver runs on another boot or host."""


def own_place(arrived_ns: int) -> Place:
    """Reads the rank from the environment; without a launcher this is the only rank."""
    launch = None
    started, boot = os.environ.get("VITSCALE_STARTED_NS", ""), os.environ.get("VITSCALE_BOOT_ID")
    if started.isdigit() and boot == boot_id():
        launch = max(0.0, (arrived_ns - int(started)) / 1e9)
    return Place(
        rank=int(os.environ.get("RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        launch_seconds=launch,
    )


def boot_id() -> str | None:
    """Identifies this boot of this host: monotonic clocks may be compared only within it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


def die_with_parent() -> None:
    """Asks the kernel to end this rank when its launcher dies, whatever it is doing then; the launcher is tied to the
    driver in the same way, so ranks end with their driver even when that is killed by SIGKILL.
    """
    driver = os.environ.get("VITSCALE_DRIVER_PID", "")
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The launcher may have died before the call: then nobody is left to send the signal.
    if driver.isdigit() and not Path(f"/proc/{driver}").exists():
        sys.exit("vitscale: the driver is gone")


def pin(place: Place, world: World) -> None:
    """Pins this rank to cores of its own and says how many threads to compute with, before any library asks.

    Where the cores do not suffice (oversubscription) nothing is pinned.
    """
    os.environ["OMP_NUM_THREADS"] = str(world.threads_per_rank)
    cores = share_of_cores(place.local_rank, world.threads_per_rank, cores_in_order())
    if cores is not None:
        os.sched_setaffinity(0, cores)


def now_ns() -> int:
    """The clock that driver and ranks of one host share."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)
