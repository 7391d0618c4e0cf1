"""Kernel locks on files: a lock goes with its holder, unless that is on a host which a network file system has lost."""

from __future__ import annotations

import fcntl
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

_LOOK_SECONDS = 0.1


@contextmanager
def file_lock(path: Path, patience_seconds: float = math.inf) -> Iterator[TextIO | None]:
    """Holds the lock of `path`, made where it is missing, for the length of a block.

    Yields:
        The open file; None where another process held the lock for all of `patience_seconds`.
    """
    end = time.monotonic() + patience_seconds
    with path.open("a+", encoding="ascii", errors="replace") as file:
        while not (free := _taken(file, wait=patience_seconds == math.inf)) and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
        yield file if free else None


def _taken(file: TextIO, *, wait: bool) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True
