"""`python -m vitscale.worker.prepared FD`: imports what ranks need, and starts runs as forks of itself.

It imports and does nothing else: no engine, step or group is built, no device opened, no thread started, so that a fork
has what a new process has after its imports. Socket FD is the driver's (`vitscale.schedulers.prepared`). JSON lines go
over it, requests one way and messages the other; when it closes, all ends.

    {"imports": {"train": {...}, "model": {...}}}   imports what training needs; null: what a check needs
    {"ready": 2.1}   {"cold": "a reason"}           seconds that the imports took; why runs must not be forks
    {"arguments": [...], "environment": {...}, "log": "..."}   starts a run
    {"started": 1234}   {"ended": 1234, "code": 0}  its process id, and later its exit code
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from vitscale.base.interpreter import parse_module_command
from vitscale.machine.gpus import DEVICE_PREFIXES
from vitscale.processes import local_ranks
from vitscale.processes.launch_file import COMPLETE_VARIABLE, TOKEN_VARIABLE
from vitscale.processes.parent_death import end_with_parent, name_process
from vitscale.trial.model_spec import ModelSpec
from vitscale.trial.trial import TrainSpec
from vitscale.worker.rank_process import now_ns

_ENTRY = "vitscale.worker.__main__"
"""The module that its forks run."""


def main(arguments: list[str]) -> NoReturn:
    """Serves until the driver closes its end of the socket."""
    _Server(socket.socket(fileno=int(arguments[0]))).serve()


class _Server:
    """Imports and starts runs for a driver.

    The driver first asks for imports, once or more; the answer is "ready" or "cold". Cold means that runs must not be
    forks of this process: the driver then ends it, and starts ranks as new processes. After "ready" it asks for runs,
    each of which becomes a fork: it gets "started" at once, and "ended" when the fork has ended.
    """

    def __init__(self, driver: socket.socket) -> None:
        """`driver`: socket to the driver."""
        self._driver = driver
        # When a child ends, Python writes into `_wake`, and the only `select` of this process sees it in `_woken`.
        self._woken, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        signal.signal(signal.SIGCHLD, _ignore_signal)  # a signal without a handler wakes nobody
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._imports_seconds: float | None = None
        """Seconds that the imports took; None before they are done."""
        self._variables_of_imports: dict[str, str] = {}
        """Variables that the imports set; a rank gets them on top of the driver's."""
        self._started: set[int] = set()
        """Process ids of its forks whose end has not been reported to the driver."""

    def serve(self) -> NoReturn:
        """Answers requests, and reports forks that end, until the driver closes its end."""
        incomplete_line = b""
        while True:
            ready, _, _ = select.select([self._driver, self._woken], [], [])
            if self._woken in ready:
                self._woken.recv(4096)
                self._report_ended()
            if self._driver in ready:
                chunk = self._driver.recv(1 << 16)
                if not chunk:
                    os._exit(0)  # all that it has started is tied to it
                *lines, incomplete_line = (incomplete_line + chunk).split(b"\n")
                for line in lines:
                    self._handle_request(json.loads(line))

    def _report_ended(self) -> None:
        """Sends the exit code of each fork that has ended."""
        for pid in [*self._started]:
            ended_pid, status = os.waitpid(pid, os.WNOHANG)
            if ended_pid != 0:
                self._started.remove(pid)
                self._send(ended=pid, code=os.waitstatus_to_exitcode(status))

    def _send(self, **message: object) -> None:
        """Sends a message to the driver; ends this process where there is none any more."""
        try:
            self._driver.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            os._exit(0)

    def _handle_request(self, request: Mapping[str, Any]) -> None:
        """Does what a line of the driver asks for: imports, or the start of a run."""
        if "imports" in request:
            self._import_and_report(request["imports"])
        else:
            self._start_run(request["arguments"], request["environment"], Path(request["log"]))

    def _import_and_report(self, trial_fields: Mapping[str, Any] | None) -> None:
        """Imports what ranks need; sends "ready", or "cold" with the reason why runs must not be forks of this process.

        Args:
            trial_fields: as in `_import`.
        """
        try:
            self._import(trial_fields)
        except BaseException as error:  # whatever a user's module raises, be it SystemExit
            traceback.print_exc()
            self._send(cold=f"its imports failed: {type(error).__name__}: {error}"[:300])
            return
        reason = self._why_unforkable()
        if reason is not None:
            self._send(cold=reason)
        else:
            self._send(ready=self._imports_seconds)

    def _import(self, trial_fields: Mapping[str, Any] | None) -> None:
        """Imports what ranks need; does nothing the second time.

        Args:
            trial_fields: the fields `train` and `model` of a trial that ranks will train; None: what a check needs.
        """
        if self._imports_seconds is not None:
            return
        began = time.perf_counter()
        environment_before = dict(os.environ)
        gc.disable()
        importlib.import_module(_ENTRY)
        if trial_fields is not None:
            train = TrainSpec.model_validate(trial_fields["train"])
            model = ModelSpec.model_validate(trial_fields["model"])
            importlib.import_module("vitscale.worker.session").preload(train, model)
        else:
            importlib.import_module("vitscale.worker.check_stages")
        self._variables_of_imports = {
            name: value for name, value in os.environ.items() if environment_before.get(name) != value
        }
        # All objects so far stay. The search for garbage writes into each one that it looks at, and a fork would have
        # to copy the pages; frozen ones are left out of it.
        gc.collect()
        gc.freeze()
        gc.enable()
        self._imports_seconds = time.perf_counter() - began

    def _why_unforkable(self) -> str | None:
        """Returns why this process must not be forked; None where it may be."""
        threads = len([*Path("/proc/self/task").iterdir()])
        open_files = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return unforkable(threads, open_files)

    def _start_run(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        """Forks a process that runs `command`, which starts ranks; sends its process id.

        Args:
            command: argv of `vitscale.processes.local_ranks` for the run.
            environment: the run's variables.
            log: file that gets what the run prints.
        """
        server_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            _work_and_exit(lambda: self._run(server_pid, command, environment, log))
        self._started.add(pid)
        self._send(started=pid)

    def _run(self, server_pid: int, command: list[str], environment: dict[str, str], log: Path) -> int:
        """Does a run in a fork of the server: forks the ranks and waits for them; returns the exit code.

        Arguments as in `_start_run`; the end of process `server_pid` ends this one.
        """
        if not end_with_parent(server_pid):
            return 1
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (self._driver, self._woken, self._wake):
            end.close()
        # By this session the driver finds the ranks: what the kernel shows of a fork's environment is the server's.
        os.setsid()
        _redirect_output(log)
        os.environ.clear()
        os.environ.update(environment)
        importlib.invalidate_caches()
        local_ranks_command = parse_module_command(command)
        name_process("vitscale ranks")

        def fork_rank(rank_arguments: list[str], variables: Mapping[str, str]) -> int:
            parent_pid = os.getpid()
            pid = os.fork()
            if pid == 0:
                arrived_ns = now_ns()
                rank_command = [local_ranks_command.interpreter, *rank_arguments]
                _work_and_exit(lambda: self._run_rank(parent_pid, rank_command, variables, arrived_ns))
            return pid

        return local_ranks.main([*local_ranks_command.arguments], fork_rank)

    def _run_rank(self, parent_pid: int, command: list[str], variables: Mapping[str, str], arrived_ns: int) -> NoReturn:
        """Does one rank's work in a fork of process `parent_pid`.

        Args:
            parent_pid: process whose end ends this one.
            command: the rank's command, whose last word is the folder of the run.
            variables: its environment.
            arrived_ns: when this process began, by `now_ns`.
        """
        if not end_with_parent(parent_pid):
            os._exit(1)
        # As in a new process: `local_ranks` has handlers of its own for these.
        for signal_number in local_ranks.FORWARDED_SIGNALS:
            handler = signal.default_int_handler if signal_number == signal.SIGINT else signal.SIG_DFL
            signal.signal(signal_number, handler)
        os.environ.clear()
        os.environ.update(variables)
        os.environ.update(self._variables_of_imports)
        os.environ[COMPLETE_VARIABLE] = variables[TOKEN_VARIABLE]  # a fork cannot begin again
        name_process(f"vitscale rank {variables.get('RANK', '0')}")
        # New random numbers, as in a new process; torch's seed is the same in every process.
        random.seed()
        np.random.seed()
        folder = command[-1]
        worker = sys.modules[_ENTRY]
        sys.argv = [str(worker.__file__), folder]
        worker.main(Path(folder), arrived_ns)
        raise AssertionError("a rank leaves by itself")


def _ignore_signal(*_: object) -> None:
    """Handles a signal by doing nothing."""


def unforkable(threads: int, open_files: Sequence[str]) -> str | None:
    """Returns why a process with so many threads and these open files must not be forked; None where it may be."""
    if threads > 1:
        return f"importing started {threads - 1} thread{'s' if threads > 2 else ''}, which a fork would lack"
    for path in open_files:
        if path.startswith(DEVICE_PREFIXES):
            return f"importing opened {path}, which a fork cannot use"
    return None


def _work_and_exit(work: Callable[[], int]) -> NoReturn:
    """Does the work of a fork, and ends its process with the exit code of `work`; no caller goes on.

    Args:
        work: returns the exit code. An exception that leaves it becomes an exit code as in the interpreter.
    """
    exit_code = 1
    try:
        exit_code = _exit_code_of(work)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(exit_code)


def _exit_code_of(work: Callable[[], int]) -> int:
    """Calls `work` and returns its exit code; 1 after an exception, which is printed.

    `sys.exit(3)` gives 3, `sys.exit()` 0, and `sys.exit("a text")` prints the text and gives 1.
    """
    try:
        return work()
    except SystemExit as error:
        if error.code is None:
            return 0
        if isinstance(error.code, int):
            return error.code
        print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    return 1


def _redirect_output(log: Path) -> None:
    """Empties this process's standard input, and sends its output and errors to the end of the file `log`."""
    sys.stdout.flush()
    sys.stderr.flush()
    empty_input = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty_input, 0)
    os.close(empty_input)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)


if __name__ == "__main__":
    main(sys.argv[1:])
