"""Finds and ends every process of a run on this host, wherever in the process tree it has gone."""

from __future__ import annotations

import signal
import time

import psutil

from vitscale.processes.launch_file import TOKEN_VARIABLE

_GRACE_SECONDS = 2.0
_LOOK_SECONDS = 0.02


def end_all(token: str, first: signal.Signals = signal.SIGTERM) -> None:
    """Ends every process that carries the token in its environment, by the signal `first`, then by SIGKILL.

    Returns when all are gone. The caller is left out.
    """
    stop = first
    # Two looks: one that is just being forked, or is changing into another program, can slip through the first.
    while left := carrying(token) or carrying(token):
        for process in left:
            try:
                process.send_signal(stop)
                # A stopped process (SIGSTOP) takes SIGTERM only once it goes on.
                process.send_signal(signal.SIGCONT)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        # Not psutil.wait_procs: it takes our child's exit code from us, and waits for zombies that nobody reaps.
        end = time.monotonic() + _GRACE_SECONDS
        while any(map(_runs, left)) and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
        stop = signal.SIGKILL


def carrying(token: str) -> list[psutil.Process]:
    """The processes of this host that carry the token, but for the caller."""
    found = []
    own = psutil.Process().pid
    for process in psutil.process_iter():
        try:
            if process.pid != own and process.environ().get(TOKEN_VARIABLE) == token and _runs(process):
                found.append(process)
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
