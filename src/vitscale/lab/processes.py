"""Processes named so that no other is ever taken for them: by id and by when they started."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from vitscale.errors import VitscaleError
from vitscale.lab.enter import start_ticks

ENDING_SECONDS = 10.0
"""Killed processes are gone in milliseconds, unless the kernel holds one (a disk or a network disk that hangs)."""


class Process(BaseModel):
    """One process; it stays itself when its id is given to another."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    pid: int = Field(gt=1)
    start_ticks: int = Field(ge=0)
    """Clock ticks since boot."""

    @property
    def alive(self) -> bool:
        """A zombie is not."""
        return start_ticks(self.pid) == self.start_ticks


def process(pid: int) -> Process:
    """The process that has this id now.

    Raises:
        ProcessLookupError: there is none.
    """
    ticks = start_ticks(pid)
    if ticks is None:
        raise ProcessLookupError(pid)
    return Process(pid=pid, start_ticks=ticks)


def kill(processes: Iterable[Process]) -> None:
    """Kills those that are left, and returns when they are gone.

    Raises:
        VitscaleError: one was not gone after 10 s.
    """
    handles = dict(_handles(processes))
    try:
        for handle in handles:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        end = time.monotonic() + ENDING_SECONDS
        for handle, one in handles.items():
            left_ms = max(0.0, end - time.monotonic()) * 1e3
            if not _gone(handle, left_ms):
                raise VitscaleError(
                    f"process {one.pid} of the lab did not end within {ENDING_SECONDS:g} s of SIGKILL",
                    next_step="The kernel still holds it, for a disk mostly: try again later",
                )
    finally:
        for handle in handles:
            os.close(handle)


def _handles(processes: Iterable[Process]) -> Iterator[tuple[int, Process]]:
    for one in processes:
        try:
            handle = os.pidfd_open(one.pid)
        except ProcessLookupError:
            continue
        if one.alive:  # looked at after the handle was taken: the handle means no other from now on
            yield handle, one
        else:
            os.close(handle)


def _gone(handle: int, milliseconds: float) -> bool:
    waiting = select.poll()
    waiting.register(handle, select.POLLIN)
    return bool(waiting.poll(milliseconds))


def pid_namespace(pid: int | str) -> str | None:
    """Of process `pid`, or of "self"; None where it has ended."""
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return None


def in_same_namespace(pid: int) -> list[int]:
    """Ids, as seen from here, of all processes in the PID namespace of process `pid`; without zombies."""
    inside = pid_namespace(pid)
    others = (int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdecimal())
    return sorted(
        one for one in others if inside is not None and pid_namespace(one) == inside and start_ticks(one) is not None
    )


def innermost_id(pid: int) -> int | None:
    """The id that process `pid` has in its own PID namespace; None where it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return next((int(line.split()[-1]) for line in status.splitlines() if line.startswith("NSpid:")), None)
