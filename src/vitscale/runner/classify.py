"""How a run ended: its one outcome, with the true reason."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vitscale.errors import printable
from vitscale.record import ErrorLine, Outcome, OutcomeKind, RankRecord

_LOG_TAIL_BYTES = 64_000
_DETAIL_CHARACTERS = 16_000
# Two lines of torchrun's report, as `ChildFailedError` words them (torch/distributed/elastic/multiprocessing/errors).
_TORCHRUN_FAILURE = re.compile(
    r"^ *rank +: (?P<rank>\d{1,6}) \(local_rank: \d+\)\n *exitcode +: (?P<code>-?\d{1,3}) \(pid: \d+\)", re.MULTILINE
)
# How the end of a rank begins; an exception, SIGTERM and SIGABRT may also follow from the end of another.
_FIRST_CAUSES = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})
# What a rank raises because another is gone: gloo's and NCCL's words for a connection that ended.
_LOST_PEER = re.compile(
    r"gloo/transport|connection (closed|reset|refused)|broken pipe|ncclRemoteError|remote process exited", re.IGNORECASE
)
_TORCHRUN_KILLED = "forcefully exiting via"
"""torchrun says so before it sends SIGKILL itself, to ranks that did not heed SIGTERM when another had failed."""
_TORCHRUN_REPORT = "\nFailures:\n"
"""Begins the list of failures: where it is there, the list is whole."""
_FULL_BYTES = 64 * 1024

Stop = Literal["hang", "timeout"]


@dataclass(frozen=True)
class Ending:
    """What the driver saw of a run from outside."""

    exit_code: int | None
    """Of the launcher; None where the driver had to end it."""
    stopped: Stop | None
    limit_seconds: float | None
    """The limit that was reached, where one was."""
    kernel_oom_kills: int
    """Processes the kernel's OOM killer ended on this host meanwhile."""
    started_unix_seconds: float
    wall_seconds: float


@dataclass(frozen=True)
class _Verdict:
    kind: OutcomeKind
    reason: str
    rank: int | None = None
    detail: str = ""
    external: bool = False


def outcome_of(ending: Ending, ranks: Sequence[RankRecord], world_size: int, log: Path) -> Outcome:
    """The outcome of one run.

    A rank that was killed, or that left early, has said nothing, and what the others then record (a lost connection)
    follows from that: the launcher's own report of exit codes and the kernel's OOM counter are asked first. Otherwise
    the exception that a rank recorded first is the cause.
    """
    missing = [rank for rank in range(world_size) if not any(r.rank == rank and r.ended for r in ranks)]
    raised = any(record.error is not None for record in ranks)
    if not missing and not raised and ending.exit_code == 0:
        verdict = _Verdict("completed", "")
    else:
        tail = log_tail(log)
        verdict = (
            _silent(ending, ranks, world_size, tail)
            or _first_error(ranks)
            or _stopped(ending, ranks, tail)
            or _disk_full(log.parent, tail)
            or _from_outside(ending, ranks, missing, world_size, tail)
        )
    return Outcome(
        kind=verdict.kind,
        # Messages come from anywhere; a reason is shown on terminals.
        reason=printable(verdict.reason).replace("\n", " "),
        detail=verdict.detail[-_DETAIL_CHARACTERS:],
        rank=verdict.rank,
        external=verdict.external,
        started_unix_seconds=ending.started_unix_seconds,
        wall_seconds=ending.wall_seconds,
    )


def _silent(ending: Ending, ranks: Sequence[RankRecord], world_size: int, tail: str) -> _Verdict | None:
    """A rank that ended without a word, by a signal that neither driver nor torchrun sent or by leaving early."""
    if ending.stopped is not None or _TORCHRUN_KILLED in tail:
        return None
    told = {record.rank for record in ranks if record.error is not None or record.ended}
    codes = _exit_codes(tail, ending.exit_code, world_size)
    for rank, code in codes:
        if -code in _FIRST_CAUSES and rank not in told:
            if code == -signal.SIGKILL and ending.kernel_oom_kills:
                return _Verdict("oom", f"rank {rank} was ended by the kernel: out of memory", rank, tail)
            return _Verdict("failed", f"rank {rank} was ended by {_signal_name(-code)} without a word", rank, tail)
    if _TORCHRUN_REPORT in tail:
        # torchrun lists every rank that failed and every one that it then ended: the others left by themselves.
        for rank in sorted(set(range(world_size)) - told - {rank for rank, _ in codes}):
            return _Verdict("failed", f"rank {rank} ended with exit code 0 before its work was done", rank, tail)
    return None


