"""Ends the process at the agreed step: politely, without the program's own end.

The program's own end would write checkpoints, wait for other ranks, or abort in a library; `os._exit` does none of it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

_LINGER_SECONDS = 0.5
"""Time for the network to hand over what other ranks still wait for."""


def clean_up(end_workers: Callable[[], int]) -> list[str]:
    """End the loader's workers and other daemonic children, and wait for the GPU; what was ended.

    Args:
        end_workers: ends the workers of all loaders, and returns how many ran.
    """
    cleaned = []
    _wait_for_gpu()
    workers = end_workers()
    if workers:
        cleaned.append(f"{workers} loader workers")
    children = _daemonic_children()
    for child in children:
        child.terminate()
    for child in children:
        child.join(timeout=1.0)
    if children:
        cleaned.append(f"{len(children)} other child processes")
    return cleaned


def exit_now() -> NoReturn:
    """Flush what the program printed, and end the process with status 0."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # noqa: S112, a closed stream has nothing to flush
            continue
    time.sleep(_LINGER_SECONDS)
    os._exit(0)


def exit_reason() -> str:
    """Why the interpreter ends: "exit", or "exception: TypeName" after one that nobody caught."""
    exception = getattr(sys, "last_type", None)
    return "exit" if exception is None else f"exception: {exception.__name__}"


def _wait_for_gpu() -> None:
    """Wait until the GPU has done its part of the step, for other ranks wait for its messages."""
    torch = sys.modules["torch"]
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _daemonic_children() -> list[Any]:
    """Children that multiprocessing would end at the interpreter's end."""
    processes = sys.modules.get("multiprocessing.process")
    if processes is None:
        return []
    return [child for child in processes.active_children() if child.daemon]
