"""`python -m vitscale.worker.prepared FD PLACEHOLDER`: imports what ranks need, and starts runs as forks of itself.

It imports and does nothing else: no engine, step or group is built, no device opened, no thread started, so that a fork
has what a new process has after its imports. Socket FD is the driver's (`vitscale.schedulers.prepared`): JSON lines
that ask for imports and for runs, and answers that tell process ids and exit codes. When it closes, all ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import mmap
import os
import random
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from vitscale.base.interpreter import parse_module_command
from vitscale.processes import local_ranks
from vitscale.processes.launch_file import COMPLETE_VARIABLE, TOKEN_VARIABLE
from vitscale.processes.parent_death import end_with_parent
from vitscale.trial.model_spec import ModelSpec
from vitscale.trial.trial import TrainSpec
from vitscale.worker.rank_process import now_ns

_ARGUMENTS_START, _ENVIRONMENT_START = 48, 50
"""Fields of /proc/PID/stat with the addresses of arguments and environment, counted from 1."""
_PRESENT, _OF_A_FILE = np.uint64(1 << 63), np.uint64(1 << 61)
"""Bits of an entry of /proc/PID/pagemap (Documentation/admin-guide/mm/pagemap.rst)."""
_ENTRY = "vitscale.worker.__main__"
"""The module that its forks run."""
_MADV_POPULATE_READ = 22
"""Advice of madvise since Linux 5.14."""


class InitialMemory:
    """Command line and environment of this process as the kernel shows them. It was started with a placeholder for the
    token, and for a command longer than its own."""

    def __init__(self) -> None:
        stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
        # The name in field 2 may hold blanks and parentheses.
        fields = stat[stat.rindex(")") + 2 :].split()
        self._command_at, environment_at = (int(fields[n - 3]) for n in (_ARGUMENTS_START, _ENVIRONMENT_START))
        self._command_bytes = len(Path("/proc/self/cmdline").read_bytes())
        name = f"{TOKEN_VARIABLE}=".encode()
        environment = Path("/proc/self/environ").read_bytes()
        offset = (b"\0" + environment).find(b"\0" + name)
        self._placeholder = environment[offset + len(name) :].partition(b"\0")[0] if offset >= 0 else b""
        self._token_at = environment_at + offset + len(name)

    def unfit(self) -> str | None:
        """Why they cannot be written; None where they can."""
        if not self._placeholder or not self._command_at:
            return "where its environment lies is not known"
        if ctypes.string_at(self._token_at, len(self._placeholder)) != self._placeholder:
            return "its environment does not lie where the kernel says"
        return None

    def set_token(self, token: str | None) -> None:
        """Writes a token as long as the placeholder, or for None the placeholder.

        Raises:
            ValueError: it has another length than the placeholder.
        """
        text = self._placeholder if token is None else token.encode()
        if len(text) != len(self._placeholder):
            raise ValueError(f"a token of {len(text)} characters has no room in {len(self._placeholder)}")
        ctypes.memmove(self._token_at, text, len(text))

    def set_command(self, command: list[str]) -> None:
        """Writes a command line, cut off where it has no room."""
        text = b"\0".join(word.encode(sys.getfilesystemencoding(), "surrogateescape") for word in command)
        # The last byte stays 0: without it the kernel would read on into the environment.
        ctypes.memmove(
            self._command_at, text[: self._command_bytes - 1].ljust(self._command_bytes, b"\0"), self._command_bytes
        )


def file_pages() -> list[tuple[int, int]]:
    """Stretches (address, bytes) of file pages that this process has mapped; empty where the kernel does not tell."""
    page = mmap.PAGESIZE
    mapped = []
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:  # noqa: PTH123 - seeked
            for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
                span, _, _, _, inode, *_ = line.split()
                if inode == "0":
                    continue
                begin, end = (int(address, 16) for address in span.split("-"))
                entries = np.frombuffer(
                    os.pread(pagemap.fileno(), (end - begin) // page * 8, begin // page * 8), np.uint64
                )
                here = ((entries & _PRESENT) != 0) & ((entries & _OF_A_FILE) != 0)
                edges = np.flatnonzero(np.diff(np.concatenate(([False], here, [False]))))
                stretches = edges.reshape(-1, 2).tolist()
                mapped += [(begin + first * page, (last - first) * page) for first, last in stretches]
    except OSError:
        return []
    return mapped


def map_pages(stretches: Iterable[tuple[int, int]]) -> None:
    """Maps these pages into this process, as reading them would; pages that are gone are left out."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with open("/proc/self/mem", "rb", buffering=0) as memory:  # noqa: PTH123 - seeked
        for address, size in stretches:
            if madvise(address, size, _MADV_POPULATE_READ) == 0:
                continue
            for page in range(address, address + size, mmap.PAGESIZE):
                with contextlib.suppress(OSError):
                    os.pread(memory.fileno(), 1, page)


def main(arguments: list[str]) -> NoReturn:
    """Serves until the driver closes its end of the socket."""
    _Server(socket.socket(fileno=int(arguments[0]))).serve()


