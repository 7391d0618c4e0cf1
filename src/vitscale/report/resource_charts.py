"""Utilisation, memory and energy by rank count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from vitscale.analysis import Analysis, CurveResult
from vitscale.report import resource_data, words
from vitscale.report.chart_data import Row
from vitscale.report.figure import Figure, colour_of, finished, interval_bars, shape_of
from vitscale.report.resource_data import RESOURCES, Resource

_WIDTH, _WIDEST, _HEIGHT = 260, 400, 170


def resource_figures(
    analysis: Analysis, curves: Sequence[CurveResult], resources: Sequence[Resource] = RESOURCES
) -> list[Figure]:
    """One figure for each resource of which anything is known."""
    return [
        _figure(resource, rows, resource_data.rank_points(analysis, curves, resource))
        for resource in resources
        if (rows := resource_data.used(analysis, curves, resource))
    ]


def _figure(resource: Resource, rows: Sequence[Row], points: Sequence[Row]) -> Figure:
    names = list(dict.fromkeys(row["series"] for row in rows))
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    kinds = list(dict.fromkeys(row["kind"] for row in sorted(rows, key=lambda row: int(row["kind_place"]))))
    counts = sorted({row["gpus"] for row in rows})
    colour, shape = colour_of(names), shape_of(names)
    x = alt.X(
        "gpus:Q",
        title="ranks",
        scale=alt.Scale(type="log", base=2, nice=False, padding=16),
        axis=alt.Axis(values=counts, format="d", grid=False, labelOverlap=True),
    )
    y = alt.Y(
        "value:Q",
        title=resource.axis,
        scale=alt.Scale(zero=True),
        axis=alt.Axis(format=resource.axis_format, tickCount=5),
    )
    tooltip = [
        alt.Tooltip("series:N", title="curve"),
        alt.Tooltip("gpus:Q", title="ranks"),
        alt.Tooltip("shown:N", title=resource.title),
        alt.Tooltip("trial:N"),
    ]
    trials = alt.Chart().transform_filter("datum.rank == null")
    ranks = alt.Chart().transform_filter("datum.rank != null")
    spread = trials.transform_filter("datum.low != null && !datum.of_runs")
    layers = alt.layer(
        spread.mark_rule(strokeWidth=1.2, opacity=0.7).encode(x=x, y=alt.Y("low:Q"), y2="high:Q", color=colour),
        *interval_bars(trials.transform_filter("datum.of_runs"), x, colour),
        trials.mark_line(strokeWidth=2).encode(x=x, y=y, color=colour),
        ranks.mark_circle(size=22, opacity=0.75).encode(
            x=x, y=y, color=colour, tooltip=[alt.Tooltip("rank:Q", title="rank"), *tooltip]
        ),
        trials.mark_point(size=60, filled=True, opacity=1).encode(
            x=x, y=y, color=colour, shape=shape, tooltip=[*tooltip, alt.Tooltip("spread:N", title="bar")]
        ),
    ).properties(width=_WIDTH if len(modes) > 1 or len(kinds) > 1 else _WIDEST, height=_HEIGHT)
    in_order = alt.EncodingSortField("kind_place", op="min")
    chart: Any = layers.properties(data=alt.InlineData(values=[*rows, *points]))
    if len(kinds) > 1 and len(modes) > 1:
        chart = chart.facet(
            column=alt.Column("kind:N", title=None, sort=in_order), row=alt.Row("mode:N", title=None, sort=modes)
        )
    elif len(kinds) > 1:
        chart = chart.facet(facet=alt.Facet("kind:N", title=None, sort=in_order), columns=3)
    elif len(modes) > 1:
        chart = chart.facet(facet=alt.Facet("mode:N", title=None, sort=modes), columns=3)
    what = "; ".join(
        [*(modes if len(modes) == 1 else ()), *(kinds if len(kinds) == 1 and len(resource.kinds) > 1 else ())]
    )
    how = f"small points: ranks; line: {resource.joined}" if points else ""
    how = "bars: 95 % intervals" if any(row["of_runs"] for row in rows) else how
    title = f"{resource.title} by ranks"
    text = [
        f"{row['mode']}, {row['series']}, {words.ranks(row['gpus'])}, {row['kind']}: {row['shown']}"
        + (f"; {row['spread']}" if row["spread"] else "")
        for row in rows
    ]
    return finished(
        resource.name,
        None,
        title,
        chart.properties(title=alt.Title(title, subtitle=[line for line in (what, how) if line])),
        list(dict.fromkeys(text)),
        wide=len(modes) > 1 or len(kinds) > 1,
        section="resources",
    )
