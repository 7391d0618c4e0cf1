"""Epoch times over several hosts against those in one: each GPU count, their mean with its interval, and the margin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from vitscale.report import words
from vitscale.report.chart_data import Row
from vitscale.report.figure import Figure, colour_of, finished, shape_of
from vitscale.report.like_paper.catalogue import PaperFigure
from vitscale.report.like_paper.claims import hosts_sentence
from vitscale.report.like_paper.host_pairs import HostPair, host_pairs
from vitscale.report.like_paper.selection import Lack, Selection, steps_for
from vitscale.report.style import DASHED, IDEAL_COLOUR

_WIDTH, _HEIGHT = 560, 260


def hosts(figure: PaperFigure, chosen: Selection) -> Figure | Lack:
    """The ratio of epoch times by GPU count; a lack where no workload was measured both ways."""
    pairs = host_pairs(chosen.series)
    if not pairs:
        return Lack(
            "No workload of these results was measured at one GPU count both in one host and over several.",
            steps_for(figure),
        )
    rows = [row for pair in pairs for row in _rows(pair)]
    labels = [pair.name for pair in pairs]
    chart = _chart(rows, [_mean(pair) for pair in pairs], labels, pairs[0].test.margin)
    bounded = any(row["low"] is not None for row in rows)
    subtitle = [
        f"line and band: mean over GPU counts and its 95 % interval; dashed: +/- {100 * pairs[0].test.margin:.0f} %",
        "bars: 95 % intervals over runs" if bounded else "one run per count: single points have no interval",
    ]
    title = f"Figure {figure.number}. {figure.title}"
    whole = chart.properties(title=alt.Title(title, subtitle=subtitle))
    text = [f"{pair.name}: {hosts_sentence(pair.test)}" for pair in pairs]
    text += [f"{row['series']}, {row['gpus']} GPUs: {row['shown']} ({row['bounds']})" for row in rows]
    return finished(figure.name, figure.mode, title, whole, text, wide=True)


def _rows(pair: HostPair) -> list[Row]:
    rows = []
    inside = {member.gpus: member.trial for member in pair.inside.members}
    spread = {member.gpus: member.trial for member in pair.spread.members}
    for one in pair.test.counts:
        low, high = one.ratio.low, one.ratio.high
        bounds = f"{low:.3f} to {high:.3f}" if low is not None and high is not None else ""
        times = [words.seconds(e.centre) for t in (spread[one.gpus], inside[one.gpus]) if (e := t.epoch_seconds)]
        rows.append(
            {
                "series": pair.name,
                "gpus": one.gpus,
                "value": one.ratio.centre,
                "low": low,
                "high": high,
                "shown": f"{one.ratio.centre:.3f}",
                "bounds": ", ".join(part for part in (bounds, one.ratio.note) if part),
                "times": " against ".join(times),
            }
        )
    return rows


def _mean(pair: HostPair) -> Row:
    whole = pair.test.ratio
    return {"series": pair.name, "value": whole.centre, "low": whole.low, "high": whole.high}


def _chart(rows: Sequence[Row], means: Sequence[Row], labels: Sequence[str], margin: float) -> Any:
    bounds = [1 / (1 + margin), 1 + margin]
    drawn = [value for row in (*rows, *means) for key in ("value", "low", "high") if (value := row[key]) is not None]
    # The interval of two runs can be so wide that the points would shrink to a line.
    lowest, highest = max(0.7, min(*drawn, bounds[0])) - 0.02, min(1.4, max(*drawn, bounds[1])) + 0.02
    counts = sorted({row["gpus"] for row in rows})
    colour, shape = colour_of(labels), shape_of(labels)
    x = alt.X(
        "gpus:Q",
        title="GPUs",
        scale=alt.Scale(zero=False, nice=False, padding=24),
        axis=alt.Axis(values=counts, format="d", grid=False),
    )
    scale = alt.Scale(domain=[lowest, highest], nice=False, clamp=True, zero=False)
    y = alt.Y(
        "value:Q",
        title="several hosts / one host",
        scale=scale,
        axis=alt.Axis(format=".2f", tickCount=6),
    )
    points = alt.Chart(alt.InlineData(values=list(rows)))
    whole = [row for row in means if row["low"] is not None]
    lines = [{"value": 1.0, "kind": "equal"}, *({"value": bound, "kind": "margin"} for bound in bounds)]
    layers: list[Any] = [
        alt.Chart(alt.InlineData(values=whole)).mark_rect(opacity=0.13).encode(
            y=alt.Y("low:Q", scale=scale), y2="high:Q", color=colour
        ),
        alt.Chart(alt.InlineData(values=lines[1:])).mark_rule(strokeDash=DASHED, color=IDEAL_COLOUR).encode(y=y),
        alt.Chart(alt.InlineData(values=lines[:1])).mark_rule(color=IDEAL_COLOUR).encode(y=y),
        alt.Chart(alt.InlineData(values=list(means))).mark_rule(strokeWidth=1.6).encode(y=y, color=colour),
    ]  # fmt: skip
    if bars := [row for row in rows if row["low"] is not None]:
        rule = alt.Chart(alt.InlineData(values=bars)).mark_rule(strokeWidth=1.5, clip=True)
        layers.append(rule.encode(x=x, y=alt.Y("low:Q", scale=scale), y2="high:Q", color=colour))
    layers.append(
        points.mark_point(size=70, filled=True, opacity=1).encode(
            x=x,
            y=y,
            color=colour,
            shape=shape,
            tooltip=[
                alt.Tooltip("series:N", title="workload"),
                alt.Tooltip("gpus:Q", title="GPUs"),
                alt.Tooltip("shown:N", title="ratio"),
                alt.Tooltip("bounds:N", title="95 % interval"),
                alt.Tooltip("times:N", title="epoch times"),
            ],
        )
    )
    return alt.layer(*layers).properties(width=_WIDTH, height=_HEIGHT)
