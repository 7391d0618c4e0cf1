"""A panel of points by GPU count, and several of them side by side under a figure's number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from vitscale.present.document import Figure
from vitscale.report.charts.axes import Row
from vitscale.report.like.beside import Beside
from vitscale.report.like.marks import colour_of, finished, shape_of
from vitscale.report.like.selection import Selection
from vitscale.report.like.study import StudyFigure
from vitscale.report.style import DASHED, IDEAL_COLOUR

_WIDTH, _HEIGHT = 400, 260
_WIDE_RANGE = 8
"""From this ratio of largest to smallest on, GPU counts and the times of strong scaling are logarithmic."""
_HEADROOM = 1.5
"""How far beyond the outermost point or ideal a bar may reach, as a factor."""


def joined(
    figure: StudyFigure,
    panels: Sequence[Any],
    chosen: Selection,
    others: Beside,
    text: Sequence[str],
    *,
    bounded: bool,
    ideal: str = "dashed: ideal",
) -> Figure:
    """Panels side by side under the figure's number and title.

    Args:
        figure: the study's.
        panels: charts.
        chosen: what they draw.
        others: published points in them.
        text: of the figure.
        bounded: whether some points have an interval.
        ideal: what the dashed line is; empty where it is said in the notes of `chosen`.
    """
    notes = [*chosen.notes, "bars: 95 % intervals over runs" if bounded else "one run each: no intervals"]
    bases = {base.gpus for one in chosen.series if (base := one.base) is not None}
    if bases - {1}:
        notes.append(f"relative to {' and '.join(map(str, sorted(bases)))} GPUs")
    unlike = figure.place == "several unlike hosts"
    notes.append("dashed: ideal, were every host like the first" if unlike else ideal)
    subtitle = ["; ".join(filter(None, notes)), *([others.note] if others.note else [])]
    title = figure.heading
    chart: Any = alt.hconcat(*panels, spacing=30).resolve_scale(color="shared", shape="shared")
    whole = chart.properties(title=alt.Title(title, subtitle=subtitle))
    why = {
        f"{one.curve.name}: {member.gpus} GPUs are not held against {one.base.gpus}: {member.why_not}"
        for one in chosen.series
        for member in one.members
        if member.why_not and one.base is not None
    }
    lines = list(dict.fromkeys([*subtitle, *text, *sorted(why)]))
    return finished(figure.name, title, whole, lines)


def panel(
    rows: Sequence[Row],
    ideals: Sequence[Row],
    beside_rows: Sequence[Row],
    labels: Sequence[str],
    title: str,
    *,
    logarithmic: bool = False,
) -> Any:
    """Points joined within a series, bars where there are intervals, the ideal dashed, the published hollow, grey."""
    levels = [row["value"] for row in (*rows, *ideals, *beside_rows)]
    x, y = _axes(rows, title, levels, logarithmic=logarithmic)
    colour, shape = colour_of(labels), shape_of(labels)
    tooltip = [
        alt.Tooltip("series:N", title="curve"),
        alt.Tooltip("gpus:Q", title="GPUs"),
        alt.Tooltip("shown:N", title=title),
        alt.Tooltip("bounds:N", title="95 % interval"),
        alt.Tooltip("runs:Q", title="runs"),
    ]
    points = alt.Chart(alt.InlineData(values=list(rows)))
    layers: list[Any] = [
        alt.Chart(alt.InlineData(values=list(ideals)))
        .mark_line(strokeDash=DASHED, strokeWidth=1.2, strokeOpacity=0.7)
        .encode(x=x, y=y, color=colour if any(row["series"] in labels for row in ideals) else alt.value(IDEAL_COLOUR),
                detail="series:N"),
        points.mark_line(strokeWidth=2).encode(x=x, y=y, color=colour),
    ]  # fmt: skip
    if bars := [_cut(row, levels) for row in rows if row["low"] is not None]:
        rule = alt.Chart(alt.InlineData(values=bars)).mark_rule(strokeWidth=1.5)
        layers.append(rule.encode(x=x, y=alt.Y("low:Q"), y2="high:Q", color=colour))
    layers.append(
        points.mark_point(size=60, filled=True, opacity=1).encode(x=x, y=y, color=colour, shape=shape, tooltip=tooltip)
    )
    if beside_rows:
        hollow = alt.Chart(alt.InlineData(values=list(beside_rows)))
        layers.append(
            hollow.mark_point(size=60, filled=False, opacity=1, strokeWidth=1.6).encode(
                x=x, y=y, color=alt.value(IDEAL_COLOUR), shape=shape, tooltip=[alt.Tooltip("what:N"), *tooltip[1:3]]
            )
        )
    return alt.layer(*layers).properties(width=_WIDTH, height=_HEIGHT)


def _axes(rows: Sequence[Row], title: str, levels: Sequence[float], *, logarithmic: bool) -> tuple[alt.X, alt.Y]:
    counts = sorted({row["gpus"] for row in rows})
    wide_x = logarithmic and counts[-1] >= _WIDE_RANGE * counts[0]
    # An ideal line over a wide range of GPUs just reaches it, but for rounding.
    wide_y = logarithmic and max(levels) > 0.99 * _WIDE_RANGE * min(levels)
    x_scale = alt.Scale(zero=False, nice=False, padding=18)
    if wide_x:
        x_scale = alt.Scale(type="log", base=2, nice=False, padding=18)
    y_scale, y_axis = alt.Scale(zero=True, nice=True), alt.Axis(tickCount=6, format="~r")
    if wide_y:
        y_scale = alt.Scale(type="log", base=2, nice=False, padding=10)
        y_axis = alt.Axis(values=_round_values(min(levels), max(levels)), format=".2~r")
    return (
        alt.X("gpus:Q", title="GPUs", scale=x_scale, axis=alt.Axis(values=counts, format="d", grid=False)),
        alt.Y("value:Q", title=title, scale=y_scale, axis=y_axis),
    )


def _round_values(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten within and just around the range: a logarithmic axis a reader can read."""
    found = [one * 10.0**power for power in range(-6, 10) for one in (1, 2, 5)]
    return [value for value in found if low / 1.2 <= value <= high * 1.2]


def _cut(row: Row, levels: Sequence[float]) -> Row:
    """A bar as far as it stays near the points: the interval of two runs can be so wide that all else would vanish."""
    return row | {
        "low": max(row["low"], min(levels) / _HEADROOM),
        "high": min(row["high"], max(levels) * _HEADROOM),
    }
