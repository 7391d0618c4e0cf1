"""What an import says: the series that it made, what was assumed, what could not be used; the same as data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from vitscale.analysis.scaling import curve_name
from vitscale.analysis.time.breakdown import breakdown
from vitscale.importers.contents import LogRun
from vitscale.importers.importing import Done
from vitscale.present import units
from vitscale.present.document import Block, Bullets, Column, Document, Paragraph, Table, table
from vitscale.store import load
from vitscale.store.records import EXPOSED


def import_document(done: Done, results: Path, guessed_format: str = "") -> Document:
    """A document with a row for each series, what was assumed, what could not be used, and the next step.

    Args:
        done: the import.
        results: the folder that was written.
        guessed_format: the format that the files were taken for; empty where it was named.
    """
    columns = [Column("series", words=True), Column("scaling", words=True), Column("GPUs")]
    columns += map(Column, ("runs", "epochs", "steps"))
    rows = []
    for row in series_fields(done):
        counts = [f"{row[key]:,}" if row[key] else units.UNKNOWN for key in ("runs", "epochs", "steps")]
        rows.append([row["series"], row["mode"], _counts(row["gpus"]), *counts])
    said = "Imported into" if done.written else "Nothing to do: this import is in"
    format_line = f" (taken for --format {guessed_format})" if guessed_format else ""
    imported = done.study.imported
    notes = [f"problem: {problem}" for problem in imported.problems] if imported else []
    notes += [f"note: {note}" for note in imported.notes] if imported else []
    laid = table(columns, rows, always=[column.name for column in columns])
    blocks: list[Block] = [Paragraph(f"{said} {results}{format_line}", "strong"), laid]
    if done.data.get("ranks"):
        blocks.append(_rank_table(done))
        blocks += [Paragraph(waiting) for waiting in waited_for(_data(done, results)["ranks"])]
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


def series_fields(done: Done) -> list[dict[str, Any]]:
    """A JSON object for each series; epochs and steps are those of each run's first rank."""
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


def import_fields(done: Done, results: Path) -> dict[str, Any]:
    """The import as JSON fields, with an object for each series."""
    imported = done.study.imported
    return {
        "results": str(results),
        "written": done.written,
        "format": imported.log_format if imported else None,
        "files": [file.model_dump() for file in imported.files] if imported else [],
        "series": series_fields(done),
        **_data(done, results),
        "notes": list(imported.notes) if imported else [],
        "problems": list(imported.problems) if imported else [],
    }


def _data(done: Done, results: Path) -> dict[str, list[Any]]:
    """What a format tells beyond runs; where all ranks are there, also what each waited and transferred per step."""
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
