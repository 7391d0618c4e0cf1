"""Parts that all charts share: rows, axes, marks, and the colour and shape of each series.

A chart is Vega-Lite as plain data, one plot without facets, so that a page can draw it as wide as there is room. Text
of users is a value in its rows, never a field's name or part of an expression.

Colours are those that colour-blind readers can tell apart, shapes survive greyscale, and there are two themes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vitscale.analysis import Analysis, CurveResult, TrialResult
from vitscale.analysis.scaling import curve_name
from vitscale.present.data import nonfinite_as_null
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
SOLID = [1, 0]
DASHED = [5, 4]
SINGLE_RUN = {"type": "point", "size": 18, "filled": False, "opacity": 0.8, "strokeWidth": 1.2}
"""The mark of one run beside its trial's."""


ChartRow = dict[str, Any]
"""A point, bar or line end: name of a field to its value."""
ChartSpec = dict[str, Any]
"""A piece of Vega-Lite."""

WIDTH = 560
"""Pixels of a picture; a page draws as wide as there is room."""
HEIGHT = 215
_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
IN_ORDER = {"field": "place", "op": "min", "order": "ascending"}
"""Sorts an axis of users' names: Vega-Lite would put a list of the names into an expression."""
_MOST_IN_LARGE_LEGEND = 6
"""Number of series above which the legend is set small, or it would be taller than the chart."""
_SYMBOL_PIXELS = 30
"""Pixels of a legend's column that its symbol and the gap to the next take."""
_ORDERED_EXTENT = [0.12, 0.88]
"""The range of ordered colours that vanish neither on a dark page nor on a light one."""


