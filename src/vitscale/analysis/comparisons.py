"""Curve against curve at equal rank count: is one engine faster than the other, or is the difference noise?"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vitscale.analysis.scaling import CurveResult
from vitscale.analysis.statistics import Comparison, adjusted, compare, corrected
from vitscale.analysis.trials import TrialResult
from vitscale.engines import of_engine
from vitscale.engines.checks import computation
from vitscale.trial.trial import WRAPPER_FIELDS, Mode

ENGINE = "engine"
"""What varies where curves differ in more than one field of how training is distributed."""
_WRAPPER_FIELDS = frozenset(f"train.{field}" for field in WRAPPER_FIELDS)


@dataclass(frozen=True)
class CurveComparison:
    """Epoch seconds of `first` against those of `second`, both on `gpus` ranks."""

    mode: Mode
    gpus: int
    fields: tuple[str, ...]
    """The swept fields in which the curves differ: one, or several that all say how training is distributed."""
    first: str
    second: str
    first_trial: str
    second_trial: str
    result: Comparison


@dataclass(frozen=True)
class AgainstReference:
    """Curves that may be compared on `gpus` ranks, each held against one of them."""

    mode: Mode
    gpus: int
    varies: str
    """The swept field, or `ENGINE`."""
    reference: str
    reference_trial: str
    others: tuple[CurveComparison, ...]
    """The others as `first`, the reference as `second`; the fastest first."""


def compare_curves(
    curves: Sequence[CurveResult], trials: Mapping[str, TrialResult], combine_unlike: bool
) -> tuple[CurveComparison, ...]:
    """All pairs of curves of one mode that differ in one swept field, fields of the data excepted.

    An engine with its options counts as one field. Epochs over different data are different work, and a difference in
    two things at once explains nothing. A trial that drifts is not compared, nor are engines that train otherwise than
    each other. Verdicts follow Holm's correction for all
    pairs of trials that are compared; a pair that two modes share is tested once.
    """
    comparisons = []
    for first, second in itertools.combinations(curves, 2):
        if first.mode != second.mode or not _apart(first, second):
            continue
        opposite = {point.gpus: point.trial_id for point in second.points}
        for point in first.points:
            other = opposite.get(point.gpus, point.trial_id)
            if other != point.trial_id and _like(trials[point.trial_id], trials[other], combine_unlike):
                comparisons.append(_compared(first, point.trial_id, second, other, point.gpus, trials))
    results = corrected([comparison.result for comparison in comparisons], list(map(_pair, comparisons)))
    return tuple(replace(comparison, result=result) for comparison, result in zip(comparisons, results, strict=True))


def pairs_tested(comparisons: Sequence[CurveComparison]) -> int:
    """Number of different pairs of trials that were tested, for which Holm's correction is made."""
    return len({_pair(comparison) for comparison in comparisons if comparison.result.p is not None})


def _pair(comparison: CurveComparison) -> frozenset[str]:
    return frozenset((comparison.first_trial, comparison.second_trial))


def against_references(
    curves: Sequence[CurveResult], trials: Mapping[str, TrialResult], comparisons: Sequence[CurveComparison]
) -> tuple[AgainstReference, ...]:
    """A readable number of comparisons: n - 1 for n curves that differ in one thing, each against one reference.

    The reference is DDP without options where it is among them, else the fastest.

    Args:
        curves: the compared curves.
        trials: by identity.
        comparisons: which pairs may be compared (`compare_curves`).
    """
    allowed = {_pair(comparison): comparison.result.p_adjusted for comparison in comparisons}
    groups: dict[tuple[Mode, int, str, str, str], dict[str, CurveResult]] = {}
    for curve in curves:
        for varies in dict.fromkeys(map(_thing, curve.labels)):
            shared = json.dumps(_shared(curve, varies), sort_keys=True, default=str)
            for point in curve.points:
                if trials[point.trial_id].comparable_costs:
                    computed = computation(trials[point.trial_id].trial)
                    group = groups.setdefault((curve.mode, point.gpus, varies, shared, computed), {})
                    group.setdefault(point.trial_id, curve)
    references = []
    for (mode, gpus, varies, _, _), members in groups.items():
        reference = _reference(members, trials)
        others = [
            replace(compared, result=adjusted(compared.result, allowed[_pair(compared)]))
            for trial_id, curve in members.items()
            if frozenset((trial_id, reference)) in allowed
            for compared in [_compared(curve, trial_id, members[reference], reference, gpus, trials)]
        ]
        if others:
            fields = {field for comparison in others for field in comparison.fields}
            references.append(
                AgainstReference(
                    mode=mode,
                    gpus=gpus,
                    varies=next(iter(fields)) if len(fields) == 1 else varies,
                    reference=members[reference].name,
                    reference_trial=reference,
                    others=tuple(sorted(others, key=lambda comparison: -comparison.result.ratio.value)),
                )
            )
    return tuple(references)


def _reference(members: Mapping[str, CurveResult], trials: Mapping[str, TrialResult]) -> str:
    """The trial of a group that the others are held against: the usual engine without options, else the fastest."""

    def distance(trial_id: str) -> tuple[bool, int, float]:
        labels = members[trial_id].labels
        options = len(_WRAPPER_FIELDS & labels.keys())
        is_usual = of_engine(str(labels.get("train.engine"))).usual
        epoch = trials[trial_id].epoch_seconds
        return not is_usual, options if is_usual else 0, epoch.value if epoch else 0.0

    return min(members, key=distance)


def _thing(field: str) -> str:
    return ENGINE if field in _WRAPPER_FIELDS else field


def _shared(curve: CurveResult, varies: str) -> dict[str, Any]:
    """The labels that have nothing to do with what varies."""
    return {field: value for field, value in curve.labels.items() if _thing(field) != varies}


def _apart(first: CurveResult, second: CurveResult) -> tuple[str, ...]:
    """The fields in which two curves differ, if these are one thing and not the data; else none."""
    fields = dict.fromkeys([*first.labels, *second.labels])
    differing = tuple(field for field in fields if first.labels.get(field) != second.labels.get(field))
    one_thing = len(set(map(_thing, differing))) == 1
    return differing if one_thing and not differing[0].startswith("data.") else ()


def _like(ours: TrialResult, theirs: TrialResult, combine_unlike: bool) -> bool:
    if computation(ours.trial) != computation(theirs.trial):
        return False
    return bool(ours.comparable_costs and theirs.comparable_costs) and not ours.unlike(theirs, combine_unlike)


def _compared(
    first: CurveResult, trial: str, second: CurveResult, other: str, gpus: int, trials: Mapping[str, TrialResult]
) -> CurveComparison:
    return CurveComparison(
        mode=first.mode,
        gpus=gpus,
        fields=_apart(first, second),
        first=first.name,
        second=second.name,
        first_trial=trial,
        second_trial=other,
        result=compare(
            trials[trial].comparable_costs, trials[other].comparable_costs, (trials[trial].looked, trials[other].looked)
        ),
    )
