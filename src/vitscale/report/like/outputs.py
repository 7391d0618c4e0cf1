"""Where a study's figures, tables and tested claims go: one self-contained page, pictures, JSON, the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitscale.errors import RequestError, explain, shown, unknown
from vitscale.report.drawing import FIGURE_FORMATS, draw
from vitscale.store import write_whole

if TYPE_CHECKING:
    from vitscale.report.grouped_table import GroupedTable
    from vitscale.report.like.figures import Drawn
    from vitscale.report.like.study import Material, PublishedStudy, Tested

FORMATS = ("html", "json", *FIGURE_FORMATS)
NAMES = ("paper", "thesis")
SCHEMA = 1


def study_named(name: str) -> PublishedStudy:
    """One of `NAMES`.

    Raises:
        RequestError: it is none of them.
    """
    from vitscale.report.like.paper import PAPER  # altair takes half a second to import
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
            explain(
                f"the figures cannot be written to {shown(str(error.filename or output or results))}: "
                f"{error.strerror or error}",
                next_step="Name another folder with -o",
            )
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
    return [*written, *(draw([one.figure for one in drawn], place, pictures) if pictures else [])]


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
    tables: Sequence[GroupedTable],
) -> str:
    from vitscale.report.page import rendered

    missing = sum(one.lack is not None for one in drawn)
    return rendered(
        "like.html",
        [one.figure for one in drawn],
        study=material.analysis.study,
        like=study,
        counts=f"{len(drawn) - missing} of {len(drawn)} figures drawn"
        + (f"; {missing} say what data they lack" if missing else ""),
        shown=drawn,
        claims=[
            {"claim": claim, "sentences": found.sentences or (claim.untested,)}
            for claim, found in zip(study.claims, tested, strict=True)
        ],
        tables=tables,
        problems=material.analysis.problems,
    )


def _to_json(
    study: PublishedStudy, drawn: Sequence[Drawn], tested: Sequence[Tested], tables: Sequence[GroupedTable]
) -> str:
    """One object: `schema`, `source`, `claims`, `figures`, where there are any `tables`. Unknown values are null."""
    from vitscale.report.words import finite

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
                "text": list(one.figure.text),
            }
            for one in drawn
        ],
    }
    if tables:
        content["tables"] = [
            {
                "title": table.title,
                "columns": list(table.columns),
                "rows": [
                    {"group": group.name, "trial": line.trial_id, "cells": list(map(str, line.cells))}
                    for group in table.groups
                    for line in group.lines
                ],
                "notes": list(table.notes),
            }
            for table in tables
        ]
    return json.dumps(finite(content), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
