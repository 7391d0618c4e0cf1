"""The disk that holds the results: room, how long a record takes to be safe on it, and whether all hosts see it."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

_RECORD_BYTES = 300
"""About one step of one rank."""
_RECORDS = 20


def free_bytes(folder: Path) -> int:
    """Room on the disk of `folder`, for this user."""
    return shutil.disk_usage(folder).free


def record_seconds(folder: Path, rank: int) -> tuple[int, tuple[float, ...]]:
    """(bytes of a record, seconds of each append with fsync), to a file of this rank that is removed afterwards."""
    path = folder / f".probe-{rank}"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    line = b"x" * (_RECORD_BYTES - 1) + b"\n"
    seconds = []
    try:
        for _ in range(_RECORDS):
            began = time.perf_counter()
            os.write(file, line)
            os.fsync(file)
            seconds.append(time.perf_counter() - began)
    finally:
        os.close(file)
        path.unlink(missing_ok=True)
    return _RECORD_BYTES, tuple(seconds)


def show(folder: Path, text: str) -> None:
    """Rank 0's part: writes the file that the others look for."""
    draft = folder / ".shown.draft"
    draft.write_text(text, encoding="ascii")
    draft.replace(folder / ".shown")


def seen_after(folder: Path, text: str, seconds: float) -> float | None:
    """The others' part: how long until the file is there with `text` in it; None: not within `seconds`."""
    began = time.perf_counter()
    while (waited := time.perf_counter() - began) < seconds:
        try:
            if (folder / ".shown").read_text(encoding="ascii") == text:
                return waited
        except (OSError, UnicodeDecodeError):
            pass
        time.sleep(0.005)
    return None
