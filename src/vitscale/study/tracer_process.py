"""A process that traces models, one after the other: it reads requests as lines, and prints an answer to each.

It leads a process group, since a model's code may start processes, and is killed with its group. A group has the number
of its leader, and the system gives that number to nobody else until the leader was waited for ("reaped"). So the end of
the process goes in this order:

1. RUNNING, until it ends by itself or is killed;
2. ENDED: a zombie, whose number still is its own, so that its group can be killed by it;
3. REAPED: its exit code is known, and its number may be another process's.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from enum import Enum, auto
from typing import IO, cast

from vitscale.base.interpreter import python_module
from vitscale.errors import printable, shown
from vitscale.trial.model_card import TraceRequest
from vitscale.trial.trace_messages import NumberedRequest, RefusalAnswer, TraceAnswer, parse_answer

PROCESSES = 2
"""Processes that trace side by side; each takes one core."""
_TRACER_MODULE = "vitscale.models.tracing"
_LONGEST_TRACE_SECONDS = 120
"""Limit of a trace, of a core's time and by the clock."""
_LONGEST_IMPORT_SECONDS = 120
"""Time by the clock that a process has, beyond that of its first trace, to import torch."""
_MOST_TRACE_MEMORY_BYTES = 8 << 30
_SHARE_OF_MEMORY = 0.5
"""Share of the machine's memory that all traces may take together."""
LARGEST_CARD_BYTES = 16 << 20
_LONGEST_REASON = 300
_LONGEST_ERROR_OUTPUT = 4096
"""Bytes of standard error that are kept of a tracer."""
_PIPE_BYTES = 1 << 16
_READS_OF_A_PIPE = 16
_NO_CARD = "the process that counts models gave no card"


class TracerError(Exception):
    """There is no answer to a request, and the process is of no further use; the message says why."""


class TracerTooSlowError(TracerError):
    """The time of a request is over."""


class NoAnswerError(TracerError):
    """The process printed what is no answer to its request."""


class TracerProcess:
    """A process that traces models.

    Example:
        >>> process = TracerProcess(import_folders=())
        >>> process.ask(request)
        >>> answer = process.answer()  # None: not yet
        >>> process.end()
    """

    def __init__(self, import_folders: Sequence[str]) -> None:
        """Start it; `import_folders` are those in which ranks look for a user's modules.

        Raises:
            OSError: it cannot be started.
        """
        argv = python_module(
            _TRACER_MODULE,
            f"--memory-bytes={_memory_limit_bytes()}",
            f"--cpu-seconds={_LONGEST_TRACE_SECONDS}",
            f"--parent={os.getpid()}",
            *(f"--import-folder={folder}" for folder in import_folders),
        )
        self._child = _Child(argv)
        self._output = _Pipe(self._child.stdout)
        self._errors = _Pipe(self._child.stderr)
        self._import_seconds = _LONGEST_IMPORT_SECONDS
        self._deadline = math.inf
        self._request: NumberedRequest | None = None
        self.answer_count = 0
        """Answers that it has given so far."""

    def ask(self, request: TraceRequest) -> None:
        """Begin with a request."""
        self._request = NumberedRequest(request_id=self.answer_count + 1, request=request)
        self._deadline = time.monotonic() + self._import_seconds + _LONGEST_TRACE_SECONDS
        self._import_seconds = 0
        self._child.write_line(self._request.model_dump_json())

    def answer(self) -> TraceAnswer | None:
        """Return the answer to the request; None where it is not there yet.

        Raises:
            TracerTooSlowError: its time is over.
            NoAnswerError: something else was printed in its place.
            TracerError: the process has ended.
        """
        state = self._child.state()  # asked before reading: what an ended process has printed is in the pipe by then
        self._output.read()
        self._errors.read()
        self._errors.keep_end(_LONGEST_ERROR_OUTPUT)
        line = self._output.take_line()
        if line is not None:  # also of an ended process, which may have answered before
            return self._checked_answer(line)
        if state is not _ChildState.RUNNING:
            raise TracerError(f"the process that counts models ended: {self._why_ended()}")
        if len(self._output.content) > LARGEST_CARD_BYTES:  # a line without end would fill this process's memory
            raise NoAnswerError(_NO_CARD)
        if time.monotonic() > self._deadline:
            raise TracerTooSlowError(f"counting this model took longer than {_LONGEST_TRACE_SECONDS} s")
        return None

    def _checked_answer(self, line: bytes) -> TraceAnswer:
        """Return the answer that a line is.

        Raises:
            NoAnswerError: the line is none, or answers another request: answers would be off by one from here on.
        """
        answer = parse_answer(line)
        if answer is None:
            raise NoAnswerError(_NO_CARD)
        if self._request is None or not answer.is_of(self._request):
            raise NoAnswerError("the process that counts models answered another request")
        self.answer_count += 1
        return _with_printable_reason(answer) if isinstance(answer, RefusalAnswer) else answer

    def _why_ended(self) -> str:
        """Return the last line that the ended process printed on standard error, or its exit code."""
        lines = self._errors.content.decode(errors="replace").strip().splitlines()
        if lines:
            return shown(printable(lines[-1])[:_LONGEST_REASON])
        return shown(f"exit code {self._child.kill()}")

    def open_descriptors(self) -> list[int]:
        """Return the descriptors at which something may come."""
        return [pipe.descriptor for pipe in (self._output, self._errors) if pipe.is_open]

    def end(self) -> None:
        """Kill the process, and those that its models' code has started."""
        self._child.kill()
        self._child.close_pipes()


