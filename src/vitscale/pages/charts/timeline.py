"""Timelines of explained steps: a lane per rank, with a rectangle for each time that it spent on a part of the step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vitscale.analysis import Analysis, CurveResult, TrialResult
from vitscale.analysis.time.exposure import explained_steps, lanes
from vitscale.base.time_spans import Interval, length
from vitscale.pages.charts.axes import ChartRow, Plot, quantity, tooltip
from vitscale.pages.charts.time import LONGEST_STEP, PART_NAMES, part_colours
from vitscale.pages.tables import trial_label
from vitscale.present import units
from vitscale.present.document import ControlOption, Figure, FigureView
from vitscale.store.results import Run

_LANE_PIXELS = {1: 34, 2: 34, 3: 28, 4: 28}
"""Number of ranks -> height of a lane; more ranks have lower ones."""
_LANE_PIXELS_OF_MANY = 20
_MOST_TIMELINES = 12
_MOST_RECTANGLES = 2000
"""Most rectangles on all timelines of a page together."""
_MOST_STEPS_DRAWN = 3
_MOST_LANES = 16
_SHORTEST_DRAWN_SHARE = 1 / 500
"""Share of the longest drawn step: anything shorter would be less than a pixel."""
_Lane = Mapping[str, list[Interval]]
"""Part of a step -> the intervals in which a rank did it, in seconds since the rank's step began."""


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
    """A row for each rectangle, with times in `unit` since the beginning of its step."""
    text: tuple[str, ...]
    """A sentence for each step."""
    notes: tuple[str, ...]
    """Notes on what was left out."""


class Timelines(NamedTuple):
    """The timelines of a study."""

    drawn: list[Timeline]
    without_room: list[str]
    """Labels of trials for whose timelines there was no room."""


class _ExplainedRun(NamedTuple):
    """A run that explained steps, and its trial."""

    trial: TrialResult
    run: Run


class _RankStep(NamedTuple):
    """A step of one rank."""

    step: int
    rank: int


def timelines(analysis: Analysis) -> Timelines:
    """Make the timelines of a study, each trial once."""
    runs_by_trial: dict[str, _ExplainedRun] = {}
    for curve in analysis.curves:
        explained = _explained_run_of_curve(analysis, curve)
        if explained is not None:
            runs_by_trial.setdefault(explained.trial.trial_id, explained)
    explained_runs = list(runs_by_trial.values())
    drawn = explained_runs[:_MOST_TIMELINES]
    most_rectangles = _MOST_RECTANGLES // max(1, len(drawn))
    timelines_drawn = [_timeline_of_run(analysis, trial, run, most_rectangles) for trial, run in drawn]
    without_room = [trial_label(analysis, trial) for trial, _ in explained_runs[_MOST_TIMELINES:]]
    return Timelines([timeline for timeline in timelines_drawn if timeline.rows], without_room)


def _explained_run_of_curve(analysis: Analysis, curve: CurveResult) -> _ExplainedRun | None:
    """Return the run to draw of a curve: the first with sound explained steps, of the trial on the most ranks.

    A trial without such a run is passed over. Return None where no trial has one.
    """
    for point in sorted(curve.points, key=lambda point: -point.gpus):
        trial = analysis.trials[point.trial_id]
        for run in trial.recorded_runs:
            if _sound_steps(run):
                return _ExplainedRun(trial, run)
    return None


