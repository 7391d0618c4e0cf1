"""Two or more results side by side: the same trials under other versions, on other clusters, of another commit.

A trial of the first results is compared with that trial of the others which has its identity, else with the one at its
place: the same batch policy, swept values and rank count. Epoch seconds are compared by whole runs: by pairs of runs
where the two sides were run in turn (`rounds`), else side against side. Who is slower is said after Holm's correction
for all trials of all results.

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
from vitscale.present.units import UNKNOWN, counted
from vitscale.store.lines import Steps
from vitscale.store.results import Run

Gate = Literal["within", "slower", "undecided"]
"""Verdict on a limit: the whole interval lies below it, the whole interval lies beyond it, or neither."""

USUAL_LIMIT = 0.05
"""Slowdown for which repeats are advised where no limit is named."""
_CLEARLY_BEYOND = 2.0
"""So many times the limit is a slowdown that a gate is to fail."""


@dataclass(frozen=True)
class Measured:
    """What two trials' runs say of each other."""

    result: Comparison
    slowdown: Estimate
    """Epoch seconds of the other over those of the first."""
    sides: tuple[LogMean, ...]
    """The mean logarithms of both sides' costs; of rounds the one of their ratios."""
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
    """None where one of them has no times, or they hold the same runs."""
    tests: int = 1
    """Trials that are tested together."""

    def gate(self, limit: float) -> Gate:
        """Whether the other takes more than `1 + limit` times as long, if that is certain."""
        if self.same_runs:
            return "within"
        return gate_of(self.measured, limit) if self.measured else "undecided"

    @cached_property
    def smallest_slower(self) -> float | None:
        """The smallest slowdown that these runs report as slower in 4 of 5 cases; None where they report nothing."""
        return self._smallest_shown(None)

    def smallest_failed(self, limit: float) -> float | None:
        """The smallest slowdown that these runs let fail a limit in 4 of 5 cases."""
        return self._smallest_shown(limit)

    def _smallest_shown(self, limit: float | None) -> float | None:
        if self.measured is None:
            return None
        return power.smallest_shown(self.measured.sides, power.Question(self.tests, limit))

    def repeats_to_show(self, slowdown: float) -> int | None:
        """Repeats on each side that report this slowdown as slower in 4 of 5 cases; None: unknown, or too many."""
        if self.measured is None:
            return None
        return power.repeats_to_show(slowdown, self.measured.sides, power.Question(self.tests))

    def repeats_to_decide(self, limit: float) -> int | None:
        """Repeats on each side with which a limit is decided in 4 of 5 cases: equal trials are found within it, and a
        slowdown of twice the limit fails. None: unknown, or too many."""
        if self.measured is None:
            return None
        sides = self.measured.sides
        to_clear = power.repeats_to_clear(limit, sides)
        to_fail = power.repeats_to_show(_CLEARLY_BEYOND * limit, sides, power.Question(self.tests, limit))
        return max(to_clear, to_fail) if to_clear is not None and to_fail is not None else None


def gate_of(measured: Measured, limit: float) -> Gate:
    """The verdict on a limit: "slower" also needs the comparison to say so after Holm's correction."""
    slowdown = measured.slowdown
    if slowdown.low is None or slowdown.high is None:
        return "undecided"
    if slowdown.low > 1 + limit and measured.result.verdict == "slower":
        return "slower"
    return "within" if slowdown.high <= 1 + limit else "undecided"


def side_by_side(named: Sequence[tuple[str, Analysis]]) -> tuple[Pair, ...]:
    """The pairs of the first results with each of the others, in the order of the curves.

    A trial that neither of two results has run is no pair.
    """
    (_, first), *others = named
    runs_of_first = _runs_by_trial(first)
    pairs = []
    for name, other in others:
        counterparts, runs_of_other = _by_point(other), _runs_by_trial(other)
        for key, (curve, gpus, trial_id) in _by_point(first).items():
            first_trial = first.trials[trial_id]
            other_id = trial_id if trial_id in other.trials else counterparts.get(key, _NO_POINT).trial_id
            other_trial = other.trials.get(other_id)
            if other_trial is not None and (first_trial.runs_done or other_trial.runs_done):
                shared = _shared_runs(runs_of_first.get(trial_id, ()), runs_of_other.get(other_id, ()))
                pairs.append(_pair(name, curve, gpus, first_trial, other_trial, shared))
    tested = [(pair, pair.measured) for pair in pairs if pair.measured is not None]
    keys = [(pair.results, pair.first.trial_id) for pair, _ in tested]
    results = iter(corrected([measured.result for _, measured in tested], keys))
    tests = max(1, sum(measured.result.p is not None for _, measured in tested))
    return tuple(
        replace(pair, measured=replace(pair.measured, result=next(results)), tests=tests) if pair.measured else pair
        for pair in pairs
    )


def unmatched(named: Sequence[tuple[str, Analysis]], pairs: Sequence[Pair]) -> tuple[str, ...]:
    """The trials of the first results that have no counterpart in others, in words."""
    (_, first), *others = named
    sentences = []
    for name, other in others:
        paired = {pair.first.trial_id for pair in pairs if pair.results == name}
        counterparts = _by_point(other)
        for key, (curve, gpus, trial_id) in _by_point(first).items():
            if trial_id not in paired and trial_id not in other.trials and key not in counterparts:
                sentences.append(f"{name} has nothing like {curve} on {gpus} ranks")
    return tuple(sentences)


