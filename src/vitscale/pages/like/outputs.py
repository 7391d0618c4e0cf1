"""Draws a study's figures in order, each from the results or as a frame that says what it lacks. Writes them, the
tables and the tested claims as one self-contained page, pictures, JSON, and lines on the terminal."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vitscale.analysis import Analysis, CurveResult
from vitscale.analysis.time.run_waterfall import run_waterfalls
from vitscale.base.files import told_if_unwritable
from vitscale.errors import unknown
from vitscale.pages.charts.axes import Plot, quantity
from vitscale.pages.charts.resources import RESOURCES, resource_chart
from vitscale.pages.charts.time import breakdown_chart, waterfall_chart
from vitscale.pages.like.curves import against_base, scaling_pair
from vitscale.pages.like.doublings import doublings_figure
from vitscale.pages.like.hosts import hosts_figure
from vitscale.pages.like.learning import accuracy_by_micro_batch, accuracy_of_datasets, loss_and_accuracy
from vitscale.pages.like.selection import Selection, needs_of, select, steps_for
from vitscale.pages.like.study import ClaimOutcome, Material, PublishedStudy, Quantity, StudyFigure
from vitscale.present.data import envelope
from vitscale.present.document import (
    Block,
    Bullets,
    Code,
    ControlOption,
    Document,
    Figure,
    FigureView,
    Paragraph,
    Section,
    Table,
)
from vitscale.present.drawing import FIGURE_FORMATS, pictures
from vitscale.present.html import to_html
from vitscale.present.unread import beginning_with_unread, with_unread
from vitscale.store import write_whole

FORMATS = ("html", "json", *FIGURE_FORMATS)


def study_named(name: str) -> PublishedStudy:
    """The study "paper" or "thesis".

    Raises:
        RequestError: the name is none of them.
    """
    from vitscale.pages.like.paper import PAPER
    from vitscale.pages.like.thesis import THESIS

    studies = {study.name: study for study in (PAPER, THESIS)}
    if name not in studies:
        raise unknown("study of --like", name, studies)
    return studies[name]


def write(
    study: PublishedStudy,
    material: Material,
    results: Path,
    formats: Sequence[str],
    output: Path | None,
    *,
    to_standard_output: bool = True,
) -> list[Path]:
    """Writes all figures, tables and claims in each of `formats`.

    Args:
        study: the study whose figures are drawn.
        material: what to draw them from.
        results: the results folder, where files go without `output`: like-paper/, for the study "paper".
        formats: some of html, json, png, svg, pdf.
        output: the folder; or, for html alone or json alone, a file with that ending.
        to_standard_output: whether JSON alone goes there without `output`, and not into a file.

    Returns:
        The files written: like-paper.html, like-paper.json, figure-04-... and so on.

    Raises:
        RequestError: a format is none of these, or a file cannot be written.
    """
    for wanted in formats:
        if wanted not in FORMATS:
            raise unknown("format of --like", wanted, FORMATS)
    with told_if_unwritable("the figures", output or results, "Name another folder with -o"):
        if to_standard_output and output is None and list(formats) == ["json"]:
            sys.stdout.write(_texts(study, material, ["json"])[0]["json"])
            return []
        return _write(study, material, output or results / f"like-{study.name}", formats)


def findings(study: PublishedStudy, material: Material) -> list[str]:
    """What the study's claims come to on these results, in sentences."""
    return [sentence for claim in study.claims for sentence in claim.test(material).sentences]


def terminal_document(study: PublishedStudy, material: Material, written: Sequence[Path]) -> Document:
    """What a terminal shows: the claims' sentences, and the files that were written."""
    told = Bullets(tuple(findings(study, material)))
    document = Document("", (told,), tuple(f"Written: {path}" for path in written))
    return beginning_with_unread(document, material.analysis.unread)


def _write(study: PublishedStudy, material: Material, folder: Path, formats: Sequence[str]) -> list[Path]:
    texts, drawn = _texts(study, material, formats)
    one_file = len(formats) == 1 and formats[0] in texts and folder.suffix == f".{formats[0]}" and not folder.is_dir()
    (folder.parent if one_file else folder).mkdir(parents=True, exist_ok=True)
    written = []
    for kind, text in texts.items():
        path = folder if one_file else folder / f"like-{study.name}.{kind}"
        write_whole(path, text)
        written.append(path)
    views = [view for drawing in drawn for view in drawing.figure.views]
    for name, content in pictures(views, [kind for kind in formats if kind in FIGURE_FORMATS]):
        written.append(folder / name)
        write_whole(written[-1], content)
    return written


def _texts(
    study: PublishedStudy, material: Material, formats: Sequence[str]
) -> tuple[dict[str, str], list[FigureOutcome]]:
    drawn, tested = draw_all(study, material), [claim.test(material) for claim in study.claims]
    tables = study.tables(material)
    makers = {
        "html": lambda: _to_html(study, material, drawn, tested, tables),
        "json": lambda: _to_json(study, material, drawn, tested, tables),
    }
    return {kind: makers[kind]() for kind in formats if kind in makers}, drawn


