"""The driver's end of prepared processes (`vitscale.worker.prepared`), and the jobs that are started from them.

A prepared process serves one round of repeats, and no trial twice; those of a round import at the same time. A process
draws some things once for its life (where libraries lie in memory, the seed of Python's hashes), and its forks share
them. So these differ between the runs of a trial, as between processes started anew; see
`docs/decisions/0016-ranks-as-forks.md`.

A `Job` is a run under way: the process tree started here, what belongs to it elsewhere, and the line to its ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from vitscale.base.interpreter import python_module, safe_path
from vitscale.engines import ENGINES, of_engine
from vitscale.launchers.base import Spawn
from vitscale.processes.heartbeat_server import HeartbeatServer
from vitscale.processes.launch_file import ALL_NAMES, TOKEN_VARIABLE
from vitscale.trial.trial import Trial

_IMPORTS_SECONDS = 600.0
_ANSWER_SECONDS = 30.0
_ONE_BLAS_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""OpenBLAS starts its threads when it is loaded; ranks set their own number."""
_OF_POLARS = "_RJEM_MALLOC_CONF"
"""A variable for Polars' allocator, which Polars sets when it is imported: here, in the middle of a study."""
_CODE = (".py", ".so", ".pth", ".dist-info", ".egg-info")
"""Suffixes of names in a folder of packages that tell what can be imported, and in which version."""


class PreparedError(Exception):
    """The prepared process is gone, or does not answer."""


