"""A few explained steps of one run, as rows for the timelines: what each rank did when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vitscale.analysis import Analysis, TrialResult
from vitscale.analysis.time.timelines import explained_steps, lanes
from vitscale.base.time_spans import Interval, length
from vitscale.report import words
from vitscale.report.breakdown_data import LONGEST_STEP, PART_NAMES
from vitscale.report.chart_data import Row
from vitscale.report.tables import trial_label
from vitscale.store.results import Run

_MOST_TIMELINES = 12
_MOST_RECTANGLES = 3000
"""On all timelines of a page together."""
_STEPS = 3
_MOST_LANES = 16
_LEAST_SEEN = 1 / 500
"""Of the longest step drawn: what is shorter would be less than a pixel."""


@dataclass(frozen=True)
class Timeline:
    """Steps of one run, of the trial on the most ranks of its curve."""

    label: str
    trial_id: str
    repeat: int
    steps: tuple[int, ...]
    """Those that are drawn, counted from 1."""
    ranks: tuple[int, ...]
    """Those that are drawn."""
    unit: words.Unit
    rows: tuple[Row, ...]
    """One rectangle each, in `unit` from its step's beginning."""
    text: tuple[str, ...]
    notes: tuple[str, ...]
    """What was left out."""


def timelines(analysis: Analysis) -> tuple[list[Timeline], list[str]]:
    """The timelines of a study, each trial once, and the labels of those for which there was no room."""
    found: dict[str, tuple[TrialResult, Run]] = {}
    for curve in analysis.curves:
        explained = [
            (analysis.trials[point.trial_id], run)
            for point in sorted(curve.points, key=lambda point: -point.gpus)
            for run in analysis.trials[point.trial_id].records
            if _sound_steps(run)
        ]
        if explained:
            found.setdefault(explained[0][0].trial_id, explained[0])
    drawn = list(found.values())[:_MOST_TIMELINES]
    budget = _MOST_RECTANGLES // max(1, len(drawn))
    left_out = [trial_label(analysis, trial) for trial, _ in list(found.values())[_MOST_TIMELINES:]]
    timelines_drawn = [_timeline(analysis, trial, run, budget) for trial, run in drawn]
    return [one for one in timelines_drawn if one.rows], left_out


def _timeline(analysis: Analysis, trial: TrialResult, run: Run, budget: int) -> Timeline:
    explained = _sound_steps(run)
    steps = _spread(explained, _STEPS)
    straggler = trial.breakdown.straggler if trial.breakdown else None
    ranks = _spread(sorted(rank.rank for rank in run.ranks), _MOST_LANES)
    if straggler is not None and straggler.rank not in ranks:
        ranks = sorted([*ranks[:-1], straggler.rank])
    parts = {step: {rank: own for rank, own in lanes(run, step).items() if rank in ranks} for step in steps}
    whole = {(step, rank): _length(own) for step in steps for rank, own in parts[step].items()}
    unit = words.time_unit(whole.values())
    rows: list[Row] = []
    seen = _LEAST_SEEN * max(whole.values())
    for place, step in enumerate(steps):
        for rank, own in parts[step].items():
            for part, intervals in own.items():
                rows += [
                    {
                        "panel": f"step {step + 1}",
                        "place": place,
                        "rank": rank,
                        "part": PART_NAMES[part],
                        "start": start * unit.per_second,
                        "end": end * unit.per_second,
                        "shown": words.seconds(end - start),
                    }
                    for start, end in intervals
                    if end - start >= seen
                ]
    kept = sorted(rows, key=lambda row: row["start"] - row["end"])[:budget]
    drawn_seconds = sum(row["end"] - row["start"] for row in kept) / unit.per_second
    return Timeline(
        label=trial_label(analysis, trial),
        trial_id=trial.trial_id,
        repeat=run.header.repeat,
        steps=tuple(step + 1 for step in steps),
        ranks=tuple(ranks),
        unit=unit,
        rows=tuple(sorted(kept, key=lambda row: (row["place"], row["rank"], row["start"]))),
        text=tuple(
            f"step {step + 1}, rank {rank}: {words.seconds(whole[step, rank])}: {_sums(own)}"
            for step in steps
            for rank, own in parts[step].items()
        ),
        notes=_left_out(
            len(steps), len(explained), len(ranks), len(run.ranks), drawn_seconds / (sum(whole.values()) or 1.0)
        ),
    )


def _sound_steps(run: Run) -> list[int]:
    """The explained steps of all ranks that took some time, and not more than any step can."""
    broken = {line.step for rank in run.ranks for line in rank.explained if not 0 < line.seconds < LONGEST_STEP}
    return [step for step in explained_steps(run) if step not in broken]


def _spread(items: Sequence[int], most: int) -> list[int]:
    """At most so many, evenly spread from the first to the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def _sums(parts: dict[str, list[Interval]]) -> str:
    return ", ".join(f"{PART_NAMES[part]} {words.seconds(length(parts[part]))}" for part in PART_NAMES if part in parts)


def _length(parts: dict[str, list[Interval]]) -> float:
    return max((end for own in parts.values() for _, end in own), default=0.0)


def _left_out(steps: int, explained: int, ranks: int, world: int, share_drawn: float) -> tuple[str, ...]:
    notes = []
    if steps < explained:
        notes.append(f"{steps} of the {explained} explained steps are drawn")
    if ranks < world:
        notes.append(f"{ranks} of the {world} ranks are drawn")
    if share_drawn < 1 - 1e-9:
        notes.append(f"not drawn: pieces too short, {words.percent(1 - share_drawn, 1)} of the time")
    return tuple(notes)
