"""Exposed communication of a step, told apart into waiting for the slowest rank and the transfer itself.

Clocks of different ranks are never compared. What ranks share is that they leave a collective together: nobody has
the result before the last one has sent its part. Per communicator, in the order of issue,

    service_k = end_k - max(start_k, end_(k-1))        the time the communicator spent on collective k, on one rank
    wire_k    = min over ranks of service_k            the rank that came last did not wait: its service is transfer

and in each rank's own clock the transfer is [end_k - wire_k, end_k], the wait the rest of its service. The plain
minimum of durations would count the queue as transfer as soon as collectives overlap. What of both falls into the
rank's idle time is exposed. Holds for collectives in which everybody waits for everybody; not for rooted ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vitscale.intervals import Interval, complement, intersection, length, union
from vitscale.record import ExplainedLine

ROOTED = ("broadcast", "reduce", "gather", "scatter", "send", "recv", "send_recv")
"""Operations a rank may leave before another has come."""


@dataclass(frozen=True)
class RankExposure:
    """One rank's communication in one step; seconds from the step's beginning, intervals disjoint and in order."""

    rank: int
    exposed: tuple[Interval, ...]
    """Idle while a collective was in flight: wait and wire together."""
    wait: tuple[Interval, ...] | None
    wire: tuple[Interval, ...] | None
    """None: they cannot be told apart; `reason` says why."""
    late_by_seconds: float | None
    """All waiting in the step, exposed or not: what this rank was early by. The rank the others wait for has least."""
    wire_seconds: float | None
    """All transfer in the step, exposed or not."""
    reason: str = ""


def exposures(lines: Sequence[tuple[int, ExplainedLine]]) -> tuple[RankExposure, ...]:
    """The exposure of every rank in one step.

    Args:
        lines: (rank, line) of all ranks of the run, of one step.
    """
    reason = _why_not(lines)
    services = [_services(line) for _, line in lines]
    wires = [min(end - start for start, end in same) for same in zip(*services, strict=True)] if not reason else []
    return tuple(_exposure(rank, line, own, wires, reason) for (rank, line), own in zip(lines, services, strict=True))


def _exposure(
    rank: int, line: ExplainedLine, services: Sequence[Interval], wires: Sequence[float], reason: str
) -> RankExposure:
    idle = union(line.idle)
    exposed = tuple(intersection(idle, union((start, end) for _, _, start, end in line.collectives)))
    if reason:
        return RankExposure(rank, exposed, None, None, None, None, reason)
    transfers = union((end - wire, end) for (_, end), wire in zip(services, wires, strict=True))
    waits = union((start, end - wire) for (start, end), wire in zip(services, wires, strict=True))
    # A rank may wait in one communicator while it transfers in another: that time is the transfer's.
    only_waits = intersection(waits, complement(transfers, (0.0, max(line.seconds, *(e for _, e in waits), 0.0))))
    return RankExposure(
        rank,
        exposed,
        wait=tuple(intersection(idle, only_waits)),
        wire=tuple(intersection(idle, transfers)),
        late_by_seconds=length(only_waits),
        wire_seconds=length(transfers),
    )


def _services(line: ExplainedLine) -> list[Interval]:
    """Of each collective, by communicator: from when it was issued and the communicator was free for it, to its end."""
    found: list[Interval] = []
    for communicator in sorted({collective[0] for collective in line.collectives}):
        free = 0.0
        for name, _, start, end in line.collectives:
            if name == communicator:
                begin = min(max(start, free), end) if end > free else end
                found.append((begin, end))
                free = max(free, end)
    return found


def _why_not(lines: Sequence[tuple[int, ExplainedLine]]) -> str:
    orders = [sorted((c, place, op) for place, (c, op, _, _) in enumerate(line.collectives)) for _, line in lines]
    named = [[(communicator, op) for communicator, _, op in order] for order in orders]
    if any(other != named[0] for other in named[1:]):
        return "the ranks recorded different collectives"
    rooted = sorted({op for _, op in named[0] if op in ROOTED})
    if rooted and len(lines) > 1:
        return f"rooted operations ({', '.join(rooted)}) do not end together on all ranks"
    for _, line in lines:
        if why := line.unknown.get("wire") or line.unknown.get("wait"):
            return why
    return ""
