"""Finds work that is done once in several steps: evaluation, checkpoints, logging, pauses.

Between two steps it is a break, which the hook records. Inside a step it makes a part longer in a few steps: it is
taken out of these, so that what is left is the usual step. What it costs is spread over the steps from one time to the
next; of work that was seen once this is unknown.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from vitscale.base.arrays import BoolArray, FloatArray
from vitscale.explanation.rank_record import HookedRank
from vitscale.explanation.step_table import JobStepTimes, WorkPart
from vitscale.hook import lines

_LEAST_SHARE_OF_STEP = 0.1
"""Share of the usual step by which a part must be longer than usual, for the step to hold rare work."""
_LEAST_REMOVED_SHARE = 0.01
"""Share of the usual step by which the job's step must be shorter without rare work; less is chance or rounding."""
_DEVIATIONS = 6.0
"""Deviations of the part's noise by which it must be longer too."""
_MAD_TO_SIGMA = 1.4826
_MOST_RARE_SHARE = 0.21
"""Share of steps up to which work is rare: every fifth step."""
_USUAL_QUANTILE = 0.75
"""Quantile of a part that is still usual, whatever the others are: two kinds of steps may alternate."""
_QUANTILE_DEVIATIONS = 0.674
"""How many deviations above the median that quantile of a normal distribution is."""
_LEAST_OF_ONE_WORK = 0.5
"""Share of the longest time of some work that its other times take at least."""
_MOST_WORKS = 3
"""Most works that are told apart in a part."""
_LEAST_REGULAR_SHARE = 0.5
"""Share of the times that a distance lets expect which must be seen for the work to be regular."""
_GAP_TOLERANCE = 0.1
"""Share by which the distance between two times may differ from the usual one, for the work to be regular."""
_LONGEST_BREAK_SECONDS = 1e6
_PARTS_THAT_WAIT_FIRST: tuple[WorkPart, ...] = (
    "forward", "backward", "optimizer", "copy", "launch_gaps", "other", "data",
)  # fmt: skip
"""The order in which rare work is taken out. In the passes a rank may wait for another one's rare work, as where DDP
exchanges the buffers of batch norms; taken out first, such a wait shortens no step of the job and so costs nothing."""
BREAK_NAMES = {"evaluation": "evaluation", "checkpoint": "checkpoint", "other": "pause between steps"}


@dataclass(frozen=True)
class RareWork:
    """Work that is done once in several steps."""

    kind: str
    """One of `lines.BREAK_KINDS` between steps; inside a step its part (one of `WORK_PARTS`)."""
    is_break: bool
    ranks: tuple[int, ...]
    """Ranks that do it."""
    after_steps: tuple[int, ...]
    """Numbers of the steps in which, or after which, it was seen."""
    seconds: float
    """Mean seconds of one time, beyond the usual step."""
    every: float | None
    """Steps from one time to the next; None where it was seen once, or comes irregularly."""
    seconds_per_step: float | None
    """What it adds to a step on average; None where it was seen once."""
    code: str | None = None
    """The user's line, "FILE:LINE in FUNCTION"."""
    batches: int | None = None
    """Batches of one evaluation; None where unknown."""

    @property
    def times(self) -> int:
        """How often it was seen."""
        return len(self.after_steps)


class UsualSteps(NamedTuple):
    """The steps without rare work, and that work."""

    table: JobStepTimes
    rare: tuple[RareWork, ...]


def usual_steps(table: JobStepTimes, records: Sequence[HookedRank], *, looks_into_steps: bool) -> UsualSteps:
    """Take rare work out of the steps of a job.

    Args:
        table: the steps that count, at least one.
        records: what the ranks recorded, for breaks and for the loader.
        looks_into_steps: whether to look for it inside steps too, where the host's marks are those of the work.
    """
    breaks = _breaks(table, records)
    between_breaks = _without_waits_for_breaks(table, breaks)
    rare_breaks = _rare_breaks(breaks, table)
    if not looks_into_steps:
        return UsualSteps(between_breaks, tuple(rare_breaks))
    usual = between_breaks
    rare_parts: list[RareWork] = []
    for part in _PARTS_THAT_WAIT_FIRST:
        if not usual.part_is_known(part):
            continue
        is_rare = _rare_cells(usual, part, _least_distance(part, records))
        if is_rare.any():
            changed = _with_usual_part(usual, part, is_rare)
            rare_parts += _rare_in_part(part, usual, is_rare, usual.slowest_own - changed.slowest_own)
            usual = changed
    removed_seconds = between_breaks.slowest_own - usual.slowest_own  # (S,)
    least_seconds = usual.own if not usual.mixed_reason else 0.0
    seconds = np.maximum(usual.seconds - removed_seconds, least_seconds)
    return UsualSteps(replace(usual, seconds=seconds), (*rare_breaks, *rare_parts))


