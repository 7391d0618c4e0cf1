"""The waterfall: from ideal down to the measured efficiency, one bar per factor and one panel per trial."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

import altair as alt

from vitscale.analysis import Analysis, Interval, Waterfall
from vitscale.analysis.time.run_waterfall import CHECKPOINT, EVALUATION, START_UP
from vitscale.analysis.time.waterfall import STEP_ROUNDING
from vitscale.report import words
from vitscale.report.chart_data import Row
from vitscale.report.figure import Figure, cut_bars, finished, interval_bars
from vitscale.report.style import COMMUNICATION_COLOUR, IDEAL_COLOUR, PART_COLOURS, ROUNDING_COLOUR
from vitscale.store.records import COMMUNICATION
from vitscale.trial.trial import Mode

_IDEAL, _MEASURED = "ideal", "measured"
_COLOURS = {
    _IDEAL: IDEAL_COLOUR,
    STEP_ROUNDING: ROUNDING_COLOUR,
    START_UP: PART_COLOURS["h2d"],
    "compute scaling": PART_COLOURS["backward"],
    "data wait": PART_COLOURS["data_wait"],
    "loading": PART_COLOURS["data_wait"],
    "decoding": PART_COLOURS["forward"],
    "straggler wait": PART_COLOURS["wait"],
    "wire": PART_COLOURS["wire"],
    "synchronised norm": PART_COLOURS["norm"],
    COMMUNICATION: COMMUNICATION_COLOUR,
    "optimizer": PART_COLOURS["optimizer"],
    "launch gaps": PART_COLOURS["launch_gaps"],
    "other": PART_COLOURS["other"],
    EVALUATION: PART_COLOURS["launch_gaps"],
    CHECKPOINT: PART_COLOURS["optimizer"],
    _MEASURED: IDEAL_COLOUR,
}
_PANEL_WIDTH, _ROW_HEIGHT = 210, 19
_PANELS_ABREAST = 3
_MOST_OF_EACH_CURVE = 6
"""With more panels than this, only the largest rank count of each curve is drawn."""
_MOST_PANELS = 12
_LONGEST_LINE = 38
_LINES = "split(datum.value, '\\n')"
"""Panels' names are wrapped: a long one must not widen its panel."""
_ROOM_FOR_LABELS = 1.22
"""Right of the longest bar, as a factor of its length."""
_HEADROOM = 1.5
"""How far beyond the longest bar an interval may reach, as a factor."""


def waterfall_figure(analysis: Analysis, mode: Mode) -> Figure | None:
    """The waterfalls of one batch policy; None where no efficiency could be taken apart."""
    known = [one for one in analysis.waterfalls if one.mode == mode and one.factors]
    return draw_waterfalls(f"{mode}-waterfall", mode, "From ideal to measured", known) if known else None


