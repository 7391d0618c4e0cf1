"""The verb that brings in others' results: import."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitscale.cli import base
from vitscale.cli.base import ProgramConsole, answer, app, option
from vitscale.errors import unknown
from vitscale.present import units
from vitscale.present.document import Block, Bullets, Column, Document, Paragraph, Table, table

if TYPE_CHECKING:
    from vitscale.importers.contents import LinkFormat, LogRun
    from vitscale.importers.importing import Done


@app.command("import")
def import_(
    logs: Annotated[list[Path], typer.Argument(metavar="LOG...", help="Log files of one format.", show_default=False)],
    output: base.OutputOption = None,
    log_format: Annotated[
        str,
        option("--format", "F", "Or epochs, deepspeed, trainer-state, train-log, csv, trace, nccl-tests, perftest."),
    ] = "auto",
    name: Annotated[str | None, option("--name", "NAME", "Name of the study.")] = None,
    model: base.ModelOption = None,
    parameters: base.ParametersOption = None,
    image_size: Annotated[int | None, option("--image-size", "PIXELS", "Image size of the model.")] = None,
    engine: base.EngineOption = None,
    zero_stage: Annotated[int | None, option("--zero-stage", "0-3", "DeepSpeed's ZeRO stage.")] = None,
    precision: base.PrecisionOption = None,
    micro_batch: base.MicroBatchOption = None,
    train_samples: Annotated[
        int | None, option("--train-samples", "N", "Training images of the whole dataset.")
    ] = None,
    gpus: Annotated[
        str | None, option("--gpus", "N", "Ranks, where logs do not say; 1,8: of each log in turn.")
    ] = None,
    cells: Annotated[
        str | None, option("--cells", "SPEED", "What cells hold, where a table does not say it: images_per_second, ...")
    ] = None,
    as_repeats: Annotated[
        bool, option("--as-repeats", "", "Take files of one setting for repeats, however much they differ.")
    ] = False,
    verbose: base.VerboseOption = False,
    json: base.JsonOption = False,
) -> None:
    """Others' logs as results: DeepSpeed, Hugging Face, timm, MMEngine; tables; traces. Then report and predict."""
    from vitscale.base import plugins
    from vitscale.importers.contents import FORMATS, OF_LINKS, Options, gpus_of
    from vitscale.importers.importing import guess, import_logs

    counts = gpus_of(gpus, len(logs)) if gpus is not None else ()
    taken = guess(logs, cells, counts) if log_format == "auto" else log_format
    if taken not in (*FORMATS, *OF_LINKS) and plugins.target("importer", taken) is None:
        raise unknown("format", log_format, ("auto", *FORMATS, *OF_LINKS, *plugins.names("importer")))
    same, each = (counts[0], None) if len(counts) == 1 else (None, counts or None)
    options = Options(
        model,
        image_size,
        engine,
        zero_stage,
        precision,
        micro_batch,
        train_samples,
        same,
        name,
        parameters,
        cells,
        each,
        as_repeats or None,
    )
    results = output or Path("results") / (name or logs[0].stem)
    if (of_links := next((known for known in OF_LINKS if known == taken), None)) is not None:
        _import_links(logs, of_links, results, json)
        return
    done = import_logs(logs, taken, options, results)
    told_for = taken if log_format == "auto" else ""
    answer(
        "import",
        lambda: _fields(done, results),
        lambda: _document(done, results, told_for),
        unread=None,
        json=json,
        verbose=verbose,
    )


def _document(done: Done, results: Path, taken_for: str) -> Document:
    """A document with a row for each series, what was assumed, what could not be used, and the next step."""
    columns = [Column("series", words=True), Column("scaling", words=True), Column("GPUs")]
    columns += map(Column, ("runs", "epochs", "steps"))
    rows = []
    for row in _series(done):
        counts = [f"{row[key]:,}" if row[key] else units.UNKNOWN for key in ("runs", "epochs", "steps")]
        rows.append([row["series"], row["mode"], _counts(row["gpus"]), *counts])
    said = "Imported into" if done.written else "Nothing to do: this import is in"
    format_line = f" (taken for --format {taken_for})" if taken_for else ""
    imported = done.study.imported
    notes = [f"problem: {problem}" for problem in imported.problems] if imported else []
    notes += [f"note: {note}" for note in imported.notes] if imported else []
    laid = table(columns, rows, always=[column.name for column in columns])
    blocks: list[Block] = [Paragraph(f"{said} {results}{format_line}", "strong"), laid]
    if done.data.get("ranks"):
        blocks.append(_rank_table(done))
        blocks += [Paragraph(waiting) for waiting in waited_for(_told_apart(done, results)["ranks"])]
    blocks += [Bullets(tuple(notes))] if notes else []
    return Document("", tuple(blocks), (f"Report: vitscale report {results}",))


