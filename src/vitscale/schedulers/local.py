"""This machine: a job is a process tree, started, watched and ended here."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

_TOKEN = "VITSCALE_JOB"  # noqa: S105 - names processes, protects nothing
_GRACE_SECONDS = 2.0
_LOOK_SECONDS = 0.02
_RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Left over from a launcher around the driver, they would make a rank join a world that is not its own."""


class LocalJob:
    """One command and everything it starts.

    Every process of the job carries a token in its environment, so that those that left the tree (torchrun gives each
    rank a session of its own; an agent that dies leaves its ranks to init) are found and ended too.
    """

    def __init__(self, command: list[str], *, log: Path, cwd: Path, environment: dict[str, str]) -> None:
        self.token = secrets.token_hex(16)
        self.started_unix_seconds = time.time()
        self._began = time.monotonic()
        inherited = {key: value for key, value in os.environ.items() if key not in _RANK_NAMES}
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vitscale.tie", str(os.getpid()), "--", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env=inherited | environment | {_TOKEN: self.token, "VITSCALE_DRIVER_PID": str(os.getpid())},
                # Ctrl-C reaches the driver alone, which then ends the job in order.
                start_new_session=True,
            )

    @property
    def exit_code(self) -> int | None:
        """None while the launcher runs; negative where a signal ended it."""
        return self._process.poll()

    @property
    def wall_seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._began

    def wait(self, seconds: float) -> int | None:
        """Waits so long at most for the launcher to end."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        """Ends every process of the job that is left: asked first, then by SIGKILL; returns when all are gone."""
        stop = signal.SIGTERM
        # Two looks: one that is just being forked, or is changing into another program, can slip through the first.
        while left := self._processes() or self._processes():
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
        self._process.wait(30.0)

    def _processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(_TOKEN) == self.token and _runs(process):
                    found.append(process)
            except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        return found


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
