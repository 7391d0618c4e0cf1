"""Files that the command wrote in its folder while it ran: new ones, and those that it wrote over."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_MOST_ENTRIES = 200_000
"""Names that are looked at: a folder of a dataset has millions."""
_MOST_SECONDS = 10.0
_MOST_LISTED = 100
"""Files that are listed, the largest first; all are counted."""
_PASSED_OVER = frozenset({".git", "__pycache__", "site-packages", "node_modules"})
"""Folders that are not entered."""


class WrittenFile(NamedTuple):
    """A file that was written."""

    path: str
    """Below the command's folder."""
    size_bytes: int


@dataclass(frozen=True)
class WrittenFiles:
    """The files that were written below a folder."""

    files: tuple[WrittenFile, ...]
    """The largest ones, at most 100, the largest first."""
    number: int
    """All that were written, of those that were looked at."""
    is_complete: bool
    """Whether every file was looked at; a folder may have too many."""


def files_written_since(folder: Path, since_ns: int, besides: Path) -> WrittenFiles:
    """Return the files below a folder that were modified since a time.

    Args:
        folder: the folder; links to others are not followed.
        since_ns: modification time of a file that was written just before the command began. A file system may have
            another clock than this host, so that the host's own time would not do.
        besides: a folder that is passed over: the explanation's own results.
    """
    deadline = time.monotonic() + _MOST_SECONDS
    written: list[WrittenFile] = []
    is_complete = True
    for position, entry in enumerate(_entries_below(folder, besides)):
        if position >= _MOST_ENTRIES or time.monotonic() > deadline:
            is_complete = False
            break
        with suppress(OSError):
            state = entry.stat(follow_symlinks=False)
            if stat.S_ISREG(state.st_mode) and state.st_mtime_ns > since_ns:
                written.append(WrittenFile(os.path.relpath(entry.path, folder), state.st_size))
    written.sort(key=lambda file: (-file.size_bytes, file.path))
    return WrittenFiles(tuple(written[:_MOST_LISTED]), len(written), is_complete)


def _entries_below(folder: Path, besides: Path) -> Iterator[os.DirEntry[str]]:
    """Yield all files below a folder, those of one folder after the other; unreadable folders are passed over."""
    waiting = [str(folder)]
    while waiting:
        with suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    yield entry
                elif entry.name not in _PASSED_OVER and Path(entry.path).absolute() != besides:
                    waiting.append(entry.path)
