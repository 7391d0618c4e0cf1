"""Curve against curve as tables: a row per curve, a column per rank count, all against one reference."""

from __future__ import annotations

from dataclasses import dataclass

from vitscale.analysis import Analysis, CurveComparison
from vitscale.analysis.comparisons import AgainstReference, against_references
from vitscale.report import words
from vitscale.report.tables import Cell
from vitscale.report.words import UNKNOWN
from vitscale.trial.trial import Mode

_SHORT = {
    "no significant difference": "no difference",
    "not significant among all comparisons": "no difference among so many",
    "too few repeats to tell": "too few repeats",
}


@dataclass(frozen=True)
class Compared:
    """One curve against the reference."""

    curve: str
    cells: tuple[Cell, ...]
    """One per rank count."""


@dataclass(frozen=True)
class ComparisonTable:
    """How many times as fast as one reference each curve trains an epoch."""

    title: str
    reference: str
    columns: tuple[str, ...]
    rows: tuple[Compared, ...]


def comparison_tables(analysis: Analysis) -> tuple[ComparisonTable, ...]:
    """One table per batch policy, what varies, and reference."""
    found: dict[tuple[Mode, str, str], list[AgainstReference]] = {}
    for one in against_references(analysis.curves, analysis.trials, analysis.comparisons):
        found.setdefault((one.mode, one.varies, one.reference), []).append(one)
    return tuple(_table(mode, reference, members) for (mode, _, reference), members in found.items())


def _table(mode: Mode, reference: str, members: list[AgainstReference]) -> ComparisonTable:
    counts = sorted({one.gpus for one in members})
    by_curve: dict[str, dict[int, CurveComparison]] = {}
    for one in sorted(members, key=lambda one: -one.gpus):  # the fastest at the most ranks first
        for other in one.others:
            by_curve.setdefault(other.first, {})[one.gpus] = other
    return ComparisonTable(
        title=f"{mode}: times as fast as {reference}",
        reference=reference,
        columns=tuple(words.ranks(count) for count in counts),
        rows=tuple(Compared(curve, tuple(_cell(at.get(count)) for count in counts)) for curve, at in by_curve.items()),
    )


def _cell(one: CurveComparison | None) -> Cell:
    if one is None:
        return Cell(UNKNOWN)
    result = one.result
    if result.low is None or result.high is None:
        return Cell(f"{words.share(result.ratio)}x", "one run")
    bounds = f"{words.share(result.low)}{words.DASH}{words.share(result.high)}"
    return Cell(f"{words.share(result.ratio)}x", f"{_SHORT.get(result.verdict, result.verdict)}, {bounds}")
