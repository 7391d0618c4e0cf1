"""Findings of a check about reach: do all hosts answer, do all ranks start and finish, and do stages end in time?

Also asks every host of a hostfile whether it is there, within a bounded time, by ssh as when ranks are started on it.
"""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from vitscale.base.commands import answer_to
from vitscale.errors import printable
from vitscale.machine.hosts import Host, is_this_machine
from vitscale.preflight.verdict import concerning, error, finding, host_of, hosts_of, ranks_named, warning
from vitscale.present.document import About, Finding, Severity
from vitscale.present.units import listed
from vitscale.schedulers.hostfile import on_host
from vitscale.store.checks import STAGES, CheckedRank, CheckRecord, CheckStage, HostAnswer

_CONSEQUENCE_BY_NETWORK_STAGE: dict[CheckStage, str] = {
    "network": "ranks cannot meet, and no training starts",
    "join": "ranks cannot meet, and no training starts",
    "collectives": "training would hang or fail in its first step",
}
"""Stages in which ranks meet -> what training would do."""
_SEVERITY_BY_STAGE: dict[CheckStage, Severity] = {"matmul": "warning", "compute": "warning", "facts": "warning"}
"""Severity of a failed stage; an error where the stage is not listed."""


def unreachable_hosts(record: CheckRecord) -> Iterable[Finding]:
    """Reports hosts that did not answer, or do not see the results folder."""
    for host in record.hosts:
        if host.seconds is None:
            yield error(
                kind="host-unreachable",
                message=f"host {host.name} does not answer: {host.reason}. The others were checked without it",
                advice=f"See that the name is right and the host is up; `ssh {host.name} true` must work without a "
                "password",
                about=About(hosts=(host.name,)),
            )
        elif host.sees_folder is False:
            yield error(
                kind="folder-not-shared",
                message=f"host {host.name} does not see the results folder under the same path: no rank can start "
                "there. The others were checked without it",
                advice="Give a folder on a file system that all hosts share with -o",
                about=About(hosts=(host.name,)),
            )


def missing_ranks(record: CheckRecord) -> Iterable[Finding]:
    """Reports ranks that did not start, and ranks that did not finish."""
    missing = _unstarted_ranks(record)
    if missing and record.ending != "not started":
        yield error(
            kind="rank-missing",
            message=f"{ranks_named(missing)} did not start{_last_words(record.log)}",
            advice="See the log (--json prints its end). Python and vitscale must be at the same path on every host",
            about=About(ranks=tuple(missing)),
        )
    started = [rank for rank in record.ranks if rank.rank not in missing]
    stopped = [rank for rank in started if not rank.ended]
    if stopped:
        yield _stopped_ranks_finding(record, stopped)
    if record.ending == "not started":
        yield error(
            kind="not-started",
            message=f"no rank was started: {record.ending_reason}",
            advice="Mend the hosts, and check again",
        )


def _unstarted_ranks(record: CheckRecord) -> list[int]:
    """Return the numbers of the ranks that recorded neither where they run nor a stage."""
    started = {rank.rank for rank in record.ranks if rank.facts or rank.stages}
    return [number for number in range(record.request.world.size) if number not in started]


def _stopped_ranks_finding(record: CheckRecord, stopped: Sequence[CheckedRank]) -> Finding:
    """Return the finding for ranks that did not finish, with the last stage of the rank that was the cause."""
    guilty = [rank for rank in stopped if rank.rank == record.guilty_rank]
    first = guilty[0] if guilty else stopped[0]
    last_stage = first.stages[-1].name if first.stages else "none"
    reason = f"{record.ending_reason}; " if record.ending_reason else ""
    return error(
        kind="rank-stopped",
        message=f"{reason}{ranks_named([rank.rank for rank in stopped])} ({listed(hosts_of(stopped))}) did not "
        f"come to the end; the last finished stage of rank {first.rank}: {last_stage}",
        advice="See the log (--json prints its end), and whether the host ran out of memory or was cut off",
        about=concerning(stopped),
    )


