"""Works out the exposed communication of a step: the wait for the slowest rank, the transfer of synchronised norms,
which nothing can hide, and all other transfer.

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
for one another.) A rank that always leaves first, as the root of a tree, cannot be told from one whose clock is ahead:
its wait and its wire, and those of the others, are then wrong by its lead at most. Wait and transfer that fall into the
rank's idle time are exposed. All this holds for collectives in which everybody waits for everybody. It does not hold
for rooted ones: their time is transfer where it is short, else nothing can be told apart.

`lanes` gives the parts of a breakdown as intervals, which show what a rank did at each moment of an explained step.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vitscale.analysis.runs.steps import common_steps, explained_ranks
from vitscale.base.time_spans import Interval, complement, intersection, length, union
from vitscale.store.records import COMMUNICATION, EXPOSED, UNKNOWN_OPERATION, ExplainedLine
from vitscale.store.results import Run

ROOTED = ("broadcast", "reduce", "gather", "scatter", "send", "recv", "send_recv")
"""Operations that a rank may leave before another one has come."""
_BETWEEN_STAGES = ("send", "recv")
"""Operations by which the stages of a pipeline hand on activations and gradients."""
_LARGEST_BRIEF_SHARE = 0.01
"""Share of a step below which rooted operations are taken to be transfer, such as DDP's broadcasts of buffers."""
NAMELESS = "kernels of collectives do not name their operation, and some operations do not end together on all ranks"


@dataclass(frozen=True)
class RankExposure:
    """One rank's communication in one step; seconds from the step's beginning, intervals disjoint and in order.

    Exposed is what the rank does nothing else beside.
    """

    rank: int
    exposed: tuple[Interval, ...]
    """Idle time while a collective was in flight: wait, wire and norm together."""
    wait: tuple[Interval, ...] | None
    wire: tuple[Interval, ...] | None
    norm: tuple[Interval, ...] | None
    """Transfers of synchronised norms, if there are any. None: they cannot be told apart; `reason` says why."""
    waiting_seconds: float | None
    """All waiting in the step, exposed or not: the earlier a rank, the more. The one that others wait for has least."""
    wire_seconds: float | None
    """All transfer in the step, exposed or not."""
    reason: str = ""

    @property
    def unknown_parts(self) -> tuple[str, ...]:
        """Those of `EXPOSED` that cannot be told apart."""
        return tuple(name for name in EXPOSED if getattr(self, name) is None)


def exposures(lines: Sequence[tuple[int, ExplainedLine]]) -> tuple[RankExposure, ...]:
    """Return the exposure of every rank in one step.

    Args:
        lines: (rank, line) for all ranks of the run, in one step.
    """
    collectives_by_rank = [_collectives_by_communicator(line) for _, line in lines]
    reason = _unknown_reason(lines, collectives_by_rank)
    if reason:
        return tuple(_mixed_exposure(rank, line, reason) for rank, line in lines)
    transfers_by_rank = _transfers(collectives_by_rank)
    return tuple(
        _exposure(rank, line, transfers) for (rank, line), transfers in zip(lines, transfers_by_rank, strict=True)
    )


class _Communication(NamedTuple):
    """When one rank was idle and had collectives in flight in a step; intervals disjoint and in order."""

    idle: list[Interval]
    in_flight: list[Interval]

    @property
    def exposed(self) -> tuple[Interval, ...]:
        """Intervals in which it was idle while a collective was in flight."""
        return tuple(intersection(self.idle, self.in_flight))


def _communication(line: ExplainedLine) -> _Communication:
    """Return when a rank was idle and when it communicated; where it holds a stage, without its pipeline's messages."""
    idle = union(line.idle)
    bubbles = [(start, end) for phase, start, end in line.phases if phase == "bubble"]
    if not bubbles:
        all_in_flight = union((start, end) for _, _, start, end in line.collectives)
        return _Communication(idle, all_in_flight)
    # Between stages nothing is exposed but the bubble, in which a rank waits for the other end of each message.
    idle_outside_bubble = intersection(idle, complement(union(bubbles), (0.0, line.seconds)))
    others_in_flight = union(
        (start, end) for _, operation, start, end in line.collectives if operation not in _BETWEEN_STAGES
    )
    return _Communication(idle_outside_bubble, others_in_flight)


