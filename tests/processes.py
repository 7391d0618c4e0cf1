"""Real processes for tests: waiting for what they do, never for a span of time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil

PATIENCE_SECONDS = 300.0
"""Longer than anything waited for takes on a busy machine; reached only where a test fails."""


def wait_until(condition: Callable[[], object], what: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Returns as soon as `condition` holds; fails when it does not within `seconds`."""
    end = time.monotonic() + seconds
    looked = time.thread_time()
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {seconds:g} s until {what}"
        # Who looks at every process of the machine leaves the cores to what is waited for, also where several look.
        time.sleep(min(0.5, max(0.01, 29 * (time.thread_time() - looked))))
        looked = time.thread_time()


def pid_in(path: Path) -> int:
    """The process id that another process writes to `path`, whole."""
    wait_until(lambda: path.exists() and path.read_text().endswith("\n"), f"{path.name} is written")
    return int(path.read_text())


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
