"""A folder of scaling tables that others published: series, and which of their GPU counts are fitted and which held."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated

from product import Row
from pydantic import BaseModel, Field, PositiveInt, ValidationError

from vitscale.errors import RequestError, shown, unknown

RATES = ("images_per_second", "step_seconds")
Counts = Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
Text = Annotated[str, Field(min_length=1, max_length=300)]


class Entry(BaseModel):
    """A series of the index."""

    name: Text
    file: Annotated[str, Field(pattern=r"^[^/\\]+\.csv$")]
    fit: Counts
    held: Counts
    source: Text
    per_node: PositiveInt | None = None
    network: Text | None = None
    model: Text | None = None
    engine: Text | None = None
    parameters: PositiveInt | Text | None = None
    """Of the model: 110000000 or "110M"."""

    @property
    def repository(self) -> str:
        """Of the source, without the path."""
        return self.source.partition(":")[0]


@dataclass(frozen=True)
class Table:
    """A series with its rows."""

    entry: Entry
    rows: tuple[Row, ...]

    def at(self, counts: Iterable[int]) -> list[Row]:
        """The rows of these GPU counts."""
        return [row for row in self.rows if int(row["gpus"]) in counts]

    def rates(self, gpus: int) -> list[float]:
        """Of each run: images per second, or steps per second where that is what was measured."""
        column = rate_of(self.rows[0])
        values = [float(row[column]) for row in self.at([gpus])]
        return values if column == "images_per_second" else [1 / value for value in values]


def gpu_pairs(tables: Sequence[Table]) -> list[tuple[str, Table, Table]]:
    """(The words that both names have, one, the other) of each two series that differ in GPU type alone: of one
    repository, micro-batch and precision, with names alike but for one word, such as the system's."""
    found = []
    for one, other in combinations(tables, 2):
        first, second = (table.rows[0] for table in (one, other))
        alike = one.entry.repository == other.entry.repository
        alike &= all(first.get(column) == second.get(column) for column in ("micro_batch", "precision"))
        words = [table.entry.name.split("_") for table in (one, other)]
        common = [a for a, b in zip(*words, strict=False) if a == b]
        another = {first.get("gpu"), second.get("gpu")} - {None}
        if alike and len(another) == 2 and [len(common) + 1] * 2 == [len(each) for each in words]:
            found.append((" ".join(common), one, other))
    return found


_FURTHEST = 4
"""Times the counts that are fitted: so far most of the index's splits ask."""


def other_splits(tables: Sequence[Table]) -> list[Table]:
    """Each table split at every other count: fitted on the counts below it, asked for those above, up to four times as
    many. What the index has is left out, and what two tables share stands once; a rank alone is no fit."""
    known = [(table.rows, set(table.entry.fit)) for table in tables]
    found = []
    for table in tables:
        counts = sorted({*table.entry.fit, *table.entry.held})
        for n in range(1, len(counts)):
            fit, held = counts[:n], [count for count in counts[n:] if count <= _FURTHEST * counts[n - 1]]
            if held and fit != [1] and (key := (table.rows, set(fit))) not in known:
                known.append(key)
                changes = {"name": f"{table.entry.name}, fitted to {fit[-1]}", "fit": tuple(fit), "held": tuple(held)}
                found.append(Table(table.entry.model_copy(update=changes), table.rows))
    return found


def rate_of(row: Row) -> str:
    """The column that is compared.

    Raises:
        KeyError: there is none.
    """
    return next(name for name in RATES if row.get(name))


def read(folder: Path, sources: Sequence[str] = ()) -> list[Table]:
    """The series of a folder, of these repositories alone where some are named.

    Raises:
        RequestError: the index or a table lacks something: each such entry is named.
    """
    index = folder / "index.json"
    try:
        entries = json.loads(index.read_text(encoding="utf-8"))["series"]
        named = list(enumerate(entries))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        raise RequestError(
            f"{shown(str(index))} cannot be used: {why}", next_step='It is to hold {"series": [...]}'
        ) from None
    problems: list[str] = []
    tables: list[Table] = []
    for n, raw in named:
        try:
            tables.append(_table(folder, Entry.model_validate(raw), [one.entry.name for one in tables]))
        except ValidationError as error:
            told = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:3])
            problems.append(f"series {n + 1} {shown(raw.get('name')) if isinstance(raw, dict) else ''}: {told}")
        except (OSError, ValueError, csv.Error) as error:
            problems.append(f"series {n + 1} {shown(raw['name'])}: {error}")
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise RequestError(f"{index}: {' | '.join(problems[:5])}{more}")
    known = {table.entry.repository for table in tables}
    for source in sources:
        if source not in known:
            raise unknown("source", source, known)
    return [table for table in tables if not sources or table.entry.repository in sources]


def _table(folder: Path, entry: Entry, names: Sequence[str]) -> Table:
    if entry.name in names:
        raise ValueError("another series has this name")
    if both := set(entry.fit) & set(entry.held):
        raise ValueError(f"{', '.join(map(str, sorted(both)))} GPUs are both fitted and held")
    with (folder / entry.file).open(encoding="utf-8", newline="") as file:
        rows = tuple({key: value for key, value in row.items() if key and value} for row in csv.DictReader(file))
    for n, row in enumerate(rows):
        if not row.get("gpus", "").isdecimal():
            raise ValueError(f"{entry.file}, row {n + 1}: gpus is {shown(row.get('gpus', ''))}")
        if not any(_is_rate(row.get(name, "")) for name in RATES):
            raise ValueError(f"{entry.file}, row {n + 1}: neither {' nor '.join(RATES)} is a number above 0")
    if missing := {*entry.fit, *entry.held} - {int(row["gpus"]) for row in rows}:
        raise ValueError(f"{entry.file} has no row of {', '.join(map(str, sorted(missing)))} GPUs")
    return Table(entry, rows)


def _is_rate(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False
