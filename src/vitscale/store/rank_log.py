"""rank-K.jsonl: appended line by line by a thread of rank K's own so that training never waits for the disk, and read
whatever else is there."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from vitscale.errors import printable
from vitscale.store.lines import RankLine, RankLines
from vitscale.store.records import ErrorLine

_FLUSH_SECONDS = 0.2
_RANK_FILE = re.compile(r"rank-(\d{1,6})\.jsonl")

Lines = TypeVar("Lines", bound=RankLines)


class RankLog:
    """Appends lines to rank-K.jsonl. `write` only puts the line on a queue.

    Lines are written whole, in one system call per batch, so a crash cuts off at most the last one. When the disk is
    full the thread stops and `failure` says so; `check` raises it in the training thread. For the last word
    (`end_with`) there is the room that `new_run_folder` has kept.
    """

    def __init__(self, run_folder: Path, rank: int, *, at_once: bool = False) -> None:
        """`at_once`: each line is on disk when `write` returns, for what comes next may hang."""
        self.path = run_folder / f"rank-{rank}.jsonl"
        self.failure: Exception | None = None
        self._queue: queue.SimpleQueue[RankLine | None] = queue.SimpleQueue()
        self._ending = threading.Event()
        self._reserve = run_folder / f".rank-{rank}.reserve"
        # O_EXCL: a second rank that takes itself for rank K is a broken launch, and must not mix its lines in.
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        self._at_once = threading.Lock() if at_once else None
        self._thread = threading.Thread(target=self._drain, name="rank-log", daemon=True)
        self._thread.start()

    def write(self, line: RankLine) -> None:
        """Queues one line and returns; of a log that writes at once, appends it whole.

        Raises:
            OSError: a disk that is written to at once does not take it.
        """
        if self._at_once is None:
            self._queue.put(line)
            return
        with self._at_once:
            self._append(f"{line.model_dump_json()}\n".encode())
            os.fsync(self._file)

    def alive(self) -> None:
        """A sign of life where nothing is recorded for long: evaluation is no hang."""
        os.utime(self._file)

    def check(self) -> None:
        """Raises what ended the writing thread, if anything did."""
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Writes what is queued, forces it to disk and raises what went wrong.

        Raises:
            OSError: a line could not be written (disk full, quota, read-only).
        """
        self._stop()
        self.check()
        os.fsync(self._file)
        os.close(self._file)
        self._reserve.unlink(missing_ok=True)

    def end_with(self, error: ErrorLine) -> None:
        """Writes what is queued, then why this rank ends, in the room kept for it should the disk be full.

        Raises nothing for a disk that takes not even that: this is called where nobody is left to act on it.
        """
        self._stop()
        # A line the full disk cut off must not swallow this one.
        newline = "\n" if self.failure is not None else ""
        # Messages name paths, and a path may hold bytes that are no UTF-8 (lone surrogates in Python).
        text = {key: _writable(value) for key, value in error if isinstance(value, str)}
        line = error.model_copy(update=text).model_dump_json()
        with contextlib.suppress(OSError):
            self._reserve.unlink(missing_ok=True)
            self._append(f"{newline}{line}\n".encode())
            os.fsync(self._file)
        os.close(self._file)

    def _stop(self) -> None:
        self._ending.set()
        self._queue.put(None)
        self._thread.join()

    def _drain(self) -> None:
        last = False
        while not last:
            batch = [self._queue.get()]
            # Gather what comes within a moment: one write for many short steps.
            if batch[-1] is not None and self._queue.empty():
                self._ending.wait(_FLUSH_SECONDS)
            while not self._queue.empty():
                batch.append(self._queue.get())
            last = None in batch
            try:
                text = "".join(line.model_dump_json() + "\n" for line in batch if line is not None)
                self._append(text.encode())
            except Exception as error:  # disk full, a value that cannot be written: `check` raises it
                self.failure = error
                return

    def _append(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._file, data) :]


def _writable(text: str) -> str:
    return text.encode("utf-8", errors="backslashreplace").decode()


def rank_files(folder: Path) -> dict[int, Path]:
    """Rank to its file, in the order of ranks."""
    files = {int(match[1]): path for path in folder.iterdir() if (match := _RANK_FILE.fullmatch(path.name))}
    return dict(sorted(files.items()))


def read_lines(path: Path, record: type[Lines], refuse: Callable[[bytes, RankLine], object]) -> Lines:
    """One rank's lines. A line that is broken, or cut off by a crash, is named in `broken` and left out.

    Args:
        path: the rank's file, whose name has its number.
        record: the table of the kinds of lines.
        refuse: raises ValueError for a line, as text and as parsed, that holds what this program never writes.
    """
    with path.open("rb") as file:
        return parse_lines(path, enumerate(file, start=1), record, refuse)


def parse_lines(
    path: Path,
    numbered: Iterable[tuple[int, bytes]],
    record: type[Lines],
    refuse: Callable[[bytes, RankLine], object],
    **known: object,
) -> Lines:
    """The same of lines with their numbers; `known` are fields that were read apart from them."""
    lines: list[RankLine] = []
    broken: list[str] = []
    for number, raw in numbered:
        if raw.endswith(b"\n") and not raw.strip():
            continue  # ends a line that a full disk had cut off
        try:
            if not raw.endswith(b"\n"):
                raise ValueError("cut off")
            line = record.parse(raw)
            refuse(raw, line)
            lines.append(line)
        except (RecursionError, ValueError) as error:
            broken.append(f"{path.name}:{number}: {first_reason(error)}")
    match = _RANK_FILE.fullmatch(path.name)
    return record.of(lines, rank=int(match[1]) if match else 0, broken=tuple(broken), **known)


def first_reason(error: BaseException) -> str:
    """What is wrong with a line or a file, on one line of at most 300 characters."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "content"
        return printable(f"{where[:80]}: {first['msg']}")[:300]
    return printable(str(error)).splitlines()[0][:200] if str(error) else type(error).__name__
