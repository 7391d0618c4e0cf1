"""How a run ended: its one outcome, with the true reason."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vitscale.errors import printable
from vitscale.processes.heartbeat_server import RankStatus
from vitscale.runner import launcher_reports
from vitscale.runner.hang import position, starved, waited_for
from vitscale.runner.launcher_reports import Reports
from vitscale.store.records import ErrorLine, RankRecord
from vitscale.store.results import Outcome, OutcomeKind

_LOG_TAIL_BYTES = 64_000
_DETAIL_CHARACTERS = 16_000
# How the end of a rank begins; an exception, SIGTERM and SIGABRT may also follow from the end of another.
_FIRST_CAUSES = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})
# What a rank raises because another is gone: gloo's and NCCL's words for a connection that ended.
_LOST_PEER = re.compile(
    r"gloo/transport|connection (closed|reset|refused)|broken pipe|ncclRemoteError|remote process exited", re.IGNORECASE
)
# What may be gone when a run is tried again: the words of the kernel for it, in whichever library's message.
_PASSING = re.compile(
    r"address already in use|EADDRINUSE|no route to host|host is unreachable|name resolution|connection timed out"
    # Of srun, while Slurm's controller is restarted.
    r"|unable to contact slurm controller|unable to create step|socket timed out on send/recv",
    re.IGNORECASE,
)
_NOT_SHARED = re.compile(r"\S{1,400} is not seen on this host: is the results folder shared by all hosts\?")
"""What ranks and host agents say (`vitscale.worker`, `vitscale.processes.host_agent`)."""
# What a host agent or a rank says that cannot begin: it cannot reach the driver, does not see the folder.
_OWN_WORDS = re.compile(r"^vitscale: ([^\n]{1,300})", re.MULTILINE)
_FULL_BYTES = 64 * 1024
_AT_ONCE_SECONDS = 1.0
"""What a launcher ends because one rank has failed is gone within a fraction of this."""

Stop = Literal["hang", "timeout", "lost"]


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
    seen_seconds: float = 0.0
    """`time.monotonic()` when it ended; what `signs` are to be read against."""
    statuses: Mapping[int, RankStatus] = field(default_factory=dict)
    """What was last heard of each rank, before anything was ended from here."""
    stopped_ranks: frozenset[int] = frozenset()
    """Ranks that the kernel held stopped."""
    unreached: tuple[str, ...] = ()
    """Hosts that did not answer when they were asked to end what was left."""


@dataclass(frozen=True)
class _Verdict:
    kind: OutcomeKind
    reason: str
    rank: int | None = None
    detail: str = ""
    external: bool = False
    host: str | None = None
    transient: bool = False


def outcome_of(ending: Ending, ranks: Sequence[RankRecord], world_size: int, log: Path) -> Outcome:
    """The outcome of one run.

    A rank that was killed, or that left early, has said nothing, and what the others then record (a lost connection)
    follows from that: the heartbeats, the launcher's own report of exit codes and the kernel's OOM counter are asked
    first. Otherwise the exception that a rank recorded first is the cause.
    """
    missing = [rank for rank in range(world_size) if not any(r.rank == rank and r.ended for r in ranks)]
    raised = any(record.error is not None for record in ranks)
    if not missing and not raised and ending.exit_code == 0:
        verdict = _Verdict("completed", "")
    else:
        tail = log_tail(log)
        reports = launcher_reports.read(tail)
        verdict = (
            _host_gone(ending, ranks, tail)
            or _launcher_gone(ending, world_size, tail)
            or _lost_rank(ending, ranks, world_size, reports, tail)
            or _silent(ending, ranks, world_size, reports, tail)
            or _first_error(ranks, ending)
            # Before what it looks like from here: DeepSpeed's launcher waits for ever for a host that it cannot reach.
            or _unreached(reports, tail)
            or _stopped(ending, ranks, tail, log.parent)
            or _disk_full(log.parent, tail)
            or _from_outside(ending, ranks, missing, _codes(reports, ending.exit_code, world_size), tail)
        )
    guilty = ending.statuses.get(verdict.rank) if verdict.rank is not None else None
    return Outcome(
        kind=verdict.kind,
        # Messages come from anywhere; a reason is shown on terminals.
        reason=printable(verdict.reason).replace("\n", " "),
        detail=verdict.detail[-_DETAIL_CHARACTERS:],
        rank=verdict.rank,
        host=verdict.host or (guilty.host if guilty is not None else None),
        external=verdict.external,
        transient=verdict.transient,
        started_unix_seconds=ending.started_unix_seconds,
        wall_seconds=ending.wall_seconds,
    )


def _host_gone(ending: Ending, ranks: Sequence[RankRecord], tail: str) -> _Verdict | None:
    """A host that answered at the start and does not at the end, unless a rank had a cause of its own to record."""
    own_cause = any(record.error is not None and not _lost_peer(record.error) for record in ranks)
    if not ending.unreached or own_cause or ending.stopped == "timeout":
        return None
    host = ending.unreached[0]
    # Hosts call themselves by a short name, where a hostfile may have the long one.
    there = [
        rank for rank, status in sorted(ending.statuses.items()) if status.host.split(".")[0] == host.split(".")[0]
    ]
    return _silent_host(host, there, tail) if there else None


def _silent_host(host: str, there: Sequence[int], tail: str) -> _Verdict:
    which = ", ".join(map(str, there[:8]))
    reason = f"host {host} does not answer any more: it or its link is gone (rank {which})"
    return _Verdict("failed", reason, there[0], tail, host=host, transient=True)


def _launcher_gone(ending: Ending, world_size: int, tail: str) -> _Verdict | None:
    """Something has ended the launcher itself, and its ranks with it. Of one rank it may be the rank that ended so."""
    code = ending.exit_code
    if ending.stopped is not None or world_size == 1 or code is None or code >= 0:
        return None
    return _Verdict("failed", f"the launcher was ended by {_signal_name(-code)}", detail=tail)


def _lost_rank(
    ending: Ending, ranks: Sequence[RankRecord], world_size: int, reports: Reports, tail: str
) -> _Verdict | None:
    """The rank whose heartbeat broke off first without a word, before any other had a cause of its own to record."""
    if ending.stopped in ("hang", "timeout"):
        return None
    told = _told(ranks)
    lost = sorted(
        (status.ended_seconds or 0.0, rank)
        for rank, status in ending.statuses.items()
        if status.lost is not None and rank not in told
    )
    never_heard = any(code > 0 and rank not in ending.statuses for rank, code in reports.codes)
    if not lost or never_heard:
        return None
    codes = dict(reversed(_codes(reports, ending.exit_code, world_size)))
    when, rank = lost[0]
    # Of those that were heard of at once the one that no launcher has ended: a busy driver hears late, in any order.
    at_once = [rank for heard, rank in lost if heard - when < _AT_ONCE_SECONDS]
    rank = next((each for each in at_once if -codes.get(each, 0) in _FIRST_CAUSES), rank)
    code = codes.get(rank)
    late = 0.0 if -(code or 0) in _FIRST_CAUSES else _AT_ONCE_SECONDS
    for record in ranks:
        status = ending.statuses.get(record.rank)
        own_cause = record.error is not None and not _lost_peer(record.error)
        if (
            own_cause
            and status is not None
            and status.ended_seconds is not None
            and status.ended_seconds <= when + late
        ):
            return None
    status = ending.statuses[rank]
    if status.lost == "silent":
        there = [
            other for other, its in sorted(ending.statuses.items()) if (its.host, its.lost) == (status.host, "silent")
        ]
        return _silent_host(status.host, there, tail)
    if code is not None and code < 0:
        return _by_signal(rank, -code, ending, reports, tail)
    if code is None and not reports.whole:
        return _Verdict("failed", f"rank {rank} ended without a word before its work was done", rank, tail)
    reason = f"rank {rank} ended with exit code {code or 0} before its work was done"
    return _Verdict("failed", reason, rank, tail)


def _silent(
    ending: Ending, ranks: Sequence[RankRecord], world_size: int, reports: Reports, tail: str
) -> _Verdict | None:
    """A rank that ended without a word, by a signal that neither driver nor torchrun sent or by leaving early."""
    if ending.stopped in ("hang", "timeout") or reports.launcher_killed:
        return None
    told = _told(ranks)
    codes = _codes(reports, ending.exit_code, world_size)
    for rank, code in codes:
        if -code in _FIRST_CAUSES and rank not in told:
            return _by_signal(rank, -code, ending, reports, tail)
    if reports.whole:
        # torchrun lists every rank that failed and every one that it then ended: the others left by themselves.
        for rank in sorted(set(range(world_size)) - told - {rank for rank, _ in codes}):
            return _Verdict("failed", f"rank {rank} ended with exit code 0 before its work was done", rank, tail)
    return None


def _told(ranks: Sequence[RankRecord]) -> frozenset[int]:
    """The ranks that recorded why they ended."""
    return frozenset(record.rank for record in ranks if record.error is not None or record.ended)


def _by_signal(rank: int, number: int, ending: Ending, reports: Reports, tail: str) -> _Verdict:
    if number == signal.SIGKILL and (ending.kernel_oom_kills or reports.out_of_memory):
        return _Verdict("oom", f"rank {rank} was ended by the kernel: out of memory", rank, tail)
    return _Verdict("failed", f"rank {rank} was ended by {_signal_name(number)} without a word", rank, tail)


def _disk_full(folder: Path, tail: str) -> _Verdict | None:
    """A disk so full that not even the ranks' last words found room on it."""
    if shutil.disk_usage(folder).free > _FULL_BYTES:
        return None
    reason = "disk full: the run ended without a word, and there is no room for one; free space and run again"
    return _Verdict("failed", reason, detail=tail, external=True)


