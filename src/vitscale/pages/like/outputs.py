"""A study's figures, tables and tested claims as one self-contained page, pictures, JSON, and lines on the terminal.

Each figure is drawn from the results, or is a frame with words that say what the results lack.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from vitscale.analysis import Analysis, CurveResult, Waterfall
from vitscale.analysis.time.run_waterfall import run_waterfalls
from vitscale.base.files import unwritable_as_request_error
from vitscale.errors import unknown
from vitscale.pages.charts.axes import Plot, quantity
from vitscale.pages.charts.resources import RESOURCES, resource_chart
from vitscale.pages.charts.time import breakdown_chart, waterfall_chart
from vitscale.pages.like.curves import relative_to_base_figure, scaling_pair
from vitscale.pages.like.doublings import doublings_figure
from vitscale.pages.like.hosts import hosts_figure
from vitscale.pages.like.learning import accuracy_by_micro_batch, accuracy_of_datasets, loss_and_accuracy
from vitscale.pages.like.selection import Selection, needs_of, select, steps_for
from vitscale.pages.like.study import ClaimOutcome, MeasuredData, PublishedStudy, Quantity, StudyFigure
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
    """Return the study "paper" or "thesis".

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
    measured: MeasuredData,
    results: Path,
    formats: Sequence[str],
    output: Path | None,
    *,
    to_standard_output: bool = True,
) -> list[Path]:
    """Write all figures, tables and claims in each of `formats`.

    Args:
        study: the study whose figures are drawn.
        measured: what to draw them from.
        results: the results folder, where files go without `output`: like-paper/, for the study "paper".
        formats: some of html, json, png, svg, pdf.
        output: the folder; or, for html alone or json alone, a file with that ending.
        to_standard_output: whether JSON alone goes there without `output`, and not into a file.

    Returns:
        The files written: like-paper.html, like-paper.json, figure-04-... and so on.

    Raises:
        RequestError: a format is none of these, or a file cannot be written.
    """
    for form in formats:
        if form not in FORMATS:
            raise unknown("format of --like", form, FORMATS)
    with unwritable_as_request_error("the figures", output or results, "Name another folder with -o"):
        if to_standard_output and output is None and list(formats) == ["json"]:
            sys.stdout.write(_to_json(_evaluate(study, measured)))
            return []
        return _write_formats(_evaluate(study, measured), output or results / f"like-{study.name}", formats)


def findings(study: PublishedStudy, measured: MeasuredData) -> list[str]:
    """Return the sentences of the tests of the study's claims on these results."""
    sentences: list[str] = []
    for claim in study.claims:
        sentences += claim.test(measured).sentences
    return sentences


def terminal_document(study: PublishedStudy, measured: MeasuredData, written: Sequence[Path]) -> Document:
    """Return what a terminal shows: the sentences on the claims, and the files that were written."""
    claims = Bullets(tuple(findings(study, measured)))
    document = Document("", (claims,), last=tuple(f"Written: {path}" for path in written))
    return beginning_with_unread(document, measured.analysis.unread)


class _Evaluated(NamedTuple):
    """A study with its figures, claims and tables from some results."""

    study: PublishedStudy
    measured: MeasuredData
    figures: list[FigureOutcome]
    claims: list[ClaimOutcome]
    tables: Sequence[Table]


def _evaluate(study: PublishedStudy, measured: MeasuredData) -> _Evaluated:
    """Draw a study's figures, test its claims and make its tables."""
    figures = draw_all(study, measured)
    claims = [claim.test(measured) for claim in study.claims]
    return _Evaluated(study, measured, figures, claims, study.tables(measured))


def _write_formats(evaluated: _Evaluated, output: Path, formats: Sequence[str]) -> list[Path]:
    """Write each format into the folder `output`, and return the paths of the files.

    `output` is a file where it ends in the only format, html or json, and is no folder.
    """
    text_makers = {"html": _to_html, "json": _to_json}
    text_formats = [form for form in dict.fromkeys(formats) if form in text_makers]
    is_one_text = len(formats) == 1 and text_formats == list(formats)
    is_file = is_one_text and output.suffix == f".{formats[0]}" and not output.is_dir()
    folder = output.parent if is_file else output
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for form in text_formats:
        path = output if is_file else folder / f"like-{evaluated.study.name}.{form}"
        write_whole(path, text_makers[form](evaluated))
        written.append(path)
    views: list[FigureView] = []
    for outcome in evaluated.figures:
        views += outcome.figure.views
    for name, content in pictures(views, [form for form in formats if form in FIGURE_FORMATS]):
        path = output / name
        write_whole(path, content)
        written.append(path)
    return written