def _timeline_of_run(analysis: Analysis, trial: TrialResult, run: Run, most_rectangles: int) -> Timeline:
    """Return the timeline of a run: some of its steps on some of its ranks, in at most so many rectangles."""
    explained = _sound_steps(run)
    steps = _evenly_spread(explained, _MOST_STEPS_DRAWN)
    ranks = _drawn_ranks(trial, run)
    lanes_by_step = {step: _lane_by_rank(run, step, ranks) for step in steps}
    step_seconds = _step_seconds(run, lanes_by_step)
    unit = units.time_unit(step_seconds.values())
    rows = _rectangle_rows(lanes_by_step, unit, shortest_seconds=_SHORTEST_DRAWN_SHARE * max(step_seconds.values()))
    longest_first = sorted(rows, key=lambda row: row["start"] - row["end"])
    drawn_rows = longest_first[:most_rectangles]
    drawn_seconds = sum(row["end"] - row["start"] for row in drawn_rows) / unit.factor
    return Timeline(
        label=trial_label(analysis, trial),
        repeat=run.header.repeat,
        steps=tuple(step + 1 for step in steps),
        ranks=tuple(ranks),
        unit=unit,
        rows=tuple(sorted(drawn_rows, key=lambda row: (row["place"], row["rank"], row["start"]))),
        text=tuple(_step_in_words(step, lanes_by_step[step], step_seconds) for step in steps),
        notes=_notes_on_omissions(
            steps=len(steps),
            explained=len(explained),
            ranks=len(ranks),
            world=len(run.ranks),
            share_drawn=drawn_seconds / (_known_seconds(lanes_by_step) or 1.0),
        ),
    )


def _rectangle_rows(
    lanes_by_step: Mapping[int, Mapping[int, _Lane]], unit: units.Unit, *, shortest_seconds: float
) -> list[ChartRow]:
    """Return a row for each rectangle of all steps (`place`: number of the step's picture) and ranks."""
    rows: list[ChartRow] = []
    for index, (step, lane_by_rank) in enumerate(lanes_by_step.items()):
        position = {"panel": f"step {step + 1}", "place": index}
        for rank, lane in lane_by_rank.items():
            rows += [position | {"rank": rank} | row for row in _rectangles(lane, unit, shortest_seconds)]
    return rows


def _drawn_ranks(trial: TrialResult, run: Run) -> list[int]:
    """Return the ranks that have a lane: evenly spread ones of those with explained steps, and the straggler."""
    ranks = _evenly_spread(sorted(rank.rank for rank in run.ranks if rank.explained), _MOST_LANES)
    straggler = trial.breakdown.straggler if trial.breakdown else None
    if straggler is None or straggler.rank in ranks:
        return ranks
    return sorted([*ranks[:-1], straggler.rank])


def _lane_by_rank(run: Run, step: int, ranks: Collection[int]) -> dict[int, _Lane]:
    """Return rank -> its lane in a step, for these ranks."""
    return {rank: lane for rank, lane in lanes(run, step).items() if rank in ranks}


def _step_seconds(run: Run, lanes_by_step: Mapping[int, Mapping[int, _Lane]]) -> dict[_RankStep, float]:
    """Return the seconds of each drawn step on each drawn rank."""
    recorded: dict[_RankStep, float] = {}
    for rank_record in run.ranks:
        for line in rank_record.explained:
            recorded[_RankStep(line.step, rank_record.rank)] = line.seconds
    seconds: dict[_RankStep, float] = {}
    for step, lane_by_rank in lanes_by_step.items():
        for rank in lane_by_rank:
            rank_step = _RankStep(step, rank)
            seconds[rank_step] = recorded[rank_step]
    return seconds


def _known_seconds(lanes_by_step: Mapping[int, Mapping[int, _Lane]]) -> float:
    """Return the seconds of all lanes together in which the part of the step is known."""
    interval_seconds: list[float] = []
    for lane_by_rank in lanes_by_step.values():
        for lane in lane_by_rank.values():
            interval_seconds += [length(intervals) for intervals in lane.values()]
    return sum(interval_seconds)


def _rectangles(lane: _Lane, unit: units.Unit, shortest_seconds: float) -> Iterator[ChartRow]:
    """Yield a row for each interval that a rank spent on a part, if it lasted `shortest_seconds` or more."""
    for part, intervals in lane.items():
        for start, end in intervals:
            if end - start >= shortest_seconds:
                yield {
                    "part": PART_NAMES[part],
                    "start": start * unit.factor,
                    "end": end * unit.factor,
                    "shown": units.seconds(end - start),
                }


def _sound_steps(run: Run) -> list[int]:
    """Return the steps that all ranks explained, and that on every rank took a time that a step can take."""
    broken_steps = set()
    for rank in run.ranks:
        for line in rank.explained:
            is_possible = 0 < line.seconds < LONGEST_STEP
            if not is_possible:
                broken_steps.add(line.step)
    return [step for step in explained_steps(run) if step not in broken_steps]