def _last_words(log: str) -> str:
    """Return "; last words: ..." with the last line of a log that is not blank; empty where there is none."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return f"; last words: {lines[-1][:200]}" if lines else ""


def rank_0_not_reached(record: CheckRecord) -> Iterable[Finding]:
    """Reports ranks that cannot connect by TCP to the address where ranks meet."""
    cut_off = [rank for rank in record.ranks if _cannot_reach_rank_0(rank)]
    reach = cut_off[0].reach if cut_off else None
    if reach is not None:
        yield error(
            kind="rank-0-not-reached",
            message=f"{ranks_named([rank.rank for rank in cut_off])} ({listed(hosts_of(cut_off))}) cannot reach rank 0 "
            f"at {reach.address}:{reach.port} by TCP: {reach.reason}",
            advice="Open ports 20000 to 65535 between the hosts, and see that the name means the same address on each "
            "of them",
            about=concerning(cut_off),
        )


def _cannot_reach_rank_0(rank: CheckedRank) -> bool:
    """Whether a rank tried to connect to rank 0, and did not succeed."""
    return rank.reach is not None and rank.reach.seconds is None


class _FailedStage(NamedTuple):
    """A rank in which a stage failed, and why."""

    rank: CheckedRank
    reason: str


def failed_stages(record: CheckRecord) -> Iterable[Finding]:
    """Reports stages that some ranks did not finish, one finding each; ranks that hung come first."""
    for stage in STAGES:
        late: list[CheckedRank] = []  # not done within the stage's limit
        failed: list[_FailedStage] = []
        for rank in record.ranks:
            endings = [line for line in rank.stages if line.name == stage]
            late += [rank for line in endings if line.ending == "timeout"]
            failed += [_FailedStage(rank, line.reason) for line in endings if line.ending == "failed"]
        if late or failed:
            yield _failed_stage_finding(record, stage, late, failed)


def _failed_stage_finding(
    record: CheckRecord, stage: CheckStage, late: Sequence[CheckedRank], failed: Sequence[_FailedStage]
) -> Finding:
    """Return the finding for a stage that some ranks did not finish.

    Args:
        record: the check, for the stage's limit.
        stage: the stage.
        late: ranks that were not done within the limit.
        failed: ranks in which the stage failed.
    """
    clauses = []
    if late:
        limit = record.request.limits.get(stage, 0.0)
        ranks = ranks_named([rank.rank for rank in late])
        clauses.append(f"{ranks} ({listed(hosts_of(late))}) not done after {limit:g} s")
    if failed:
        ranks = ranks_named([failure.rank.rank for failure in failed])
        clauses.append(f"{ranks} failed ({host_of(failed[0].rank)}: {failed[0].reason[:300]})")
    is_network_stage = stage in _CONSEQUENCE_BY_NETWORK_STAGE
    consequence = f"; {_CONSEQUENCE_BY_NETWORK_STAGE[stage]}" if is_network_stage else ""
    if is_network_stage:
        advice = "See the network's verdicts, and firewalls between the hosts"
    else:
        advice = "Mend the cause, and check again"
    return finding(
        _SEVERITY_BY_STAGE.get(stage, "error"),
        kind="stage-failed",
        message=f"{stage}: {'; '.join(clauses)}{consequence}",
        advice=advice,
        about=concerning([*late, *(failure.rank for failure in failed)]),
    )


def broken_lines(record: CheckRecord) -> Iterable[Finding]:
    """Warns of lines of ranks that could not be read."""
    broken: list[str] = []
    for rank in record.ranks:
        broken += rank.broken
    if broken:
        noun = "line" if len(broken) == 1 else "lines"
        yield warning(
            kind="broken-lines",
            message=f"{len(broken)} {noun} of ranks cannot be read: left out ({broken[0]})",
            advice="Check again; where it happens again, the disk of the folder is not to be trusted",
        )


RESOLVE_SECONDS = 10.0
"""Longest wait for the address of a name."""
ANSWER_SECONDS = 30.0
"""Longest wait for a host's answer by ssh."""
_MOST_HOSTS_AT_ONCE = 64
"""Most hosts that are asked at the same time."""
_SSH_FAILURE_CODE = 255

Answer = TypeVar("Answer")


def ask(hosts: Sequence[Host], file: Path) -> tuple[HostAnswer, ...]:
    """Return each host's answer when asked to read `file`, in the order of `hosts`."""
    if not hosts:
        return ()
    with ThreadPoolExecutor(min(_MOST_HOSTS_AT_ONCE, len(hosts)), "vitscale-reach") as pool:
        return tuple(pool.map(lambda host: _host_answer(host.name, file), hosts))


def _host_answer(name: str, file: Path) -> HostAnswer:
    """Return a host's answer when asked to read `file`, or why it does not answer."""
    began = time.monotonic()
    resolution = _answer_within(RESOLVE_SECONDS, lambda: _resolve(name))
    if resolution is None:
        reason = f"its name is not resolved within {RESOLVE_SECONDS:g} s"
        return HostAnswer(name=name, address=None, seconds=None, reason=reason)
    if resolution.address is None:
        reason = f"its name is not resolved: {resolution.error}"
        return HostAnswer(name=name, address=None, seconds=None, reason=reason)
    address = resolution.address
    unanswered = partial(HostAnswer, name=name, address=address, seconds=None)
    if _answer_within(RESOLVE_SECONDS, lambda: is_this_machine(name)):
        return HostAnswer(name=name, address=address, seconds=time.monotonic() - began, sees_folder=file.exists())
    try:
        answer = answer_to(on_host(name, ["test", "-r", str(file)]), ANSWER_SECONDS)
    except subprocess.TimeoutExpired:
        return unanswered(reason=f"no answer to ssh within {ANSWER_SECONDS:g} s")
    except OSError as error:
        return unanswered(reason=f"ssh cannot be run here: {error.strerror}")
    if answer.returncode == _SSH_FAILURE_CODE or answer.returncode < 0:
        error_lines = printable(answer.stderr).strip().splitlines()
        return unanswered(reason=error_lines[-1][:300] if error_lines else "ssh failed")
    can_read = answer.returncode == 0
    return HostAnswer(name=name, address=address, seconds=time.monotonic() - began, sees_folder=can_read)


class _Resolution(NamedTuple):
    """The first address of a name; None, and why, where there is none."""

    address: str | None
    error: str = ""


def _resolve(name: str) -> _Resolution:
    """Look up the address of a name, as long as that takes."""
    try:
        return _Resolution(str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]))
    except (OSError, UnicodeError) as error:
        return _Resolution(None, f"{getattr(error, 'strerror', None) or error}")


def _answer_within(seconds: float, question: Callable[[], Answer]) -> Answer | None:
    """Return what `question` returns; None where it takes longer.

    It runs in a thread, which is left alone where it takes longer: the system's resolver takes no limit.
    """
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(question()), daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None
