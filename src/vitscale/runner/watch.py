"""Watches one run: passes its progress on and ends it when it hangs, loses a rank or runs over its time.

Also finds out, for a run that hangs, where its ranks stand and which of them the others wait for.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from vitscale.processes.heartbeat import BEAT_SECONDS, COMPILING, STARTING
from vitscale.processes.heartbeat_server import RankStatus
from vitscale.runner.evidence import Ending, Stop, last_words, log_tail
from vitscale.schedulers import Job

_PHASES = ("start-up", "data", "h2d", "script", "forward", "backward", "bubble", "optimizer")
"""Phases in the order in which a step goes through them."""
_STARVED_BEATS = 5
_COMPILER_SECONDS = 1800.0


def is_stopped(pid: int, host: str) -> bool:
    """Whether a process of this host is stopped (SIGSTOP, a debugger)."""
    if host != socket.gethostname():
        return False
    import psutil  # here: a plan starts no processes, and need not wait for this import

    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False


def waited_for(statuses: Mapping[int, RankStatus]) -> list[int]:
    """The ranks that are furthest behind; empty where all ranks stand at the same place.

    Ranks train in step, so those ahead wait for those behind; a rank that has left waits for none.
    """
    places = {rank: _progress(status) for rank, status in statuses.items() if status.ended_seconds is None}
    last = min(places.values(), default=(0, 0))
    behind = sorted(rank for rank, position_of in places.items() if position_of == last)
    return behind if len(behind) < len(statuses) else []


def starved(statuses: Mapping[int, RankStatus], now_seconds: float) -> list[int]:
    """The ranks that have long given no sign of life without having ended; empty where all ranks are silent."""
    silent = sorted(
        rank
        for rank, status in statuses.items()
        if status.ended_seconds is None and now_seconds - status.heard_seconds > _STARVED_BEATS * BEAT_SECONDS
    )
    return silent if len(silent) < len(statuses) else []


def position(status: RankStatus) -> str:
    """A rank's last known place in words: "forward of step 4"."""
    return status.phase if status.step < 0 else f"{status.phase} of step {status.step}"


def silence_limit(statuses: Mapping[int, RankStatus], hang_seconds: float) -> float:
    """Seconds without a sign of any rank after which a run hangs.

    The limit is longer while something is compiled, for a compiler says nothing for minutes. It stays finite, for ranks
    wait for a killed compiler too.
    """
    compiles = any(status.phase.startswith(COMPILING) for status in statuses.values() if status.ended_seconds is None)
    return max(hang_seconds, _COMPILER_SECONDS) if compiles else hang_seconds


def start_up_phase(statuses: Mapping[int, RankStatus]) -> str:
    """What ranks do before their first step, as "engine", or "compiling fused_adam" where any compiles; else empty."""
    phases = [status.phase for _, status in sorted(statuses.items()) if status.step <= 0]
    told = [phase for phase in phases if phase.startswith(COMPILING)]
    told += [phase.removeprefix(STARTING) for phase in phases if phase.startswith(STARTING)]
    return told[0] if told else ""


def _progress(status: RankStatus) -> tuple[int, int]:
    return status.step, _PHASES.index(status.phase) if status.phase in _PHASES else 0


_LOOK_SECONDS = 0.1
_STACK_SECONDS = 1.0
LOST_SECONDS = 10.0
"""Seconds that a launcher has to notice by itself that a rank is gone, and to say how."""


class StepCounter:
    """Counts the steps that rank 0 has recorded, reading only what is new, and notices signs of life of any rank."""

    def __init__(self, folder: Path, *, prints: bool = False) -> None:
        """`prints`: whether ranks' output is a sign of life too, as for a script, which may record nothing for long."""
        self.folder = folder
        self._signs = ("rank-*.jsonl", "log.txt") if prints else ("rank-*.jsonl",)
        self.steps = 0
        self._offset = 0
        self._seen: dict[str, tuple[int, int]] = {}

    def look(self) -> bool:
        """Whether any rank has written, or touched its record (`RankLog.alive`), since the last look."""
        states = {path.name: path.stat() for pattern in self._signs for path in self.folder.glob(pattern)}
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
    job: Job,
    folder: Path,
    *,
    hang_seconds: float,
    timeout_seconds: float | None,
    on_progress: Callable[[int, str], None] = lambda _steps, _phase: None,
    prints: bool = False,
    interrupted: threading.Event | None = None,
) -> Ending:
    """Waits for the end of a run.

    The run is ended from here when it exceeds `timeout_seconds`, when no rank records or says anything new for
    `hang_seconds` (longer while an extension is compiled), and when a rank is lost and its launcher does not end the
    others within `LOST_SECONDS`. When this returns, or raises (Ctrl-C), no process of the job is left on any host that
    can be reached.

    Raises:
        KeyboardInterrupt: `interrupted` is set, which passes on Ctrl-C: only a process's first thread gets that.
    """
    heartbeats = job.heartbeats
    oom_before = kernel_oom_kills()
    counter = StepCounter(folder, prints=prints)
    last_sign = time.monotonic()
    places: dict[int, tuple[int, str]] = {}
    stopped: Stop | None = None
    limit: float | None = None
    try:
        while job.wait(_LOOK_SECONDS) is None:
            if interrupted is not None and interrupted.is_set():
                raise KeyboardInterrupt
            now = time.monotonic()
            if changed := counter.look():
                last_sign = now
            statuses = heartbeats.statuses()
            # Heartbeats tell progress too: a network file system may show what ranks record a minute late.
            if (there := {rank: (status.step, status.phase) for rank, status in statuses.items()}) != places:
                places, last_sign, changed = there, now, True
            if changed:
                on_progress(counter.steps, start_up_phase(statuses))
            lost = min(
                (status.ended_seconds for status in statuses.values() if status.disconnection and status.ended_seconds),
                default=now,
            )
            if now - lost > LOST_SECONDS:
                stopped, limit = "lost", LOST_SECONDS
                break
            if now - last_sign > (silence := silence_limit(statuses, hang_seconds)):
                stopped, limit = "hang", silence
                heartbeats.ask_for_stacks()
                time.sleep(_STACK_SECONDS)  # for all together: a rank that cannot answer does not delay the others
                break
            if timeout_seconds is not None and job.wall_seconds > timeout_seconds:
                stopped, limit = "timeout", timeout_seconds
                break
        exit_code = job.exit_code
        wall_seconds = job.wall_seconds
        not_begun = job.not_begun
        words = last_words(log_tail(folder / "log.txt")) if not_begun else ""
        statuses = heartbeats.statuses()
        stopped_ranks = frozenset(
            rank
            for rank, status in statuses.items()
            if status.ended_seconds is None and is_stopped(status.pid, status.host)
        )
        seen_seconds = time.monotonic()
    finally:
        unreached = job.end()
    return Ending(
        exit_code=exit_code,
        stopped=stopped,
        limit_seconds=limit,
        kernel_oom_kills=kernel_oom_kills() - oom_before,
        started_unix_seconds=job.started_unix_seconds,
        wall_seconds=wall_seconds,
        seen_seconds=seen_seconds,
        statuses=statuses,
        stopped_ranks=stopped_ranks,
        unreached=unreached,
        not_begun=not_begun,
        last_words=words,
    )


def kernel_oom_kills(vmstat: Path = Path("/proc/vmstat")) -> int:
    """Number of processes that the OOM killer has ended since boot, also in cgroups (`oom_kill` in /proc/vmstat)."""
    try:
        for line in vmstat.read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return 0