def _mixed_exposure(rank: int, line: ExplainedLine, reason: str) -> RankExposure:
    """Return the exposure of one rank where wait and wire cannot be told apart."""
    has_no_norms = not line.norms and "norm" not in line.unknown
    return RankExposure(
        rank,
        _communication(line).exposed,
        wait=None,
        wire=None,
        norm=() if has_no_norms else None,
        waiting_seconds=None,
        wire_seconds=None,
        reason=reason,
    )


def _exposure(rank: int, line: ExplainedLine, transfers: _Transfers) -> RankExposure:
    """Return the exposure of one rank, from its transfers."""
    communication = _communication(line)
    in_flight = communication.in_flight
    # A rank may wait in one communicator while it transfers in another: that time is transfer. Time of a norm beside
    # another transfer is the norm's, for which computing stands still.
    transferring = intersection(in_flight, union(transfers.all))
    transferring_norms = intersection(in_flight, union(transfers.norms))
    until_last_end = (0.0, max((end for _, end in in_flight), default=0.0))
    waiting = intersection(in_flight, complement(transferring, until_last_end))
    transferring_others = intersection(transferring, complement(transferring_norms, until_last_end))
    return RankExposure(
        rank,
        communication.exposed,
        wait=tuple(intersection(communication.idle, waiting)),
        wire=tuple(intersection(communication.idle, transferring_others)),
        norm=tuple(intersection(communication.idle, transferring_norms)),
        waiting_seconds=length(waiting),
        wire_seconds=length(transferring),
    )


class _Collective(NamedTuple):
    """One collective as one rank saw it, in the rank's own clock."""

    communicator: str
    operation: str
    start: float
    """When the rank issued it."""
    end: float
    is_norm: bool
    """Whether a synchronised norm exchanges its sums by it."""

    @property
    def is_rooted(self) -> bool:
        """Whether a rank may leave it before another one has come."""
        return self.operation in ROOTED


def _collectives(line: ExplainedLine) -> list[_Collective]:
    """Return a rank's collectives in the order of issue."""
    return [_Collective(*fields, is_norm=index in line.norms) for index, fields in enumerate(line.collectives)]


def _collectives_by_communicator(line: ExplainedLine) -> dict[str, list[_Collective]]:
    """Return communicator -> a rank's collectives in it, in the order of issue."""
    by_communicator: dict[str, list[_Collective]] = {}
    for collective in _collectives(line):
        by_communicator.setdefault(collective.communicator, []).append(collective)
    return by_communicator


class _Transfers:
    """The transfers of one rank, in its own clock."""

    def __init__(self) -> None:
        self.all: list[Interval] = []
        self.norms: list[Interval] = []
        """Those of `all` by which synchronised norms exchange their sums."""


def _transfers(collectives_by_rank: Sequence[Mapping[str, Sequence[_Collective]]]) -> list[_Transfers]:
    """Return the transfers of each rank.

    Args:
        collectives_by_rank: for each rank communicator -> its collectives; the same ones on all ranks.
    """
    transfers_by_rank = [_Transfers() for _ in collectives_by_rank]
    for communicator in sorted(collectives_by_rank[0]):
        _add_transfers(transfers_by_rank, [collectives[communicator] for collectives in collectives_by_rank])
    return transfers_by_rank


