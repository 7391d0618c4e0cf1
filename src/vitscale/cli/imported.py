"""What was imported, for a terminal: series, GPU counts, runs; what was assumed; what could not be used."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from vitscale.analysis.curve_names import curve_name
from vitscale.importers import Done
from vitscale.store.results import Curve


def table(done: Done) -> Table:
    """One row per series."""
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("series", "scaling", "GPUs", "runs", "epochs", "steps"):
        numeric = column in ("runs", "epochs", "steps")
        shown.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows(done):
        gpus = _counts(row["gpus"])
        counts = [f"{row[key]:,}" if row[key] else "\N{EN DASH}" for key in ("runs", "epochs", "steps")]
        shown.add_row(*(Text(cell) for cell in (row["series"], row["mode"], gpus, *counts)))
    return shown


def _counts(gpus: Sequence[int]) -> str:
    """ "1-8", "1, 2, 4": three or more in a row are a range."""
    spans: list[list[int]] = []
    for count in gpus:
        if spans and count == spans[-1][-1] + 1:
            spans[-1].append(count)
        else:
            spans.append([count])
    return ", ".join(f"{span[0]}-{span[-1]}" if len(span) > 2 else ", ".join(map(str, span)) for span in spans)


def rows(done: Done) -> list[dict[str, Any]]:
    """One object per series; epochs and steps are those of the first rank of each run."""
    return [_row(done, curve) for curve in done.study.curves]


def _row(done: Done, curve: Curve) -> dict[str, Any]:
    ids = {point.trial_id for point in curve.points}
    last = done.study.trials[curve.points[-1].trial_id]
    ours = [one.run for one in done.runs if one.trial.identity() in ids]
    return {
        "series": curve_name(curve.labels, last),
        "mode": curve.mode,
        "gpus": [point.gpus for point in curve.points],
        "runs": len(ours),
        "epochs": sum(len(run.ranks[0].epochs) for run in ours),
        "steps": sum(len(run.ranks[0].steps) for run in ours),
    }


def lines(done: Done) -> Iterable[str]:
    """Notes, then problems."""
    imported = done.study.imported
    if imported is not None:
        yield from (f"note: {note}" for note in imported.notes)
        yield from (f"problem: {problem}" for problem in imported.problems)


def as_json(done: Done, results: str) -> str:
    """The same as JSON."""
    imported = done.study.imported
    content = {
        "results": results,
        "written": done.written,
        "format": imported.log_format if imported else None,
        "files": [one.model_dump() for one in imported.files] if imported else [],
        "series": rows(done),
        "notes": list(imported.notes) if imported else [],
        "problems": list(imported.problems) if imported else [],
    }
    return json.dumps(content, indent=1)
