"""Where the time of a step goes: stacked bars by rank count and batch size, as times and as shares of the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import altair as alt

from vitscale.analysis import Analysis, CurveResult
from vitscale.report import breakdown_data, words
from vitscale.report.breakdown_data import COLOURS, PART_NAMES, Bar
from vitscale.report.chart_data import Row
from vitscale.report.figure import Figure, finished
from vitscale.trial.trial import Mode

_WIDTH, _HEIGHT = 940, 220
_WIDEST_PANEL, _NARROWEST_PANEL = 300, 70
_AXIS_WIDTH = 52
_MOST_COLUMNS = 6
_MOST_PANELS = 36
_LEAST_LABELLED = 0.07
"""Of the axis: a part that is smaller has no room for its label."""
_ROOM_FOR_LABELS = 30
"""Pixels of a bar's width."""
_MOST_TICKS = 5
_LIGHT_PARTS = [PART_NAMES[part] for part in ("forward", "wait", "norm", "data_wait", "other")]
"""Their labels are dark."""


def breakdown_figures(analysis: Analysis, mode: Mode, curves: Sequence[CurveResult]) -> list[Figure]:
    """The stacked bars of a batch policy twice: in seconds, and as shares; none where no step was explained."""
    bars = breakdown_data.bars(analysis, curves)
    panels = sorted({_panel(bar) for bar in bars})
    drawn = [bar for bar in bars if _panel(bar) in panels[:_MOST_PANELS]]
    if not drawn:
        return []
    unit = words.time_unit([min(bar.seconds for bar in drawn)])
    text = breakdown_data.sentences(bars)
    subtitle = f"{mode}; mean explained step of the rank with the median wait"
    if len(panels) > _MOST_PANELS:
        subtitle += f"; not drawn: {len(panels) - _MOST_PANELS} of {len(panels)} panels (see the table)"
    found = []
    for name, title, scale in (
        ("breakdown", "Where the time of a step goes", unit),
        ("breakdown-share", "Where the time of a step goes: shares", None),
    ):
        rows = breakdown_data.stacked(drawn, unit=scale)
        chart = _panels(drawn, rows, scale).properties(title=alt.Title(title, subtitle=subtitle))
        found.append(finished(f"{mode}-{name}", mode, title, chart, text, wide=len(panels) > 1, section="time"))
    return found


def _panel(bar: Bar) -> tuple[int, int, str]:
    return bar.family_place, bar.batch_order, bar.batch


def _panels(bars: Sequence[Bar], rows: Sequence[Row], unit: words.Unit | None) -> Any:
    """A panel per batch size side by side, families below each other; with one batch size the families side by side."""
    batches = sorted({(bar.batch_order, bar.batch) for bar in bars})
    families = {bar.family for bar in bars}
    parts = [name for part, name in PART_NAMES.items() if any(bar.parts.get(part, 0.0) > 0 for bar in bars)]
    most_bars = max(len({bar.gpus for bar in bars if bar.batch == batch}) for _, batch in batches)
    columns = min(_MOST_COLUMNS, len(batches) if len(batches) > 1 else len(families))
    width = min(_WIDEST_PANEL, max(_NARROWEST_PANEL, _WIDTH // columns - _AXIS_WIDTH, most_bars * 16))
    in_order = alt.EncodingSortField("family_place", op="min")
    if len(batches) == 1:
        panel = _bars(rows, parts, unit, width, width // most_bars)
        return panel.facet(facet=alt.Facet("family:N", title=None, sort=in_order), columns=columns)
    panels = []
    for order, batch in batches:
        own = [row for row in rows if (row["batch_order"], row["batch"]) == (order, batch)]
        panel = _bars(own, parts, unit, width, width // most_bars)
        rowed: Any = panel.facet(row=alt.Row("family:N", title=None, sort=in_order)) if len(families) > 1 else panel
        panels.append(rowed.properties(title=alt.Title(batch, fontSize=12, fontWeight=500, offset=6)))
    return alt.concat(*panels, columns=columns, spacing=14).resolve_scale(color="shared")


def _bars(rows: Sequence[Row], parts: Sequence[str], unit: words.Unit | None, width: int, room: int) -> Any:
    """The bars of one batch size, each in `room` pixels of width."""
    ticks = _ticks(max(row["end"] for row in rows)) if unit else [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    base = alt.Chart().encode(
        x=alt.X("gpus:O", title="ranks", axis=alt.Axis(labelAngle=0)),
        y=alt.Y(
            "start:Q",
            title=f"step ({unit.sign})" if unit else "share of the step",
            axis=alt.Axis(values=ticks, format=",.6~r" if unit else "%"),
            scale=alt.Scale(domain=[0, ticks[-1]], nice=False),
        ),
        y2="end:Q",
    )
    colours = [COLOURS[part] for part, name in PART_NAMES.items() if name in parts]
    drawn = base.mark_bar().encode(
        color=alt.Color(
            "part:N",
            scale=alt.Scale(domain=list(parts), range=colours),
            legend=alt.Legend(title=None, orient="top", columns=5, labelLimit=400, symbolType="square"),
        ),
        tooltip=[
            alt.Tooltip("part:N"),
            alt.Tooltip("shown:N", title="time"),
            alt.Tooltip("share:Q", title="share of the step", format=".1%"),
            alt.Tooltip("gpus:Q", title="ranks"),
            alt.Tooltip("batch:N", title="batch"),
            alt.Tooltip("family:N", title="curve"),
            alt.Tooltip("trial:N"),
        ],
    )
    labelled = [row | _label(row, ticks[-1], unit) for row in rows]
    labels = (
        alt.Chart()
        .mark_text(fontSize=10, baseline="middle")
        .encode(x=alt.X("gpus:O"), y=alt.Y("middle:Q"), text="label:N", color=alt.Color("ink:N", scale=None))
    )
    layers = [drawn, labels] if room >= _ROOM_FOR_LABELS else [drawn]
    return alt.layer(*layers, data=alt.InlineData(values=labelled)).properties(width=width, height=_HEIGHT)


def _label(row: Row, top: float, unit: words.Unit | None) -> Row:
    """What a part says where it has room for it, in the middle of its place, dark on light parts."""
    tall = (row["end"] - row["start"]) / top >= _LEAST_LABELLED
    shown = words.number(row["end"] - row["start"], 2) if unit else words.percent(row["share"])
    return {
        "middle": (row["start"] + row["end"]) / 2,
        "label": shown if tall else "",
        "ink": "#1c2430" if row["part"] in _LIGHT_PARTS else "#ffffff",
    }


def _ticks(highest: float) -> list[float]:
    """Round values from 0 to at least `highest`: an axis that ends on one is as tall in every panel."""
    if not 0 < highest < math.inf:
        return [0.0, 1.0]
    step = 10.0 ** math.floor(math.log10(highest / 2))
    step *= next(times for times in (1, 2, 2.5, 5, 10) if highest / (step * times) <= _MOST_TICKS)
    return [step * place for place in range(math.ceil(highest / step) + 1)]
