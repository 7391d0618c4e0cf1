"""Where a rank was at each moment of an explained step: the parts of a breakdown, as intervals instead of lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vitscale.analysis.runs.steps import common_steps
from vitscale.analysis.time.exposure import RankExposure, exposures
from vitscale.base.time_spans import Interval, complement, intersection, union
from vitscale.store.records import COMMUNICATION, EXPOSED, ExplainedLine
from vitscale.store.results import Run

_PART_OF_PHASE = {"forward": "forward", "backward": "backward", "optimizer": "optimizer", "data": "data_wait"}


def explained_steps(run: Run) -> tuple[int, ...]:
    """The steps that every rank of a run explained, in order; none where a rank's record is missing."""
    return tuple(lines[0].step for lines in common_steps(run, lambda rank: rank.explained))


def lanes(run: Run, step: int) -> dict[int, dict[str, list[Interval]]]:
    """Rank to its parts in one of `explained_steps`: seconds from the step's beginning, in the rank's own clock."""
    by_rank = {rank.rank: {line.step: line for line in rank.explained}[step] for rank in run.ranks}
    lines = sorted(by_rank.items())
    return {rank: step_parts(line, exposure) for (rank, line), exposure in zip(lines, exposures(lines), strict=True)}


def step_parts(line: ExplainedLine, exposure: RankExposure) -> dict[str, list[Interval]]:
    """Part to where it lies in one rank's step; they never overlap, and cover it.

    Unknown ones are absent; where wait, wire and norm cannot be told apart, COMMUNICATION stands for all.
    """
    whole: Interval = (0.0, line.seconds)
    exposed = list(exposure.exposed)
    busy = complement(union(line.idle) if line.device == "cuda" else exposed, whole)
    parts: dict[str, list[Interval]] = {}
    for phase, start, end in line.phases:
        if name := _PART_OF_PHASE.get(phase):
            parts.setdefault(name, []).extend(intersection(busy, [(start, end)]))
    if line.device == "cuda":
        parts |= _idle_parts(line, exposed, whole)
    told_apart = {"wait": exposure.wait, "wire": exposure.wire, "norm": exposure.norm}
    if exposure.wait is None:
        told_apart = {COMMUNICATION: exposure.exposed}
    parts |= {name: intersection(own, [whole]) for name, own in told_apart.items() if own is not None}
    parts["other"] = complement(_all(parts), whole)
    return {name: union(own) for name, own in parts.items() if own and (name in EXPOSED or name not in line.unknown)}


def _idle_parts(line: ExplainedLine, exposed: Sequence[Interval], whole: Interval) -> dict[str, list[Interval]]:
    """What a GPU does while it computes nothing and communicates nothing: copy, wait for data, wait for a launch."""
    idle = intersection(union(line.idle), complement(exposed, whole))
    copying = intersection(idle, union(line.copies))
    idle = intersection(idle, complement(copying, whole))
    starved = intersection(idle, union(line.host_data))
    idle = intersection(idle, complement(starved, whole))
    inside = union((start, end) for _, start, end in line.phases)
    return {"h2d": copying, "data_wait": starved, "launch_gaps": intersection(idle, inside)}


def _all(parts: Mapping[str, Sequence[Interval]]) -> list[Interval]:
    return union(interval for own in parts.values() for interval in own)
