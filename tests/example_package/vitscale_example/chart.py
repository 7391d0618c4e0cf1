"""What the meter of this package recorded, as a chart of the report."""

from __future__ import annotations

from typing import Any

from vitscale.analysis import Analysis
from vitscale.present.document import Figure, View


def switches(analysis: Analysis) -> Figure | None:
    """A point for each rank and epoch; None of results in which the meter was not asked."""
    rows: list[dict[str, Any]] = [
        {"engine": trial.trial.train.engine, "rank": rank.rank, "switches": line.values["switches"]}
        for trial in analysis.trials.values()
        for run in trial.recorded_runs
        for rank in run.ranks
        for line in rank.meters
        if line.meter == "switches" and line.values.get("switches") is not None  # a reading may be unavailable
    ]
    if not rows:
        return None
    encoding = {
        "x": {"field": "rank", "type": "ordinal"},
        "y": {"field": "switches", "type": "quantitative", "title": "involuntary context switches an epoch"},
        "color": {"field": "engine", "type": "nominal"},
    }
    spec = {"datasets": {"rows": rows}, "data": {"name": "rows"}, "mark": "point", "encoding": encoding}
    columns = {name: name for name in rows[0]}
    summary = f"{sum(row['switches'] for row in rows):g} in all."
    return Figure(
        "switches", "Context switches", (View("switches", {}, "Context switches", "", spec, columns, summary),)
    )
