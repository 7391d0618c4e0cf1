"""`python -m vitscale.models.tracing`: reads requests as lines of JSON, prints cards as lines of JSON.

    python -m vitscale.models.tracing --memory-bytes 8000000000 --cpu-seconds 60 < requests.jsonl

`vitscale.trial.trace_messages` shows the lines. An answer without a card has one sentence, and never a traceback.

Requests are UTF-8 whatever the locale says. They are answered in their order, each as soon as it is known; they share
the imports. Where a model's code ends this process, its request and those behind it have no answer. What models' own
code prints goes to standard error. The bounds are on each request, beyond the imports of torch: memory is address space
beyond theirs.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

from pydantic import ValidationError

from vitscale.base.interpreter import append_to_search_path
from vitscale.errors import VitscaleError, printable
from vitscale.processes.parent_death import end_with_parent
from vitscale.trial.model_card import ModelCard, TraceRequest
from vitscale.trial.trace_messages import CardAnswer, NumberedRequest, RefusalAnswer, TraceAnswer, TraceRefusal

_STANDARD_OUTPUT = 1
_STANDARD_ERROR = 2


class _OutOfTimeError(BaseException):
    """The CPU seconds are over. It is no `Exception`, so that no model's code catches it by that name."""


class _Bounds(NamedTuple):
    """What each request may take, beyond the imports; None: as much as there is."""

    memory_bytes: int | None
    """Address space."""
    cpu_seconds: int | None


def main(arguments: list[str]) -> int:
    """Answer requests until there are no more; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m vitscale.models.tracing")
    parser.add_argument("--memory-bytes", type=int, help="address space of a request, beyond that of the imports")
    parser.add_argument("--cpu-seconds", type=int, help="CPU time of a request, beyond that of the imports")
    parser.add_argument(
        "--import-folder", action="append", default=[], help="searched for modules, behind all that is installed"
    )
    parser.add_argument("--parent", type=int, help="process id of the caller, with whose end this process ends")
    options = parser.parse_args(arguments)
    if options.parent is not None and not end_with_parent(options.parent):
        return 1
    append_to_search_path(options.import_folder)
    bounds = _Bounds(options.memory_bytes, options.cpu_seconds)
    with _standard_output_reserved() as output_descriptor:
        for line in sys.stdin.buffer:
            answer = _answer(line, bounds)
            os.write(output_descriptor, answer.model_dump_json().encode() + b"\n")
    return 0


def _answer(line: bytes, bounds: _Bounds) -> TraceAnswer:
    """Return the card of a request, which is a line of JSON, or why there is none."""
    try:
        numbered = NumberedRequest.model_validate_json(line)
    except ValidationError as error:
        reason = f"standard input is no request: {error.errors()[0]['msg']}"
        return RefusalAnswer(request_id=None, error=TraceRefusal(reason=reason))
    result = _card_or_refusal(numbered.request, bounds)
    if isinstance(result, TraceRefusal):
        return RefusalAnswer(request_id=numbered.request_id, error=result)
    return CardAnswer(request_id=numbered.request_id, card=result)


def _card_or_refusal(request: TraceRequest, bounds: _Bounds) -> ModelCard | TraceRefusal:
    """Return the card of a request, or why there is none."""
    try:
        return _bounded_trace(request, bounds)
    except _OutOfTimeError:
        reason = f"counting the model took longer than {bounds.cpu_seconds:,} CPU seconds"
        return TraceRefusal(reason=reason, is_out_of_time=True)
    except BaseException as error:  # the model's code may raise anything, SystemExit included
        return TraceRefusal(reason=_error_sentence(error, bounds.memory_bytes))
    finally:
        _lift_time_bound()


def _bounded_trace(request: TraceRequest, bounds: _Bounds) -> ModelCard:
    """Bound this process, trace the model of a request, and return its card.

    Raises:
        BaseException: of any type, from the model's code; `_OutOfTimeError` where its time is over.
    """
    from vitscale.models.tracing.tracer import trace  # imports torch, which the bounds leave out

    _bound_memory(bounds.memory_bytes)
    _bound_time(bounds.cpu_seconds)
    return trace(request)


def _bound_memory(memory_bytes: int | None) -> None:
    """Let this process take so many bytes of address space beyond what it has; None lets it take any."""
    if memory_bytes is None:
        return
    limit = _address_space_bytes() + memory_bytes
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    if hard_limit != resource.RLIM_INFINITY:
        limit = min(limit, hard_limit)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard_limit))


def _address_space_bytes() -> int:
    """Return the size of this process's address space; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:  # noqa: PTH123  # read once, no path to build
            pages = int(statm.read().split()[0])
    except OSError:
        return 0
    return pages * resource.getpagesize()


def _bound_time(cpu_seconds: int | None) -> None:
    """Raise `_OutOfTimeError` after so many more CPU seconds of this process; None lets it take any."""
    if cpu_seconds is None:
        return
    signal.signal(signal.SIGXCPU, _raise_out_of_time)
    soft_limit = math.ceil(time.process_time()) + cpu_seconds
    _, hard_limit = resource.getrlimit(resource.RLIMIT_CPU)
    if hard_limit != resource.RLIM_INFINITY:
        soft_limit = min(soft_limit, hard_limit)
    resource.setrlimit(resource.RLIMIT_CPU, (soft_limit, hard_limit))


def _raise_out_of_time(signal_number: int, frame: object) -> NoReturn:
    """Handle SIGXCPU, by which the system says that the CPU seconds are over."""
    del signal_number, frame
    _lift_time_bound()
    raise _OutOfTimeError


def _lift_time_bound() -> None:
    """Ignore SIGXCPU from now on: the system sends it again after every further second, also while this ends."""
    signal.signal(signal.SIGXCPU, signal.SIG_IGN)


@contextlib.contextmanager
def _standard_output_reserved() -> Iterator[int]:
    """The context in which all that is printed goes to standard error; gives a descriptor of standard output."""
    sys.stdout.flush()
    output_descriptor = os.dup(_STANDARD_OUTPUT)
    os.dup2(_STANDARD_ERROR, _STANDARD_OUTPUT)  # for C code; `redirect_stdout` is for Python's
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield output_descriptor
    finally:
        os.dup2(output_descriptor, _STANDARD_OUTPUT)
        os.close(output_descriptor)


def _error_sentence(error: BaseException, memory_bytes: int | None) -> str:
    """Return an error in one line, with its type where it is none of vitscale's own.

    Args:
        error: what ended the trace.
        memory_bytes: the bound on memory; None where there is none.
    """
    if _is_out_of_memory(error):
        limit = "there is" if memory_bytes is None else f"{memory_bytes:,} bytes of memory"
        return f"counting the model took more than {limit}"
    message = printable(" ".join(str(error).split()))  # JSON cannot have lone surrogates
    if isinstance(error, VitscaleError) and message:
        return message
    return f"the model's code ended with {type(error).__name__}: {message[:300]}".rstrip(": ")


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or what caused it, is that memory has run out, in Python or in torch's CPU allocator."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or "can't allocate memory" in str(cause):
            return True
        cause = cause.__cause__
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