@dataclass
class Plot:
    """A view in the making: datasets by name, layers from below."""

    datasets: dict[str, list[ChartRow]] = field(default_factory=dict)
    layers: list[ChartSpec] = field(default_factory=list)

    def add(self, dataset: str, mark: ChartSpec, condition: str = "", **encoding: Any) -> None:
        """Add a layer that draws a dataset.

        Args:
            dataset: name of the dataset.
            mark: what is drawn for each of its rows.
            condition: an expression of ours that a row must fulfil, "datum.low != null"; empty: all rows are drawn.
            encoding: channel of Vega-Lite, such as `x` or `color`, to what it shows.
        """
        layer: ChartSpec = {"data": {"name": dataset}, "mark": mark, "encoding": encoding}
        if condition:
            layer["transform"] = [{"filter": condition}]
        self.layers.append(layer)

    def spec(self, summary: str, height: int | ChartSpec = HEIGHT) -> ChartSpec:
        """Return the finished Vega-Lite; numbers that JSON does not know are null.

        Args:
            summary: the picture in words, for those who do not see it.
            height: pixels; or {"step": 20} for 20 pixels for each value of a vertical axis of names.
        """
        spec: ChartSpec = nonfinite_as_null(
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
        return spec


def series_figure(name: str, title: str, views: Sequence[FigureView]) -> Figure | None:
    """Make a figure whose curves can be switched off by their series; None without a view."""
    if not views:
        return None
    rows = itertools.chain.from_iterable(view.rows for view in views)
    return Figure(name, title, tuple(views), series=tuple(series_names(rows)))


def series_names(rows: Iterable[ChartRow]) -> list[str]:
    """Return the names of the series of rows, each once, in the order of the rows."""
    return list(dict.fromkeys(row["series"] for row in rows))


def capitalised(text: str) -> str:
    """Return the text with a capital first letter. The other letters stay as they are, unlike `str.capitalize`."""
    return text[:1].upper() + text[1:]


def has_intervals(rows: Iterable[ChartRow]) -> bool:
    """Whether a row has an interval, from `low` to `high`."""
    return any(row["low"] is not None for row in rows)


def quantity(name: str, title: str | None = None, **options: Any) -> ChartSpec:
    """Encode a number: the field `name` of a row."""
    encoding: ChartSpec = {"field": name, "type": "quantitative"}
    if title is not None:
        encoding["title"] = title
    return encoding | options


def nominal(name: str, title: str | None = None, **options: Any) -> ChartSpec:
    """Encode text: the field `name` of a row."""
    return {"field": name, "type": "nominal", "title": title, **options}


def tooltip(**fields: str) -> list[ChartSpec]:
    """Encode the tooltip of a mark. `fields`: field of a row -> its heading in the tooltip."""
    return [{"field": name, "type": "nominal", "title": title} for name, title in fields.items()]


def ticked_axis(name: str, title: str, values: Sequence[float], *, log: bool = True, number: str = "d") -> ChartSpec:
    """Encode a horizontal axis with a tick at each value that occurs.

    Args:
        name: the field of a row.
        title: the axis' title.
        values: the values, in any order.
        log: whether the axis is logarithmic to base 2, where all values are above 0.
        number: the format of the ticks' labels.
    """
    ticks = sorted({*values})
    is_logarithmic = log and ticks[0] > 0
    scale = {"type": "log", "base": 2} if is_logarithmic else {"zero": False}
    axis = {"values": ticks, "format": number, "grid": False, "labelOverlap": True}
    return quantity(name, title, scale={**scale, "nice": False, "padding": 18}, axis=axis)


def colour_encoding(names: Sequence[str], *, ordered: bool = False) -> ChartSpec:
    """Encode each series' colour, by its position among `names`; `ordered`: from dark to light."""
    if ordered:
        colours: ChartSpec = {"scheme": {"name": "cividis", "extent": _ORDERED_EXTENT}}
    else:
        colours = {"range": [SERIES_COLOURS[index % len(SERIES_COLOURS)] for index in range(len(names))]}
    return nominal("series", scale={"domain": list(names), **colours}, legend=_legend(names))


def shape_encoding(names: Sequence[str]) -> ChartSpec:
    """Encode each series' shape, by its position among `names`."""
    shapes = [SERIES_SHAPES[index % len(SERIES_SHAPES)] for index in range(len(names))]
    return nominal("series", scale={"domain": list(names), "range": shapes}, legend=_legend(names))


def _legend(names: Sequence[str]) -> ChartSpec:
    """Return a legend of series with as many columns as the length of their names leaves room for."""
    is_small = len(names) > _MOST_IN_LARGE_LEGEND
    longest = max((len(name) for name in names), default=0)
    columns = _legend_columns(longest, is_small=is_small)
    label_pixels = WIDTH // columns - _SYMBOL_PIXELS  # the theme's limit would cut names that differ in their ends
    legend = {"title": None, "orient": "top", "columns": columns, "symbolOpacity": 1, "labelLimit": label_pixels}
    if is_small:
        legend |= {"labelFontSize": 10, "symbolSize": 50, "columnPadding": 6}
    return legend


def _legend_columns(longest: int, *, is_small: bool) -> int:
    """Return the number of columns of a legend whose longest name has `longest` characters."""
    if longest < 8:
        return 6
    if longest < 20:
        return 3
    longest_in_two_columns = 39 if is_small else 29
    return 2 if longest <= longest_in_two_columns else 1


def add_curves(
    plot: Plot,
    x: ChartSpec,
    y: ChartSpec,
    point_tooltip: list[ChartSpec],
    *,
    one_ideal: bool = True,
    ordered: bool = False,
    joined: bool = True,
) -> None:
    """Add the layers of curves to a plot, from its datasets.

    Args:
        plot: a plot with the dataset `rows`, whose points are joined within each `series`; those with a text in `drift`
            are hollow and not joined. Of further datasets, `ideal` is drawn dashed, `runs` as small points, and
            `published` as hollow grey points.
        x: the axis along which points stand.
        y: the axis of their `value`.
        point_tooltip: the tooltip of a point.
        one_ideal: whether the ideal is one for all series, and grey; else each series has its own, in its colour.
        ordered: whether the series have an order, which their colours show.
        joined: whether lines join the points of a series.
    """
    rows = plot.datasets["rows"]
    names = series_names(rows)
    colour = colour_encoding(names, ordered=ordered)
    shape = shape_encoding(names)
    if plot.datasets.get("ideal"):
        line = {"type": "line", "strokeDash": DASHED, "strokeWidth": 1.2, "strokeOpacity": 0.65, "opacity": 1}
        ideal_colour = {"value": IDEAL_COLOUR} if one_ideal else colour
        plot.add("ideal", line, x=x, y=y, color=ideal_colour, detail={"field": "series", "type": "nominal"})
    if joined:
        plot.add("rows", {"type": "line", "strokeWidth": 2}, "!datum.drift", x=x, y=y, color=colour)
    if has_intervals(rows):
        add_bars(plot, "rows", x, colour)
    if plot.datasets.get("runs"):
        plot.add("runs", SINGLE_RUN, x=x, y=y, color=colour, shape=shape)
    _add_points(plot, {"x": x, "y": y, "color": colour, "shape": shape}, point_tooltip)
    if plot.datasets.get("published"):
        hollow = {"type": "point", "size": 60, "filled": False, "opacity": 1, "strokeWidth": 1.6}
        published = tooltip(what="published", shown="value")
        plot.add("published", hollow, x=x, y=y, color={"value": IDEAL_COLOUR}, shape=shape, tooltip=published)


def _add_points(plot: Plot, encoding: ChartSpec, point_tooltip: list[ChartSpec]) -> None:
    """Add the points of `rows`, with their tooltip.

    Points with a text in `drift` are hollow, and their tooltip has that text too.
    """
    filled = {"type": "point", "size": 60, "filled": True, "opacity": 1}
    if not any(row.get("drift") for row in plot.datasets["rows"]):
        plot.add("rows", filled, **encoding, tooltip=point_tooltip)
        return
    hollow = filled | {"filled": False}
    plot.add("rows", filled, "!datum.drift", **encoding, tooltip=point_tooltip)
    plot.add("rows", hollow, "datum.drift", **encoding, tooltip=[*point_tooltip, *tooltip(drift="drift")])


def add_bars(plot: Plot, dataset: str, positions: ChartSpec, colour: ChartSpec | None, *, upright: bool = True) -> None:
    """Add intervals to a plot: a rule from `low` to `high` with caps, except at ends that were cut.

    Args:
        plot: the plot to add to.
        dataset: name of a dataset with `low` and `high`, null where there is no interval, and what `cut_bars` adds.
        positions: the encoding of the axis along which the rows stand; the bars lie along the other axis.
        colour: colour of the rows; None: the theme's.
        upright: whether the bars stand upright: `positions` is then the horizontal axis.
    """
    rows_axis = "x" if upright else "y"
    bar_axis = "y" if upright else "x"
    colour_channel = {} if colour is None else {"color": colour}
    rule = {"type": "rule", "strokeWidth": 1.5}
    span: ChartSpec = {rows_axis: positions, bar_axis: quantity("low"), f"{bar_axis}2": {"field": "high"}}
    plot.add(dataset, rule, "datum.low != null", **span, **colour_channel)
    cap = {"type": "tick", "thickness": 1.5, "size": 9, "orient": "horizontal" if upright else "vertical"}
    for end in ("low", "high"):
        is_drawn = f"datum.{end} != null && !datum.{end}_cut"
        position: ChartSpec = {rows_axis: positions, bar_axis: quantity(end)}
        plot.add(dataset, cap, is_drawn, **position, **colour_channel)


def cut_bars(rows: Sequence[ChartRow], lowest: float, highest: float) -> bool:
    """Cut the intervals of rows to [lowest, highest], in place; return whether any was cut.

    Rows with an interval get the fields `low_cut` and `high_cut`: whether that end was cut.
    """
    for row in rows:
        if row["low"] is None:
            continue
        row["low_cut"] = row["low"] < lowest
        row["high_cut"] = row["high"] > highest
        row["low"] = max(row["low"], lowest)
        row["high"] = min(row["high"], highest)
    return any(row.get("low_cut") or row.get("high_cut") for row in rows)


def scaled(rows: Sequence[ChartRow], factor: float, *fields: str) -> list[ChartRow]:
    """Return copies of the rows with `fields` multiplied by a factor, where they are known.

    By default the fields are `value`, `low` and `high`.
    """
    names = fields or ("value", "low", "high")
    return [row | _multiplied_fields(row, names, factor) for row in rows]


def _multiplied_fields(row: ChartRow, names: Sequence[str], factor: float) -> ChartRow:
    return {name: row[name] * factor for name in names if row.get(name) is not None}


_BATCH_FIELDS = ("train.micro_batch", "train.global_batch", "train.grad_accum")


class KeptBatch(NamedTuple):
    """The batch size that a curve keeps over its rank counts."""

    label: str
    """ "micro-batch 32 x 2"."""
    images: int
    """Images of a rank's step, or of the global batch; 0 where it is unknown."""


class _Family(NamedTuple):
    """A curve's name without its batch size, and its batch. Two curves of a view must not have both in common."""

    name: str
    batch: KeptBatch


def families(analysis: Analysis, curves: Sequence[CurveResult]) -> list[str]:
    """Return the name of each curve without its batch size: "ddp" for "ddp, micro-batch 16".

    Curves that would share both this name and a batch keep their full name; where they still do, they are numbered.
    """
    short = [_family(analysis, curve) for curve in curves]
    short_uses = Counter(short)
    unnumbered = []
    for curve, family in zip(curves, short, strict=True):
        is_unique = short_uses[family] == 1
        unnumbered.append(family if is_unique else family._replace(name=curve.name))
    uses = Counter(unnumbered)
    names = []
    for index, family in enumerate(unnumbered):
        number = unnumbered[: index + 1].count(family)
        names.append(family.name if uses[family] == 1 else f"{family.name} ({number})")
    return names


def _family(analysis: Analysis, curve: CurveResult) -> _Family:
    largest = analysis.trials[curve.points[-1].trial_id]
    labels = {field: value for field, value in curve.labels.items() if field not in _BATCH_FIELDS}
    return _Family(curve_name(labels, largest.trial), kept_batch(curve, largest))


def kept_batch(curve: CurveResult, trial: TrialResult) -> KeptBatch:
    """Return the batch size that a curve keeps, read from one of its trials."""
    train = trial.trial.train
    if not trial.batch_known:
        return KeptBatch("micro-batch not told", images=0)
    if curve.mode == "strong-global":
        return KeptBatch(f"global batch {trial.trial.global_batch:,}", images=trial.trial.global_batch)
    accumulated = f" x {train.grad_accum}" if train.grad_accum > 1 else ""
    return KeptBatch(f"micro-batch {train.micro_batch:,}{accumulated}", images=train.micro_batch * train.grad_accum)