class Fork:
    """A fork of a prepared process, with the part of `subprocess.Popen` that a job needs."""

    def __init__(self, parent: Prepared, pid: int) -> None:
        self.pid = pid
        self._parent = parent

    def poll(self) -> int | None:
        """The exit code, negative where a signal ended it; None while it runs."""
        return self._parent.exit_code(self.pid, 0.0)

    def wait(self, timeout: float) -> int:
        """Waits for the exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        code = self._parent.exit_code(self.pid, timeout)
        if code is None:
            raise subprocess.TimeoutExpired("a fork of the prepared process", timeout)
        return code


class Prepared:
    """One prepared process."""

    def __init__(self, environment: Mapping[str, str], cwd: Path, log: Path) -> None:
        """Starts the process; it does not answer before it is asked for imports.

        Args:
            environment: variables of the ranks.
            cwd: the working directory of the ranks.
            log: file for what importing prints.
        """
        self.served: set[str] = set()
        self._codes: dict[int, int] = {}
        self._heard = b""
        self._driver, its_end = socket.socketpair()
        try:
            with its_end, log.open("ab") as output:
                module = python_module("vitscale.worker.prepared", str(its_end.fileno()))
                self._process = subprocess.Popen(
                    python_module("vitscale.processes.parent_death", str(os.getpid()), "--", *module),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=cwd,
                    env={**environment, **_ONE_BLAS_THREAD},
                    pass_fds=[its_end.fileno()],
                    start_new_session=True,
                )
        except BaseException:
            self._driver.close()
            raise

    def import_for(self, trial: Trial | None) -> None:
        """Lets it import what the trial, or a check (None), needs.

        Raises:
            PreparedError: it is gone.
        """
        needed = None if trial is None else trial.model_dump(mode="json", include={"train", "model"})
        self._ask({"imports": needed})

    def imported(self, seconds: float) -> str | None:
        """Waits until it has imported.

        Returns:
            Why it cannot be forked; None where it can.

        Raises:
            PreparedError: it is gone, or takes too long.
        """
        answer = self._answer(seconds)
        return str(answer["cold"]) if "cold" in answer else None

    def fork(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> Fork:
        """Starts `python -m vitscale.processes.local_ranks ...` as a fork, with only these variables.

        Raises:
            PreparedError: as `imported`.
        """
        request = {"arguments": list(command), "environment": dict(environment), "log": str(log)}
        self._ask(request)
        return Fork(self, int(self._answer(_ANSWER_SECONDS)["started"]))

    def exit_code(self, pid: int, seconds: float) -> int | None:
        """A fork's exit code, waited for `seconds` at most; -9 where the prepared process and its forks are gone."""
        end = time.monotonic() + seconds
        with contextlib.suppress(PreparedError):
            while pid not in self._codes:
                if self._listened(max(0.0, end - time.monotonic())) is None:
                    return None
        return self._codes.get(pid, -9)

    def close(self) -> None:
        """Ends the process and all that it has started."""
        self._process.kill()
        self._process.wait()
        self._driver.close()

    def _ask(self, request: Mapping[str, object]) -> None:
        try:
            self._driver.sendall(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise PreparedError(f"the prepared process is gone: {error.strerror}") from None

    def _answer(self, seconds: float) -> Mapping[str, Any]:
        end = time.monotonic() + seconds
        while (answer := self._listened(max(0.0, end - time.monotonic()))) is not None:
            if "ended" not in answer:
                return answer
        raise PreparedError(f"the prepared process did not answer within {seconds:g} s")

    def _listened(self, seconds: float) -> Mapping[str, Any] | None:
        """The next message, waited for `seconds` at most, else None; also stores exit codes."""
        end = time.monotonic() + seconds
        while b"\n" not in self._heard:
            if self._driver.fileno() < 0:
                raise PreparedError("the prepared process was ended")
            ready, _, _ = select.select([self._driver], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                return None
            try:
                chunk = self._driver.recv(1 << 16)
            except OSError:
                chunk = b""
            if not chunk:
                raise PreparedError("the prepared process is gone")
            self._heard += chunk
        line, _, self._heard = self._heard.partition(b"\n")
        message: Mapping[str, Any] = json.loads(line)
        if "ended" in message:
            self._codes[int(message["ended"])] = int(message["code"])
        return message


@dataclass(frozen=True)
class Ready:
    """How ranks are to be started: forked from a prepared process, or anew, and why."""

    process: Prepared | None = None
    waited_seconds: float | None = None
    """Seconds until it had imported everything; None where it was there already."""
    cold: str | None = None


class PreparedProcesses:
    """A driver's prepared processes, one for each set of things that forks share; all end with the context."""

    def __init__(
        self, tell: Callable[[str], None] | None = None, upcoming: Callable[[], Iterable[Trial]] = tuple
    ) -> None:
        """`tell`: called once with each reason why ranks are started anew instead. `upcoming`: trials yet to be run."""
        self._tell = tell
        self._upcoming = upcoming
        self._told: set[str] = set()
        self._processes: dict[tuple[object, ...], Prepared] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.close()
        self._processes.clear()

    def ready(self, trial_id: str, trial: Trial | None, environment: Mapping[str, str], cwd: Path, log: Path) -> Ready:
        """A process to fork a run of the trial from: the existing one, unless it has already served this trial.

        A new one is waited for together with those that upcoming trials need anew: they import beside each other, and
        beside no run.

        Args:
            trial_id: id of the trial, or of a check.
            trial: trial for which to import engine and model; None: a check is to be forked.
            environment: variables of the ranks, all but the token.
            cwd: their working directory.
            log: file for what importing prints.
        """
        key = kept_for(trial, environment, cwd)
        held = self._processes.get(key)
        if held is not None and trial_id not in held.served:
            with contextlib.suppress(PreparedError):
                held.import_for(trial)
                if held.imported(_ANSWER_SECONDS) is None:
                    held.served.add(trial_id)
                    return Ready(held)
        # Processes from before the code changed are of no use any more.
        for other in [other for other in self._processes if other == key or other[-1] != key[-1]]:
            self._processes.pop(other).close()
        began = time.monotonic()
        reason = self._start(key, trial, environment, cwd, log)
        beside = self._beside(key, trial) if reason is None and trial is not None else {}
        for other, upcoming in beside.items():
            self._start(other, upcoming, environment, cwd, Path(os.devnull))
        reason = reason or self._imported(key)
        for other in beside:
            self._imported(other)  # where it fails, the run that needs it tries again, and tells
        if reason is not None:
            return self._cold(reason)
        process = self._processes[key]
        process.served.add(trial_id)
        return Ready(process, time.monotonic() - began)

    def _beside(self, key: tuple[object, ...], trial: Trial) -> dict[tuple[object, ...], Trial]:
        """Upcoming trials, of ranks with the same variables, for which no unused process is there; by their key."""
        alike = {
            (_libraries(other), *key[1:]): other
            for other in self._upcoming()
            if (other.launcher, other.world.threads_per_rank) == (trial.launcher, trial.world.threads_per_rank)
            and other.train.script is None
        }
        return {
            other: upcoming
            for other, upcoming in alike.items()
            if other != key and (other not in self._processes or self._processes[other].served)
        }

    def _start(
        self, key: tuple[object, ...], trial: Trial | None, environment: Mapping[str, str], cwd: Path, log: Path
    ) -> str | None:
        """Starts a process in place of the one that is held; why it cannot be, or None."""
        if key in self._processes:
            self._processes.pop(key).close()
        try:
            process = self._processes[key] = Prepared(environment, cwd, log)
            process.import_for(trial)
        except OSError as error:
            return f"the prepared process cannot be started: {error.strerror}"
        except PreparedError:
            pass  # it is gone, as who waits for it is told
        return None

    def _imported(self, key: tuple[object, ...]) -> str | None:
        """Waits for the imports of a process; why it cannot be forked, where it is ended, or None."""
        if key not in self._processes:
            return None
        try:
            reason = self._processes[key].imported(_IMPORTS_SECONDS)
        except PreparedError as error:
            reason = str(error)
        if reason is not None:
            self._processes.pop(key).close()
        return reason

    def _cold(self, reason: str) -> Ready:
        if self._tell is not None and reason not in self._told:
            self._told.add(reason)
            self._tell(reason)
        return Ready(cold=reason)


def ranks_environment(added: Mapping[str, str], without: tuple[str, ...] = ()) -> dict[str, str]:
    """The variables of a job's processes: this process's own, those `added`, and the one that keeps the current folder
    out of every Python's search path, which no launcher may drop.

    Left out are names that begin with one of `without`, and those by which a launcher around this process tells it its
    rank.
    """
    own = {key: value for key, value in os.environ.items() if key not in ALL_NAMES and key != _OF_POLARS}
    wanted = {key: value for key, value in (own | dict(added)).items() if not key.startswith(without or "\0")}
    return wanted | safe_path(wanted)


def kept_for(trial: Trial | None, environment: Mapping[str, str], cwd: Path) -> tuple[object, ...]:
    """All that a ready prepared process has taken from outside; a rank that differs in any of it needs another."""
    return (_libraries(trial), str(cwd), tuple(sorted(environment.items())), sys.executable, _code())


def _libraries(trial: Trial | None) -> tuple[object, ...]:
    if trial is None:
        return ()
    train = trial.train
    torch_alone = train.engine in ENGINES and not ENGINES[train.engine].packages
    engine = "torch" if torch_alone else train.engine
    wrapper = train.wrapper if engine != "torch" else ""
    preloaded = of_engine(wrapper).preloaded(train) if wrapper else ()
    return engine, wrapper, preloaded, train.device, trial.model.hf is not None


def _code() -> tuple[object, ...]:
    """A value that changes when imported code does: the files of vitscale, and which versions are installed.

    Folders' times of change are not used: a user's module that leaves its bytecode there changes them too.
    """
    own = [(str(path), path.stat().st_mtime_ns) for path in Path(__file__).parents[1].rglob("*.py")]
    installed = []
    for entry in sys.path:
        with contextlib.suppress(OSError):
            names = sorted(path.name for path in Path(entry or ".").iterdir() if path.suffix in _CODE)
            installed.append((entry, tuple(names)))
    return *own, *installed


_OTHERS_SECONDS = 15.0
"""Seconds that the other commands have, once one has failed, to end by themselves and say why."""
_LOOK_SECONDS = 0.05
_NOT_BEGUN = (255, 127, 126)
"""Exit codes of ssh for its own failure, and of a shell on the host for a program that is missing or may not be run."""
_REAP_SECONDS = 10.0
"""Seconds until an ended process is known to have ended."""


class Job:
    """Some commands and everything they start.

    Each command is a session of its own, with what it starts. Those that leave it (torchrun gives each rank a session
    of its own) are found and ended by the token that they carry in their environment. A fork of a prepared process
    carries none that the kernel would show, and leaves no session.
    """

    def __init__(
        self,
        spawn: Spawn,
        heartbeats: HeartbeatServer,
        prepared: Prepared | None = None,
        end_elsewhere: Callable[[int | None], tuple[str, ...]] = lambda _: (),
    ) -> None:
        """Starts the commands; for arguments and errors see `Placement.start`."""
        self.token = spawn.token
        self.heartbeats = heartbeats
        self._prepared = prepared
        self._end_elsewhere = end_elsewhere
        self._hosts = [host.name for host in spawn.hosts] if spawn.per_host else []
        self._commands = spawn.commands
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
            # Some could not be started, or Ctrl-C came meanwhile: nobody will watch the others.
            if prepared is not None:
                prepared.close()  # it may be about to start one
            self._end_all_here()
            raise

    @property
    def sessions(self) -> tuple[int, ...]:
        """Ids of the sessions that the commands were started in, each its own."""
        return tuple(process.pid for process in self._processes)

    @property
    def exit_code(self) -> int | None:
        """The first failed command's exit code, negative for a signal; 0 where none failed; None while one runs.

        After a failure it is given `_OTHERS_SECONDS` later even if other commands still run.
        """
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
    def not_begun(self) -> tuple[tuple[str, int], ...]:
        """(host, exit code) of hosts where ssh, or the shell that it speaks to, began nothing; the first one first."""
        each = zip(self._hosts, self._commands, self._processes, strict=False)
        ended = [(host, process.poll()) for host, command, process in each if command[0] == "ssh"]
        return tuple((host, code) for host, code in ended if code in _NOT_BEGUN)

    @property
    def wall_seconds(self) -> float:
        """Seconds since the start, on a clock that never goes back."""
        return time.monotonic() - self._began

    def wait(self, seconds: float) -> int | None:
        """Waits `seconds` at most for the end; returns `exit_code`."""
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
        """Ends every process that is left on every host, waits until all are gone, and closes the heartbeat server.

        Returns:
            The hosts that did not answer; their ranks end by themselves when the driver falls silent.
        """
        exit_code = self.exit_code
        try:
            self._end_all_here()
            for process in self._processes:
                self._reap(process)
            return self._end_elsewhere(exit_code)
        finally:
            # Last: ranks that cannot be reached end when their line to the driver is closed.
            self.heartbeats.close()

    def _end_all_here(self) -> None:
        from vitscale.processes.host_agent import (
            end_all,
        )  # with psutil: a plan starts nothing, and need not wait for it

        end_all(self.token, self._first_signal, self.sessions)

    def _reap(self, process: subprocess.Popen[bytes] | Fork) -> None:
        try:
            process.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:
            if self._prepared is None:
                raise
            self._prepared.close()  # it is stopped, and cannot tell that what it had started is gone


def _started(command: Sequence[str], spawn: Spawn, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with spawn.log.open("ab") as output:
        return subprocess.Popen(
            python_module("vitscale.processes.parent_death", str(os.getpid()), "--", *command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=spawn.cwd,
            env=environment,
            # Ctrl-C reaches the driver alone, which then ends the job in order.
            start_new_session=True,
        )
