"""The verb that shows results: report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitscale.cli.base import JsonOption, ProgramConsole, ResultsArgument, VerboseOption, app, compute_on_one_core
from vitscale.errors import RequestError, unknown

if TYPE_CHECKING:
    from vitscale.advice.pipeline import Advice
    from vitscale.analysis import Analysis
    from vitscale.prediction.evidence import Evidence


@app.command()
def report(
    results: ResultsArgument,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="PATH", help="File to write; for several formats or pictures, a folder."
        ),
    ] = None,
    formats: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="LIST",
            help="Comma-separated: html, md, latex, json, csv, parquet, png, svg, pdf or trace (for Perfetto).  "
            "[default: html]",
        ),
    ] = None,
    combine_unlike: Annotated[
        bool, typer.Option("--combine-unlike", help="Compare runs of unlike hardware or library versions all the same.")
    ] = False,
    like: Annotated[
        str | None,
        typer.Option(
            "--like",
            metavar="STUDY",
            help="A published study's figures and claims instead, as one page: paper (arXiv 2602.21081) or thesis "
            "(Garrett, Pittsburgh 2023).",
        ),
    ] = None,
    charts: Annotated[
        list[str] | None, typer.Option("--chart", metavar="NAME", help="A chart of another package, beside ours.")
    ] = None,
    like_paper: Annotated[bool, typer.Option("--like-paper", hidden=True)] = False,
    verbose: VerboseOption = False,
    json: JsonOption = False,
) -> None:
    """Tables, figures and one self-contained HTML page."""
    compute_on_one_core()
    from vitscale import analysis, report, store
    from vitscale.prediction import answering, sources
    from vitscale.present.terminal import show
    from vitscale.report import like as published

    if json and formats is not None:
        raise RequestError("--json and --format are both given", next_step="Use --format, with json among it")
    listed = "json" if json else formats or "html"
    wanted = list(dict.fromkeys(part.strip().lower() for part in listed.split(",")))
    like = "paper" if like_paper else like
    study = published.study_named(like) if like is not None else None
    valid = published.FORMATS if study else report.FORMATS
    for name in wanted:
        if name not in valid:
            raise unknown("format of --like" if study else "format", name, valid)
    loaded = store.load(results)
    found = analysis.analyse(loaded, combine_unlike=combine_unlike)
    console = ProgramConsole(stderr=bool({"md", "json", "latex"} & set(wanted)) and output is None)
    if study is not None:
        material = published.Material.of(found, sources.evidence_of(results, loaded, found).network)
        written = published.write(study, material, results, wanted, output)
        for line in (*published.findings(study, material), *map(str, written)):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        return
    evidence = sources.evidence_of(results, loaded, found)
    ahead = answering.outlook(evidence)
    brought = report.brought(charts or (), found)
    reported = report.Reported(found, ahead, _advice(evidence, found), results, brought)
    files = report.write(reported, results, wanted, output)
    if wanted == ["html"] and output is None:
        show(console, report.terminal_document(found, [f"Report: {files[0]}"]), verbose)
        return
    for path in files:
        console.print(str(path), markup=False, highlight=False, soft_wrap=True)


def _advice(evidence: Evidence, found: Analysis) -> Advice | None:
    """What to do without any limit; None where these results allow no advice."""
    from vitscale.advice.pipeline import advised_from
    from vitscale.advice.request import Request

    try:
        return advised_from(evidence, found, Request())
    except RequestError:
        return None
