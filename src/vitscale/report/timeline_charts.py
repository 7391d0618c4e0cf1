"""Timelines: a lane per rank, what it did when in a few explained steps of one run."""

from __future__ import annotations

import altair as alt

from vitscale.analysis import Analysis
from vitscale.report.breakdown_data import COLOURS, PART_NAMES
from vitscale.report.figure import Figure, finished
from vitscale.report.timeline_data import Timeline, timelines

_WIDTH = 960
_LANE = {1: 34, 2: 34, 3: 28, 4: 28}
"""Ranks to the height of a lane in pixels; more ranks have lower ones."""


def timeline_figures(analysis: Analysis) -> list[Figure]:
    """One figure for the largest trial of each curve, as many as there is room for."""
    found, left_out = timelines(analysis)
    figures = [_figure(place, one) for place, one in enumerate(found, 1)]
    if left_out and figures:
        more = f"no room for the timelines of: {'; '.join(left_out)}"
        last = figures[-1]
        figures[-1] = Figure(last.name, last.mode, last.title, last.spec, (*last.text, more), last.wide, last.section)
    return figures


def _figure(place: int, one: Timeline) -> Figure:
    parts = [name for name in PART_NAMES.values() if any(row["part"] == name for row in one.rows)]
    colours = [COLOURS[part] for part, name in PART_NAMES.items() if name in parts]
    bars = (
        alt.Chart(alt.InlineData(values=list(one.rows)))
        .mark_bar(height=alt.RelativeBandSize(0.82))
        .encode(
            x=alt.X("start:Q", title=f"{one.unit.sign} since the rank's step began", axis=alt.Axis(tickCount=5)),
            x2="end:Q",
            y=alt.Y("rank:O", title="rank", scale=alt.Scale(domain=list(one.ranks))),
            color=alt.Color(
                "part:N",
                scale=alt.Scale(domain=parts, range=colours),
                legend=alt.Legend(title=None, orient="top", columns=9, labelLimit=400, symbolType="square"),
            ),
            tooltip=[
                alt.Tooltip("part:N"),
                alt.Tooltip("shown:N", title="time"),
                alt.Tooltip("rank:O"),
                alt.Tooltip("panel:N", title="of"),
            ],
        )
        .properties(width=_WIDTH // len(one.steps) - 30, height=alt.Step(_LANE.get(len(one.ranks), 20)))
    )
    title = "What each rank did when"
    how = "; ".join(("each rank's own clock begins at 0 with its step", *one.notes))
    subtitle = [f"{one.label}: repeat {one.repeat}", how]
    chart = bars.facet(
        column=alt.Column("panel:N", title=None, sort=alt.EncodingSortField("place", op="min"))
    ).properties(title=alt.Title(title, subtitle=subtitle))
    heading = f"{title}: {one.label}"
    return finished(f"timeline-{place}", None, heading, chart, [*one.text, how], wide=True, section="time")
