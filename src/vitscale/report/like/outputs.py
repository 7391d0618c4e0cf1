"""Where a study's figures, tables and tested claims go: one self-contained page, pictures, JSON, the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitscale.errors import RequestError, shown, unknown
from vitscale.present.document import Block, Bullets, Code, Document, Paragraph, Section
from vitscale.present.drawing import FIGURE_FORMATS, draw
from vitscale.present.html import to_html
from vitscale.store import write_whole

if TYPE_CHECKING:
    from vitscale.present.document import Table
    from vitscale.report.like.figures import Drawn
    from vitscale.report.like.study import Material, PublishedStudy, Tested

FORMATS = ("html", "json", *FIGURE_FORMATS)
NAMES = ("paper", "thesis")
SCHEMA = 2


def study_named(name: str) -> PublishedStudy:
    """One of `NAMES`.

    Raises:
        RequestError: it is none of them.
    """
    from vitscale.report.like.paper import PAPER
    from vitscale.report.like.thesis import THESIS

    for study in (PAPER, THESIS):
        if study.name == name:
            return study
    raise unknown("study of --like", name, NAMES)


def write(
    study: PublishedStudy, material: Material, results: Path, formats: Sequence[str], output: Path | None
) -> list[Path]:
    """Writes all figures, tables and claims in each of `formats`.

    Args:
        study: whose figures.
        material: what to draw them from.
        results: the results folder, where files go without `output`: like-paper/, for the study "paper".
        formats: some of html, json, png, svg, pdf.
        output: the folder; or, for one of html and json alone, a file with that ending. Without it, JSON alone goes to
            standard output.

    Returns:
        The files written: like-paper.html, like-paper.json, figure-04-... and so on.

    Raises:
        RequestError: a format is none of these, or a file cannot be written.
    """
    for wanted in formats:
        if wanted not in FORMATS:
            raise unknown("format of --like", wanted, FORMATS)
    try:
        if output is None and list(formats) == ["json"]:
            sys.stdout.write(_texts(study, material, ["json"])[0]["json"])
            return []
        return _write(study, material, output or results / f"like-{study.name}", formats)
    except BrokenPipeError:
        raise  # nobody reads on: no error
    except OSError as error:
        raise RequestError(
            f"the figures cannot be written to {shown(str(error.filename or output or results))}: "
            f"{error.strerror or error}",
            next_step="Name another folder with -o",
        ) from error


def findings(study: PublishedStudy, material: Material) -> list[str]:
    """What the study's claims come to on these results, a sentence each."""
    return [sentence for claim in study.claims for sentence in claim.test(material).sentences]


def _write(study: PublishedStudy, material: Material, place: Path, formats: Sequence[str]) -> list[Path]:
    texts, drawn = _texts(study, material, formats)
    one_file = len(formats) == 1 and formats[0] in texts and place.suffix == f".{formats[0]}" and not place.is_dir()
    (place.parent if one_file else place).mkdir(parents=True, exist_ok=True)
    written = []
    for kind, text in texts.items():
        path = place if one_file else place / f"like-{study.name}.{kind}"
        write_whole(path, text)
        written.append(path)
    pictures = [kind for kind in formats if kind in FIGURE_FORMATS]
    return [
        *written,
        *(draw([view for one in drawn for view in one.figure.views], place, pictures) if pictures else []),
    ]


def _texts(study: PublishedStudy, material: Material, formats: Sequence[str]) -> tuple[dict[str, str], list[Drawn]]:
    from vitscale.report.like.figures import draw_all

    drawn, tested = draw_all(study, material), [claim.test(material) for claim in study.claims]
    tables = study.tables(material)
    makers = {
        "html": lambda: _to_html(study, material, drawn, tested, tables),
        "json": lambda: _to_json(study, drawn, tested, tables),
    }
    return {kind: makers[kind]() for kind in formats if kind in makers}, drawn


def _to_html(
    study: PublishedStudy,
    material: Material,
    drawn: Sequence[Drawn],
    tested: Sequence[Tested],
    tables: Sequence[Table],
) -> str:
    shown = [one for one in drawn if one.lack is None]
    missing = [one for one in drawn if one.lack is not None]
    claims: list[Block] = []
    for claim, found in zip(study.claims, tested, strict=True):
        told = Bullets(found.sentences or (claim.untested,))
        claims.append(Section(claim.question, (Paragraph(claim.meaning, "quiet"), told)))
    blocks: list[Block] = [Section(f"The study's {study.claims_text}, tested on these results", tuple(claims))]
    blocks += [Section("Tables", tuple(tables))] if tables else []
    blocks += [Section(one.paper.heading, _on_the_page(one)) for one in shown]
    blocks += [
        Section(
            f"{one.paper.heading}: no data",
            (Paragraph(f"Would show: {one.paper.draws}. {one.lack.reason}"), Code(one.lack.steps)),
            folded=True,
        )
        for one in missing
        if one.lack is not None
    ]
    if problems := material.analysis.problems:
        blocks.append(Section("Unused records", (Bullets(problems),)))
    blocks.append(Section("Source", (Paragraph(study.reading),)))
    subtitle = f"{len(shown)} of {len(drawn)} figures drawn"
    subtitle += f"; {len(missing)} say what data they lack" if missing else ""
    document = Document(material.analysis.study.name, tuple(blocks))
    return to_html(document, brand=f"vitscale: like {study.short}", subtitle=subtitle)


def _on_the_page(one: Drawn) -> tuple[Block, ...]:
    """A figure below its heading, which its views do not say again; what it draws in words, where these have none."""
    views = [replace(view, title=view.title.removeprefix(one.paper.heading).lstrip(": ")) for view in one.figure.views]
    draws = one.paper.draws[:1].upper() + one.paper.draws[1:]
    if len(views) == 1:
        return (replace(one.figure, views=(replace(views[0], title=draws),)),)
    return Paragraph(f"{draws}.", "quiet"), replace(one.figure, views=tuple(views))


def _to_json(study: PublishedStudy, drawn: Sequence[Drawn], tested: Sequence[Tested], tables: Sequence[Table]) -> str:
    """One object: `schema`, `source`, `claims`, `figures`, where there are any `tables`. Unknown values are null."""
    from vitscale.present.data import finite

    content: dict[str, Any] = {
        "schema": SCHEMA,
        "source": study.source,
        "claims": {key: list(entries) for found in tested for key, entries in found.entries.items()},
        "figures": [
            {
                "number": one.paper.number,
                "title": one.paper.title,
                "draws": one.paper.draws,
                "drawn": one.lack is None,
                "missing": one.lack.reason if one.lack is not None else None,
                "steps": list(one.lack.steps) if one.lack is not None else [],
                "text": [
                    line for view in one.figure.views for line in (*view.text, view.subtitle, view.summary) if line
                ],
            }
            for one in drawn
        ],
    }
    if tables:
        content["tables"] = [
            {
                "title": table.title,
                "columns": [column.heading for column in table.columns],
                "rows": [
                    {"group": group.label, "cells": list(map(str, row))} for group in table.groups for row in group.rows
                ],
                "notes": list(table.notes),
            }
            for table in tables
        ]
    return json.dumps(finite(content), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
