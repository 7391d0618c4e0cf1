"""Puts the steps that ranks recorded into arrays of R ranks by S steps; times are in seconds, NaN where unknown.

    work      what a rank does itself in a step, by part (`WORK_PARTS`)
    exchange  the rest of the step: it waits for the slowest rank, or transfers

A collective makes all ranks' steps equally long, so that only the work says which rank is slow. Per step,

    slowest  = the largest work of all ranks
    waiting  = slowest - work of the rank            waiting for the slowest rank
    transfer = mean step of all ranks - slowest

This needs the work of every rank up to its last gradient. Where that is unknown, backward holds the exchange too
(`mixed_reason`); the time to the first collective then still compares ranks, if the hook saw it. Where ranks are
missing, the exchange is known, but not who waits in it (`untold_reason`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from vitscale.base.arrays import BoolArray, FloatArray
from vitscale.explanation.rank_record import HookedRank
from vitscale.hook import lines
from vitscale.present.units import counted

WorkPart = Literal["data", "copy", "forward", "backward", "optimizer", "launch_gaps", "other"]
WORK_PARTS: tuple[WorkPart, ...] = get_args(WorkPart)
"""Parts of a rank's own work. Copies to the device and launch gaps are known on a GPU only, from profiled steps."""
StepNumbers = NDArray[np.int64]

MOST_STEPS = 20_000
"""Steps of a rank that are looked at, the last ones; more would only take longer."""
_LONGEST_SECONDS = 1e6
"""Longest believable step: 11 days. A longer one comes from a broken clock or file."""
_LARGEST_NUMBER = 2**62
_MOST_IMAGES = 1e9
_PARTS_TOLERANCE = 1.01
"""How many times as long as its step the parts of a step may be together: clocks are read one after the other."""
_LEAST_KNOWN_SHARE = 0.5
"""Share of the steps in which a rank's own backward must be known for the others to be left out."""

FEW_RANKS = "the records of {missing} are missing"
NO_OWN_BACKWARD = "nothing records when each rank's own gradients were ready ({strategy})"


@dataclass(frozen=True, eq=False)
class JobStepTimes:
    """The times of S steps on R ranks."""

    ranks: tuple[int, ...]
    """Numbers of the ranks, in rising order: the first axis of all arrays."""
    numbers: StepNumbers
    """Numbers of the steps, (S,), in rising order: the second axis."""
    seconds: FloatArray
    """Lengths of the steps, (R, S)."""
    work: Mapping[WorkPart, FloatArray]
    """Part -> seconds, (R, S). The exchange is what these leave of `seconds`, unless `mixed_reason` is set."""
    images: FloatArray
    """Images of each rank, (R, S)."""
    mixed_reason: str = ""
    """Why backward holds the exchange too; empty: it does not."""
    untold_reason: str = ""
    """Why waiting and transfer cannot be told apart in the exchange; empty: they can, unless backward holds it."""
    first_bucket: FloatArray | None = None
    """Seconds from backward's start to the first collective, (R, S); None where unknown, or not needed."""

    @property
    def own(self) -> FloatArray:
        """Seconds of all known work, (R, S)."""
        return summed(self.work)

    @property
    def slowest_own(self) -> FloatArray:
        """The largest work of all ranks, (S,)."""
        largest: FloatArray = self.own.max(axis=0)
        return largest

    @property
    def mean_seconds(self) -> FloatArray:
        """Length of each step, the mean over ranks, (S,)."""
        mean: FloatArray = self.seconds.mean(axis=0)
        return mean

    @property
    def waiting_is_known(self) -> bool:
        """Whether waiting for the slowest rank and transfer are known."""
        return not self.mixed_reason and not self.untold_reason

    @property
    def compares_ranks(self) -> bool:
        """Whether the ranks' work is known apart from waiting for each other, at least to the first collective."""
        return not self.mixed_reason or self.first_bucket is not None

    @property
    def compared_work(self) -> Mapping[WorkPart, FloatArray]:
        """The work that ranks are compared by; of backward only what comes before the first collective, if need be."""
        if self.mixed_reason and self.first_bucket is not None:
            return {**self.work, "backward": self.first_bucket}
        return self.work

    def part_is_known(self, part: WorkPart) -> bool:
        """Whether a part is known in any step."""
        return part in self.work and not bool(np.isnan(self.work[part]).all())

    def selected(self, is_selected: BoolArray) -> JobStepTimes:
        """Return the table of some steps; `is_selected` is (S,)."""
        return replace(
            self,
            numbers=self.numbers[is_selected],
            seconds=self.seconds[:, is_selected],
            work={part: values[:, is_selected] for part, values in self.work.items()},
            images=self.images[:, is_selected],
            first_bucket=None if self.first_bucket is None else self.first_bucket[:, is_selected],
        )


