"""A table of a page's section: a row per trial, in groups by curve, with what is unknown and why below it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from vitscale.analysis import Analysis, CurveResult, Point, TrialResult
from vitscale.report.tables import Cell, batch_text
from vitscale.report.words import UNKNOWN

Column = tuple[str, Callable[[TrialResult], Cell]]
"""Its heading, and its cell of a trial."""
_LONG = 16
"""Lines, beyond which a table is folded."""


@dataclass(frozen=True)
class Line:
    """One trial."""

    trial_id: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Group:
    """The trials of one curve that stand in no group before."""

    name: str
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class GroupedTable:
    """Columns of which anything is known, in the same order in every line."""

    title: str
    columns: tuple[str, ...]
    groups: tuple[Group, ...]
    notes: tuple[str, ...]
    open: bool
    """Whether a page shows it at once; a long one opens when it is asked for."""


def grouped_table(
    analysis: Analysis,
    title: str,
    curves: Sequence[CurveResult],
    columns: Sequence[Column],
    wanted: Callable[[TrialResult], bool],
    *,
    always: Collection[str] = (),
    notes: Sequence[str] = (),
) -> GroupedTable | None:
    """One line per wanted trial, ranks and batch first; None where there is none.

    Args:
        analysis: the trials.
        title: what the table tells.
        curves: whose trials; one that lies on several stands with the first.
        columns: of which those without a single known cell are left out, unless they are in `always`.
        wanted: whether a trial is in the table.
        always: headings that stay whatever is known, in a table that is shown however long it is.
        notes: what a reader must know, below the table.
    """
    several_modes = len({curve.mode for curve in curves}) > 1
    found: list[tuple[str, list[tuple[TrialResult, Point]]]] = []
    seen: set[str] = set()
    for curve in curves:
        trials = [
            (analysis.trials[point.trial_id], point)
            for point in curve.points
            if point.trial_id not in seen and wanted(analysis.trials[point.trial_id])
        ]
        seen |= {point.trial_id for _, point in trials}
        if trials:
            found.append((f"{curve.name} ({curve.mode})" if several_modes else curve.name, trials))
    every = [trial for _, trials in found for trial, _ in trials]
    kept = [
        (heading, cell)
        for heading, cell in columns
        if heading in always or any(cell(trial).text != UNKNOWN for trial in every)
    ]
    if not every or not kept:
        return None
    return GroupedTable(
        title,
        ("ranks", "batch", *(heading for heading, _ in kept)),
        tuple(Group(name, tuple(_line(trial, point, kept) for trial, point in trials)) for name, trials in found),
        tuple(notes),
        open=bool(always) or len(every) <= _LONG,
    )


def _line(trial: TrialResult, point: Point, columns: Sequence[Column]) -> Line:
    return Line(
        trial.trial_id, (Cell(f"{point.gpus:,}"), Cell(batch_text(trial)), *(cell(trial) for _, cell in columns))
    )
