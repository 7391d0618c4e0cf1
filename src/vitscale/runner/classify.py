"""How a run ended: its single outcome, with the true reason."""

from __future__ import annotations

import errno
import re
import signal
from collections.abc import Callable, Sequence

from vitscale.errors import printable
from vitscale.runner.evidence import SSH_FAILED, RunEvidence, RunVerdict, last_words, log_tail, lost_peer, own_cause
from vitscale.runner.watch import position, starved, waited_for
from vitscale.store import is_full
from vitscale.store.records import ErrorLine
from vitscale.store.results import Outcome

_DETAIL_CHARACTERS = 16_000
# Signals that begin a failure; an exception, SIGTERM and SIGABRT may also follow from another rank's end.
_FIRST_CAUSES = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})
# Failures that may have passed when a run is tried again, in the kernel's words, whichever library quotes them.
_PASSING = re.compile(
    r"address already in use|EADDRINUSE|no route to host|host is unreachable|name resolution|connection timed out"
    # What srun says while Slurm's controller is restarted.
    r"|unable to contact slurm controller|unable to create step|socket timed out on send/recv",
    re.IGNORECASE,
)
_NOT_SHARED = re.compile(r"\S{1,400} is not seen on this host: is the results folder shared by all hosts\?")
"""What ranks and host agents say (`vitscale.worker`, `vitscale.processes.host_agent`)."""
# What a host agent or a rank that cannot begin says: it cannot reach the driver, or does not see the folder.
_OWN_WORDS = re.compile(r"^vitscale: ([^\n]{1,300})", re.MULTILINE)
# What a rank raises where a process that loads its images is gone (torch: dataloader.py and DataLoader.cpp).
_LOADER_GONE = re.compile(
    r"DataLoader worker \(pid(?: \d+\) is killed by signal: Killed|\(s\) [\d, ]+\) exited unexpectedly)"
)
# What mpirun says below the words of ssh or of the shell there, which may name no host (Open MPI 4 and 5).
_NO_DAEMON = re.compile(r"^(?:ORTE|PRTE) was unable to reliably start one or more daemons", re.MULTILINE)
# Slurm 22.05 refuses a job's every further step like this once its controller was restarted.
_NO_STEP = re.compile(
    r"^srun: error: (Unable to create step [^\n]{0,80}: Memory required by task is not available)", re.M
)
_AT_ONCE_SECONDS = 1.0
"""Ranks that a launcher ends because another has failed are gone within a fraction of this time."""


def outcome_of(evidence: RunEvidence) -> Outcome:
    """The outcome of one run: the verdict of the first of `JUDGES` that can tell.

    A rank that was killed, or that left early, has recorded nothing, and what the others then record (a lost
    connection) only follows from that. So heartbeats, the launcher's report of exit codes and the kernel's OOM counter
    are asked first. Otherwise the exception that a rank recorded first is the cause.
    """
    ending = evidence.ending
    verdict = RunVerdict("completed", "")
    if not evidence.completed:
        verdict = next(said for judge in JUDGES if (said := judge(evidence)) is not None)
    groups = evidence.layout.groups_in_words(verdict.rank) if evidence.layout and verdict.rank is not None else ""
    guilty = ending.statuses.get(verdict.rank) if verdict.rank is not None else None
    return Outcome(
        kind=verdict.kind,
        # Messages come from anywhere; a reason is shown on terminals.
        reason=printable(verdict.reason).replace("\n", " ") + (f" (rank {verdict.rank} of {groups})" if groups else ""),
        detail=verdict.detail[-_DETAIL_CHARACTERS:],
        rank=verdict.rank,
        host=verdict.host or (guilty.host if guilty is not None else None),
        external=verdict.external,
        transient=verdict.transient,
        started_unix_seconds=ending.started_unix_seconds,
        wall_seconds=ending.wall_seconds,
    )


def _host_gone(evidence: RunEvidence) -> RunVerdict | None:
    """A host that answered at the start and not at the end, unless a rank recorded a cause of its own."""
    ending = evidence.ending
    if not ending.unreached or any(map(own_cause, evidence.ranks)) or ending.stopped == "timeout":
        return None
    host = ending.unreached[0]
    # Hosts call themselves by a short name; a hostfile may have the long one.
    there = [rank for rank, its in sorted(ending.statuses.items()) if its.host.split(".")[0] == host.split(".")[0]]
    return _silent_host(host, there, evidence) if there else None