def _disk_full(folder: Path, tail: str) -> _Verdict | None:
    """A disk so full that not even the ranks' last words found room on it."""
    if shutil.disk_usage(folder).free > _FULL_BYTES:
        return None
    reason = "disk full: the run ended without a word, and there is no room for one; free space and run again"
    return _Verdict("failed", reason, detail=tail, external=True)


def _first_error(ranks: Sequence[RankRecord]) -> _Verdict | None:
    """The exception recorded first; a lost connection comes last, for it follows from another rank's end."""
    errors = [(record.error, record.rank) for record in ranks if record.error is not None]
    if not errors:
        return None
    error, rank = min(errors, key=lambda pair: (_lost_peer(pair[0]), pair[0].unix_seconds))
    kind: OutcomeKind = "oom" if error.out_of_memory else "failed"
    return _Verdict(kind, _sentence(error, rank), rank, error.traceback, error.disk_full)


def _lost_peer(error: ErrorLine) -> bool:
    return _LOST_PEER.search(error.message) is not None


def _stopped(ending: Ending, ranks: Sequence[RankRecord], tail: str) -> _Verdict | None:
    if ending.stopped == "hang":
        last = "; ".join(f"rank {r.rank}: {_last_sign(r)}" for r in ranks[:8]) or "no rank had started"
        return _Verdict("hang", f"no rank recorded anything for {ending.limit_seconds:g} s ({last})", detail=tail)
    if ending.stopped == "timeout":
        reason = f"not finished after {ending.limit_seconds:g} s (measure.timeout_seconds)"
        return _Verdict("timeout", reason, detail=tail)
    return None


def _from_outside(
    ending: Ending, ranks: Sequence[RankRecord], missing: list[int], world_size: int, tail: str
) -> _Verdict:
    if codes := _exit_codes(tail, ending.exit_code, world_size):
        rank, code = codes[0]
        how = f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        return _Verdict("failed", f"rank {rank} {how} without a word", rank, tail)
    launcher = f"the launcher ended with exit code {ending.exit_code}"
    if not ranks:
        return _Verdict("failed", f"no rank started; {launcher}", detail=tail)
    if not missing:
        return _Verdict("failed", f"all ranks finished, but {launcher}", detail=tail)
    which = ", ".join(str(rank) for rank in missing[:8])
    return _Verdict("failed", f"rank(s) {which} did not finish; {launcher}", missing[0], tail)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _sentence(error: ErrorLine, rank: int) -> str:
    if error.disk_full:
        return f"disk full: rank {rank} could not write its record; free space and run again"
    message = error.message.strip().splitlines()
    return f"rank {rank} raised {error.error_type}" + (f": {message[0][:300]}" if message else "")


def _last_sign(record: RankRecord) -> str:
    if record.steps:
        return f"last step {record.steps[-1].step}"
    return f"last start-up phase {record.phases[-1].name}" if record.phases else "nothing recorded"


def _exit_codes(log: str, exit_code: int | None, world_size: int) -> list[tuple[int, int]]:
    """Ranks and exit codes (negative: the signal) as torchrun reports them, what it takes for the cause first; of a
    world of one without a report, that of the process itself.
    """
    reports = [(int(m["rank"]), int(m["code"])) for m in _TORCHRUN_FAILURE.finditer(log)]
    if not reports and world_size == 1 and exit_code:
        return [(0, exit_code)]
    # torchrun lists the root cause last.
    return reports[::-1]


def log_tail(log: Path) -> str:
    """The last 64,000 bytes of what launcher and ranks printed."""
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _LOG_TAIL_BYTES))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def kernel_oom_kills(vmstat: Path = Path("/proc/vmstat")) -> int:
    """Processes the kernel's OOM killer has ended since boot, in memory cgroups too (`oom_kill` in /proc/vmstat)."""
    try:
        for line in vmstat.read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return 0
