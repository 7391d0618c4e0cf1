"""The verb that compares results, and runs studies in turn to compare them: compare."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import vitscale
from vitscale.cli import base
from vitscale.cli.base import app, option
from vitscale.errors import RequestError


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
    limit = base.share_of(fail_if_slower, "--fail-if-slower") if fail_if_slower is not None else None
    if repeats is not None and not run:
        raise RequestError("--repeats is of --run, which is not given", next_step="Add --run, and give study files")
    if run:
        console = base.ProgramConsole(stderr=json)
        result = vitscale.compare_studies(
            *compared,
            repeats=repeats,
            fail_if_slower=limit,
            strict=strict,
            combine_unlike=combine_unlike,
            output=output,
            console=console,
        )
    else:
        base.compute_on_one_core()
        result = vitscale.compare(
            *compared, fail_if_slower=limit, strict=strict, combine_unlike=combine_unlike, output=output
        )
    if result.written is not None:
        base.ProgramConsole(stderr=json).print(str(result.written), markup=False, highlight=False, soft_wrap=True)
    if json or result.written is None:
        base.show_result(result, json=json, verbose=verbose)
    if result.fails:
        raise typer.Exit(1)
