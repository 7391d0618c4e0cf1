"""Processes of a lab, named by id and start time, so that no other process is ever taken for them.

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
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

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
    """Return the process that now has this id.

    Raises:
        ProcessLookupError: no process has it.
    """
    ticks = enter.start_ticks(pid)
    if ticks is None:
        raise ProcessLookupError(pid)
    return Process(pid=pid, start_ticks=ticks)


def kill(processes: Iterable[Process]) -> None:
    """Kill the processes that still run, and return when they are gone.

    Raises:
        VitscaleError: one was not gone after 10 s.
    """
    process_by_handle: dict[int, Process] = {}
    try:
        for process in processes:
            handle = _open_handle(process)
            if handle is not None:
                process_by_handle[handle] = process
        for handle in process_by_handle:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        end = time.monotonic() + ENDING_SECONDS
        for handle, process in process_by_handle.items():
            if not _ends_within(handle, max(0.0, end - time.monotonic())):
                raise VitscaleError(
                    f"process {process.pid} of the lab did not end within {ENDING_SECONDS:g} s of SIGKILL",
                    next_step="The kernel still holds it, for a disk mostly: try again later",
                )
    finally:
        for handle in process_by_handle:
            os.close(handle)


def _open_handle(process: Process) -> int | None:
    """Return a descriptor that means this process alone, to be closed; None where the process has ended."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if process.alive:  # asked after the handle was opened, which from then on means no other process
        return handle
    os.close(handle)
    return None


def _ends_within(handle: int, seconds: float) -> bool:
    """Wait until the process of a handle has ended; False where it still runs after `seconds`."""
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(seconds * 1e3))


def pid_namespace(pid: int | str) -> str | None:
    """Return the PID namespace of process `pid`, or of "self"; None where the process has ended."""
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return None


def in_same_namespace(pid: int) -> list[int]:
    """Return the ids, as seen from here, of all processes in the PID namespace of process `pid`; without zombies."""
    namespace = pid_namespace(pid)
    if namespace is None:
        return []
    all_ids = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdecimal()]
    return sorted(
        other for other in all_ids if pid_namespace(other) == namespace and enter.start_ticks(other) is not None
    )


def innermost_id(pid: int) -> int | None:
    """Return the id that process `pid` has in its own PID namespace; None where the process has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    return None


_PACKAGE_BY_PROGRAM = {
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
    "ip": "iproute2",
    "tc": "iproute2",
}
"""Each program without which hosts cannot be made -> the Debian package that has it."""
_PACKAGE_BY_SSH_PROGRAM = {"ssh": "openssh-client", "ssh-keygen": "openssh-client", "sshd": "openssh-server"}
"""Each program without which hosts have no ssh -> the Debian package that has it."""
_SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")
"""Debian's folders for these programs, which root's PATH may lack (after `su`, for example)."""


def find(program: str) -> str | None:
    """Return a program's absolute path; None where it is not installed."""
    return shutil.which(program) or shutil.which(program, path=os.pathsep.join(_SYSTEM_FOLDERS))


def missing_for_ssh() -> tuple[str, ...]:
    """Return the packages without which hosts have no ssh."""
    missing_packages = [package for program, package in _PACKAGE_BY_SSH_PROGRAM.items() if find(program) is None]
    return tuple(dict.fromkeys(missing_packages))


def require() -> None:
    """Refuse where hosts cannot be made.

    Raises:
        RequestError: this is not Linux, the user is not root, or a program is not installed.
    """
    if sys.platform != "linux":
        raise RequestError(f"vitscale lab needs Linux, and this is {sys.platform}")
    if os.geteuid() != 0:
        is_module = sys.argv[0].endswith("__main__.py")
        program = [*python_module("vitscale")] if is_module else sys.argv[:1]
        command = shlex.join([*program, *sys.argv[1:]])
        raise RequestError("vitscale lab needs root: it makes namespaces", next_step=f"Use: sudo {command}")
    missing_programs = [program for program in _PACKAGE_BY_PROGRAM if find(program) is None]
    if missing_programs:
        packages = " ".join(dict.fromkeys(_PACKAGE_BY_PROGRAM[program] for program in missing_programs))
        raise RequestError(
            f"vitscale lab needs {', '.join(missing_programs)}", next_step=f"Install it: apt-get install {packages}"
        )


def call(program: str, *arguments: str) -> str:
    """Run a program to its end and return what it printed.

    Raises:
        RequestError: it failed; the message has its output.
    """
    argv = [find(program) or program, *arguments]
    answer = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise refused_by_program([program, *arguments], answer.stderr or answer.stdout)
    return answer.stdout