def _first_error(ranks: Sequence[RankRecord], ending: Ending) -> _Verdict | None:
    """The exception recorded first; a lost connection comes last, for it follows from another rank's end.

    First as the driver heard of it where it did: the clocks of hosts differ, and are set.
    """
    errors = [
        (record.error, record.rank)
        for record in ranks
        if record.error is not None and not _ended_from_here(ending, record.rank)
    ]
    if not errors:
        return None
    heard = {rank: status.ended_seconds for rank, status in ending.statuses.items() if status.ended_seconds is not None}
    by_driver = all(rank in heard for _, rank in errors)

    def order(pair: tuple[ErrorLine, int]) -> tuple[bool, float]:
        error, rank = pair
        return _lost_peer(error), heard[rank] if by_driver else error.unix_seconds

    error, rank = min(errors, key=order)
    kind: OutcomeKind = "oom" if error.out_of_memory else "failed"
    passing = _PASSING.search(error.message) is not None and not error.out_of_memory
    return _Verdict(kind, _sentence(error, rank), rank, error.traceback, error.disk_full, transient=passing)


def _ended_from_here(ending: Ending, rank: int) -> bool:
    """Whether a rank was still there when the driver ended the run: what it then raised follows from that."""
    status = ending.statuses.get(rank)
    return ending.stopped is not None and status is not None and status.ended_seconds is None


