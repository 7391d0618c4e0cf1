"""Epoch time by GPU count, with speedup (strong) or efficiency (weak) beside it."""

from __future__ import annotations

from vitscale.report import words
from vitscale.report.figure import Figure
from vitscale.report.like_paper import points
from vitscale.report.like_paper.beside import beside
from vitscale.report.like_paper.catalogue import PaperFigure
from vitscale.report.like_paper.panels import joined, panel
from vitscale.report.like_paper.selection import Lack, Selection, steps_for
from vitscale.report.like_paper.series import names


def scaling_pair(figure: PaperFigure, chosen: Selection) -> Figure | Lack:
    """The epoch times of the chosen series; beside them their speedup or efficiency where it may be worked out."""
    labels, others, weak = names(chosen.series), beside(chosen.series), figure.mode == "weak"
    named = list(zip(chosen.series, labels, strict=True))
    labels_of = {id(one): name for one, name in named}
    times = [row for one, name in named for row in points.epoch_times(one, name)]
    if not times:
        return Lack("No trial of this kind has recorded an epoch time.", steps_for(figure))
    ideals = [row for one, name in named for row in points.ideal_times(one, name, weak)]
    published = points.published_times(others, labels_of)
    unit = words.time_unit(row["value"] for row in times)
    drawn = [[points.in_unit(row, unit.per_second) for row in some] for some in (times, ideals, published)]
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
