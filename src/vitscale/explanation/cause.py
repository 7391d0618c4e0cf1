"""One cause of slow steps: its evidence, the gain that it bounds, and the setting to change.

A cause costs some seconds of each step. Without them a step would take `step - saving`, so that training would be at
most step / (step - saving) times as fast (Amdahl's law); other parts may take the place of what is gone, hence "up to".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from vitscale.base.arrays import FloatArray
from vitscale.explanation.code_lines import CodeLine
from vitscale.explanation.intervals import step_interval
from vitscale.explanation.step_table import JobStepTimes, WorkPart, summed
from vitscale.present.estimate import Estimate

CauseKind = Literal[
    "data-wait", "loader-restarts", "slow-fetches", "copies", "slow-rank", "uneven-batches", "communication",
    "evaluation", "checkpoint", "pause", "periodic-work", "own-code", "too-many-threads", "optimizer", "launch-gaps",
]  # fmt: skip
"""Fixed names of causes, in the JSON too."""
LEAST_SHARE = 0.05
"""Share of the mean step that a cause must cost to be named."""
_LEAST_SURE_SHARE = 0.03
"""Share that it must cost even at the lower end of its interval."""
_MOST_BELIEVABLE_GAIN = 1000.0


@dataclass(frozen=True)
class SlowCause:
    """One cause of slow steps."""

    kind: CauseKind
    clause: str
    """What it does to the step, behind a share of it: "waits for data"."""
    evidence: str
    """A sentence with the figures that it was seen by."""
    change: str
    """The setting to change, with a value; a sentence without its full stop."""
    cost: Estimate | None
    """Seconds of a step that it takes on average, by itself; None where no part of the step bounds it."""
    saving: Estimate | None
    """Seconds by which the job's step would be shorter without it, at most; None where nothing bounds that."""
    weight: float
    """Seconds of a step that it is ranked by among the causes."""
    ranks: tuple[int, ...] = ()
    """The ranks whose fault it is; empty: all."""
    hosts: tuple[str, ...] = ()
    code: CodeLine | None = None

    def share_of(self, step_seconds: float) -> float | None:
        """Return the share of the mean step that it costs the job; None where nothing bounds it."""
        return None if self.saving is None else min(1.0, self.saving.value / step_seconds)

    def gain_of(self, step_seconds: float) -> float | None:
        """Return how many times as fast training would be without it, at most; None where nothing bounds it."""
        if self.saving is None:
            return None
        remaining = step_seconds - self.saving.value
        if remaining <= step_seconds / _MOST_BELIEVABLE_GAIN:
            return _MOST_BELIEVABLE_GAIN
        return step_seconds / remaining


def is_worth_naming(saving: Estimate, step_seconds: float, least_share: float = LEAST_SHARE) -> bool:
    """Whether a saving is large enough, and surely not far below that."""
    is_large = saving.value >= least_share * step_seconds
    is_sure = saving.low is None or saving.low >= min(_LEAST_SURE_SHARE, least_share) * step_seconds
    return is_large and is_sure


def saving_without(table: JobStepTimes, changed: Mapping[WorkPart, FloatArray]) -> Estimate:
    """Return the seconds by which the job's step would be shorter if some work took other times.

    The step then lasts until the rank that is slowest then is done. Where ranks cannot be compared, it is the mean over
    ranks of what each saves.

    Args:
        table: the steps.
        changed: part -> the other times, (R, S).
    """
    if not table.compares_ranks:
        saved = [np.nan_to_num(table.work[part] - values) for part, values in changed.items()]
        return step_interval(np.sum(saved, axis=0).mean(axis=0))
    work = table.compared_work
    without = {**work, **changed}
    return step_interval(_slowest(work) - _slowest(without))


def _slowest(work: Mapping[WorkPart, FloatArray]) -> FloatArray:
    """Return the largest work of all ranks in each step, (S,)."""
    largest: FloatArray = summed(work).max(axis=0)
    return largest


def part_cost(table: JobStepTimes, part: WorkPart) -> Estimate:
    """Return the mean seconds of a part over ranks and steps; unknown cells are left out, and one must be known."""
    by_step = np.nanmean(table.work[part], axis=0)
    return step_interval(by_step[~np.isnan(by_step)])