def _to_html(evaluated: _Evaluated) -> str:
    """Return the page: claims, tables, figures, problems and the source."""
    study, measured, figures, outcomes, tables = evaluated
    claims = []
    for claim, outcome in zip(study.claims, outcomes, strict=True):
        sentences = Bullets(outcome.sentences or (claim.untested,))
        claims.append(Section(claim.question, (Paragraph(claim.meaning, "quiet"), sentences)))
    blocks: list[Block] = [Section(f"The study's {study.claims_text}, tested on these results", tuple(claims))]
    if tables:
        blocks.append(Section("Tables", tuple(tables)))
    blocks += [_figure_section(outcome) for outcome in figures]
    if measured.analysis.problems:
        blocks.append(Section("Unused records", (Bullets(measured.analysis.problems),)))
    blocks.append(Section("Source", (Paragraph(study.reading_note),)))
    drawn = [outcome for outcome in figures if outcome.lack is None]
    subtitle = f"{len(drawn)} of {len(figures)} figures drawn"
    if len(drawn) < len(figures):
        subtitle += f"; {len(figures) - len(drawn)} say what data they lack"
    document = beginning_with_unread(Document(measured.analysis.study.name, tuple(blocks)), measured.analysis.unread)
    return to_html(document, brand=f"vitscale: like {study.title_name}", subtitle=subtitle)


def _figure_section(drawn: FigureOutcome) -> Section:
    """Return the section of a figure; where it has no data, a folded one with what the results lack."""
    if drawn.lack is None:
        return Section(drawn.study_figure.heading, _figure_blocks(drawn))
    lack = Paragraph(f"Would show: {drawn.study_figure.draws}. {drawn.lack}")
    return Section(f"{drawn.study_figure.heading}: no data", (lack, Code(steps_for(drawn.study_figure))), folded=True)


def _figure_blocks(drawn: FigureOutcome) -> tuple[Block, ...]:
    """Return a figure for the section that has its heading: the titles of its views do not repeat it.

    The words on what the figure draws are the title of its only view, or stand above several views.
    """
    draws = drawn.study_figure.draws[:1].upper() + drawn.study_figure.draws[1:]
    if len(drawn.figure.views) == 1:
        only_view = replace(drawn.figure.views[0], title=draws)
        return (replace(drawn.figure, views=(only_view,)),)
    views = []
    for view in drawn.figure.views:
        title_without_heading = view.title.removeprefix(drawn.study_figure.heading).lstrip(": ")
        views.append(replace(view, title=title_without_heading))
    return Paragraph(f"{draws}.", "quiet"), replace(drawn.figure, views=tuple(views))


def _to_json(evaluated: _Evaluated) -> str:
    """Return the envelope around `unread`, `source`, `claims`, `figures` and `tables`."""
    entries: dict[str, list[Any]] = {}
    for outcome in evaluated.claims:
        entries |= {name: list(tests) for name, tests in outcome.entries.items()}
    content = {
        "source": evaluated.study.source,
        "claims": entries,
        "figures": [_figure_fields(outcome) for outcome in evaluated.figures],
        "tables": [_table_fields(table) for table in evaluated.tables],
    }
    return envelope("like", with_unread(content, evaluated.measured.analysis.unread))


def _figure_fields(outcome: FigureOutcome) -> dict[str, Any]:
    """Return the fields of a figure in JSON: its content in words, or what the results lack."""
    lines: list[str] = []
    for view in outcome.figure.views:
        lines += [*view.text, view.subtitle, view.summary]
    is_drawn = outcome.lack is None
    return {
        "number": outcome.study_figure.number,
        "title": outcome.study_figure.title,
        "draws": outcome.study_figure.draws,
        "drawn": is_drawn,
        "missing": outcome.lack,
        "steps": [] if is_drawn else list(steps_for(outcome.study_figure)),
        "text": [line for line in lines if line],
    }


