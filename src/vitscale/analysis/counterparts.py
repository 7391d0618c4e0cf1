"""Two or more results side by side: the same trials under other versions, on other clusters, of another commit.

A trial of the first results is compared with its counterpart in each of the others: the trial of the same identity,
else the one at the same place on a curve, which is the same batch policy, swept values and rank count. Epoch seconds
are compared by whole runs: by pairs of runs where the two sides were run in turn (`rounds`), else side against side.
Verdicts follow Holm's correction for all trials of all results.

Runs that are in both results are the same, by a digest of what they measured; nothing is estimated from these.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from vitscale.analysis import Analysis, TrialResult, power
from vitscale.analysis.rounds import Round, rounds
from vitscale.analysis.statistics import Comparison, LogMean, compare, compare_pairs, corrected, log_mean, ratio
from vitscale.present.data import dotted
from vitscale.present.estimate import Estimate
from vitscale.present.units import UNKNOWN, counted, ranks
from vitscale.store.lines import Steps
from vitscale.store.results import Run

Gate = Literal["within", "slower", "undecided"]
"""Verdict on a limit: the whole interval lies below it, the whole interval lies beyond it, or neither."""

USUAL_LIMIT = 0.05
"""Slowdown for which repeats are advised where no limit is named."""
_FAILURE_LIMITS = 2.0
"""A limit (gate) is to find a slowdown of this many limits "slower": with a limit of 5 % one of 10 %."""


@dataclass(frozen=True)
class Measured:
    """The comparison of the runs of two trials."""

    result: Comparison
    """The speed of the other over that of the first, and whether it is faster."""
    slowdown: Estimate
    """Epoch seconds of the other over those of the first."""
    sides: tuple[LogMean, ...]
    """The mean logarithms of both sides' epoch seconds, the other's first; in rounds only that of their ratios."""
    rounds: int = 0
    """Number of rounds in which the two sides were run in turn; 0: they were not."""


@dataclass(frozen=True)
class Pair:
    """A trial of the first results and its counterpart in others."""

    results: str
    """Name of the others."""
    curve: str
    gpus: int
    first: TrialResult
    other: TrialResult
    differs: tuple[str, ...]
    """Differences of the trials and of what they ran on."""
    same_runs: bool
    """Whether both hold the same runs, so that nothing is to be compared."""
    measured: Measured | None
    """None where one of them has no times, their times are of different kinds, or they hold the same runs."""
    tests: int = 1
    """Number of trials that are tested together, for Holm's correction."""

    def gate(self, limit: float) -> Gate:
        """Return whether the other takes more than `1 + limit` times as long; the same runs are within any limit."""
        if self.same_runs:
            return "within"
        if self.measured is None:
            return "undecided"
        return gate_of(self.measured, limit)

    @cached_property
    def smallest_slower(self) -> float | None:
        """The smallest slowdown that these runs report as slower in 4 of 5 cases; None where they report nothing."""
        return self._smallest_shown(limit=None)

    def smallest_failed(self, limit: float) -> float | None:
        """Return the smallest slowdown that makes these runs fail a limit in 4 of 5 cases; None where they never do."""
        return self._smallest_shown(limit)

    def _smallest_shown(self, limit: float | None) -> float | None:
        """Return the smallest slowdown that is reported in 4 of 5 cases: as slower, or with a limit as beyond it."""
        if self.measured is None:
            return None
        return power.smallest_shown(self.measured.sides, power.ComparisonQuestion(self.tests, limit))

    def repeats_to_show(self, slowdown: float) -> int | None:
        """Return the repeats on each side that report this slowdown as slower in 4 of 5 cases.

        None where that is unknown, or they would be too many.
        """
        if self.measured is None:
            return None
        return power.repeats_to_show(slowdown, self.measured.sides, power.ComparisonQuestion(self.tests))

    def repeats_to_decide(self, limit: float) -> int | None:
        """Return the repeats on each side with which `gate` decides on a limit in 4 of 5 cases.

        They are enough for either verdict: equal trials are found "within", and a trial that is slower by twice the
        limit is found "slower". None where that is unknown, or they would be too many.
        """
        if self.measured is None:
            return None
        sides = self.measured.sides
        to_find_within = power.repeats_to_find_within(limit, sides)
        question = power.ComparisonQuestion(self.tests, limit)
        to_find_slower = power.repeats_to_show(_FAILURE_LIMITS * limit, sides, question)
        if to_find_within is None or to_find_slower is None:
            return None
        return max(to_find_within, to_find_slower)


