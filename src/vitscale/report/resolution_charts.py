"""Time and memory by image size, logarithmic both ways: measured as points and lines, forecasts dashed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import altair as alt

from vitscale.analysis import Analysis
from vitscale.report import words
from vitscale.report.chart_data import Row
from vitscale.report.figure import Figure, colour_of, finished, interval_bars, shape_of
from vitscale.report.resolutions import by_resolution
from vitscale.report.style import DASHED

_WIDTH, _HEIGHT = 300, 240
_GIB = 2.0**30


def resolution_figure(analysis: Analysis) -> Figure | None:
    """The figure of a study that varies the size of images; None of any other, and where nothing is known."""
    rows = resolution_rows(analysis)
    if not rows:
        return None
    unit = words.time_unit(row["value"] for row in rows if row["panel"] == "step")
    names = list(dict.fromkeys(row["series"] for row in rows))
    axes = {"step": (f"step ({unit.sign})", unit.per_second), "memory": ("peak memory of a rank (GiB)", 1 / _GIB)}
    panels = [
        _panel([_scaled(row, factor) for row in rows if row["panel"] == panel], title, names)
        for panel, (title, factor) in axes.items()
        if any(row["panel"] == panel for row in rows)
    ]
    title = "Time and memory by image size"
    subtitle = "dashed, hollow: time by FLOPs from the next smaller size; memory by arithmetic"
    text = [f"{row['series']}, {row['size']:,} pixels, {row['kind']}: {row['shown']}" for row in rows]
    chart = alt.hconcat(*panels).properties(title=alt.Title(title, subtitle=subtitle))
    return finished("resolution", None, title, chart, text, wide=True, section="resources")


def resolution_rows(analysis: Analysis) -> list[Row]:
    """A row per size, panel and kind that is known: seconds or bytes."""
    rows: list[Row] = []
    for one in by_resolution(analysis):
        for point in one.points:
            step, peak = point.result.step_seconds, point.result.peak_bytes
            told: tuple[tuple[str, str, float | None, Callable[[Any], str]], ...] = (
                ("step", "measured", step.centre if step else None, words.seconds),
                ("step", "by FLOPs", point.by_flops_seconds, words.seconds),
                ("memory", "measured", peak, words.bytes_text),
                ("memory", "forecast", point.forecast_bytes, words.bytes_text),
            )
            where = {"series": one.name, "size": point.image_size, "trial": point.result.trial_id}
            for panel, kind, value, show in told:
                if value is not None:
                    bounds = (step.low, step.high) if step and (panel, kind) == ("step", "measured") else (None, None)
                    row = where | {"panel": panel, "kind": kind, "measured": kind == "measured", "value": value}
                    rows.append(row | dict(zip(("low", "high"), bounds, strict=True)) | {"shown": show(value)})
    return rows


def _scaled(row: Row, factor: float) -> Row:
    return row | {key: None if row[key] is None else row[key] * factor for key in ("value", "low", "high")}


def _panel(rows: list[Row], title: str, names: list[str]) -> Any:
    sizes = sorted({row["size"] for row in rows})
    x = alt.X(
        "size:Q",
        title="image size (pixels)",
        scale=alt.Scale(type="log", base=2, nice=False, padding=16),
        axis=alt.Axis(values=sizes, format="d", grid=False, labelOverlap=True),
    )
    y = alt.Y("value:Q", title=title, scale=alt.Scale(type="log"), axis=alt.Axis(format="~g", tickCount=5))
    colour, shape = colour_of(names), shape_of(names)
    tooltip = [
        alt.Tooltip("series:N", title="curve"),
        alt.Tooltip("size:Q", title="pixels"),
        alt.Tooltip("kind:N"),
        alt.Tooltip("shown:N", title=title),
        alt.Tooltip("trial:N"),
    ]
    base = alt.Chart(alt.InlineData(values=rows))
    measured, foretold = (base.transform_filter(f"{sign}datum.measured") for sign in ("", "!"))
    return alt.layer(
        foretold.mark_line(strokeDash=DASHED, strokeWidth=1.2, strokeOpacity=0.7).encode(x=x, y=y, color=colour),
        foretold.mark_point(size=40, filled=False, opacity=0.9).encode(
            x=x, y=y, color=colour, shape=shape, tooltip=tooltip
        ),
        measured.mark_line(strokeWidth=2).encode(x=x, y=y, color=colour),
        *interval_bars(measured, x, colour),
        measured.mark_point(size=60, filled=True, opacity=1).encode(
            x=x, y=y, color=colour, shape=shape, tooltip=tooltip
        ),
    ).properties(width=_WIDTH, height=_HEIGHT)
