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
from typing import Literal, get_args

import numpy as np

from vitscale.base.arrays import FloatArray
from vitscale.explanation.intervals import step_interval
from vitscale.explanation.rank_record import HookedRank
from vitscale.explanation.rare_work import RareWork, usual_steps
from vitscale.explanation.start_up_steps import start_up_steps
from vitscale.explanation.step_table import WORK_PARTS, StepTable, WorkPart, read_steps, world_size
from vitscale.explanation.traced_steps import traced_steps
from vitscale.present.estimate import Estimate

StepPart = Literal[WorkPart, "wait", "transfer", "exchange"]
STEP_PARTS: tuple[StepPart, ...] = (*get_args(WorkPart), "wait", "transfer", "exchange")

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
    table: StepTable
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
    host_data_share: float | None = None
    """On a GPU the share of the step in which the host waited for the loader, which the device may not notice."""

    @property
    def mean_step_seconds(self) -> float:
        """Seconds of the usual step and what rare work adds to it."""
        return _mean_step_seconds(self.step, self.rare)

    @property
    def on_gpu(self) -> bool:
        """Whether the ranks train on a GPU."""
        return any(record.rank.device != "cpu" for record in self.records)

    @property
    def mean_rank(self) -> Mapping[StepPart, float | None]:
        """Part -> mean seconds over ranks; None where it is unavailable on one of them."""
        return {part: _mean_or_none([rank.parts[part] for rank in self.ranks]) for part in STEP_PARTS}

    @property
    def slowest_rank(self) -> RankStepParts | None:
        """The rank with most work of its own; None for one rank, or where ranks cannot be compared."""
        if len(self.ranks) < 2 or self.table.mixed_reason:
            return None
        return max(self.ranks, key=lambda rank: rank.own_seconds)


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
    of_ranks = read.records
    usual = usual_steps(steady, of_ranks)
    notes = [start_up.reason, *read.notes]
    step = step_interval(usual.table.mean_seconds)
    table = usual.table
    unavailable: dict[str, str] = {}
    host_data_share = None
    if any(record.rank.device != "cpu" for record in of_ranks):
        host_data_share = float(np.nansum(steady.work["data"]) / steady.seconds.sum())
        traced = traced_steps(of_ranks, traces, step.value) if traces is not None else None
        notes += traced.notes if traced is not None else ()
        if traced is None or traced.table is None:
            unavailable["parts of a step"] = _ON_A_GPU
        else:
            table = traced.table
    has_parts = "parts of a step" not in unavailable
    if has_parts:
        unavailable |= _unavailable_parts(table)
    return JobParts(
        records=of_ranks,
        world_size=world_size(records),
        table=table,
        step=step,
        timed_steps=len(steady.numbers),
        images_per_second=_images_per_second(steady, step, usual.rare, world_size(records)),
        ranks=_rank_parts(table, of_ranks, step.value) if has_parts else (),
        rare=usual.rare,
        notes=tuple(notes),
        unavailable=unavailable,
        host_data_share=host_data_share,
    )


def _compiles(records: Sequence[HookedRank]) -> bool:
    return any(record.model is not None and record.model.compiled for record in records)


def _images_per_second(table: StepTable, step: Estimate, rare: Sequence[RareWork], ranks: int) -> Estimate | None:
    """Return the images of all ranks per second; None where a batch of any rank is unknown.

    Args:
        table: the steps.
        step: seconds of the usual step.
        rare: what makes the mean step longer.
        ranks: number of ranks of the job.
    """
    has_all_ranks = len(table.ranks) == ranks
    if not has_all_ranks or bool(np.isnan(table.images).any()):
        return None
    mean_step = step.times(_mean_step_seconds(step, rare) / step.value)
    return mean_step.into(float(table.images.sum(axis=0).mean()))


def _mean_step_seconds(step: Estimate, rare: Sequence[RareWork]) -> float:
    """Return the seconds of the usual step and what rare work adds to it; rare work that was seen once adds nothing."""
    return step.value + math.fsum(work.seconds_per_step or 0.0 for work in rare)


def _unavailable_parts(table: StepTable) -> dict[str, str]:
    """Return what is unavailable in a table -> why."""
    unavailable = {}
    if table.mixed_reason:
        unavailable["waiting for other ranks and transfer (they are part of backward)"] = table.mixed_reason
    elif table.untold_reason:
        unavailable["waiting for the slowest rank, apart from transfer"] = table.untold_reason
    return unavailable


def _rank_parts(table: StepTable, records: Sequence[HookedRank], usual_seconds: float) -> tuple[RankStepParts, ...]:
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


def _exchange_parts(table: StepTable, *, own: float, slowest: float, step: float) -> dict[StepPart, float | None]:
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


def _mean_or_none(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return math.fsum(known) / len(known)


def transfer_by_step(table: StepTable) -> FloatArray:
    """Return the transfer of each step, (S,): below 0 now and then, as ranks' steps do not begin together."""
    return table.mean_seconds - table.slowest_own
