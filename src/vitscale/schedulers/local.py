"""This machine: a job is a process tree, started, watched and ended here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from vitscale.launchers.base import Launch
from vitscale.machine.hardware import Machine, this_machine
from vitscale.machine.hosts import Host
from vitscale.processes.cleanup import end_all
from vitscale.processes.launch_file import TOKEN_VARIABLE
from vitscale.schedulers.prepared import Fork, Prepared, ranks_environment
from vitscale.trial.trial import World

_OTHERS_SECONDS = 15.0
"""Once one command has failed: what the others have to end by themselves, and to say why."""
_LOOK_SECONDS = 0.05
_REAP_SECONDS = 10.0
"""Until what has been ended is known to have ended."""


class LocalJob:
    """Some commands and everything they start.

    Every process of the job carries a token in its environment, so that those that left the tree (torchrun gives each
    rank a session of its own; an agent that dies leaves its ranks to init) are found and ended too.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        *,
        token: str,
        log: Path,
        cwd: Path,
        environment: Mapping[str, str],
        without: tuple[str, ...] = (),
        ended_by_kill: bool = False,
        prepared: Prepared | None = None,
    ) -> None:
        """Starts the commands.

        Args:
            commands: each an argv.
            token: of this job alone.
            log: takes what all of them print.
            cwd: where they run.
            environment: added to this process's own.
            without: beginnings of names of variables that they must not see.
            ended_by_kill: whether they are never asked to end, for what they do then reaches beyond this job.
            prepared: what the commands are forks of; None: each is a new process.

        Raises:
            OSError: one cannot be started.
            PreparedError: the prepared process is gone.
        """
        self.token = token
        self._prepared = prepared
        self.started_unix_seconds = time.time()
        self._began = time.monotonic()
        self._failed_seconds: float | None = None
        self._first_signal = signal.SIGKILL if ended_by_kill else signal.SIGTERM
        seen = ranks_environment(environment, without) | {TOKEN_VARIABLE: token}
        self._processes: list[subprocess.Popen[bytes] | Fork] = []
        try:
            for command in commands:
                started = _started(command, log, cwd, seen) if prepared is None else prepared.fork(command, seen, log)
                self._processes.append(started)
        except BaseException:
            # Not all could be started, or Ctrl-C came meanwhile: nobody will watch those that were.
            if prepared is not None:
                prepared.close()  # it may be about to start one
            end_all(token, self._first_signal)
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
        """Since the start."""
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
        """Ends every process of the job that is left on this machine; returns when all are gone."""
        end_all(self.token, self._first_signal)
        for process in self._processes:
            try:
                process.wait(_REAP_SECONDS)
            except subprocess.TimeoutExpired:
                if self._prepared is None:
                    raise
                self._prepared.close()  # stopped: it cannot tell that what it had started is gone
        return ()


def _started(command: Sequence[str], log: Path, cwd: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "vitscale.processes.parent_death", str(os.getpid()), "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=environment,
            # Ctrl-C reaches the driver alone, which then ends the job in order.
            start_new_session=True,
        )


class Local:
    """One host: this one."""

    python = sys.executable
    default_launcher = "local"

    def machine(self) -> Machine:
        """This machine."""
        return this_machine()

    def slots(self) -> int | None:
        """As many as its cores and GPUs allow."""
        return None

    def hosts(self, world: World) -> tuple[Host, ...]:  # noqa: ARG002 - one signature for every scheduler
        """This machine."""
        return ()

    def refuses(self, launcher: str, world: World) -> str | None:
        """srun needs an allocation, and several nodes other hosts."""
        if launcher == "srun":
            return (
                "srun starts ranks in a Slurm allocation, and this is none; run inside one (salloc), or set "
                "launch.scheduler = 'slurm' to submit jobs"
            )
        if world.nodes > 1:
            return f"{world.nodes} nodes are asked for, and this is one machine; name the others in launch.hostfile"
        return None

    def commands(self, launch: Launch, world: World, hosts: tuple[Host, ...], run_folder: Path) -> list[list[str]]:  # noqa: ARG002
        """As the launcher gives them."""
        return [list(command) for command in launch.commands]

    def start(
        self,
        commands: list[list[str]],
        hosts: tuple[Host, ...],  # noqa: ARG002
        *,
        token: str,
        log: Path,
        cwd: Path,
        environment: Mapping[str, str],
        without: tuple[str, ...] = (),
        ended_by_kill: bool = False,
    ) -> LocalJob:
        """Starts them here."""
        return LocalJob(
            commands,
            token=token,
            log=log,
            cwd=cwd,
            environment=environment,
            without=without,
            ended_by_kill=ended_by_kill,
        )
