"""Exposed communication of a step: the wait for the slowest rank, the transfer of synchronised norms, which nothing can
hide, and all other transfer.

No clocks need be synchronised, because ranks leave a collective together: nobody has the result before the last one has
sent its part. Per communicator, in the order of issue,

    service_k = end_k - max(start_k, end_(k-1))        the time the communicator spent on collective k, on one rank
                                                       (it is served ahead of those that end later)
    wire_k    = min over ranks of service_k            the rank that came last did not wait: its service is transfer

and in each rank's own clock the transfer is the last wire_k of its service, and the wait the rest. The plain minimum of
durations would count the queue as transfer as soon as collectives overlap. end_k is the same moment on all ranks, taken
from the rank that saw it first. With the ends as each rank saw them, a thread that is scheduled late makes one service
longer and the next one shorter, and the minimum keeps the shorter ones. On all ranks the transfer lasts until the last
rank has left: one that left before, and meets the next collective first, waits for what still travels and for nobody's
work. (At 300 Mbit/s the end of a norm's exchange was 40 ms late on one rank now and then, and both ranks seemed to wait
for one another.) Wait and transfer that fall into the rank's idle time are exposed. All this holds for collectives in
which everybody waits for everybody. It does not hold for rooted ones: their time is transfer where it is short, else
nothing can be told apart.

`lanes` tells what a rank did at each moment of an explained step: the parts of a breakdown as intervals.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import sub

from vitscale.analysis.runs.steps import common_steps, explained_ranks
from vitscale.base.time_spans import Interval, complement, intersection, length, union
from vitscale.store.records import COMMUNICATION, EXPOSED, UNKNOWN_OPERATION, ExplainedLine
from vitscale.store.results import Run

ROOTED = ("broadcast", "reduce", "gather", "scatter", "send", "recv", "send_recv")
"""Operations that a rank may leave before another one has come."""
_OF_STAGES = ("send", "recv")
_BRIEF = 0.01
"""Share of a step: rooted operations that take less on every rank are transfer, such as DDP's broadcasts of buffers."""
NAMELESS = "kernels of collectives do not name their operation, and some operations do not end together on all ranks"


@dataclass(frozen=True)
class RankExposure:
    """One rank's communication in one step; seconds from the step's beginning, intervals disjoint and in order."""

    rank: int
    exposed: tuple[Interval, ...]
    """Idle time while a collective was in flight: wait, wire and norm together."""
    wait: tuple[Interval, ...] | None
    wire: tuple[Interval, ...] | None
    norm: tuple[Interval, ...] | None
    """Transfers of synchronised norms, if there are any. None: they cannot be told apart; `reason` says why."""
    late_by_seconds: float | None
    """All waiting in the step, exposed or not: how early this rank was. The rank that the others wait for has least."""
    wire_seconds: float | None
    """All transfer in the step, exposed or not."""
    reason: str = ""

    @property
    def unknown_parts(self) -> tuple[str, ...]:
        """Those of `EXPOSED` that cannot be told apart."""
        return tuple(name for name in EXPOSED if getattr(self, name) is None)


def exposures(lines: Sequence[tuple[int, ExplainedLine]]) -> tuple[RankExposure, ...]:
    """The exposure of every rank in one step.

    Args:
        lines: (rank, line) for all ranks of the run, in one step.
    """
    reason = _why_not(lines)
    transfers = [_Transfers() for _ in lines] if reason else _transfers([line for _, line in lines])
    return tuple(_exposure(rank, line, own, reason) for (rank, line), own in zip(lines, transfers, strict=True))


def _exposed(line: ExplainedLine) -> tuple[list[Interval], list[Interval], tuple[Interval, ...]]:
    """(idle, collectives in flight, both at once) of one rank's step."""
    idle = union(line.idle)
    in_flight = union((start, end) for _, _, start, end in line.collectives)
    if bubble := [(start, end) for phase, start, end in line.phases if phase == "bubble"]:
        # Between stages nothing is exposed but the bubble, in which a rank waits for the other end of each message.
        in_flight = union((start, end) for _, op, start, end in line.collectives if op not in _OF_STAGES)
        idle = intersection(idle, complement(union(bubble), (0.0, line.seconds)))
    return idle, in_flight, tuple(intersection(idle, in_flight))


def _exposure(rank: int, line: ExplainedLine, transfers: _Transfers, reason: str) -> RankExposure:
    idle, in_flight, exposed = _exposed(line)
    if reason:
        without_norms = not line.norms and "norm" not in line.unknown
        return RankExposure(rank, exposed, None, None, () if without_norms else None, None, None, reason)
    # A rank may wait in one communicator while it transfers in another: that time is transfer. Time of a norm beside
    # another transfer is the norm's, for which computing stands still.
    transferring, of_norms = (intersection(in_flight, union(some)) for some in (transfers.all, transfers.of_norms))
    whole = (0.0, max((end for _, end in in_flight), default=0.0))
    waiting = intersection(in_flight, complement(transferring, whole))
    return RankExposure(
        rank,
        exposed,
        wait=tuple(intersection(idle, waiting)),
        wire=tuple(intersection(idle, intersection(transferring, complement(of_norms, whole)))),
        norm=tuple(intersection(idle, of_norms)),
        late_by_seconds=length(waiting),
        wire_seconds=length(transferring),
    )


