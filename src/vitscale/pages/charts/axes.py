"""What charts share: views and their choices, rows, axes, marks, and the colour and shape of each series.

A chart is Vega-Lite as plain data, one plot without facets, so that a page can draw it as wide as there is room. Text
of users is a value in its rows, never a field's name or part of an expression.

Colours are those that colour-blind readers can tell apart, shapes survive greyscale, and there are two themes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vitscale.analysis import Analysis, CurveResult, TrialResult
from vitscale.analysis.scaling import curve_name
from vitscale.present.data import finite
from vitscale.present.document import Figure, FigureView

# Okabe & Ito, "Color Universal Design" (2008), without black and yellow, which vanish on a dark or a light page. Darker
# and duller colours follow for studies of many curves, which nobody tells apart by colour alone.
SERIES_COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C", "#9467BD",
    "#A6426E", "#999933", "#A65628", "#44AA99",
)  # fmt: skip
# Seven shapes and twelve colours have no common divisor: together they tell 84 series apart before a pair comes again.
SERIES_SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right")
# Cividis (Nunez, Anderton & Renslow, PLOS ONE 2018): lightness rises evenly, so that greyscale keeps the order.
ORDERED_COLOURS = ("#2c4a7c", "#575d6d", "#7d7c78", "#a59c74", "#d3c164", "#fee838")
# The parts of a step (`store.records.PARTS`): computing is blue, communicating orange. Any two neighbours in a stack
# differ by at least 15 in CIELAB, also as seen with protanopia, deuteranopia and tritanopia (simulated after Machado,
# Oliveira & Fernandes, IEEE TVCG 15, 2009).
PART_COLOURS = {
    "data_wait": "#CC79A7",
    "h2d": "#7A4B8C",
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "bubble": "#F0E442",
    "wait": "#E69F00",
    "wire": "#D55E00",
    "norm": "#F2C6A0",
    "optimizer": "#009E73",
    "launch_gaps": "#8C6D46",
    "other": "#C3C8D0",
}
# In place of "wait", "wire" and "norm" where they cannot be told apart.
COMMUNICATION_COLOUR = "#8C2D04"
# Step rounding is no part of a step: steps are whole, and the data need not divide.
ROUNDING_COLOUR = "#999933"
IDEAL_COLOUR = "#8a8f98"
SOLID, DASHED = [1, 0], [5, 4]
SINGLE_RUN = {"type": "point", "size": 18, "filled": False, "opacity": 0.8, "strokeWidth": 1.2}
"""The mark of one run beside its trial's."""


ChartRow = dict[str, Any]
ChartSpec = dict[str, Any]

WIDTH, HEIGHT = 560, 215
_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
IN_ORDER = {"field": "place", "op": "min", "order": "ascending"}
"""Sorts an axis of users' names: Vega-Lite would put a list of the names into an expression."""
_MANY = 6
"""Number of series above which the legend is set small, or it would be taller than the chart."""
_SYMBOL_ROOM = 30
"""Pixels of a legend's column that its symbol and the gap to the next take."""
_ORDERED_EXTENT = [0.12, 0.88]
"""The range of ordered colours that vanish neither on a dark page nor on a light one."""


@dataclass
class Plot:
    """A view in the making: datasets by name, layers from below."""

    datasets: dict[str, list[ChartRow]] = field(default_factory=dict)
    layers: list[ChartSpec] = field(default_factory=list)

    def add(self, rows: str, mark: ChartSpec, only: str = "", **encoding: Any) -> None:
        """Adds a layer that draws a dataset; `only` is an expression of ours that its rows must fulfil."""
        layer: ChartSpec = {"data": {"name": rows}, "mark": mark, "encoding": encoding}
        if only:
            layer["transform"] = [{"filter": only}]
        self.layers.append(layer)

    def spec(self, summary: str, height: int | ChartSpec = HEIGHT) -> ChartSpec:
        """The finished Vega-Lite; numbers that JSON does not know are null."""
        whole: ChartSpec = finite(
            {
                "$schema": _SCHEMA,
                "width": WIDTH,
                "height": height,
                "autosize": {"type": "fit-x", "contains": "padding"},
                "description": summary,
                "datasets": self.datasets,
                "layer": self.layers,
            }
        )
        return whole


