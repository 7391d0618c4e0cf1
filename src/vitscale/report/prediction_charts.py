"""A chart for each series of what nobody has measured: measured points, the predicted band beyond them, and bounds."""

from __future__ import annotations

import textwrap

import altair as alt

from vitscale.analysis import Analysis
from vitscale.prediction.results import Forecast, Prediction
from vitscale.report import prediction_data, prediction_words, words
from vitscale.report.chart_data import Row
from vitscale.report.figure import Figure, finished
from vitscale.report.prediction_data import AMDAHL, IDEAL, TRANSFERS, Drawn
from vitscale.report.style import DASHED, IDEAL_COLOUR, SERIES_COLOURS
from vitscale.trial.trial import Mode

_WIDTH, _HEIGHT = 400, 280
_WIDTH_ALONE = 880
_CHARACTER = 6
"""Of a subtitle, in pixels: a longer line would make the chart wider, and so all of it smaller."""
_MOST = 12
"""Series that are drawn; the tables have all."""
_BLUE, _VERMILION, _GREEN = SERIES_COLOURS[:3]
_BAND_COLOUR = SERIES_COLOURS[5]
_BOUND_DASHES = {IDEAL: DASHED, AMDAHL: [2, 3], TRANSFERS: [8, 3, 2, 3]}
_BOUND_COLOURS = {IDEAL: IDEAL_COLOUR, AMDAHL: _VERMILION, TRANSFERS: _GREEN}
_SHAPES = {
    "measured": "circle",
    "interpolated": "square",
    "extrapolated": "diamond",
    "prior-driven": "triangle-up",
    "does not fit": "cross",
}
_FURTHEST = 30
"""How far beyond the outermost point a band or a bound may reach, as a factor, before the axis cuts it."""


def prediction_figures(analysis: Analysis, outlook: Forecast) -> list[Figure]:
    """One figure per series that has a measured point, by batch policy."""
    found: list[Figure] = []
    by_series: dict[tuple[str, Mode], list[Prediction]] = {}
    for one in outlook.predictions:
        by_series.setdefault((one.series, one.mode), []).append(one)
    drawable = [series for series in outlook.evidence.series if (series.name, series.mode) in by_series][:_MOST]
    numbers: dict[Mode, int] = {}
    for series in drawable:
        numbers[series.mode] = place = numbers.get(series.mode, 0) + 1
        rows = prediction_data.drawn(analysis, series, by_series[series.name, series.mode])
        name = f"{series.mode}-prediction{'' if place == 1 else f'-{place}'}"
        found.append(_figure(name, series.mode, series.name, rows, alone=len(drawable) == 1))
    return found


