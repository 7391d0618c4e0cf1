"""All figures of a study in order: each drawn from the results, or a frame that says what it lacks."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Mapping

from vitscale.analysis import Analysis, CurveResult
from vitscale.analysis.time.run_waterfall import run_waterfalls
from vitscale.present.document import Figure, View
from vitscale.report.charts.axes import Plot, quantity
from vitscale.report.charts.resources import RESOURCES, resource_chart
from vitscale.report.charts.time import breakdown_chart, waterfall_chart
from vitscale.report.like.curves import (
    accuracy_by_gpus,
    accuracy_by_micro_batch,
    against_base,
    loss_and_accuracy,
    scaling_pair,
)
from vitscale.report.like.doublings import doublings_figure
from vitscale.report.like.hosts import hosts_figure
from vitscale.report.like.study import Kind, Lack, Material, PublishedStudy, Selection, StudyFigure, select, steps_for

_LINE, _LETTERS = 17, 86


@dataclasses.dataclass(frozen=True)
class Drawn:
    """One figure of the study, and what came of it."""

    paper: StudyFigure
    figure: Figure
    lack: Lack | None
    """Why the figure is a frame with words in it; None where it shows data."""


def draw_all(study: PublishedStudy, material: Material) -> list[Drawn]:
    """Every figure of a study, in its order."""
    return [draw_one(study, figure, material) for figure in study.figures]


def draw_one(study: PublishedStudy, figure: StudyFigure, material: Material) -> Drawn:
    """One figure of a study."""
    chosen = select(figure, material.series)
    made = chosen if isinstance(chosen, Lack) else _DRAWN[figure.kind](study, figure, chosen, material)
    if isinstance(made, Lack):
        return Drawn(figure, _missing(figure, made), made)
    return Drawn(figure, _as_the_studys(figure, made), None)


def _curves(chosen: Selection) -> list[CurveResult]:
    return list({id(one.curve): one.curve for one in chosen.series}.values())


def _time_split(figure: StudyFigure, chosen: Selection, analysis: Analysis) -> Figure | Lack:
    drawn = breakdown_chart(analysis, _curves(chosen))
    if drawn is None:
        return Lack(
            "No step of these results was explained: epoch times alone, as others' logs have them, do not say where "
            "the time of a step goes.",
            steps_for(figure),
        )
    return drawn


def _utilisation(figure: StudyFigure, chosen: Selection, analysis: Analysis) -> Figure | Lack:
    drawn = resource_chart(analysis, _curves(chosen), [one for one in RESOURCES if "utilisation" in one.name])
    if drawn is None:
        return Lack("No trial of these results has recorded how its processors were used.", steps_for(figure))
    reasons = {
        member.trial.resources.gpu_reason
        for one in chosen.series
        for member in one.members
        if member.trial.resources is not None and member.trial.resources.gpu_utilisation is None
    }
    unknown = [f"GPU utilisation is unavailable: {' and '.join(sorted(filter(None, reasons)))}"] if reasons else []
    views = [
        dataclasses.replace(view, subtitle="; ".join(filter(None, (view.subtitle, *unknown)))) for view in drawn.views
    ]
    return dataclasses.replace(drawn, views=tuple(views))


def _run_waterfall(figure: StudyFigure, chosen: Selection, analysis: Analysis) -> Figure | Lack:
    found = [one for curve in _curves(chosen) for one in run_waterfalls(curve, analysis.trials)]
    known = [one for one in found if one.factors]
    if not known:
        why = "; ".join(sorted({one.reason for one in found})) or "there is one GPU count only"
        return Lack(f"No run of these results can be taken apart: {why}.", steps_for(figure))
    drawn = waterfall_chart(known)
    return drawn or Lack("No factor is known.", steps_for(figure))


def _as_the_studys(figure: StudyFigure, drawn: Figure) -> Figure:
    """A chart under the study's number and title."""
    views = tuple(
        dataclasses.replace(
            view,
            name=figure.name if place == 0 else f"{figure.name}-{view.name}",
            title=figure.heading if len(drawn.views) == 1 else f"{figure.heading}: {view.title}",
        )
        for place, view in enumerate(drawn.views)
    )
    return Figure(figure.name, figure.heading, views, drawn.series)


_Draw = Callable[[PublishedStudy, StudyFigure, Selection, Material], Figure | Lack]
_DRAWN: Mapping[Kind, _Draw] = {
    "scaling": lambda study, figure, chosen, _: scaling_pair(figure, chosen, study.published_points(chosen.series)),
    "speedup": lambda study, figure, chosen, _: against_base(figure, chosen, study.published_points(chosen.series)),
    "efficiency": lambda study, figure, chosen, _: against_base(figure, chosen, study.published_points(chosen.series)),
    "doublings": lambda _study, figure, chosen, material: doublings_figure(figure, chosen, material.network),
    "utilisation": lambda _study, figure, chosen, material: _utilisation(figure, chosen, material.analysis),
    "hosts": lambda _study, figure, chosen, _: hosts_figure(figure, chosen),
    "accuracy by GPUs": lambda _study, figure, chosen, _: accuracy_by_gpus(figure, chosen),
    "loss and accuracy": lambda _study, figure, chosen, _: loss_and_accuracy(figure, chosen),
    "accuracy by micro-batch": lambda _study, figure, chosen, _: accuracy_by_micro_batch(figure, chosen),
    "time split": lambda _study, figure, chosen, material: _time_split(figure, chosen, material.analysis),
    "run waterfall": lambda _study, figure, chosen, material: _run_waterfall(figure, chosen, material.analysis),
}


def _missing(figure: StudyFigure, lack: Lack) -> Figure:
    """A picture of words: what the figure would show, what is missing, and what would produce it."""
    commands = [step.removeprefix("# ") for step in lack.steps if step.startswith("# ")]
    sentences = (f"Would show: {figure.draws}.", lack.reason, "What would produce it:", *commands)
    lines = [line for sentence in sentences for line in textwrap.wrap(sentence, _LETTERS, break_on_hyphens=False)]
    plot = Plot({"rows": [{"text": line, "place": place} for place, line in enumerate(lines)]})
    y = quantity("place", axis=None, scale={"reverse": True, "domain": [-0.5, len(lines) - 0.5], "nice": False})
    mark = {"type": "text", "align": "left", "fontSize": 12}
    plot.add("rows", mark, x={"value": 0}, y=y, text={"field": "text", "type": "nominal"})
    view = View(
        "missing", {}, figure.heading, "", plot.spec(lack.reason, _LINE * len(lines)), {"text": ""}, lack.reason
    )
    return _as_the_studys(figure, Figure(figure.name, figure.heading, (view,)))
