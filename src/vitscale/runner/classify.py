"""The single outcome of a run that has ended, with the true reason."""

from __future__ import annotations

import errno
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from vitscale.errors import printable
from vitscale.runner.evidence import (
    SSH_FAILED,
    RankExit,
    RunEvidence,
    RunVerdict,
    has_own_error,
    is_about_lost_peer,
    last_words,
    log_tail,
)
from vitscale.runner.gpu_failures import gpu_failures
from vitscale.runner.hang_causes import HangCause, recorder_findings
from vitscale.runner.watch import position_in_words, ranks_waited_for, starved_ranks
from vitscale.store import is_full
from vitscale.store.records import ErrorLine, RankRecord
from vitscale.store.results import Outcome

_MOST_DETAIL_CHARACTERS = 16_000
"""Longest detail of an outcome, from its end."""
_MOST_WORDS_CHARACTERS = 300
"""Longest quotation of somebody else's words in a reason."""
_MOST_LISTED = 8
"""Most ranks or hosts that a reason lists."""
# Signals that begin a failure; an exception, SIGTERM and SIGABRT may also follow from another rank's end.
_FIRST_CAUSE_SIGNALS = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})
# Failures that may have passed when a run is tried again, in the kernel's words, whichever library quotes them.
_PASSING_FAILURE = re.compile(
    r"address already in use|EADDRINUSE|no route to host|host is unreachable|name resolution|connection timed out"
    # What srun says while Slurm's controller is restarted.
    r"|unable to contact slurm controller|unable to create step|socket timed out on send/recv",
    re.IGNORECASE,
)
_FOLDER_NOT_SHARED = re.compile(r"\S{1,400} is not seen on this host: is the results folder shared by all hosts\?")
"""What ranks and host agents say (`vitscale.worker`, `vitscale.processes.host_agent`)."""
# What a host agent or a rank that cannot begin says: it cannot reach the driver, or does not see the folder.
_VITSCALE_WORDS = re.compile(r"^vitscale: ([^\n]{1,300})", re.MULTILINE)
# What a rank raises where a process that loads its images is gone (torch: dataloader.py and DataLoader.cpp).
_LOADER_GONE = re.compile(
    r"DataLoader worker \(pid(?: \d+\) is killed by signal: Killed|\(s\) [\d, ]+\) exited unexpectedly)"
)
# What mpirun says below the words of ssh or of the shell there, which may name no host (Open MPI 4 and 5).
_MISSING_DAEMON = re.compile(r"^(?:ORTE|PRTE) was unable to reliably start one or more daemons", re.MULTILINE)
# Slurm 22.05 refuses a job's every further step like this once its controller was restarted.
_REFUSED_STEP = re.compile(
    r"^srun: error: (Unable to create step [^\n]{0,80}: Memory required by task is not available)", re.M
)
_SHELL_SIGNAL_CODE = 128
"""A shell's exit code for a program that signal N ended is this and N."""
_SAME_TIME_SECONDS = 1.0
"""Ranks that a launcher ends because another has failed are gone within a fraction of this time."""


def outcome_of(evidence: RunEvidence) -> Outcome:
    """Return the outcome of one run: the verdict of the first of `JUDGES` that gives one.

    A judge is a function that blames one kind of cause: it returns its verdict, or None where the evidence does not
    show that cause.

    A rank that was killed, or that left early, has recorded nothing, and what the others then record (a lost
    connection) only follows from that. So heartbeats, the launcher's report of exit codes and the kernel's OOM counter
    are asked first. Otherwise the exception that a rank recorded first is the cause.
    """
    ending = evidence.ending
    verdict = RunVerdict("completed", "") if evidence.completed else _first_verdict(evidence)
    guilty = ending.statuses.get(verdict.rank) if verdict.rank is not None else None
    guilty_host = guilty.host if guilty is not None else None
    return Outcome(
        kind=verdict.kind,
        reason=_shown_reason(verdict, evidence),
        detail=verdict.detail[-_MOST_DETAIL_CHARACTERS:],
        rank=verdict.rank,
        host=verdict.host or guilty_host,
        external=verdict.external,
        transient=verdict.transient,
        started_unix_seconds=ending.started_unix_seconds,
        wall_seconds=ending.wall_seconds,
    )


def _first_verdict(evidence: RunEvidence) -> RunVerdict:
    """Return the verdict of the first judge that gives one."""
    for judge in JUDGES:
        verdict = judge(evidence)
        if verdict is not None:
            return verdict
    raise AssertionError("the last judge always gives a verdict")


