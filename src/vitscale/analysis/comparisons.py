"""Curve against curve at equal rank count: is one engine faster than the other, or is the difference noise?

`compare_curves` tests every pair of curves that differ in one thing. `against_references` picks of these the few that a
report shows: in each group of curves that differ in one thing, all others against one reference.
"""

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
    """Trials of several curves on `gpus` ranks, each compared with one of them, the reference."""

    mode: Mode
    gpus: int
    varies: str
    """The swept field, or `ENGINE`."""
    reference: str
    reference_trial: str
    others: tuple[CurveComparison, ...]
    """The comparison of each other trial with the reference, which is `second` in all of them; the fastest first."""


def compare_curves(
    curves: Sequence[CurveResult], trials: Mapping[str, TrialResult], combine_unlike: bool
) -> tuple[CurveComparison, ...]:
    """Return the comparisons of all pairs of curves of one mode that differ in one swept field.

    A field of the data does not count: epochs over different data are different work. An engine with its options counts
    as one field. A difference in two things at once explains nothing. A trial that drifts is not compared, nor are
    engines that train otherwise than each other. Verdicts follow Holm's correction for all pairs of trials that are
    compared; a pair that two modes share is tested once.

    Args:
        curves: the curves.
        trials: trial identity -> its result.
        combine_unlike: whether trials are compared whose hardware or software differs.
    """
    comparisons = []
    for first, second in itertools.combinations(curves, 2):
        if first.mode != second.mode or not _comparable_differences(first, second):
            continue
        second_trial_by_gpus = {point.gpus: point.trial_id for point in second.points}
        for point in first.points:
            second_trial = second_trial_by_gpus.get(point.gpus)
            if second_trial is None or second_trial == point.trial_id:
                continue
            if _are_comparable(trials[point.trial_id], trials[second_trial], combine_unlike):
                first_side = _Side(first, point.trial_id)
                second_side = _Side(second, second_trial)
                comparisons.append(_comparison(first_side, second_side, point.gpus, trials))
    pairs = [_trial_pair(comparison) for comparison in comparisons]
    results = corrected([comparison.result for comparison in comparisons], pairs)
    return tuple(replace(comparison, result=result) for comparison, result in zip(comparisons, results, strict=True))


class _Side(NamedTuple):
    """One side of a comparison: a trial of a curve."""

    curve: CurveResult
    trial_id: str


def pairs_tested(comparisons: Sequence[CurveComparison]) -> int:
    """Return the number of different pairs of trials that were tested, for which Holm's correction is made."""
    return len({_trial_pair(comparison) for comparison in comparisons if comparison.result.p is not None})


def _trial_pair(comparison: CurveComparison) -> frozenset[str]:
    """Return the identities of the two trials that are compared, in no order."""
    return frozenset((comparison.first_trial, comparison.second_trial))


def against_references(
    curves: Sequence[CurveResult], trials: Mapping[str, TrialResult], comparisons: Sequence[CurveComparison]
) -> tuple[AgainstReference, ...]:
    """Return a readable number of comparisons: n - 1 for n curves that differ in one thing, each against one reference.

    The reference is DDP without options where it is among them, else the fastest.

    Args:
        curves: the compared curves.
        trials: trial identity -> its result.
        comparisons: all pairs that may be compared (`compare_curves`), after Holm's correction for all of them.
    """
    p_adjusted_by_pair = {_trial_pair(comparison): comparison.result.p_adjusted for comparison in comparisons}
    references = []
    for group, members in _trials_by_group(curves, trials).items():
        reference_trial = _reference(members, trials)
        reference = _Side(members[reference_trial], reference_trial)
        group_comparisons = [
            _comparison(_Side(curve, trial_id), reference, group.gpus, trials)
            for trial_id, curve in members.items()
            if frozenset((trial_id, reference_trial)) in p_adjusted_by_pair
        ]
        if group_comparisons:
            references.append(_against_reference(group, reference, group_comparisons, p_adjusted_by_pair))
    return tuple(references)


def _against_reference(
    group: _Group,
    reference: _Side,
    comparisons: Sequence[CurveComparison],
    p_adjusted_by_pair: Mapping[frozenset[str], float | None],
) -> AgainstReference:
    """Return the comparisons of one group with its reference, at least one.

    Args:
        group: what the trials have in common.
        reference: the trial that is `second` in all comparisons.
        comparisons: the comparisons, before Holm's correction.
        p_adjusted_by_pair: the identities of two trials -> their p-value after the correction.
    """
    corrected_comparisons = []
    for comparison in comparisons:
        p_adjusted = p_adjusted_by_pair[_trial_pair(comparison)]
        corrected_comparisons.append(replace(comparison, result=adjusted(comparison.result, p_adjusted)))
    corrected_comparisons.sort(key=lambda comparison: -comparison.result.ratio.value)
    fields = set(itertools.chain.from_iterable(comparison.fields for comparison in corrected_comparisons))
    return AgainstReference(
        mode=group.mode,
        gpus=group.gpus,
        varies=next(iter(fields)) if len(fields) == 1 else group.varies,
        reference=reference.curve.name,
        reference_trial=reference.trial_id,
        others=tuple(corrected_comparisons),
    )