def gate_of(measured: Measured, limit: float) -> Gate:
    """Return the verdict on a limit. "slower" also needs that verdict of the comparison after Holm's correction.

    Args:
        measured: the comparison of two trials.
        limit: the slowdown that is allowed, as a share: 0.05.
    """
    slowdown = measured.slowdown
    largest_ratio = 1 + limit
    if slowdown.low is None or slowdown.high is None:
        return "undecided"
    if slowdown.low > largest_ratio and measured.result.verdict == "slower":
        return "slower"
    return "within" if slowdown.high <= largest_ratio else "undecided"


def side_by_side(named_results: Sequence[tuple[str, Analysis]]) -> tuple[Pair, ...]:
    """Compare each trial of the first results with its counterpart in each of the others, in the order of the curves.

    A trial without a counterpart makes no pair, nor do two trials of which neither has run.

    Args:
        named_results: two results or more, each with its name.
    """
    _first_name, first_results = named_results[0]
    pairs: list[Pair] = []
    for other_name, other_results in named_results[1:]:
        pairs += _compare_results(first_results, other_results, other_name=other_name)
    return _with_correction(pairs)


def _compare_results(first_results: Analysis, other_results: Analysis, other_name: str) -> list[Pair]:
    """Compare each trial of the first results with its counterpart in one other, before Holm's correction."""
    counterparts = _counterparts(first_results, other_results)
    first_runs = _runs_by_trial(first_results)
    other_runs = _runs_by_trial(other_results)
    pairs = []
    for point in _points_by_place(first_results).values():
        first = first_results.trials[point.trial_id]
        other = counterparts.get(point.trial_id)
        if other is None:
            continue
        if not first.runs_done and not other.runs_done:
            continue
        shared = _shared_runs(first_runs.get(first.trial_id, ()), other_runs.get(other.trial_id, ()))
        pairs.append(_compare_trials(first, other, point=point, shared=shared, other_name=other_name))
    return pairs


def _counterparts(first_results: Analysis, other_results: Analysis) -> dict[str, TrialResult]:
    """Return trial identity in the first results -> its counterpart in the other ones; without trials that have none.

    The counterpart is the trial of the same identity, else the one at the same place on a curve (`_points_by_place`).
    """
    other_points = _points_by_place(other_results)
    counterparts = {}
    for place, point in _points_by_place(first_results).items():
        if point.trial_id in other_results.trials:
            counterparts[point.trial_id] = other_results.trials[point.trial_id]
        elif place in other_points:
            counterparts[point.trial_id] = other_results.trials[other_points[place].trial_id]
    return counterparts


def _with_correction(pairs: Sequence[Pair]) -> tuple[Pair, ...]:
    """Return the pairs with their verdicts after Holm's correction for all of them, and with the number of tests."""
    measured_indices = [index for index, pair in enumerate(pairs) if pair.measured is not None]
    results = [pair.measured.result for pair in pairs if pair.measured is not None]
    tested_trials = [(pair.results, pair.first.trial_id) for pair in pairs if pair.measured is not None]
    tests = max(1, sum(result.p is not None for result in results))
    corrected_results = corrected(results, tested_trials)
    result_by_index = dict(zip(measured_indices, corrected_results, strict=True))
    corrected_pairs = []
    for index, pair in enumerate(pairs):
        if pair.measured is None:
            corrected_pairs.append(pair)
        else:
            measured = replace(pair.measured, result=result_by_index[index])
            corrected_pairs.append(replace(pair, measured=measured, tests=tests))
    return tuple(corrected_pairs)


