"""Held-out accuracy by global batch and by rank count, and the time to a target accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from vitscale.analysis import Analysis, CurveResult
from vitscale.report import accuracy_data, words
from vitscale.report.chart_data import Row
from vitscale.report.figure import Figure, colour_of, finished, shape_of
from vitscale.report.style import IDEAL_COLOUR, SERIES_SHAPES
from vitscale.trial.trial import Mode

_WIDTH, _HEIGHT = 260, 200
_DOTTED = [2, 3]
_FURTHEST_NOISE = 8
"""A noise scale further than this factor from the batches is told in words alone: drawn, it would squeeze them."""


def accuracy_figures(analysis: Analysis, mode: Mode, curves: Sequence[CurveResult]) -> list[Figure]:
    """Accuracy by global batch and by ranks, each where it varies; time to the target where one was reached."""
    rows = accuracy_data.accuracies(analysis, curves)
    noise = accuracy_data.noise_scales(analysis, curves)
    found = []
    if len({row["batch"] for row in rows}) > 1:
        found.append(_by_batch(mode, rows, noise))
    if len({row["gpus"] for row in rows}) > 1:
        found.append(_by_ranks(mode, rows))
    if targets := accuracy_data.targets(analysis, curves):
        found.append(_to_target(mode, targets))
    return found


def _by_batch(mode: Mode, rows: Sequence[Row], noise: Sequence[Row]) -> Figure:
    batches = sorted({row["batch"] for row in rows})
    near = [row for row in noise if batches[0] / _FURTHEST_NOISE <= row["batch"] <= batches[-1] * _FURTHEST_NOISE]
    chart = _panels(_joined_by_batch(rows), _batch_axis(rows), near, _shape_by_ranks(rows))
    text = _sentences(rows, "series")
    text += [
        f"gradient noise scale of {row['series']}: {words.number(row['batch'])} images, the median of its trials"
        for row in noise
    ]
    subtitle = f"{mode}; bars: lowest and highest run" + ("; dotted: gradient noise scale" if near else "")
    return _figure(f"{mode}-accuracy-by-batch", mode, "Held-out accuracy by global batch", subtitle, chart, text)


def _by_ranks(mode: Mode, rows: Sequence[Row]) -> Figure:
    by_curve = [row | {"series": row["curve"], "line": row["curve"]} for row in rows]
    counts = sorted({row["gpus"] for row in rows})
    x = alt.X(
        "gpus:Q",
        title="ranks",
        scale=alt.Scale(type="log", base=2, nice=False, padding=14),
        axis=alt.Axis(values=counts, format="d", grid=False, labelOverlap=True),
    )
    chart = _panels(by_curve, x, [], shape_of(_series(by_curve)))
    subtitle = f"{mode}; bars: lowest and highest run"
    text = _sentences(rows, "curve")
    return _figure(f"{mode}-accuracy-by-ranks", mode, "Held-out accuracy by ranks", subtitle, chart, text)


def _to_target(mode: Mode, rows: Sequence[Row]) -> Figure:
    unit = words.time_unit(row["value"] for row in rows if row["quantity"] == "seconds")
    panels = []
    for quantity, heading, factor in (
        ("seconds", f"time of training ({unit.sign})", unit.per_second),
        ("images", "images trained on", 1.0),
    ):
        own = [_times(row, factor) for row in rows if row["quantity"] == quantity]
        if own:
            y = alt.Y("value:Q", title=heading, scale=alt.Scale(zero=True), axis=alt.Axis(format="~s", tickCount=5))
            layers = _layers(own, _batch_axis(rows), y, _shape_by_ranks(rows), noise=False)
            data = alt.InlineData(values=_placed(_joined_by_batch(own)))
            panels.append(layers.properties(width=_WIDTH, height=_HEIGHT, data=data))
    text = [
        f"{row['series']}, {row['ranks']}, global batch {row['batch']:,}: "
        + (words.seconds(row["value"]) if row["quantity"] == "seconds" else f"{words.number(row['value'])} images")
        + f", reached by {row['reached']}"
        for row in rows
    ]
    title = f"To a held-out accuracy of {' or '.join(dict.fromkeys(row['target'] for row in rows))}"
    subtitle = f"{mode}; over the runs that reached it; bars: 95 % intervals"
    return _figure(f"{mode}-time-to-target", mode, title, subtitle, alt.hconcat(*panels), list(dict.fromkeys(text)))


def _panels(rows: Sequence[Row], x: alt.X, noise: Sequence[Row], shape: alt.Shape) -> Any:
    """One panel each at the end, after equal images and after equal seconds."""
    y = alt.Y(
        "value:Q", title="held-out accuracy", scale=alt.Scale(zero=False), axis=alt.Axis(format=".0%", tickCount=5)
    )
    panels = dict.fromkeys((row["place"], row["panel"]) for row in rows)
    # A rule stands in every panel: a facet shows only rows that carry its field.
    rules = [row | {"panel": panel, "place": place, "noise": True} for row in noise for place, panel in panels]
    return (
        _layers(rows, x, y, shape, noise=bool(rules))
        .properties(width=_WIDTH, height=_HEIGHT, data=alt.InlineData(values=[*_placed(rows), *rules]))
        .facet(column=alt.Column("panel:N", title=None, sort=alt.EncodingSortField("place", op="min")))
    )


def _layers(rows: Sequence[Row], x: alt.X, y: alt.Y, shape: alt.Shape, *, noise: bool) -> Any:
    series = _series(rows)
    colour = colour_of(series)
    base = alt.Chart().transform_filter("!datum.noise")
    bounded = base.transform_filter("datum.low != null")
    layers: list[Any] = [bounded.mark_rule(strokeWidth=1.5).encode(x=x, y=alt.Y("low:Q"), y2="high:Q", color=colour)]
    for place in range(len(series)):
        # Engines that compute the same have the same accuracy: each later one is smaller, so that none hides another.
        left = (len(series) - 1 - place) / max(1, len(series) - 1)
        own = base.transform_filter(alt.FieldEqualPredicate(field="series_place", equal=place))
        layers.append(own.mark_line(strokeWidth=1.6 + 1.8 * left).encode(x=x, y=y, color=colour, detail="line:N"))
        layers.append(
            own.mark_point(size=50 + 80 * left, filled=True, opacity=1).encode(
                x=x,
                y=y,
                color=colour,
                shape=shape,
                tooltip=[
                    alt.Tooltip("series:N", title="curve"),
                    alt.Tooltip("gpus:Q", title="ranks"),
                    alt.Tooltip("batch:Q", title="global batch", format=",d"),
                    alt.Tooltip("value:Q", title="value", format=".4~r"),
                    alt.Tooltip("trial:N"),
                ],
            )
        )
    if noise:
        rule = alt.Chart().transform_filter("datum.noise").mark_rule(strokeDash=_DOTTED, strokeWidth=1.6)
        layers.insert(0, rule.encode(x=x, color=colour))
    return alt.layer(*layers)


def _series(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["series"] for row in rows))


def _placed(rows: Sequence[Row]) -> list[Row]:
    """Each row with the place of its series: a name that a user wrote must not get into an expression."""
    places = {name: place for place, name in enumerate(_series(rows))}
    return [row | {"series_place": places[row["series"]]} for row in rows]


def _batch_axis(rows: Sequence[Row]) -> alt.X:
    return alt.X(
        "batch:Q",
        title="global batch (images)",
        scale=alt.Scale(type="log", base=2, nice=False, padding=14),
        axis=alt.Axis(values=sorted({row["batch"] for row in rows}), format=",d", grid=False, labelOverlap=True),
    )


def _shape_by_ranks(rows: Sequence[Row]) -> alt.Shape:
    names = list(dict.fromkeys(row["ranks"] for row in sorted(rows, key=lambda row: int(row["gpus"]))))
    shapes = [SERIES_SHAPES[place % len(SERIES_SHAPES)] for place in range(len(names))]
    legend = alt.Legend(title=None, orient="top", symbolFillColor=IDEAL_COLOUR, symbolStrokeColor=IDEAL_COLOUR)
    return alt.Shape("ranks:N", scale=alt.Scale(domain=names, range=shapes), legend=legend)


def _joined_by_batch(rows: Sequence[Row]) -> list[Row]:
    """Each row with the line it lies on: its family's at its rank count; its family's where batches are not swept."""
    batches: dict[tuple[str, str], set[int]] = {}
    for row in rows:
        batches.setdefault((row["series"], row["ranks"]), set()).add(row["batch"])
    swept = {series for (series, _), found in batches.items() if len(found) > 1}
    return [
        row | {"line": f"{row['series']} {row['ranks']}" if row["series"] in swept else row["series"]} for row in rows
    ]


def _times(row: Row, factor: float) -> Row:
    return row | {key: row[key] * factor for key in ("value", "low", "high") if row[key] is not None}


def _sentences(rows: Sequence[Row], name: str) -> list[str]:
    lines = []
    for row in rows:
        spread = f" ({row['low']:.1%} to {row['high']:.1%} over {row['runs']} runs)" if row["low"] is not None else ""
        where = f"{row[name]}, {row['ranks']}, global batch {row['batch']:,}"
        lines.append(f"{where}: {row['value']:.1%} {row['panel']}{spread}")
    return list(dict.fromkeys(lines))


def _figure(name: str, mode: Mode, title: str, subtitle: str, chart: alt.TopLevelMixin, text: Sequence[str]) -> Figure:
    titled: Any = chart
    whole = titled.properties(title=alt.Title(title, subtitle=subtitle))
    return finished(name, mode, title, whole, text, wide=True, section="accuracy")