class _Group(NamedTuple):
    """The key of trials that differ in one thing: what they have in common, and in what they differ."""

    mode: Mode
    gpus: int
    varies: str
    """The thing in which they differ: a swept field, or `ENGINE`."""
    shared_labels: str
    """All other labels of their curves, as JSON."""
    computation: str
    """What they compute; equal for trials whose losses must agree."""


def _trials_by_group(
    curves: Sequence[CurveResult], trials: Mapping[str, TrialResult]
) -> dict[_Group, dict[str, CurveResult]]:
    """Return group -> its trials: trial identity -> the first curve that the trial is on.

    A trial is in one group for each thing that varies among the curves, so that it may be in several.
    """
    curves_by_group: dict[_Group, dict[str, CurveResult]] = {}
    for curve in curves:
        for varies in dict.fromkeys(map(_varying_thing, curve.labels)):
            shared_labels = json.dumps(_labels_without(curve, varies), sort_keys=True, default=str)
            for point in curve.points:
                result = trials[point.trial_id]
                if not result.comparable_costs:
                    continue
                group = _Group(curve.mode, point.gpus, varies, shared_labels, computation(result.trial))
                curves_by_group.setdefault(group, {}).setdefault(point.trial_id, curve)
    return curves_by_group


def _reference(members: Mapping[str, CurveResult], trials: Mapping[str, TrialResult]) -> str:
    """Return the identity of the trial that is the reference: DDP with fewest options, else the fastest.

    Args:
        members: the trials of a group: identity -> its curve.
        trials: trial identity -> its result.
    """

    def reference_rank(trial_id: str) -> _ReferenceRank:
        """Where a trial stands in the order of references."""
        labels = members[trial_id].labels
        is_usual = of_engine(str(labels.get("train.engine"))).usual
        epoch = trials[trial_id].epoch_seconds
        return _ReferenceRank(
            is_unusual=not is_usual,
            options=len(_WRAPPER_FIELDS & labels.keys()) if is_usual else 0,
            epoch_seconds=epoch.value if epoch else 0.0,
        )

    return min(members, key=reference_rank)


class _ReferenceRank(NamedTuple):
    """The order in which trials are preferred as the reference: the smallest first."""

    is_unusual: bool
    """Whether the engine is another one than DDP."""
    options: int
    """Number of swept fields of how DDP is set; 0 for other engines, of which the fastest is preferred."""
    epoch_seconds: float


def _varying_thing(field: str) -> str:
    """Return the thing that a swept field belongs to: `ENGINE` for an engine and all its options, else the field."""
    return ENGINE if field in _WRAPPER_FIELDS else field


def _labels_without(curve: CurveResult, varies: str) -> dict[str, Any]:
    """Return the labels of a curve that do not belong to the thing that varies."""
    return {field: value for field, value in curve.labels.items() if _varying_thing(field) != varies}


def _comparable_differences(first: CurveResult, second: CurveResult) -> tuple[str, ...]:
    """Return the swept fields in which two curves differ, if the curves may be compared; else nothing.

    They may be compared if the fields all belong to one thing (`_varying_thing`), which is not the data.
    """
    fields = dict.fromkeys([*first.labels, *second.labels])
    different = tuple(field for field in fields if first.labels.get(field) != second.labels.get(field))
    is_one_thing = len({_varying_thing(field) for field in different}) == 1
    if not is_one_thing or different[0].startswith("data."):
        return ()
    return different


def _are_comparable(first: TrialResult, second: TrialResult, combine_unlike: bool) -> bool:
    """Whether two trials compute the same, both have times, and their hardware and software allow a comparison."""
    if computation(first.trial) != computation(second.trial):
        return False
    if not first.comparable_costs or not second.comparable_costs:
        return False
    return not first.reasons_not_to_compare(second, combine_unlike)


def _comparison(first: _Side, second: _Side, gpus: int, trials: Mapping[str, TrialResult]) -> CurveComparison:
    """Return the comparison of two trials on equally many ranks, before Holm's correction."""
    first_trial = trials[first.trial_id]
    second_trial = trials[second.trial_id]
    return CurveComparison(
        mode=first.curve.mode,
        gpus=gpus,
        fields=_comparable_differences(first.curve, second.curve),
        first=first.curve.name,
        second=second.curve.name,
        first_trial=first.trial_id,
        second_trial=second.trial_id,
        result=compare(
            first_trial.comparable_costs,
            second_trial.comparable_costs,
            deciding_runs=(first_trial.deciding_runs, second_trial.deciding_runs),
        ),
    )