def _table_fields(table: Table) -> dict[str, Any]:
    """Return the fields of a table in JSON: each row with the label of its group."""
    rows: list[dict[str, Any]] = []
    for group in table.groups:
        rows += [{"group": group.label, "cells": [str(cell) for cell in row]} for row in group.rows]
    return {
        "title": table.title,
        "columns": [column.heading for column in table.columns],
        "rows": rows,
        "notes": list(table.notes),
    }


_LINE_PIXELS = 17
_LETTERS_PER_LINE = 86
"""Number of letters that fit a line of a picture of words."""


@dataclass(frozen=True)
class FigureOutcome:
    """One figure of the study, drawn from the results, or as a frame with words on what they lack."""

    study_figure: StudyFigure
    """The study's own figure."""
    figure: Figure
    """What was drawn."""
    lack: str | None
    """What the results lack, where the figure is a frame with words; None where it shows data."""


def draw_all(study: PublishedStudy, measured: MeasuredData) -> list[FigureOutcome]:
    """Return every figure of a study, in its order."""
    return [draw_one(study, figure, measured) for figure in study.figures]


def draw_one(study: PublishedStudy, figure: StudyFigure, measured: MeasuredData) -> FigureOutcome:
    """Draw one figure of a study, or a frame that says what it lacks."""
    selection = select(figure, measured.series)
    drawn = (
        selection
        if isinstance(selection, str)
        else _DRAW_BY_QUANTITY[figure.quantity](study, figure, selection, measured)
    )
    if isinstance(drawn, str):
        return FigureOutcome(figure, _frame_of_words(figure, drawn), lack=drawn)
    return FigureOutcome(figure, _under_study_heading(figure, drawn), lack=None)


def _distinct_curves(selection: Selection) -> list[CurveResult]:
    """Return the curves of the series, each once."""
    return list({id(series.curve): series.curve for series in selection.series}.values())


def _micro_batch_figure(
    study: PublishedStudy, figure: StudyFigure, selection: Selection, measured: MeasuredData
) -> Figure | str:
    """Return epoch times and speedups, a curve per micro-batch; then the parts of a step, where steps were explained.

    Where the results have one micro-batch only, return a sentence that says so.
    """
    if len({series.micro_batch for series in selection.series}) < 2:
        return f"These results hold strong scaling at one micro-batch only: {selection.series[0].micro_batch:,}."
    drawn = scaling_pair(figure, selection, study.published_points(selection.series))
    parts = breakdown_chart(measured.analysis, _distinct_curves(selection))
    if isinstance(drawn, str) or parts is None:
        return drawn
    measure = {"measure": ControlOption("parts", "parts of a step")}
    part_views = [replace(view, choices=measure | dict(view.choices)) for view in parts.views]
    return replace(drawn, views=(*drawn.views, *part_views))


def _utilisation_figure(selection: Selection, analysis: Analysis) -> Figure | str:
    """Return the utilisation of GPUs and processors, with the reasons where that of GPUs is unknown.

    Where nothing was recorded, return a sentence that says so.
    """
    resources = [resource for resource in RESOURCES if "utilisation" in resource.name]
    drawn = resource_chart(analysis, _distinct_curves(selection), resources)
    if drawn is None:
        return "No trial of these results has recorded how its processors were used."
    reasons = _reasons_without_gpu_utilisation(selection)
    if not reasons:
        return drawn
    unavailable = f"GPU utilisation is unavailable: {' and '.join(reasons)}"
    views = []
    for view in drawn.views:
        subtitle = f"{view.subtitle}; {unavailable}" if view.subtitle else unavailable
        views.append(replace(view, subtitle=subtitle))
    return replace(drawn, views=tuple(views))


def _reasons_without_gpu_utilisation(selection: Selection) -> list[str]:
    """Return the different reasons why trials have no GPU utilisation, sorted."""
    reasons = set()
    for series in selection.series:
        for member in series.members:
            used = member.trial.resources
            if used is not None and used.gpu_utilisation is None and used.gpu_reason:
                reasons.add(used.gpu_reason)
    return sorted(reasons)


