"""The answer of `import`: its series, its assumptions, and what could not be used; as a document and as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from vitscale.analysis.scaling import curve_name
from vitscale.analysis.time.breakdown import Breakdown, breakdown
from vitscale.importers.contents import LogRun
from vitscale.importers.importing import WrittenImport
from vitscale.present import units
from vitscale.present.document import Block, Bullets, Column, Document, Paragraph, Table, table
from vitscale.store import load
from vitscale.store.records import EXPOSED
from vitscale.store.results import Curve


def import_document(done: WrittenImport, results: Path, guessed_format: str = "") -> Document:
    """Return a document with a row for each series, the assumptions, what could not be used, and the next step.

    Args:
        done: the import.
        results: the folder that was written.
        guessed_format: the format that the files were taken for; empty where it was named.
    """
    headline = f"Imported into {results}" if done.written else f"Nothing to do: this import is in {results}"
    if guessed_format:
        headline += f" (taken for --format {guessed_format})"
    blocks: list[Block] = [Paragraph(headline, "strong"), _series_table(done)]
    if done.data.get("ranks"):
        blocks.append(_rank_table(done))
        blocks += [Paragraph(sentence) for sentence in waited_for(_data(done, results)["ranks"])]
    imported = done.study.imported
    if imported is not None and (imported.problems or imported.notes):
        problems = [f"problem: {problem}" for problem in imported.problems]
        notes = [f"note: {note}" for note in imported.notes]
        blocks.append(Bullets((*problems, *notes)))
    return Document("", tuple(blocks), last=(f"Report: vitscale report {results}",))


def _series_table(done: WrittenImport) -> Table:
    """Return a table with a row for each series: its rank counts, runs, epochs and steps."""
    columns = [Column("series", words=True), Column("scaling", words=True), Column("GPUs")]
    columns += map(Column, ("runs", "epochs", "steps"))
    rows = []
    for series in series_fields(done):
        counts = [f"{series[key]:,}" if series[key] else units.UNKNOWN for key in ("runs", "epochs", "steps")]
        rows.append([series["series"], series["mode"], _rank_counts(series["gpus"]), *counts])
    return table(columns, rows, always=[column.name for column in columns])


def _rank_table(done: WrittenImport) -> Table:
    """Return a table with the share of each rank's time in which its device computed, communicated, copied, idled."""
    parts = {"computes": "compute", "exposed communication": "exposed_communication", "copies": "copy", "idle": "idle"}
    columns = [Column("job", words=True), Column("rank"), Column("in all"), *map(Column, parts)]
    rows = []
    for rank in done.data["ranks"]:
        total_seconds = rank["total_seconds"]
        shares = [units.percent(rank[f"{part}_seconds"] / total_seconds, 1) for part in parts.values()]
        job = done.runs[rank["job"]].run.setting.series or rank["device"] or units.UNKNOWN
        rows.append([job, str(rank["rank"]), units.seconds(total_seconds), *shares])
    return table(columns, rows)


def waited_for(ranks: Sequence[dict[str, Any]]) -> list[str]:
    """Return a sentence on each job whose ranks wait for one of them: for which one, and how long.

    `ranks`: the objects of --json, in which the straggler of a job is the rank whose `straggler` is its own number.
    """
    sentences = []
    for straggler in ranks:
        if straggler["rank"] != straggler["straggler"]:
            continue
        waiting = [rank for rank in ranks if rank["job"] == straggler["job"] and rank is not straggler]
        mean_wait = fmean(rank["wait_seconds_per_step"] for rank in waiting)
        sentences.append(
            f"The ranks wait for rank {straggler['rank']} ({straggler['device'] or 'unknown GPU'}): "
            f"{units.seconds(mean_wait)} a step in the mean, "
            f"itself {units.seconds(straggler['wait_seconds_per_step'])}."
        )
    return sentences


def _rank_counts(gpus: Sequence[int]) -> str:
    """Return counts as "1-8" or "1, 2, 4"; three or more consecutive ones become a range."""
    ranges: list[str] = []
    for consecutive in units.runs_of(gpus):
        if len(consecutive) > 2:
            ranges.append(f"{consecutive[0]}-{consecutive[-1]}")
        else:
            ranges += map(str, consecutive)
    return ", ".join(ranges)


def series_fields(done: WrittenImport) -> list[dict[str, Any]]:
    """Return a JSON object for each series; epochs and steps are those of each run's first rank."""
    runs_by_trial: dict[str, list[LogRun]] = {}
    for imported in done.runs:
        runs_by_trial.setdefault(imported.header.trial_id, []).append(imported.run)
    return [_one_series(done, curve, runs_by_trial) for curve in done.study.curves]


def _one_series(done: WrittenImport, curve: Curve, runs_by_trial: Mapping[str, Sequence[LogRun]]) -> dict[str, Any]:
    first_ranks = []
    for trial_id in dict.fromkeys(point.trial_id for point in curve.points):
        first_ranks += [run.ranks[0] for run in runs_by_trial.get(trial_id, ())]
    return {
        "series": curve_name(curve.labels, done.study.trials[curve.points[-1].trial_id]),
        "mode": curve.mode,
        "gpus": [point.gpus for point in curve.points],
        "runs": len(first_ranks),
        "epochs": sum(len(rank.epochs) for rank in first_ranks),
        "steps": sum(len(rank.steps) for rank in first_ranks),
    }


def import_fields(done: WrittenImport, results: Path) -> dict[str, Any]:
    """Return the import as JSON fields, with an object for each series."""
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


def _data(done: WrittenImport, results: Path) -> dict[str, list[Any]]:
    """Return the format's own data; ranks, if it has any, with what each waited and transferred per step."""
    if not done.data.get("ranks"):
        return done.data
    breakdowns = {(run.header.trial_id, run.header.repeat): breakdown(run) for run in load(results).runs}
    ranks = []
    for rank in done.data["ranks"]:
        header = done.runs[rank["job"]].header
        ranks.append(rank | _step_fields(rank["rank"], breakdowns.get((header.trial_id, header.repeat))))
    return {**done.data, "ranks": ranks}


def _step_fields(rank: int, parts: Breakdown | None) -> dict[str, Any]:
    """Return the seconds that a rank waited and transferred per step, and its run's straggler; None where unknown."""
    seconds = parts.rank(rank).parts if parts is not None else {}
    straggler = parts.straggler if parts is not None else None
    fields = {f"{part}_seconds_per_step": seconds.get(part) for part in (*EXPOSED, "launch_gaps", "optimizer")}
    return {**fields, "straggler": straggler.rank if straggler is not None else None}
