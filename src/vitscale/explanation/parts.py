"""Divides the usual step of a job into parts, for each rank and for the job as a whole.

    data, copy, forward, backward, optimizer, launch_gaps, other    a rank's own work (`step_table.WORK_PARTS`)
    wait        waiting for the slowest rank
    transfer    the rest of the exchange between ranks
    exchange    both together, where they cannot be told apart

The parts of a rank add up to the mean usual step of the job. The usual step is one without rare work; the mean step is
longer by what rare work adds to each step. On a CPU parts come from the hook's marks in every step, on a GPU from
profiled steps alone, since the host runs ahead of the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np

from vitscale.analysis.statistics import whole_mean
from vitscale.base.arrays import FloatArray
from vitscale.explanation.intervals import step_interval
from vitscale.explanation.rank_record import HookedRank
from vitscale.explanation.rare_work import RareWork, usual_steps
from vitscale.explanation.start_up_steps import start_up_steps
from vitscale.explanation.step_table import WORK_PARTS, JobStepTimes, WorkPart, read_steps, world_size
from vitscale.explanation.traced_steps import traced_steps
from vitscale.present.estimate import Estimate

StepPart = Literal[WorkPart, "wait", "transfer", "exchange"]
STEP_PARTS: tuple[StepPart, ...] = (*get_args(WorkPart), "wait", "transfer", "exchange")

_AHEAD = "on a GPU the host runs ahead and waits for the device only now and then, so that its steps differ anyway"
_ON_A_GPU = "on a GPU only profiled steps say what a step is made of, and there is no usable trace of any"


@dataclass(frozen=True)
class RankStepParts:
    """The mean usual step of one rank."""

    rank: int
    host: str
    seconds: float
    """Length of the step: the same on all ranks that exchange."""
    parts: Mapping[StepPart, float | None]
    """Part -> seconds; None: unavailable. Those that are known add up to `seconds`."""

    @property
    def own_seconds(self) -> float:
        """Seconds of its own work."""
        return math.fsum(self.parts[part] or 0.0 for part in WORK_PARTS)


@dataclass(frozen=True)
class JobParts:
    """What the steps of a job are made of."""

    records: tuple[HookedRank, ...]
    """What the ranks recorded, in the order of `ranks`."""
    world_size: int
    on_gpu: bool
    table: JobStepTimes
    """The usual steps that causes are looked for in: timed ones on a CPU, traced ones on a GPU."""
    step: Estimate
    """Seconds of the mean usual step, with its 95 % interval."""
    timed_steps: int
    """Number of steps that `step` is the mean of."""
    images_per_second: Estimate | None
    """Images of all ranks per second of mean steps; None: unavailable."""
    ranks: tuple[RankStepParts, ...]
    """One for each rank; empty where the parts are unavailable."""
    rare: tuple[RareWork, ...]
    notes: tuple[str, ...]
    """Sentences on what was left out."""
    unavailable: Mapping[str, str] = field(default_factory=dict)
    """What could not be seen -> why."""

    @property
    def mean_step_seconds(self) -> float:
        """Seconds of the usual step and what rare work adds to it."""
        return _mean_step_seconds(self.step, self.rare)

    @property
    def mean_rank(self) -> Mapping[StepPart, float | None]:
        """Part -> mean seconds over ranks; None where it is unavailable on one of them."""
        means: dict[StepPart, float | None] = {}
        for part in STEP_PARTS:
            means[part] = whole_mean([rank.parts[part] for rank in self.ranks])
        return means


def job_parts(records: Sequence[HookedRank], traces: Path | None) -> JobParts | None:
    """Divide the steps of a job; None where no rank finished a step that all others finished too.

    Args:
        records: what the ranks recorded.
        traces: the folder of their traces; None: there is none.
    """
    read = read_steps(records)
    if not len(read.table.numbers):
        return None
    start_up = start_up_steps(read.table.mean_seconds, compiles=_compiles(records))
    steady = read.table.selected(read.table.numbers >= read.table.numbers[start_up.steps])
    on_gpu = any(record.rank.device != "cpu" for record in read.records)
    usual = usual_steps(steady, read.records, looks_into_steps=not on_gpu)
    step = step_interval(usual.table.mean_seconds)
    divided = _divided_on_gpu(read.records, traces, step.value) if on_gpu else _Divided(usual.table)
    has_parts = divided.table is not None
    table = divided.table if divided.table is not None else usual.table
    unavailable = dict(_unavailable_parts(table)) if has_parts else {"parts of a step": _ON_A_GPU}
    if on_gpu:
        unavailable["work done every few steps inside a step"] = _AHEAD
    record_by_rank = {record.rank.rank: record for record in read.records}
    shown_records = tuple(record_by_rank[rank] for rank in table.ranks)
    return JobParts(
        records=shown_records,
        world_size=world_size(records),
        on_gpu=on_gpu,
        table=table,
        step=step,
        timed_steps=len(steady.numbers),
        images_per_second=_images_per_second(steady, step, usual.rare, world_size(records)),
        ranks=_rank_parts(table, shown_records, step.value) if has_parts else (),
        rare=usual.rare,
        notes=(start_up.reason, *read.notes, *divided.notes),
        unavailable=unavailable,
    )


class _Divided(NamedTuple):
    """Steps whose parts are known."""

    table: JobStepTimes | None
    """None: the parts are unknown."""
    notes: tuple[str, ...] = ()


def _divided_on_gpu(records: Sequence[HookedRank], traces: Path | None, usual_seconds: float) -> _Divided:
    """Return the traced steps of a job on GPUs.

    Args:
        records: what the ranks recorded.
        traces: the folder of their traces; None: there is none.
        usual_seconds: length of a step without the profiler.
    """
    if traces is None:
        return _Divided(None)
    traced = traced_steps(records, traces, usual_seconds)
    return _Divided(traced.table, traced.notes)


def _compiles(records: Sequence[HookedRank]) -> bool:
    return any(record.model is not None and record.model.compiled for record in records)


def _images_per_second(table: JobStepTimes, step: Estimate, rare: Sequence[RareWork], ranks: int) -> Estimate | None:
    """Return the images of all ranks per second; None where a batch of any rank is unknown.

    Args:
        table: the steps.
        step: seconds of the usual step.
        rare: what makes the mean step longer than the usual one.
        ranks: number of ranks of the job.
    """
    has_all_ranks = len(table.ranks) == ranks
    if not has_all_ranks or bool(np.isnan(table.images).any()):
        return None
    lengthening = _mean_step_seconds(step, rare) / step.value
    mean_step = step.times(lengthening)
    images_of_all_ranks = table.images.sum(axis=0)
    mean_images = float(images_of_all_ranks.mean())
    return mean_step.into(mean_images)  # images / step, with the interval's ends swapped


def _mean_step_seconds(step: Estimate, rare: Sequence[RareWork]) -> float:
    """Return the seconds of the usual step and what rare work adds to it; rare work that was seen once adds nothing."""
    return step.value + math.fsum(work.seconds_per_step or 0.0 for work in rare)


def _unavailable_parts(table: JobStepTimes) -> dict[str, str]:
    """Return what is unavailable in a table -> why."""
    unavailable = {}
    if table.mixed_reason:
        unavailable["waiting for other ranks and transfer (they are part of backward)"] = table.mixed_reason
    elif table.untold_reason:
        unavailable["waiting for the slowest rank, apart from transfer"] = table.untold_reason
    return unavailable


def _rank_parts(table: JobStepTimes, records: Sequence[HookedRank], usual_seconds: float) -> tuple[RankStepParts, ...]:
    """Return the mean parts of each rank; all ranks' steps have the length of the job's.

    Args:
        table: the steps.
        records: what the ranks recorded, in the order of the table's ranks.
        usual_seconds: length of the job's usual step.
    """
    host_by_rank = {record.rank.rank: record.rank.host for record in records}
    slowest = float(table.slowest_own.mean())
    ranks = []
    for row, rank in enumerate(table.ranks):
        parts: dict[StepPart, float | None] = dict.fromkeys(STEP_PARTS)
        for part in WORK_PARTS:
            if table.part_is_known(part):
                parts[part] = float(np.nanmean(table.work[part][row]))
        own = float(table.own[row].mean())
        parts |= _exchange_parts(table, own=own, slowest=slowest, step=usual_seconds)
        ranks.append(RankStepParts(rank, host_by_rank[rank], usual_seconds, parts))
    return tuple(ranks)


def _exchange_parts(table: JobStepTimes, *, own: float, slowest: float, step: float) -> dict[StepPart, float | None]:
    """Return the parts of a rank's exchange, from means in seconds; those that are unknown, or not asked for, are None.

    Args:
        table: the steps.
        own: the rank's own work.
        slowest: the work of the slowest rank of each step.
        step: the step.
    """
    is_alone = len(table.ranks) == 1 and not table.untold_reason and not table.mixed_reason
    if is_alone or table.mixed_reason:
        return {"wait": None, "transfer": None, "exchange": None}
    if table.untold_reason:
        return {"wait": None, "transfer": None, "exchange": max(0.0, step - own)}
    return {"wait": max(0.0, slowest - own), "transfer": max(0.0, step - slowest), "exchange": None}


def transfer_by_step(table: JobStepTimes) -> FloatArray:
    """Return the transfer of each step, (S,): below 0 now and then, as ranks' steps do not begin together."""
    return table.mean_seconds - table.slowest_own
