"""Two or more results side by side: the same trials under other versions, on other clusters, of another commit.

A trial of the first results is compared with that trial of the others which has its identity, else with the one at its
place: the same batch policy, swept values and rank count. Epoch seconds are compared by whole runs, and who is slower
is said after Holm's correction for all trials of all results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from vitscale.analysis import Analysis, TrialResult
from vitscale.analysis.statistics import Comparison, compare, corrected, ratio
from vitscale.present.data import attributes, dotted, estimate_fields
from vitscale.present.document import Bullets, Cell, Column, Document, Paragraph, table
from vitscale.present.estimate import Estimate
from vitscale.present.units import UNKNOWN, bounds, counted, number, percent

Gate = Literal["within", "slower", "undecided"]
"""Verdict on a limit: the whole interval lies below it, the whole interval lies beyond it, or neither."""


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
    result: Comparison | None
    """How many times as fast the other is; None where one of them has no times."""
    slowdown: Estimate | None
    """Epoch seconds of the other over those of the first."""

    def gate(self, limit: float) -> Gate:
        """Whether the other takes more than `1 + limit` times as long, if that is certain."""
        told = self.slowdown
        if told is None or told.low is None or told.high is None or self.result is None:
            return "undecided"
        if told.low > 1 + limit and self.result.verdict == "slower":
            return "slower"
        return "within" if told.high <= 1 + limit else "undecided"


def side_by_side(named: Sequence[tuple[str, Analysis]]) -> tuple[Pair, ...]:
    """The pairs of the first results with each of the others, in the order of the curves."""
    (_, first), *others = named
    pairs = []
    for name, other in others:
        counterparts = _by_point(other)
        for key, (curve, gpus, trial_id) in _by_point(first).items():
            ours = first.trials[trial_id]
            same = trial_id if trial_id in other.trials else counterparts.get(key, ("", 0, ""))[2]
            if theirs := other.trials.get(same):
                pairs.append(_pair(name, curve, gpus, ours, theirs))
    tested = [pair.result for pair in pairs if pair.result is not None]
    keys = [(pair.results, pair.first.trial_id) for pair in pairs if pair.result is not None]
    results = iter(corrected(tested, keys))
    return tuple(replace(pair, result=next(results)) if pair.result is not None else pair for pair in pairs)


def unmatched(named: Sequence[tuple[str, Analysis]], pairs: Sequence[Pair]) -> tuple[str, ...]:
    """The trials of the first results that have no counterpart in others, in words."""
    (_, first), *others = named
    told = []
    for name, _ in others:
        held = {pair.first.trial_id for pair in pairs if pair.results == name}
        lacking = [compared for compared in _by_point(first).values() if compared[2] not in held]
        told += [f"{name} has nothing like {curve} on {gpus} ranks" for curve, gpus, _ in lacking]
    return tuple(told)


def _by_point(analysis: Analysis) -> dict[str, tuple[str, int, str]]:
    """Place on a curve -> (curve's name, ranks, trial); a trial on several curves occurs once."""
    points: dict[str, tuple[str, int, str]] = {}
    seen: set[str] = set()
    for curve in analysis.curves:
        for point in curve.points:
            key = json.dumps([curve.mode, dict(curve.labels), point.gpus], sort_keys=True, default=str)
            if point.trial_id not in seen:
                points[key] = (f"{curve.name} ({curve.mode})", point.gpus, point.trial_id)
                seen.add(point.trial_id)
    return points


def _pair(name: str, curve: str, gpus: int, first: TrialResult, other: TrialResult) -> Pair:
    ours, theirs = first.comparable_costs, other.comparable_costs
    looked = (other.looked, first.looked)
    known = bool(ours) and bool(theirs) and not first.unlike(other, combine=True)
    result, slowdown = (compare(theirs, ours, looked), ratio(theirs, ours, looked)) if known else (None, None)
    differs = (*_of_trials(first, other), *_of_environments(first, other))
    return Pair(name, curve, gpus, first, other, differs, result, slowdown)


_DIGEST = re.compile(r"\b[0-9a-f]{40}(?:[0-9a-f]{24})?\b")


def _of_trials(first: TrialResult, other: TrialResult) -> list[str]:
    ours, theirs = (dotted(result.trial.model_dump(mode="json")) for result in (first, other))
    return [
        f"{key}: {_short(ours.get(key))} against {_short(theirs.get(key))}"
        for key in dict.fromkeys([*ours, *theirs])
        if ours.get(key) != theirs.get(key)
    ]


def _of_environments(first: TrialResult, other: TrialResult) -> list[str]:
    told = list(first.unlike(other))
    revisions = [result.environment.git_revision if result.environment else None for result in (first, other)]
    if revisions[0] != revisions[1]:
        told.append(f"git revision: {_short(revisions[0] or UNKNOWN)} against {_short(revisions[1] or UNKNOWN)}")
    return told


def _short(value: object) -> str:
    """A value as text; of digests and revisions only the first digits, as git shows them."""
    return _DIGEST.sub(lambda digest: digest[0][:12], str(value))


def compared_document(first: str, pairs: Sequence[Pair], limit: float | None, missing: Sequence[str] = ()) -> Document:
    """What differs, and each trial's time against that of the first results. `missing`: sentences of `unmatched`."""
    shared = [what for what in (pairs[0].differs if pairs else ()) if all(what in pair.differs for pair in pairs)]
    groups = {
        name: [_row(pair, limit, shared) for pair in pairs if pair.results == name]
        for name in dict.fromkeys(pair.results for pair in pairs)
    }
    columns = [Column("curve", words=True), Column("ranks"), Column(f"time / {first}"), Column("verdict", words=True)]
    columns += [Column("limit", words=True)] if limit is not None else []
    always = [column.name for column in columns]
    columns.append(Column("differs besides", words=True, narrow=None))
    notes = (
        "time for the same images over that of the first results, with the 95 % interval over runs",
        "who is slower is said after Holm's correction for all trials compared",
    )
    blocks: list[Any] = [Paragraph(_summary(first, pairs, limit), "strong")]
    if shared:
        blocks.append(Bullets(tuple(f"differs everywhere: {what}" for what in shared)))
    if missing:
        blocks.append(Bullets(tuple(missing)))
    blocks.append(table(columns, groups, notes=notes, always=always))
    return Document("", tuple(blocks))


def _summary(first: str, pairs: Sequence[Pair], limit: float | None) -> str:
    told = f"{counted(len(pairs), 'trial')} held against {first}"
    verdicts = [pair.result.verdict if pair.result else "no times" for pair in pairs]
    told += ": " + ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts))
    if limit is None:
        return told
    gates = [pair.gate(limit) for pair in pairs]
    beyond = f"; {gates.count('slower')} slower than {percent(limit)} for certain, {gates.count('undecided')} undecided"
    return told + beyond


