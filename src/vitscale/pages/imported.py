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


def import_document(written_import: WrittenImport, results: Path, guessed_format: str = "") -> Document:
    """Return a document with a row for each series, the assumptions, what could not be used, and the next step.

    Args:
        written_import: the import, which is written: its study, its runs, and the data of its format beyond runs.
        results: the folder that was written.
        guessed_format: the format that the files were taken for; empty where it was named.
    """
    headline = f"Imported into {results}" if written_import.written else f"Nothing to do: this import is in {results}"
    if guessed_format:
        headline += f" (taken for --format {guessed_format})"
    blocks: list[Block] = [Paragraph(headline, "strong"), _series_table(written_import)]
    ranks = _rank_objects(written_import, results)
    if ranks:
        blocks.append(_rank_table(written_import, ranks))
        blocks += [Paragraph(sentence) for sentence in straggler_sentences(ranks)]
    remarks = _problems_and_notes(written_import)
    if remarks:
        blocks.append(Bullets(remarks))
    return Document("", tuple(blocks), last=(f"Report: vitscale report {results}",))


def _problems_and_notes(written_import: WrittenImport) -> tuple[str, ...]:
    """Return what could not be used, and then what was assumed: "problem: ...", "note: ..."."""
    log_import = written_import.study.imported
    if log_import is None:
        return ()
    problems = [f"problem: {problem}" for problem in log_import.problems]
    notes = [f"note: {note}" for note in log_import.notes]
    return (*problems, *notes)


def _series_table(written_import: WrittenImport) -> Table:
    """Return a table with a row for each series: its rank counts, runs, epochs and steps."""
    columns = [Column("series", words=True), Column("scaling", words=True), Column("GPUs")]
    columns += map(Column, ("runs", "epochs", "steps"))
    rows = []
    for series in series_fields(written_import):
        counts = [f"{series[key]:,}" if series[key] else units.UNKNOWN for key in ("runs", "epochs", "steps")]
        rows.append([series["series"], series["mode"], _rank_counts(series["gpus"]), *counts])
    return table(columns, rows, always=[column.name for column in columns])


def _rank_table(written_import: WrittenImport, ranks: Sequence[dict[str, Any]]) -> Table:
    """Return a table with the share of each rank's time in which its device computed, communicated, copied, idled.

    `ranks`: the objects of --json; `job` is the position of their run in the import.
    """
    part_by_heading = {
        "computes": "compute",
        "exposed communication": "exposed_communication",
        "copies": "copy",
        "idle": "idle",
    }
    columns = [Column("job", words=True), Column("rank"), Column("in all"), *map(Column, part_by_heading)]
    rows = []
    for rank in ranks:
        total_seconds = rank["total_seconds"]
        shares = [units.percent(rank[f"{part}_seconds"] / total_seconds, 1) for part in part_by_heading.values()]
        job = written_import.runs[rank["job"]].run.setting.series or rank["device"] or units.UNKNOWN
        rows.append([job, str(rank["rank"]), units.seconds(total_seconds), *shares])
    return table(columns, rows)


def straggler_sentences(ranks: Sequence[dict[str, Any]]) -> list[str]:
    """Return a sentence on each job whose ranks wait for one of them, the straggler: for which one, and how long.

    `ranks`: the objects of --json. In each, `straggler` is the number of the rank that the ranks of its job wait for,
    or None.
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


def series_fields(written_import: WrittenImport) -> list[dict[str, Any]]:
    """Return a JSON object for each series; epochs and steps are those of each run's first rank."""
    runs_by_trial: dict[str, list[LogRun]] = {}
    for trial_run in written_import.runs:
        runs_by_trial.setdefault(trial_run.header.trial_id, []).append(trial_run.run)
    return [_one_series_fields(written_import, curve, runs_by_trial) for curve in written_import.study.curves]


def _one_series_fields(
    written_import: WrittenImport, curve: Curve, runs_by_trial: Mapping[str, Sequence[LogRun]]
) -> dict[str, Any]:
    """Return the JSON object of one series. `runs_by_trial`: identity of a trial -> its imported runs."""
    first_ranks = []
    for trial_id in dict.fromkeys(point.trial_id for point in curve.points):
        first_ranks += [run.ranks[0] for run in runs_by_trial.get(trial_id, ())]
    return {
        "series": curve_name(curve.labels, written_import.study.trials[curve.points[-1].trial_id]),
        "mode": curve.mode,
        "gpus": [point.gpus for point in curve.points],
        "runs": len(first_ranks),
        "epochs": sum(len(rank.epochs) for rank in first_ranks),
        "steps": sum(len(rank.steps) for rank in first_ranks),
    }


def import_fields(written_import: WrittenImport, results: Path) -> dict[str, Any]:
    """Return the import as JSON fields, with an object for each series."""
    log_import = written_import.study.imported
    return {
        "results": str(results),
        "written": written_import.written,
        "format": log_import.log_format if log_import else None,
        "files": [file.model_dump() for file in log_import.files] if log_import else [],
        "series": series_fields(written_import),
        **_format_data(written_import, results),
        "notes": list(log_import.notes) if log_import else [],
        "problems": list(log_import.problems) if log_import else [],
    }


def _format_data(written_import: WrittenImport, results: Path) -> dict[str, list[Any]]:
    """Return what the format reports beyond runs, such as "ranks" of a trace; ranks with their seconds per step."""
    ranks = _rank_objects(written_import, results)
    if not ranks:
        return written_import.data
    return {**written_import.data, "ranks": ranks}


def _rank_objects(written_import: WrittenImport, results: Path) -> list[dict[str, Any]]:
    """Return the JSON object of each rank that the format reports on; none for a format that reports on no ranks.

    An object has what the import found in the rank's file, and what the analysis of the written `results` adds: the
    seconds per step in which the rank waited and transferred, and its run's straggler.
    """
    imported_ranks = written_import.data.get("ranks")
    if not imported_ranks:
        return []
    breakdown_by_run = {(run.header.trial_id, run.header.repeat): breakdown(run) for run in load(results).runs}
    objects = []
    for rank in imported_ranks:
        header = written_import.runs[rank["job"]].header
        run_breakdown = breakdown_by_run.get((header.trial_id, header.repeat))
        objects.append(rank | _step_fields(rank["rank"], run_breakdown))
    return objects


def _step_fields(rank: int, run_breakdown: Breakdown | None) -> dict[str, Any]:
    """Return the seconds that a rank waited and transferred per step, and its run's straggler; None where unknown."""
    seconds = run_breakdown.rank(rank).parts if run_breakdown is not None else {}
    straggler = run_breakdown.straggler if run_breakdown is not None else None
    fields = {f"{part}_seconds_per_step": seconds.get(part) for part in (*EXPOSED, "launch_gaps", "optimizer")}
    return {**fields, "straggler": straggler.rank if straggler is not None else None}
