"""Is everybody there: hosts that answer, ranks that start and come to their end, stages that end in time?"""

from __future__ import annotations

from collections.abc import Iterable

from vitscale.preflight.verdict import finding, host_of, hosts_of, ranks_named
from vitscale.present.document import Finding, Severity
from vitscale.present.units import listed
from vitscale.store.check_records import STAGES, CheckRecord, Stage

_MEETING: dict[Stage, str] = {
    "network": "ranks cannot meet, and no training starts",
    "join": "ranks cannot meet, and no training starts",
    "collectives": "training would hang or fail in its first step",
}
_SEVERITIES: dict[Stage, Severity] = {"matmul": "warning", "compute": "warning", "facts": "warning"}
"""Of a stage that failed; an error where it is not here."""


def unreachable_hosts(record: CheckRecord) -> Iterable[Finding]:
    """Hosts that did not answer, and hosts that do not see the folder."""
    for host in record.hosts:
        if host.seconds is None:
            yield finding(
                "host-unreachable",
                "error",
                f"host {host.name} does not answer: {host.reason}. The others were checked without it",
                f"See that the name is right and the host is up; `ssh {host.name} true` must work without a password",
                hosts=(host.name,),
            )
        elif host.sees_folder is False:
            yield finding(
                "folder-not-shared",
                "error",
                f"host {host.name} does not see the results folder under the same path: no rank can start there. "
                "The others were checked without it",
                "Give a folder on a file system that all hosts share with -o",
                hosts=(host.name,),
            )


def missing_ranks(record: CheckRecord) -> Iterable[Finding]:
    """Ranks that never told where they run, and ranks that did not come to their end."""
    there = {rank.rank: rank for rank in record.ranks}
    silent = [n for n in range(record.request.world.size) if n not in there or not (there[n].facts or there[n].stages)]
    if silent and record.ending != "not started":
        log = [line.strip() for line in record.log.splitlines() if line.strip()]
        yield finding(
            "rank-missing",
            "error",
            f"{ranks_named(silent)} did not start" + (f"; last words: {log[-1][:200]}" if log else ""),
            "See the log (--json prints its end). Python and vitscale must be at the same path on every host",
            tuple(silent),
        )
    stopped = [rank for rank in record.ranks if rank.rank not in silent and not rank.ended]
    if stopped:
        first = next((rank for rank in stopped if rank.rank == record.guilty_rank), stopped[0])
        last = first.stages[-1].name if first.stages else "none"
        how = f"{record.ending_reason}; " if record.ending_reason else ""
        yield finding(
            "rank-stopped",
            "error",
            f"{how}{ranks_named([rank.rank for rank in stopped])} ({listed(hosts_of(stopped))}) did not come to the "
            f"end; the last finished stage of rank {first.rank}: {last}",
            "See the log (--json prints its end), and whether the host ran out of memory or was cut off",
            tuple(rank.rank for rank in stopped),
            hosts_of(stopped),
        )
    if record.ending == "not started":
        yield finding(
            "not-started", "error", f"no rank was started: {record.ending_reason}", "Mend the hosts, and check again"
        )


def rank_0_not_reached(record: CheckRecord) -> Iterable[Finding]:
    """Ranks without a TCP connection to where ranks meet."""
    cut_off = [rank for rank in record.ranks if rank.reach is not None and rank.reach.seconds is None]
    if cut_off and (reach := cut_off[0].reach) is not None:
        yield finding(
            "rank-0-not-reached",
            "error",
            f"{ranks_named([rank.rank for rank in cut_off])} ({listed(hosts_of(cut_off))}) cannot reach rank 0 at "
            f"{reach.address}:{reach.port} by TCP: {reach.reason}",
            "Open ports 20000 to 65535 between the hosts, and see that the name means the same address on each of them",
            tuple(rank.rank for rank in cut_off),
            hosts_of(cut_off),
        )


def failed_stages(record: CheckRecord) -> Iterable[Finding]:
    """Stages that some ranks did not do, each told once, with the ranks that hung before those that failed."""
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
            "stage-failed",
            _SEVERITIES.get(stage, "error"),
            f"{stage}: {'; '.join(parts)}" + (f"; {_MEETING[stage]}" if stage in _MEETING else ""),
            "See the network's verdicts, and firewalls between the hosts"
            if stage in _MEETING
            else "Mend the cause, and check again",
            tuple(rank.rank for rank in (*late, *(rank for rank, _ in failed))),
            hosts_of([*late, *(rank for rank, _ in failed)]),
        )


def broken_lines(record: CheckRecord) -> Iterable[Finding]:
    """Lines of ranks that could not be read."""
    broken = [line for rank in record.ranks for line in rank.broken]
    if broken:
        yield finding(
            "broken-lines",
            "warning",
            f"{len(broken)} line{'s' if len(broken) != 1 else ''} of ranks cannot be read: left out ({broken[0]})",
            "Check again; where it happens again, the disk of the folder is not to be trusted",
        )