def _run_waterfall_figure(selection: Selection, analysis: Analysis) -> Figure | str:
    """Return the waterfall from ideal to measured time of whole runs; or a sentence on why there is none."""
    waterfalls: list[Waterfall] = []
    for curve in _distinct_curves(selection):
        waterfalls += run_waterfalls(curve, analysis.trials)
    drawable = [waterfall for waterfall in waterfalls if waterfall.factors]
    if drawable:
        return waterfall_chart(drawable) or "No factor is known."
    reason = "; ".join(sorted({waterfall.reason for waterfall in waterfalls})) or "there is one GPU count only"
    lack = f"No run of these results can be taken apart: {reason}."
    if "was explained" in reason:
        lack += " Each explained step lies between several others: a run of few steps has none."
    return lack


def _under_study_heading(figure: StudyFigure, drawn: Figure) -> Figure:
    """Return a chart with the name and heading of the study's figure.

    The title of a sole view is the heading; the titles of several views follow it. The first view has the figure's
    name, the others that name and their own.
    """
    is_sole = len(drawn.views) == 1
    views = []
    for index, view in enumerate(drawn.views):
        name = figure.name if index == 0 else f"{figure.name}-{view.name}"
        title = figure.heading if is_sole else f"{figure.heading}: {view.title}"
        views.append(replace(view, name=name, title=title))
    return Figure(figure.name, figure.heading, tuple(views), drawn.series)


_Draw = Callable[[PublishedStudy, StudyFigure, Selection, MeasuredData], Figure | str]
_DRAW_BY_QUANTITY: Mapping[Quantity, _Draw] = {
    "epoch time": lambda study, figure, selection, _measured: scaling_pair(
        figure, selection, study.published_points(selection.series)
    ),
    "speedup": lambda study, figure, selection, _measured: relative_to_base_figure(
        figure, selection, study.published_points(selection.series)
    ),
    "efficiency": lambda study, figure, selection, _measured: relative_to_base_figure(
        figure, selection, study.published_points(selection.series)
    ),
    "doublings": lambda _study, figure, selection, measured: doublings_figure(figure, selection, measured.network),
    "utilisation": lambda _study, _figure, selection, measured: _utilisation_figure(selection, measured.analysis),
    "one host against several": lambda study, figure, selection, _measured: hosts_figure(
        figure, selection, study.published_points(selection.series)
    ),
    "accuracy of datasets": lambda _study, figure, selection, _measured: accuracy_of_datasets(figure, selection),
    "loss and accuracy": lambda _study, figure, selection, _measured: loss_and_accuracy(figure, selection),
    "accuracy by micro-batch": lambda _study, figure, selection, _measured: accuracy_by_micro_batch(figure, selection),
    "epoch time by micro-batch": _micro_batch_figure,
    "run waterfall": lambda _study, _figure, selection, measured: _run_waterfall_figure(selection, measured.analysis),
}


def _frame_of_words(figure: StudyFigure, lack: str) -> Figure:
    """Return a picture of words: what the figure would show, what is missing, and what would produce it."""
    commands = [step.removeprefix("# ") for step in steps_for(figure) if step.startswith("# ")]
    sentences = (f"Would show: {figure.draws}.", lack, "What would produce it:", *needs_of(figure), *commands)
    lines: list[str] = []
    for sentence in sentences:
        lines += textwrap.wrap(sentence, _LETTERS_PER_LINE, break_on_hyphens=False)
    plot = Plot({"rows": [{"text": line, "place": index} for index, line in enumerate(lines)]})
    y = quantity("place", axis=None, scale={"reverse": True, "domain": [-0.5, len(lines) - 0.5], "nice": False})
    mark = {"type": "text", "align": "left", "fontSize": 12}
    plot.add("rows", mark, x={"value": 0}, y=y, text={"field": "text", "type": "nominal"})
    view = FigureView(
        name="missing",
        choices={},
        title=figure.heading,
        subtitle="",
        spec=plot.spec(lack, _LINE_PIXELS * len(lines)),
        columns={"text": ""},
        summary=lack,
    )
    return _under_study_heading(figure, Figure(figure.name, figure.heading, (view,)))
