"""The verbs to share and look on: export, which makes results a file to send; watch, a view of a study that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import vitscale
from vitscale.cli.base import JsonOption, ProgramConsole, ResultsArgument, VerboseOption, app, option, show_result
from vitscale.errors import RequestError
from vitscale.present.document import Document, Paragraph
from vitscale.present.terminal import lines, redraws, show
from vitscale.present.units import counted
from vitscale.present.unread import beginning_with_unread


@app.command()
def export(
    results: ResultsArgument,
    output: Annotated[
        Path | None,
        option("-o --output", "PATH", "The bundle, or the folder of --to.  [default: bundle.tar.gz or runs]"),
    ] = None,
    redact: Annotated[
        bool, option("--redact", "", "Without names of hosts and users, paths, addresses and values of variables.")
    ] = False,
    to: Annotated[
        str | None, option("--to", "TRACKER", "Send every run to it instead: tensorboard, mlflow or wandb.")
    ] = None,
    verbose: VerboseOption = False,
    json: JsonOption = False,
) -> None:
    """A results folder as one checksummed file for a paper or an issue; every verb reads it."""
    if to is None:
        result = vitscale.export(results, output or Path("bundle.tar.gz"), redact=redact)
        show_result(result, json=json, verbose=verbose)
        return
    if redact or json:
        option_given = "--redact" if redact else "--json"
        raise RequestError(f"{option_given} is of a bundle, and --to makes none", next_step="Leave one of them out")
    folder = output or Path("runs")
    sent = vitscale.send(results, to, folder)
    there = f"; {counted(sent.present_before, 'run')} there already" if sent.present_before else ""
    where = f" in {folder}" if to == "tensorboard" else ""
    document = Document("", (Paragraph(f"{counted(sent.sent, 'run')} sent to {to}{where}{there}"),))
    show(ProgramConsole(), beginning_with_unread(document, sent.unread))


_LOOK_SECONDS = 2.0
_MOST_OF_THE_TIME = 20.0
"""Times the duration of a look that `watch` rests after it, for looking at a large folder on a slow disk costs."""


@app.command()
def watch(
    results: ResultsArgument,
    once: Annotated[bool, option("--once", "", "Print one view and end.")] = False,
    json: JsonOption = False,
) -> None:
    """What runs now, how fast, what is left and what came last: from any terminal that sees the folder."""
    import time

    from rich.console import Group
    from rich.live import Live

    began = time.monotonic()
    looked = vitscale.watch(results)
    look_seconds = time.monotonic() - began
    console = ProgramConsole()
    if once or json or not redraws(console):
        show_result(looked, json=json, verbose=True)
        return
    try:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(Group(*lines(looked.document(), console.width, verbose=True)), refresh=True)
                if looked.is_done:
                    return
                time.sleep(max(_LOOK_SECONDS, _MOST_OF_THE_TIME * look_seconds))
                began = time.monotonic()
                looked = vitscale.watch(results)
                look_seconds = time.monotonic() - began
    except KeyboardInterrupt:
        return  # to stop looking is no interruption of anything