def _row(pair: Pair, limit: float | None, shared: Sequence[str]) -> tuple[Cell, ...]:
    told = pair.slowdown
    outcome = pair.other.outcome if pair.first.outcome == "completed" else pair.first.outcome
    time = (
        Cell(number(told.value), bounds(told.low, told.high)) if told else Cell(outcome or "not run", state="missing")
    )
    cells = [Cell(pair.curve), Cell(str(pair.gpus)), time, Cell(pair.result.verdict if pair.result else "no times")]
    cells += [Cell(pair.gate(limit))] if limit is not None else []
    return (*cells, Cell("; ".join(what for what in pair.differs if what not in shared)))


def compared_fields(
    first: str, pairs: Sequence[Pair], limit: float | None, missing: Sequence[str] = ()
) -> dict[str, Any]:
    """What `compared_document` says, as data."""
    return {
        "first": first,
        "limit": limit,
        "unmatched": list(missing),
        "pairs": [
            {
                **attributes(pair, "results", "curve", "gpus"),
                "trial": pair.first.trial_id,
                "other_trial": pair.other.trial_id,
                **estimate_fields("time_ratio", pair.slowdown),
                **attributes(pair.result, "verdict", "p", "p_adjusted"),
                "gate": pair.gate(limit) if limit is not None else None,
                "differs": list(pair.differs),
            }
            for pair in pairs
        ],
    }
