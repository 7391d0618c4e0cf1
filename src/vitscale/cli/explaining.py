"""The verb that explains a command: explain."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, TextIO

import typer

import vitscale
from vitscale.cli import base
from vitscale.cli.base import app, option

_INTERRUPTED = 130


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def explain(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- COMMAND...", help="The command as you start it, in this folder.", show_default=False
        ),
    ] = None,
    output: Annotated[
        Path | None, option("-o --output", "FOLDER", "Results folder.  [default: ./vitscale-explain-1, ...]")
    ] = None,
    steps: Annotated[int, option("--steps", "N", "Steps of each rank that are enough.")] = 30,
    seconds: Annotated[
        float, option("--seconds", "SECONDS", "Time after the first step that is enough: 60, 2m.", base.seconds)
    ] = 60.0,
    start_seconds: Annotated[
        float, option("--start-seconds", "SECONDS", "Time that it has until its first step: 600, 1h.", base.seconds)
    ] = 600.0,
    keep: Annotated[bool, option("--keep", "", "Leave the command running once enough is known.")] = False,
    verbose: base.VerboseOption = False,
    json: base.JsonOption = False,
) -> None:
    """Why is my training slow? Runs its command as it is, and says where a step's time goes. No edit is needed."""
    stderr = _descriptor(sys.stderr)
    result = vitscale.explain(
        command or (),
        output=output,
        steps=steps,
        seconds=seconds,
        keep=keep,
        start_seconds=start_seconds,
        stdout=stderr if json else _descriptor(sys.stdout),
        stderr=stderr,
        console=base.ProgramConsole(stderr=True),
    )
    base.show_result(result, json=json, verbose=verbose)
    if result.was_interrupted:
        raise typer.Exit(_INTERRUPTED)
    if result.runs_on:
        sys.stdout.flush()
        raise typer.Exit(result.wait())


def _descriptor(stream: TextIO) -> int | None:
    """Return a stream's file descriptor; None where it has none, as in a program that collects what is printed."""
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None
