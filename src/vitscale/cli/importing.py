"""The verb that brings in results of others: import."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitscale.cli.base import JsonOption, ProgramConsole, app
from vitscale.errors import unknown

if TYPE_CHECKING:
    from vitscale.importers import LinkFormat


@app.command("import")
def import_(
    logs: Annotated[list[Path], typer.Argument(metavar="LOG...", help="Log files of one format.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="RESULTS", help="Results folder.  [default: results/NAME]")
    ] = None,
    log_format: Annotated[
        str,
        typer.Option("--format", metavar="F", help="Or epochs, deepspeed, trainer-state, csv, nccl-tests, perftest."),
    ] = "auto",
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="Of the study.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="A named model (vit-b16), or a Hugging Face folder.")
    ] = None,
    parameters: Annotated[
        str | None, typer.Option("--parameters", metavar="N", help="Of a model that has no name here: 110M, 1.3B.")
    ] = None,
    image_size: Annotated[int | None, typer.Option("--image-size", metavar="PIXELS", help="Of the model.")] = None,
    engine: Annotated[str | None, typer.Option("--engine", metavar="NAME", help="ddp, fsdp2, deepspeed, ...")] = None,
    zero_stage: Annotated[int | None, typer.Option("--zero-stage", metavar="0-3", help="Of DeepSpeed.")] = None,
    precision: Annotated[
        str | None, typer.Option("--precision", metavar="P", help="fp32, bf16, bf16-params or fp16.")
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option("--micro-batch", metavar="N", help="Images per GPU and micro-step.")
    ] = None,
    train_samples: Annotated[
        int | None, typer.Option("--train-samples", metavar="N", help="Training images of the whole dataset.")
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", metavar="N", help="Ranks, where the log does not say.")] = None,
    json: JsonOption = False,
) -> None:
    """Others' logs as results: DeepSpeed's, Hugging Face's, tables of epochs or of steps. Then report and predict."""
    from vitscale.base import plugins
    from vitscale.cli import imported
    from vitscale.importers import FORMATS, OF_LINKS, Options, guess, import_logs

    taken = guess(logs) if log_format == "auto" else log_format
    if taken not in (*FORMATS, *OF_LINKS) and plugins.target("importer", taken) is None:
        raise unknown("format", log_format, ("auto", *FORMATS, *OF_LINKS, *plugins.names("importer")))
    options = Options(
        model, image_size, engine, zero_stage, precision, micro_batch, train_samples, gpus, name, parameters
    )
    results = output or Path("results") / (name or logs[0].stem)
    if (of_links := next((known for known in OF_LINKS if known == taken), None)) is not None:
        _import_links(logs, of_links, results, json)
        return
    done = import_logs(logs, taken, options, results)
    if json:
        sys.stdout.write(imported.as_json(done, str(results)) + "\n")
        return
    console = ProgramConsole()
    if log_format == "auto":
        console.print(f"Taken for --format {taken}.", highlight=False)
    console.print(imported.table(done), highlight=False)
    for line in imported.lines(done):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    said = "Imported into" if done.written else "Nothing to do: this import is in"
    console.print(f"{said} {results}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"Report: vitscale report {results}", markup=False, highlight=False, soft_wrap=True)


def _import_links(logs: list[Path], taken: LinkFormat, results: Path, json: bool) -> None:
    """What others measured of the network, as a check in the results folder."""
    from vitscale.prediction.network.checked import network_of
    from vitscale.preflight.imported import import_links

    record, path, problems = import_links(logs, taken, results)
    if json:
        sys.stdout.write(record.model_dump_json(indent=1) + "\n")
        return
    console = ProgramConsole()
    network = network_of(record)
    for where, link in (("inside a host", network.inside), ("between hosts", network.across)):
        rate = f"{link.bandwidth_bytes_per_second / 1e9:.3g} GB/s, {link.latency_seconds * 1e6:.3g} us a hop"
        said = f"{where}: {link.described}" + (f", {rate}" if link.source == "check" else "")
        console.print(said, markup=False, highlight=False, soft_wrap=True)
    for problem in problems:
        console.print(f"problem: {problem}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"Written to {path}; predict takes it: vitscale predict {results}", markup=False, soft_wrap=True)