def _shown_reason(verdict: RunVerdict, evidence: RunEvidence) -> str:
    """Return the reason in one printable line, with the groups of the rank that was the cause."""
    # Messages come from anywhere; a reason is shown on terminals.
    reason = printable(verdict.reason).replace("\n", " ")
    if evidence.layout is None or verdict.rank is None:
        return reason
    groups = evidence.layout.groups_in_words(verdict.rank)
    return f"{reason} (rank {verdict.rank} of {groups})" if groups else reason


def _judge_lost_host(evidence: RunEvidence) -> RunVerdict | None:
    """Blame a host that answered at the start and not at the end, unless a rank recorded a cause of its own."""
    ending = evidence.ending
    if not ending.unreached or any(map(has_own_error, evidence.ranks)) or ending.stopped == "timeout":
        return None
    host = ending.unreached[0]
    # Hosts call themselves by a short name; a hostfile may have the long one.
    short_name = host.split(".")[0]
    ranks = [rank for rank, status in sorted(ending.statuses.items()) if status.host.split(".")[0] == short_name]
    return _verdict_on_silent_host(host, ranks, evidence) if ranks else None


def _verdict_on_silent_host(host: str, ranks: Sequence[int], evidence: RunEvidence) -> RunVerdict:
    """Return the verdict on a host that does not answer any more. Args: ranks: those on the host."""
    rank_list = ", ".join(map(str, ranks[:_MOST_LISTED]))
    reason = f"host {host} does not answer any more: it or its link is gone (rank {rank_list})"
    return RunVerdict("failed", reason, ranks[0], evidence.tail, host=host, transient=True)


def _judge_killed_launcher(evidence: RunEvidence) -> RunVerdict | None:
    """Blame the signal that ended a launcher, and its ranks with it.

    With a single rank it may be the rank that was ended: then another judge decides.
    """
    code = evidence.ending.exit_code
    if evidence.ending.stopped is not None or evidence.world_size == 1:
        return None
    if code is None or code >= 0:
        return None
    return RunVerdict("failed", f"the launcher was ended by {_signal_name(-code)}", detail=evidence.tail)


def _judge_gpu_failure(evidence: RunEvidence) -> RunVerdict | None:
    """Blame a GPU, a link or a collective that did not end, which NCCL's watchdog or the driver named.

    Links and collectives fail in other ranks too where a rank is gone: then its own end is the cause.
    """
    if evidence.ending.stopped in ("hang", "timeout") or not evidence.gpu_failures:
        return None
    failure = evidence.gpu_failures[0]
    if failure.may_follow and _has_cause_outside_gpus(evidence):
        return None
    error = _error_of(failure.rank, evidence)
    detail = error.traceback if error is not None else evidence.tail
    return RunVerdict("failed", failure.sentence, failure.rank, detail, transient=failure.is_transient)


def _has_cause_outside_gpus(evidence: RunEvidence) -> bool:
    """Whether any sign shows that a rank ended for another cause than those in `RunEvidence.gpu_failures`.

    GPUs and NCCL on other ranks may then have failed only because that rank is gone.
    """
    signs = (
        _has_exception_outside_gpus,
        _has_silent_rank,
        _has_unheard_failure,
        _has_unexplained_exit,
        _has_rank_that_left,
        _is_first_lost_without_words,
    )
    return any(shows(evidence) for shows in signs)


def _has_exception_outside_gpus(evidence: RunEvidence) -> bool:
    """Whether a rank recorded an exception of its own that is no failure of a GPU or of NCCL."""
    own_errors = [record.error for record in evidence.ranks if has_own_error(record)]
    return not all(_is_of_gpu(error) for error in own_errors)


def _has_silent_rank(evidence: RunEvidence) -> bool:
    """Whether a rank's connection broke because its host answers no more."""
    return any(status.disconnection == "silent" for status in evidence.ending.statuses.values())


def _has_unexplained_exit(evidence: RunEvidence) -> bool:
    """Whether a launcher reports that a rank ended by itself which neither recorded nor printed why."""
    ranks_with_words = evidence.ranks_with_an_end | _reporters(evidence)
    unexplained = [rank_exit for rank_exit in evidence.codes if rank_exit.rank not in ranks_with_words]
    return any(_begins_failure(rank_exit.code, evidence) for rank_exit in unexplained)