def _silent_host(host: str, there: Sequence[int], evidence: RunEvidence) -> RunVerdict:
    which = ", ".join(map(str, there[:8]))
    reason = f"host {host} does not answer any more: it or its link is gone (rank {which})"
    return RunVerdict("failed", reason, there[0], evidence.tail, host=host, transient=True)


def _launcher_gone(evidence: RunEvidence) -> RunVerdict | None:
    """A launcher that a signal ended, and its ranks with it; not told of one rank, which may have ended that way."""
    code = evidence.ending.exit_code
    if evidence.ending.stopped is not None or evidence.world_size == 1 or code is None or code >= 0:
        return None
    return RunVerdict("failed", f"the launcher was ended by {_signal_name(-code)}", detail=evidence.tail)


def _lost_rank(evidence: RunEvidence) -> RunVerdict | None:
    """The rank whose heartbeat first broke off without a word, before any other rank recorded a cause of its own."""
    statuses = evidence.ending.statuses
    if evidence.ending.stopped in ("hang", "timeout"):
        return None
    lost = sorted(
        (status.ended_seconds or 0.0, rank)
        for rank, status in statuses.items()
        if status.disconnection is not None and rank not in evidence.ranks_with_an_end
    )
    never_heard = any(code > 0 and rank not in statuses for rank, code in evidence.reports.codes)
    if not lost or never_heard:
        return None
    codes = dict(reversed(evidence.codes))
    when, rank = lost[0]
    # Among ranks lost at about the same time, the one that no launcher ended: a busy driver hears late, in any order.
    at_once = [rank for heard, rank in lost if heard - when < _AT_ONCE_SECONDS]
    rank = next((each for each in at_once if -codes.get(each, 0) in _FIRST_CAUSES), rank)
    code = codes.get(rank)
    late = 0.0 if -(code or 0) in _FIRST_CAUSES else _AT_ONCE_SECONDS
    for record in filter(own_cause, evidence.ranks):
        its = statuses.get(record.rank)
        if its is not None and its.ended_seconds is not None and its.ended_seconds <= when + late:
            return None
    status = statuses[rank]
    if status.disconnection == "silent":
        there = [
            other for other, its in sorted(statuses.items()) if (its.host, its.disconnection) == (status.host, "silent")
        ]
        return _silent_host(status.host, there, evidence)
    if code is not None and code < 0:
        return _by_signal(rank, -code, evidence)
    if code is None and not evidence.reports.lists_all_failures:
        return RunVerdict("failed", f"rank {rank} ended without a word before its work was done", rank, evidence.tail)
    reason = f"rank {rank} ended with exit code {code or 0} before its work was done"
    return RunVerdict("failed", reason, rank, evidence.tail)


def _silent_rank(evidence: RunEvidence) -> RunVerdict | None:
    """A rank that ended without a word: by a signal that neither driver nor torchrun sent, or by leaving early."""
    if evidence.ending.stopped in ("hang", "timeout") or evidence.reports.launcher_killed:
        return None
    for rank, code in evidence.codes:
        if -code in _FIRST_CAUSES and rank not in evidence.ranks_with_an_end:
            return _by_signal(rank, -code, evidence)
    if evidence.reports.lists_all_failures:
        # torchrun lists every rank that failed or that it then ended: the others left by themselves.
        for rank in sorted(
            set(range(evidence.world_size)) - evidence.ranks_with_an_end - {rank for rank, _ in evidence.codes}
        ):
            reason = f"rank {rank} ended with exit code 0 before its work was done"
            return RunVerdict("failed", reason, rank, evidence.tail)
    return None


def _kernel_out_of_memory(evidence: RunEvidence) -> bool:
    return evidence.ending.kernel_oom_kills > 0 or evidence.reports.out_of_memory


def _by_signal(rank: int, number: int, evidence: RunEvidence) -> RunVerdict:
    if number == signal.SIGKILL and _kernel_out_of_memory(evidence):
        return RunVerdict("oom", f"rank {rank} was ended by the kernel: out of memory", rank, evidence.tail)
    return RunVerdict("failed", f"rank {rank} was ended by {_signal_name(number)} without a word", rank, evidence.tail)