def _add_transfers(
    transfers_by_rank: Sequence[_Transfers], collectives_by_rank: Sequence[Sequence[_Collective]]
) -> None:
    """Add the transfers of one communicator to those of each rank; the module's docstring has the formulas.

    Args:
        transfers_by_rank: the transfers of each rank, which are added to.
        collectives_by_rank: the collectives of the communicator on each rank, in the order of issue.
    """
    offsets = _clock_offsets(collectives_by_rank)  # by rank
    earlier_ends = [-math.inf]  # of the collectives before, in rising order
    for views in zip(*collectives_by_rank, strict=True):  # one collective, as each rank saw it
        # All times in the first rank's clock. The collective truly ended when the first rank saw its end: a thread that
        # is scheduled late sees the end late, and would make the next collective seem short.
        starts = [view.start - offset for view, offset in zip(views, offsets, strict=True)]
        seen_ends = [view.end - offset for view, offset in zip(views, offsets, strict=True)]
        end = min(seen_ends)
        if views[0].is_rooted:  # brief, as `_unknown_reason` has checked
            for transfers, view in zip(transfers_by_rank, views, strict=True):
                transfers.all.append((view.start, view.end))
        else:
            last_arrival = max(starts)
            earlier_end = _largest_up_to(end, earlier_ends)
            # wire_k: the least service of all ranks, which is that of the one that came last.
            wire_seconds = max(0.0, end - max(last_arrival, earlier_end))
            for transfers, offset in zip(transfers_by_rank, offsets, strict=True):
                transfer = (end + offset - wire_seconds, max(seen_ends) + offset)
                transfers.all.append(transfer)
                if views[0].is_norm:
                    transfers.norms.append(transfer)
        bisect.insort(earlier_ends, end)


def _largest_up_to(limit: float, values: Sequence[float]) -> float:
    """Return the largest of the values, in rising order, that is not above the limit; one must be."""
    return values[bisect.bisect_right(values, limit) - 1]


def _clock_offsets(collectives_by_rank: Sequence[Sequence[_Collective]]) -> list[float]:
    """Return how many seconds each rank's clock is ahead of the first rank's.

    It is the median difference of the ends of collectives that all ranks leave together; where there is none, that of
    the very first collective.
    """
    first_rank = collectives_by_rank[0]
    indices = [index for index, collective in enumerate(first_rank) if not collective.is_rooted] or [0]
    offsets = []
    for collectives in collectives_by_rank:
        differences = [collectives[index].end - first_rank[index].end for index in indices]
        offsets.append(statistics.median(differences))
    return offsets


def clocks_ahead(lines: Sequence[ExplainedLine]) -> list[float]:
    """Return the seconds that each rank's clock is ahead of the first's.

    They follow from the ends of one step's collectives that ranks leave together; 0 where there are none, or not the
    same on all ranks.
    """
    collectives_by_rank = [_simultaneous_collectives(line) for line in lines]
    if not collectives_by_rank or not collectives_by_rank[0]:
        return [0.0] * len(lines)
    calls_by_rank = [_communicators_and_operations(collectives) for collectives in collectives_by_rank]
    if any(calls != calls_by_rank[0] for calls in calls_by_rank):
        return [0.0] * len(lines)
    return _clock_offsets(collectives_by_rank)


def _communicators_and_operations(collectives: Sequence[_Collective]) -> list[tuple[str, str]]:
    """Return (communicator, operation) of each collective: equal lists have the same collectives."""
    return [(collective.communicator, collective.operation) for collective in collectives]


def _simultaneous_collectives(line: ExplainedLine) -> list[_Collective]:
    """Return the collectives of a rank that all ranks leave together, by communicator, then in the order of issue."""
    collectives = [collective for collective in _collectives(line) if not collective.is_rooted]
    return sorted(collectives, key=lambda collective: collective.communicator)


def _unknown_reason(
    lines: Sequence[tuple[int, ExplainedLine]], collectives_by_rank: Sequence[Mapping[str, Sequence[_Collective]]]
) -> str:
    """Return why wait and wire cannot be told apart; empty where they can.

    Args:
        lines: (rank, line) for all ranks.
        collectives_by_rank: for each of them communicator -> its collectives.
    """
    for _, line in lines:
        reason = line.unknown.get("wire") or line.unknown.get("wait")
        if reason:
            return reason
    operations_by_rank = [_operations_by_communicator(collectives) for collectives in collectives_by_rank]
    if any(operations != operations_by_rank[0] for operations in operations_by_rank):
        return "the ranks recorded different collectives"
    if len(lines) < 2:
        return ""
    _, first_line = lines[0]
    operations = {operation for _, operation, _, _ in first_line.collectives}
    rooted = sorted(operations & set(ROOTED))
    if rooted and not all(_are_rooted_brief(line) for _, line in lines):
        return f"rooted operations ({', '.join(rooted)}) do not end together on all ranks"
    return NAMELESS if UNKNOWN_OPERATION in operations else ""


