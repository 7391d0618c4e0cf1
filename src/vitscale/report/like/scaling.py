"""Epoch time by GPU count, with speedup (strong) or efficiency (weak) beside it; and either of these alone."""

from __future__ import annotations

from vitscale.present import units
from vitscale.present.document import Figure
from vitscale.report.like import points
from vitscale.report.like.beside import Beside
from vitscale.report.like.panels import joined, panel
from vitscale.report.like.selection import Lack, Selection, steps_for
from vitscale.report.like.series import names
from vitscale.report.like.study import StudyFigure


def scaling_pair(figure: StudyFigure, chosen: Selection, others: Beside) -> Figure | Lack:
    """The epoch times of the chosen series; beside them their speedup or efficiency where it may be worked out."""
    labels, weak = names(chosen.series), figure.mode == "weak"
    named = list(zip(chosen.series, labels, strict=True))
    labels_of = {id(one): name for one, name in named}
    times = [row for one, name in named for row in points.epoch_times(one, name)]
    if not times:
        return Lack("No trial of this kind has recorded an epoch time.", steps_for(figure))
    ideals = [row for one, name in named for row in points.ideal_times(one, name, weak)]
    published = points.published_times(others, labels_of)
    unit = units.time_unit(row["value"] for row in times)
    drawn = [[points.in_unit(row, unit.factor) for row in some] for some in (times, ideals, published)]
    panels = [panel(drawn[0], drawn[1], drawn[2], labels, f"epoch time ({unit.sign})", logarithmic=True)]
    relative = [row for one, name in named for row in points.against_base(one, name)]
    what = "efficiency" if weak else "speedup"
    if len({row["gpus"] for row in relative}) > 1:
        ideal = points.ideal_against_base(relative, weak)
        panels.append(panel(relative, ideal, points.published_against_base(others, labels_of), labels, what))
    text = [*points.sentences(times), *points.ratio_sentences(relative, what)]
    text += [f"{row['what']}, {points.gpus_text(row['gpus'])}: {row['shown']}" for row in published]
    bounded = any(row["low"] is not None for row in times)
    return joined(figure, panels, chosen, others, text, bounded=bounded)


def against_base(figure: StudyFigure, chosen: Selection, others: Beside) -> Figure | Lack:
    """The speedup, or the efficiency, of every chosen series over its smallest GPU count."""
    labels, per_gpu = names(chosen.series), figure.kind == "efficiency"
    named = list(zip(chosen.series, labels, strict=True))
    rows = [row for one, name in named for row in points.against_base(one, name, per_gpu=per_gpu)]
    if len({row["gpus"] for row in rows}) < 2:
        return Lack("No two GPU counts of this micro-batch may be held against each other.", steps_for(figure))
    ideal = points.ideal_against_base(rows, weak=per_gpu)
    published = [] if per_gpu else points.published_against_base(others, {id(one): name for one, name in named})
    drawn = panel(rows, ideal, published, labels, figure.kind)
    bases = [
        f"baseline of {name}: {points.gpus_text(base.gpus)}, {units.seconds(base.trial.epoch_seconds.value)} an epoch"
        for one, name in named
        if (base := one.base) is not None and base.trial.epoch_seconds is not None
    ]
    text = [*bases, *points.ratio_sentences(rows, figure.kind)]
    bounded = any(row["low"] is not None for row in rows)
    return joined(figure, [drawn], chosen, others, text, bounded=bounded)