class _Transfers:
    """The transfers of one rank, in its own clock."""

    def __init__(self) -> None:
        self.all: list[Interval] = []
        self.of_norms: list[Interval] = []


def _transfers(lines: Sequence[ExplainedLine]) -> list[_Transfers]:
    """The transfer of every collective, for each rank."""
    transfers = [_Transfers() for _ in lines]
    for communicator in sorted({collective[0] for collective in lines[0].collectives}):
        indices = [at for at, collective in enumerate(lines[0].collectives) if collective[0] == communicator]
        issued = [[start for name, _, start, _ in line.collectives if name == communicator] for line in lines]
        ended = [[end for name, _, _, end in line.collectives if name == communicator] for line in lines]
        # How far each clock is from the first rank's, by the ends they share; and when a collective truly ended: a
        # thread that is scheduled late sees the end late, and would make the next collective seem short.
        together = [at for at, index in enumerate(indices) if lines[0].collectives[index][1] not in ROOTED] or [0]
        apart = [statistics.median(own[at] - ended[0][at] for at in together) for own in ended]
        seen = [list(map(sub, same, apart)) for same in zip(*ended, strict=True)]
        ends = list(map(min, seen))
        done = [-math.inf]
        for at, end in enumerate(ends):
            if lines[0].collectives[indices[at]][1] in ROOTED:  # brief, as `_why_not` has checked
                for own, starts, stops in zip(transfers, issued, ended, strict=True):
                    own.all.append((starts[at], stops[at]))
                bisect.insort(done, end)
                continue
            arrived = max(starts[at] - offset for starts, offset in zip(issued, apart, strict=True))
            # The least service of all ranks is that of the one that came last.
            wire = max(0.0, end - max(arrived, done[bisect.bisect_right(done, end) - 1]))
            for own, offset in zip(transfers, apart, strict=True):
                transfer = (end + offset - wire, max(seen[at]) + offset)
                own.all.append(transfer)
                if indices[at] in lines[0].norms:
                    own.of_norms.append(transfer)
            bisect.insort(done, end)
    return transfers


def clocks_ahead(lines: Sequence[ExplainedLine]) -> list[float]:
    """Seconds that each rank's clock is ahead of the first's, by the ends of one step's collectives that ranks leave
    together; 0 where there are none, or not the same on all."""
    issued = [
        [(c, op, end) for c, op, _, end in sorted(line.collectives, key=lambda own: own[0]) if op not in ROOTED]
        for line in lines
    ]
    names = [[(communicator, op) for communicator, op, _ in own] for own in issued]
    if not names or not names[0] or any(other != names[0] for other in names[1:]):
        return [0.0] * len(lines)
    return [
        statistics.median(end - first for (_, _, end), (_, _, first) in zip(own, issued[0], strict=True))
        for own in issued
    ]


def _why_not(lines: Sequence[tuple[int, ExplainedLine]]) -> str:
    for _, line in lines:
        if why := line.unknown.get("wire") or line.unknown.get("wait"):
            return why
    orders = [
        sorted((c, at, op, at in line.norms) for at, (c, op, _, _) in enumerate(line.collectives)) for _, line in lines
    ]
    named = [[(communicator, op, norm) for communicator, _, op, norm in order] for order in orders]
    if any(other != named[0] for other in named[1:]):
        return "the ranks recorded different collectives"
    rooted = sorted({op for _, op, _ in named[0] if op in ROOTED})
    brief = all(
        sum(end - start for _, op, start, end in line.collectives if op in ROOTED) < _BRIEF * line.seconds
        for _, line in lines
    )
    if rooted and len(lines) > 1 and not brief:
        return f"rooted operations ({', '.join(rooted)}) do not end together on all ranks"
    if UNKNOWN_OPERATION in {op for _, op, _ in named[0]} and len(lines) > 1:
        return NAMELESS
    return ""


_PART_OF_PHASE = {
    "forward": "forward", "backward": "backward", "bubble": "bubble", "optimizer": "optimizer", "data": "data_wait",
}  # fmt: skip


def explained(run: Run, steady_from: int = 0) -> list[list[tuple[int, ExplainedLine]]]:
    """(rank, line) of all ranks, by rank, for each step from `steady_from` that every rank of a run explained."""
    numbers = [rank.rank for rank in explained_ranks(run)]
    common = common_steps(run, lambda rank: [line for line in rank.explained if line.step >= steady_from])
    return [sorted(zip(numbers, lines, strict=True), key=lambda pair: pair[0]) for lines in common]


def explained_steps(run: Run) -> tuple[int, ...]:
    """The steps that every rank of a run explained, in order; none where a rank's record is missing."""
    return tuple(lines[0][1].step for lines in explained(run))