def _operations_by_communicator(
    by_communicator: Mapping[str, Sequence[_Collective]],
) -> dict[str, list[tuple[str, bool]]]:
    """Return communicator -> (operation, is_norm) of its collectives in the order of issue."""
    operations = {}
    for communicator, collectives in by_communicator.items():
        operations[communicator] = [(collective.operation, collective.is_norm) for collective in collectives]
    return operations


def _are_rooted_brief(line: ExplainedLine) -> bool:
    """Whether all rooted operations of a rank together take so little of a step that they are taken to be transfer."""
    rooted_seconds = sum(end - start for _, operation, start, end in line.collectives if operation in ROOTED)
    return rooted_seconds < _LARGEST_BRIEF_SHARE * line.seconds


_PART_OF_PHASE = {
    "forward": "forward", "backward": "backward", "bubble": "bubble", "optimizer": "optimizer", "data": "data_wait",
}  # fmt: skip


def explained(run: Run, steady_from: int = 0) -> list[list[tuple[int, ExplainedLine]]]:
    """Return the steps from `steady_from` on that every rank of a run explained.

    Each step is a list of (rank number, explained line) of all ranks, by rank.
    """
    rank_numbers = [rank.rank for rank in explained_ranks(run)]
    common = common_steps(run, lambda rank: [line for line in rank.explained if line.step >= steady_from])
    return [sorted(zip(rank_numbers, lines, strict=True), key=operator.itemgetter(0)) for lines in common]


def explained_steps(run: Run) -> tuple[int, ...]:
    """Return the steps that every rank of a run explained, in order; none where a rank's record is missing."""
    steps = []
    for lines in explained(run):
        _rank, first_line = lines[0]
        steps.append(first_line.step)
    return tuple(steps)


def lanes(run: Run, step: int) -> dict[int, dict[str, list[Interval]]]:
    """Return rank -> its parts in one of `explained_steps`, in seconds from the step's beginning by its own clock."""
    line_by_rank: dict[int, ExplainedLine] = {}
    for rank in explained_ranks(run):
        line_by_step = {line.step: line for line in rank.explained}
        line_by_rank[rank.rank] = line_by_step[step]
    lines = sorted(line_by_rank.items())
    parts_by_rank = {}
    for (rank_number, line), exposure in zip(lines, exposures(lines), strict=True):
        parts_by_rank[rank_number] = step_parts(line, exposure)
    return parts_by_rank


def step_parts(line: ExplainedLine, exposure: RankExposure) -> dict[str, list[Interval]]:
    """Return part -> its intervals in one rank's step; the parts never overlap, and cover the step.

    Unknown parts are absent; where wait, wire and norm cannot be told apart, COMMUNICATION stands for all three.
    """
    step: Interval = (0.0, line.seconds)
    exposed = list(exposure.exposed)
    parts = _phase_parts(line, exposed)
    if line.device == "cuda":
        parts |= _idle_parts(line, exposed)
    if exposure.wait is None:  # nor are wire and norm known apart from it
        parts[COMMUNICATION] = intersection(exposure.exposed, [step])
    else:
        for name in EXPOSED:
            if name not in exposure.unknown_parts:
                parts[name] = intersection(getattr(exposure, name), [step])
    parts["other"] = complement(union(itertools.chain.from_iterable(parts.values())), step)
    known_parts = {}
    for name, intervals in parts.items():
        is_known = name in EXPOSED or name not in line.unknown
        if intervals and is_known:
            known_parts[name] = union(intervals)
    return known_parts


def computing_seconds(line: ExplainedLine) -> float:
    """Return seconds of forward and backward in one rank's step, as `step_parts` has them; 0 where unknown."""
    parts = _phase_parts(line, list(_communication(line).exposed))
    known_parts = [name for name in ("forward", "backward") if name not in line.unknown]
    return sum(length(union(parts.get(name, ()))) for name in known_parts)


