"""`python enter.py PID TICKS PROCS -- ARGV...`: runs ARGV in the namespaces and the cgroup of a host.

PID and TICKS name the host's first process and when it started; PROCS is its cgroup's `cgroup.procs`, or `-`. The
command keeps its folder, environment and open files. It gets signals that are sent to this process, and is killed with
it; this process exits as the command does. This module imports nothing heavy: it runs before every command of a host.
"""

import ctypes
import os
import resource
import select
import signal
import sys
from pathlib import Path
from typing import NamedTuple, NoReturn

NAMESPACES = ("ipc", "net", "uts", "mnt", "pid")
"""Namespaces. Only the command enters all but the last, so that the process waiting outside keeps no host alive."""

_FORWARDED_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
_SENT_BY_TERMINAL = 0x80
"""`si_code` SI_KERNEL: the signal comes from a pressed key, and the command, in the same process group, got it too."""
_EXIT_NOT_ENTERED = 126
_EXIT_NOT_RUN = 127
"""Exit codes, as in a shell."""
_libc = ctypes.CDLL(None, use_errno=True)


def start_ticks(pid: int) -> int | None:
    """Return when process `pid` started, in clock ticks since boot; None where it does not exist, or is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # proc(5): the name in parentheses may hold anything; after it come the state, field 3, and the start, field 22.
    _, _, after_name = stat.rpartition(")")
    fields = after_name.split()
    state = fields[0]
    return int(fields[22 - 3]) if state not in "ZX" else None


def main(arguments: list[str]) -> NoReturn:
    """Enter the host, run the command, and exit as the command did."""
    match arguments:
        case [pid, ticks, procs, "--", *command] if pid.isdecimal() and ticks.isdecimal() and command:
            pass
        case _:
            sys.exit("usage: enter.py PID TICKS PROCS -- COMMAND...")
    sys.path.append(str(Path(__file__).parents[2]))  # this file is run by its path, in isolated mode
    from vitscale.processes.parent_death import end_with_parent

    folder = Path.cwd()
    host = _open_host(int(pid), int(ticks), procs)
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED_SIGNALS | {signal.SIGCHLD})
    _set_namespace(host.pid_namespace)  # which only children of this process enter
    # The parent keeps the other end open: this one can be read, and has nothing, once the parent is gone.
    parent_pipe, parents_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(parents_end)
            _enter(host)
            os.chdir(folder)
            end_with_parent(os.getppid())
            _become(command, parent_pipe)
        except OSError as error:
            _fail(str(error))
    for descriptor in host.other_namespaces:
        os.close(descriptor)
    if host.cgroup is not None:
        os.close(host.cgroup)
    _exit_as(_follow(child))


class _Host(NamedTuple):
    """The parts of a host that a command enters."""

    pid_namespace: int
    """An open descriptor."""
    other_namespaces: tuple[int, ...]
    """Open descriptors."""
    cgroup: int | None
    """Open descriptor of `cgroup.procs`; None where the host has no cgroup."""
    cores: set[int]


def _open_host(pid: int, ticks: int, procs: str) -> _Host:
    """Open a host that the first process `pid` holds; ends this process where the host is gone.

    Args:
        pid: the host's first process.
        ticks: when that process started, by which it is told from a later one with the same id.
        procs: path of the host's `cgroup.procs`; "-" where there is none.
    """
    try:
        namespaces = {name: os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in NAMESPACES}
        cgroup = None if procs == "-" else os.open(procs, os.O_WRONLY)
        cores = os.sched_getaffinity(pid)
    except OSError as error:
        _fail(f"the host is gone: {error.strerror}")
    if start_ticks(pid) != ticks:
        _fail("the host is gone")
    pid_namespace = namespaces.pop("pid")
    return _Host(pid_namespace, tuple(namespaces.values()), cgroup, cores)


def _enter(host: _Host) -> None:
    """Take over the host's cores, cgroup and namespaces, that of process ids apart; closes the namespaces."""
    os.sched_setaffinity(0, host.cores)
    if host.cgroup is not None:
        os.write(host.cgroup, b"0")  # 0: the process that writes
    for namespace in host.other_namespaces:
        _set_namespace(namespace)


def _become(command: list[str], parent_pipe: int) -> NoReturn:
    """Become the command, unless the parent is gone; does not return."""
    # A parent that died before `end_with_parent` sends no signal. Its id does not show it: in here it is always 0.
    is_parent_gone = bool(select.select([parent_pipe], [], [], 0)[0])
    if is_parent_gone:
        os._exit(_EXIT_NOT_ENTERED)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        os.execvp(command[0], command)  # noqa: S606 - no shell is wanted
    except OSError as error:
        _fail(f"{command[0]!r} cannot be run: {error.strerror}", _EXIT_NOT_RUN)


def _follow(child: int) -> int:
    """Pass signals on until the command ends; returns the command's wait status."""
    while True:
        received = signal.sigwaitinfo(_FORWARDED_SIGNALS | {signal.SIGCHLD})
        if received.si_signo != signal.SIGCHLD:
            if received.si_code != _SENT_BY_TERMINAL:
                os.kill(child, received.si_signo)
            continue
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status


def _exit_as(status: int) -> NoReturn:
    """Exit with the code of the command's wait status; where a signal ended the command, end by the same signal."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        ending_signal = -code
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dump of this process beside the command's own
        if ending_signal not in (signal.SIGKILL, signal.SIGSTOP):  # whose handling cannot be changed
            signal.signal(ending_signal, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(os.getpid(), ending_signal)
    os._exit(code)


def _set_namespace(descriptor: int) -> None:
    """Enter a namespace, as `os.setns` does, which exists only since Python 3.12; closes the descriptor."""
    if _libc.setns(descriptor, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    os.close(descriptor)


def _fail(reason: str, code: int = _EXIT_NOT_ENTERED) -> NoReturn:
    sys.stderr.write(f"vitscale lab: {reason}\n")
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
