"""`python -m vitscale.processes.host_agent FOLDER -- ARGV...`: runs ARGV here as long as the run's driver lives.

The driver starts commands on other hosts through it. When its other end dies, a remote shell leaves behind what it has
started. This agent does not: when its heartbeat breaks it ends every process of the run on this host, wherever in the
process tree. `python -m vitscale.processes.host_agent --end NAME` ends the run of that name
(`launch_file.name_of`) here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

import psutil

from vitscale.base.interpreter import python_module
from vitscale.processes import launch_file
from vitscale.processes.heartbeat import Heartbeat

_GRACE_SECONDS = 2.0
"""Time that processes have after a signal to end, before SIGKILL."""
_SECONDS_BETWEEN_LOOKS = 0.02
"""Time from one look at processes that are to end to the next."""


def end_all(token: str, first: signal.Signals = signal.SIGTERM, sessions: Collection[int] = ()) -> None:
    """End every process of a run on this host, except the calling one, and return when all are gone.

    Args:
        token: the run's token. A process belongs to the run if it was started with the token in its environment.
        first: the signal that is sent first; SIGKILL follows.
        sessions: ids of sessions whose processes belong to the run too: forks of a prepared process, which were started
            without a token. A session's id is the process id of its leader.
    """
    end_run(launch_file.name_of(token), first, sessions)


def end_run(name: str, first: signal.Signals = signal.SIGTERM, sessions: Collection[int] = ()) -> None:
    """End every process of a run, as `end_all` does. Args: name: `launch_file.name_of` the run's token."""
    signal_number = first
    # Two looks: a process that is just being forked, or is executing another program, can slip through the first.
    while processes := _find_processes(name, sessions) or _find_processes(name, sessions):
        for process in processes:
            try:
                process.send_signal(signal_number)
                # A stopped process (SIGSTOP) handles SIGTERM only once it continues.
                process.send_signal(signal.SIGCONT)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        # Not psutil.wait_procs: it would take our child's exit code, and wait for zombies that nobody reaps.
        deadline = time.monotonic() + _GRACE_SECONDS
        while any(map(_is_alive, processes)) and time.monotonic() < deadline:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        signal_number = signal.SIGKILL


def processes_of_run(token: str, sessions: Collection[int] = ()) -> list[psutil.Process]:
    """Return the processes of a run on this host, except the calling one. Arguments as of `end_all`."""
    return _find_processes(launch_file.name_of(token), sessions)


def _find_processes(name: str, sessions: Collection[int]) -> list[psutil.Process]:
    """Return the live processes of the run with this name on this host, except the calling one."""
    processes = []
    caller = os.getpid()
    for process in psutil.process_iter():
        try:
            is_other = process.pid != caller
            if is_other and _belongs_to_run(process, name, sessions) and _is_alive(process):
                processes.append(process)
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess, ProcessLookupError):
            continue
    return processes


def _belongs_to_run(process: psutil.Process, name: str, sessions: Collection[int]) -> bool:
    """Whether a process is in one of the sessions, or was started with the token of the run of that name."""
    if process.pid in sessions:
        return True  # a leader, also before its `setsid`
    if sessions and os.getsid(process.pid) in sessions:
        return True
    token = process.environ().get(launch_file.TOKEN_VARIABLE)
    return token is not None and launch_file.name_of(token) == name


def _is_alive(process: psutil.Process) -> bool:
    """Whether a process runs; a zombie, which nobody has reaped yet, does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


_USAGE = "usage: python -m vitscale.processes.host_agent FOLDER -- COMMAND... | --end NAME"


def main(arguments: list[str]) -> int:
    """Run the agent or end a run, as the arguments say; returns the exit code."""
    match arguments:
        case ["--end", name]:
            end_run(name)
            return 0
        case [folder, "--", *command] if command:
            return _run_under_driver(Path(folder), command)
        case _:
            sys.exit(_USAGE)


def _run_under_driver(run_folder: Path, command: list[str]) -> int:
    """Run a command for as long as the driver lives; if the driver goes first, end all processes of the run here.

    Return the command's exit code, as a shell does: 128 + N where signal N ended it.
    """
    try:
        launch = launch_file.read(run_folder)
    except (OSError, ValueError) as error:
        sys.exit(f"vitscale: {run_folder / launch_file.NAME} cannot be read on this host: {error}")
    if launch is None:
        sys.exit(f"vitscale: {run_folder} is not seen on this host: is the results folder shared by all hosts?")

    def end_run_here() -> None:
        end_all(launch.token)

    try:
        heartbeat = Heartbeat(launch, "agent", on_driver_lost=end_run_here)
    except (OSError, ValueError) as error:
        sys.exit(f"vitscale: the driver at {launch.lifeline} is not reached from this host: {error}")
    # Tied to this process: SIGKILL of this agent ends the command too.
    tied_command = python_module("vitscale.processes.parent_death", str(os.getpid()), "--", *command)
    environment = launch_file.completed_environment(launch)
    code = subprocess.call(tied_command, stdin=subprocess.DEVNULL, env=environment)
    heartbeat.close()
    if code < 0:  # `subprocess` gives -N where signal N has ended the command
        signal_number = -code
        return 128 + signal_number
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
