"""Resident memory of this process, counted alike whether it was started anew or forked.

Pages of files that a process has mapped (of Python, torch and other libraries) are left out. They lie in memory once
for all processes of a host, and `fork` does not copy their page tables (`dup_mmap` in Linux's kernel/fork.c): the
kernel counts 65 MB less of them for a fork than for a process that imported the same libraries itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ResidentMemory:
    """Bytes that a process has in memory, without pages of files; None where the kernel does not report them."""

    now_bytes: int | None
    peak_bytes: int | None
    """The most so far; about that, see `resident_memory`."""


def resident_memory(status: Path = Path("/proc/self/status")) -> ResidentMemory:
    """Returns the resident memory of this process, from the fields of /proc/PID/status (proc(5)).

        now  = VmRSS - RssFile   resident now, less the pages of files that are resident now
        peak = VmHWM - RssFile   highest VmRSS so far, less the same pages

    The pages of files at the time of the peak are not known: the kernel keeps the peak with them only. There were at
    most as many as now, since a working process only maps more files. So `peak_bytes` may be a little too low, where
    memory was highest before the last files were mapped.

    `getrusage` has a peak too, but after a fork that of the launcher, if it was larger.

    Args:
        status: the kernel's file on the process.
    """
    try:
        text = status.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ResidentMemory(None, None)
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    file_bytes = _bytes_of(fields.get("RssFile", ""))
    if file_bytes is None:
        return ResidentMemory(None, None)
    resident_bytes = _bytes_of(fields.get("VmRSS", ""))
    peak_resident_bytes = _bytes_of(fields.get("VmHWM", ""))
    return ResidentMemory(
        now_bytes=None if resident_bytes is None else resident_bytes - file_bytes,
        peak_bytes=None if peak_resident_bytes is None else peak_resident_bytes - file_bytes,
    )


def _bytes_of(kibibytes: str) -> int | None:
    """Returns 2048 for "  2 kB", as /proc/PID/status writes it; None for any other form."""
    number, _, unit = kibibytes.strip().partition(" ")
    return int(number) * 1024 if unit == "kB" and number.isascii() and number.isdigit() else None
