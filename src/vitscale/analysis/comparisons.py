"""Curve against curve at equal rank count: is one engine faster than the other, or is the difference noise?"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vitscale.analysis.environments import differences
from vitscale.analysis.scaling import CurveResult
from vitscale.analysis.statistics import Comparison, compare
from vitscale.analysis.trials import TrialResult
from vitscale.trial import Mode


@dataclass(frozen=True)
class CurveComparison:
    """Epoch seconds of `first` against those of `second`, both on `gpus` ranks."""

    mode: Mode
    gpus: int
    field: str
    """The one swept field in which the curves differ."""
    first: str
    second: str
    first_trial: str
    second_trial: str
    result: Comparison


def compare_curves(
    curves: Sequence[CurveResult], trials: Mapping[str, TrialResult], combine_unlike: bool
) -> tuple[CurveComparison, ...]:
    """All pairs of curves of one mode that differ in one swept field, and that not a field of the data.

    Epochs over different data are different work, and a difference in two fields at once explains nothing.
    """
    found = []
    for first, second in itertools.combinations(curves, 2):
        fields = [f for f in first.labels.keys() | second.labels.keys() if first.labels.get(f) != second.labels.get(f)]
        if first.mode != second.mode or len(fields) != 1 or fields[0].startswith("data."):
            continue
        opposite = {point.gpus: point.trial_id for point in second.points}
        for point in first.points:
            other_id = opposite.get(point.gpus, point.trial_id)
            if other_id == point.trial_id:
                continue
            ours, theirs = trials[point.trial_id], trials[other_id]
            if not ours.epoch_costs or not theirs.epoch_costs:
                continue
            if not combine_unlike and differences(ours.surroundings, theirs.surroundings):
                continue
            found.append(
                CurveComparison(
                    mode=first.mode,
                    gpus=point.gpus,
                    field=fields[0],
                    first=first.name,
                    second=second.name,
                    first_trial=point.trial_id,
                    second_trial=other_id,
                    result=compare(ours.epoch_costs, theirs.epoch_costs),
                )
            )
    return tuple(found)
