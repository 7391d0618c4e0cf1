"""Accuracy and loss: by GPU count with a curve per epoch, by epoch with a curve per GPU count, by micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import altair as alt

from vitscale.present.document import Figure
from vitscale.report.charts.axes import Row
from vitscale.report.like.marks import finished
from vitscale.report.like.selection import Lack, Selection, steps_for
from vitscale.report.like.series import Member, Series, apart_in_micro_batch, names
from vitscale.report.like.study import StudyFigure
from vitscale.report.style import ORDERED_COLOURS, SERIES_SHAPES

_WIDTH, _HEIGHT = 260, 200
_MOST_PANELS = 6
_MOST_LINES = 10
"""Epochs that are drawn as curves: evenly spaced, and the last of each series."""
Split = Literal["held_out", "train"]
_SPLIT_NAMES: dict[Split, str] = {"held_out": "held-out", "train": "training"}
_NOTHING = "No trial of these results has recorded an accuracy."


def by_gpus(figure: StudyFigure, chosen: Selection) -> Figure | Lack:
    """Accuracy by GPU count, one curve per epoch."""
    drawn, split = _with_accuracy(_first(chosen.series))
    rows = [row for one, name in drawn for row in _rows(one, name, split, "accuracy")]
    last = max((row["epoch"] for row in rows), default=0)
    kept = {max(1, round(last * (k + 1) / _MOST_LINES)) for k in range(_MOST_LINES)}
    kept |= {max(row["epoch"] for row in rows if row["panel"] == name) for name in {row["panel"] for row in rows}}
    rows = [row for row in rows if row["epoch"] in kept]
    if not rows or len({row["gpus"] for row in rows}) < 2:
        return Lack(_NOTHING if not rows else "Accuracy was recorded at one GPU count only.", steps_for(figure))
    x = _gpus_axis(rows)
    panels = _facets(rows, x, "epoch", "epoch", f"{_SPLIT_NAMES[split]} accuracy", percent=True)
    return _whole(figure, panels, drawn, split, _sentences(rows, "accuracy"))


def loss_and_accuracy(figure: StudyFigure, chosen: Selection) -> Figure | Lack:
    """Loss and accuracy by epoch, one curve per GPU count."""
    drawn, split = _with_accuracy(_first(chosen.series))
    if not drawn:
        return Lack(_NOTHING, steps_for(figure))
    lines, text = [], []
    for what in ("loss", "accuracy"):
        rows = [row for one, name in drawn for row in _rows(one, name, split, what)]
        if not rows:
            continue
        last = max(row["epoch"] for row in rows)
        ticks = list(range(1, last + 1, max(1, round(last / 5))))
        x = alt.X("epoch:Q", title="epoch", scale=alt.Scale(zero=False, nice=False, padding=10),
                  axis=alt.Axis(values=ticks, format="d", grid=False))  # fmt: skip
        title = f"{_SPLIT_NAMES[split]} {what}"
        lines.append(_facets(rows, x, "gpus", "GPUs", title, percent=what == "accuracy"))
        text += _sentences([row for row in rows if row["epoch"] == last], what)
    return _whole(figure, alt.vconcat(*lines, spacing=16), drawn, split, text)


def by_micro_batch(figure: StudyFigure, chosen: Selection) -> Figure | Lack:
    """Accuracy by micro-batch after the same epoch, one curve per GPU count; a panel for series apart in it alone."""
    drawn, split = _with_accuracy(chosen.series)
    several = apart_in_micro_batch([one for one, _ in drawn])
    if not several:
        return Lack(
            _NOTHING if not drawn else "Accuracy was recorded at one micro-batch only of any workload.",
            steps_for(figure),
        )
    rows = [row for name, some in several[:_MOST_PANELS] for row in _at_common_epoch(some, name, split)]
    batches = sorted({row["micro_batch"] for row in rows})
    x = alt.X("micro_batch:Q", title="micro-batch (images per GPU)",
              scale=alt.Scale(type="log", base=2, nice=False, padding=14),
              axis=alt.Axis(values=batches, format="d", grid=False))  # fmt: skip
    panels = _facets(rows, x, "gpus", "GPUs", f"{_SPLIT_NAMES[split]} accuracy", percent=True)
    text = [
        f"{row['panel']}, micro-batch {row['micro_batch']}, {row['gpus']} GPUs: {row['value']:.1%} after epoch "
        f"{row['epoch']}"
        for row in rows
    ]
    return _whole(figure, panels, drawn, split, text)


def _first(series: Sequence[Series]) -> list[Series]:
    """As many as have room: those of several GPU counts first, those in one host before the others."""
    return sorted(series, key=lambda one: (len(one.members) < 2, one.place != "one host"))[:_MOST_PANELS]


def _with_accuracy(series: Sequence[Series]) -> tuple[list[tuple[Series, str]], Split]:
    """The series that have accuracies, named; held-out where any has it."""
    splits: tuple[Split, ...] = ("held_out", "train")
    for split in splits:
        found = [one for one in series if any(_known(member, split, "accuracy") for member in one.members)]
        if found:
            return list(zip(found, names(found), strict=True)), split
    return [], "train"


def _known(member: Member, split: str, what: str) -> dict[int, float]:
    """Epoch, counted from 1, to the mean over runs."""
    values = {epoch.epoch + 1: getattr(epoch, f"{split}_{what}") for epoch in member.trial.epochs}
    return {epoch: float(value) for epoch, value in values.items() if value is not None}


def _rows(one: Series, name: str, split: Split, what: str) -> list[Row]:
    rows = []
    for member in one.members:
        for epoch, value in _known(member, split, what).items():
            runs = [
                getattr(line, f"{split}_{what}")
                for run in member.trial.runs
                for line in run.epochs
                if line.epoch + 1 == epoch
            ]
            known = [run for run in runs if run is not None]
            bounds = {"low": min(known), "high": max(known)} if len(known) > 1 else {"low": None, "high": None}
            row = {"panel": name, "gpus": member.gpus, "micro_batch": one.micro_batch, "epoch": epoch, "value": value}
            rows.append(row | bounds | {"runs": len(known)})
    return rows


def _at_common_epoch(some: Sequence[Series], name: str, split: Split) -> list[Row]:
    """The rows of the last epoch that all these trials have: every one has then seen the same images."""
    rows = [row for one in some for row in _rows(one, name, split, "accuracy")]
    trials = {(row["micro_batch"], row["gpus"]) for row in rows}
    common = [
        epoch
        for epoch in {row["epoch"] for row in rows}
        if {(row["micro_batch"], row["gpus"]) for row in rows if row["epoch"] == epoch} == trials
    ]
    return [row for row in rows if common and row["epoch"] == max(common)]


def _facets(rows: Sequence[Row], x: alt.X, by: str, by_title: str, y_title: str, *, percent: bool) -> Any:
    """A panel per series, a curve for each value of `by` in colours from dark to light."""
    values = sorted({row[by] for row in rows})
    last = len(ORDERED_COLOURS) - 2
    colours = [
        ORDERED_COLOURS[round(place * last / max(1, len(values) - 1))] if len(values) <= last + 1
        else _between(place / (len(values) - 1))
        for place in range(len(values))
    ]  # fmt: skip
    named = [row | {"curve": str(row[by])} for row in rows]
    domain = [str(value) for value in values]
    legend = alt.Legend(title=by_title, orient="right", symbolOpacity=1)
    colour = alt.Color("curve:N", scale=alt.Scale(domain=domain, range=colours), legend=legend, sort=domain)
    shapes = [SERIES_SHAPES[place % len(SERIES_SHAPES)] for place in range(len(values))]
    shape = alt.Shape("curve:N", scale=alt.Scale(domain=domain, range=shapes), legend=legend, sort=domain)
    y = alt.Y("value:Q", title=y_title, scale=alt.Scale(zero=False),
              axis=alt.Axis(format="%" if percent else "~r", tickCount=5))  # fmt: skip
    base = alt.Chart().encode(x=x, y=y, color=colour)
    layers: list[Any] = [base.mark_line(strokeWidth=1.8)]
    if any(row["low"] is not None for row in rows):
        bars = base.transform_filter("datum.low != null").mark_rule(strokeWidth=1.4)
        layers.append(bars.encode(x=x, y=alt.Y("low:Q"), y2="high:Q", color=colour))
    tooltip = [alt.Tooltip(f"{key}:N") for key in ("panel", "gpus", "epoch", "micro_batch", "runs")]
    tooltip.append(alt.Tooltip("value:Q", format=".4~r"))
    layers.append(base.mark_point(size=42, filled=True, opacity=1).encode(shape=shape, tooltip=tooltip))
    panel = alt.layer(*layers, data=alt.InlineData(values=named)).properties(width=_WIDTH, height=_HEIGHT)
    order = list(dict.fromkeys(row["panel"] for row in rows))
    return panel.facet(facet=alt.Facet("panel:N", title=None, sort=order), columns=3)


def _between(share: float) -> str:
    """A colour of the ordered scale at a share of its length, between its two neighbours."""
    place = share * (len(ORDERED_COLOURS) - 2)
    left = min(int(place), len(ORDERED_COLOURS) - 3)
    ends = [[int(ORDERED_COLOURS[k][1 + 2 * c : 3 + 2 * c], 16) for c in range(3)] for k in (left, left + 1)]
    mixed = [round(a + (b - a) * (place - left)) for a, b in zip(*ends, strict=True)]
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _gpus_axis(rows: Sequence[Row]) -> alt.X:
    counts = sorted({row["gpus"] for row in rows})
    return alt.X("gpus:Q", title="GPUs", scale=alt.Scale(zero=False, nice=False, padding=12),
                 axis=alt.Axis(values=counts, format="d", grid=False))  # fmt: skip


def _sentences(rows: Sequence[Row], what: str) -> list[str]:
    last = max((row["epoch"] for row in rows), default=0)
    shown = "{:.1%}" if what == "accuracy" else "{:.3f}"
    return [
        f"{row['panel']}, {row['gpus']} GPUs: {what} {shown.format(row['value'])} after epoch {row['epoch']}"
        for row in rows
        if row["epoch"] == last
    ]


def _whole(
    figure: StudyFigure, chart: Any, drawn: Sequence[tuple[Series, str]], split: Split, text: Sequence[str]
) -> Figure:
    repeated = any(len(member.trial.runs) > 1 for one, _ in drawn for member in one.members)
    subtitle = [
        f"{_SPLIT_NAMES[split]} figures; equal images at equal epochs, but the global batch grows with the GPUs",
        "bars: lowest and highest run" if repeated else "one run each: nothing is known of other seeds",
    ]
    title = figure.heading
    whole = chart.properties(title=alt.Title(title, subtitle=subtitle))
    return finished(figure.name, title, whole, [*subtitle, *dict.fromkeys(text)])