def series_figure(name: str, title: str, views: Sequence[FigureView]) -> Figure | None:
    """Views whose curves can be switched off by their series; None without a view."""
    names = dict.fromkeys(row["series"] for view in views for row in view.rows)
    return Figure(name, title, tuple(views), tuple(names)) if views else None


def quantity(name: str, title: str | None = None, **more: Any) -> ChartSpec:
    """The encoding of a number."""
    return {"field": name, "type": "quantitative", **({} if title is None else {"title": title}), **more}


def nominal(name: str, title: str | None = None, **more: Any) -> ChartSpec:
    """The encoding of text."""
    return {"field": name, "type": "nominal", "title": title, **more}


def tooltip(**fields: str) -> list[ChartSpec]:
    """What a reader sees at a mark: field to heading."""
    return [{"field": name, "type": "nominal", "title": title} for name, title in fields.items()]


def along(name: str, title: str, values: Sequence[float], *, log: bool = True, number: str = "d") -> ChartSpec:
    """A horizontal axis with a tick at each value that occurs; with `log` in base 2, where all values are above 0."""
    ticks = sorted({*values})
    logarithmic = log and ticks[0] > 0
    scale = {"type": "log", "base": 2} if logarithmic else {"zero": False}
    axis = {"values": ticks, "format": number, "grid": False, "labelOverlap": True}
    return quantity(name, title, scale={**scale, "nice": False, "padding": 18}, axis=axis)


def colour_of(names: Sequence[str], *, ordered: bool = False) -> ChartSpec:
    """Each series' colour, by its place among `names`; `ordered`: from dark to light."""
    colours: ChartSpec = {"range": [SERIES_COLOURS[index % len(SERIES_COLOURS)] for index in range(len(names))]}
    if ordered:
        colours = {"scheme": {"name": "cividis", "extent": _ORDERED_EXTENT}}
    return nominal("series", scale={"domain": list(names), **colours}, legend=_legend(names))


def shape_of(names: Sequence[str]) -> ChartSpec:
    """Each series' shape, by its place among `names`."""
    shapes = [SERIES_SHAPES[index % len(SERIES_SHAPES)] for index in range(len(names))]
    return nominal("series", scale={"domain": list(names), "range": shapes}, legend=_legend(names))


def _legend(names: Sequence[str]) -> ChartSpec:
    longest, many = max((len(name) for name in names), default=0), len(names) > _MANY
    columns = 6 if longest < 8 else 3 if longest < 20 else 2 if longest < (40 if many else 30) else 1
    room = WIDTH // columns - _SYMBOL_ROOM  # the theme's limit would cut names that differ in their ends
    small = {"labelFontSize": 10, "symbolSize": 50, "columnPadding": 6} if many else {}
    return {"title": None, "orient": "top", "columns": columns, "symbolOpacity": 1, "labelLimit": room, **small}


def add_curves(
    plot: Plot,
    x: ChartSpec,
    y: ChartSpec,
    told: list[ChartSpec],
    *,
    one_ideal: bool = True,
    ordered: bool = False,
    joined: bool = True,
) -> None:
    """Adds what a plot's datasets hold: curves of points with their intervals, and what stands beside them.

    Args:
        plot: `rows` are joined within each `series`, hollow and apart where they `drift`; `ideal` is dashed, `runs` are
            small, `published` points hollow and grey.
        x: the axis along which points stand.
        y: the axis of their `value`.
        told: the tooltip of a point.
        one_ideal: whether all series share one ideal, else each has its own.
        ordered: whether the series have an order, which their colours keep.
        joined: whether the points of a series are joined.
    """
    rows = plot.datasets["rows"]
    names = list(dict.fromkeys(row["series"] for row in rows))
    colour, shape = colour_of(names, ordered=ordered), shape_of(names)
    if plot.datasets.get("ideal"):
        faint = {"type": "line", "strokeDash": DASHED, "strokeWidth": 1.2, "strokeOpacity": 0.65, "opacity": 1}
        ink = {"value": IDEAL_COLOUR} if one_ideal else colour
        plot.add("ideal", faint, x=x, y=y, color=ink, detail={"field": "series", "type": "nominal"})
    if joined:
        plot.add("rows", {"type": "line", "strokeWidth": 2}, "!datum.drift", x=x, y=y, color=colour)
    if any(row["low"] is not None for row in rows):
        add_bars(plot, "rows", x, colour)
    if plot.datasets.get("runs"):
        plot.add("runs", SINGLE_RUN, x=x, y=y, color=colour, shape=shape)
    for drifts in ("!datum.drift", "datum.drift") if any(row.get("drift") for row in rows) else ("",):
        point = {"type": "point", "size": 60, "filled": drifts != "datum.drift", "opacity": 1}
        more = [*told, *tooltip(drift="drift")] if drifts == "datum.drift" else told
        plot.add("rows", point, drifts, x=x, y=y, color=colour, shape=shape, tooltip=more)
    if plot.datasets.get("published"):
        hollow = {"type": "point", "size": 60, "filled": False, "opacity": 1, "strokeWidth": 1.6}
        grey = {"value": IDEAL_COLOUR}
        plot.add(
            "published", hollow, x=x, y=y, color=grey, shape=shape, tooltip=tooltip(what="published", shown="value")
        )


