"""Values that several functions of the API take: paths, sizes, rank counts, where ranks are started."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from vitscale.errors import RequestError, shown

if TYPE_CHECKING:
    from rich.console import Console

    from vitscale.study.file import Overlay

StrPath: TypeAlias = str | Path
"""A path; `~` at its beginning is the home folder."""

MOST_RANKS = 100_000
MOST_COUNTS = 1000
"""Most rank counts in one question."""
_SIZE_TEXT = re.compile(r"\s*(?P<number>\d{1,9}(?:\.\d{1,9})?)\s*(?P<prefix>[KMGTkmgt])(?P<binary>[Ii]?)[Bb]\s*")
"""Without IGNORECASE, by which other letters pass too: a k may then be the sign of kelvin."""


@dataclass(frozen=True)
class LaunchOptions:
    """How ranks are started and where, put over what a study says. None: as the study says."""

    launcher: str | None = None
    """How ranks are started: local, torchrun, mpirun, srun, deepspeed."""
    scheduler: str | None = None
    """Where they run: local, hostfile, slurm, pbs, lsf, flux or kubernetes."""
    hostfile: StrPath | None = None
    """Hosts to run on: a file with one `NAME slots=N` a line."""
    site: StrPath | None = None
    """A site file, whose [launch], [slurm], [kubernetes] and [node] are put over the study's own."""

    def overlay(self) -> Overlay:
        """Return the sections that are put over a study; the options here win over the site file.

        Raises:
            RequestError: an option or the site file cannot be used.
        """
        from vitscale.study.file import overlay

        return overlay(
            path_or_none(self.site),
            launcher=self.launcher,
            scheduler=self.scheduler,
            hostfile=path_or_none(self.hostfile),
        )


def overlay_of(launch: LaunchOptions | None) -> Overlay:
    """Return the sections that are put over a study; none where nothing is given.

    Raises:
        RequestError: an option or the site file cannot be used.
    """
    return (launch or LaunchOptions()).overlay()


def path_of(path: StrPath) -> Path:
    """Return the path, with `~` as the home folder."""
    return Path(path).expanduser()


def path_or_none(path: StrPath | None) -> Path | None:
    """Return the path with `~` as the home folder; None stays None."""
    return None if path is None else path_of(path)


def progress_console(console: Console | None) -> Console:
    """Return the console for progress: the caller's, else one on standard error."""
    if console is not None:
        return console
    from rich.console import Console as RichConsole

    return RichConsole(stderr=True, emoji=False)


def size_bytes(text: str, option: str) -> int:
    """Return the bytes of "80GB" (10^9 bytes) or "80GiB" (2^30).

    Raises:
        RequestError: it is no size, or less than a byte.
    """
    match = _SIZE_TEXT.fullmatch(text)
    if match is None:
        raise RequestError(f"{option}: {shown(text)} is no size", next_step='Write "80GB" or "75.5GiB"')
    base = 1024 if match["binary"] else 1000
    power = "KMGT".index(match["prefix"].upper()) + 1
    size = int(float(match["number"]) * base**power)
    if size < 1:
        raise RequestError(f"{option}: {shown(text)} is nothing", next_step='Write "80GB" or "75.5GiB"')
    return size


def memory_bytes(gpu_memory: str | int | None) -> int | None:
    """Return the bytes of a device's memory that is given in bytes or as text ("80GB"); None stays None.

    Raises:
        RequestError: it is no size, or less than a byte.
    """
    if isinstance(gpu_memory, str):
        return size_bytes(gpu_memory, "--gpu-memory")
    if gpu_memory is not None and gpu_memory < 1:
        raise RequestError(f"--gpu-memory: {gpu_memory} bytes cannot be", valid=["1 or more"])
    return gpu_memory


def positive(value: float | None, option: str, most: float = math.inf) -> float | None:
    """Return `value`, checked to be above 0 and at most `most`; None stays None.

    Raises:
        RequestError: it is given and out of range.
    """
    if value is None:
        return None
    is_valid = 0 < value <= most and math.isfinite(value)
    if not is_valid:
        upper = "" if math.isinf(most) else f" and at most {most:g}"
        raise RequestError(f"{option}: {value:g} cannot be", valid=[f"numbers above 0{upper}"])
    return value


def check_rank_count(count: int, option: str) -> None:
    """Refuse a rank count that cannot be.

    Raises:
        RequestError: it is below 1 or above `MOST_RANKS`.
    """
    if not 1 <= count <= MOST_RANKS:
        raise RequestError(f"{option}: {count} ranks cannot be", valid=[f"1 to {MOST_RANKS:,}"])


def rank_counts(counts: Iterable[int] | int | None, option: str = "--gpus") -> tuple[int, ...] | None:
    """Return rank counts, each once and in rising order; None stays None.

    Raises:
        RequestError: a count cannot be, or there are more than `MOST_COUNTS`, or none.
    """
    if counts is None:
        return None
    distinct = {counts} if isinstance(counts, int) else set(counts)
    for count in distinct:
        check_rank_count(count, option)
    if not distinct:
        raise RequestError(f"{option} has no rank count", next_step="Give one or more, such as [8, 16, 32]")
    if len(distinct) > MOST_COUNTS:
        raise too_many_counts(option)
    return tuple(sorted(distinct))


def too_many_counts(option: str) -> RequestError:
    """Return the refusal of more rank counts than `MOST_COUNTS`."""
    return RequestError(f"{option}: more than {MOST_COUNTS:,} rank counts", next_step="Ask for fewer, such as 8,16,32")
