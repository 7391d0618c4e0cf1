"""Brings tables as people publish them into one form: a row for each measurement, a column for its GPU count.

Others have a column for each GPU count, a row of GPU counts, several speeds side by side, or a name in a column of its
own for what is compared.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from vitscale.importers.grids import Grid, Line
from vitscale.importers.headings import CELLS_OF, OWN, SPEEDS, Count, Heading, speed_told
from vitscale.trial.trial import Precision

_EMPTY = re.compile(r"[-\u2013\u2014]*|n/?a|oom", re.IGNORECASE)
_NUMBER = re.compile(r"[\d.,]+(?:e[+-]?\d+)?", re.IGNORECASE)
_COMPARED = re.compile(r"\b(?:speed-?up|scaling|efficiency|ratio|relative|ideal|linear|accuracy|loss|memory)\b|%")
"""Rows and columns that hold no speed, whatever unit a caption tells."""
_SAID = re.compile(
    r"\b(?:training|throughput|speed|performance|time|images?|imgs?|samples?|sequences?|sec(?:ond)?s?|m?s)\b",
    re.IGNORECASE,
)
_MOST_SERIES, _MOST_SPEEDS = 200, 50


@dataclass(frozen=True)
class Form:
    """A table in which each row is one measurement."""

    headings: tuple[Heading, ...]
    body: tuple[Line, ...]
    series: str = ""
    """The name that tells its rows from those of other forms of the same table."""
    precision: str = ""
    """The precision that the name tells."""


def forms(grid: Grid, cells: str | None = None) -> tuple[Form, ...]:
    """The forms of one table: as many as it has speeds side by side.

    Args:
        grid: the table.
        cells: name of the speed that its cells are, for a table with a column or row for each GPU count.
    """
    speed = Heading.of(cells) if cells else speed_told((grid.caption, grid.title))
    form = _turned(grid, speed) or _by_count(grid, speed) or Form(tuple(map(Heading.of, grid.head)), grid.body)
    return tuple(_each_speed(form))


def _turned(grid: Grid, speed: Heading | None) -> Form | None:
    """The table turned by a quarter, where its first row has GPU counts."""
    names, *counts = grid.head
    if Heading.of(names).column != "gpus" or len(counts) < 2 or not all(count.isdecimal() for count in counts):
        return None
    rows = [cells for _, cells in grid.body if len(cells) == len(grid.head)]
    headings = [Heading.of(cells[0]) for cells in rows]
    for at, heading in enumerate(headings):
        if speed and heading.column not in OWN and not _COMPARED.search(heading.text.lower()):
            headings[at] = replace(speed, text=heading.text)
    body = ((grid.line, (count, *(cells[at] for cells in rows))) for at, count in enumerate(counts, 1))
    return Form((Heading(names, "gpus"), *headings), tuple(body))


def _by_count(grid: Grid, speed: Heading | None) -> Form | None:
    """The table with a row for each of its cells, where it has a column for each GPU count."""
    counts = {at: count for at, text in enumerate(grid.head) if (count := Count.of(text))}
    others = [(at, Heading.of(text)) for at, text in enumerate(grid.head) if at not in counts]
    if len({count.gpus for count in counts.values()}) < 2 or "gpus" in {heading.column for _, heading in others}:
        return None
    told = {count.speed and (count.speed.column, count.speed.factor) for count in counts.values()}
    of_cells = next(iter(counts.values())).speed or speed if len(told) == 1 else None
    names = [grid.head[at] for at in counts]
    of_counts = [Heading(", ".join(names), "gpus"), of_cells or Heading(CELLS_OF + names[0], CELLS_OF + names[0])]
    nodes, types = (any(getattr(count, of) for count in counts.values()) for of in ("nodes", "gpu"))
    of_counts += [Heading("nodes", "nodes")] * nodes + [Heading("gpu", "gpu")] * types
    body = tuple(
        (
            line,
            (
                *(str(count.gpus), row[at]),
                *([str(count.nodes or "")] * nodes + [count.gpu] * types),
                *(row[other] for other, _ in others),
            ),
        )
        for line, row in grid.body
        if len(row) == len(grid.head) and not any(_COMPARED.search(row[other].lower()) for other, _ in others)
        for at, count in counts.items()
        if not _EMPTY.fullmatch(row[at])
    )
    return Form((*of_counts, *(heading for _, heading in others)), body)


def _each_speed(form: Form) -> Iterator[Form]:
    """The form for each of the columns that hold the same kind of speed, and with a series for names in its cells."""
    form = _named(form)
    columns = [heading.column for heading in form.headings]
    (column, count), *_ = Counter(column for column in columns if column in SPEEDS).most_common(1) or [("", 0)]
    if not 2 <= count <= _MOST_SPEEDS:
        yield replace(
            form, precision=_precision_in(form.headings[columns.index(column)].text, columns) if column else ""
        )
        return
    names = [_name(heading.text) for heading in form.headings if heading.column == column]
    if not all(names) or len(set(names)) < len(names):
        names = [heading.text for heading in form.headings if heading.column == column]
    at_speeds = [at for at, heading in enumerate(form.headings) if heading.column == column]
    for own, name in zip(at_speeds, names, strict=True):
        kept = [at for at, heading in enumerate(form.headings) if at == own or heading.column not in SPEEDS]
        yield Form(
            tuple(form.headings[at] for at in kept),
            tuple(
                (line, tuple(cells[at] for at in kept))
                for line, cells in form.body
                if len(cells) == len(columns) and not _EMPTY.fullmatch(cells[own])
            ),
            name,
            _precision_in(name, columns),
        )


def _precision_in(name: str, columns: Sequence[str]) -> str:
    """The precision that the name of a speed tells where no column does; empty: none."""
    told = [precision for precision in get_args(Precision) if re.search(rf"\b{precision}\b", name.lower())]
    return told[0] if len(told) == 1 and "precision" not in columns else ""


def _name(text: str) -> str:
    """What of a heading tells it from others of the same speed."""
    return " ".join(re.sub(r"[()\[\]/:,-]+|\bper\b", " ", _SAID.sub(" ", text)).split())


def _named(form: Form) -> Form:
    """The form with the columns of names as its series: texts that stand in several rows, and at several GPU counts."""
    columns = [heading.column for heading in form.headings]
    if "gpus" not in columns or {"series", "run", "epoch", "rank"} & set(columns):
        return form
    counts = columns.index("gpus")
    rows = [cells for _, cells in form.body if len(cells) == len(columns)]
    naming = [
        at
        for at, column in enumerate(columns)
        if column and column not in OWN and names_series([(row[counts], row[at]) for row in rows])
    ]
    if not naming:
        return form
    body = tuple(
        (line, (*cells, ", ".join(cells[at] for at in naming) if len(cells) == len(columns) else ""))
        for line, cells in form.body
    )
    named = Heading(" and ".join(form.headings[at].text for at in naming), "series")
    others = [replace(heading, column="") if at in naming else heading for at, heading in enumerate(form.headings)]
    return replace(form, headings=(*others, named), body=body)


def names_series(cells: Sequence[tuple[str, str]]) -> bool:
    """Whether a column's cells name what is compared: no numbers, in several rows each, some at several GPU counts.

    Args:
        cells: (GPU count, cell) of each row.
    """
    at_counts: dict[str, set[str]] = {}
    for count, cell in cells:
        at_counts.setdefault(cell, set()).add(count)
    return (
        2 <= len(at_counts) <= min(_MOST_SERIES, len(cells) // 2)
        and not any(_NUMBER.fullmatch(cell) for cell in at_counts)
        and any(len(counts) > 1 for counts in at_counts.values())
    )