def add_bars(plot: Plot, rows: str, beside: ChartSpec, colour: ChartSpec | None, *, upright: bool = True) -> None:
    """Adds intervals to a plot: a rule from `low` to `high` with caps, except at ends that were cut.

    Args:
        plot: the plot to add to.
        rows: a dataset with `low` and `high`, null where there is no interval, and what `cut_bars` adds.
        beside: the axis along which the rows stand; the bars lie along the other one.
        colour: colour of the rows; None: the theme's.
        upright: whether the bars stand upright.
    """
    ink = {} if colour is None else {"color": colour}
    here, there = ("x", "y") if upright else ("y", "x")
    bar = {here: beside, there: quantity("low"), f"{there}2": {"field": "high"}, **ink}
    plot.add(rows, {"type": "rule", "strokeWidth": 1.5}, "datum.low != null", **bar)
    cap = {"type": "tick", "thickness": 1.5, "size": 9, "orient": "horizontal" if upright else "vertical"}
    for end in ("low", "high"):
        only = f"datum.{end} != null && !datum.{end}_cut"
        plot.add(rows, cap, only, **{here: beside, there: quantity(end), **ink})


def cut_bars(rows: Sequence[ChartRow], lowest: float, highest: float) -> bool:
    """Cuts intervals that reach beyond a picture, in place; returns whether there was one."""
    for row in rows:
        if row["low"] is not None:
            row["low_cut"], row["high_cut"] = row["low"] < lowest, row["high"] > highest
            row["low"], row["high"] = max(row["low"], lowest), min(row["high"], highest)
    return any(row.get("low_cut") or row.get("high_cut") for row in rows)


def scaled(rows: Sequence[ChartRow], factor: float, *fields: str) -> list[ChartRow]:
    """The rows with `fields`, or by default the value and its interval, multiplied."""
    names = fields or ("value", "low", "high")
    return [row | {name: row[name] * factor for name in names if row.get(name) is not None} for row in rows]


_BATCH_FIELDS = ("train.micro_batch", "train.global_batch", "train.grad_accum")


def families(analysis: Analysis, curves: Sequence[CurveResult]) -> list[str]:
    """Each curve's name without its batch size; in full, and numbered, where two would share a name at one batch."""
    trials = [analysis.trials[curve.points[-1].trial_id] for curve in curves]
    batches = [kept_batch(curve, trial) for curve, trial in zip(curves, trials, strict=True)]
    short = [
        curve_name({field: value for field, value in curve.labels.items() if field not in _BATCH_FIELDS}, trial.trial)
        for curve, trial in zip(curves, trials, strict=True)
    ]
    unclear = {panel for panel, count in Counter(zip(short, batches, strict=True)).items() if count > 1}
    panels = [
        (curve.name if (name, batch) in unclear else name, batch)
        for curve, name, batch in zip(curves, short, batches, strict=True)
    ]
    return [
        f"{panel[0]} ({panels[: index + 1].count(panel)})" if panels.count(panel) > 1 else panel[0]
        for index, panel in enumerate(panels)
    ]


def kept_batch(curve: CurveResult, trial: TrialResult) -> tuple[str, int]:
    """The batch size that a curve keeps, in words and as a number of images."""
    train = trial.trial.train
    if not trial.batch_known:
        return "micro-batch not told", 0
    if curve.mode == "strong-global":
        return f"global batch {trial.trial.global_batch:,}", trial.trial.global_batch
    accumulated = f" x {train.grad_accum}" if train.grad_accum > 1 else ""
    return f"micro-batch {train.micro_batch:,}{accumulated}", train.micro_batch * train.grad_accum