def _has_rank_that_left(evidence: RunEvidence) -> bool:
    """Whether a rank ended without an error before its work was done."""
    return bool(_ranks_that_left(evidence))


def _begins_failure(code: int, evidence: RunEvidence) -> bool:
    """Whether a rank with this exit code ended by itself, or by a signal that its launcher did not send.

    A shell says 128 + N of a program that signal N ended, and SIGABRT is what NCCL's watchdog ends a rank by.
    """
    if code > 0:
        return code != _SHELL_SIGNAL_CODE + signal.SIGABRT
    return _is_first_cause(code) and not evidence.reports.launcher_killed


def _reporters(evidence: RunEvidence) -> frozenset[int]:
    """Return the ranks that printed a failure of a GPU or of NCCL."""
    return frozenset().union(*(failure.reporters for failure in evidence.gpu_failures))


def _is_of_gpu(error: ErrorLine | None) -> bool:
    """Whether an exception is a failure of a GPU or of NCCL."""
    return error is not None and bool(gpu_failures(error.message))


def _is_first_lost_without_words(evidence: RunEvidence) -> bool:
    """Whether the rank that was lost first printed no failure, though others did, and was lost clearly before them."""
    reporters = _reporters(evidence)
    lost_ranks = _lost_ranks(evidence)
    lost_reporters = [lost for lost in lost_ranks if lost.rank in reporters]
    if not lost_reporters:
        return False
    return lost_reporters[0].lost_seconds - lost_ranks[0].lost_seconds > _SAME_TIME_SECONDS


def _error_of(rank: int | None, evidence: RunEvidence) -> ErrorLine | None:
    """Return the exception that a rank recorded; None where it recorded none, or there is no such rank."""
    return next((record.error for record in evidence.ranks if record.rank == rank), None)


class _LostRank(NamedTuple):
    """A rank whose heartbeat broke off without a word; these sort by time."""

    lost_seconds: float
    """On the driver's monotonic clock."""
    rank: int


def _judge_lost_rank(evidence: RunEvidence) -> RunVerdict | None:
    """Blame the rank whose heartbeat broke off first, unless another rank recorded a cause of its own before."""
    if evidence.ending.stopped in ("hang", "timeout"):
        return None
    lost_ranks = _lost_ranks(evidence)
    if not lost_ranks or _has_unheard_failure(evidence):
        return None
    code_by_rank = dict(reversed(evidence.codes))  # of several reports on a rank the first one counts
    rank = _first_lost_rank(lost_ranks, code_by_rank)
    code = code_by_rank.get(rank)
    # A rank that a signal ended went when its heartbeat did; other ends may be heard of in any order.
    tolerance_seconds = 0.0 if _is_first_cause(code) else _SAME_TIME_SECONDS
    first_loss_seconds = lost_ranks[0].lost_seconds
    if _has_own_error_until(evidence, first_loss_seconds + tolerance_seconds):
        return None
    return _verdict_on_lost_rank(rank, code, evidence)


def _lost_ranks(evidence: RunEvidence) -> list[_LostRank]:
    """Return the ranks that were lost and have recorded no end, the first one first."""
    lost = []
    for rank, status in evidence.ending.statuses.items():
        if status.disconnection is not None and rank not in evidence.ranks_with_an_end:
            lost.append(_LostRank(status.ended_seconds or 0.0, rank))
    return sorted(lost)


def _has_unheard_failure(evidence: RunEvidence) -> bool:
    """Whether a launcher reports the exit of a rank that no heartbeat ever came from."""
    return any(code > 0 and rank not in evidence.ending.statuses for rank, code in evidence.reports.codes)


def _first_lost_rank(lost_ranks: Sequence[_LostRank], code_by_rank: Mapping[int, int]) -> int:
    """Return the rank that was lost first; of those lost at about the same time one that no launcher ended.

    A busy driver hears late, and in any order.

    Args:
        lost_ranks: the first one first.
        code_by_rank: exit codes that launchers report.
    """
    first = lost_ranks[0]
    for lost in lost_ranks:
        is_at_same_time = lost.lost_seconds - first.lost_seconds < _SAME_TIME_SECONDS
        if is_at_same_time and _is_first_cause(code_by_rank.get(lost.rank)):
            return lost.rank
    return first.rank