def _lost_peer(error: ErrorLine) -> bool:
    return _LOST_PEER.search(error.message) is not None


def _stopped(ending: Ending, ranks: Sequence[RankRecord], tail: str, folder: Path) -> _Verdict | None:
    if ending.stopped == "timeout":
        reason = f"not finished after {ending.limit_seconds:g} s (measure.timeout_seconds)"
        return _Verdict("timeout", reason, detail=tail)
    if ending.stopped != "hang":
        return None
    nothing = f"no rank recorded anything for {ending.limit_seconds:g} s"
    guilty = _guilty_of_a_hang(ending)
    if not guilty:
        last = "; ".join(f"rank {r.rank}: {_last_sign(r)}" for r in ranks[:8]) or "no rank had started"
        return _Verdict("hang", f"{nothing} ({last})", detail=_stack(folder, 0) or tail)
    rank = guilty[0]
    status = ending.statuses[rank]
    silent = ending.seen_seconds - status.heard_seconds
    which = f"rank {', '.join(map(str, guilty[:8]))}"
    if rank in ending.stopped_ranks:
        what = f"{which} is stopped (SIGSTOP), in {position(status)}"
    elif rank in starved(ending.statuses, ending.seen_seconds):
        what = f"{which} is stopped or starved: no sign of life for {silent:.0f} s, last seen in {position(status)}"
    else:
        what = f"{which} stands in {position(status)}"
    others = (
        f", and the others wait for {'it' if len(guilty) == 1 else 'them'}"
        if len(ending.statuses) > len(guilty)
        else ""
    )
    return _Verdict("hang", f"{nothing}: {what}{others}", rank, _stack(folder, rank) or tail)


def _guilty_of_a_hang(ending: Ending) -> list[int]:
    """Ranks that are stopped, else those that give no sign of life while others do, else those that are behind."""
    return sorted(ending.stopped_ranks) or starved(ending.statuses, ending.seen_seconds) or waited_for(ending.statuses)


def _stack(folder: Path, rank: int) -> str:
    """Where each thread of a rank stood, as it wrote down when the driver asked."""
    return log_tail(folder / f"stack-rank-{rank}.txt")


def _unreached(reports: Reports, tail: str) -> _Verdict | None:
    """A host on which nothing could be started."""
    if not reports.unreached:
        return None
    host, words = reports.unreached[0]
    return _Verdict("failed", f"host {host} could not be reached: {words}", detail=tail, host=host, transient=True)


def _from_outside(
    ending: Ending, ranks: Sequence[RankRecord], missing: list[int], codes: Sequence[tuple[int, int]], tail: str
) -> _Verdict:
    passing = _PASSING.search(tail) is not None
    said = _OWN_WORDS.search(tail)
    if codes:
        rank, code = codes[0]
        how = f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        why = f": {said[1]}" if said else " without a word"
        return _Verdict("failed", f"rank {rank} {how}{why}", rank, tail, transient=passing)
    launcher = f"the launcher ended with exit code {ending.exit_code}"
    if not ranks and (unseen := _NOT_SHARED.search(tail)) is not None:
        return _Verdict("failed", f"no rank started: {unseen[0]}", detail=tail)
    if not ranks:
        why = f": {said[1]}" if said else ""
        return _Verdict("failed", f"no rank started; {launcher}{why}", detail=tail, transient=passing)
    if not missing:
        return _Verdict("failed", f"all ranks finished, but {launcher}", detail=tail)
    which = ", ".join(str(rank) for rank in missing[:8])
    return _Verdict("failed", f"rank(s) {which} did not finish; {launcher}", missing[0], tail, transient=passing)


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


def _codes(reports: Reports, exit_code: int | None, world_size: int) -> list[tuple[int, int]]:
    """Ranks and exit codes as the launcher reports them; of a world of one without a report, that of the process."""
    if not reports.codes and world_size == 1 and exit_code:
        return [(0, exit_code)]
    return list(reports.codes)


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
