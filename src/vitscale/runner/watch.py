"""Watches one run: passes its progress on and ends it when it hangs, loses a rank or runs over its time.

Also finds out, for a run that hangs, where its ranks stand and which of them the others wait for.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from vitscale.processes.heartbeat import BEAT_SECONDS, COMPILING, STARTING
from vitscale.processes.heartbeat_server import RankStatus
from vitscale.runner.evidence import Ending, Stop, last_words, log_tail
from vitscale.schedulers import Job

_PHASES = ("start-up", "data", "h2d", "script", "forward", "backward", "bubble", "optimizer")
"""Phases in the order in which a step goes through them."""
_STARVED_BEATS = 5
"""Heartbeats that a rank has missed from which on it counts as starved."""
_COMPILER_SECONDS = 1800.0
"""Shortest limit of silence while anything is compiled."""


def is_stopped(pid: int, host: str) -> bool:
    """Whether a process of this host is stopped (SIGSTOP, a debugger)."""
    if host != socket.gethostname():
        return False
    import psutil  # here: a plan starts no processes, and need not wait for this import

    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False


def ranks_waited_for(statuses: Mapping[int, RankStatus]) -> list[int]:
    """Return the ranks that are furthest behind; empty where all ranks are in the same phase of the same step.

    Ranks train in step, so those ahead wait for those behind; a rank that has left waits for none.
    """
    progress_by_rank = {rank: _progress(status) for rank, status in statuses.items() if status.ended_seconds is None}
    if not progress_by_rank:
        return []
    furthest_behind = min(progress_by_rank.values())
    behind = sorted(rank for rank, progress in progress_by_rank.items() if progress == furthest_behind)
    return behind if len(behind) < len(statuses) else []


def starved_ranks(statuses: Mapping[int, RankStatus], now_seconds: float) -> list[int]:
    """Return the ranks that have long been silent without having ended; empty where all ranks are silent.

    Such a rank is stopped, or gets no time of its host. Where all are silent, the driver itself may not have listened.

    `now_seconds`: on the clock of `RankStatus.heard_seconds`.
    """
    limit_seconds = _STARVED_BEATS * BEAT_SECONDS
    silent = sorted(
        rank
        for rank, status in statuses.items()
        if status.ended_seconds is None and now_seconds - status.heard_seconds > limit_seconds
    )
    return silent if len(silent) < len(statuses) else []


def position_in_words(status: RankStatus) -> str:
    """Return the phase and step that a rank is known to be in: "forward of step 4"; before step 0 the phase alone."""
    return status.phase if status.step < 0 else f"{status.phase} of step {status.step}"


def silence_limit_seconds(statuses: Mapping[int, RankStatus], hang_seconds: float) -> float:
    """Return the seconds without a sign of any rank after which a run hangs.

    The limit is longer while something is compiled, for a compiler says nothing for minutes. It stays finite, for ranks
    wait for a killed compiler too.
    """
    live_phases = [status.phase for status in statuses.values() if status.ended_seconds is None]
    is_compiling = any(phase.startswith(COMPILING) for phase in live_phases)
    return longest_silence_seconds(hang_seconds) if is_compiling else hang_seconds


def longest_silence_seconds(hang_seconds: float) -> float:
    """Return the longest time without a sign of any rank that a run may have, whatever its ranks do."""
    return max(hang_seconds, _COMPILER_SECONDS)


def start_up_phase(statuses: Mapping[int, RankStatus]) -> str:
    """Return the phase of start-up that ranks are in, such as "engine"; empty where none is before its first step.

    While any rank compiles it is "compiling fused_adam".
    """
    phases = [status.phase for _, status in sorted(statuses.items()) if status.step <= 0]
    compiling = [phase for phase in phases if phase.startswith(COMPILING)]
    starting = [phase.removeprefix(STARTING) for phase in phases if phase.startswith(STARTING)]
    if compiling:
        return compiling[0]
    return starting[0] if starting else ""


class _Progress(NamedTuple):
    """A rank's progress, ordered: a larger one is further ahead."""

    step: int
    phase: int
    """Position in `_PHASES`; 0 for any other phase."""


def _progress(status: RankStatus) -> _Progress:
    """Return how far a rank has come."""
    phase = _PHASES.index(status.phase) if status.phase in _PHASES else 0
    return _Progress(status.step, phase)


_POLL_SECONDS = 0.1
"""Time from one look at a run to the next."""
_STACK_SECONDS = 1.0
"""Time that the ranks of a run that hangs have to write down their stacks."""
LOST_SECONDS = 10.0
"""Seconds that a launcher has to notice by itself that a rank is gone, and to say how."""


