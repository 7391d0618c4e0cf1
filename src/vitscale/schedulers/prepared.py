"""The driver's end of prepared processes (`vitscale.worker.prepared`), and the jobs that are started from them.

A prepared process serves one round of repeats, and no trial twice; those of a round import at the same time. A process
draws some things once for its life (where libraries lie in memory, the seed of Python's hashes), and its forks share
them. So these differ between the runs of a trial, as between processes started anew; see
`docs/decisions/0016-ranks-as-forks.md`.

A `Job` is a run under way: the process tree started here, what belongs to it elsewhere, and its ranks' heartbeats.
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
from typing import Any, NamedTuple, Self

from vitscale.base.interpreter import python_module, safe_path
from vitscale.engines import ENGINES, of_engine
from vitscale.launchers.base import Spawn
from vitscale.processes.heartbeat_server import HeartbeatServer
from vitscale.processes.launch_file import ALL_NAMES, TOKEN_VARIABLE
from vitscale.trial.trial import Trial

_IMPORTS_SECONDS = 600.0
"""Longest wait for a new process to import."""
_ANSWER_SECONDS = 30.0
"""Longest wait for a process that has imported."""
_ONE_BLAS_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""OpenBLAS starts its threads when it is loaded; ranks set their own number."""
_POLARS_VARIABLE = "_RJEM_MALLOC_CONF"
"""A variable for Polars' allocator, which Polars sets when it is imported: here, in the middle of a study."""
_CODE_SUFFIXES = (".py", ".so", ".pth", ".dist-info", ".egg-info")
"""Suffixes of names in a folder of packages that show what can be imported, and in which version."""


class PreparedError(Exception):
    """The prepared process is gone, or does not answer."""


