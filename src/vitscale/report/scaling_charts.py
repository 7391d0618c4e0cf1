"""One figure along all curves of a batch policy: measured points with their intervals, and the ideal."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from vitscale.analysis import Analysis, CurveResult
from vitscale.report import chart_data, words
from vitscale.report.chart_data import Quantity, Row
from vitscale.report.figure import Figure, colour_of, cut_bars, finished, interval_bars, shape_of
from vitscale.report.style import DASHED, IDEAL_COLOUR
from vitscale.trial.trial import Mode

_WIDTH, _HEIGHT = 400, 260
_MOST_IDEALS = 6
"""Of more curves only the first one's ideal is drawn: a dashed line each would hide the curves."""
_WIDE_RANGE = 8
"""From this ratio of largest to smallest rank count on, both axes are logarithmic."""
_HEADROOM = 1.5
"""How far beyond the outermost point or ideal a bar may reach, as a factor. Intervals of two runs can be so wide that
the points they belong to would shrink to a line."""


def scaling_figure(analysis: Analysis, mode: Mode, curves: Sequence[CurveResult], quantity: Quantity) -> Figure | None:
    """One figure by ranks; None where nothing of it is known, or where it compares and there is one rank count."""
    rows = chart_data.measured(analysis, curves, quantity)
    if not rows or (quantity.relative and len({row["gpus"] for row in rows}) < 2):
        return None
    ideal = chart_data.ideal(analysis, curves, quantity)
    of_which = ""
    if ideal and not quantity.relative and len(curves) > _MOST_IDEALS:
        of_which = next(curve.name for curve in curves if curve.name in {row["series"] for row in ideal})
        ideal = [row for row in ideal if row["series"] == of_which]
    axis_title = quantity.title
    if quantity.is_time:
        unit = words.time_unit(row["value"] for row in rows)
        rows, ideal = (_in_unit(some, unit.per_second) for some in (rows, ideal))
        axis_title = f"{quantity.title} ({unit.sign})"
    levels = [row["value"] for row in (*rows, *ideal)]
    cut = cut_bars(rows, min(levels) / _HEADROOM, max(levels) * _HEADROOM)
    x, y = _axes(rows, axis_title, linear=quantity.name == "efficiency" or (mode == "weak" and quantity.is_time))
    names = [curve.name for curve in curves]
    colour, shape = colour_of(names), shape_of(names)
    tooltip = [
        alt.Tooltip("series:N", title="curve"),
        alt.Tooltip("gpus:Q", title="ranks"),
        alt.Tooltip("shown:N", title=quantity.title),
        alt.Tooltip("bounds:N", title="95 % interval"),
        alt.Tooltip("runs:Q", title="runs"),
        alt.Tooltip("trial:N", title="trial"),
    ]
    alike = [row for row in rows if not row["drift"]]
    drifting = [row for row in rows if row["drift"]]
    points = alt.Chart(alt.InlineData(values=alike))
    layers = [
        points.mark_line(strokeWidth=2).encode(x=x, y=y, color=colour),
        *interval_bars(alt.Chart(alt.InlineData(values=rows)), x, colour),
        points.mark_point(size=60, filled=True, opacity=1).encode(x=x, y=y, color=colour, shape=shape, tooltip=tooltip),
    ]
    if drifting:
        hollow = alt.Chart(alt.InlineData(values=drifting)).mark_point(size=60, filled=False, opacity=1)
        layers.append(hollow.encode(x=x, y=y, color=colour, shape=shape, tooltip=[*tooltip, alt.Tooltip("drift:N")]))
    if ideal:
        ideal_colour = alt.value(IDEAL_COLOUR) if quantity.relative else colour
        layers.insert(
            0,
            alt.Chart(alt.InlineData(values=ideal))
            .mark_line(strokeDash=DASHED, strokeWidth=1.2, strokeOpacity=0.65, opacity=1)
            .encode(x=x, y=y, color=ideal_colour, detail="series:N"),
        )
    title = f"{'Weak' if mode == 'weak' else 'Strong'} scaling: epoch time" if quantity.is_time else quantity.heading
    subtitle = f"{mode}; bars: 95 % intervals" + (" (cut where no cap)" if cut else "")
    chart = alt.layer(*layers).properties(
        width=_WIDTH,
        height=_HEIGHT,
        title=alt.Title(
            title,
            subtitle=subtitle
            + ("; dashed: ideal" if ideal else "")
            + (f" of {of_which}" if of_which else "")
            + ("; hollow: drifts" if drifting else ""),
        ),
    )
    text = [
        f"{row['series']}, {words.ranks(row['gpus'])}: {row['shown']} "
        f"({'; '.join(filter(None, (row['bounds'], row['drift'])))})"
        for row in rows
    ]
    return finished(f"{mode}-{quantity.name}", mode, title, chart, text)


def _axes(rows: Sequence[Row], title: str, *, linear: bool) -> tuple[alt.X, alt.Y]:
    """Ranks and the figure: logarithmic over a wide range of ranks, the figure from zero over a narrow one."""
    counts = sorted({row["gpus"] for row in rows})
    wide_range = counts[-1] >= _WIDE_RANGE * counts[0]
    logarithmic = alt.Scale(type="log", base=2)
    x_scale = (
        alt.Scale(type="log", base=2, nice=False, padding=18)
        if wide_range
        else alt.Scale(zero=False, nice=False, padding=18)
    )
    x_axis = alt.Axis(values=counts, format="d", grid=False, labelOverlap=True)
    y_scale = logarithmic if wide_range and not linear else alt.Scale(zero=True, nice=True)
    return (
        alt.X("gpus:Q", title="ranks", scale=x_scale, axis=x_axis),
        alt.Y("value:Q", title=title, scale=y_scale, axis=alt.Axis(tickCount=6, format="~r")),
    )


def _in_unit(rows: Sequence[Row], factor: float) -> list[Row]:
    return [
        row | {key: row[key] * factor for key in ("value", "low", "high") if row.get(key) is not None} for row in rows
    ]
