"""Resident memory of this process, counted alike whether it was started anew or forked.

`fork` copies the page tables of a process's own memory, but not those of files that it has mapped: pages of libraries
become resident in a fork only when it touches them (`dup_mmap` in Linux's kernel/fork.c). A process that had imported
the same libraries itself would have them resident from its imports on, so they are added.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_file_bytes_of_parent = 0


@dataclass(frozen=True)
class ResidentMemory:
    """What a process has in memory; None where the kernel does not tell."""

    now_bytes: int | None
    peak_bytes: int | None
    file_bytes: int | None
    """Of `now_bytes`, pages of files that it has mapped: of programs and libraries first of all."""


def count_file_pages_of_parent(file_bytes: int) -> None:
    """Lets `resident_memory` count at least as many bytes of files as the process had that this one is a fork of."""
    global _file_bytes_of_parent
    _file_bytes_of_parent = file_bytes


def resident_memory(status: Path = Path("/proc/self/status")) -> ResidentMemory:
    """Returns the resident memory of this process, from VmRSS, VmHWM and RssFile of /proc/PID/status.

    `getrusage` would give the peak of the launcher that this process was forked from, if that was larger.
    """
    try:
        text = status.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ResidentMemory(None, None, None)
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    now_bytes = _bytes_of(fields.get("VmRSS", ""))
    peak_bytes = _bytes_of(fields.get("VmHWM", ""))
    file_bytes = _bytes_of(fields.get("RssFile", ""))
    untouched_bytes = 0 if file_bytes is None else max(0, _file_bytes_of_parent - file_bytes)
    return ResidentMemory(
        now_bytes=None if now_bytes is None else now_bytes + untouched_bytes,
        peak_bytes=None if peak_bytes is None else peak_bytes + untouched_bytes,
        file_bytes=None if file_bytes is None else file_bytes + untouched_bytes,
    )


def _bytes_of(kibibytes: str) -> int | None:
    number, _, unit = kibibytes.strip().partition(" ")
    return int(number) * 1024 if unit == "kB" and number.isascii() and number.isdigit() else None
