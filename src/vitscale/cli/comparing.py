"""The verb that compares results, and runs studies in turn to compare them: compare."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from vitscale.cli import base
from vitscale.cli.base import app, option
from vitscale.errors import RequestError, shown

if TYPE_CHECKING:
    from vitscale.present.document import Document


@app.command()
def compare(
    compared: Annotated[
        list[Path],
        typer.Argument(
            metavar="A B [C...]", help="Results folders, of which the first is compared with; with --run, study files."
        ),
    ],
    run: Annotated[
        bool, option("--run", "", "Run the studies A and B in turn, round by round, and compare them; resumes.")
    ] = False,
    repeats: Annotated[
        int | None, option("--repeats", "N", "Rounds of --run.  [default: measure.repeats of the first study]")
    ] = None,
    fail_if_slower: Annotated[
        str | None, option("--fail-if-slower", "SHARE", "Exit with 1 where a trial is slower by more: 5%.")
    ] = None,
    strict: Annotated[
        bool, option("--strict", "", "Exit with 1 also where that is undecided, or a trial has no counterpart.")
    ] = False,
    output: Annotated[
        Path | None,
        option(
            "-o --output",
            "FILE",
            "A page (.html) or Markdown (.md) instead; with --run, the results.  [default: results/compared]",
        ),
    ] = None,
    combine_unlike: base.CombineOption = False,
    verbose: base.VerboseOption = False,
    json: base.JsonOption = False,
) -> None:
    """Results side by side: what differs, and which trials got slower or faster for certain."""
    if len(compared) < 2:
        what = "study" if run else "folder"
        raise RequestError(f"compare needs two or more, and one {what} is given", next_step="Give two")
    if strict and fail_if_slower is None:
        raise RequestError("--strict is of --fail-if-slower, which is not given", next_step="Add --fail-if-slower 5%")
    limit = base.share_of(fail_if_slower, "--fail-if-slower") if fail_if_slower is not None else None
    if repeats is not None and not run:
        raise RequestError("--repeats is of --run, which is not given", next_step="Add --run, and give study files")
    compare_folders = partial(
        _compare, limit=limit, strict=strict, combine_unlike=combine_unlike, verbose=verbose, json=json
    )
    if not run:
        _refuse_studies(compared)
        compare_folders(compared, page=output)
        return
    in_turn = _run_in_turn(compared, repeats, folder=output, json=json)
    compare_folders(in_turn.folders, page=None)
    if in_turn.has_failures:
        raise typer.Exit(1)


def _refuse_studies(compared: Sequence[Path]) -> None:
    """Raises a RequestError where a path is a study file: that is meant for --run."""
    for path in compared:
        is_study = path.suffix == ".toml" and path.is_file()
        if is_study:
            raise RequestError(
                f"{shown(str(path))} is a study file, and compare reads results",
                next_step="Add --run to run the studies in turn; or give results folders",
            )


def _compare(
    results: Sequence[Path],
    *,
    page: Path | None,
    limit: float | None,
    strict: bool,
    combine_unlike: bool,
    verbose: bool,
    json: bool,
) -> None:
    """Compares results folders, the first with each other one, and shows what comes out.

    Args:
        results: two folders or more.
        page: a file to write instead of showing the answer on the terminal.
        limit: the share by which a trial may be slower; None: none is checked.
        strict: whether the limit also counts as broken where that is undecided, or a trial has no counterpart.
        combine_unlike: as for `analysis.analyse_folder`.
        verbose: whether to show folded parts.
        json: whether to print data.

    Raises:
        typer.Exit: with 1, where the limit is broken.
        RequestError: the page has an unknown suffix or cannot be written, or no trial has a counterpart.
    """
    base.compute_on_one_core()
    from vitscale import analysis
    from vitscale.analysis.counterparts import side_by_side
    from vitscale.pages.side_by_side import Compared, compared_document, compared_fields
    from vitscale.store.unread import beginning_with_unread

    if page is not None and page.suffix not in _PAGE_SUFFIXES:
        raise RequestError(f"-o names {shown(page.name)}", valid=["FILE.html", "FILE.md"])
    names = _short_names(results)
    analysed = [analysis.analyse_folder(path, combine_unlike=combine_unlike) for path in results]
    named_results = list(zip(names, analysed, strict=True))
    pairs = side_by_side(named_results)
    if not pairs:
        raise RequestError(
            f"no trial of {shown(names[0])} has a counterpart in the others",
            next_step="Compare results of one study, or of studies that sweep the same fields on as many ranks",
        )
    answer = Compared.of(named_results, pairs, limit)
    document = compared_document(answer)
    if page is not None:
        _write_page(page, beginning_with_unread(document, answer.unread), json=json)
    if json or page is None:
        base.answer(
            "compare",
            partial(compared_fields, answer),
            lambda: document,
            unread=answer.unread,
            json=json,
            verbose=verbose,
        )
    if answer.is_failed or (strict and answer.is_undecided):
        raise typer.Exit(1)


_PAGE_SUFFIXES = (".html", ".md")


def _short_names(paths: Sequence[Path]) -> list[str]:
    """The name of each folder; its path where another has that name."""
    names = [path.name for path in paths]
    return [path.name if names.count(path.name) == 1 else str(path) for path in paths]


def _write_page(page: Path, document: Document, *, json: bool) -> None:
    """Writes an HTML or a Markdown page, and prints its path; with `json` not on stdout, where the data go."""
    from vitscale import store
    from vitscale.present.html import to_html
    from vitscale.present.markdown import to_markdown

    text = to_html(document) if page.suffix == ".html" else to_markdown(document)
    try:
        store.write_whole(page, text, make_folder=True)
    except OSError as error:
        raise RequestError(f"{shown(str(page))} cannot be written: {error.strerror or error}") from None
    base.ProgramConsole(stderr=json).print(str(page), markup=False, highlight=False, soft_wrap=True)


# --- --run ----------------------------------------------------------------------------------------------------------

_DEFAULT_FOLDER = Path("results") / "compared"


class _RunsInTurn(NamedTuple):
    """What came of running studies in turn."""

    folders: list[Path]
    """The results folder of each study."""
    has_failures: bool
    """Whether a run did not complete."""


def _run_in_turn(studies: Sequence[Path], repeats: int | None, folder: Path | None, *, json: bool) -> _RunsInTurn:
    """Runs studies in turn, each into a folder of its own in `folder`, and prints notes and progress."""
    from vitscale.preflight import pace_warnings
    from vitscale.present.units import counted
    from vitscale.runner import alternating
    from vitscale.runner.preview import finding_lines

    console = base.ProgramConsole(stderr=json)
    sides = alternating.sides_of(studies, folder or _DEFAULT_FOLDER, repeats)
    for side in sides:
        notes = [*side.plan.expansion.notes, *pace_warnings(side.plan, side.results)]
        note_lines = [f"note: {side.name}: {note}" for note in notes]
        for line in (*note_lines, *finding_lines(side.plan)):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    reports = alternating.run_in_turn(sides, console)
    failures = sum(len(report.failures) for report in reports)
    if failures:
        verb = "is" if failures == 1 else "are"
        failed = f"{counted(failures, 'run')} did not complete, and {verb} not compared"
        console.print(f"{failed}: vitscale report says why", markup=False)
    return _RunsInTurn([side.results for side in sides], has_failures=failures > 0)
