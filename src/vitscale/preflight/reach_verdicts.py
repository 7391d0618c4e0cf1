"""Do all hosts answer, do all ranks start and finish, and do stages end in time?

Asks every host of a hostfile whether it is there, within a bounded time, by ssh as when ranks are started on it.
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
from typing import TypeVar

from vitscale.base.commands import answer_to
from vitscale.errors import printable
from vitscale.machine.hosts import Host, is_this_machine
from vitscale.preflight.verdict import concerning, error, finding, host_of, hosts_of, ranks_named, warning
from vitscale.present.document import About, Finding, Severity
from vitscale.present.units import listed
from vitscale.schedulers.hostfile import on_host
from vitscale.store.checks import STAGES, CheckRecord, CheckStage, HostAnswer

_MEETING: dict[CheckStage, str] = {
    "network": "ranks cannot meet, and no training starts",
    "join": "ranks cannot meet, and no training starts",
    "collectives": "training would hang or fail in its first step",
}
_SEVERITIES: dict[CheckStage, Severity] = {"matmul": "warning", "compute": "warning", "facts": "warning"}
"""Severity of a failed stage; an error where the stage is not listed."""


def unreachable_hosts(record: CheckRecord) -> Iterable[Finding]:
    """Hosts that did not answer, or do not see the results folder."""
    for host in record.hosts:
        if host.seconds is None:
            yield error(
                "host-unreachable",
                f"host {host.name} does not answer: {host.reason}. The others were checked without it",
                f"See that the name is right and the host is up; `ssh {host.name} true` must work without a password",
                About(hosts=(host.name,)),
            )
        elif host.sees_folder is False:
            yield error(
                "folder-not-shared",
                f"host {host.name} does not see the results folder under the same path: no rank can start there. "
                "The others were checked without it",
                "Give a folder on a file system that all hosts share with -o",
                About(hosts=(host.name,)),
            )


def missing_ranks(record: CheckRecord) -> Iterable[Finding]:
    """Ranks that never told where they run, and ranks that did not finish."""
    there = {rank.rank: rank for rank in record.ranks}
    silent = [n for n in range(record.request.world.size) if n not in there or not (there[n].facts or there[n].stages)]
    if silent and record.ending != "not started":
        log = [line.strip() for line in record.log.splitlines() if line.strip()]
        yield error(
            "rank-missing",
            f"{ranks_named(silent)} did not start" + (f"; last words: {log[-1][:200]}" if log else ""),
            "See the log (--json prints its end). Python and vitscale must be at the same path on every host",
            About(ranks=tuple(silent)),
        )
    stopped = [rank for rank in record.ranks if rank.rank not in silent and not rank.ended]
    if stopped:
        first = next((rank for rank in stopped if rank.rank == record.guilty_rank), stopped[0])
        last = first.stages[-1].name if first.stages else "none"
        how = f"{record.ending_reason}; " if record.ending_reason else ""
        yield error(
            "rank-stopped",
            f"{how}{ranks_named([rank.rank for rank in stopped])} ({listed(hosts_of(stopped))}) did not come to the "
            f"end; the last finished stage of rank {first.rank}: {last}",
            "See the log (--json prints its end), and whether the host ran out of memory or was cut off",
            concerning(stopped),
        )
    if record.ending == "not started":
        yield error("not-started", f"no rank was started: {record.ending_reason}", "Mend the hosts, and check again")


def rank_0_not_reached(record: CheckRecord) -> Iterable[Finding]:
    """Ranks that cannot connect by TCP to the address where ranks meet."""
    cut_off = [rank for rank in record.ranks if rank.reach is not None and rank.reach.seconds is None]
    if cut_off and (reach := cut_off[0].reach) is not None:
        yield error(
            "rank-0-not-reached",
            f"{ranks_named([rank.rank for rank in cut_off])} ({listed(hosts_of(cut_off))}) cannot reach rank 0 at "
            f"{reach.address}:{reach.port} by TCP: {reach.reason}",
            "Open ports 20000 to 65535 between the hosts, and see that the name means the same address on each of them",
            concerning(cut_off),
        )


def failed_stages(record: CheckRecord) -> Iterable[Finding]:
    """Stages that some ranks did not finish, one finding each; ranks that hung are named before those that failed."""
    for stage in STAGES:
        ends = [(rank, line) for rank in record.ranks for line in rank.stages if line.name == stage]
        late = [rank for rank, line in ends if line.ending == "timeout"]
        failed = [(rank, line) for rank, line in ends if line.ending == "failed"]
        if not late and not failed:
            continue
        parts = []
        if late:
            limit = record.request.limits.get(stage, 0.0)
            parts.append(f"{ranks_named([r.rank for r in late])} ({listed(hosts_of(late))}) not done after {limit:g} s")
        if failed:
            numbers = [rank.rank for rank, _ in failed]
            parts.append(f"{ranks_named(numbers)} failed ({host_of(failed[0][0])}: {failed[0][1].reason[:300]})")
        yield finding(
            _SEVERITIES.get(stage, "error"),
            "stage-failed",
            f"{stage}: {'; '.join(parts)}" + (f"; {_MEETING[stage]}" if stage in _MEETING else ""),
            "See the network's verdicts, and firewalls between the hosts"
            if stage in _MEETING
            else "Mend the cause, and check again",
            concerning([*late, *(rank for rank, _ in failed)]),
        )


def broken_lines(record: CheckRecord) -> Iterable[Finding]:
    """Lines of ranks that could not be read."""
    broken = [line for rank in record.ranks for line in rank.broken]
    if broken:
        yield warning(
            "broken-lines",
            f"{len(broken)} line{'s' if len(broken) != 1 else ''} of ranks cannot be read: left out ({broken[0]})",
            "Check again; where it happens again, the disk of the folder is not to be trusted",
        )


RESOLVE_SECONDS = 10.0
ANSWER_SECONDS = 30.0
_AT_ONCE = 64
_SSH_FAILED = 255

Answer = TypeVar("Answer")


def ask(hosts: Sequence[Host], file: Path) -> tuple[HostAnswer, ...]:
    """Each host's answer when asked to read `file`, in the order of `hosts`."""
    if not hosts:
        return ()
    with ThreadPoolExecutor(min(_AT_ONCE, len(hosts)), "vitscale-reach") as pool:
        return tuple(pool.map(lambda host: _answer(host.name, file), hosts))


