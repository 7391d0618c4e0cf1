"""`python -m vitscale.models.tracing`: requests as lines of JSON on standard input, cards as lines on standard output.

    python -m vitscale.models.tracing --memory-bytes 8000000000 --cpu-seconds 60 < requests.jsonl

    {"request": {...}, "parts": [...], ...}   the card of a request
    {"error": "one sentence"}                 why there is none; never a traceback

Requests are answered in their order, each as soon as it is known; the imports serve them all. Where one takes more than
its bounds, this process may end: then that request and those behind it have no answer. What the models' own code prints
goes to standard error. The bounds hold for each request, and for what comes after the imports of torch: the memory is
address space beyond theirs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn

from vitscale.base.interpreter import append_to_search_path


class _OutOfTimeError(BaseException):
    """The CPU seconds are over. No model's code catches it as an Exception."""


def main(arguments: list[str]) -> int:
    """Answer one request; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m vitscale.models.tracing")
    parser.add_argument("--memory-bytes", type=int, help="address space beyond that of the imports")
    parser.add_argument("--cpu-seconds", type=int, help="CPU time of this process")
    parser.add_argument(
        "--import-folder", action="append", default=[], help="searched for modules, behind all that is installed"
    )
    options = parser.parse_args(arguments)
    append_to_search_path(options.import_folder)
    with _output_apart() as output:
        for request_json in sys.stdin:
            answer = _answer(request_json, options.memory_bytes, options.cpu_seconds)
            os.write(output, answer.encode() + b"\n")
    return 0


def _answer(request_json: str, memory_bytes: int | None, cpu_seconds: int | None) -> str:
    """Return the card of a request as JSON, or an error as JSON."""
    try:
        return _card_json(request_json, memory_bytes, cpu_seconds)
    except _OutOfTimeError:
        return _error_json(f"counting the model took longer than {cpu_seconds:,} CPU seconds")
    except MemoryError:
        return _error_json(f"counting the model took more than {memory_bytes:,} bytes of memory")
    except BaseException as error:  # the model's code may raise anything, SystemExit included
        return _error_json(_sentence(error))


def _card_json(request_json: str, memory_bytes: int | None, cpu_seconds: int | None) -> str:
    """Return the card of a request as JSON."""
    from pydantic import ValidationError

    from vitscale.errors import RequestError
    from vitscale.models.tracing.tracer import trace
    from vitscale.trial.model_card import TraceRequest

    try:
        request = TraceRequest.model_validate_json(request_json)
    except ValidationError as error:
        raise RequestError(f"standard input is no request: {error.errors()[0]['msg']}") from error
    _bound_memory(memory_bytes)
    _bound_time(cpu_seconds)
    return trace(request).model_dump_json()


def _bound_memory(memory_bytes: int | None) -> None:
    """Let this process take so many bytes of address space beyond what it has."""
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
    """Raise `_OutOfTimeError` in this process after so many more CPU seconds."""
    if cpu_seconds is None:
        return
    signal.signal(signal.SIGXCPU, _raise_out_of_time)
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + cpu_seconds
    _, hard_limit = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, hard_limit))


def _raise_out_of_time(number: int, frame: object) -> NoReturn:
    del number, frame
    raise _OutOfTimeError


@contextlib.contextmanager
def _output_apart() -> Iterator[int]:
    """The context in which standard output goes to standard error; gives the descriptor of the real one."""
    sys.stdout.flush()
    output = os.dup(1)
    os.dup2(2, 1)
    try:
        yield output
    finally:
        sys.stdout.flush()
        os.close(output)


def _error_json(sentence: str) -> str:
    return json.dumps({"error": sentence})


def _sentence(error: BaseException) -> str:
    """Return an error in one line, with its type where it has none of vitscale's messages."""
    from vitscale.errors import VitscaleError

    message = " ".join(str(error).split())
    if isinstance(error, VitscaleError):
        return message
    return f"the model's code ended with {type(error).__name__}: {message[:300]}".rstrip(": ")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