def _rank_table(done: Done) -> Table:
    """A table that divides each rank's time by what its device did."""
    parts = {"computes": "compute", "exposed communication": "exposed_communication", "copies": "copy", "idle": "idle"}
    columns = [Column("job", words=True), Column("rank"), Column("in all"), *map(Column, parts)]
    rows = []
    for rank in done.data["ranks"]:
        whole = rank["total_seconds"]
        shares = [units.percent(rank[f"{part}_seconds"] / whole, 1) for part in parts.values()]
        job = done.runs[rank["job"]].run.setting.series or rank["device"] or units.UNKNOWN
        rows.append([job, str(rank["rank"]), units.seconds(whole), *shares])
    return table(columns, rows)


def waited_for(ranks: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for each job whose ranks wait for one rank: for which, and how long. `ranks`: as in --json."""
    from statistics import fmean

    told = []
    for late in (rank for rank in ranks if rank["rank"] == rank["straggler"]):
        waits = [other["wait_seconds_per_step"] for other in ranks if other["job"] == late["job"] and other is not late]
        told.append(
            f"The ranks wait for rank {late['rank']} ({late['device'] or 'unknown GPU'}): "
            f"{units.seconds(fmean(waits))} a step in the mean, itself {units.seconds(late['wait_seconds_per_step'])}."
        )
    return told


def _counts(gpus: Sequence[int]) -> str:
    """Counts as "1-8" or "1, 2, 4"; three or more consecutive ones become a range."""
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in units.runs_of(gpus))


def _series(done: Done) -> list[dict[str, Any]]:
    """A JSON object for each series; epochs and steps are those of each run's first rank."""
    from vitscale.analysis.scaling import curve_name

    runs_of: dict[str, list[LogRun]] = {}
    for imported in done.runs:
        runs_of.setdefault(imported.header.trial_id, []).append(imported.run)
    objects = []
    for curve in done.study.curves:
        trial_ids = dict.fromkeys(point.trial_id for point in curve.points)
        runs = [run for trial_id in trial_ids for run in runs_of.get(trial_id, ())]
        objects.append(
            {
                "series": curve_name(curve.labels, done.study.trials[curve.points[-1].trial_id]),
                "mode": curve.mode,
                "gpus": [point.gpus for point in curve.points],
                "runs": len(runs),
                "epochs": sum(len(run.ranks[0].epochs) for run in runs),
                "steps": sum(len(run.ranks[0].steps) for run in runs),
            }
        )
    return objects


def _fields(done: Done, results: Path) -> dict[str, Any]:
    imported = done.study.imported
    return {
        "results": str(results),
        "written": done.written,
        "format": imported.log_format if imported else None,
        "files": [file.model_dump() for file in imported.files] if imported else [],
        "series": _series(done),
        **_told_apart(done, results),
        "notes": list(imported.notes) if imported else [],
        "problems": list(imported.problems) if imported else [],
    }


def _told_apart(done: Done, results: Path) -> dict[str, list[Any]]:
    """What a format tells beyond runs; where all ranks are there, also what each waited and transferred per step."""
    from vitscale.analysis.time.breakdown import breakdown
    from vitscale.store import load
    from vitscale.store.records import EXPOSED

    if not done.data.get("ranks"):
        return done.data
    breakdowns = {(run.header.trial_id, run.header.repeat): breakdown(run) for run in load(results).runs}
    ranks = []
    for rank in done.data["ranks"]:
        header = done.runs[rank["job"]].header
        parts = breakdowns.get((header.trial_id, header.repeat))
        own = parts.rank(rank["rank"]).parts if parts is not None else {}
        ranks.append(
            {
                **rank,
                **{f"{part}_seconds_per_step": own.get(part) for part in (*EXPOSED, "launch_gaps", "optimizer")},
                "straggler": parts.straggler.rank if parts is not None and parts.straggler is not None else None,
            }
        )
    return {**done.data, "ranks": ranks}


def _import_links(logs: list[Path], taken: LinkFormat, results: Path, json: bool) -> None:
    """Imports others' measurements of the network, as a check in the results folder."""
    from vitscale.prediction.network.checked import network_of
    from vitscale.preflight.imported import import_links
    from vitscale.present.data import envelope

    record, path, problems = import_links(logs, taken, results)
    if json:
        fields = {"results": str(results), "stored": str(path), "problems": list(problems)}
        sys.stdout.write(envelope("import", fields | {"check": record.model_dump(mode="json")}))
        return
    console = ProgramConsole()
    network = network_of(record)
    for where, link in (("inside a host", network.inside), ("between hosts", network.across)):
        rate = f"{units.rate(link.bandwidth_bytes_per_second, 'B/s')}, {units.seconds(link.latency_seconds)} a hop"
        said = f"{where}: {link.described}" + (f", {rate}" if link.source == "check" else "")
        console.print(said, markup=False, highlight=False, soft_wrap=True)
    for problem in problems:
        console.print(f"problem: {problem}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"Written to {path}; predict takes it: vitscale predict {results}", markup=False, soft_wrap=True)
