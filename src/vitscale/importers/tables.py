"""Rows of a CSV file by column name, each with its line number; broken rows are told and passed over."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vitscale.errors import RequestError, explain, shown
from vitscale.importers.files import lines
from vitscale.importers.findings import Problems

_MOST_COLUMNS = 1000


@dataclass(frozen=True)
class Row:
    """One row; a column that the file lacks is an empty text."""

    line: int
    cells: Mapping[str, str]

    def __getitem__(self, column: str) -> str:
        return self.cells.get(column, "")


def header(path: Path) -> tuple[str, ...]:
    """The column names in the first line, lower-case and stripped."""
    for _, text, _ in lines(path):
        return _columns(text)
    return ()


def rows(path: Path, required: Sequence[str], problems: Problems) -> Iterator[Row]:
    """The rows under the header, one for each line that has as many cells as the header.

    A last line without a line break may end within its last value: it counts if that has as many decimals as others.

    Raises:
        RequestError: a required column is missing.
        StoreError: the file cannot be read.
    """
    columns: tuple[str, ...] = ()
    fewest: int | None = None
    for number, text, whole in lines(path):
        if number == 1:
            columns = _columns(text)
            _check(path, columns, required)
        elif text.strip():
            cells = _cells(text)
            if len(cells) != len(columns):
                kind = "broken" if whole else "cut-off"
                problems.line(number, f"{len(cells)} cells where the header has {len(columns)}", kind)
            elif not whole and fewest is not None and _decimals(cells[-1]) < fewest:
                problems.line(number, "the file ends within it", "cut-off")
            else:
                decimals = _decimals(cells[-1])
                fewest = decimals if fewest is None else min(fewest, decimals)
                yield Row(number, dict(zip(columns, (cell.strip() for cell in cells), strict=True)))
    if not columns:
        _check(path, columns, required)


def _decimals(cell: str) -> int:
    return len(cell.strip().partition(".")[2])


def _columns(text: str) -> tuple[str, ...]:
    return tuple(cell.strip().lower() for cell in _cells(text))[:_MOST_COLUMNS]


def _cells(text: str) -> list[str]:
    try:
        return next(csv.reader([text]), [])
    except csv.Error:
        return []


def _check(path: Path, columns: Sequence[str], required: Sequence[str]) -> None:
    missing = [column for column in required if column not in columns]
    if missing:
        raise RequestError(
            explain(
                f"{shown(path.name)} lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}; "
                f"its first line is {shown(','.join(columns))}",
                valid=required,
                next_step="Give a CSV file whose first line names its columns, or another --format",
            )
        )
    if twice := sorted({column for column in columns if column and columns.count(column) > 1}):
        raise RequestError(explain(f"{shown(path.name)} has the column {shown(twice[0])} twice"))