class StepCounter:
    """Counts the steps that rank 0 has recorded, reading only what is new, and notices signs of life of any rank."""

    def __init__(self, folder: Path, *, prints: bool = False) -> None:
        """`prints`: whether ranks' output is a sign of life too, as for a script, which may record nothing for long."""
        self.folder = folder
        self.steps = 0
        self._patterns = ("rank-*.jsonl", "log.txt") if prints else ("rank-*.jsonl",)
        """Patterns of files whose change is a sign of life."""
        self._offset = 0
        """Bytes of rank 0's record that have been read, all of them whole lines."""
        self._file_states: dict[str, _FileState] = {}
        """Name of a watched file -> its state at the last call of `update`."""

    def update(self) -> bool:
        """Count the steps that are new, and return whether any rank has given a sign of life since the last call.

        A rank gives one when it writes, or touches its record (`RankLog.alive`).
        """
        file_states = {}
        for pattern in self._patterns:
            for path in self.folder.glob(pattern):
                state = path.stat()
                file_states[path.name] = _FileState(state.st_size, state.st_mtime_ns)
        has_changed = file_states != self._file_states
        self._file_states = file_states
        if has_changed and "rank-0.jsonl" in file_states:
            self._count_new_steps()
        return has_changed

    def _count_new_steps(self) -> None:
        """Read what rank 0 has recorded since the last time, as far as its lines are whole."""
        with (self.folder / "rank-0.jsonl").open("rb") as file:
            file.seek(self._offset)
            new_bytes = file.read()
        whole_lines = new_bytes[: new_bytes.rfind(b"\n") + 1]
        self._offset += len(whole_lines)
        self.steps += whole_lines.count(b'"kind":"step"')


class _FileState(NamedTuple):
    """A file's size and time of change, one of which differs after any write."""

    size: int
    mtime_ns: int


class _ReachedLimit(NamedTuple):
    """A limit that a run has reached, so that it has to be ended."""

    stop: Stop
    """Which limit: "hang" (silence), "timeout" (the whole time) or "lost" (since a rank was lost)."""
    seconds: float


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
    """Wait for the end of a run, and end it where it must be ended; returns how it ended.

    The run is ended from here when it exceeds `timeout_seconds`, when no rank records or says anything new for
    `hang_seconds` (longer while an extension is compiled), and when a rank is lost and its launcher does not end the
    others within `LOST_SECONDS`. When this returns, or raises (Ctrl-C), no process of the job is left on any host that
    can be reached.

    Args:
        job: the run's processes.
        folder: the run's folder.
        hang_seconds: longest silence of all ranks.
        timeout_seconds: longest time of the run; None: any.
        on_progress: called with the steps that rank 0 has recorded and the phase of start-up, when either may have
            changed.
        prints: whether ranks' output is a sign of life, as of `StepCounter`.
        interrupted: ends the run when it is set.

    Raises:
        KeyboardInterrupt: `interrupted` is set, which passes on Ctrl-C: only a process's first thread gets that.
    """
    oom_kills_before = kernel_oom_kills()
    limits = _Limits(hang_seconds=hang_seconds, timeout_seconds=timeout_seconds)
    try:
        limit = _wait_for_end(job, _SignsOfLife(folder, prints=prints), limits, on_progress, interrupted)
        exit_code = job.exit_code
        wall_seconds = job.wall_seconds
        not_begun = job.not_begun
        log_words = last_words(log_tail(folder / "log.txt")) if not_begun else ""
        statuses = job.heartbeats.statuses()
        stopped_ranks = _stopped_ranks(statuses)
        seen_seconds = time.monotonic()
    finally:
        unreached = job.end()
    return Ending(
        exit_code=exit_code,
        stopped=limit.stop if limit is not None else None,
        limit_seconds=limit.seconds if limit is not None else None,
        kernel_oom_kills=kernel_oom_kills() - oom_kills_before,
        started_unix_seconds=job.started_unix_seconds,
        wall_seconds=wall_seconds,
        seen_seconds=seen_seconds,
        statuses=statuses,
        stopped_ranks=stopped_ranks,
        unreached=unreached,
        not_begun=not_begun,
        last_words=log_words,
    )


class _Limits(NamedTuple):
    """Limits of a run, from its study."""

    hang_seconds: float
    """Longest silence of all ranks."""
    timeout_seconds: float | None
    """Longest time of the run; None: any."""