class _CurvePoint(NamedTuple):
    """A trial where it stands on its first curve."""

    curve: str
    gpus: int
    trial_id: str


_NO_POINT = _CurvePoint("", 0, "")


def _by_point(analysis: Analysis) -> dict[str, _CurvePoint]:
    """Place on a curve -> the trial there; a trial on several curves occurs once."""
    points: dict[str, _CurvePoint] = {}
    seen: set[str] = set()
    for curve in analysis.curves:
        for point in curve.points:
            key = json.dumps([curve.mode, dict(curve.labels), point.gpus], sort_keys=True, default=str)
            if point.trial_id not in seen:
                points[key] = _CurvePoint(f"{curve.name} ({curve.mode})", point.gpus, point.trial_id)
                seen.add(point.trial_id)
    return points


class _Shared(NamedTuple):
    """Runs that are in both of two results."""

    runs: int
    are_all: bool
    """Whether no side has another."""


def _pair(name: str, curve: str, gpus: int, first: TrialResult, other: TrialResult, shared: _Shared) -> Pair:
    measured = None if shared.are_all else _measured(first, other)
    differs = [*_of_trials(first, other), *_of_environments(first, other)]
    if shared.runs and not shared.are_all:
        differs.append(f"{counted(shared.runs, 'run')} in both results")
    return Pair(name, curve, gpus, first, other, tuple(differs), shared.are_all, measured)


def _measured(first: TrialResult, other: TrialResult) -> Measured | None:
    """The comparison of two trials; None where one has no times, or their times are of different kinds."""
    first_costs, other_costs = first.comparable_costs, other.comparable_costs
    if not first_costs or not other_costs or first.unlike(other, combine=True):
        return None
    looked = (other.looked, first.looked)
    alternated = () if any(looked) else rounds(first, other)
    if alternated:
        return _measured_in_rounds(alternated)
    sides = (log_mean(other_costs, other.looked), log_mean(first_costs, first.looked))
    return Measured(compare(other_costs, first_costs, looked), ratio(other_costs, first_costs, looked), sides)


def _measured_in_rounds(alternated: Sequence[Round]) -> Measured:
    first_seconds = [pair.first_seconds for pair in alternated]
    other_seconds = [pair.other_seconds for pair in alternated]
    result = compare_pairs(other_seconds, first_seconds)
    of_ratios = log_mean([other / first for first, other in alternated])
    return Measured(result, result.ratio.into(1.0), (of_ratios,), len(alternated))


def _runs_by_trial(analysis: Analysis) -> dict[str, list[Run]]:
    """All runs of each trial, completed or not."""
    runs: dict[str, list[Run]] = {}
    for run in analysis.runs:
        runs.setdefault(run.header.trial_id, []).append(run)
    return runs


def _shared_runs(first: Sequence[Run], other: Sequence[Run]) -> _Shared:
    """The runs that two trials have in common. Digests are made of those alone that began at one time."""
    of_first = {_begin(run): run for run in first}
    of_other = {_begin(run): run for run in other}
    shared = sum(run_digest(run) == run_digest(of_other[begin]) for begin, run in of_first.items() if begin in of_other)
    return _Shared(shared, are_all=0 < shared == len(first) == len(other))


def _begin(run: Run) -> tuple[float, float, int]:
    return run.outcome.started_unix_seconds, run.outcome.wall_seconds, run.header.repeat


def run_digest(run: Run) -> str:
    """The SHA-256 of what a run measured: when it began, how long it took, and the steps and epochs of its ranks.

    It is that of a copy too, of a bundle, and of one without the names of hosts.
    """
    digest = hashlib.sha256(json.dumps([run.outcome.kind, *_begin(run)]).encode())
    for rank in run.ranks:
        steps = Steps.of(rank.steps)
        digest.update(steps.step.tobytes())
        digest.update(steps.seconds.tobytes())
        digest.update(json.dumps([rank.rank, *((epoch.epoch, epoch.seconds) for epoch in rank.epochs)]).encode())
    return digest.hexdigest()


_DIGEST = re.compile(r"\b[0-9a-f]{40}(?:[0-9a-f]{24})?\b")


def _of_trials(first: TrialResult, other: TrialResult) -> list[str]:
    first_fields, other_fields = (dotted(result.trial.model_dump(mode="json")) for result in (first, other))
    return [
        f"{key}: {_short(first_fields.get(key))} against {_short(other_fields.get(key))}"
        for key in dict.fromkeys([*first_fields, *other_fields])
        if first_fields.get(key) != other_fields.get(key)
    ]


def _of_environments(first: TrialResult, other: TrialResult) -> list[str]:
    differences = list(first.unlike(other))
    revisions = [result.environment.git_revision if result.environment else None for result in (first, other)]
    if revisions[0] != revisions[1]:
        differences.append(f"git revision: {_short(revisions[0] or UNKNOWN)} against {_short(revisions[1] or UNKNOWN)}")
    return differences


def _short(value: object) -> str:
    """A value as text; of digests and revisions only the first digits, as git shows them."""
    return _DIGEST.sub(lambda digest: digest[0][:12], str(value))