def _first_error(evidence: RunEvidence) -> RunVerdict | None:
    """The exception recorded first; lost connections come last, for they follow from another rank's end.

    They are ordered by when the driver heard of the ranks' ends, where it did: hosts' clocks differ, and may be set.
    """
    statuses = evidence.ending.statuses
    errors = [
        (record.error, record.rank)
        for record in evidence.ranks
        if record.error is not None and not _ended_from_here(evidence, record.rank)
    ]
    if not errors:
        return None
    heard = {rank: status.ended_seconds for rank, status in statuses.items() if status.ended_seconds is not None}
    by_driver = all(rank in heard for _, rank in errors)

    def order(pair: tuple[ErrorLine, int]) -> tuple[bool, float]:
        error, rank = pair
        return lost_peer(error), heard[rank] if by_driver else error.unix_seconds

    error, rank = min(errors, key=order)
    if _LOADER_GONE.search(error.message) is not None and _kernel_out_of_memory(evidence):
        reason = f"a process that loads images for rank {rank} was ended by the kernel: out of memory"
        return RunVerdict("oom", reason, rank, error.traceback)
    passing = _PASSING.search(error.message) is not None and not error.out_of_memory
    return RunVerdict(
        "oom" if error.out_of_memory else "failed",
        _sentence(error, rank),
        rank,
        error.traceback,
        error.disk_full,
        transient=passing,
    )


def _ended_from_here(evidence: RunEvidence, rank: int) -> bool:
    """Whether a rank was alive when the driver ended the run: what it then raised follows from that."""
    status = evidence.ending.statuses.get(rank)
    return evidence.ending.stopped is not None and status is not None and status.ended_seconds is None


def _unreached(evidence: RunEvidence) -> RunVerdict | None:
    """A host on which nothing could be started."""
    ending = evidence.ending
    if not evidence.reports.unreached and ending.not_begun and not ending.statuses and not evidence.ranks:
        host, code = ending.not_begun[0]
        what = f"host {host} could not be reached" if code == SSH_FAILED else f"nothing could be started on host {host}"
        words = ending.last_words or f"exit code {code}"
        passing = _PASSING.search(evidence.tail) is not None
        return RunVerdict("failed", f"{what}: {words[:300]}", detail=evidence.tail, host=host, transient=passing)
    if not evidence.reports.unreached and (said := _NO_DAEMON.search(evidence.tail)) is not None and not evidence.ranks:
        away = evidence.elsewhere
        words = last_words(evidence.tail[: said.start()].rstrip("-\n")) or "mpirun does not say why"
        named = f"{', '.join(away[:8])}{f' and {len(away) - 8} more' if len(away) > 8 else ''}"
        where = f"host {named}" if len(away) == 1 else f"one or more of the hosts {named}".rstrip()
        return RunVerdict(
            "failed",
            f"nothing could be started on {where}: {words[:300]}",
            detail=evidence.tail,
            host=away[0] if len(away) == 1 else None,
            transient=_PASSING.search(evidence.tail) is not None,
        )
    if not evidence.reports.unreached:
        return None
    host, words = evidence.reports.unreached[0]
    reason = f"host {host} could not be reached: {words}"
    return RunVerdict("failed", reason, detail=evidence.tail, host=host, transient=True)


def _stopped(evidence: RunEvidence) -> RunVerdict | None:
    """A run that the driver ended because its time was over or it hung."""
    ending = evidence.ending
    if ending.stopped == "timeout":
        reason = f"not finished after {ending.limit_seconds:g} s (measure.timeout_seconds)"
        return RunVerdict("timeout", reason, detail=evidence.tail)
    if ending.stopped != "hang":
        return None
    nothing = f"no rank recorded anything for {ending.limit_seconds:g} s"
    # Ranks that are stopped; else those that alone give no sign of life; else those that are behind.
    silent = starved(ending.statuses, ending.seen_seconds)
    guilty = sorted(ending.stopped_ranks) or silent or waited_for(ending.statuses)
    if not guilty:
        last = "; ".join(f"rank {r.rank}: {r.last_sign}" for r in evidence.ranks[:8]) or "no rank had started"
        return RunVerdict("hang", f"{nothing} ({last})", detail=_stack(evidence, 0))
    rank = guilty[0]
    status = ending.statuses[rank]
    seconds = ending.seen_seconds - status.heard_seconds
    what = f"rank {', '.join(map(str, guilty[:8]))} "
    if rank in ending.stopped_ranks:
        what += f"is stopped (SIGSTOP), in {position(status)}"
    elif rank in silent:
        what += f"is stopped or starved: no sign of life for {seconds:.0f} s, last seen in {position(status)}"
    else:
        what += f"stands in {position(status)}"
    if len(ending.statuses) > len(guilty):
        what += f", and the others wait for {'it' if len(guilty) == 1 else 'them'}"
    return RunVerdict("hang", f"{nothing}: {what}", rank, _stack(evidence, rank))