def _answer(name: str, file: Path) -> HostAnswer:
    began = time.monotonic()
    address = _within(RESOLVE_SECONDS, lambda: _resolved(name))
    if address is None or address.startswith("!"):
        why = f" within {RESOLVE_SECONDS:g} s" if address is None else f": {address[1:]}"
        return HostAnswer(name=name, address=None, seconds=None, reason=f"its name is not resolved{why}")
    silent = partial(HostAnswer, name=name, address=address, seconds=None)
    if _within(RESOLVE_SECONDS, lambda: is_this_machine(name)):
        return HostAnswer(name=name, address=address, seconds=time.monotonic() - began, sees_folder=file.exists())
    try:
        done = answer_to(on_host(name, ["test", "-r", str(file)]), ANSWER_SECONDS)
    except subprocess.TimeoutExpired:
        return silent(reason=f"no answer to ssh within {ANSWER_SECONDS:g} s")
    except OSError as error:
        return silent(reason=f"ssh cannot be run here: {error.strerror}")
    if done.returncode == _SSH_FAILED or done.returncode < 0:
        said = printable(done.stderr).strip().splitlines()
        return silent(reason=said[-1][:300] if said else "ssh failed")
    return HostAnswer(name=name, address=address, seconds=time.monotonic() - began, sees_folder=done.returncode == 0)


def _resolved(name: str) -> str:
    """The first address of a name; or "!" and why there is none."""
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        return f"!{getattr(error, 'strerror', None) or error}"


def _within(seconds: float, ask: Callable[[], Answer]) -> Answer | None:
    """What `ask` returns, or None where it takes longer: the resolver cannot be told when to give up."""
    answer: list[Answer] = []
    thread = threading.Thread(target=lambda: answer.append(ask()), daemon=True)
    thread.start()
    thread.join(seconds)
    return answer[0] if answer else None
