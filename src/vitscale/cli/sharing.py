"""The verbs to share and look on: export, which makes results a file to send; watch, a view of a study that runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import vitscale
from vitscale.cli.base import JsonOption, ProgramConsole, ResultsArgument, VerboseOption, app, option, show_result
from vitscale.errors import RequestError
from vitscale.present.document import Document, Paragraph
from vitscale.present.terminal import lines, redraws, show
from vitscale.present.units import counted
from vitscale.present.unread import beginning_with_unread

if TYPE_CHECKING:
    from vitscale.api.sharing import WatchResult


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
        bundle_option = "--redact" if redact else "--json"
        raise RequestError(f"{bundle_option} is of a bundle, and --to makes none", next_step="Leave one of them out")
    _send(results, to, folder=output or Path("runs"))


def _send(results: Path, tracker: str, folder: Path) -> None:
    """Send every run to a tracker, and print how many were sent.

    Args:
        results: the results folder.
        tracker: tensorboard, mlflow or wandb.
        folder: where TensorBoard's files go.
    """
    runs = vitscale.send(results, tracker, folder)
    in_folder = f" in {folder}" if tracker == "tensorboard" else ""
    sentence = f"{counted(runs.sent, 'run')} sent to {tracker}{in_folder}"
    if runs.present_before:
        sentence += f"; {counted(runs.present_before, 'run')} there already"
    show(ProgramConsole(), beginning_with_unread(Document("", (Paragraph(sentence),)), runs.unread))


_REST_SECONDS = 2.0
"""Shortest rest of `watch` between two looks."""
_REST_PER_LOOK_SECOND = 20.0
"""Times the duration of a look that `watch` rests after it, for looking at a large folder on a slow disk costs."""


class _TimedLook(NamedTuple):
    """One look at a study that runs."""

    result: WatchResult
    seconds: float
    """How long the look took."""


def _look_once(results: Path) -> _TimedLook:
    began = time.monotonic()
    result = vitscale.watch(results)
    return _TimedLook(result, time.monotonic() - began)


@app.command()
def watch(
    results: ResultsArgument,
    once: Annotated[bool, option("--once", "", "Print one view and end.")] = False,
    json: JsonOption = False,
) -> None:
    """What runs now, how fast, what is left and what came last: from any terminal that sees the folder."""
    from rich.console import Group
    from rich.live import Live

    last_look = _look_once(results)
    console = ProgramConsole()
    if once or json or not redraws(console):
        show_result(last_look.result, json=json, verbose=True)
        return
    try:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(Group(*lines(last_look.result.document(), console.width, verbose=True)), refresh=True)
                if last_look.result.is_done:
                    return
                time.sleep(max(_REST_SECONDS, _REST_PER_LOOK_SECOND * last_look.seconds))
                last_look = _look_once(results)
    except KeyboardInterrupt:
        return  # to stop looking is no interruption of anything
