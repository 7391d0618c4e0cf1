"""Hosts of a laboratory for a test, joined by links of known bandwidth; skipped or failed where they cannot be."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import needs
from forks import Prepared, prepared_here
from vitscale.lab import Laboratory, laboratory

INTERFACE = Laboratory.interface


class Hosts:
    """By number, from 0 on."""

    def __init__(self, lab: Laboratory) -> None:
        self._lab = lab

    def address(self, host: int) -> str:
        return self._lab.addresses[host]

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """`argv` as it is run on a host; it keeps its environment, and ends with what runs it."""
        return self._lab.command(host, argv)

    def prepared(self, host: int) -> Prepared:
        """Starts scripts on a host."""
        return prepared_here().on(_entering(self._lab, host))


@contextmanager
def joined_hosts(count: int, megabits_per_second: float) -> Iterator[Hosts]:
    """Hosts that each send and receive at most at the given rate."""
    needs.root_and("ip", "tc", "unshare", "nsenter")
    with laboratory(count, megabits_per_second) as lab:
        yield Hosts(lab)


def vitscale_on(lab: Laboratory, *arguments: str, cwd: Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Runs `vitscale ARGUMENTS` on the first host to its end: as a fork of a process that has imported it."""
    request = {"kind": "command", "argv": arguments, "environment": dict(os.environ), "cwd": str(cwd)}
    return Prepared.of_all("commands").on(_entering(lab, 0)).run(request, timeout)


def _entering(lab: Laboratory, host: int) -> list[str]:
    """The arguments of the laboratory's `enter.py`."""
    return lab.command(host, ["python"])[4:]  # behind `python -I -S enter.py`
