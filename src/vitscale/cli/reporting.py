"""The verb that shows results: report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitscale.cli.base import JsonOption, ProgramConsole, ResultsArgument, app
from vitscale.errors import RequestError, explain, unknown


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
            "--format", metavar="LIST", help="Comma-separated: html, png, svg, pdf, csv, md, json.  [default: html]"
        ),
    ] = None,
    combine_unlike: Annotated[
        bool, typer.Option("--combine-unlike", help="Compare runs of unlike hardware or library versions all the same.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Tables, figures and one self-contained HTML page."""
    from vitscale import analysis, report, store

    if json and formats is not None:
        raise RequestError(explain("--json and --format are both given", next_step="Use --format, with json among it"))
    listed = "json" if json else formats or "html"
    wanted = list(dict.fromkeys(part.strip().lower() for part in listed.split(",")))
    for name in wanted:
        if name not in report.FORMATS:
            raise unknown("format", name, report.FORMATS)
    found = analysis.analyse(store.load(results), combine_unlike=combine_unlike)
    console = ProgramConsole(stderr=bool({"md", "json"} & set(wanted)) and output is None)
    if wanted == ["html"] and output is None:
        console.print(report.terminal_table(found))
    for path in report.write(found, results, wanted, output):
        console.print(str(path), markup=False, highlight=False, soft_wrap=True)
