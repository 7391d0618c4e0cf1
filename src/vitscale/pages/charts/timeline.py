"""Timelines: a lane per rank, with what it did when in an explained step of one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vitscale.analysis import Analysis, TrialResult
from vitscale.analysis.time.exposure import explained_steps, lanes
from vitscale.base.time_spans import Interval, length
from vitscale.pages.charts.axes import ChartRow, Plot, quantity, tooltip
from vitscale.pages.charts.time import LONGEST_STEP, PART_NAMES, part_colours
from vitscale.pages.tables import trial_label
from vitscale.present import units
from vitscale.present.document import ControlOption, Figure, FigureView
from vitscale.store.results import Run

_LANE = {1: 34, 2: 34, 3: 28, 4: 28}
"""Ranks to the height of a lane in pixels; more ranks have lower ones."""
_MOST_TIMELINES = 12
_MOST_RECTANGLES = 2000
"""Most rectangles on all timelines of a page together."""
_STEPS = 3
_MOST_LANES = 16
_LEAST_SEEN = 1 / 500
"""Share of the longest drawn step: anything shorter would be less than a pixel."""


@dataclass(frozen=True)
class Timeline:
    """Steps of one run, from the trial on the most ranks of its curve."""

    label: str
    repeat: int
    steps: tuple[int, ...]
    """The steps that are drawn, counted from 1."""
    ranks: tuple[int, ...]
    """The ranks that are drawn."""
    unit: units.Unit
    rows: tuple[ChartRow, ...]
    """One rectangle each, in `unit` from the beginning of its step."""
    text: tuple[str, ...]
    """A sentence for each step."""
    notes: tuple[str, ...]
    """What was left out."""


def timelines(analysis: Analysis) -> tuple[list[Timeline], list[str]]:
    """The timelines of a study, each trial once, and the labels of trials for which there was no room."""
    explained_runs: dict[str, tuple[TrialResult, Run]] = {}
    for curve in analysis.curves:
        explained = (
            (analysis.trials[point.trial_id], run)
            for point in sorted(curve.points, key=lambda point: -point.gpus)
            for run in analysis.trials[point.trial_id].recorded_runs
            if _sound_steps(run)
        )
        if first := next(explained, None):
            explained_runs.setdefault(first[0].trial_id, first)
    drawn = list(explained_runs.values())[:_MOST_TIMELINES]
    budget = _MOST_RECTANGLES // max(1, len(drawn))
    left_out = [trial_label(analysis, trial) for trial, _ in list(explained_runs.values())[_MOST_TIMELINES:]]
    timelines_drawn = [_timeline(analysis, trial, run, budget) for trial, run in drawn]
    return [timeline for timeline in timelines_drawn if timeline.rows], left_out


def _timeline(analysis: Analysis, trial: TrialResult, run: Run, budget: int) -> Timeline:
    explained = _sound_steps(run)
    steps = _spread(explained, _STEPS)
    straggler = trial.breakdown.straggler if trial.breakdown else None
    ranks = _spread(sorted(rank.rank for rank in run.ranks if rank.explained), _MOST_LANES)
    if straggler is not None and straggler.rank not in ranks:
        ranks = sorted([*ranks[:-1], straggler.rank])
    parts = {step: {rank: own for rank, own in lanes(run, step).items() if rank in ranks} for step in steps}
    seconds = {(line.step, rank.rank): line.seconds for rank in run.ranks for line in rank.explained}
    whole = {(step, rank): seconds[step, rank] for step in steps for rank in parts[step]}
    known = sum(length(spans) for lane in parts.values() for own in lane.values() for spans in own.values())
    unit = units.time_unit(whole.values())
    rows: list[ChartRow] = []
    seen = _LEAST_SEEN * max(whole.values())
    for index, step in enumerate(steps):
        for rank, own in parts[step].items():
            for part, intervals in own.items():
                rows += [
                    {
                        "panel": f"step {step + 1}",
                        "place": index,
                        "rank": rank,
                        "part": PART_NAMES[part],
                        "start": start * unit.factor,
                        "end": end * unit.factor,
                        "shown": units.seconds(end - start),
                    }
                    for start, end in intervals
                    if end - start >= seen
                ]
    kept = sorted(rows, key=lambda row: row["start"] - row["end"])[:budget]
    drawn_seconds = sum(row["end"] - row["start"] for row in kept) / unit.factor
    return Timeline(
        label=trial_label(analysis, trial),
        repeat=run.header.repeat,
        steps=tuple(step + 1 for step in steps),
        ranks=tuple(ranks),
        unit=unit,
        rows=tuple(sorted(kept, key=lambda row: (row["place"], row["rank"], row["start"]))),
        text=tuple(
            f"Step {step + 1}: "
            + "; ".join(f"rank {rank}: {_sums(own, whole[step, rank])}" for rank, own in lane.items())
            for step, lane in parts.items()
        ),
        notes=_left_out(len(steps), len(explained), len(ranks), len(run.ranks), drawn_seconds / (known or 1.0)),
    )


def _sound_steps(run: Run) -> list[int]:
    """The steps that all ranks explained, that took some time and no more than any step can."""
    broken = {line.step for rank in run.ranks for line in rank.explained if not 0 < line.seconds < LONGEST_STEP}
    return [step for step in explained_steps(run) if step not in broken]


def _spread(items: Sequence[int], most: int) -> list[int]:
    """Up to `most` of the items, evenly spread from the first to the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


