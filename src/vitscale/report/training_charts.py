"""Loss and accuracy, and the start-up."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from vitscale.analysis import Analysis, CurveResult
from vitscale.report import chart_data, words
from vitscale.report.chart_data import Row
from vitscale.report.figure import Figure, colour_of, finished, shape_of
from vitscale.report.style import DASHED, ORDERED_COLOURS, SOLID
from vitscale.trial.trial import Mode

_PANEL_WIDTH, _PANEL_HEIGHT = 200, 150


def training_figures(analysis: Analysis, mode: Mode, curves: Sequence[CurveResult]) -> list[Figure]:
    """Loss and accuracy by epoch; where no trial has two epochs, the loss by step instead."""
    found = []
    for name, title in (("loss", "Loss"), ("accuracy", "Accuracy")):
        rows = chart_data.by_epoch(analysis, curves, name)
        if max((row["x"] for row in rows), default=0) > 1:
            found.append(_panels(f"{mode}-{name}", mode, f"{title} by epoch", "epoch", name, rows, curves))
    if not found and (rows := chart_data.by_step(analysis, curves)):
        found.append(_panels(f"{mode}-loss", mode, "Training loss by step", "optimizer step", "loss", rows, curves))
    return found


def _panels(
    name: str, mode: Mode, title: str, x_title: str, y_title: str, rows: list[Row], curves: Sequence[CurveResult]
) -> Figure:
    """One small panel per rank count; train solid, held-out dashed."""
    order = list(dict.fromkeys(row["panel"] for row in sorted(rows, key=lambda row: int(row["gpus"]))))
    names = [curve.name for curve in curves]
    splits = list(dict.fromkeys(row["split"] for row in rows))
    accuracy = y_title == "accuracy"
    last_x = max(int(row["x"]) for row in rows)
    ticks = sorted({1, *range(0, last_x + 1, max(1, round(last_x / 5)))} - {0})
    base = alt.Chart().encode(
        x=alt.X("x:Q", title=x_title, axis=alt.Axis(values=ticks, format="d", grid=False), scale=alt.Scale(nice=False)),
        y=alt.Y(
            "value:Q",
            title=y_title,
            scale=alt.Scale(zero=accuracy),
            axis=alt.Axis(format="%" if accuracy else "~r", tickCount=5),
        ),
        color=colour_of(names),
        tooltip=[
            alt.Tooltip("series:N", title="curve"),
            alt.Tooltip("panel:N", title="ranks"),
            alt.Tooltip("split:N", title="data"),
            alt.Tooltip("x:Q", title=x_title),
            alt.Tooltip("value:Q", title=y_title, format=".4~r"),
        ],
    )
    dash = alt.StrokeDash(
        "split:N",
        scale=alt.Scale(domain=["train", "held-out"], range=[SOLID, DASHED]),
        legend=_split_legend() if len(splits) > 1 else None,
    )
    layers: list[alt.Chart] = []
    for place, series in enumerate(names):
        # Engines that compute the same have the same curve: each later one is thinner, so that none hides another.
        width = 1.6 + 2.4 * (len(names) - 1 - place) / max(1, len(names) - 1)
        own = base.transform_filter(alt.FieldEqualPredicate(field="series", equal=series))
        layers.append(own.mark_line(strokeWidth=width).encode(strokeDash=dash))
    if x_title == "epoch":
        layers.append(base.mark_point(size=32, filled=True, opacity=1).encode(shape=shape_of(names), detail="split:N"))
    chart = (
        alt.layer(*layers, data=alt.InlineData(values=rows))
        .properties(width=_PANEL_WIDTH, height=_PANEL_HEIGHT)
        .facet(facet=alt.Facet("panel:N", sort=order, title=None), columns=min(4, len(order)))
        .properties(
            title=alt.Title(title, subtitle=mode + ("; solid: train, dashed: held-out" if len(splits) > 1 else ""))
        )
    )
    last = {(row["series"], row["panel"], row["split"]): row for row in rows}
    text = [f"{s}, {p}, {split}: {row['value']:.4g} at {x_title} {row['x']}" for (s, p, split), row in last.items()]
    return finished(name, mode, title, chart, text, wide=len(order) > 2)


def startup_figure(analysis: Analysis) -> Figure | None:
    """Start-up phases stacked, one bar per trial; None where no run recorded them."""
    rows, left_out = chart_data.startup(analysis)
    if not rows:
        return None
    trials = list(dict.fromkeys(row["trial"] for row in rows))
    phases = list(dict.fromkeys(row["phase"] for row in sorted(rows, key=lambda row: int(row["order"]))))
    chart = (
        alt.Chart(alt.InlineData(values=rows))
        .mark_bar(stroke="#80808080", strokeWidth=0.5)
        .encode(
            x=alt.X("sum(seconds):Q", title="start-up (s)", axis=alt.Axis(tickCount=6)),
            y=alt.Y("trial:N", sort=trials, title=None, axis=alt.Axis(labelLimit=340)),
            color=alt.Color(
                "phase:N",
                scale=alt.Scale(domain=phases, range=list(ORDERED_COLOURS[: len(phases)])),
                legend=alt.Legend(title=None, orient="top"),
            ),
            order=alt.Order("order:Q"),
            tooltip=[
                alt.Tooltip("trial:N"),
                alt.Tooltip("phase:N"),
                alt.Tooltip("seconds:Q", format=".3~r", title="seconds"),
            ],
        )
        .properties(
            width=560,
            height=alt.Step(20),
            title=alt.Title(
                "Start-up",
                subtitle="median over runs; in no step or epoch time"
                + (f"; {left_out} trials with a shorter start-up not drawn" if left_out else ""),
            ),
        )
    )
    text = []
    for trial in trials:
        parts = [row for row in rows if row["trial"] == trial]
        each = ", ".join(f"{row['phase']} {words.seconds(row['seconds'])}" for row in parts)
        text.append(f"{trial}: {words.seconds(sum(row['seconds'] for row in parts))} ({each})")
    return finished("start-up", None, "Start-up", chart, text, wide=True, section="start-up")


def _split_legend() -> alt.Legend:
    return alt.Legend(title=None, orient="top", symbolType="stroke", symbolSize=250, symbolStrokeWidth=2)