def unmatched(named_results: Sequence[tuple[str, Analysis]], pairs: Sequence[Pair]) -> tuple[str, ...]:
    """Return a sentence, without a full stop, for each trial of the first results without a counterpart in others.

    Args:
        named_results: two results or more, each with its name.
        pairs: their pairs (`side_by_side`).
    """
    _first_name, first_results = named_results[0]
    sentences = []
    for other_name, other_results in named_results[1:]:
        paired_ids = {pair.first.trial_id for pair in pairs if pair.results == other_name}
        # A trial has a counterpart, but makes no pair, where neither of the two has run.
        matched_ids = paired_ids | _counterparts(first_results, other_results).keys()
        for point in _points_by_place(first_results).values():
            if point.trial_id not in matched_ids:
                sentences.append(f"{other_name} has nothing like {point.curve} on {ranks(point.gpus)}")
    return tuple(sentences)


class _CurvePoint(NamedTuple):
    """A trial where it stands on the first curve that it is on."""

    curve: str
    """Name and batch policy of the curve: "ddp (weak)"."""
    gpus: int
    trial_id: str


def _points_by_place(analysis: Analysis) -> dict[str, _CurvePoint]:
    """Return place on a curve -> the trial there. A trial on several curves is at the first of its places only.

    A place is the JSON of batch policy, swept values and rank count: `["weak", {"train.engine": "ddp"}, 8]`. Equal
    places in two results have trials that stand for each other, although other fields may differ.
    """
    points: dict[str, _CurvePoint] = {}
    placed_trials: set[str] = set()
    for curve in analysis.curves:
        for point in curve.points:
            if point.trial_id in placed_trials:
                continue
            place = json.dumps([curve.mode, dict(curve.labels), point.gpus], sort_keys=True, default=str)
            points[place] = _CurvePoint(f"{curve.name} ({curve.mode})", point.gpus, point.trial_id)
            placed_trials.add(point.trial_id)
    return points


class _SharedRuns(NamedTuple):
    """How many runs of two trials are the same run."""

    runs: int
    are_all: bool
    """Whether they share a run and neither trial has another one."""


def _compare_trials(
    first: TrialResult, other: TrialResult, *, point: _CurvePoint, shared: _SharedRuns, other_name: str
) -> Pair:
    """Compare a trial with its counterpart, before Holm's correction.

    Args:
        first: the trial of the first results.
        other: its counterpart.
        point: where `first` stands on a curve.
        shared: the runs that both have; if these are all, there is nothing to compare.
        other_name: the name of the results of `other`.
    """
    differences = [*_trial_differences(first, other), *_environment_differences(first, other)]
    if shared.runs and not shared.are_all:
        differences.append(f"{counted(shared.runs, 'run')} in both results")
    return Pair(
        results=other_name,
        curve=point.curve,
        gpus=point.gpus,
        first=first,
        other=other,
        differs=tuple(differences),
        same_runs=shared.are_all,
        measured=None if shared.are_all else _measured(first, other),
    )


def _measured(first: TrialResult, other: TrialResult) -> Measured | None:
    """Compare the times of two trials; None where one has no times, or their times are of different kinds."""
    first_costs = first.comparable_costs
    other_costs = other.comparable_costs
    if not first_costs or not other_costs or first.reasons_not_to_compare(other, combine=True):
        return None
    had_repeats_added = first.deciding_runs > 0 or other.deciding_runs > 0  # until an interval was narrow enough
    # Where the number of runs depends on what they measured, `compare` allows for that; a comparison in rounds cannot.
    rounds_of_both = () if had_repeats_added else rounds(first, other)
    if rounds_of_both:
        return _measured_in_rounds(rounds_of_both)
    deciding_runs = (other.deciding_runs, first.deciding_runs)
    return Measured(
        result=compare(other_costs, first_costs, deciding_runs),
        slowdown=ratio(other_costs, first_costs, deciding_runs),
        sides=(log_mean(other_costs, other.deciding_runs), log_mean(first_costs, first.deciding_runs)),
    )


def _measured_in_rounds(rounds_of_both: Sequence[Round]) -> Measured:
    """Compare two trials by the ratio of their runs in each round, other over first."""
    first_seconds = [round_of_both.first_seconds for round_of_both in rounds_of_both]
    other_seconds = [round_of_both.other_seconds for round_of_both in rounds_of_both]
    result = compare_pairs(other_seconds, first_seconds)
    ratios = [other / first for first, other in zip(first_seconds, other_seconds, strict=True)]
    slowdown = result.ratio.into(1.0)  # 1 / ratio: `result` has the speed of the other over that of the first
    return Measured(result, slowdown, sides=(log_mean(ratios),), rounds=len(rounds_of_both))