def summed(work: Mapping[WorkPart, FloatArray]) -> FloatArray:
    """Return the seconds of all parts together, (R, S); unknown cells count as 0."""
    total: FloatArray = np.nansum(np.stack([*work.values()]), axis=0)
    return total


class ReadSteps(NamedTuple):
    """The steps of all ranks, and what was left out."""

    table: JobStepTimes
    records: tuple[HookedRank, ...]
    """The record of each rank, in the order of the table's ranks."""
    notes: tuple[str, ...]
    """A sentence for each reason for which steps or files were left out."""


def read_steps(records: Sequence[HookedRank]) -> ReadSteps:
    """Return the timed steps that all ranks have in common.

    Left out are profiled and tried steps, the one after them (the profiler writes its file then), and steps whose times
    are impossible. Of several records of one rank the longest counts.
    """
    notes: list[str] = []
    record_by_rank = _longest_records(records, notes)
    steps_by_rank = {rank: _timed_steps(record, notes) for rank, record in record_by_rank.items()}
    empty_ranks = [rank for rank, steps in steps_by_rank.items() if not steps]
    if empty_ranks and len(empty_ranks) < len(steps_by_rank):
        notes.append(f"{counted(len(empty_ranks), 'rank')} recorded no step that can be timed: left out")
        steps_by_rank = {rank: steps for rank, steps in steps_by_rank.items() if steps}
    numbers = _common_numbers(steps_by_rank.values())
    rows = [_steps_with_numbers(steps, numbers) for steps in steps_by_rank.values()]
    ranks = tuple(steps_by_rank)
    used_records = tuple(record_by_rank[rank] for rank in ranks)
    return ReadSteps(_table(ranks, numbers, rows, used_records), used_records, tuple(notes))


def _steps_with_numbers(
    steps: Mapping[int, lines.HookedStepLine], numbers: Iterable[int]
) -> list[lines.HookedStepLine]:
    return [steps[number] for number in numbers]


def world_size(records: Iterable[HookedRank]) -> int:
    """Return the number of ranks of the job: as they state it, or as many as have a record."""
    stated_sizes = [record.rank.world_size or 1 for record in records]
    numbers = {record.rank.rank for record in records}
    return max([*stated_sizes, len(numbers), 1])


def _longest_records(records: Sequence[HookedRank], notes: list[str]) -> dict[int, HookedRank]:
    """Return rank -> its record with the most steps, in the order of ranks; adds a note where there are several."""
    record_by_rank: dict[int, HookedRank] = {}
    for record in records:
        number = record.rank.rank
        earlier = record_by_rank.get(number)
        if earlier is not None:
            notes.append(f"rank {number} has several records, as after a restart: the longest counts")
        if earlier is None or len(record.steps) > len(earlier.steps):
            record_by_rank[number] = record
    return dict(sorted(record_by_rank.items()))


def _timed_steps(record: HookedRank, notes: list[str]) -> dict[int, lines.HookedStepLine]:
    """Return number -> step, of a rank's steps that may be timed; adds a note on impossible ones."""
    steps: dict[int, lines.HookedStepLine] = {}
    impossible = 0
    follows_profile = False
    for step in record.steps[-MOST_STEPS:]:
        is_plain = not step.profiled and step.tried is None
        if not _is_possible(step):
            impossible += 1
        elif is_plain and not follows_profile:
            steps[step.number] = step
        follows_profile = not is_plain
    if impossible:
        notes.append(f"rank {record.rank.rank}: {counted(impossible, 'step')} with impossible times left out")
    return steps


def _is_possible(step: lines.HookedStepLine) -> bool:
    """Whether the numbers of a step can be true: finite, not negative, and its parts no longer than the step."""
    if not 0 <= step.number <= _LARGEST_NUMBER:
        return False
    if not 0 < step.seconds <= _LONGEST_SECONDS:  # False for NaN
        return False
    parts = _known_parts(step)
    if not all(0 <= seconds <= _LONGEST_SECONDS for seconds in (*parts, step.own_backward_seconds or 0.0)):
        return False
    return math.fsum(parts) <= _PARTS_TOLERANCE * step.seconds


