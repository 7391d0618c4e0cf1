"""Where the ranks of a run that hangs stand: which of them the others wait for."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import psutil

from vitscale.processes.heartbeat import BEAT_SECONDS, COMPILING, STARTING
from vitscale.processes.heartbeat_server import RankStatus

_PHASES = ("start-up", "data", "h2d", "forward", "backward", "optimizer")
"""In the order in which a step goes through them."""
_STARVED_BEATS = 5
_COMPILER_SECONDS = 1800.0


def is_stopped(pid: int, host: str) -> bool:
    """Whether a process of this host is stopped (SIGSTOP, a debugger)."""
    if host != socket.gethostname():
        return False
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False


def waited_for(statuses: Mapping[int, RankStatus]) -> list[int]:
    """The ranks that are behind: at an earlier place of the run than the furthest one. None where all stand alike.

    Ranks train in step, so those that are ahead wait for those that are behind; one that has left waits for nobody.
    """
    places = {rank: _progress(status) for rank, status in statuses.items() if status.ended_seconds is None}
    last = min(places.values(), default=(0, 0))
    behind = sorted(rank for rank, place in places.items() if place == last)
    return behind if len(behind) < len(statuses) else []


def starved(statuses: Mapping[int, RankStatus], now_seconds: float) -> list[int]:
    """The ranks that have given no sign of life for long, though they have not ended; none where that is so of all."""
    silent = sorted(
        rank
        for rank, status in statuses.items()
        if status.ended_seconds is None and now_seconds - status.heard_seconds > _STARVED_BEATS * BEAT_SECONDS
    )
    return silent if len(silent) < len(statuses) else []


def position(status: RankStatus) -> str:
    """In words, as last heard: "forward of step 4"."""
    return status.phase if status.step < 0 else f"{status.phase} of step {status.step}"


def silence_limit(statuses: Mapping[int, RankStatus], hang_seconds: float) -> float:
    """Seconds without a sign of any rank after which a run hangs.

    More while something is compiled, for a compiler says nothing for minutes; and not for ever, for ranks wait for
    a compiler that was killed as for one that works.
    """
    compiles = any(status.phase.startswith(COMPILING) for status in statuses.values() if status.ended_seconds is None)
    return max(hang_seconds, _COMPILER_SECONDS) if compiles else hang_seconds


def start_up_phase(statuses: Mapping[int, RankStatus]) -> str:
    """What ranks do up to their first step: "engine", or "compiling fused_adam" where any of them does; else empty."""
    phases = [status.phase for _, status in sorted(statuses.items()) if status.step <= 0]
    told = [phase for phase in phases if phase.startswith(COMPILING)]
    told += [phase.removeprefix(STARTING) for phase in phases if phase.startswith(STARTING)]
    return told[0] if told else ""


def _progress(status: RankStatus) -> tuple[int, int]:
    return status.step, _PHASES.index(status.phase) if status.phase in _PHASES else 0