class Fork:
    """A fork of a prepared process, with the part of `subprocess.Popen` that a job needs.

    Its parent, not this process, learns of its end: `Prepared` passes the exit code on.
    """

    def __init__(self, parent: Prepared, pid: int) -> None:
        self.pid = pid
        self._parent = parent

    def poll(self) -> int | None:
        """Return the exit code, negative where a signal ended it; None while it runs."""
        return self._parent.exit_code(self.pid, 0.0)

    def wait(self, timeout: float) -> int:
        """Wait for the exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        code = self._parent.exit_code(self.pid, timeout)
        if code is None:
            raise subprocess.TimeoutExpired("a fork of the prepared process", timeout)
        return code


class Prepared:
    """One prepared process, and this driver's end of the socket to it.

    Messages are lines of JSON. Each request has one answer, in their order; a message {"ended": pid, "code": exit code}
    comes by itself when a fork ends.

    Order of calls: `import_for` a trial, `wait_for_imports`, then `fork` as often as needed; and all of it again for
    the next trial. `close` ends the process at any time; then, and when the process dies, every call raises
    PreparedError.
    """

    def __init__(self, environment: Mapping[str, str], cwd: Path, log: Path) -> None:
        """Start the process; it does not answer before it is asked for imports.

        Args:
            environment: variables of the ranks.
            cwd: the working directory of the ranks.
            log: file for what importing prints.
        """
        self.served: set[str] = set()
        """Ids of the trials that it has served."""
        self._exit_code_by_pid: dict[int, int] = {}
        """Process id of a fork that has ended -> its exit code."""
        self._received = b""
        """Bytes of the next messages."""
        self._socket, process_end = socket.socketpair()
        try:
            with process_end, log.open("ab") as output:
                module = python_module("vitscale.worker.prepared", str(process_end.fileno()))
                self._process = subprocess.Popen(
                    python_module("vitscale.processes.parent_death", str(os.getpid()), "--", *module),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=cwd,
                    env={**environment, **_ONE_BLAS_THREAD},
                    pass_fds=[process_end.fileno()],
                    start_new_session=True,
                )
        except BaseException:
            self._socket.close()
            raise

    def import_for(self, trial: Trial | None) -> None:
        """Ask the process to import what ranks need; does not wait for it.

        Args:
            trial: the trial of the ranks; None: they do a check.

        Raises:
            PreparedError: the process is gone.
        """
        trained = None if trial is None else trial.model_dump(mode="json", include={"train", "model"})
        self._send({"imports": trained})

    def wait_for_imports(self, seconds: float) -> str | None:
        """Wait until the process has imported what it was asked for, for `seconds` at most.

        Returns:
            Why the process cannot be forked; None where it can.

        Raises:
            PreparedError: the process is gone, or takes too long.
        """
        answer = self._next_answer(seconds)
        return str(answer["cold"]) if "cold" in answer else None

    def fork(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> Fork:
        """Start `python -m vitscale.processes.local_ranks ...` as a fork, with only these variables.

        Raises:
            PreparedError: the process is gone, or takes too long.
        """
        self._send({"arguments": list(command), "environment": dict(environment), "log": str(log)})
        answer = self._next_answer(_ANSWER_SECONDS)
        return Fork(self, int(answer["started"]))

    def exit_code(self, pid: int, seconds: float) -> int | None:
        """Return a fork's exit code; -9 where the prepared process and its forks are gone.

        None where the fork still runs after `seconds`.
        """
        deadline = time.monotonic() + seconds
        with contextlib.suppress(PreparedError):
            while pid not in self._exit_code_by_pid:
                message = self._next_message(max(0.0, deadline - time.monotonic()))
                if message is None:
                    return None
        return self._exit_code_by_pid.get(pid, -9)

    def close(self) -> None:
        """End the process and all that it has started."""
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def _send(self, request: Mapping[str, object]) -> None:
        """Send a request.

        Raises:
            PreparedError: the process is gone.
        """
        try:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise PreparedError(f"the prepared process is gone: {error.strerror}") from None

    def _next_answer(self, seconds: float) -> Mapping[str, Any]:
        """Return the answer to the last request; messages on ends of forks that come before it are noted.

        Raises:
            PreparedError: the process is gone, or takes longer than `seconds`.
        """
        deadline = time.monotonic() + seconds
        while True:
            message = self._next_message(max(0.0, deadline - time.monotonic()))
            if message is None:
                raise PreparedError(f"the prepared process did not answer within {seconds:g} s")
            if "ended" not in message:
                return message

    def _next_message(self, seconds: float) -> Mapping[str, Any] | None:
        """Return the next message; None where none has come after `seconds`.

        If it is on the end of a fork, its exit code is stored too.

        Raises:
            PreparedError: the process is gone.
        """
        deadline = time.monotonic() + seconds
        while b"\n" not in self._received:
            if self._socket.fileno() < 0:
                raise PreparedError("the prepared process was ended")
            readable, _, _ = select.select([self._socket], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                return None
            try:
                chunk = self._socket.recv(1 << 16)
            except OSError:
                chunk = b""
            if not chunk:
                raise PreparedError("the prepared process is gone")
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        message: Mapping[str, Any] = json.loads(line)
        if "ended" in message:
            self._exit_code_by_pid[int(message["ended"])] = int(message["code"])
        return message


@dataclass(frozen=True)
class Ready:
    """The way in which ranks are to be started: forked from a prepared process, or anew."""

    process: Prepared | None = None
    """The process to fork; None: ranks are started anew."""
    waited_seconds: float | None = None
    """Seconds until it had imported everything; None where it was there already."""
    cold: str | None = None
    """Why there is no process; None where there is one, and where none was asked for."""


class ProcessKey(NamedTuple):
    """Everything that a prepared process has taken from outside: ranks that need anything else need another process."""

    libraries: tuple[object, ...]
    """The libraries that it has imported."""
    cwd: str
    environment: tuple[tuple[str, str], ...]
    interpreter: str
    code: tuple[object, ...]
    """The state of the code that can be imported (`_code_state`)."""


def process_key(trial: Trial | None, environment: Mapping[str, str], cwd: Path) -> ProcessKey:
    """Return the key of processes that can serve a trial, or a check (None), with these variables in this folder."""
    return ProcessKey(
        _imported_libraries(trial), str(cwd), tuple(sorted(environment.items())), sys.executable, _code_state()
    )


def _imported_libraries(trial: Trial | None) -> tuple[object, ...]:
    """Return a value that is equal for trials whose ranks import the same; empty for a check."""
    if trial is None:
        return ()
    train = trial.train
    needs_torch_alone = train.engine in ENGINES and not ENGINES[train.engine].packages
    engine = "torch" if needs_torch_alone else train.engine
    wrapper = "" if engine == "torch" else train.wrapper
    preloaded = of_engine(wrapper).preloaded(train) if wrapper else ()
    library = trial.model.library
    library_name = "" if library is None else library.library
    return engine, wrapper, preloaded, train.device, trial.model.hf is not None, library_name


def _code_state() -> tuple[object, ...]:
    """Return a value that changes when imported code does: the files of vitscale, and which versions are installed.

    Folders' times of change are not used: a user's module that leaves its bytecode there changes them too.
    """
    vitscale_files = [(str(path), path.stat().st_mtime_ns) for path in Path(__file__).parents[1].rglob("*.py")]
    installed = []
    for folder in sys.path:
        with contextlib.suppress(OSError):
            paths = Path(folder or ".").iterdir()
            names = sorted(path.name for path in paths if path.suffix in _CODE_SUFFIXES)
            installed.append((folder, tuple(names)))
    return *vitscale_files, *installed


class PreparedProcesses:
    """A driver's prepared processes, one for each set of things that forks share; all end with the context."""

    def __init__(
        self, on_start_anew: Callable[[str], None] | None = None, upcoming_trials: Callable[[], Iterable[Trial]] = tuple
    ) -> None:
        """Start no process yet.

        Args:
            on_start_anew: called once with each reason why ranks are started anew, and not as forks.
            upcoming_trials: returns the trials yet to be run.
        """
        self._on_start_anew = on_start_anew
        self._upcoming_trials = upcoming_trials
        self._reported_reasons: set[str] = set()
        self._processes: dict[ProcessKey, Prepared] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.close()
        self._processes.clear()

    def ready(self, trial_id: str, trial: Trial | None, environment: Mapping[str, str], cwd: Path, log: Path) -> Ready:
        """Return a process from which a run of the trial can be forked.

        It is the existing one, unless that has already served this trial; else a new one. While a new one imports,
        those that upcoming trials will need import too: none of them has to import beside a run later.

        Args:
            trial_id: id of the trial, or of a check.
            trial: trial for which to import engine and model; None: a check is to be forked.
            environment: variables of the ranks, all but the token.
            cwd: their working directory.
            log: file for what importing prints.
        """
        key = process_key(trial, environment, cwd)
        existing = self._existing_process(key, trial_id, trial)
        if existing is not None:
            return Ready(existing)
        self._end_useless_processes(key)
        start_seconds = time.monotonic()
        reason = self._start_process(key, trial, environment, cwd, log)
        if reason is None:
            reason = self._import_with_upcoming(key, trial, environment, cwd)
        if reason is not None:
            return self._report_start_anew(reason)
        process = self._processes[key]
        process.served.add(trial_id)
        return Ready(process, waited_seconds=time.monotonic() - start_seconds)

    def _existing_process(self, key: ProcessKey, trial_id: str, trial: Trial | None) -> Prepared | None:
        """Return the process with this key, once it has imported for the trial; None where a new one is needed.

        A new one is needed where there is none, where it has served this trial before, and where it cannot be forked.
        """
        process = self._processes.get(key)
        if process is None or trial_id in process.served:
            return None
        try:
            process.import_for(trial)
            cold_reason = process.wait_for_imports(_ANSWER_SECONDS)
        except PreparedError:
            return None
        if cold_reason is not None:
            return None
        process.served.add(trial_id)
        return process

    def _end_useless_processes(self, key: ProcessKey) -> None:
        """End the process with this key, which is to be replaced, and those from before the code changed."""
        useless = [other for other in self._processes if other == key or other.code != key.code]
        for other in useless:
            self._processes.pop(other).close()

    def _import_with_upcoming(
        self, key: ProcessKey, trial: Trial | None, environment: Mapping[str, str], cwd: Path
    ) -> str | None:
        """Wait for the imports of a new process, and of those that are begun beside it for upcoming trials.

        Returns:
            Why the process with this key cannot be forked; None where it can.
        """
        upcoming = self._upcoming_without_process(key, trial) if trial is not None else {}
        for other_key, other_trial in upcoming.items():
            self._start_process(other_key, other_trial, environment, cwd, Path(os.devnull))
        reason = self._wait_for_imports(key)
        for other_key in upcoming:
            self._wait_for_imports(other_key)  # where it fails, the run that needs it tries again, and reports why
        return reason

    def _upcoming_without_process(self, key: ProcessKey, trial: Trial) -> dict[ProcessKey, Trial]:
        """Return an upcoming trial for each process that has to be started for such trials; by its key.

        A process that has served a trial is replaced: it belongs to the round that is ending.

        Args:
            key: of the process that is started for the current trial.
            trial: the current trial. Upcoming trials whose ranks get other variables are left out.
        """
        trials_by_key: dict[ProcessKey, Trial] = {}
        for upcoming in self._upcoming_trials():
            if _has_same_variables(upcoming, trial):
                trials_by_key[key._replace(libraries=_imported_libraries(upcoming))] = upcoming
        without_process = {}
        for other_key, upcoming in trials_by_key.items():
            process = self._processes.get(other_key)
            if other_key != key and (process is None or process.served):
                without_process[other_key] = upcoming
        return without_process

    def _start_process(
        self, key: ProcessKey, trial: Trial | None, environment: Mapping[str, str], cwd: Path, log: Path
    ) -> str | None:
        """Start a process, in place of one with the same key, and let it begin to import.

        Returns:
            Why it cannot be started; None where it is.
        """
        if key in self._processes:
            self._processes.pop(key).close()
        try:
            process = Prepared(environment, cwd, log)
            self._processes[key] = process
            process.import_for(trial)
        except OSError as error:
            return f"the prepared process cannot be started: {error.strerror}"
        except PreparedError:
            pass  # it is gone: `_wait_for_imports` says why
        return None

    def _wait_for_imports(self, key: ProcessKey) -> str | None:
        """Wait for the imports of a process, and end it where it cannot be forked.

        Returns:
            Why the process cannot be forked; None where it can.
        """
        if key not in self._processes:
            return None
        try:
            reason = self._processes[key].wait_for_imports(_IMPORTS_SECONDS)
        except PreparedError as error:
            reason = str(error)
        if reason is not None:
            self._processes.pop(key).close()
        return reason

    def _report_start_anew(self, reason: str) -> Ready:
        """Return that ranks are started anew, and report each reason once."""
        if self._on_start_anew is not None and reason not in self._reported_reasons:
            self._reported_reasons.add(reason)
            self._on_start_anew(reason)
        return Ready(cold=reason)