def _runs_by_trial(analysis: Analysis) -> dict[str, list[Run]]:
    """Return trial identity -> all its runs, completed or not."""
    runs: dict[str, list[Run]] = {}
    for run in analysis.runs:
        runs.setdefault(run.header.trial_id, []).append(run)
    return runs


def _shared_runs(first_runs: Sequence[Run], other_runs: Sequence[Run]) -> _SharedRuns:
    """Count the runs that two trials have in common.

    A digest reads all steps of a run, so digests are made of those runs alone that began at the same time.
    """
    first_run_by_begin = {_begin_of(run): run for run in first_runs}
    other_run_by_begin = {_begin_of(run): run for run in other_runs}
    shared = 0
    for begin in first_run_by_begin.keys() & other_run_by_begin.keys():
        if run_digest(first_run_by_begin[begin]) == run_digest(other_run_by_begin[begin]):
            shared += 1
    return _SharedRuns(shared, are_all=0 < shared == len(first_runs) == len(other_runs))


class _Begin(NamedTuple):
    """When a run began, how long it took, and which repeat it was: the same in every copy of it."""

    started_unix_seconds: float
    wall_seconds: float
    repeat: int


def _begin_of(run: Run) -> _Begin:
    """Return what tells the run apart from others, and is the same in every copy of it."""
    return _Begin(run.outcome.started_unix_seconds, run.outcome.wall_seconds, run.header.repeat)


def run_digest(run: Run) -> str:
    """Return the SHA-256 of what a run measured: its begin, its wall time, and the steps and epochs of its ranks.

    Copies of a run have the same digest, also those in a bundle and those without the names of hosts.
    """
    digest = hashlib.sha256(json.dumps([run.outcome.kind, *_begin_of(run)]).encode())
    for rank in run.ranks:
        steps = Steps.of(rank.steps)
        digest.update(steps.step.tobytes())
        digest.update(steps.seconds.tobytes())
        epochs = [(epoch.epoch, epoch.seconds) for epoch in rank.epochs]
        digest.update(json.dumps([rank.rank, *epochs]).encode())
    return digest.hexdigest()


_DIGEST = re.compile(r"\b[0-9a-f]{40}(?:[0-9a-f]{24})?\b")
"""A SHA-1 or SHA-256 in hexadecimal digits."""


def _trial_differences(first: TrialResult, other: TrialResult) -> list[str]:
    """Return the fields in which two trials differ, in words: "train.precision: fp32 against bf16"."""
    first_values = dotted(first.trial.model_dump(mode="json"))
    other_values = dotted(other.trial.model_dump(mode="json"))
    differences = []
    for field in dict.fromkeys([*first_values, *other_values]):
        first_value = first_values.get(field)
        other_value = other_values.get(field)
        if first_value != other_value:
            differences.append(_difference(field, first_value, other_value))
    return differences


def _environment_differences(first: TrialResult, other: TrialResult) -> list[str]:
    """Return what differs in hardware and software between two trials, in words; the git revision comes last."""
    differences = list(first.reasons_not_to_compare(other))  # hardware, software and datasets that differ
    first_revision = _git_revision(first)
    other_revision = _git_revision(other)
    if first_revision != other_revision:
        differences.append(_difference("git revision", first_revision or UNKNOWN, other_revision or UNKNOWN))
    return differences


def _git_revision(result: TrialResult) -> str | None:
    return result.environment.git_revision if result.environment is not None else None


def _difference(subject: str, first: object, other: object) -> str:
    """Return "train.precision: fp32 against bf16"."""
    return f"{subject}: {_shortened(first)} against {_shortened(other)}"


def _shortened(value: object) -> str:
    """Return a value as text; of digests and revisions only the first 12 digits, as git shows them."""
    return _DIGEST.sub(lambda digest: digest[0][:12], str(value))
