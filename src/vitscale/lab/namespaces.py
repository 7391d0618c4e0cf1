"""Makes namespaces, held by one process whose end frees them, and runs programs in them."""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from vitscale.lab import processes, quota
from vitscale.lab.processes import Process, process

if TYPE_CHECKING:
    from vitscale.lab.state import State

_INIT = Path(__file__).with_name("init.py")
_START_SECONDS = 30.0
_KINDS = ("--net", "--uts", "--ipc", "--mount", "--pid")


def hold(name: str, write_down: Callable[[Process, Process], None]) -> tuple[subprocess.Popen[str], Process]:
    """Starts a process that holds namespaces of its own, with `name` as their host name.

    `write_down` gets `unshare`, which waits, and the first process inside. Only when it has returned may they outlive
    this process: nothing is ever left that is not written down. Returned is `unshare`, to be waited for, and the first
    process.

    Raises:
        RequestError: namespaces cannot be made here.
    """
    argv = [
        *(processes.find("unshare") or "unshare", *_KINDS, "--fork", "--kill-child", "--mount-proc"),
        *(sys.executable, "-I", "-S", str(_INIT), name),
    ]
    holder = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        start_new_session=True,  # Ctrl-C ends what was asked for in the terminal, not the hosts
    )
    if holder.stdin is None or holder.stdout is None or holder.stderr is None:
        raise AssertionError("pipes were asked for")
    try:
        with holder.stdin, holder.stdout, holder.stderr:
            ready, _, _ = select.select([holder.stdout], [], [], _START_SECONDS)
            if not ready or holder.stdout.readline() != "ready\n":
                holder.kill()
                raise processes.failed(argv, holder.stderr.read())
            first = process(_only_child(holder.pid))
            write_down(process(holder.pid), first)
            holder.stdin.write("stay\n")
    except BaseException:
        holder.kill()
        holder.wait()
        raise
    return holder, first


def _only_child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii"))


def call_inside(first: Process, program: str, *arguments: str) -> str:
    """Runs a program to its end in a host's network and mount namespaces, and returns what it printed.

    Raises:
        RequestError: it failed, with what it said.
    """
    inside = processes.find(program) or program
    return processes.call("nsenter", f"--target={first.pid}", "--net", "--mount", "--", inside, *arguments)


_ENTER = Path(__file__).with_name("enter.py")


def enter_command(lab: State, number: int, argv: list[str]) -> list[str]:
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
