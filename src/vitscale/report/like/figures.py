"""All figures of a study in order: each drawn from the results, or a frame that says what it lacks."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import altair as alt

from vitscale.analysis import Analysis, CurveResult
from vitscale.analysis.time.run_waterfall import run_waterfalls
from vitscale.present.document import Figure
from vitscale.report.charts.resources import RESOURCES, resource_chart
from vitscale.report.charts.time import breakdown_chart, waterfall_chart
from vitscale.report.like import accuracies
from vitscale.report.like.doublings import doublings_figure
from vitscale.report.like.hosts import hosts
from vitscale.report.like.marks import finished
from vitscale.report.like.scaling import against_base, scaling_pair
from vitscale.report.like.selection import Lack, Selection, select, steps_for
from vitscale.report.like.study import Kind, Material, PublishedStudy, StudyFigure
from vitscale.report.style import DASHED, IDEAL_COLOUR

_WIDTH, _LINE, _LETTERS = 860, 17, 132


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
    return Drawn(figure, made, None)


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
    return _as_the_studys(figure, drawn)


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
    return _as_the_studys(figure, drawn, unknown)


def _run_waterfall(figure: StudyFigure, chosen: Selection, analysis: Analysis) -> Figure | Lack:
    found = [one for curve in _curves(chosen) for one in run_waterfalls(curve, analysis.trials)]
    known = [one for one in found if one.factors]
    if not known:
        why = "; ".join(sorted({one.reason for one in found})) or "there is one GPU count only"
        return Lack(f"No run of these results can be taken apart: {why}.", steps_for(figure))
    drawn = waterfall_chart(known)
    return Lack("No factor is known.", steps_for(figure)) if drawn is None else _as_the_studys(figure, drawn)


def _as_the_studys(figure: StudyFigure, drawn: Figure, notes: Sequence[str] = ()) -> Figure:
    """The report's own chart under the study's number and title."""
    views = tuple(
        dataclasses.replace(
            view,
            name=figure.name if place == 0 else f"{figure.name}-{view.name}",
            title=figure.heading if len(drawn.views) == 1 else f"{figure.heading}: {view.title}",
            subtitle="; ".join(filter(None, (view.subtitle, *notes))),
        )
        for place, view in enumerate(drawn.views)
    )
    return Figure(figure.name, figure.heading, views, drawn.series)


_Draw = Callable[[PublishedStudy, StudyFigure, Selection, Material], Figure | Lack]
_DRAWN: Mapping[Kind, _Draw] = {
    "scaling": lambda study, figure, chosen, _: scaling_pair(figure, chosen, study.beside(chosen.series)),
    "speedup": lambda study, figure, chosen, _: against_base(figure, chosen, study.beside(chosen.series)),
    "efficiency": lambda study, figure, chosen, _: against_base(figure, chosen, study.beside(chosen.series)),
    "doublings": lambda _study, figure, chosen, material: doublings_figure(figure, chosen, material.network),
    "utilisation": lambda _study, figure, chosen, material: _utilisation(figure, chosen, material.analysis),
    "hosts": lambda _study, figure, chosen, _: hosts(figure, chosen),
    "accuracy by GPUs": lambda _study, figure, chosen, _: accuracies.by_gpus(figure, chosen),
    "loss and accuracy": lambda _study, figure, chosen, _: accuracies.loss_and_accuracy(figure, chosen),
    "accuracy by micro-batch": lambda _study, figure, chosen, _: accuracies.by_micro_batch(figure, chosen),
    "time split": lambda _study, figure, chosen, material: _time_split(figure, chosen, material.analysis),
    "run waterfall": lambda _study, figure, chosen, material: _run_waterfall(figure, chosen, material.analysis),
}


def _missing(figure: StudyFigure, lack: Lack) -> Figure:
    """A frame that says what the figure would show, what is missing, and what would produce it."""
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
    whole = chart.properties(title=alt.Title(figure.heading, subtitle="no data"))
    words = [f"Would show: {figure.draws}.", lack.reason, "Study file and commands:", *lack.steps]
    return finished(figure.name, figure.heading, whole, words)