def _sums(parts: dict[str, list[Interval]], whole: float) -> str:
    told = {PART_NAMES[part]: length(parts[part]) for part in PART_NAMES if part in parts}
    if (rest := whole - sum(told.values())) > _LEAST_SEEN * whole:
        told["unknown"] = rest
    sums = ", ".join(f"{name} {units.seconds(seconds)}" for name, seconds in told.items())
    return f"{units.seconds(whole)}: {sums}"


def _left_out(steps: int, explained: int, ranks: int, world: int, share_drawn: float) -> tuple[str, ...]:
    notes = []
    if steps < explained:
        notes.append(f"{steps} of the {explained} explained steps are drawn")
    if ranks < world:
        notes.append(f"{ranks} of the {world} ranks are drawn")
    if share_drawn < 1 - 1e-9:
        notes.append(f"not drawn: pieces too short, {units.percent(1 - share_drawn, 1)} of the time")
    return tuple(notes)


def timeline_chart(analysis: Analysis) -> Figure | None:
    """A view for each step of each curve's largest trial; None where no step was explained."""
    chosen, left_out = timelines(analysis)
    views = [
        _view(number, timeline, step, index, left_out)
        for number, timeline in enumerate(chosen, 1)
        for index, step in enumerate(timeline.steps)
    ]
    return Figure("timeline", "What each rank did when", tuple(views)) if views else None


def _view(number: int, timeline: Timeline, step: int, order: int, left_out: Sequence[str]) -> FigureView:
    rows = [row | {"rank": str(row["rank"])} for row in timeline.rows if row["place"] == order]
    plot = Plot({"rows": rows})
    plot.add(
        "rows",
        {"type": "bar", "height": {"band": 0.82}},
        x=quantity("start", f"{timeline.unit.sign} since the rank's step began", axis={"tickCount": 6}),
        x2={"field": "end"},
        y={"field": "rank", "type": "ordinal", "title": "rank", "scale": {"domain": list(map(str, timeline.ranks))}},
        color=part_colours(rows),
        tooltip=tooltip(rank="rank", part="part", shown="time"),
    )
    how = "; ".join(("each rank's own clock begins at 0 with its step", *timeline.notes))
    more = f" No room for the timelines of: {'; '.join(left_out)}." if left_out else ""
    summary = f"{timeline.text[order]}.{more}"
    return FigureView(
        f"timeline-{number}" + (f"-step-{step}" if order else ""),
        {
            "trial": ControlOption(str(number), f"{timeline.label}, repeat {timeline.repeat + 1}"),
            "step": ControlOption(str(order), f"step {step}"),
        },
        f"What each rank did when: {timeline.label}, repeat {timeline.repeat + 1}, step {step}",
        how,
        plot.spec(summary, {"step": _LANE.get(len(timeline.ranks), 20)}),
        {"rank": "rank", "part": "part", "shown": "time"},
        summary,
    )