def _to_html(
    study: PublishedStudy,
    material: Material,
    drawn: Sequence[FigureOutcome],
    tested: Sequence[ClaimOutcome],
    tables: Sequence[Table],
) -> str:
    shown = sum(drawing.lack is None for drawing in drawn)
    claims: list[Block] = []
    for claim, result in zip(study.claims, tested, strict=True):
        told = Bullets(result.sentences or (claim.untested,))
        claims.append(Section(claim.question, (Paragraph(claim.meaning, "quiet"), told)))
    blocks: list[Block] = [Section(f"The study's {study.claims_text}, tested on these results", tuple(claims))]
    blocks += [Section("Tables", tuple(tables))] if tables else []
    blocks += [_section(drawing) for drawing in drawn]
    if problems := material.analysis.problems:
        blocks.append(Section("Unused records", (Bullets(problems),)))
    blocks.append(Section("Source", (Paragraph(study.reading),)))
    subtitle = f"{shown} of {len(drawn)} figures drawn"
    subtitle += f"; {len(drawn) - shown} say what data they lack" if shown < len(drawn) else ""
    document = beginning_with_unread(Document(material.analysis.study.name, tuple(blocks)), material.analysis.unread)
    return to_html(document, brand=f"vitscale: like {study.short}", subtitle=subtitle)


def _section(drawn: FigureOutcome) -> Section:
    """A figure in its place among the others; folded, with what it lacks, where it has no data."""
    if drawn.lack is None:
        return Section(drawn.paper.heading, _on_the_page(drawn))
    lack = Paragraph(f"Would show: {drawn.paper.draws}. {drawn.lack}")
    return Section(f"{drawn.paper.heading}: no data", (lack, Code(steps_for(drawn.paper))), folded=True)


def _on_the_page(drawn: FigureOutcome) -> tuple[Block, ...]:
    """A figure below its heading, which its views do not repeat; a sole view's title says what the figure draws."""
    views = [
        replace(view, title=view.title.removeprefix(drawn.paper.heading).lstrip(": ")) for view in drawn.figure.views
    ]
    draws = drawn.paper.draws[:1].upper() + drawn.paper.draws[1:]
    if len(views) == 1:
        return (replace(drawn.figure, views=(replace(views[0], title=draws),)),)
    return Paragraph(f"{draws}.", "quiet"), replace(drawn.figure, views=tuple(views))


def _to_json(
    study: PublishedStudy,
    material: Material,
    drawn: Sequence[FigureOutcome],
    tested: Sequence[ClaimOutcome],
    tables: Sequence[Table],
) -> str:
    """The envelope around `unread`, `source`, `claims`, `figures` and `tables`."""
    content = {
        "source": study.source,
        "claims": {key: list(entries) for result in tested for key, entries in result.entries.items()},
        "figures": [
            {
                "number": drawing.paper.number,
                "title": drawing.paper.title,
                "draws": drawing.paper.draws,
                "drawn": drawing.lack is None,
                "missing": drawing.lack,
                "steps": [] if drawing.lack is None else list(steps_for(drawing.paper)),
                "text": [
                    line for view in drawing.figure.views for line in (*view.text, view.subtitle, view.summary) if line
                ],
            }
            for drawing in drawn
        ],
        "tables": [
            {
                "title": table.title,
                "columns": [column.heading for column in table.columns],
                "rows": [
                    {"group": group.label, "cells": list(map(str, row))} for group in table.groups for row in group.rows
                ],
                "notes": list(table.notes),
            }
            for table in tables
        ],
    }
    return envelope("like", with_unread(content, material.analysis.unread))


_LINE, _LETTERS = 17, 86


@dataclass(frozen=True)
class FigureOutcome:
    """One figure of the study, and what came of it."""

    paper: StudyFigure
    figure: Figure
    lack: str | None
    """Why the figure is a frame with words in it; None where it shows data."""


def draw_all(study: PublishedStudy, material: Material) -> list[FigureOutcome]:
    """Every figure of a study, in its order."""
    return [draw_one(study, figure, material) for figure in study.figures]


def draw_one(study: PublishedStudy, figure: StudyFigure, material: Material) -> FigureOutcome:
    """One figure of a study."""
    chosen = select(figure, material.series)
    made = chosen if isinstance(chosen, str) else _DRAWN[figure.quantity](study, figure, chosen, material)
    if isinstance(made, str):
        return FigureOutcome(figure, _missing(figure, made), made)
    return FigureOutcome(figure, _as_the_studys(figure, made), None)


def _curves(chosen: Selection) -> list[CurveResult]:
    return list({id(series.curve): series.curve for series in chosen.series}.values())