def _known_parts(step: lines.HookedStepLine) -> list[float]:
    """Return the seconds of those parts of a step that are known; they do not overlap."""
    parts = (
        step.data_seconds,
        step.forward_seconds,
        step.backward_seconds,
        step.optimizer_seconds,
        step.other_seconds,
    )
    return [seconds for seconds in parts if seconds is not None]


def _common_numbers(steps_by_rank: Iterable[Mapping[int, lines.HookedStepLine]]) -> list[int]:
    """Return the numbers of the steps that every rank has, in rising order."""
    number_sets = [set(steps) for steps in steps_by_rank]
    return sorted(set.intersection(*number_sets)) if number_sets else []


def _table(
    ranks: tuple[int, ...],
    numbers: Sequence[int],
    rows: Sequence[Sequence[lines.HookedStepLine]],
    records: Sequence[HookedRank],
) -> JobStepTimes:
    """Return the table of steps.

    Args:
        ranks: numbers of the ranks.
        numbers: numbers of the steps.
        rows: for each rank its steps, one for each number.
        records: for each rank its record.
    """
    columns = _Columns(rows)
    seconds = columns.of("seconds")
    work: dict[WorkPart, FloatArray] = {
        "data": columns.of("data_seconds"),
        "forward": columns.of("forward_seconds"),
        "backward": columns.of("backward_seconds"),
        "optimizer": columns.of("optimizer_seconds"),
    }
    work["other"] = np.maximum(0.0, seconds - summed(work))
    table = JobStepTimes(ranks, np.array(numbers, dtype=np.int64), seconds, work, _believable(columns.of("images")))
    return _without_exchange(table, columns, records)


class _Columns:
    """The fields of steps as arrays (R, S)."""

    def __init__(self, rows: Sequence[Sequence[lines.HookedStepLine]]) -> None:
        self._rows = rows
        self._shape = (len(rows), len(rows[0]) if rows else 0)

    def of(self, field: str) -> FloatArray:
        """Return a field of all steps; NaN where it is None."""
        values = [getattr(step, field) for step in itertools.chain.from_iterable(self._rows)]
        return np.array(values, dtype=np.float64).reshape(self._shape)


def _believable(images: FloatArray) -> FloatArray:
    """Return counts of images; NaN for those that no batch has."""
    is_believable = (images > 0) & (images < _MOST_IMAGES)
    return np.where(is_believable, images, np.nan)


def _without_exchange(table: JobStepTimes, columns: _Columns, records: Sequence[HookedRank]) -> JobStepTimes:
    """Return the table with the exchange of gradients taken out of backward, where ranks exchange any.

    Where a rank's own backward is known, it takes the place of the whole one, in the steps in which it is known on all
    ranks. Where it is not, backward stays whole, with the reason; ranks may then be compared by what they do before the
    first collective.
    """
    ranks_of_job = world_size(records)
    if ranks_of_job == 1:
        return table
    missing_ranks = ranks_of_job - len(table.ranks)
    if missing_ranks > 0:
        table = replace(table, untold_reason=FEW_RANKS.format(missing=counted(missing_ranks, "rank")))
    own_backward = columns.of("own_backward_seconds")
    is_known: BoolArray = np.asarray(~np.isnan(own_backward).any(axis=0))
    is_mostly_known = is_known.size > 0 and bool(is_known.mean() >= _LEAST_KNOWN_SHARE)
    if is_mostly_known:
        backward = np.fmin(own_backward, table.work["backward"])
        return replace(table, work={**table.work, "backward": backward}).selected(is_known)
    first_bucket = columns.of("first_bucket_seconds")
    ranks_can_be_compared = first_bucket.size > 0 and not bool(np.isnan(first_bucket).any())
    return replace(
        table,
        mixed_reason=_no_own_backward(records),
        first_bucket=first_bucket if ranks_can_be_compared else None,
    )


def _no_own_backward(records: Sequence[HookedRank]) -> str:
    strategies = {record.model.strategy for record in records if record.model is not None}
    return NO_OWN_BACKWARD.format(strategy=" and ".join(sorted(strategies)) or "unknown strategy")
