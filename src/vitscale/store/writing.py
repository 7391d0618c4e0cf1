"""Writes to the results folder: whole files by rename, a rank's lines from its own thread, one driver by a lock."""

from __future__ import annotations

import errno
import os
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vitscale.base.files import allocate, file_lock, open_regular, sync_folder, whole_file
from vitscale.errors import StoreError, shown
from vitscale.store.lines import RankLine
from vitscale.store.private_values import is_private, launch_variables
from vitscale.store.records import FULL_DISK_BYTES, ErrorLine
from vitscale.store.results import Outcome, RunHeader, StudyRecord

_OUTCOME_BYTES = 256 * 1024
"""Room that is reserved for a run's outcome."""
_LAST_LINE_BYTES = 64 * 1024
"""Room that is reserved for a rank's last line, which says with what error it ends."""
_GATHER_SECONDS = 0.2
"""How long lines are gathered before they are written together."""
DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk, or of a user's quota, that has no room for more bytes or for more files."""


def write_whole(path: Path, content: str | bytes, *, make_folder: bool = False) -> None:
    """Replace a file that a user names by `content`, text as UTF-8, as `whole_file` does."""
    with whole_file(path, make_folder=make_folder) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_record(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Replace a file of a results folder as `write_whole` does, but for a link, which is itself replaced.

    With `private` only its owner may read it.
    """
    with whole_file(path, follow_links=False, private=private) as file:
        file.write(content.encode() if isinstance(content, str) else content)


_WRITTEN_NAMES = ("lock", "study.json", "runs", "packs", "jobs", "checks")
"""Parts of a results folder; the folder itself may be a link to where there is more room."""


def refuse_links(results: Path) -> None:
    """Refuse to write to a results folder in which the place of something that vitscale writes is taken by a link.

    Such a folder may be somebody else's, and what is written would end up in a file of the user's.

    Raises:
        StoreError: there is a link.
    """
    links = [name for name in _WRITTEN_NAMES if (results / name).is_symlink()]
    if links:
        raise StoreError(
            f"{shown(links[0])} in {shown(str(results))} is a link, and nothing is written through links",
            next_step="Move what it leads to in its place, or give another folder with -o",
        )


@contextmanager
def locked(results: Path) -> Iterator[int]:
    """Hold a results folder's lock for the length of a block. The kernel frees it when this process ends, however.

    Yields:
        The descriptor of the lock file.

    Raises:
        StoreError: another `vitscale run` holds it, or parts of the folder are links.
    """
    refuse_links(results)
    with file_lock(results / "lock", patience_seconds=0.0) as file:
        if file is None:
            holder = _process_of_holder(results / "lock")
            who = f" (process {holder})" if holder.isdigit() else ""
            raise StoreError(
                f"another `vitscale run`{who} is writing to {shown(str(results))}",
                next_step="Wait for it, stop it with Ctrl-C, or give this study a folder of its own with -o",
            )
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield file.fileno()


def _process_of_holder(lock: Path) -> str:
    """Return what a lock's holder has written into it: the number of its process."""
    with open_regular(lock) as file:
        return file.read(32).decode("ascii", errors="replace").strip()


def write_study(results: Path, study: StudyRecord) -> None:
    """Write study.json whole; for its owner alone where the study's text sets variables that others must not read."""
    has_private_variable = any(is_private(name, value) for name, value in launch_variables(study).items())
    write_record(results / "study.json", study.model_dump_json(indent=1), private=has_private_variable)


def new_run_folder(results: Path, header: RunHeader) -> Path:
    """Make the folder of one attempt with its header, and return it.

    Room is reserved for what must be written even if the disk fills up: the run's outcome, and a last line per rank.

    Raises:
        OSError: the folder exists, or there is no room.
    """
    folder = results / "runs" / f"{header.trial_id}-r{header.repeat}-a{header.attempt}"
    folder.mkdir(parents=True)
    sync_folder(folder.parent)
    _reserve(folder / ".reserve", _OUTCOME_BYTES)
    for rank in range(header.trial.world.size):
        _reserve(folder / f".rank-{rank}.reserve", _LAST_LINE_BYTES)
    write_record(folder / "trial.json", header.model_dump_json(indent=1))
    return folder


def _reserve(path: Path, size: int) -> None:
    with path.open("wb") as file:
        allocate(file, size)


def write_outcome(folder: Path, outcome: Outcome) -> None:
    """End a run. The reserved room is freed first, so that a full disk cannot prevent writing the outcome.

    Raises:
        OSError: it cannot be written, or the run's folder is a link.
    """
    free_reserves(folder)
    if folder.is_symlink():
        raise OSError(errno.ELOOP, "a run's folder must not be a link", str(folder))
    write_record(folder / "outcome.json", outcome.model_dump_json(indent=1))


def free_reserves(folder: Path) -> None:
    """Give the room back that was reserved in a run's folder; a link in the folder's place is left alone."""
    if folder.is_symlink():
        return
    for reserve in folder.glob(".*reserve"):
        reserve.unlink(missing_ok=True)


def is_full(folder: Path) -> bool:
    """Whether the disk of a folder takes no more records: it has no room, or no place for another file (inodes).

    Raises:
        OSError: the folder is not there.
    """
    disk = os.statvfs(folder)
    has_no_room = disk.f_bavail * disk.f_frsize <= FULL_DISK_BYTES
    counts_files = disk.f_files > 0  # some file systems have no limit, and say 0
    return has_no_room or (counts_files and disk.f_favail == 0)


def _open_new_record(path: Path, reserve: Path) -> int:
    """Make the file of a rank's lines, and return a descriptor that appends to it.

    On a disk that takes no more files it is the file with the room for the rank's last line, which then goes to its
    first lines.

    Args:
        path: the file to make.
        reserve: the file with the reserved room.

    Raises:
        OSError: it is there already: a second process that takes itself for this rank is a broken launch, and must not
            mix in its lines. Or it cannot be made, and nothing was reserved.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644)
    except OSError as error:
        if error.errno not in DISK_FULL_ERRORS:
            raise
        if not reserve.is_file() or os.path.lexists(path):
            raise
        reserve.rename(path)  # of two processes one finds it
    file = os.open(path, flags)
    os.ftruncate(file, 0)
    return file


class RankLog:
    """Appends lines to rank-K.jsonl, from a thread of its own: `write` only puts the line on a queue.

    Lines are written whole, in one system call per batch, so a crash cuts off at most the last one. When the disk is
    full the thread stops and `failure` says so; `check` raises it in the training thread. The log ends by `close`, or
    by `end_with` and the rank's error, for which `new_run_folder` has reserved room.
    """

    def __init__(self, run_folder: Path, rank: int, *, at_once: bool = False) -> None:
        """Make the rank's file and start the thread that writes to it.

        `at_once`: each line is on disk when `write` returns, because what comes next may hang.
        """
        self.path = run_folder / f"rank-{rank}.jsonl"
        self.failure: Exception | None = None
        """The error that ended the writing thread."""
        self._queue: queue.SimpleQueue[RankLine | None] = queue.SimpleQueue()
        """Lines to write; None after the last one."""
        self._ending = threading.Event()
        """Set when None is queued: nothing more is gathered."""
        self._reserve = run_folder / f".rank-{rank}.reserve"
        self._file = _open_new_record(self.path, self._reserve)
        self._write_lock = threading.Lock() if at_once else None
        """Held while a line is written at once; None: lines are queued."""
        self._thread = threading.Thread(target=self._write_queued, name="rank-log", daemon=True)
        self._thread.start()

    def write(self, line: RankLine) -> None:
        """Queue one line and return; a log that writes at once appends it whole.

        Raises:
            OSError: a disk that is written to at once does not take it.
        """
        if self._write_lock is None:
            self._queue.put(line)
            return
        with self._write_lock:
            self._append(f"{line.model_dump_json()}\n".encode())
            os.fsync(self._file)

    def alive(self) -> None:
        """Signal life where nothing is recorded for long: evaluation is no hang."""
        os.utime(self._file)

    def check(self) -> None:
        """Raise the error that ended the writing thread, if there was one.

        Raises:
            OSError: a line could not be written (disk full, quota, read-only).
        """
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Write what is queued, force it to disk and raise what went wrong.

        Raises:
            OSError: a line could not be written (disk full, quota, read-only).
        """
        self._stop()
        self.check()
        os.fsync(self._file)
        os.close(self._file)
        self._reserve.unlink(missing_ok=True)

    def end_with(self, error: ErrorLine) -> None:
        """Write what is queued, then why this rank ends, in the room kept for it should the disk be full.

        Raises nothing for a disk that takes not even that: this is called where nobody is left to act on it.
        """
        self._stop()
        # This line must not continue a line that the full disk cut off.
        newline = "\n" if self.failure is not None else ""
        # Messages name paths, which may hold bytes that are no UTF-8 (lone surrogates in Python).
        texts = {name: value for name, value in error if isinstance(value, str)}
        utf8_texts = {name: text.encode(errors="backslashreplace").decode() for name, text in texts.items()}
        line = error.model_copy(update=utf8_texts).model_dump_json()
        with suppress(OSError):
            self._reserve.unlink(missing_ok=True)
            self._append(f"{newline}{line}\n".encode())
            os.fsync(self._file)
        os.close(self._file)

    def _stop(self) -> None:
        """Let the thread write what is queued, and wait for its end."""
        self._ending.set()
        self._queue.put(None)
        self._thread.join()

    def _write_queued(self) -> None:
        """Write queued lines until None is queued, or a write fails; runs in the log's own thread."""
        is_last_batch = False
        while not is_last_batch:
            batch = [self._queue.get()]
            # Gather what comes within a moment, for one write of many short steps.
            if batch[-1] is not None and self._queue.empty():
                self._ending.wait(_GATHER_SECONDS)
            while not self._queue.empty():
                batch.append(self._queue.get())
            is_last_batch = None in batch
            try:
                text = "".join(line.model_dump_json() + "\n" for line in batch if line is not None)
                self._append(text.encode())
            except Exception as error:  # disk full, or a value that cannot be written: `check` raises it
                self.failure = error
                return

    def _append(self, data: bytes) -> None:
        """Write all bytes at the end of the file; a full disk may take a part of them first."""
        while data:
            written = os.write(self._file, data)
            data = data[written:]