def lanes(run: Run, step: int) -> dict[int, dict[str, list[Interval]]]:
    """Rank to its parts in one of `explained_steps`: seconds from the step's beginning, in the rank's own clock."""
    by_rank = {rank.rank: {line.step: line for line in rank.explained}[step] for rank in explained_ranks(run)}
    lines = sorted(by_rank.items())
    return {rank: step_parts(line, exposure) for (rank, line), exposure in zip(lines, exposures(lines), strict=True)}


def step_parts(line: ExplainedLine, exposure: RankExposure) -> dict[str, list[Interval]]:
    """Part to where it lies in one rank's step; the parts never overlap, and cover the step.

    Unknown parts are absent; where wait, wire and norm cannot be told apart, COMMUNICATION stands for all three.
    """
    whole: Interval = (0.0, line.seconds)
    exposed = list(exposure.exposed)
    parts = _phases(line, exposed, whole)
    if line.device == "cuda":
        parts |= _idle_parts(line, exposed, whole)
    told_apart = {"wait": exposure.wait, "wire": exposure.wire, "norm": exposure.norm}
    if exposure.wait is None:
        told_apart = {COMMUNICATION: exposure.exposed}
    parts |= {name: intersection(own, [whole]) for name, own in told_apart.items() if own is not None}
    parts["other"] = complement(union(interval for own in parts.values() for interval in own), whole)
    return {name: union(own) for name, own in parts.items() if own and (name in EXPOSED or name not in line.unknown)}


def computing_seconds(line: ExplainedLine) -> float:
    """Seconds of forward and backward in one rank's step, as `step_parts` has them; 0 where they are unknown."""
    parts = _phases(line, list(_exposed(line)[2]), (0.0, line.seconds))
    return sum(length(union(parts.get(name, ()))) for name in ("forward", "backward") if name not in line.unknown)


def _phases(line: ExplainedLine, exposed: list[Interval], whole: Interval) -> dict[str, list[Interval]]:
    """Part to where it lies, for the parts in which a rank is busy."""
    busy = complement(union(line.idle) if line.device == "cuda" else exposed, whole)
    parts: dict[str, list[Interval]] = {}
    for phase, start, end in line.phases:
        if name := _PART_OF_PHASE.get(phase):
            parts.setdefault(name, []).extend(intersection(busy, [(start, end)]))
    return parts


def _idle_parts(line: ExplainedLine, exposed: Sequence[Interval], whole: Interval) -> dict[str, list[Interval]]:
    """What a GPU does while it computes nothing and communicates nothing: copy, wait for data, wait for a launch."""
    idle = intersection(union(line.idle), complement(exposed, whole))
    copying = intersection(idle, union(line.copies))
    idle = intersection(idle, complement(copying, whole))
    starved = intersection(idle, union(line.host_data))
    idle = intersection(idle, complement(starved, whole))
    inside = union((start, end) for _, start, end in line.phases)
    return {"h2d": copying, "data_wait": starved, "launch_gaps": intersection(idle, inside)}


_AS_MEASURED = ("data_wait", "loading", "decoding", "h2d", "bubble", *EXPOSED, COMMUNICATION)


def unprofiled(parts: Mapping[str, float], step: float, device: str) -> dict[str, float]:
    """The parts of an explained step as a light step has them.

    The profiler slows down what the host does. Transfer, waiting, data wait and copies stand as measured; where the
    host computes, the others are scaled by one factor to fill the step. On a GPU kernels last as long as ever but come
    later: what an explained step takes beyond the light one is taken out of launch gaps and "other", down to 0, then
    out of the wait for ranks whose kernels came later (or of communication that is not told apart), before the others
    are scaled.

    Args:
        parts: name to seconds, their sum above 0; COMMUNICATION may stand for wait, wire and norm.
        step: seconds of the light step, to which the result adds up.
        device: "cpu" or "cuda", on which the profiler ran.
    """
    late = [name for name in ("launch_gaps", "other") if name in parts]
    excess, idle = sum(parts.values()) - step, sum(parts[name] for name in late)
    if device == "cuda" and excess > 0:
        waits = "wait" if "wait" in parts else COMMUNICATION
        gone = {name: parts[name] * min(1.0, excess / idle) for name in late if idle > 0}
        gone[waits] = min(parts.get(waits, 0.0), excess - sum(gone.values()))
        parts = {name: seconds - gone.get(name, 0.0) for name, seconds in parts.items()}
    fixed = sum(seconds for name, seconds in parts.items() if name in _AS_MEASURED)
    slowed = sum(seconds for name, seconds in parts.items() if name not in _AS_MEASURED)
    if slowed > 0 and step >= fixed:
        factor = (step - fixed) / slowed
        return {name: seconds * (1.0 if name in _AS_MEASURED else factor) for name, seconds in parts.items()}
    return {name: seconds * (step / (fixed + slowed)) for name, seconds in parts.items()}