def _figure(name: str, mode: Mode, series: str, rows: Drawn, *, alone: bool) -> Figure:
    unit = words.time_unit(row["value"] for row in (*rows.measured, *rows.predicted))
    measured, predicted, bounds = (
        [_in_unit(row, unit.per_second) for row in some] for some in (rows.measured, rows.predicted, rows.bounds)
    )
    points = [*measured, *(row for row in predicted if row["gpus"] not in {one["gpus"] for one in measured})]
    lowest = min(row["value"] for row in points) / _FURTHEST
    highest = max(row["value"] for row in points) * _FURTHEST
    span = [row["value"] for row in (*points, *bounds)] + [
        row[key] for row in predicted for key in ("future_low", "future_high")
    ]
    what = "epoch" if rows.of_epoch else "step"
    x = alt.X(
        "gpus:Q",
        title="ranks",
        scale=alt.Scale(type="log", base=2, nice=False, padding=18),
        axis=alt.Axis(values=_ticks(points), format="~s", grid=False, labelOverlap=True),
    )
    top = min(max(span) * 1.1, highest)
    bottom = max(min(span) / 1.1, lowest)
    y_scale = (
        alt.Scale(domain=[0, top], nice=False, clamp=True)
        if mode == "weak"
        else alt.Scale(type="log", domain=[bottom, top], nice=False, clamp=True)
    )
    y = alt.Y("value:Q", title=f"{what} time ({unit.sign})", scale=y_scale, axis=alt.Axis(tickCount=6, format="~r"))
    layers = [*_bands(predicted, x), _references(bounds, x, y, alone), _line(predicted, x, y), *_points(points, x, y)]
    title = prediction_words.title(series, mode)
    width = _WIDTH_ALONE if alone else _WIDTH
    chart = alt.layer(*layers).properties(
        width=width,
        height=_HEIGHT,
        title=alt.Title(
            f"Predicted {what} time",
            subtitle=[
                *textwrap.wrap(title, width // _CHARACTER),
                "dark: 90 % of the mean; light: of one run; bars: measured, 95 %",
            ],
        ),
    )
    text = [f"{words.ranks(row['gpus'])}: {row['shown']} measured" for row in rows.measured]
    text += [
        f"{words.ranks(row['gpus'])}: {row['shown']} predicted (90 % of the mean {row['mean']}, of one run "
        f"{row['run']}; {row['told']})"
        for row in rows.predicted
    ]
    return finished(name, mode, f"Predicted {what} time, {title}", chart, text, wide=alone, section="prediction")


def _bands(predicted: list[Row], x: alt.X) -> list[alt.Chart]:
    data = alt.Chart(alt.InlineData(values=predicted))
    return [
        data.mark_area(color=_BAND_COLOUR, opacity=opacity, clip=True).encode(x=x, y=alt.Y(f"{low}:Q"), y2=f"{high}:Q")
        for low, high, opacity in (("future_low", "future_high", 0.2), ("low", "high", 0.3))
    ]


def _references(bounds: list[Row], x: alt.X, y: alt.Y, in_a_row: bool) -> alt.Chart:
    """In one legend by colour and dash."""
    names = list(dict.fromkeys(row["bound"] for row in bounds))
    legend = alt.Legend(title=None, orient="bottom", columns=3 if in_a_row else 1, symbolSize=160, symbolOpacity=1)
    colours = alt.Scale(domain=names, range=[_BOUND_COLOURS[name] for name in names])
    dashes = alt.Scale(domain=names, range=[_BOUND_DASHES[name] for name in names])
    lines: alt.Chart = alt.Chart(alt.InlineData(values=bounds)).mark_line(strokeWidth=1.4, clip=True)
    return lines.encode(
        x=x,
        y=y,
        color=alt.Color("bound:N", scale=colours, legend=legend),
        strokeDash=alt.StrokeDash("bound:N", scale=dashes, legend=legend),
    )


def _line(predicted: list[Row], x: alt.X, y: alt.Y) -> alt.Chart:
    line: alt.Chart = alt.Chart(alt.InlineData(values=predicted)).mark_line(strokeWidth=1.6, color=_BLUE)
    return line.encode(x=x, y=y)


def _points(points: list[Row], x: alt.X, y: alt.Y) -> list[alt.Chart]:
    """Measured ones filled and with their bars, predicted ones hollow; the shape tells how surely."""
    told = [name for name in _SHAPES if name in {row["told"] for row in points}]
    legend = alt.Legend(title=None, orient="top", columns=4)
    filled = [_BLUE if name == "measured" else _BAND_COLOUR for name in told]
    shape = alt.Shape("told:N", scale=alt.Scale(domain=told, range=[_SHAPES[name] for name in told]), legend=legend)
    fill = alt.Fill("told:N", scale=alt.Scale(domain=told, range=filled), legend=legend)
    tooltip = [
        alt.Tooltip("gpus:Q", title="ranks", format=","),
        alt.Tooltip("shown:N", title="time"),
        alt.Tooltip("told:N", title="how it is known"),
        alt.Tooltip("mean:N", title="90 % of the mean"),
        alt.Tooltip("run:N", title="90 % of one run"),
    ]
    bounded = [row for row in points if row["told"] == "measured" and row["low"] is not None]
    bars = alt.Chart(alt.InlineData(values=bounded)).mark_rule(strokeWidth=1.5, color=_BLUE)
    marks = alt.Chart(alt.InlineData(values=points)).mark_point(size=60, opacity=1, stroke=_BLUE, strokeWidth=1.5)
    drawn = marks.encode(x=x, y=y, shape=shape, fill=fill, tooltip=tooltip)
    return [*([bars.encode(x=x, y=alt.Y("low:Q"), y2="high:Q")] if bounded else []), drawn]


def _ticks(points: list[Row]) -> list[int]:
    """Doublings of the smallest count, up to the largest."""
    counts = sorted({row["gpus"] for row in points})
    ticks = [counts[0]]
    while ticks[-1] * 2 <= counts[-1]:
        ticks.append(ticks[-1] * 2)
    return ticks


def _in_unit(row: Row, per_second: float) -> Row:
    times = ("value", "low", "high", "future_low", "future_high")
    return row | {key: row[key] * per_second for key in times if row.get(key) is not None}
