"""The verb that shows results: report."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitscale.cli import base
from vitscale.cli.base import app, option
from vitscale.errors import RequestError, shown, unknown
from vitscale.present.document import Document
from vitscale.present.terminal import show

if TYPE_CHECKING:
    from vitscale.advice.pipeline import Advice
    from vitscale.analysis import Analysis
    from vitscale.prediction.fitting import Fitted


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
    from vitscale.present import drawing

    if json and formats is not None:
        raise RequestError("--json and --format are both given", next_step="Use --format, with json among it")
    suffix = "" if output is None or output.is_dir() else output.suffix.lower()
    if json and suffix and _SUFFIXES.get(suffix, "json") != "json":
        what = f"--json and -o {shown(str(output))} are of two formats"
        raise RequestError(what, next_step="Write --format html,json -o FOLDER, or -o FILE.json")
    if output is not None and _is_record(output):
        what = f"-o {shown(str(output))} is a file that results are read from"
        raise RequestError(what, next_step="Name another file with -o, and it stays as it is")
    to_standard_output = output is not None and str(output) == "-"
    listed = "json" if json else formats or _format_of(output)
    wanted = list(dict.fromkeys(part.strip().lower() for part in listed.split(",")))
    if suffix in _SUFFIXES and suffix and (len(wanted) > 1 or wanted[0] in (*drawing.FIGURE_FORMATS, "trace")):
        what = f"-o {shown(str(output))} names one file, and --format {','.join(wanted)} makes several"
        raise RequestError(what, next_step="Name a folder with -o")
    if "html" in wanted and not (like or like_paper):
        drawing.draw_beside()
    from vitscale import analysis, store
    from vitscale.pages import outputs
    from vitscale.pages.answers import terminal_document
    from vitscale.prediction import answering, fitting
    from vitscale.prediction.evidence import evidence_of
    from vitscale.store.reading import without_collection
    from vitscale.store.unread import beginning_with_unread

    if to_standard_output:
        if len(wanted) > 1 or wanted[0] not in outputs.TO_STANDARD_OUTPUT:
            what = f"-o - is standard output, and {', '.join(wanted)} cannot go there"
            raise RequestError(what, valid=[f"--format {name}" for name in outputs.TO_STANDARD_OUTPUT])
        output = None
    like = "paper" if like_paper else like
    if like is not None:
        told = _like(results, like, wanted, output, combine_unlike=combine_unlike)
        show(base.ProgramConsole(stderr="json" in wanted and output is None), told, verbose)
        return
    for name in wanted:
        if name not in outputs.FORMATS:
            raise unknown("format", name, outputs.FORMATS)
    with without_collection():  # or it would begin in between
        analysed = analysis.analyse_folder(results, combine_unlike=combine_unlike)
        gc.freeze()
    on_standard_output = {*outputs.TO_STANDARD_OUTPUT} & {*wanted} if output is None else store.is_stream(output)
    console = base.ProgramConsole(stderr=bool(on_standard_output))
    evidence = evidence_of(results, analysed)
    fitted = fitting.fit(evidence)
    ahead = answering.forecast(fitted) if set(wanted) - {*outputs.WITHOUT_PREDICTIONS} else None
    # Data formats have no advice, which takes as long as all predictions.
    advice = _advice(fitted, analysed) if set(wanted) - {*outputs.OF_DATA} else None
    reported = outputs.Reported(analysed, ahead, advice, results)
    reported = outputs.Reported(analysed, ahead, advice, results, outputs.brought(charts or (), reported))
    with_tables = wanted == ["html"] and output is None
    try:
        files = outputs.write(reported, _folder(results), wanted, output)
    except RequestError:
        if with_tables:  # they need no file
            show(console, terminal_document(analysed), verbose)
        raise
    if with_tables:
        show(console, terminal_document(analysed, [f"Report: {files[0]}"]), verbose)
        return
    if analysed.unread:
        show(console, beginning_with_unread(Document("", ()), analysed.unread), verbose)
    for path in files:
        console.print(str(path), markup=False, highlight=False, soft_wrap=True)


def _is_record(file: Path) -> bool:
    """Whether a report in place of this file would destroy a results folder."""
    file = file.resolve()
    own = {"study.json", "lock", "runs", "packs", "checks", "jobs"}
    return file.is_file() and any(
        (folder / "study.json").is_file() and file.relative_to(folder).parts[0] in own for folder in file.parents[:3]
    )


_SUFFIXES = {"": "html", ".html": "html", ".htm": "html", ".md": "md", ".tex": "latex"} | {
    f".{name}": name for name in ("json", "csv", "parquet", "png", "svg", "pdf")
}


def _format_of(output: Path | None) -> str:
    """The format that a file's name tells; html where nothing is named.

    Raises:
        RequestError: the name ends otherwise.
    """
    suffix = "" if output is None or output.is_dir() else output.suffix.lower()
    if suffix not in _SUFFIXES and not suffix[1:].isalpha():
        return "html"  # "report-2024.05" has no suffix
    if suffix not in _SUFFIXES:
        raise RequestError(f"-o ends in {shown(suffix)}", valid=filter(None, _SUFFIXES), next_step="Or name a --format")
    return _SUFFIXES[suffix]


def _folder(results: Path) -> Path:
    """Folder for files without -o: the results folder; for a bundle, a folder with its name beside it.

    That gets another name where it holds results of its own, or is the bundle.
    """
    if not results.is_file():
        return results
    name = results.name.removesuffix(".tgz").removesuffix(".tar.gz")
    taken = name == results.name or (results.with_name(name) / "study.json").exists()
    return results.with_name(f"{name}-report" if taken else name)


def _like(results: Path, name: str, formats: list[str], output: Path | None, *, combine_unlike: bool) -> Document:
    """Writes a published study's figures and claims, made from these results; returns what to show."""
    from vitscale import analysis
    from vitscale.pages import like
    from vitscale.prediction.evidence import evidence_of

    study = like.study_named(name)
    for wanted in formats:
        if wanted not in like.FORMATS:
            raise unknown("format of --like", wanted, like.FORMATS)
    analysed = analysis.analyse_folder(results, combine_unlike=combine_unlike)
    material = like.Material.of(analysed, evidence_of(results, analysed).network)
    written = like.write(study, material, _folder(results), formats, output)
    return like.terminal_document(study, material, written)


def _advice(fitted: Fitted, analysed: Analysis) -> Advice | None:
    """Advice without any limits; None where these results allow none."""
    from vitscale.advice.pipeline import advised_from
    from vitscale.advice.request import Request

    try:
        return advised_from(fitted, analysed, Request())
    except RequestError:
        return None