class _SignsOfLife:
    """Signs of life of a run's ranks: files that change, and heartbeats with another step or phase.

    Heartbeats are needed beside files: a network file system may show what ranks record a minute late.
    """

    def __init__(self, folder: Path, *, prints: bool) -> None:
        self._counter = StepCounter(folder, prints=prints)
        self._positions: dict[int, tuple[int, str]] = {}
        """Rank -> the step and the phase of its last heartbeat."""
        self._last_sign_seconds = time.monotonic()

    @property
    def steps(self) -> int:
        """The steps that rank 0 has recorded."""
        return self._counter.steps

    def update(self, statuses: Mapping[int, RankStatus], now_seconds: float) -> bool:
        """Take note of the signs since the last call, and return whether there was any.

        Args:
            statuses: the last heartbeat of each rank.
            now_seconds: on the monotonic clock.
        """
        has_recorded = self._counter.update()
        positions = {rank: (status.step, status.phase) for rank, status in statuses.items()}
        if not has_recorded and positions == self._positions:
            return False
        self._positions = positions
        self._last_sign_seconds = now_seconds
        return True

    def silent_seconds(self, now_seconds: float) -> float:
        """Return how long all ranks have given no sign."""
        return now_seconds - self._last_sign_seconds


def _wait_for_end(
    job: Job,
    signs: _SignsOfLife,
    limits: _Limits,
    on_progress: Callable[[int, str], None],
    interrupted: threading.Event | None,
) -> _ReachedLimit | None:
    """Wait until a run ends by itself, or has to be ended. Arguments and errors as of `watch`.

    Returns:
        The limit for which it has to be ended; None where it has ended.
    """
    while job.wait(_POLL_SECONDS) is None:
        if interrupted is not None and interrupted.is_set():
            raise KeyboardInterrupt
        now_seconds = time.monotonic()
        statuses = job.heartbeats.statuses()
        has_new_sign = signs.update(statuses, now_seconds)
        if has_new_sign:
            on_progress(signs.steps, start_up_phase(statuses))
        silent_seconds = signs.silent_seconds(now_seconds)
        limit = _reached_limit(job, statuses, now_seconds, limits, silent_seconds=silent_seconds)
        if limit is not None:
            if limit.stop == "hang":
                _let_ranks_write_stacks(job)
            return limit
    return None


def _let_ranks_write_stacks(job: Job) -> None:
    """Ask all ranks to write down where they stand, for the outcome of a run that hangs, and give them time for it."""
    job.heartbeats.ask_for_stacks()
    time.sleep(_STACK_SECONDS)  # for all together: a rank that cannot answer does not delay the others


def _reached_limit(
    job: Job,
    statuses: Mapping[int, RankStatus],
    now_seconds: float,
    limits: _Limits,
    *,
    silent_seconds: float,
) -> _ReachedLimit | None:
    """Return the limit that a run has reached: since a rank was lost, of silence, or of its whole time; None for none.

    Args:
        job: the run's processes.
        statuses: the last heartbeat of each rank.
        now_seconds: on the clock of `statuses`.
        limits: the limits of silence and of the whole time.
        silent_seconds: how long all ranks have been silent.
    """
    first_loss_seconds = _first_loss_seconds(statuses, default=now_seconds)
    if now_seconds - first_loss_seconds > LOST_SECONDS:
        return _ReachedLimit("lost", LOST_SECONDS)
    silence_limit = silence_limit_seconds(statuses, limits.hang_seconds)
    if silent_seconds > silence_limit:
        return _ReachedLimit("hang", silence_limit)
    if limits.timeout_seconds is not None and job.wall_seconds > limits.timeout_seconds:
        return _ReachedLimit("timeout", limits.timeout_seconds)
    return None


def _first_loss_seconds(statuses: Mapping[int, RankStatus], *, default: float) -> float:
    """Return when the first of the lost ranks was lost, on the monotonic clock; `default` where none is lost.

    A rank is lost when its heartbeat breaks off before it has ended.
    """
    loss_times = [status.ended_seconds for status in statuses.values() if status.disconnection]
    return min((seconds for seconds in loss_times if seconds), default=default)


def _stopped_ranks(statuses: Mapping[int, RankStatus]) -> frozenset[int]:
    """Return the ranks on this host whose processes are stopped (SIGSTOP, a debugger)."""
    live = {rank: status for rank, status in statuses.items() if status.ended_seconds is None}
    return frozenset(rank for rank, status in live.items() if is_stopped(status.pid, status.host))


def kernel_oom_kills(vmstat: Path = Path("/proc/vmstat")) -> int:
    """Return how many processes the OOM killer has ended since boot, also in cgroups (`oom_kill` in /proc/vmstat)."""
    try:
        for line in vmstat.read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return 0
