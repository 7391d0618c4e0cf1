"""Causes that make the other ranks wait: batches of unequal size, and one rank that is slower in its own work."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from vitscale.base.arrays import FloatArray
from vitscale.explanation.cause import SlowCause, is_worth_naming, saving_without
from vitscale.explanation.code_lines import line_of_slow_rank
from vitscale.explanation.intervals import is_above_zero, step_interval
from vitscale.explanation.parts import JobParts
from vitscale.explanation.step_table import WORK_PARTS, JobStepTimes, WorkPart, summed
from vitscale.present.estimate import Estimate
from vitscale.present.units import percent, seconds

_FEWEST_TESTED_STEPS = 6
"""Fewest steps that a slow rank is tested on; of fewer, as of traced ones, it must be clearly slower in each."""
_FEWEST_STEPS = 3
_CLEAR_SHARE = 0.05
"""Share of the step by which a rank must then be slower."""
_EXPLAINED_SHARE = 0.25
"""Share of the differences between ranks that their images must explain: a correlation of a half."""
WORK_WORDS: dict[WorkPart, str] = {
    "data": "waiting for data",
    "copy": "copying to the device",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "the optimizer",
    "launch_gaps": "launch gaps",
    "other": "own code outside of the passes",
}


@dataclass(frozen=True)
class RankCauses:
    """Causes that make ranks wait, and the steps as they would be without these."""

    causes: tuple[SlowCause, ...]
    table: JobStepTimes


def rank_causes(parts: JobParts) -> RankCauses:
    """Return the causes that make ranks wait for each other."""
    table = parts.table
    if len(table.ranks) < 2 or not table.compares_ranks:
        return RankCauses((), table)
    causes = []
    uneven = _uneven_batches(parts, table)
    if uneven is not None:
        causes.append(uneven.cause)
        table = uneven.table
    slow = _slow_rank(parts, table)
    if slow is not None:
        causes.append(slow.cause)
        table = slow.table
    return RankCauses(tuple(causes), table)


@dataclass(frozen=True)
class _Repaired:
    """A cause, and the steps without it."""

    cause: SlowCause
    table: JobStepTimes


def _compared(table: JobStepTimes) -> FloatArray:
    """Return the work that ranks are compared by, (R, S)."""
    return summed(table.compared_work)


def _uneven_batches(parts: JobParts, table: JobStepTimes) -> _Repaired | None:
    """Return the cause that ranks have unequal batches, where their work follows their images; else None.

    Within a step, a rank's work is compared with its images: work - mean work = slope x (images - mean images). The
    job waits for the rank with the most images, that is slope x (largest - mean images).
    """
    if bool(np.isnan(table.images).any()):
        return None
    more_images = table.images - table.images.mean(axis=0)
    more_work = _compared(table) - _compared(table).mean(axis=0)
    squares = float((more_images**2).sum())
    if not squares > 0:
        return None
    slope = float((more_images * more_work).sum()) / squares
    explained_share = slope**2 * squares / max(float((more_work**2).sum()), 1e-300)
    follows_images = is_above_zero((more_images * more_work).sum(axis=0)) and explained_share > _EXPLAINED_SHARE
    if not follows_images:
        return None
    cost = step_interval(slope * more_images.max(axis=0))
    if not is_worth_naming(cost, parts.mean_step_seconds):
        return None
    largest = float((table.images.max(axis=0) / table.images.mean(axis=0)).mean())
    evidence = (
        f"{_who_has_most_images(table)}: the largest batch of a step is {largest:.2f} times the mean one, and at "
        f"{seconds(slope)} an image the other ranks wait {seconds(cost.value)} a step for it"
    )
    change = (
        "Give every rank equal batches (a DistributedSampler, drop_last=True), or group images of one size, so that a "
        "step's batches take equally long on all ranks"
    )
    cause = SlowCause(
        "uneven-batches", "waits for ranks with larger batches", evidence, change, cost, cost, weight=cost.value
    )
    without = {**table.work, "forward": table.work["forward"] - slope * more_images}
    return _Repaired(cause, replace(table, work=without))


def _who_has_most_images(table: JobStepTimes) -> str:
    """Return a clause on the rank with the most images: always the same one, or another one from step to step."""
    rows = table.images.argmax(axis=0)
    if bool((rows == rows[0]).all()):
        return f"Rank {table.ranks[rows[0]]} always has the most images"
    return "The slowest rank changes from step to step, with the number of its images"


def _slow_rank(parts: JobParts, table: JobStepTimes) -> _Repaired | None:
    """Return the cause that one rank is slower than the others in its own work; None where that is chance, or little.

    Args:
        parts: the job.
        table: its steps, without what unequal batches do to them.
    """
    work = _compared(table)
    row = int(work.mean(axis=1).argmax())
    margins = work[row] - np.median(np.delete(work, row, axis=0), axis=0)  # (S,)
    if not _is_slower(margins, parts.step.value, ranks=len(work)):
        return None
    part = _slow_part(table, row)
    excess = step_interval(margins)
    repaired = table.compared_work[part].copy()
    repaired[row] = np.maximum(0.0, repaired[row] - excess.value)
    saving = saving_without(table, {part: repaired})
    if not is_worth_naming(saving, parts.mean_step_seconds):
        return None
    share_of_steps = float((work.argmax(axis=0) == row).mean())
    cause = _slow_rank_cause(parts, row, part, excess, saving, share_of_steps)
    return _Repaired(cause, _with_compared(table, part, repaired))


def _is_slower(margins: FloatArray, step_seconds: float, ranks: int) -> bool:
    """Whether a rank is slower than the others beyond chance.

    Args:
        margins: how much more work it has than the median of the others, by step, (S,).
        step_seconds: the usual step.
        ranks: number of ranks, of which it was picked as the slowest.
    """
    if len(margins) >= _FEWEST_TESTED_STEPS:
        return is_above_zero(margins, comparisons=ranks)
    is_clear = bool((margins > _CLEAR_SHARE * step_seconds).all())
    return len(margins) >= _FEWEST_STEPS and is_clear


def _slow_part(table: JobStepTimes, row: int) -> WorkPart:
    """Return the part in which a rank exceeds the median of the others most; `row` is its row in the table."""
    excess_by_part: dict[WorkPart, float] = {}
    for part in WORK_PARTS:
        values = table.compared_work.get(part)
        if values is not None and not np.isnan(values).all():
            means = np.nanmean(values, axis=1)
            excess_by_part[part] = float(means[row] - np.median(np.delete(means, row)))
    return max(excess_by_part, key=excess_by_part.__getitem__)


def _median_of_others(work: FloatArray, row: int) -> float:
    """Return the median over all ranks but one of their mean work, in seconds; `work` is (R, S), `row` the one's."""
    others = np.delete(work, row, axis=0)
    mean_by_rank = np.nanmean(others, axis=1)
    return float(np.median(mean_by_rank))


