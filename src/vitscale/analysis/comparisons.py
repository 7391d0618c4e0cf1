"""Curve against curve at equal rank count: is one engine faster than the other, or is the difference noise?"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
    """Return all pairs of curves of one mode that differ in one swept field, fields of the data excepted.

    An engine with its options counts as one field. Epochs over different data are different work, and a difference in
    two things at once explains nothing. A trial that drifts is not compared, nor are engines that train otherwise than
    each other. Verdicts follow Holm's correction for all pairs of trials that are compared; a pair that two modes share
    is tested once.
    """
    comparisons = []
    for first, second in itertools.combinations(curves, 2):
        if first.mode != second.mode or not _compared_fields(first, second):
            continue
        second_trials = {point.gpus: point.trial_id for point in second.points}
        for point in first.points:
            second_trial = second_trials.get(point.gpus)
            if second_trial is None or second_trial == point.trial_id:
                continue
            if _are_comparable(trials[point.trial_id], trials[second_trial], combine_unlike):
                comparisons.append(
                    _comparison(_Side(first, point.trial_id), _Side(second, second_trial), point.gpus, trials)
                )
    pairs = [_pair(comparison) for comparison in comparisons]
    results = corrected([comparison.result for comparison in comparisons], pairs)
    return tuple(replace(comparison, result=result) for comparison, result in zip(comparisons, results, strict=True))


class _Side(NamedTuple):
    """One side of a comparison: a trial of a curve."""

    curve: CurveResult
    trial_id: str


def pairs_tested(comparisons: Sequence[CurveComparison]) -> int:
    """Return the number of different pairs of trials that were tested, for which Holm's correction is made."""
    return len({_pair(comparison) for comparison in comparisons if comparison.result.p is not None})


def _pair(comparison: CurveComparison) -> frozenset[str]:
    return frozenset((comparison.first_trial, comparison.second_trial))


def against_references(
    curves: Sequence[CurveResult], trials: Mapping[str, TrialResult], comparisons: Sequence[CurveComparison]
) -> tuple[AgainstReference, ...]:
    """Return a readable number of comparisons: n - 1 for n curves that differ in one thing, each against one reference.

    The reference is DDP without options where it is among them, else the fastest.

    Args:
        curves: the compared curves.
        trials: by identity.
        comparisons: which pairs may be compared (`compare_curves`).
    """
    p_adjusted_by_pair = {_pair(comparison): comparison.result.p_adjusted for comparison in comparisons}
    references = []
    for group, members in _groups(curves, trials).items():
        reference_trial = _reference(members, trials)
        reference = _Side(members[reference_trial], reference_trial)
        others = []
        for trial_id, curve in members.items():
            pair = frozenset((trial_id, reference.trial_id))
            if pair in p_adjusted_by_pair:
                comparison = _comparison(_Side(curve, trial_id), reference, group.gpus, trials)
                result = adjusted(comparison.result, p_adjusted_by_pair[pair])
                others.append(replace(comparison, result=result))
        others.sort(key=lambda comparison: -comparison.result.ratio.value)
        if others:
            fields = set(itertools.chain.from_iterable(comparison.fields for comparison in others))
            references.append(
                AgainstReference(
                    mode=group.mode,
                    gpus=group.gpus,
                    varies=next(iter(fields)) if len(fields) == 1 else group.varies,
                    reference=reference.curve.name,
                    reference_trial=reference.trial_id,
                    others=tuple(others),
                )
            )
    return tuple(references)


class _Group(NamedTuple):
    """What trials have in common that differ in one thing."""

    mode: Mode
    gpus: int
    varies: str
    """The swept field, or `ENGINE`."""
    shared_labels: str
    """All other labels of their curves, as JSON."""
    computation: str


def _groups(curves: Sequence[CurveResult], trials: Mapping[str, TrialResult]) -> dict[_Group, dict[str, CurveResult]]:
    """Return each group's trials by identity, with the first curve of each. A trial may be in several groups."""
    groups: dict[_Group, dict[str, CurveResult]] = {}
    for curve in curves:
        for varies in dict.fromkeys(map(_axis, curve.labels)):
            shared_labels = json.dumps(_labels_without(curve, varies), sort_keys=True, default=str)
            for point in curve.points:
                if trials[point.trial_id].comparable_costs:
                    computed = computation(trials[point.trial_id].trial)
                    group = _Group(curve.mode, point.gpus, varies, shared_labels, computed)
                    groups.setdefault(group, {}).setdefault(point.trial_id, curve)
    return groups


def _reference(members: Mapping[str, CurveResult], trials: Mapping[str, TrialResult]) -> str:
    """Return the trial of a group that is the reference: the usual engine without options, or the fastest."""

    def distance(trial_id: str) -> tuple[bool, int, float]:
        labels = members[trial_id].labels
        is_usual = of_engine(str(labels.get("train.engine"))).usual
        options = len(_WRAPPER_FIELDS & labels.keys()) if is_usual else 0
        epoch = trials[trial_id].epoch_seconds
        return not is_usual, options, epoch.value if epoch else 0.0

    return min(members, key=distance)


def _axis(field: str) -> str:
    """Return the thing that a label belongs to: `ENGINE` with all its options, or the field itself."""
    return ENGINE if field in _WRAPPER_FIELDS else field


def _labels_without(curve: CurveResult, varies: str) -> dict[str, Any]:
    """Return the labels that have nothing to do with the thing that varies."""
    return {field: value for field, value in curve.labels.items() if _axis(field) != varies}


def _compared_fields(first: CurveResult, second: CurveResult) -> tuple[str, ...]:
    """Return the fields in which two curves differ, if these are one thing and not the data; else none."""
    fields = dict.fromkeys([*first.labels, *second.labels])
    different = tuple(field for field in fields if first.labels.get(field) != second.labels.get(field))
    is_one_thing = len({_axis(field) for field in different}) == 1
    if not is_one_thing or different[0].startswith("data."):
        return ()
    return different


def _are_comparable(first: TrialResult, second: TrialResult, combine_unlike: bool) -> bool:
    """Return whether two trials compute the same in like surroundings, and both have costs."""
    if computation(first.trial) != computation(second.trial):
        return False
    if not first.comparable_costs or not second.comparable_costs:
        return False
    return not first.unlike(second, combine_unlike)


def _comparison(first: _Side, second: _Side, gpus: int, trials: Mapping[str, TrialResult]) -> CurveComparison:
    """Return the comparison of two trials on equally many ranks, before Holm's correction."""
    first_trial = trials[first.trial_id]
    second_trial = trials[second.trial_id]
    return CurveComparison(
        mode=first.curve.mode,
        gpus=gpus,
        fields=_compared_fields(first.curve, second.curve),
        first=first.curve.name,
        second=second.curve.name,
        first_trial=first.trial_id,
        second_trial=second.trial_id,
        result=compare(
            first_trial.comparable_costs,
            second_trial.comparable_costs,
            looked=(first_trial.looked, second_trial.looked),
        ),
    )