def refused_by_program(argv: Sequence[str], output: str) -> RequestError:
    """Return the error for a program that failed, because this machine does not let it do its work.

    Args:
        argv: the command.
        output: what it printed.
    """
    return RequestError(
        f"this machine cannot make hosts: {shown(' '.join(argv))} said: {shown(output.strip() or 'nothing')}",
        next_step="In a container, hosts can be made only if it was started with --privileged",
    )


_INIT_SCRIPT = Path(__file__).with_name("init.py")
_START_SECONDS = 30.0
"""Time in which a host's first process says that it is ready."""
_NAMESPACE_OPTIONS = ("--net", "--uts", "--ipc", "--mount", "--pid")


class NamespaceProcesses(NamedTuple):
    """The two processes that hold namespaces: these exist as long as the processes run."""

    outside: subprocess.Popen[str]
    """`unshare`, to be waited for."""
    first: Process
    """The first process inside."""


def start_namespaces(name: str, write_down: Callable[[Process, Process], None]) -> NamespaceProcesses:
    """Start a process that holds namespaces of its own.

    The first process inside (`init.py`) prints "ready", and then waits for "stay" on its input. Where this process dies
    before it has sent that, the first process ends, and the namespaces with it.

    Args:
        name: the host name in the namespaces.
        write_down: stores both processes: `unshare`, which waits, and the first process inside. Only when it has
            returned may the two outlive this process, so that nothing is ever left that is not written down.

    Raises:
        RequestError: namespaces cannot be made here.
    """
    argv = [
        *(find("unshare") or "unshare", *_NAMESPACE_OPTIONS, "--fork", "--kill-child", "--mount-proc"),
        *(sys.executable, "-I", "-S", str(_INIT_SCRIPT), name),
    ]
    outside = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        start_new_session=True,  # Ctrl-C ends the command in the terminal, not the hosts
    )
    if outside.stdin is None or outside.stdout is None or outside.stderr is None:
        raise AssertionError("pipes were asked for")
    try:
        with outside.stdin, outside.stdout, outside.stderr:
            ready, _, _ = select.select([outside.stdout], [], [], _START_SECONDS)
            if not ready or outside.stdout.readline() != "ready\n":
                outside.kill()
                raise refused_by_program(argv, outside.stderr.read())
            first = process(_only_child(outside.pid))
            write_down(process(outside.pid), first)
            outside.stdin.write("stay\n")
    except BaseException:
        outside.kill()
        outside.wait()
        raise
    return NamespaceProcesses(outside, first)


def _only_child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii"))


def call_inside(first: Process, program: str, *arguments: str) -> str:
    """Run a program to its end in a host's network and mount namespaces, and return what it printed.

    Raises:
        RequestError: it failed; the message has its output.
    """
    return call("nsenter", f"--target={first.pid}", "--net", "--mount", "--", find(program) or program, *arguments)


_ENTER_SCRIPT = Path(__file__).with_name("enter.py")


def enter_command(first: Process, argv: Sequence[str], *, cgroup: str, host: str) -> list[str]:
    """Return the argv that runs `argv` on the host with this first process.

    Args:
        first: the host's first process.
        argv: the command to run there.
        cgroup: name of the lab's cgroup, in which the host's quota holds for the command too.
        host: the host's name.
    """
    controller = quota.find_controller()
    members = controller.members(cgroup, host) if controller is not None else None
    has_cgroup = members is not None and members.exists()
    return [*_enter_argv(first), str(members) if has_cgroup else "-", "--", *argv]


def waiting_for_commands(first: Process) -> list[Process]:
    """Return the processes outside the host with this first process that wait for a command on it.

    Each is an `enter.py` that was started with the host's first process among its arguments (`enter_command`).

    The kernel ends a host only when all its dead processes are reaped. A waiting process that is stopped (Ctrl-Z) reaps
    nothing, and must be ended with the host.
    """
    _, *arguments_for_host = _enter_argv(first)
    waiting_processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        _, *arguments = _argv_of_process(folder)
        if arguments[: len(arguments_for_host)] == arguments_for_host:
            with suppress(OSError):  # it has ended by now
                waiting_processes.append(process(int(folder.name)))
    return waiting_processes


def _argv_of_process(folder: Path) -> list[str]:
    """Return the argv of the process with this folder in /proc; one empty text where it has ended."""
    try:
        command_line = (folder / "cmdline").read_bytes()
    except OSError:
        return [""]
    return command_line.decode(errors="replace").split("\0")


def _enter_argv(first: Process) -> list[str]:
    """Return the beginning of the argv of every `enter.py` for the host with this first process.

    It is the interpreter, its options, the script, and the id and start of the first process.
    """
    return [sys.executable, "-I", "-S", str(_ENTER_SCRIPT), str(first.pid), str(first.start_ticks)]
