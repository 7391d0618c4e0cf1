"""Processes named by id and start time, so that no other process is ever taken for them.

Also the programs that make a laboratory: which are missing, and how they are run. And namespaces, each held by one
process whose end frees them, with programs run in them.
"""

from __future__ import annotations

import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from vitscale.base.interpreter import python_module
from vitscale.errors import RequestError, VitscaleError, shown
from vitscale.lab import enter, quota

ENDING_SECONDS = 10.0
"""Limit for killed processes, which are gone in milliseconds unless the kernel holds one (for a disk that hangs)."""


class Process(BaseModel):
    """One process, told apart from a later one with the same id."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    pid: int = Field(gt=1)
    start_ticks: int = Field(ge=0)
    """When it started, in clock ticks since boot."""

    @property
    def alive(self) -> bool:
        """Whether the process still runs; a zombie does not."""
        return enter.start_ticks(self.pid) == self.start_ticks


def process(pid: int) -> Process:
    """The process that now has this id.

    Raises:
        ProcessLookupError: no process has it.
    """
    ticks = enter.start_ticks(pid)
    if ticks is None:
        raise ProcessLookupError(pid)
    return Process(pid=pid, start_ticks=ticks)


def kill(processes: Iterable[Process]) -> None:
    """Kills the processes that still run, and returns when they are gone.

    Raises:
        VitscaleError: one was not gone after 10 s.
    """
    handles = dict(_handles(processes))
    try:
        for handle in handles:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        end = time.monotonic() + ENDING_SECONDS
        for handle, process in handles.items():
            left_ms = max(0.0, end - time.monotonic()) * 1e3
            if not _gone(handle, left_ms):
                what = f"process {process.pid} of the lab did not end within {ENDING_SECONDS:g} s of SIGKILL"
                raise VitscaleError(what, next_step="The kernel still holds it, for a disk mostly: try again later")
    finally:
        for handle in handles:
            os.close(handle)


def _handles(processes: Iterable[Process]) -> Iterator[tuple[int, Process]]:
    for process in processes:
        try:
            handle = os.pidfd_open(process.pid)
        except ProcessLookupError:
            continue
        if process.alive:  # asked after the handle was opened, which from then on means no other process
            yield handle, process
        else:
            os.close(handle)


def _gone(handle: int, milliseconds: float) -> bool:
    waiting = select.poll()
    waiting.register(handle, select.POLLIN)
    return bool(waiting.poll(milliseconds))


def pid_namespace(pid: int | str) -> str | None:
    """The PID namespace of process `pid`, or of "self"; None where the process has ended."""
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return None


def in_same_namespace(pid: int) -> list[int]:
    """Ids, as seen from here, of all processes in the PID namespace of process `pid`; without zombies."""
    inside = pid_namespace(pid)
    others = (int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdecimal())
    return sorted(
        peer
        for peer in others
        if inside is not None and pid_namespace(peer) == inside and enter.start_ticks(peer) is not None
    )


def innermost_id(pid: int) -> int | None:
    """The id that process `pid` has in its own PID namespace; None where the process has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return next((int(line.split()[-1]) for line in status.splitlines() if line.startswith("NSpid:")), None)


_NEEDED = {"unshare": "util-linux", "nsenter": "util-linux", "mount": "mount", "ip": "iproute2", "tc": "iproute2"}
"""Programs -> the Debian packages that have them."""
_SSH = {"ssh": "openssh-client", "ssh-keygen": "openssh-client", "sshd": "openssh-server"}
_SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")
"""Debian's folders for these programs, which root's PATH may lack (after `su`, for example)."""


def find(program: str) -> str | None:
    """A program's absolute path; None where it is not installed."""
    return shutil.which(program) or shutil.which(program, path=os.pathsep.join(_SYSTEM_FOLDERS))


def missing_for_ssh() -> tuple[str, ...]:
    """Packages without which hosts have no ssh."""
    return tuple(dict.fromkeys(package for program, package in _SSH.items() if find(program) is None))


