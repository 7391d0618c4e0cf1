"""A figure that cannot be drawn: a frame that says what it would show, what is missing, and what would produce it."""

from __future__ import annotations

import textwrap
from typing import Any

import altair as alt

from vitscale.report.figure import Figure, finished
from vitscale.report.like_paper.catalogue import PaperFigure
from vitscale.report.like_paper.selection import Lack
from vitscale.report.style import DASHED, IDEAL_COLOUR

_WIDTH, _LINE, _LETTERS = 860, 17, 132


def missing(figure: PaperFigure, lack: Lack) -> Figure:
    """The placeholder of a figure."""
    commands = [step.removeprefix("# ") for step in lack.steps if step.startswith("# ")]
    sentences = (
        f"Would show: {figure.draws}.",
        lack.reason,
        f"What would produce it: {', then '.join(commands)}",
    )
    lines = [line for one in sentences for line in textwrap.wrap(one, _LETTERS, break_on_hyphens=False)]
    height = _LINE * len(lines) + 30
    data = alt.InlineData(values=[{"text": line, "place": place} for place, line in enumerate(lines)])
    frame = (
        alt.Chart(alt.InlineData(values=[{}]))
        .mark_rect(fillOpacity=0, stroke=IDEAL_COLOUR, strokeDash=DASHED)
        .encode(x=alt.value(0), x2=alt.value(_WIDTH), y=alt.value(0), y2=alt.value(height))
    )
    text = (
        alt.Chart(data)
        .mark_text(align="left", baseline="middle", fontSize=12, limit=_WIDTH - 24)
        .encode(
            x=alt.value(14),
            y=alt.Y("place:Q", axis=None, scale=alt.Scale(domain=[-0.7, len(lines) - 0.3], nice=False, reverse=True)),
            text="text:N",
        )
    )
    chart: Any = alt.layer(frame, text).properties(width=_WIDTH, height=height)
    whole = chart.properties(title=alt.Title(f"Figure {figure.number}. {figure.title}", subtitle="no data"))
    words = [f"Would show: {figure.draws}.", lack.reason, "Study file and commands:", *lack.steps]
    return finished(figure.name, figure.mode, f"Figure {figure.number}. {figure.title}", whole, words, wide=True)