def _phase_parts(line: ExplainedLine, exposed: list[Interval]) -> dict[str, list[Interval]]:
    """Return part -> its intervals, for the parts in which a rank is busy.

    `exposed`: its exposed communication; a CPU rank is idle in no other time.
    """
    idle = union(line.idle) if line.device == "cuda" else exposed
    busy = complement(idle, (0.0, line.seconds))
    parts: dict[str, list[Interval]] = {}
    for phase, start, end in line.phases:
        part = _PART_OF_PHASE.get(phase)
        if part:
            parts.setdefault(part, []).extend(intersection(busy, [(start, end)]))
    return parts


def _idle_parts(line: ExplainedLine, exposed: Sequence[Interval]) -> dict[str, list[Interval]]:
    """Return part -> its intervals, while a GPU computes and communicates nothing.

    It copies a batch (h2d), waits for data (data_wait), or waits for a launch inside a phase (launch_gaps).
    """
    step = (0.0, line.seconds)
    neither_busy_nor_exposed = intersection(union(line.idle), complement(exposed, step))
    copying = intersection(neither_busy_nor_exposed, union(line.copies))
    not_copying = intersection(neither_busy_nor_exposed, complement(copying, step))
    waiting_for_data = intersection(not_copying, union(line.host_data))
    unused = intersection(not_copying, complement(waiting_for_data, step))
    phases = union((start, end) for _, start, end in line.phases)
    return {"h2d": copying, "data_wait": waiting_for_data, "launch_gaps": intersection(unused, phases)}


_AS_MEASURED = ("data_wait", "loading", "decoding", "h2d", "bubble", *EXPOSED, COMMUNICATION)
"""Parts that the profiler does not slow down."""
_LAUNCH_PARTS = ("launch_gaps", "other")
"""Parts that grow where the host launches a GPU's kernels later."""


def unprofiled(parts: Mapping[str, float], step: float, device: str) -> dict[str, float]:
    """Return the parts of an explained step as they would be in a light step, which ran without the profiler.

    The profiler slows down what the host does. So transfer, waiting, data wait and copies stay as measured, and all
    other parts are scaled by one factor to fill the light step.

    On a GPU kernels last as long as ever, but come later. There, before parts are scaled, the seconds that the
    explained step takes beyond the light one are taken out of launch gaps and "other", down to 0, then out of the wait
    for ranks whose kernels came later (or of communication, where wait cannot be told apart).

    Args:
        parts: name to seconds, their sum above 0; COMMUNICATION may stand for wait, wire and norm.
        step: seconds of the light step, to which the result adds up.
        device: "cpu" or "cuda", on which the profiler ran.
    """
    unscaled_parts = _without_late_launches(parts, step) if device == "cuda" else parts
    measured_seconds = sum(seconds for name, seconds in unscaled_parts.items() if name in _AS_MEASURED)
    slowed_seconds = sum(seconds for name, seconds in unscaled_parts.items() if name not in _AS_MEASURED)
    if slowed_seconds > 0 and step >= measured_seconds:
        factor = (step - measured_seconds) / slowed_seconds
        return {name: seconds * (1.0 if name in _AS_MEASURED else factor) for name, seconds in unscaled_parts.items()}
    # Nothing is left to scale, or what was measured alone is longer than the step: all parts are scaled alike.
    common_factor = step / (measured_seconds + slowed_seconds)
    return {name: seconds * common_factor for name, seconds in unscaled_parts.items()}


def _without_late_launches(parts: Mapping[str, float], step: float) -> Mapping[str, float]:
    """Return a GPU's parts without the seconds that an explained step takes beyond a light one, as far as that goes.

    They are taken out of launch gaps and "other", in proportion; what is left of them out of the wait.
    """
    excess = sum(parts.values()) - step
    if not excess > 0:
        return parts
    launch_parts = [name for name in _LAUNCH_PARTS if name in parts]
    launch_seconds = sum(parts[name] for name in launch_parts)
    removed_seconds: dict[str, float] = {}
    if launch_seconds > 0:
        share = min(1.0, excess / launch_seconds)
        removed_seconds = {name: parts[name] * share for name in launch_parts}
    wait = "wait" if "wait" in parts else COMMUNICATION
    removed_seconds[wait] = min(parts.get(wait, 0.0), excess - sum(removed_seconds.values()))
    return {name: seconds - removed_seconds.get(name, 0.0) for name, seconds in parts.items()}
