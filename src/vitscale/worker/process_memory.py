"""This process's own memory, for forks that are to be like new processes: as others see them, and in what they map.

Others see the environment and the command line that a process began with (/proc/PID/environ and cmdline), whatever
`os.environ` is set to. These lie on its own stack, where it may write without any privilege (proc(5)): a fork of a
prepared process so carries its run's token, and shows whose rank it is.

A fork shares its parent's private pages, and they count as its own. Of files it maps no page before it touches it: that
would show as less memory (libraries are some 65 MB), and as page faults where a new process has none.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from vitscale.processes.launch_file import TOKEN_VARIABLE

_ARGUMENTS_START, _ENVIRONMENT_START = 48, 50
"""Fields of /proc/PID/stat, counted from 1."""
_PRESENT, _OF_A_FILE = np.uint64(1 << 63), np.uint64(1 << 61)
"""Of an entry of /proc/PID/pagemap (Documentation/admin-guide/mm/pagemap.rst)."""
_MADV_POPULATE_READ = 22
"""Linux 5.14 and later."""


class InitialMemory:
    """Of this process. It was started with a placeholder for the token, and for a command longer than its own."""

    def __init__(self) -> None:
        stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
        # The name in field 2 may hold blanks and parentheses.
        fields = stat[stat.rindex(")") + 2 :].split()
        self._command_at, environment_at = (int(fields[n - 3]) for n in (_ARGUMENTS_START, _ENVIRONMENT_START))
        self._command_bytes = len(Path("/proc/self/cmdline").read_bytes())
        name = f"{TOKEN_VARIABLE}=".encode()
        environment = Path("/proc/self/environ").read_bytes()
        offset = (b"\0" + environment).find(b"\0" + name)
        self._placeholder = environment[offset + len(name) :].partition(b"\0")[0] if offset >= 0 else b""
        self._token_at = environment_at + offset + len(name)

    def unfit(self) -> str | None:
        """Why it cannot be written; None where it can."""
        if not self._placeholder or not self._command_at:
            return "where its environment lies is not known"
        if ctypes.string_at(self._token_at, len(self._placeholder)) != self._placeholder:
            return "its environment does not lie where the kernel says"
        return None

    def set_token(self, token: str | None) -> None:
        """Writes a token as long as the placeholder; None: the placeholder."""
        text = self._placeholder if token is None else token.encode()
        if len(text) != len(self._placeholder):
            raise ValueError(f"a token of {len(text)} characters has no room in {len(self._placeholder)}")
        ctypes.memmove(self._token_at, text, len(text))

    def set_command(self, command: list[str]) -> None:
        """Writes a command line, cut off where there is no room for all of it."""
        text = b"\0".join(word.encode(sys.getfilesystemencoding(), "surrogateescape") for word in command)
        # The last byte stays 0: without it the kernel reads on into the environment.
        ctypes.memmove(
            self._command_at, text[: self._command_bytes - 1].ljust(self._command_bytes, b"\0"), self._command_bytes
        )


def file_pages() -> list[tuple[int, int]]:
    """The pages of files that this process has mapped: (address, bytes) of each stretch. Empty where it is not told."""
    page = mmap.PAGESIZE
    found = []
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:  # noqa: PTH123 - seeked
            for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
                span, _, _, _, inode, *_ = line.split()
                if inode == "0":
                    continue
                begin, end = (int(address, 16) for address in span.split("-"))
                entries = np.frombuffer(
                    os.pread(pagemap.fileno(), (end - begin) // page * 8, begin // page * 8), np.uint64
                )
                here = ((entries & _PRESENT) != 0) & ((entries & _OF_A_FILE) != 0)
                edges = np.flatnonzero(np.diff(np.concatenate(([False], here, [False]))))
                stretches = edges.reshape(-1, 2).tolist()
                found += [(begin + first * page, (last - first) * page) for first, last in stretches]
    except OSError:
        return []
    return found


def map_pages(stretches: Iterable[tuple[int, int]]) -> None:
    """Maps these pages into this process as reading them would, but for those that are gone."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with open("/proc/self/mem", "rb", buffering=0) as memory:  # noqa: PTH123 - seeked
        for address, size in stretches:
            if madvise(address, size, _MADV_POPULATE_READ) == 0:
                continue
            for page in range(address, address + size, mmap.PAGESIZE):
                with contextlib.suppress(OSError):
                    os.pread(memory.fileno(), 1, page)