def _is_first_cause(code: int | None) -> bool:
    """Whether an exit code is that of a signal that begins a failure (`_FIRST_CAUSE_SIGNALS`)."""
    return code is not None and -code in _FIRST_CAUSE_SIGNALS


def _has_own_error_until(evidence: RunEvidence, seconds: float) -> bool:
    """Whether a rank recorded a cause of its own and ended by then, on the driver's monotonic clock."""
    for record in filter(has_own_error, evidence.ranks):
        status = evidence.ending.statuses.get(record.rank)
        if status is not None and status.ended_seconds is not None and status.ended_seconds <= seconds:
            return True
    return False


def _verdict_on_lost_rank(rank: int, code: int | None, evidence: RunEvidence) -> RunVerdict:
    """Return the verdict on a lost rank that is the cause. Args: code: by its launcher; None: not reported."""
    statuses = evidence.ending.statuses
    if statuses[rank].disconnection == "silent":
        host = statuses[rank].host
        silent_ranks = [
            other
            for other, status in sorted(statuses.items())
            if status.host == host and status.disconnection == "silent"
        ]
        return _verdict_on_silent_host(host, silent_ranks, evidence)
    if code is not None and code < 0:
        return _verdict_on_signal(rank, -code, evidence)
    if code is None and not evidence.reports.lists_all_failures:
        return RunVerdict("failed", f"rank {rank} ended without a word before its work was done", rank, evidence.tail)
    reason = f"rank {rank} ended with exit code {code or 0} before its work was done"
    return RunVerdict("failed", reason, rank, evidence.tail)


def _judge_silent_rank(evidence: RunEvidence) -> RunVerdict | None:
    """Blame a rank that ended without a word: a signal that neither driver nor torchrun sent ended it, or it left."""
    if evidence.ending.stopped in ("hang", "timeout") or evidence.reports.launcher_killed:
        return None
    for rank, code in evidence.codes:
        if _is_first_cause(code) and rank not in evidence.ranks_with_an_end:
            return _verdict_on_signal(rank, -code, evidence)
    left_early = _ranks_that_left(evidence)
    if not left_early:
        return None
    first = min(left_early)
    return RunVerdict("failed", f"rank {first} ended with exit code 0 before its work was done", first, evidence.tail)


def _ranks_that_left(evidence: RunEvidence) -> set[int]:
    """Return the ranks that left with exit code 0 before their work was done, as far as a launcher's list shows it."""
    if not evidence.reports.lists_all_failures:
        return set()
    # torchrun lists every rank that failed or that it then ended: the others left by themselves.
    listed_ranks = {rank for rank, _ in evidence.codes}
    return set(range(evidence.world_size)) - evidence.ranks_with_an_end - listed_ranks


def _kernel_out_of_memory(evidence: RunEvidence) -> bool:
    """Whether the kernel ended any process of the run for memory, on this host or in a Slurm job's."""
    return evidence.ending.kernel_oom_kills > 0 or evidence.reports.out_of_memory


def _verdict_on_signal(rank: int, number: int, evidence: RunEvidence) -> RunVerdict:
    """Return the verdict on a rank that this signal ended."""
    if number == signal.SIGKILL and _kernel_out_of_memory(evidence):
        return RunVerdict("oom", f"rank {rank} was ended by the kernel: out of memory", rank, evidence.tail)
    return RunVerdict("failed", f"rank {rank} was ended by {_signal_name(number)} without a word", rank, evidence.tail)


class _RecordedError(NamedTuple):
    """An exception that a rank recorded."""

    error: ErrorLine
    rank: int


def _judge_recorded_errors(evidence: RunEvidence) -> RunVerdict | None:
    """Blame the exception that was recorded first; a lost connection only where there is no other exception.

    Lost connections follow from another rank's end.
    """
    errors = [
        _RecordedError(record.error, record.rank)
        for record in evidence.ranks
        if record.error is not None and not _ended_from_here(evidence, record.rank)
    ]
    if not errors:
        return None
    error, rank = _earliest_error(errors, evidence)
    if _LOADER_GONE.search(error.message) is not None and _kernel_out_of_memory(evidence):
        reason = f"a process that loads images for rank {rank} was ended by the kernel: out of memory"
        return RunVerdict("oom", reason, rank, error.traceback)
    may_pass = _PASSING_FAILURE.search(error.message) is not None and not error.out_of_memory
    return RunVerdict(
        "oom" if error.out_of_memory else "failed",
        _error_sentence(error, rank),
        rank,
        error.traceback,
        external=error.disk_full,
        transient=may_pass,
    )