def _with_printable_reason(answer: RefusalAnswer) -> RefusalAnswer:
    """Return an answer whose reason, which may quote a model's code, can be shown in a terminal."""
    reason = printable(answer.error.reason)[:_LONGEST_REASON]
    return answer.model_copy(update={"error": answer.error.model_copy(update={"reason": reason})})


class _ChildState(Enum):
    """How far a process has come; the module's docstring says what follows from each state."""

    RUNNING = auto()
    ENDED = auto()
    REAPED = auto()


class _Child:
    """A process that leads a group of its own."""

    def __init__(self, argv: Sequence[str]) -> None:
        """Start it.

        Raises:
            OSError: it cannot be started.
        """
        self._popen = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        self._stdin = cast("IO[bytes]", self._popen.stdin)
        self.stdout = cast("IO[bytes]", self._popen.stdout)
        self.stderr = cast("IO[bytes]", self._popen.stderr)

    def state(self) -> _ChildState:
        """Return how far it has come."""
        if self._popen.returncode is not None:
            return _ChildState.REAPED
        if not hasattr(os, "waitid"):  # only Linux can look at a process without reaping it
            return _ChildState.RUNNING if self._popen.poll() is None else _ChildState.REAPED
        ended = os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return _ChildState.RUNNING if ended is None else _ChildState.ENDED

    def kill(self) -> int:
        """Kill the process, if it runs, and all others of its group; return its exit code."""
        if self._popen.returncode is None:  # once it is reaped, its number may be that of a stranger's group
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)
        return self._popen.wait()

    def write_line(self, line: str) -> None:
        """Write a line to its standard input; nothing where it has ended, as `state` says."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(f"{line}\n".encode())
            self._stdin.flush()

    def close_pipes(self) -> None:
        """Close this process's ends of its pipes."""
        for pipe in (self._stdin, self.stdout, self.stderr):
            with contextlib.suppress(BrokenPipeError):  # closing flushes a request that the process did not read
                pipe.close()


class _Pipe:
    """A process's output, read without waiting."""

    def __init__(self, file: IO[bytes]) -> None:
        self.descriptor = file.fileno()
        os.set_blocking(self.descriptor, False)
        self.content = bytearray()
        """Bytes that were read, and not yet taken."""
        self.is_open = True

    def read(self) -> None:
        """Add what has come by now; of a process that prints without end, no more than a full pipe."""
        for _ in range(_READS_OF_A_PIPE):
            if not self.is_open:
                return
            try:
                chunk = os.read(self.descriptor, _PIPE_BYTES)
            except BlockingIOError:
                return
            self.content += chunk
            self.is_open = bool(chunk)

    def take_line(self) -> bytes | None:
        """Return the first line without its newline, and drop it here; None where none has come whole."""
        line, newline, following = self.content.partition(b"\n")
        if not newline:
            return None
        self.content = following
        return bytes(line)

    def keep_end(self, byte_count: int) -> None:
        """Drop all but the last bytes."""
        del self.content[:-byte_count]


def _memory_limit_bytes() -> int:
    """Return how much memory a trace may take."""
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(_MOST_TRACE_MEMORY_BYTES, int(machine_bytes * _SHARE_OF_MEMORY / PROCESSES))
