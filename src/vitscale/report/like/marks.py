"""What the charts of published studies' figures share: colours, shapes, legends, intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
from altair.utils.schemapi import disable_debug_mode

from vitscale.present.data import finite
from vitscale.present.document import Figure, View
from vitscale.report.style import SERIES_COLOURS, SERIES_SHAPES

disable_debug_mode()  # altair would check each part as it is made, a third of the drawing; tests check the charts
_MANY = 6
"""Of more curves the legend is set small, or it would be taller than the chart."""


def finished(name: str, title: str, chart: alt.TopLevelMixin, text: Sequence[str]) -> Figure:
    """The figure of a chart: its theme taken off, what it says put in for those who cannot see it."""
    spec: dict[str, Any] = finite(chart.to_dict(validate=False))
    spec.pop("config", None)
    heading = spec.pop("title", {})
    subtitle = heading.get("subtitle", "") if isinstance(heading, dict) else ""
    summary = "; ".join(text[:4])
    spec["description"] = f"{title}. {summary}"
    spec["datasets"] = spec.get("datasets", {}) | {"rows": [{"text": line} for line in text]}
    lines = subtitle if isinstance(subtitle, str) else "; ".join(subtitle)
    return Figure(name, title, (View(name, {}, title, lines, spec, {"text": "in words"}, summary),))


def colour_of(names: Sequence[str]) -> alt.Color:
    """Each curve's colour, by its place among `names`."""
    colours = [SERIES_COLOURS[place % len(SERIES_COLOURS)] for place in range(len(names))]
    return alt.Color("series:N", scale=alt.Scale(domain=list(names), range=colours), legend=_legend(names))


def shape_of(names: Sequence[str]) -> alt.Shape:
    """Each curve's shape, by its place among `names`."""
    shapes = [SERIES_SHAPES[place % len(SERIES_SHAPES)] for place in range(len(names))]
    return alt.Shape("series:N", scale=alt.Scale(domain=list(names), range=shapes), legend=_legend(names))


def interval_bars(base: alt.Chart, beside: alt.X | alt.Y, colour: alt.Color | None) -> list[alt.Chart]:
    """Intervals of a chart's rows: bars with caps, but for ends that were cut.

    Args:
        base: of rows with `low` and `high`, null where there is no interval, and of `cut_bars`.
        beside: the axis along which they stand; the bars lie along the other.
        colour: of the rows; None: the theme's.
    """
    upright = isinstance(beside, alt.X)
    ink = {} if colour is None else {"color": colour}
    bounded = base.transform_filter("datum.low != null")

    def at(end: str) -> dict[str, Any]:
        return {"x": beside, "y": alt.Y(f"{end}:Q")} if upright else {"y": beside, "x": alt.X(f"{end}:Q")}

    rule = bounded.mark_rule(strokeWidth=1.5)
    caps = [
        bounded.transform_filter(f"!datum.{end}_cut")
        .mark_tick(thickness=1.5, size=9, orient="horizontal" if upright else "vertical")
        .encode(**at(end), **ink)
        for end in ("low", "high")
    ]
    return [rule.encode(**at("low"), **{"y2" if upright else "x2": "high:Q"}, **ink), *caps]


def _legend(names: Sequence[str]) -> alt.Legend:
    longest, many = max(len(name) for name in names), len(names) > _MANY
    columns = 3 if longest < 20 else 2 if longest < (40 if many else 30) else 1
    small: dict[str, Any] = {"labelFontSize": 10, "symbolSize": 50, "columnPadding": 6} if many else {}
    return alt.Legend(title=None, orient="top", columns=columns, symbolOpacity=1, **small)
