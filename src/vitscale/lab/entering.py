"""Commands on hosts: how they are started from outside, and finding what waits outside for them."""

from __future__ import annotations

import sys
from pathlib import Path

from vitscale.lab import quota
from vitscale.lab.processes import Process, process
from vitscale.lab.state import State

_ENTER = Path(__file__).with_name("enter.py")


def command(lab: State, number: int, argv: list[str]) -> list[str]:
    """`argv` as it is run on a host."""
    host = lab.hosts[number]
    controller = quota.find_controller()
    members = controller.members(lab.cgroup, host.name) if controller else None
    procs = str(members) if members is not None and members.exists() else "-"
    return [*_beginning(host.first), procs, "--", *argv]


def waiting(first: Process) -> list[Process]:
    """Processes outside that wait for a command on the host whose first process this is.

    The kernel ends a host only when each of its dead was reaped. One that is stopped (Ctrl-Z) reaps nothing, and must
    be ended with the host.
    """
    sought = _beginning(first)[1:]
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if arguments[1 : len(sought) + 1] == sought:
                found.append(process(int(folder.name)))
        except OSError:
            continue
    return found


def _beginning(first: Process) -> list[str]:
    return [sys.executable, "-I", "-S", str(_ENTER), str(first.pid), str(first.start_ticks)]