def _least_distance(part: WorkPart, records: Sequence[HookedRank]) -> float:
    """Return the steps between two times from which on work is rare.

    A loader of n workers delivers n batches at a time, so that one fetch of n is long: this is no rare work.
    """
    if part != "data":
        return 0.0
    workers = [record.loader.workers for record in records if record.loader is not None]
    return 2.0 * max(workers, default=0)


def _rare_cells(table: JobStepTimes, part: WorkPart, least_distance: float) -> BoolArray:
    """Return which steps of which ranks hold rare work in a part, (R, S)."""
    values = table.work[part]
    least_excess = _LEAST_SHARE_OF_STEP * float(np.median(table.seconds))
    rows = [_rare_steps(row, least_excess, least_distance) for row in values]
    return np.stack(rows)


def _rare_steps(values: FloatArray, least_excess: float, least_distance: float) -> BoolArray:
    """Return which steps of one rank hold rare work in a part, (S,)."""
    known_values = values[~np.isnan(values)]
    if not len(known_values):
        return np.zeros(len(values), dtype=np.bool_)
    median = float(np.median(known_values))
    high = float(np.quantile(known_values, _USUAL_QUANTILE))
    deviation = _MAD_TO_SIGMA * float(np.median(np.abs(known_values - median)))
    noise = max(deviation, (high - median) / _QUANTILE_DEVIATIONS)
    is_rare: BoolArray = values > high + max(least_excess, _DEVIATIONS * noise)
    count = int(is_rare.sum())
    is_too_frequent = count > _MOST_RARE_SHARE * len(values) or len(values) < least_distance * count
    return np.zeros_like(is_rare) if is_too_frequent else is_rare


def _with_usual_part(table: JobStepTimes, part: WorkPart, is_rare: BoolArray) -> JobStepTimes:
    """Return the table with a part's rare cells replaced by the mean of the rank's other steps."""
    values = table.work[part]
    usual_means = np.nanmean(np.where(is_rare, np.nan, values), axis=1, keepdims=True)
    work = {**table.work, part: np.where(is_rare, usual_means, values)}
    return replace(table, work=work)


def _rare_in_part(
    part: WorkPart, table: JobStepTimes, is_rare: BoolArray, removed_seconds: FloatArray
) -> list[RareWork]:
    """Return the rare works in a part, the longest first; ranks that do one in the same step do it beside one another.

    Times of one work are alike: those below half of the longest are of another work. So a machine that is busy for a
    moment does not hide that logging comes every tenth step.

    Args:
        part: the part.
        table: the steps, with the rare work.
        is_rare: which steps of which ranks hold it, (R, S).
        removed_seconds: by how much each of the job's steps is shorter without it, (S,).
    """
    least_removed = _LEAST_REMOVED_SHARE * float(np.median(table.seconds))
    shortens_step = is_rare.any(axis=0) & (removed_seconds > least_removed)
    remaining = np.where(shortens_step, removed_seconds, 0.0)  # (S,)
    works: list[RareWork] = []
    while (remaining > 0).any():
        least = remaining.max() * _LEAST_OF_ONE_WORK if len(works) < _MOST_WORKS - 1 else 0.0
        is_of_work = (remaining > 0) & (remaining >= least)
        ranks = [rank for rank, row in zip(table.ranks, is_rare, strict=True) if row[is_of_work].any()]
        positions = np.flatnonzero(is_of_work)
        seconds_by_step = dict(zip(table.numbers[positions].tolist(), remaining[positions].tolist(), strict=True))
        works.append(_rare_work(part, ranks, seconds_by_step, table, is_break=False))
        remaining = np.where(is_of_work, 0.0, remaining)
    return works


class _Break(NamedTuple):
    """Breaks of all ranks after one step."""

    kind: str
    seconds_by_rank: Mapping[int, float]
    code: str | None
    batches: int | None

    @property
    def longest_seconds(self) -> float:
        """Seconds of the rank with the longest break, for which the job waits."""
        return max(self.seconds_by_rank.values())


def _breaks(table: JobStepTimes, records: Sequence[HookedRank]) -> dict[int, _Break]:
    """Return number of a step -> the break after it, for the steps that count; of several kinds the longest one's."""
    lines_by_step: dict[int, list[tuple[int, lines.HookedBreakLine]]] = {}
    first = int(table.numbers[0])
    last = int(table.numbers[-1])
    for record in records:
        if record.rank.rank not in table.ranks:
            continue
        for line in record.breaks:
            is_possible = 0 < line.seconds < _LONGEST_BREAK_SECONDS  # False for NaN
            if is_possible and first <= line.after_step <= last:
                lines_by_step.setdefault(line.after_step, []).append((record.rank.rank, line))
    return {step: _joined_break(of_step) for step, of_step in sorted(lines_by_step.items())}