def _slow_rank_cause(
    parts: JobParts, row: int, part: WorkPart, excess: Estimate, saving: Estimate, share_of_steps: float
) -> SlowCause:
    """Return the cause that a rank is slow.

    Args:
        parts: the job.
        row: the rank's row in the table.
        part: the part in which it is slower.
        excess: seconds by which it is slower than the median of the others.
        saving: what the job would save.
        share_of_steps: in which it is the slowest.
    """
    record = parts.records[row]
    others = [other for other in parts.records if other is not record]
    code = line_of_slow_rank(record, others, part)
    usual = _median_of_others(parts.table.compared_work[part], row)
    rank = record.rank.rank
    location = f", most of it at {code}" if code is not None else ""
    evidence = (
        f"Rank {rank} on {record.rank.host} is slower than the others by {seconds(excess.value)} a step, in "
        f"{WORK_WORDS[part]} ({seconds(usual + excess.value)} against {seconds(usual)}{location}); it is the "
        f"slowest in {percent(share_of_steps)} of steps, and the others wait for it"
    )
    return SlowCause(
        kind="slow-rank",
        clause=f"is rank {rank} being slower in {WORK_WORDS[part]}",
        evidence=evidence,
        change=_change_for(part, rank, record.rank.host, has_line=code is not None),
        cost=excess,
        saving=saving,
        weight=saving.value,
        ranks=(rank,),
        hosts=(record.rank.host,),
        code=code,
    )


def _change_for(part: WorkPart, rank: int, host: str, *, has_line: bool) -> str:
    """Return what to change where one rank is slower in a part."""
    if part == "data":
        return f"Compare the disk and the cores of {host} with the others', and its share of the data (vitscale check)"
    if part == "other":
        line = "that line" if has_line else "what only this rank does between the passes"
        return f"Do {line} on no rank or on all of them, less often, or beside training in a thread"
    if has_line and part in ("forward", "backward"):
        return f"Look at that line on rank {rank}; if it does the same work there, compare the machines: vitscale check"
    return f"Compare {host} with the other machines: clocks, other programs, cores (vitscale check)"


def _with_compared(table: JobStepTimes, part: WorkPart, values: FloatArray) -> JobStepTimes:
    """Return the table with other times in a part that ranks are compared by."""
    if part == "backward" and table.mixed_reason:
        return replace(table, first_bucket=values)
    return replace(table, work={**table.work, part: values})


def jitter_seconds(table: JobStepTimes) -> float | None:
    """Return the mean seconds that a rank waits for whichever is slowest, in steps without these causes.

    None where ranks cannot be compared.
    """
    if len(table.ranks) < 2 or not table.compares_ranks:
        return None
    work = _compared(table)
    return float((work.max(axis=0) - work.mean(axis=0)).mean())