def require() -> None:
    """Refuses where hosts cannot be made.

    Raises:
        RequestError: this is not Linux, the user is not root, or a program is not installed.
    """
    if sys.platform != "linux":
        raise RequestError(f"vitscale lab needs Linux, and this is {sys.platform}")
    if os.geteuid() != 0:
        own = [*python_module("vitscale")] if sys.argv[0].endswith("__main__.py") else sys.argv[:1]
        again = shlex.join([*own, *sys.argv[1:]])
        raise RequestError("vitscale lab needs root: it makes namespaces", next_step=f"Use: sudo {again}")
    if missing := [program for program in _NEEDED if find(program) is None]:
        packages = " ".join(dict.fromkeys(_NEEDED[program] for program in missing))
        raise RequestError(
            f"vitscale lab needs {', '.join(missing)}", next_step=f"Install it: apt-get install {packages}"
        )


def call(program: str, *arguments: str) -> str:
    """Runs a program to its end and returns what it printed.

    Raises:
        RequestError: it failed; the message has its output.
    """
    argv = [find(program) or program, *arguments]
    answer = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise failed([program, *arguments], answer.stderr or answer.stdout)
    return answer.stdout


def failed(argv: Sequence[str], said: str) -> RequestError:
    """The error for a program that refused."""
    what = f"this machine cannot make hosts: {shown(' '.join(argv))} said: {shown(said.strip() or 'nothing')}"
    return RequestError(what, next_step="In a container, hosts can be made only if it was started with --privileged")


_INIT = Path(__file__).with_name("init.py")
_START_SECONDS = 30.0
_KINDS = ("--net", "--uts", "--ipc", "--mount", "--pid")


def hold(name: str, write_down: Callable[[Process, Process], None]) -> tuple[subprocess.Popen[str], Process]:
    """Starts a process that holds namespaces of its own, with `name` as their host name.

    `write_down` gets `unshare`, which waits, and the first process inside. Only when it has returned may the two
    outlive this process, so that nothing is ever left that is not written down. Returns `unshare`, to be waited for,
    and the first process.

    Raises:
        RequestError: namespaces cannot be made here.
    """
    argv = [
        *(find("unshare") or "unshare", *_KINDS, "--fork", "--kill-child", "--mount-proc"),
        *(sys.executable, "-I", "-S", str(_INIT), name),
    ]
    holder = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        start_new_session=True,  # Ctrl-C ends the command in the terminal, not the hosts
    )
    if holder.stdin is None or holder.stdout is None or holder.stderr is None:
        raise AssertionError("pipes were asked for")
    try:
        with holder.stdin, holder.stdout, holder.stderr:
            ready, _, _ = select.select([holder.stdout], [], [], _START_SECONDS)
            if not ready or holder.stdout.readline() != "ready\n":
                holder.kill()
                raise failed(argv, holder.stderr.read())
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
        RequestError: it failed; the message has its output.
    """
    inside = find(program) or program
    return call("nsenter", f"--target={first.pid}", "--net", "--mount", "--", inside, *arguments)


_ENTER = Path(__file__).with_name("enter.py")


def enter_command(first: Process, argv: Sequence[str], *, cgroup: str, host: str) -> list[str]:
    """Returns the argv that runs `argv` on the host with this first process.

    Args:
        first: the host's first process.
        argv: what to run there.
        cgroup: name of the lab's cgroup, in which the host's quota holds for the command too.
        host: the host's name.
    """
    controller = quota.find_controller()
    members = controller.members(cgroup, host) if controller else None
    procs = str(members) if members is not None and members.exists() else "-"
    return [*_beginning(first), procs, "--", *argv]


def waiting(first: Process) -> list[Process]:
    """The processes outside that wait for a command on the host with this first process.

    The kernel ends a host only when all its dead processes are reaped. A waiting process that is stopped (Ctrl-Z) reaps
    nothing, and must be ended with the host.
    """
    sought = _beginning(first)[1:]
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if arguments[1 : len(sought) + 1] == sought:
                processes.append(process(int(folder.name)))
        except OSError:
            continue
    return processes


def _beginning(first: Process) -> list[str]:
    return [sys.executable, "-I", "-S", str(_ENTER), str(first.pid), str(first.start_ticks)]