def _earliest_error(errors: Sequence[_RecordedError], evidence: RunEvidence) -> _RecordedError:
    """Return the error that came first; one about a lost connection only where all are, for these only follow.

    The time of an error is when the driver heard of the rank's end, if it heard of all these ranks. Else it is by the
    clocks of their hosts, which differ and may be set.
    """
    end_by_rank = {
        rank: status.ended_seconds
        for rank, status in evidence.ending.statuses.items()
        if status.ended_seconds is not None
    }
    heard_of_all = all(recorded.rank in end_by_rank for recorded in errors)

    def seconds(recorded: _RecordedError) -> float:
        return end_by_rank[recorded.rank] if heard_of_all else recorded.error.unix_seconds

    causes = [recorded for recorded in errors if not is_about_lost_peer(recorded.error)]
    return min(causes or errors, key=seconds)


def _ended_from_here(evidence: RunEvidence, rank: int) -> bool:
    """Whether a rank was alive when the driver ended the run: what it then raised follows from that."""
    status = evidence.ending.statuses.get(rank)
    return evidence.ending.stopped is not None and status is not None and status.ended_seconds is None


def _judge_unreached_host(evidence: RunEvidence) -> RunVerdict | None:
    """Blame a host on which nothing could be started."""
    if evidence.reports.unreached:
        host, words = evidence.reports.unreached[0]
        reason = f"host {host} could not be reached: {words}"
        return RunVerdict("failed", reason, detail=evidence.tail, host=host, transient=True)
    if evidence.ranks:
        return None
    if evidence.ending.not_begun and not evidence.ending.statuses:
        return _verdict_on_failed_command(evidence)
    no_daemon = _MISSING_DAEMON.search(evidence.tail)
    if no_daemon is None:
        return None
    log_before = evidence.tail[: no_daemon.start()].rstrip("-\n")
    return _verdict_on_missing_daemon(evidence, words=last_words(log_before) or "mpirun does not say why")


def _verdict_on_failed_command(evidence: RunEvidence) -> RunVerdict:
    """Return the verdict on the first host where ssh, or the shell there, began nothing; there is one."""
    host, code = evidence.ending.not_begun[0]
    fact = f"host {host} could not be reached" if code == SSH_FAILED else f"nothing could be started on host {host}"
    words = evidence.ending.last_words or f"exit code {code}"
    reason = f"{fact}: {words[:_MOST_WORDS_CHARACTERS]}"
    return RunVerdict("failed", reason, detail=evidence.tail, host=host, transient=_has_passing_failure(evidence))


def _verdict_on_missing_daemon(evidence: RunEvidence, *, words: str) -> RunVerdict:
    """Return the verdict where mpirun could not start its daemon on another host. Args: words: why, as printed."""
    remote_hosts = evidence.elsewhere
    return RunVerdict(
        "failed",
        f"nothing could be started on {_host_or_hosts(remote_hosts)}: {words[:_MOST_WORDS_CHARACTERS]}",
        detail=evidence.tail,
        host=remote_hosts[0] if len(remote_hosts) == 1 else None,  # mpirun names none
        transient=_has_passing_failure(evidence),
    )


def _host_or_hosts(hosts: Sequence[str]) -> str:
    """Return "host node1", or "one or more of the hosts node1, node2 and 3 more"."""
    if not hosts:
        return "one or more of the hosts"
    if len(hosts) == 1:
        return f"host {hosts[0]}"
    more = f" and {len(hosts) - _MOST_LISTED} more" if len(hosts) > _MOST_LISTED else ""
    return f"one or more of the hosts {', '.join(hosts[:_MOST_LISTED])}{more}"


def _has_passing_failure(evidence: RunEvidence) -> bool:
    """Whether the log has words of a failure that may have passed when the run is tried again."""
    return _PASSING_FAILURE.search(evidence.tail) is not None