def _stack(evidence: RunEvidence, rank: int) -> str:
    """The stacks of a rank's threads, which it wrote down when the driver asked; else what was printed."""
    return log_tail(evidence.folder / f"stack-rank-{rank}.txt") or evidence.tail


_NO_ROOM = re.compile(rf"\[Errno (?:{errno.ENOSPC}|{errno.EDQUOT})\]")
"""In Python's message on a file that could not be made or written."""


def _disk_full(evidence: RunEvidence) -> RunVerdict | None:
    """A disk too full even for the ranks' last words, or for the files that these would be in."""
    no_room_said = any(
        _NO_ROOM.search(line) is not None and str(evidence.folder) in line for line in evidence.tail.splitlines()
    )
    if not no_room_said and not is_full(evidence.folder):
        return None
    reason = "disk full: the run ended without a word, and there is no room for one; free space and run again"
    return RunVerdict("failed", reason, detail=evidence.tail, external=True)


def _from_outside(evidence: RunEvidence) -> RunVerdict:
    """What can be seen from outside alone: exit codes, and which ranks have not finished."""
    tail, unfinished = evidence.tail, evidence.unfinished
    said = _OWN_WORDS.search(tail)
    if not evidence.ranks and said is None and (refused := _NO_STEP.search(tail)) is not None:
        # Trying again in this allocation uses up the retries, and most likely the trial is not at fault.
        reason = (
            f"Slurm starts no step in this job: {refused[1]}; the same command in a new allocation goes on, "
            "unless [slurm] options ask for more memory than it has"
        )
        return RunVerdict("failed", reason, detail=tail, external=True)
    passing = _PASSING.search(tail) is not None
    if evidence.codes:
        rank, code = evidence.codes[0]
        how = f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        why = f": {said[1]}" if said else " without a word"
        return RunVerdict("failed", f"rank {rank} {how}{why}", rank, tail, transient=passing)
    launcher = f"the launcher ended with exit code {evidence.ending.exit_code}"
    if not evidence.ranks and (unseen := _NOT_SHARED.search(tail)) is not None:
        return RunVerdict("failed", f"no rank started: {unseen[0]}", detail=tail)
    if not evidence.ranks:
        why = f": {said[1]}" if said else ""
        return RunVerdict("failed", f"no rank started; {launcher}{why}", detail=tail, transient=passing)
    if not unfinished:
        return RunVerdict("failed", f"all ranks finished, but {launcher}", detail=tail)
    which = ("rank " if len(unfinished) == 1 else "ranks ") + ", ".join(str(rank) for rank in unfinished[:8])
    return RunVerdict("failed", f"{which} did not finish; {launcher}", unfinished[0], tail, transient=passing)


JUDGES: tuple[Callable[[RunEvidence], RunVerdict | None], ...] = (
    _host_gone,
    _launcher_gone,
    _lost_rank,
    _silent_rank,
    _first_error,
    # Before `_stopped`: DeepSpeed's launcher waits for ever for a host that it cannot reach, which looks like a hang.
    _unreached,
    _stopped,
    _disk_full,
    _from_outside,
)
"""Judges in the order in which they are asked; the last one always gives a verdict."""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _sentence(error: ErrorLine, rank: int) -> str:
    if error.disk_full:
        return f"disk full: rank {rank} has no room for its record; free space and run again"
    message = error.message.strip().splitlines()
    return f"rank {rank} raised {error.error_type}" + (f": {message[0][:300]}" if message else "")
