"""All figures of the study in order: each drawn, or a frame that says what it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vitscale.analysis import Analysis
from vitscale.report.figure import Figure
from vitscale.report.like_paper import accuracies
from vitscale.report.like_paper.catalogue import FIGURES, PaperFigure
from vitscale.report.like_paper.hosts import hosts
from vitscale.report.like_paper.missing import missing
from vitscale.report.like_paper.scaling_pair import scaling_pair
from vitscale.report.like_paper.selection import Lack, Selection, select
from vitscale.report.like_paper.series import Series
from vitscale.report.like_paper.speedups import speedups
from vitscale.report.like_paper.time_split import time_split


@dataclass(frozen=True)
class Drawn:
    """One figure of the study, and what came of it."""

    paper: PaperFigure
    figure: Figure
    lack: Lack | None
    """Why the figure is a frame with words in it; None where it shows data."""


def draw_all(analysis: Analysis, found: Sequence[Series]) -> list[Drawn]:
    """Every figure of the catalogue, in its order."""
    return [draw_one(paper, analysis, found) for paper in FIGURES]


def draw_one(paper: PaperFigure, analysis: Analysis, found: Sequence[Series]) -> Drawn:
    """One figure of the catalogue."""
    chosen = select(paper, found)
    made = chosen if isinstance(chosen, Lack) else _figure(paper, chosen, analysis)
    if isinstance(made, Lack):
        return Drawn(paper, missing(paper, made), made)
    return Drawn(paper, made, None)


def _figure(paper: PaperFigure, chosen: Selection, analysis: Analysis) -> Figure | Lack:
    match paper.kind:
        case "scaling":
            return scaling_pair(paper, chosen)
        case "speedup":
            return speedups(paper, chosen)
        case "hosts":
            return hosts(paper, chosen)
        case "accuracy by GPUs":
            return accuracies.by_gpus(paper, chosen)
        case "loss and accuracy":
            return accuracies.loss_and_accuracy(paper, chosen)
        case "accuracy by micro-batch":
            return accuracies.by_micro_batch(paper, chosen)
        case "time split":
            return time_split(paper, chosen, analysis)