def _joined_break(rank_lines: Iterable[tuple[int, lines.HookedBreakLine]]) -> _Break:
    """Return the breaks of all ranks after one step as one; its kind and line are those of the longest."""
    ordered = sorted(rank_lines, key=lambda pair: pair[1].seconds)
    seconds_by_rank: dict[int, float] = {}
    for rank, line in ordered:
        seconds_by_rank[rank] = seconds_by_rank.get(rank, 0.0) + line.seconds
    _, longest = ordered[-1]
    kind = longest.kind if longest.kind in BREAK_NAMES else "other"
    return _Break(kind, seconds_by_rank, longest.line, longest.evaluated_batches)


def _without_waits_for_breaks(table: JobStepTimes, breaks: Mapping[int, _Break]) -> JobStepTimes:
    """Return the table without the time in which ranks waited for the break of another rank.

    They wait in the step after the break, up to the difference of the breaks.
    """
    if len(table.ranks) < 2 or not breaks:
        return table
    seconds = table.seconds.copy()
    least_seconds = np.zeros_like(seconds) if table.mixed_reason else table.own
    position_by_number = {int(number): position for position, number in enumerate(table.numbers)}
    for after_step, of_ranks in breaks.items():
        position = position_by_number.get(after_step + 1)
        if position is None:
            continue
        for row, rank in enumerate(table.ranks):
            waited = of_ranks.longest_seconds - of_ranks.seconds_by_rank.get(rank, 0.0)
            seconds[row, position] = max(seconds[row, position] - waited, least_seconds[row, position])
    return replace(table, seconds=seconds)


def _rare_breaks(breaks: Mapping[int, _Break], table: JobStepTimes) -> list[RareWork]:
    """Return the breaks of each kind as one rare work; the job waits for the rank with the longest."""
    works = []
    for kind in dict.fromkeys(of_ranks.kind for of_ranks in breaks.values()):
        of_kind = {step: of_ranks for step, of_ranks in breaks.items() if of_ranks.kind == kind}
        seconds_by_step = {step: of_ranks.longest_seconds for step, of_ranks in of_kind.items()}
        ranks = sorted(set[int]().union(*(of_ranks.seconds_by_rank for of_ranks in of_kind.values())))
        work = _rare_work(kind, ranks, seconds_by_step, table, is_break=True)
        longest = max(of_kind.values(), key=lambda of_ranks: of_ranks.longest_seconds)
        works.append(replace(work, code=longest.code, batches=longest.batches))
    return works


def _rare_work(
    kind: str, ranks: Sequence[int], seconds_by_step: Mapping[int, float], table: JobStepTimes, *, is_break: bool
) -> RareWork:
    """Return rare work with what it costs a step.

    Args:
        kind: as in `RareWork`.
        ranks: likewise.
        seconds_by_step: number of the step -> seconds that it took there.
        table: the steps that count.
        is_break: as in `RareWork`.
    """
    steps = tuple(sorted(seconds_by_step))
    mean_seconds = statistics.fmean(seconds_by_step.values())
    distance = _distance(steps, observed_steps=int(table.numbers[-1] - table.numbers[0]) + 1)
    seconds_per_step = None
    if distance is not None:
        seconds_per_step = mean_seconds / distance
    elif len(steps) > 1:
        seconds_per_step = math.fsum(seconds_by_step.values()) / len(table.numbers)
    return RareWork(kind, is_break, tuple(ranks), steps, mean_seconds, distance, seconds_per_step)


def _distance(steps: Sequence[int], observed_steps: int) -> float | None:
    """Return the steps from one time to the next; None for a single time, or unequal distances.

    Steps that are not timed, such as profiled ones, hide a time now and then: 9, 19, 39 are 10 apart too. But 12 and 14
    alone, of 100 steps, are not 2 apart: there would be 50 of them.

    Args:
        steps: numbers of the steps, in rising order.
        observed_steps: from the first to the last step that was looked at.
    """
    if len(steps) < 2:
        return None
    gaps = [later - earlier for earlier, later in itertools.pairwise(steps)]
    usual = statistics.median_low(gaps)
    tolerance = max(1.0, _GAP_TOLERANCE * usual)
    periods = 0
    for gap in gaps:
        periods_in_gap = max(1, round(gap / usual))
        if abs(gap - periods_in_gap * usual) > tolerance:
            return None
        periods += periods_in_gap
    distance = (steps[-1] - steps[0]) / periods
    is_often_enough = len(steps) >= _LEAST_REGULAR_SHARE * math.floor(observed_steps / distance)
    return distance if is_often_enough else None
