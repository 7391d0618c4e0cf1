"""The lock of a job's driver: held while it lives, so that nobody settles its runs beside it."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOOK_SECONDS = 0.1


@contextmanager
def drivers_lock(results: Path, name: str, element: int | None, *, patience_seconds: float) -> Iterator[bool]:
    """Takes the lock of one job, or of one element of an array; yields whether it was free within the time given.

    A kernel lock: it goes with its holder, unless that is on a host which a network file system has lost.
    """
    part = "" if element is None else f"-{element}"
    end = time.monotonic() + patience_seconds
    with (results / "jobs" / f"{name}{part}.lock").open("a", encoding="ascii") as file:
        while not (free := _taken(file.fileno())) and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
        yield free


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
