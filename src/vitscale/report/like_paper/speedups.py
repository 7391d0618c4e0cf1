"""Speedup at one micro-batch, against the ideal; the absolute time of the baseline stands beside it."""

from __future__ import annotations

from vitscale.report import words
from vitscale.report.figure import Figure
from vitscale.report.like_paper import points
from vitscale.report.like_paper.beside import beside
from vitscale.report.like_paper.catalogue import PaperFigure
from vitscale.report.like_paper.panels import joined, panel
from vitscale.report.like_paper.selection import Lack, Selection, steps_for
from vitscale.report.like_paper.series import names


def speedups(figure: PaperFigure, chosen: Selection) -> Figure | Lack:
    """The speedup of every chosen series over its smallest GPU count."""
    labels, others = names(chosen.series), beside(chosen.series)
    named = list(zip(chosen.series, labels, strict=True))
    rows = [row for one, name in named for row in points.against_base(one, name)]
    if len({row["gpus"] for row in rows}) < 2:
        return Lack("No two GPU counts of this micro-batch may be held against each other.", steps_for(figure))
    ideal = points.ideal_against_base(rows, weak=False)
    drawn = panel(
        rows, ideal, points.published_against_base(others, {id(one): name for one, name in named}), labels, "speedup"
    )
    bases = [
        f"baseline of {name}: {points.gpus_text(base.gpus)}, {words.seconds(base.trial.epoch_seconds.centre)} an epoch"
        for one, name in named
        if (base := one.base) is not None and base.trial.epoch_seconds is not None
    ]
    text = [*bases, *points.ratio_sentences(rows, "speedup")]
    bounded = any(row["low"] is not None for row in rows)
    return joined(figure, [drawn], chosen, others, text, bounded=bounded)
