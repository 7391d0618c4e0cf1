"""Watches one run: passes its progress on and ends it when it hangs or runs over its time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from vitscale.runner.classify import Ending, Stop, kernel_oom_kills
from vitscale.schedulers.local import LocalJob

_LOOK_SECONDS = 0.1


class StepCounter:
    """Counts the steps that rank 0 has recorded, reading only what is new, and notices a sign of life of any rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps = 0
        self._offset = 0
        self._seen: dict[str, tuple[int, int]] = {}

    def look(self) -> bool:
        """True where any rank has written, or touched its record (`RankLog.alive`), since the last look."""
        states = {path.name: path.stat() for path in self.folder.glob("rank-*.jsonl")}
        seen = {name: (state.st_size, state.st_mtime_ns) for name, state in states.items()}
        alive = seen != self._seen
        self._seen = seen
        if alive and "rank-0.jsonl" in seen:
            with (self.folder / "rank-0.jsonl").open("rb") as file:
                file.seek(self._offset)
                new = file.read()
            whole = new.rfind(b"\n") + 1
            self._offset += whole
            self.steps += new[:whole].count(b'"kind":"step"')
        return alive


def watch(
    job: LocalJob,
    folder: Path,
    *,
    hang_seconds: float,
    timeout_seconds: float | None,
    on_steps: Callable[[int], None],
) -> Ending:
    """Waits until `job` has ended, or ends it.

    A job hangs when no rank has recorded anything for `hang_seconds`. In every case no process of the job is left when
    this returns, and also when it is left by an exception (Ctrl-C).
    """
    oom_before = kernel_oom_kills()
    counter = StepCounter(folder)
    last_sign = time.monotonic()
    stopped: Stop | None = None
    limit: float | None = None
    try:
        while job.wait(_LOOK_SECONDS) is None:
            now = time.monotonic()
            if counter.look():
                last_sign = now
                on_steps(counter.steps)
            if now - last_sign > hang_seconds:
                stopped, limit = "hang", hang_seconds
                break
            if timeout_seconds is not None and job.wall_seconds > timeout_seconds:
                stopped, limit = "timeout", timeout_seconds
                break
        exit_code = job.exit_code
        wall_seconds = job.wall_seconds
    finally:
        job.end()
    return Ending(
        exit_code=exit_code,
        stopped=stopped,
        limit_seconds=limit,
        kernel_oom_kills=kernel_oom_kills() - oom_before,
        started_unix_seconds=job.started_unix_seconds,
        wall_seconds=wall_seconds,
    )
