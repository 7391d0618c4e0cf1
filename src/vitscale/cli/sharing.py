"""The verbs to share and look on: export, which makes results a file to send; watch, a view of a study that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from vitscale.cli.base import JsonOption, ProgramConsole, ResultsArgument, VerboseOption, answer, app, option
from vitscale.errors import RequestError, shown, unknown
from vitscale.present.document import Document, Paragraph
from vitscale.present.terminal import lines, redraws, show
from vitscale.present.units import counted, size


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
    import hashlib

    from vitscale import store
    from vitscale.store import bundles

    if to is not None:
        if redact or json:
            option_given = "--redact" if redact else "--json"
            raise RequestError(f"{option_given} is of a bundle, and --to makes none", next_step="Leave one of them out")
        _send(results, to, output or Path("runs"))
        return
    output = output or Path("bundle.tar.gz")
    if store.is_stream(output) or str(output) == "-":
        raise RequestError(f"{shown(str(output))} is no file", next_step="Name a file with -o, and send that")
    if output.exists() and output.stat().st_size and not bundles.is_bundle(output):
        next_step = "Name another file with -o; a bundle of before is replaced"
        raise RequestError(f"{shown(str(output))} is there already, and is no bundle", next_step=next_step)
    read = store.load(results)  # refuses what no verb could read again
    study = read.study
    files = bundles.write_bundle(store.folder_of(results), output, redact=redact, unread=read.unread)
    with output.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()

    def fields() -> dict[str, Any]:
        of_file = {"bundle": str(output), "bytes": output.stat().st_size, "sha256": digest}
        return of_file | {"study": study.name, "redacted": redact, "files": dict(files)}

    def document() -> Document:
        what = (
            f"{output}: {counted(len(files), 'file')} of {study.name}, {size(output.stat().st_size)}, SHA-256 {digest}"
        )
        told = "Its texts may still tell of you in words: look into it, then send it." if redact else ""
        return Document("", (Paragraph(what),), (told,) if told else ())

    answer("export", fields, document, unread=read.unread, json=json, verbose=verbose)


def _send(results: Path, to: str, folder: Path) -> None:
    from vitscale import analysis
    from vitscale.pages.sinks import SINKS, send
    from vitscale.store.unread import beginning_with_unread

    if to not in SINKS:
        raise unknown("tracker", to, SINKS)
    analysed = analysis.analyse_folder(results)
    sent, known = send(to, analysed, folder)
    there = f"; {counted(known, 'run')} there already" if known else ""
    where = f" in {folder}" if to == "tensorboard" else ""
    document = Document("", (Paragraph(f"{counted(sent, 'run')} sent to {to}{where}{there}"),))
    show(ProgramConsole(), beginning_with_unread(document, analysed.unread))


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
    from functools import partial

    from rich.console import Group
    from rich.live import Live

    from vitscale.runner.live import study_view, view_document, view_fields

    began = time.monotonic()
    view = study_view(results, time.time())
    took = time.monotonic() - began
    console = ProgramConsole()
    if once or json or not redraws(console):
        answer(
            "watch",
            partial(view_fields, view),
            lambda: view_document(view, results),
            unread=None,
            json=json,
            verbose=True,
        )
        return
    try:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                told = lines(view_document(view, results), console.width, verbose=True)
                live.update(Group(*told), refresh=True)
                if view.driver == "none left to do":
                    return
                time.sleep(max(_LOOK_SECONDS, _MOST_OF_THE_TIME * took))
                began = time.monotonic()
                view = study_view(results, time.time())
                took = time.monotonic() - began
    except KeyboardInterrupt:
        return  # to stop looking is no interruption of anything
