"""Predictions held against scaling tables that others published, beside constant step, Amdahl, USL and Ernest.

    python benchmarks/published_tables.py FOLDER [--out now.json] [--against before.json] [--sources a,b] [--seed 0]
                                          [--untold network,model] [--write docs/calibration-tables.md]

FOLDER holds tables as `vitscale import --format csv` reads them, and an index.json that says of each series: name,
file, fit and held (GPU counts), per_node, network, model, engine (or null), and source (repository: path). The rows of
`fit` are imported, those of `held` predicted, by the commands themselves.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from between_marks import write_between
from paired import OURS, Point, units
from peers.models import AMDAHL, CONSTANT, ERNEST, USL, Peer
from peers.runs import Array, places
from product import Row, predicted
from pydantic import BaseModel, Field, PositiveInt, ValidationError
from tables_page import page

from vitscale.errors import RequestError, VitscaleError, explain, shown, unknown

RATES = ("images_per_second", "step_seconds")
TOLD = ("network", "model", "engine")


def _fixed_job(gpus: Array) -> Array:
    return np.ones_like(gpus)


PEERS: tuple[tuple[str, Peer, Callable[[Array], Array]], ...] = (
    ("constant step", CONSTANT, _fixed_job),
    ("Amdahl", AMDAHL, _fixed_job),
    ("USL", USL, _fixed_job),
    ("Ernest, fixed job", ERNEST, _fixed_job),
    ("Ernest, one step", ERNEST, lambda gpus: gpus),
)
"""Name, model, and its job's work by GPU count: so many images, or a step of as many on each GPU. Amdahl and USL are
the same either way."""
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


def rate_of(row: Row) -> str:
    """The column that is compared.

    Raises:
        KeyError: there is none.
    """
    return next(name for name in RATES if row.get(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, help="write points and figures as JSON")
    parser.add_argument("--against", type=Path, help="what --out of an earlier version wrote")
    parser.add_argument("--sources", help="only these repositories, separated by commas")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap")
    parser.add_argument("--untold", default="", help=f"of {', '.join(TOLD)}: not told to vitscale")
    parser.add_argument("--write", type=Path, help="a page with the marks `published tables`")
    arguments = parser.parse_args()
    try:
        tables = read(arguments.folder, _listed(arguments.sources))
        earlier = points_of(arguments.against) if arguments.against else []
        points, refused = evaluate(tables, _listed(arguments.untold))
    except VitscaleError as error:
        print(f"published_tables: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    chosen = {name: getattr(arguments, name) for name in ("sources", "untold", "seed", "against")}
    words = [f"--{name} {Path(str(value)).name}" for name, value in chosen.items() if value]
    text, figures = page(points, earlier, refused, arguments.seed, " ".join([arguments.folder.name, *words]))
    print(text)
    if arguments.out:
        content = {"points": [asdict(point) for point in points], "refused": refused, "figures": figures}
        arguments.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if arguments.write:
        write_between(arguments.write, "published tables", text)


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
            explain(f"{shown(str(index))} cannot be used: {why}", next_step='It is to hold {"series": [...]}')
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


def evaluate(tables: Sequence[Table], untold: Sequence[str] = ()) -> tuple[list[Point], dict[str, str]]:
    """The held-out points of all tables, and of series that could not be predicted, or became several, what was said.

    Raises:
        RequestError: `untold` names no fact of the index.
    """
    for name in untold:
        if name not in TOLD:
            raise unknown("fact", name, TOLD)
    shared = units([(table.entry.name, _figures(table)) for table in tables])
    points: list[Point] = []
    notes: dict[str, str] = {}
    for table, unit in zip(tables, shared, strict=True):
        entry = table.entry
        told = {name: value for name in TOLD if name not in untold and (value := getattr(entry, name))}
        imported = [word for name in ("model", "engine") if name in told for word in (f"--{name}", told[name])]
        asked = ["--network", told["network"]] if "network" in told else []
        asked += ["--nodes-of", str(entry.per_node)] if entry.per_node else []
        try:
            answers = predicted(
                table.at(entry.fit), entry.held, import_options=["--format", "csv", *imported], predict_options=asked
            )
        except RequestError as error:
            notes[entry.name] = str(error).strip()
            continue
        if len(answers) != len(entry.held):
            series = list(dict.fromkeys(answer["series"] for answer in answers))
            notes[entry.name] = (
                f"{len(answers)} answers to {len(entry.held)} counts ({'; '.join(series)}): the last taken"
            )
        by_count = {answer["gpus"]: answer for answer in answers}
        points += [_point(table, unit, gpus, by_count[gpus]) for gpus in entry.held if gpus in by_count]
    return points, notes


def _figures(table: Table) -> frozenset[object]:
    return frozenset(
        (table.entry.repository, row["gpus"], row.get("micro_batch"), row.get("precision"), row[rate_of(row)])
        for row in table.rows
    )


def _point(table: Table, unit: str, gpus: int, answer: dict[str, Any]) -> Point:
    column = rate_of(table.rows[0])

    def rate(end: str, other: str) -> float:
        if column == "images_per_second":
            return float(answer[f"{column}{end}"])
        return 1 / float(answer[f"{column}{other}"])

    rates = table.rates(gpus)
    return Point(
        table.entry.name,
        table.entry.repository,
        unit,
        gpus,
        answer["label"],
        float(np.median(rates)),
        rates[0],
        {OURS: rate("", ""), **by_peers(table, gpus)},
        rate("_low", "_high"),
        rate("_high", "_low"),
        rate("_mean_low", "_mean_high"),
        rate("_mean_high", "_mean_low"),
    )


def by_peers(table: Table, gpus: int) -> dict[str, float]:
    """The rate that each peer predicts from the fitted rows.

    With two counts USL gives way to Amdahl, with one all do to the constant step, as their users would have it.
    Ernest's fit takes no more terms than it needs.
    """
    fitted = [(count, rate) for count in sorted(set(table.entry.fit)) for rate in table.rates(count)]
    counts, rates = (np.array(column, dtype=float) for column in zip(*fitted, strict=True))
    if rate_of(table.rows[0]) == "step_seconds":
        rates = rates * counts  # of a step's images: as many on every rank
    at = np.array([float(gpus)])
    told = {}
    for name, peer, work in PEERS:
        fewest = {CONSTANT: 1, USL: 3}.get(peer, 2)
        able = peer if len(set(counts)) >= fewest else AMDAHL if len(set(counts)) == 2 else CONSTANT
        job = work if able is peer else _fixed_job
        runs, there = (places(n, job(n), job(n) / n) for n in (counts, at))
        seconds = able.ask(able.fit(runs, (job(counts) / rates)[None, :]), there)[0, 0]
        told[name] = float(job(at)[0] / seconds)
    if rate_of(table.rows[0]) == "step_seconds":
        return {name: rate / gpus for name, rate in told.items()}
    return told


def points_of(path: Path) -> list[Point]:
    """What `--out` wrote.

    Raises:
        RequestError: it is none.
    """
    try:
        return [Point(**one) for one in json.loads(path.read_text(encoding="utf-8"))["points"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(
            explain(f"--against {shown(str(path))} cannot be used: {error}", next_step="Give a file that --out wrote")
        ) from None


def _listed(text: str | None) -> list[str]:
    return [one.strip() for one in (text or "").split(",") if one.strip()]


if __name__ == "__main__":
    main()