class _Server:
    def __init__(self, driver: socket.socket) -> None:
        self._driver = driver
        # A child that ends wakes the only `select` of this process.
        self._woken, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._memory = InitialMemory()
        self._imports_seconds: float | None = None
        self._file_pages: list[tuple[int, int]] = []
        self._set_by_imports: dict[str, str] = {}
        self._started: set[int] = set()

    def serve(self) -> NoReturn:
        heard = b""
        while True:
            ready, _, _ = select.select([self._driver, self._woken], [], [])
            if self._woken in ready:
                self._woken.recv(4096)
                self._tell_ended()
            if self._driver in ready:
                chunk = self._driver.recv(1 << 16)
                if not chunk:
                    os._exit(0)  # all that it has started is tied to it
                *lines, heard = (heard + chunk).split(b"\n")
                for line in lines:
                    self._answer(json.loads(line))

    def _tell_ended(self) -> None:
        for pid in [*self._started]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._started.remove(pid)
                self._say(ended=pid, code=os.waitstatus_to_exitcode(status))

    def _say(self, **message: object) -> None:
        try:
            self._driver.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            os._exit(0)

    def _answer(self, request: Mapping[str, Any]) -> None:
        if "imports" in request:
            try:
                self._import(request["imports"])
            except BaseException as error:
                traceback.print_exc()
                self._say(cold=f"its imports failed: {type(error).__name__}: {error}"[:300])
                return
            if (reason := self._unfit()) is not None:
                self._say(cold=reason)
            else:
                self._say(ready=self._imports_seconds)
        else:
            self._start(request["arguments"], request["environment"], Path(request["log"]))

    def _import(self, of_trial: Mapping[str, Any] | None) -> None:
        """Imports what training ranks need, or, without a trial, what ranks of a check need."""
        if self._imports_seconds is not None:
            return
        began, before = time.perf_counter(), dict(os.environ)
        gc.disable()
        importlib.import_module(_ENTRY)
        if of_trial is not None:
            train, model = TrainSpec.model_validate(of_trial["train"]), ModelSpec.model_validate(of_trial["model"])
            importlib.import_module("vitscale.worker.session").preload(train, model)
        else:
            importlib.import_module("vitscale.worker.check_stages")
        self._set_by_imports = {key: value for key, value in os.environ.items() if before.get(key) != value}
        # All objects so far stay: forks need not copy pages to search them for garbage.
        gc.collect()
        gc.freeze()
        gc.enable()
        self._file_pages = file_pages()
        self._imports_seconds = time.perf_counter() - began

    def _unfit(self) -> str | None:
        """Why this process must not be forked; None where it may be."""
        threads = len([*Path("/proc/self/task").iterdir()])
        opened = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return unforkable(threads, opened) or self._memory.unfit()

    def _start(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        """Forks the process that runs the ranks, which are its own forks."""
        own = os.getpid()
        # Before the fork: whoever looks for the run's processes must find this one from its first moment on.
        self._memory.set_token(environment[TOKEN_VARIABLE])
        pid = os.fork()
        if pid == 0:
            _leave(lambda: self._run(own, command, environment, log))
        self._memory.set_token(None)
        self._started.add(pid)
        self._say(started=pid)

    def _run(self, parent: int, command: list[str], environment: dict[str, str], log: Path) -> int:
        if not end_with_parent(parent):
            return 1
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (self._driver, self._woken, self._wake):
            end.close()
        os.setsid()
        _redirect(log)
        os.environ.clear()
        os.environ.update(environment)
        importlib.invalidate_caches()
        ranks = parse_module_command(command)
        self._memory.set_command(command)

        def fork(rank_arguments: list[str], variables: Mapping[str, str]) -> int:
            own = os.getpid()
            pid = os.fork()
            if pid == 0:
                arrived_ns = now_ns()
                _leave(lambda: self._rank(own, [ranks.interpreter, *rank_arguments], variables, arrived_ns))
            return pid

        return local_ranks.main([*ranks.arguments], fork)

    def _rank(self, parent: int, command: list[str], variables: Mapping[str, str], arrived_ns: int) -> NoReturn:
        if not end_with_parent(parent):
            os._exit(1)
        for number in local_ranks.ASKING:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(variables)
        os.environ.update(self._set_by_imports)
        os.environ[COMPLETE_VARIABLE] = variables[TOKEN_VARIABLE]  # a fork cannot begin again
        map_pages(self._file_pages)
        self._memory.set_command(command)
        # New random numbers, as in a new process; torch's seed is the same in every process.
        random.seed()
        np.random.seed()
        folder, worker = command[-1], sys.modules[_ENTRY]
        sys.argv = [str(worker.__file__), folder]
        worker.main(Path(folder), arrived_ns)
        raise AssertionError("a rank leaves by itself")


def unforkable(threads: int, opened: Sequence[str]) -> str | None:
    """Why a process with so many threads and these open files must not be forked; None where it may be."""
    if threads > 1:
        return f"importing started {threads - 1} thread{'s' if threads > 2 else ''}, which a fork would lack"
    if device := next((path for path in opened if path.startswith("/dev/nvidia")), None):
        return f"importing opened {device}, which a fork cannot use"
    return None


def _leave(work: Any) -> NoReturn:
    """Ends this process with the exit code of `work`, as the interpreter would; no caller goes on."""
    code = 1
    try:
        code = work()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _redirect(log: Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    for path, flags, targets in (
        (os.devnull, os.O_RDONLY, (0,)),
        (str(log), os.O_WRONLY | os.O_APPEND | os.O_CREAT, (1, 2)),
    ):
        opened = os.open(path, flags, 0o666)
        for target in targets:
            os.dup2(opened, target)
        os.close(opened)


if __name__ == "__main__":
    main(sys.argv[1:])
