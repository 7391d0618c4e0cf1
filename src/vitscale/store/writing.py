"""Writes to the results folder: whole files by rename, one driver by a kernel lock."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vitscale.base.files import file_lock
from vitscale.errors import StoreError, shown
from vitscale.store.results import Outcome, RunHeader, StudyRecord

_OUTCOME_BYTES = 256 * 1024
_LAST_WORD_BYTES = 64 * 1024


def write_whole(path: Path, content: str | bytes) -> None:
    """Replaces `path` by `content`, text as UTF-8: a crash leaves the old content or the new, never a mixture."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        with draft.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Forces the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(results: Path) -> Iterator[None]:
    """Holds the folder's kernel lock; a second driver is refused. The lock goes with the process, even on SIGKILL.

    Raises:
        StoreError: another `vitscale run` holds it.
    """
    with file_lock(results / "lock", patience_seconds=0.0) as file:
        if file is None:
            holder = (results / "lock").read_text(encoding="ascii", errors="replace")[:32].strip()
            who = f" (process {holder})" if holder.isdigit() else ""
            raise StoreError(
                f"another `vitscale run`{who} is writing to {shown(str(results))}",
                next_step="Wait for it, stop it with Ctrl-C, or give this study a folder of its own with -o",
            )
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def write_study(results: Path, study: StudyRecord) -> None:
    """Writes study.json whole."""
    write_whole(results / "study.json", study.model_dump_json(indent=1))


def new_run_folder(results: Path, header: RunHeader) -> Path:
    """Makes the folder of one attempt, with its header, and keeps room for the last words should the disk fill up: the
    run's outcome and one error of each rank.

    Raises:
        OSError: the folder exists, or there is no room.
    """
    folder = results / "runs" / f"{header.trial_id}-r{header.repeat}-a{header.attempt}"
    folder.mkdir(parents=True)
    sync_folder(folder.parent)
    _reserve(folder / ".reserve", _OUTCOME_BYTES)
    for rank in range(header.trial.world.size):
        _reserve(folder / f".rank-{rank}.reserve", _LAST_WORD_BYTES)
    write_whole(folder / "trial.json", header.model_dump_json(indent=1))
    return folder


def _reserve(path: Path, size: int) -> None:
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)


def write_outcome(folder: Path, outcome: Outcome) -> None:
    """Ends a run: gives the reserved room back first, so that a full disk cannot keep the outcome from being told."""
    for reserve in folder.glob(".*reserve"):
        reserve.unlink(missing_ok=True)
    write_whole(folder / "outcome.json", outcome.model_dump_json(indent=1))