def _evenly_spread(items: Sequence[int], most: int) -> list[int]:
    """Return up to `most` of the items, evenly spread from the first to the last: 0, 4, 9 of 0 to 9 for three."""
    if len(items) <= most:
        return list(items)
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


def _step_in_words(step: int, lanes_of_step: Mapping[int, _Lane], step_seconds: Mapping[_RankStep, float]) -> str:
    """Return the parts of a step on each rank: "Step 3: rank 0: 120 ms: forward 40 ms, backward 80 ms; rank 1: ..."."""
    ranks = [
        f"rank {rank}: {_parts_in_words(lane, step_seconds[_RankStep(step, rank)])}"
        for rank, lane in lanes_of_step.items()
    ]
    return f"Step {step + 1}: {'; '.join(ranks)}"


def _parts_in_words(lane: _Lane, step_seconds: float) -> str:
    """Return the parts of a step on a rank: "120 ms: forward 40 ms, backward 70 ms, unknown 10 ms"."""
    seconds_by_name = {PART_NAMES[part]: length(lane[part]) for part in PART_NAMES if part in lane}
    unknown = step_seconds - sum(seconds_by_name.values())
    if unknown > _SHORTEST_DRAWN_SHARE * step_seconds:
        seconds_by_name["unknown"] = unknown
    parts = ", ".join(f"{name} {units.seconds(seconds)}" for name, seconds in seconds_by_name.items())
    return f"{units.seconds(step_seconds)}: {parts}"


def _notes_on_omissions(*, steps: int, explained: int, ranks: int, world: int, share_drawn: float) -> tuple[str, ...]:
    """Return notes on what a timeline does not draw.

    Args:
        steps: number of steps that are drawn.
        explained: number of steps that could be drawn.
        ranks: number of ranks that are drawn.
        world: number of ranks of the run.
        share_drawn: share of the known time that is drawn.
    """
    notes = []
    if steps < explained:
        notes.append(f"{steps} of the {explained} explained steps are drawn")
    if ranks < world:
        notes.append(f"{ranks} of the {world} ranks are drawn")
    if share_drawn < 1 - 1e-9:
        notes.append(f"not drawn: pieces too short, {units.percent(1 - share_drawn, 1)} of the time")
    return tuple(notes)


def timeline_chart(analysis: Analysis) -> Figure | None:
    """Draw a view for each step of each curve's largest trial; None where no step was explained."""
    drawn, without_room = timelines(analysis)
    views: list[FigureView] = []
    for number, timeline in enumerate(drawn, 1):
        views += [_step_view(timeline, number, index, without_room) for index in range(len(timeline.steps))]
    return Figure("timeline", "What each rank did when", tuple(views)) if views else None


def _step_view(timeline: Timeline, number: int, index: int, without_room: Sequence[str]) -> FigureView:
    """Draw one step.

    Args:
        timeline: the timeline.
        number: its number among the study's, from 1.
        index: which of its steps, from 0.
        without_room: labels of trials whose timelines are not drawn.
    """
    step = timeline.steps[index]
    rows = [row | {"rank": str(row["rank"])} for row in timeline.rows if row["place"] == index]
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
    summary = f"{timeline.text[index]}."
    if without_room:
        summary += f" No room for the timelines of: {'; '.join(without_room)}."
    run = f"{timeline.label}, repeat {timeline.repeat + 1}"
    name = f"timeline-{number}"
    return FigureView(
        name=name if index == 0 else f"{name}-step-{step}",
        choices={"trial": ControlOption(str(number), run), "step": ControlOption(str(index), f"step {step}")},
        title=f"What each rank did when: {run}, step {step}",
        subtitle="; ".join(("each rank's own clock begins at 0 with its step", *timeline.notes)),
        spec=plot.spec(summary, {"step": _LANE_PIXELS.get(len(timeline.ranks), _LANE_PIXELS_OF_MANY)}),
        columns={"rank": "rank", "part": "part", "shown": "time"},
        summary=summary,
    )
