"""The breakdown of steps as rows for its charts and its tables: one bar per trial, its parts stacked from below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vitscale.analysis import Analysis, CurveResult, Interval
from vitscale.analysis.time.breakdown import Breakdown, RankParts
from vitscale.report import words
from vitscale.report.chart_data import Row
from vitscale.report.families import families, kept_batch
from vitscale.report.style import COMMUNICATION_COLOUR, PART_COLOURS
from vitscale.store.records import COMMUNICATION, EXPOSED

PART_NAMES: Mapping[str, str] = {
    "data_wait": "data wait",
    "h2d": "copy to device",
    "forward": "forward",
    "backward": "backward",
    "wait": "exposed wait",
    "wire": "exposed wire",
    "norm": "synchronised norm",
    COMMUNICATION: "exposed communication (wait and wire not told apart)",
    "optimizer": "optimizer",
    "launch_gaps": "launch gaps",
    "other": "other",
}
"""In the order of the stack, as a reader wants them named."""
LONGEST_STEP = 1e9
"""Seconds. What is longer comes from a broken clock or a broken record, and would leave no room for anything else."""
COLOURS: Mapping[str, str] = PART_COLOURS | {COMMUNICATION: COMMUNICATION_COLOUR}


@dataclass(frozen=True)
class Bar:
    """The mean explained step of a trial's typical rank."""

    family: str
    """The curve without its batch size: bars of one family differ in batch size and rank count alone."""
    family_place: int
    batch: str
    batch_order: int
    gpus: int
    trial_id: str
    seconds: float
    parts: Mapping[str, float]
    """Part to seconds, in the order of the stack; the unknown ones are absent."""
    reasons: Mapping[str, str]
    """Part to why it is unknown."""


def bars(analysis: Analysis, curves: Sequence[CurveResult]) -> list[Bar]:
    """One bar for each trial of these curves that was explained."""
    found = []
    names = families(analysis, curves)
    places = {family: place for place, family in enumerate(dict.fromkeys(names))}
    for curve, family in zip(curves, names, strict=True):
        for point in curve.points:
            trial = analysis.trials[point.trial_id]
            if trial.breakdown is None or not _sound(trial.breakdown):
                continue
            batch, order = kept_batch(curve, trial)
            found.append(
                Bar(
                    family,
                    places[family],
                    batch,
                    order,
                    point.gpus,
                    point.trial_id,
                    trial.breakdown.typical.seconds,
                    parts_of(trial.breakdown),
                    trial.breakdown.reasons,
                )
            )
    return found


def _sound(breakdown: Breakdown) -> bool:
    """Whether its step took some time that is known of, and no part of it more than any can."""
    parts = parts_of(breakdown).values()
    return breakdown.typical.seconds > 0 and any(parts) and all(0 <= one < LONGEST_STEP for one in parts)


def parts_of(breakdown: Breakdown) -> dict[str, float]:
    """The known parts of the typical rank's step in seconds, in the order of the stack; they add up to the step."""
    typical = breakdown.typical
    parts = {part: seconds for part, seconds in typical.parts.items() if seconds is not None}
    if not all(part in parts for part in EXPOSED):
        parts = {part: seconds for part, seconds in parts.items() if part not in EXPOSED}
        if typical.exposed_seconds is not None:
            parts[COMMUNICATION] = typical.exposed_seconds
    return {part: parts[part] for part in PART_NAMES if part in parts}


def stacked(found: Sequence[Bar], *, unit: words.Unit | None = None) -> list[Row]:
    """One row per part with a length: from where to where it stands in its bar.

    Args:
        found: the bars.
        unit: of time; None: shares of the step.
    """
    rows = []
    for bar in found:
        scale = unit.per_second if unit else 1 / bar.seconds
        height = 0.0
        for order, (part, name) in enumerate(PART_NAMES.items()):
            seconds = bar.parts.get(part, 0.0)
            if seconds > 0:
                rows.append(
                    {
                        "family": bar.family,
                        "family_place": bar.family_place,
                        "batch": bar.batch,
                        "batch_order": bar.batch_order,
                        "gpus": bar.gpus,
                        "trial": bar.trial_id,
                        "part": name,
                        "order": order,
                        "start": height * scale,
                        "end": (height + seconds) * scale,
                        "shown": words.seconds(seconds),
                        "share": seconds / bar.seconds,
                    }
                )
            height += seconds
    return rows


def sentences(found: Sequence[Bar]) -> list[str]:
    """Each bar in words, then why parts are unknown, each reason once."""
    lines = []
    for bar in found:
        each = ", ".join(
            f"{PART_NAMES[part]} {words.seconds(seconds)} ({words.percent(seconds / bar.seconds)})"
            for part, seconds in bar.parts.items()
            if seconds > 0
        )
        lines.append(f"{bar.family}, {bar.batch}, {words.ranks(bar.gpus)}: {words.seconds(bar.seconds)}: {each}")
    return [*lines, *unknown_parts([bar.reasons for bar in found])]


def exposed_share(breakdown: Breakdown) -> float | None:
    """Exposed communication of the typical rank, as a share of its step."""
    typical = breakdown.typical
    exposed = typical.exposed_seconds
    return exposed / typical.seconds if exposed is not None and typical.seconds > 0 else None


def exposed_interval(breakdown: Breakdown) -> Interval | None:
    """The same share with its interval over runs."""
    share = exposed_share(breakdown)
    rank = breakdown.typical.rank
    found = breakdown.over_runs(lambda one: _exposed_share(one.rank(rank)), most=1.0)
    if share is None:
        return None
    return Interval(
        share, found.low if found else None, found.high if found else None, note=found.note if found else ""
    )


def part_interval(breakdown: Breakdown, rank: int, part: str | None) -> Interval | None:
    """Seconds of a part of one rank's step over runs; of the whole step where `part` is None."""

    def of_run(one: Breakdown) -> float | None:
        own = one.rank(rank)
        if part is None:
            return own.seconds
        return own.exposed_seconds if part == COMMUNICATION else own.parts[part]

    return breakdown.over_runs(of_run)


def _exposed_share(rank: RankParts) -> float | None:
    return rank.exposed_seconds / rank.seconds if rank.exposed_seconds is not None and rank.seconds > 0 else None


def unknown_parts(found: Sequence[Mapping[str, str]]) -> list[str]:
    """Why parts are unknown: each reason once, with its parts and the number of trials it holds for."""
    by_reason: dict[str, dict[str, None]] = {}
    for reasons in found:
        for part, reason in reasons.items():
            by_reason.setdefault(reason, {})[PART_NAMES.get(part, part)] = None
    return [
        f"Unknown in {sum(reason in reasons.values() for reasons in found)} of {len(found)} trials: "
        f"{', '.join(parts)}: {reason}."
        for reason, parts in by_reason.items()
    ]