def _judge_stopped_run(evidence: RunEvidence) -> RunVerdict | None:
    """Judge a run that the driver ended because its time was over or it hung."""
    ending = evidence.ending
    if ending.stopped == "timeout":
        reason = f"not finished after {ending.limit_seconds:g} s (measure.timeout_seconds)"
        return RunVerdict("timeout", reason, detail=evidence.tail)
    if ending.stopped != "hang":
        return None
    silence = f"no rank recorded anything for {ending.limit_seconds:g} s"
    if evidence.gpu_failures:
        failure = evidence.gpu_failures[0]
        reason = f"{silence}, after a failure: {failure.sentence}"
        return RunVerdict(
            "hang", reason, failure.rank, _stack_or_log(evidence, failure.rank or 0), transient=failure.is_transient
        )
    unresponsive = _unresponsive_ranks(evidence)
    findings = recorder_findings(evidence.folder, evidence.world_size)
    if findings.cause is not None and not unresponsive:
        return _verdict_on_collectives(silence, findings.cause, evidence)
    guilty = unresponsive or ranks_waited_for(ending.statuses)
    if not guilty:
        last_signs = "; ".join(f"rank {record.rank}: {record.last_sign}" for record in evidence.ranks[:_MOST_LISTED])
        return RunVerdict(
            "hang", f"{silence} ({last_signs or 'no rank had started'})", detail=_stack_or_log(evidence, 0)
        )
    reason = f"{silence}: {_state_of_guilty(guilty, evidence)}"
    if _is_on_gpus(evidence) and not unresponsive:
        reason += f". That is where its host stands, and a GPU may be steps behind its host: {findings.unavailable}"
    return RunVerdict("hang", reason, guilty[0], _stack_or_log(evidence, guilty[0]))


def _verdict_on_collectives(silence: str, cause: HangCause, evidence: RunEvidence) -> RunVerdict:
    """Return the verdict on a hang whose cause the collectives show. Args: silence: how long the ranks were silent."""
    reason = f"{silence}: {cause.sentence}"
    if not cause.ranks:
        return RunVerdict("hang", reason, detail=_stack_or_log(evidence, 0))
    first = cause.ranks[0]
    status = evidence.ending.statuses.get(first)
    if status is not None:
        subject = "it" if len(cause.ranks) == 1 else f"rank {first}"
        reason += f"; {subject} stands in {position_in_words(status)}"
    return RunVerdict("hang", reason, first, _stack_or_log(evidence, first))


def _unresponsive_ranks(evidence: RunEvidence) -> list[int]:
    """Return the ranks that are stopped; else those that alone give no sign of life."""
    ending = evidence.ending
    if ending.stopped_ranks:
        return sorted(ending.stopped_ranks)
    return starved_ranks(ending.statuses, ending.seen_seconds)


def _is_on_gpus(evidence: RunEvidence) -> bool:
    """Whether any rank of a run recorded that it computes on a GPU."""
    for record in evidence.ranks:
        if isinstance(record, RankRecord) and record.start is not None:
            return record.start.environment.device.type == "cuda"
    return False


def _state_of_guilty(guilty: Sequence[int], evidence: RunEvidence) -> str:
    """Return "rank 3 stands in forward of step 4, and the others wait for it"."""
    ending = evidence.ending
    first = guilty[0]
    status = ending.statuses[first]
    position = position_in_words(status)
    if first in ending.stopped_ranks:
        state = f"is stopped (SIGSTOP), in {position}"
    elif first in starved_ranks(ending.statuses, ending.seen_seconds):
        silent_seconds = ending.seen_seconds - status.heard_seconds
        state = f"is stopped or starved: no sign of life for {silent_seconds:.0f} s, last seen in {position}"
    else:
        state = f"stands in {position}"
    clause = f"rank {', '.join(map(str, guilty[:_MOST_LISTED]))} {state}"
    if len(ending.statuses) <= len(guilty):
        return clause
    return f"{clause}, and the others wait for {'it' if len(guilty) == 1 else 'them'}"


def _stack_or_log(evidence: RunEvidence, rank: int) -> str:
    """Return the stacks of a rank's threads, which it wrote down when the driver asked; else what was printed."""
    return log_tail(evidence.folder / f"stack-rank-{rank}.txt") or evidence.tail


_NO_ROOM_ERROR = re.compile(rf"\[Errno (?:{errno.ENOSPC}|{errno.EDQUOT})\]")
"""In Python's message on a file that could not be made or written."""


def _judge_full_disk(evidence: RunEvidence) -> RunVerdict | None:
    """Blame a disk too full even for the ranks' last words, or for the files that these would be in."""
    says_no_room = any(
        _NO_ROOM_ERROR.search(line) is not None and str(evidence.folder) in line for line in evidence.tail.splitlines()
    )
    if not says_no_room and not is_full(evidence.folder):
        return None
    reason = "disk full: the run ended without a word, and there is no room for one; free space and run again"
    return RunVerdict("failed", reason, detail=evidence.tail, external=True)