def _by_micro_batch(study: PublishedStudy, figure: StudyFigure, chosen: Selection, material: Material) -> Figure | str:
    """Epoch times and speedups, a curve per micro-batch; then the parts of a step, where steps were explained."""
    if len({series.micro_batch for series in chosen.series}) < 2:
        return f"These results hold strong scaling at one micro-batch only: {chosen.series[0].micro_batch:,}."
    drawn = scaling_pair(figure, chosen, study.published_points(chosen.series))
    parts = breakdown_chart(material.analysis, _curves(chosen))
    if isinstance(drawn, str) or parts is None:
        return drawn
    measure = {"measure": ControlOption("parts", "parts of a step")}
    more = (replace(view, choices=measure | dict(view.choices)) for view in parts.views)
    return replace(drawn, views=(*drawn.views, *more))


def _utilisation(chosen: Selection, analysis: Analysis) -> Figure | str:
    drawn = resource_chart(analysis, _curves(chosen), [each for each in RESOURCES if "utilisation" in each.name])
    if drawn is None:
        return "No trial of these results has recorded how its processors were used."
    reasons = {
        member.trial.resources.gpu_reason
        for series in chosen.series
        for member in series.members
        if member.trial.resources is not None and member.trial.resources.gpu_utilisation is None
    }
    unknown = [f"GPU utilisation is unavailable: {' and '.join(sorted(filter(None, reasons)))}"] if reasons else []
    views = [replace(view, subtitle="; ".join(filter(None, (view.subtitle, *unknown)))) for view in drawn.views]
    return replace(drawn, views=tuple(views))


def _run_waterfall(chosen: Selection, analysis: Analysis) -> Figure | str:
    waterfalls = [waterfall for curve in _curves(chosen) for waterfall in run_waterfalls(curve, analysis.trials)]
    known = [split for split in waterfalls if split.factors]
    if not known:
        why = "; ".join(sorted({split.reason for split in waterfalls})) or "there is one GPU count only"
        few = " Each explained step lies between several others: a run of few steps has none."
        return f"No run of these results can be taken apart: {why}.{few if 'was explained' in why else ''}"
    return waterfall_chart(known) or "No factor is known."


def _as_the_studys(figure: StudyFigure, drawn: Figure) -> Figure:
    """A chart under the study's number and title."""
    views = tuple(
        replace(
            view,
            name=figure.name if index == 0 else f"{figure.name}-{view.name}",
            title=figure.heading if len(drawn.views) == 1 else f"{figure.heading}: {view.title}",
        )
        for index, view in enumerate(drawn.views)
    )
    return Figure(figure.name, figure.heading, views, drawn.series)


_Draw = Callable[[PublishedStudy, StudyFigure, Selection, Material], Figure | str]
_DRAWN: Mapping[Quantity, _Draw] = {
    "epoch time": lambda study, figure, chosen, _: scaling_pair(figure, chosen, study.published_points(chosen.series)),
    "speedup": lambda study, figure, chosen, _: against_base(figure, chosen, study.published_points(chosen.series)),
    "efficiency": lambda study, figure, chosen, _: against_base(figure, chosen, study.published_points(chosen.series)),
    "doublings": lambda _study, figure, chosen, material: doublings_figure(figure, chosen, material.network),
    "utilisation": lambda _study, _figure, chosen, material: _utilisation(chosen, material.analysis),
    "one host against several": lambda study, figure, chosen, _: hosts_figure(
        figure, chosen, study.published_points(chosen.series)
    ),
    "accuracy of datasets": lambda _study, figure, chosen, _: accuracy_of_datasets(figure, chosen),
    "loss and accuracy": lambda _study, figure, chosen, _: loss_and_accuracy(figure, chosen),
    "accuracy by micro-batch": lambda _study, figure, chosen, _: accuracy_by_micro_batch(figure, chosen),
    "epoch time by micro-batch": _by_micro_batch,
    "run waterfall": lambda _study, _figure, chosen, material: _run_waterfall(chosen, material.analysis),
}


def _missing(figure: StudyFigure, lack: str) -> Figure:
    """A picture of words: what the figure would show, what is missing, and what would produce it."""
    commands = [step.removeprefix("# ") for step in steps_for(figure) if step.startswith("# ")]
    sentences = (f"Would show: {figure.draws}.", lack, "What would produce it:", *needs_of(figure), *commands)
    lines = [line for sentence in sentences for line in textwrap.wrap(sentence, _LETTERS, break_on_hyphens=False)]
    plot = Plot({"rows": [{"text": line, "place": index} for index, line in enumerate(lines)]})
    y = quantity("place", axis=None, scale={"reverse": True, "domain": [-0.5, len(lines) - 0.5], "nice": False})
    mark = {"type": "text", "align": "left", "fontSize": 12}
    plot.add("rows", mark, x={"value": 0}, y=y, text={"field": "text", "type": "nominal"})
    view = FigureView("missing", {}, figure.heading, "", plot.spec(lack, _LINE * len(lines)), {"text": ""}, lack)
    return _as_the_studys(figure, Figure(figure.name, figure.heading, (view,)))
