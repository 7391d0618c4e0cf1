"""A run under way: the process tree that was started here, what hangs on it elsewhere, and the line to its ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from vitscale.launchers.base import Spawn
from vitscale.processes.heartbeat_server import HeartbeatServer
from vitscale.processes.host_agent import end_all
from vitscale.processes.launch_file import TOKEN_VARIABLE
from vitscale.schedulers.prepared import Fork, Prepared, ranks_environment

_OTHERS_SECONDS = 15.0
"""Once one command has failed: what the others have to end by themselves, and to say why."""
_LOOK_SECONDS = 0.05
_REAP_SECONDS = 10.0
"""Until what has been ended is known to have ended."""


class Job:
    """Some commands and everything they start.

    Every process of the job carries a token in its environment, so that those that left the tree (torchrun gives each
    rank a session of its own; an agent that dies leaves its ranks to init) are found and ended too.
    """

    def __init__(
        self,
        spawn: Spawn,
        heartbeats: HeartbeatServer,
        prepared: Prepared | None = None,
        end_elsewhere: Callable[[int | None], tuple[str, ...]] = lambda _: (),
    ) -> None:
        """Starts the commands; for the arguments and what is raised see `Placement.start`."""
        self.token = spawn.token
        self.heartbeats = heartbeats
        self._prepared = prepared
        self._end_elsewhere = end_elsewhere
        self.started_unix_seconds = time.time()
        self._began = time.monotonic()
        self._failed_seconds: float | None = None
        self._first_signal = signal.SIGKILL if spawn.kill_at_once else signal.SIGTERM
        seen = ranks_environment(spawn.environment, spawn.drop_variables) | {TOKEN_VARIABLE: spawn.token}
        self._processes: list[subprocess.Popen[bytes] | Fork] = []
        try:
            for command in spawn.commands:
                started = (
                    _started(command, spawn, seen) if prepared is None else prepared.fork(command, seen, spawn.log)
                )
                self._processes.append(started)
        except BaseException:
            # Not all could be started, or Ctrl-C came meanwhile: nobody will watch those that were.
            if prepared is not None:
                prepared.close()  # it may be about to start one
            end_all(self.token, self._first_signal)
            raise

    @property
    def exit_code(self) -> int | None:
        """None while a command runs; that of the first that failed; negative where a signal ended it."""
        codes = [process.poll() for process in self._processes]
        failed = next((code for code in codes if code), None)
        if None not in codes:
            return failed or 0
        if failed is None:
            return None
        now = time.monotonic()
        self._failed_seconds = self._failed_seconds or now
        return failed if now - self._failed_seconds > _OTHERS_SECONDS else None

    @property
    def wall_seconds(self) -> float:
        """Since the start, on a clock that never goes back."""
        return time.monotonic() - self._began

    def wait(self, seconds: float) -> int | None:
        """Waits so long at most for the end."""
        end = time.monotonic() + seconds
        while (code := self.exit_code) is None and time.monotonic() < end:
            running = next((process for process in self._processes if process.poll() is None), None)
            if running is not None:
                try:
                    running.wait(_LOOK_SECONDS if len(self._processes) > 1 else max(0.0, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    continue
        return code

    def end(self) -> tuple[str, ...]:
        """Ends every process that is left on every host, returns when all are gone, and hears no more of them.

        Returns:
            The hosts that did not answer; their ranks end by themselves when the driver falls silent.
        """
        exit_code = self.exit_code
        try:
            end_all(self.token, self._first_signal)
            for process in self._processes:
                self._reap(process)
            return self._end_elsewhere(exit_code)
        finally:
            # Last: what cannot be reached ends when the line to the driver is closed.
            self.heartbeats.close()

    def _reap(self, process: subprocess.Popen[bytes] | Fork) -> None:
        try:
            process.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:
            if self._prepared is None:
                raise
            self._prepared.close()  # stopped: it cannot tell that what it had started is gone


def _started(command: Sequence[str], spawn: Spawn, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with spawn.log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "vitscale.processes.parent_death", str(os.getpid()), "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=spawn.cwd,
            env=environment,
            # Ctrl-C reaches the driver alone, which then ends the job in order.
            start_new_session=True,
        )