def _has_same_variables(upcoming: Trial, trial: Trial) -> bool:
    """Whether ranks of the upcoming trial are forked too, and get the same variables as those of this trial."""
    has_same_launch = upcoming.launcher == trial.launcher
    has_same_threads = upcoming.world.threads_per_rank == trial.world.threads_per_rank
    return has_same_launch and has_same_threads and upcoming.train.script is None


def ranks_environment(added: Mapping[str, str], without: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the variables of a job's processes.

    These are this process's own, those `added`, and the one that keeps the current folder out of every Python's search
    path. Left out are the variables by which a launcher around this process has given it a rank.

    Args:
        added: further variables.
        without: prefixes of names; variables that begin with one of them are left out.
    """
    dropped_names = {*ALL_NAMES, _POLARS_VARIABLE}
    inherited = {name: value for name, value in os.environ.items() if name not in dropped_names}
    all_variables = {**inherited, **added}
    environment = {name: value for name, value in all_variables.items() if not name.startswith(without)}
    return environment | safe_path(environment)


_OTHERS_SECONDS = 15.0
"""Seconds that the other commands have, once one has failed, to end by themselves and say why."""
_POLL_SECONDS = 0.05
"""Time from one look at several commands to the next."""
_NOT_BEGUN_CODES = (255, 127, 126)
"""Exit codes of ssh for its own failure, and of a shell on the host for a program that is missing or may not be run."""
_REAP_SECONDS = 10.0
"""Seconds until an ended process is known to have ended."""


class HostExit(NamedTuple):
    """The end of the command that was to begin something on a host."""

    host: str
    code: int


class Job:
    """Some commands and everything they start.

    Each command leads a session of its own, which what it starts belongs to. Processes that leave the session (torchrun
    gives each rank one of its own) are found and ended by the token in their environment. A fork of a prepared process
    has no token that the kernel would show, but never leaves its session.
    """

    def __init__(
        self,
        spawn: Spawn,
        heartbeats: HeartbeatServer,
        prepared: Prepared | None = None,
        end_elsewhere: Callable[[int | None], tuple[str, ...]] = lambda _: (),
    ) -> None:
        """Start the commands; for arguments and errors see `Placement.start`."""
        self.token = spawn.token
        self.heartbeats = heartbeats
        self._prepared = prepared
        self._end_elsewhere = end_elsewhere
        self._hosts = [host.name for host in spawn.hosts] if spawn.per_host else []
        """Host of each command; empty where one command starts ranks on all hosts."""
        self._commands = spawn.commands
        self.started_unix_seconds = time.time()
        self._start_seconds = time.monotonic()
        self._failed_seconds: float | None = None
        """When a command was first seen to have failed, on the monotonic clock."""
        self._first_signal = signal.SIGKILL if spawn.kill_at_once else signal.SIGTERM
        environment = ranks_environment(spawn.environment, spawn.drop_variables) | {TOKEN_VARIABLE: spawn.token}
        self._processes: list[subprocess.Popen[bytes] | Fork] = []
        try:
            for command in spawn.commands:
                if prepared is None:
                    self._processes.append(_start_anew(command, spawn, environment))
                else:
                    self._processes.append(prepared.fork(command, environment, spawn.log))
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
        """Exit code of the commands together; None while one runs.

        It is that of the first command that failed, negative for a signal; 0 where none failed. Once a command has
        failed, the others have `_OTHERS_SECONDS` to end: then this is no longer None, even if they still run.
        """
        codes = [process.poll() for process in self._processes]
        failures = [code for code in codes if code]
        if None not in codes:
            return failures[0] if failures else 0
        if not failures:
            return None
        now_seconds = time.monotonic()
        if self._failed_seconds is None:
            self._failed_seconds = now_seconds
        had_time_to_end = now_seconds - self._failed_seconds > _OTHERS_SECONDS
        return failures[0] if had_time_to_end else None

    @property
    def not_begun(self) -> tuple[HostExit, ...]:
        """Hosts where ssh, or the shell that it speaks to, began nothing; the first one first."""
        not_begun = []
        for host, command, process in zip(self._hosts, self._commands, self._processes, strict=False):
            code = process.poll() if command[0] == "ssh" else None
            if code in _NOT_BEGUN_CODES:
                not_begun.append(HostExit(host, code))
        return tuple(not_begun)

    @property
    def wall_seconds(self) -> float:
        """Seconds since the start, on a clock that never goes back."""
        return time.monotonic() - self._start_seconds

    def wait(self, seconds: float) -> int | None:
        """Wait for the end, `seconds` at most, and return `exit_code`."""
        deadline = time.monotonic() + seconds
        is_single = len(self._processes) == 1
        while True:
            code = self.exit_code
            if code is not None or time.monotonic() >= deadline:
                return code
            running = next((process for process in self._processes if process.poll() is None), None)
            if running is not None:
                remaining_seconds = max(0.0, deadline - time.monotonic())
                with contextlib.suppress(subprocess.TimeoutExpired):
                    running.wait(remaining_seconds if is_single else _POLL_SECONDS)

    def end(self) -> tuple[str, ...]:
        """End every process that is left on every host, wait until all are gone, and close the heartbeat server.

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
        """End every process of the run on this host."""
        # With psutil: a plan starts nothing, and need not wait for this import.
        from vitscale.processes.host_agent import end_all

        end_all(self.token, self._first_signal, self.sessions)

    def _reap(self, process: subprocess.Popen[bytes] | Fork) -> None:
        """Wait for the end of a command that was killed."""
        try:
            process.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:
            if self._prepared is None:
                raise
            self._prepared.close()  # it is stopped, and cannot report that its forks have ended


def _start_anew(command: Sequence[str], spawn: Spawn, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a command as a new process, which ends with this thread."""
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