def _judge_from_outside(evidence: RunEvidence) -> RunVerdict:
    """Judge by what is seen from outside alone: exit codes, and which ranks have not finished."""
    refused_step = _REFUSED_STEP.search(evidence.tail)
    if not evidence.ranks and not _words_of_vitscale(evidence) and refused_step is not None:
        # Trying again in this allocation uses up the retries, and most likely the trial is not at fault.
        reason = (
            f"Slurm starts no step in this job: {refused_step[1]}; the same command in a new allocation goes on, "
            "unless [slurm] options ask for more memory than it has"
        )
        return RunVerdict("failed", reason, detail=evidence.tail, external=True)
    if evidence.codes:
        return _verdict_on_exit(evidence.codes[0], evidence)
    if not evidence.ranks:
        return _verdict_without_ranks(evidence)
    if not evidence.unfinished:
        reason = f"all ranks finished, but {_launcher_end(evidence)}"
        return RunVerdict("failed", reason, detail=evidence.tail)
    return _verdict_on_unfinished_ranks(evidence)


def _words_of_vitscale(evidence: RunEvidence) -> str:
    """Return why a host agent or a rank could not begin, as it printed it; empty where none says anything."""
    match = _VITSCALE_WORDS.search(evidence.tail)
    return match[1] if match is not None else ""


def _launcher_end(evidence: RunEvidence) -> str:
    """Return "the launcher ended with exit code 1"."""
    return f"the launcher ended with exit code {evidence.ending.exit_code}"


def _verdict_on_exit(rank_exit: RankExit, evidence: RunEvidence) -> RunVerdict:
    """Return the verdict on a rank whose end a launcher reports."""
    rank, code = rank_exit
    end = f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    words = _words_of_vitscale(evidence)
    why = f": {words}" if words else " without a word"
    reason = f"rank {rank} {end}{why}"
    return RunVerdict("failed", reason, rank, evidence.tail, transient=_has_passing_failure(evidence))


def _verdict_without_ranks(evidence: RunEvidence) -> RunVerdict:
    """Return the verdict on a run of which no rank has recorded anything."""
    not_shared = _FOLDER_NOT_SHARED.search(evidence.tail)
    if not_shared is not None:
        return RunVerdict("failed", f"no rank started: {not_shared[0]}", detail=evidence.tail)
    words = _words_of_vitscale(evidence)
    why = f": {words}" if words else ""
    reason = f"no rank started; {_launcher_end(evidence)}{why}"
    return RunVerdict("failed", reason, detail=evidence.tail, transient=_has_passing_failure(evidence))


def _verdict_on_unfinished_ranks(evidence: RunEvidence) -> RunVerdict:
    """Return the verdict on ranks that did not do all their work, for a reason that nobody recorded; there are some."""
    unfinished = evidence.unfinished
    noun = "rank" if len(unfinished) == 1 else "ranks"
    rank_list = ", ".join(map(str, unfinished[:_MOST_LISTED]))
    reason = f"{noun} {rank_list} did not finish; {_launcher_end(evidence)}"
    return RunVerdict("failed", reason, unfinished[0], evidence.tail, transient=_has_passing_failure(evidence))


JUDGES: tuple[Callable[[RunEvidence], RunVerdict | None], ...] = (
    _judge_lost_host,
    _judge_killed_launcher,
    _judge_gpu_failure,
    _judge_lost_rank,
    _judge_silent_rank,
    _judge_recorded_errors,
    # Before `_judge_stopped_run`: DeepSpeed's launcher waits for ever for a host that it cannot reach, which looks like
    # a hang.
    _judge_unreached_host,
    _judge_stopped_run,
    _judge_full_disk,
    _judge_from_outside,
)
"""Judges in the order in which they are asked; the last one always gives a verdict."""


def _signal_name(number: int) -> str:
    """Return "SIGKILL" for 9; "signal 99" where the number has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _error_sentence(error: ErrorLine, rank: int) -> str:
    """Return "rank 3 raised ValueError: " with the first line of the exception's message."""
    if error.disk_full:
        return f"disk full: rank {rank} has no room for its record; free space and run again"
    sentence = f"rank {rank} raised {error.error_type}"
    lines = error.message.strip().splitlines()
    return f"{sentence}: {lines[0][:_MOST_WORDS_CHARACTERS]}" if lines else sentence
