"""Puts the profiled steps of all ranks into a `JobStepTimes`: on a GPU only these say what a step is made of.

Traces are read as `vitscale import` reads them, and waiting is told from transfer by the collectives of all ranks
(`analysis.time.exposure`). The profiler lengthens steps: parts are scaled to the length of steps without it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitscale.analysis.time.exposure import exposures, step_parts, unprofiled
from vitscale.base.arrays import FloatArray
from vitscale.base.time_spans import length
from vitscale.errors import VitscaleError
from vitscale.explanation.rank_record import HookedRank
from vitscale.explanation.step_table import JobStepTimes, WorkPart, world_size
from vitscale.importers import traces
from vitscale.present.units import counted
from vitscale.profiles.trace_figures import UNTOLD
from vitscale.store.records import COMMUNICATION, EXPOSED, ExplainedLine

_WORK_PART: Mapping[str, WorkPart] = {
    "data_wait": "data",
    "h2d": "copy",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "launch_gaps": "launch_gaps",
    "other": "other",
}
"""Part of an explained step -> part of a rank's work."""


class TracedSteps(NamedTuple):
    """What traces say of a job's steps."""

    table: JobStepTimes | None
    """None where no step was traced on all ranks."""
    notes: tuple[str, ...]
    """A sentence for each trace that was left out, and on what is unknown."""


def traced_steps(records: Sequence[HookedRank], folder: Path, usual_seconds: float) -> TracedSteps:
    """Return the steps that traces of all ranks hold, scaled to the usual length.

    Args:
        records: what the ranks recorded; each may name a trace.
        folder: the traces; a name that leads out of it is not followed.
        usual_seconds: mean length of the steps without the profiler.
    """
    notes: list[str] = []
    line_by_rank_and_step: dict[int, dict[int, ExplainedLine]] = {}
    for record in records:
        if record.profile is not None:
            explained = _explained_lines(record.rank.rank, folder, record.profile.trace, notes)
            if explained:
                line_by_rank_and_step[record.rank.rank] = explained
    if not line_by_rank_and_step:
        return TracedSteps(None, tuple(notes))
    missing = world_size(records) - len(line_by_rank_and_step)
    if missing > 0:
        notes.append(f"{counted(missing, 'rank')} left no trace: waiting and transfer are not told apart")
    common = set.intersection(*(set(lines) for lines in line_by_rank_and_step.values()))
    if not common:
        notes.append("the traces of the ranks hold no step in common")
        return TracedSteps(None, tuple(notes))
    steps = []
    for number in sorted(common):
        steps.append([(rank, of_rank[number]) for rank, of_rank in sorted(line_by_rank_and_step.items())])
    return TracedSteps(_table(steps, usual_seconds, has_all_ranks=missing <= 0), tuple(notes))


def _explained_lines(rank: int, folder: Path, name: str, notes: list[str]) -> dict[int, ExplainedLine]:
    """Return number -> step of one trace; empty, with a note, where it cannot be read or holds no whole step."""
    path = folder / name
    is_inside = Path(name).name == name and not path.is_symlink() and path.is_file()
    if not is_inside:
        notes.append(f"the trace of rank {rank} is missing")
        return {}
    try:
        trace = traces.rank_trace(path)
    except (VitscaleError, OSError, ValueError) as error:
        notes.append(f"the trace of rank {rank} is left out: {error}")
        return {}
    if trace.found_by == UNTOLD or not trace.lines:
        notes.append(f"the trace of rank {rank} holds no whole step")
        return {}
    return {line.step: line for line in trace.lines}


def _table(
    steps: Sequence[Sequence[tuple[int, ExplainedLine]]], usual_seconds: float, *, has_all_ranks: bool
) -> JobStepTimes:
    """Return the table of traced steps.

    Args:
        steps: for each step (rank, line) of all ranks.
        usual_seconds: mean length of the steps without the profiler.
        has_all_ranks: whether every rank of the job has a trace.
    """
    ranks = tuple(rank for rank, _ in steps[0])
    all_seconds = [line.seconds for _, line in itertools.chain.from_iterable(steps)]
    traced_seconds = np.array(all_seconds).reshape(len(steps), len(ranks)).T  # (R, S)
    scale = min(1.0, usual_seconds / float(traced_seconds.mean()))
    parts_by_step = [_parts(lines, scale) for lines in steps]
    reasons = [_unknown_exchange(parts) for parts in itertools.chain.from_iterable(parts_by_step)]
    untold_reason = next((reason for reason in reasons if reason), "")
    if not has_all_ranks:
        untold_reason = "not all ranks left a trace"
    work = {work_part: _column(parts_by_step, part) for part, work_part in _WORK_PART.items()}
    return JobStepTimes(
        ranks=ranks,
        numbers=np.array([lines[0][1].step for lines in steps], dtype=np.int64),
        seconds=traced_seconds * scale,
        work=work,
        images=np.full(traced_seconds.shape, np.nan),
        untold_reason=untold_reason,
    )


def _parts(lines: Sequence[tuple[int, ExplainedLine]], scale: float) -> list[Mapping[str, float]]:
    """Return for each rank part -> seconds of one step, as it would be without the profiler; unknown parts are absent.

    Args:
        lines: (rank, line) of all ranks.
        scale: length of a step without the profiler, as a share of a traced one.
    """
    parts_by_rank: list[Mapping[str, float]] = []
    for (_, line), exposure in zip(lines, exposures(lines), strict=True):
        seconds = {part: length(intervals) for part, intervals in step_parts(line, exposure).items()}
        profiler_lengthened_it = scale < 1 and sum(seconds.values()) > 0
        if profiler_lengthened_it:
            seconds = unprofiled(seconds, scale * line.seconds, line.device)
        parts_without_events = set(_WORK_PART) - set(seconds) - set(line.unknown)
        parts_by_rank.append({**seconds, **dict.fromkeys(parts_without_events, 0.0)})
    return parts_by_rank


def _unknown_exchange(parts: Mapping[str, float]) -> str:
    """Return why waiting and transfer of a rank's step are unknown; empty where they are known."""
    if COMMUNICATION in parts and not any(part in parts for part in EXPOSED):
        return "the traces do not tell waiting from transfer"
    return ""


def _column(parts_by_step: Sequence[Sequence[Mapping[str, float]]], part: str) -> FloatArray:
    """Return the seconds of a part, (R, S); NaN where it is unknown."""
    ranks = len(parts_by_step[0])
    values = [parts.get(part, np.nan) for parts in itertools.chain.from_iterable(parts_by_step)]
    return np.array(values, dtype=np.float64).reshape(-1, ranks).T