def draw_waterfalls(name: str, mode: Mode | None, title: str, known: Sequence[Waterfall]) -> Figure:
    """One panel for each of some waterfalls that have factors, as far as there is room."""
    drawn = known if len(known) <= _MOST_OF_EACH_CURVE else _largest(known)
    drawn = drawn[:_MOST_PANELS]
    rows = [row for one, panel in zip(drawn, _panel_names(drawn), strict=True) for row in _rows(one, panel)]
    steps = [name for name in _COLOURS if any(row["step"] == name for row in rows)]
    panels = list(dict.fromkeys(row["panel"] for row in rows))
    cut_bars(rows, 0.0, _HEADROOM * max(row["right"] for row in rows))
    rows = [row | {"right": max(row["right"], row["high"] or 0.0)} for row in rows]
    longest = max(row["right"] for row in rows)
    y = alt.Y(
        "step:N", sort=steps, title=None, axis=alt.Axis(ticks=False, domain=False, labelLimit=200, labelPadding=6)
    )
    x = alt.X(
        "start:Q",
        title="% of ideal",
        scale=alt.Scale(domain=[0, longest * _ROOM_FOR_LABELS], nice=False),
        axis=alt.Axis(
            values=[0, 25, 50, 75, 100] if longest < 150 else alt.Undefined, tickCount=5, format="d", grid=False
        ),
    )
    base = alt.Chart().encode(y=y)
    bars = base.mark_bar(height=alt.RelativeBandSize(band=0.72), stroke="#80808080", strokeWidth=0.5).encode(
        x=x,
        x2="end:Q",
        color=alt.Color("step:N", scale=alt.Scale(domain=steps, range=[_COLOURS[name] for name in steps]), legend=None),
        tooltip=[
            alt.Tooltip("panel:N", title="trial"),
            alt.Tooltip("step:N", title="step"),
            alt.Tooltip("label:N", title="% of ideal, or points"),
            alt.Tooltip("bounds:N", title="95 % interval"),
            alt.Tooltip("factor:N", title="factor"),
        ],
    )
    joints = base.mark_rule(strokeWidth=1, color=IDEAL_COLOUR).encode(
        x=alt.X("end:Q"), y=alt.Y("step:N", sort=steps, bandPosition=0.5), y2=alt.Y2("next:N", bandPosition=0.5)
    )
    labels = base.mark_text(align="left", dx=4, fontSize=11).encode(x=alt.X("right:Q"), text="label:N")
    left_out = len(known) - len(drawn)
    chart = (
        alt.layer(joints, bars, *interval_bars(alt.Chart(), y, None), labels, data=alt.InlineData(values=rows))
        .properties(width=_PANEL_WIDTH, height=alt.Step(_ROW_HEIGHT))
        .facet(
            facet=alt.Facet("panel:N", sort=panels, title=None, header=alt.Header(labelExpr=_LINES)),
            columns=min(_PANELS_ABREAST, len(panels)),
        )
        .properties(
            title=alt.Title(
                title,
                subtitle=f"{mode or drawn[0].mode}; points of efficiency that each factor takes or gives"
                + ("; thin bars: 95 % intervals" if any(row["low"] is not None for row in rows) else "")
                + (f"; {left_out} trials not drawn" if left_out else ""),
            )
        )
    )
    text = [f"{one.curve}: {words.waterfall(one)}" for one in known]
    return finished(name, mode, title, chart, text, wide=len(panels) > 1, section="time")


def _largest(known: Iterable[Waterfall]) -> list[Waterfall]:
    """Of each curve the one with the most ranks."""
    by_curve: dict[tuple[str, str | None], Waterfall] = {}
    for one in known:
        key = (one.curve, one.baseline_trial)
        if key not in by_curve or one.gpus > by_curve[key].gpus:
            by_curve[key] = one
    return list(by_curve.values())


def _panel_names(drawn: Sequence[Waterfall]) -> list[str]:
    """Curve and ranks, with the trial where that names two."""
    names = [words.plain(f"{one.curve}, {words.ranks(one.gpus)}") for one in drawn]
    unlike = [
        name if names.count(name) == 1 else f"{name} ({one.trial_id})" for name, one in zip(names, drawn, strict=True)
    ]
    return [textwrap.fill(name, _LONGEST_LINE) for name in unlike]


def _rows(one: Waterfall, panel: str) -> list[Row]:
    """One bar per row, in percent of ideal: ideal, the factors from where the one before ended, what was measured."""
    reached, sure = one.efficiency or 0.0, one.interval if one.interval and not one.interval.note else None
    rows = [_bar(_IDEAL, 0.0, Interval(100.0, None, None), "100 %")]
    for factor in sorted(one.factors, key=lambda factor: list(_COLOURS).index(factor.name)):
        points = factor.interval or Interval(factor.points, None, None)
        low, high = (None if end is None else -100 * end for end in (points.high, points.low))
        change = Interval(-100 * factor.points, low, high)
        rows.append(_bar(factor.name, rows[-1]["end"], change, _signed(change.centre), f"{factor.factor:.3f}"))
    whole = (sure or Interval(reached, None, None)).times(100)
    rows.append(_bar(_MEASURED, 0.0, whole, f"{whole.centre:.0f} %"))
    following = [row["step"] for row in rows[1:]] + [_MEASURED]
    return [row | {"panel": panel, "next": after} for row, after in zip(rows, following, strict=True)]


def _bar(step: str, start: float, change: Interval, label: str, factor: str = "") -> Row:
    """From `start` on by `change`, whose interval lies around the end."""
    row: Row = {"step": step, "start": start, "end": start + change.centre, "label": label, "factor": factor}
    row |= {"low": None, "high": None, "bounds": "", "right": max(start, start + change.centre)}
    if change.low is not None and change.high is not None:
        row |= {"low": start + change.low, "high": start + change.high}
        row["bounds"] = f"{_signed(change.low)} to {_signed(change.high)}"
    return row


def _signed(points: float) -> str:
    """ "-17.2", "+3.1", "0"."""
    text = f"{points:+.1f}"
    return "0" if float(text) == 0 else text.replace("-", "\N{MINUS SIGN}")
