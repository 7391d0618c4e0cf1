"""The verb that shows results: report."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import vitscale
from vitscale.cli import base
from vitscale.cli.base import app, option
from vitscale.errors import RequestError, shown
from vitscale.present.document import Document
from vitscale.present.terminal import show
from vitscale.present.unread import beginning_with_unread

if TYPE_CHECKING:
    from vitscale.pages.forms import ReportFiles


@app.command()
def report(
    results: base.ResultsArgument,
    output: Annotated[
        Path | None, option("-o --output", "PATH", "File to write; for several formats or pictures, a folder.")
    ] = None,
    formats: Annotated[
        str | None,
        option(
            "--format",
            "LIST",
            "Comma-separated: html, md, latex, json, csv, parquet, png, svg, pdf, methods or trace (for Perfetto).  "
            "[default: html]",
        ),
    ] = None,
    combine_unlike: base.CombineOption = False,
    like: Annotated[
        str | None,
        option(
            "--like",
            "STUDY",
            "A published study's figures and claims instead, as one page: paper (arXiv 2602.21081) or thesis "
            "(Garrett, Pittsburgh 2023).",
        ),
    ] = None,
    charts: Annotated[list[str] | None, option("--chart", "NAME", "A chart of another package, beside ours.")] = None,
    like_paper: Annotated[bool, typer.Option("--like-paper", hidden=True)] = False,
    verbose: base.VerboseOption = False,
    json: base.JsonOption = False,
) -> None:
    """Tables, figures and one self-contained HTML page."""
    base.compute_on_one_core()
    from vitscale.pages import forms
    from vitscale.present import drawing

    study = "paper" if like_paper else like
    named_files = forms.report_files(_requested_formats(formats, output, json=json), output)
    if "html" in named_files.formats and study is None:
        drawing.start_drawing_process()
    files = _to_standard_output(named_files) if str(output) == "-" else named_files
    if study is not None:
        _show_like(results, study, files, combine_unlike=combine_unlike, verbose=verbose)
    else:
        _show_report(results, files, charts or (), combine_unlike=combine_unlike, verbose=verbose)


def _requested_formats(formats: str | None, output: Path | None, *, json: bool) -> list[str]:
    """Return the formats that --format or --json names; empty where neither does.

    Raises:
        RequestError: --json is given beside --format, or beside an output whose name ends in another format.
    """
    if not json:
        return [] if formats is None else formats.split(",")
    from vitscale.pages import forms

    if formats is not None:
        raise RequestError("--json and --format are both given", next_step="Use --format, with json among it")
    if forms.means_another_form(output, "json"):
        message = f"--json and -o {shown(str(output))} are of two formats"
        raise RequestError(message, next_step="Write --format html,json -o FOLDER, or -o FILE.json")
    return ["json"]


def _to_standard_output(files: ReportFiles) -> ReportFiles:
    """Return the same forms without a file, for `-o -`.

    Raises:
        RequestError: they cannot go to standard output.
    """
    from vitscale.pages.forms import TO_STANDARD_OUTPUT

    if len(files.formats) > 1 or files.formats[0] not in TO_STANDARD_OUTPUT:
        message = f"-o - is standard output, and {', '.join(files.formats)} cannot go there"
        raise RequestError(message, valid=[f"--format {name}" for name in TO_STANDARD_OUTPUT])
    return files._replace(output=None)


def _show_like(results: Path, study: str, files: ReportFiles, *, combine_unlike: bool, verbose: bool) -> None:
    """Write a published study's figures from these results, and show its claims as tested on them."""
    like = vitscale.report_like(
        results,
        study,
        formats=files.formats,
        output=files.output,
        combine_unlike=combine_unlike,
        to_standard_output=True,
    )
    is_json_on_standard_output = "json" in files.formats and files.output is None
    show(base.ProgramConsole(stderr=is_json_on_standard_output), like.document, verbose)


def _show_report(
    results: Path, files: ReportFiles, charts: Sequence[str], *, combine_unlike: bool, verbose: bool
) -> None:
    """Write the report's files and print their paths.

    Where a page is all that is written, its tables are shown too, and even if the page cannot be written.
    """
    from vitscale.base.files import is_stream
    from vitscale.pages import forms

    forms.check_formats(files.formats)
    result = vitscale.report(results, combine_unlike=combine_unlike, charts=charts)
    gc.freeze()  # nothing of it is dropped before the process ends
    is_text_on_standard_output = files.output is None and not set(files.formats).isdisjoint(forms.TO_STANDARD_OUTPUT)
    is_into_stream = files.output is not None and is_stream(files.output)
    console = base.ProgramConsole(stderr=is_text_on_standard_output or is_into_stream)
    is_page_alone = files.formats == ("html",) and files.output is None
    try:
        written = result.write(files.formats, files.output, to_standard_output=True)
    except RequestError:
        if is_page_alone:
            show(console, result.document(), verbose)
        raise
    if is_page_alone:
        show(console, replace(result, written=tuple(written)).document(), verbose)
        return
    if result.unread:
        show(console, beginning_with_unread(Document("", ()), result.unread), verbose)
    for path in written:
        console.print(str(path), markup=False, highlight=False, soft_wrap=True)
