"""Predictions held against scaling tables that others published, beside constant step, Amdahl, USL and Ernest.

    python benchmarks/published_tables.py FOLDER [--out now.json] [--against before.json] [--sources a,b] [--seed 0]
                                          [--untold network,model] [--choose settings.json] [--then weights.json]
                                          [--pairs] [--other-splits] [--write PAGE]

FOLDER holds tables as `vitscale import --format csv` reads them, and an index.json that says of each series: name,
file, fit and held (GPU counts), source (repository: path) and, where known, per_node, network, model, engine and
parameters. The rows of `fit` are imported, those of `held` predicted, by the commands themselves.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gpu_types
import numpy as np
from between_marks import write_between
from choosing import BY, Setting, choose, replaced, settings_of
from paired import OURS, Point, units
from peers.models import AMDAHL, CONSTANT, ERNEST, USL, Peer
from peers.runs import Array, places
from product import Answer, predicted
from published_folder import Table, other_splits, rate_of, read
from pydantic import TypeAdapter
from tables_page import page

from vitscale.errors import RequestError, VitscaleError, shown, unknown

IMPORTED = ("model", "engine", "parameters")
TOLD = ("network", *IMPORTED)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, help="write points and figures as JSON")
    parser.add_argument("--against", type=Path, help="what --out of an earlier version wrote")
    parser.add_argument("--sources", help="only these repositories, separated by commas")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap")
    parser.add_argument("--untold", default="", help=f"of {', '.join(TOLD)}: not told to vitscale")
    parser.add_argument("--write", type=Path, help="a page with the marks `published tables`")
    parser.add_argument("--choose", type=Path, help="settings (choosing.py), chosen by all sources but one")
    parser.add_argument("--pairs", action="store_true", help="series on two GPU types instead: one from the other")
    parser.add_argument("--other-splits", action="store_true", help="splits of the tables that the index has not")
    parser.add_argument("--then", type=Path, help="settings chosen after those alike, by error")
    parser.add_argument("--by", choices=BY, default="score", help="what they are chosen by")
    arguments = parser.parse_args()
    try:
        if arguments.pairs:
            print(gpu_types.told(gpu_types.both_ways(arguments.folder, None)))
            return
        content, text = _run(arguments)
    except VitscaleError as error:
        print(f"published_tables: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if arguments.out:
        arguments.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if arguments.write:
        write_between(arguments.write, "published tables", text)
    print(text)


def _run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """What --out writes, and the page."""
    tables = read(arguments.folder, _listed(arguments.sources))
    tables = other_splits(tables) if arguments.other_splits else tables
    untold = _listed(arguments.untold)
    earlier = points_of(arguments.against) if arguments.against else []
    content: dict[str, Any] = {}
    head: list[str] = []
    if arguments.choose:
        settings = settings_of(arguments.choose)
        by_setting = [_under(setting, tables, untold) for setting in settings]
        points, content["chosen"] = choose([one for one, _ in by_setting], arguments.by)
        earlier, notes = earlier or by_setting[0][0], by_setting[0][1]
        told = {source: [settings[n] or "no change"] for source, n in content["chosen"].items()}
        if arguments.then:
            points, second = chosen_then(
                points, settings, content["chosen"], settings_of(arguments.then), tables, untold
            )
            for source, setting in second.items():
                told[source].append(setting or "no change")
        head = [f"{source}: the others choose {', then '.join(map(str, each))}" for source, each in told.items()]
    else:
        points, notes = evaluate(tables, untold)
    named = {name: getattr(arguments, name) for name in ("sources", "untold", "seed", "against", "choose", "then")}
    words = ["--other-splits"] if arguments.other_splits else []
    words += [f"--{name} {value.name if isinstance(value, Path) else value}" for name, value in named.items() if value]
    text, figures = page(points, earlier, notes, arguments.seed, " ".join([arguments.folder.name, *words]), head)
    return content | {"points": [asdict(point) for point in points], "notes": notes, "figures": figures}, text


def _under(setting: Setting, tables: Sequence[Table], untold: Sequence[str]) -> tuple[list[Point], dict[str, str]]:
    with replaced(setting):
        return evaluate(tables, untold)


def chosen_then(
    points: Sequence[Point],
    settings: Sequence[Setting],
    chosen: Mapping[str, int],
    further: Sequence[Setting],
    tables: Sequence[Table],
    untold: Sequence[str],
) -> tuple[list[Point], dict[str, Setting]]:
    """(each source's points, and by source the further setting), with what its others choose by error once they have
    chosen `settings[chosen[source]]`."""
    found, second = list(points), dict[str, Setting]()
    for n in sorted(set(chosen.values())):
        tried = [_under({**settings[n], **setting}, tables, untold)[0] for setting in further]
        under_n, choice = choose(tried, "error")
        for source in (source for source, setting in chosen.items() if setting == n):
            second[source] = further[choice[source]]
            found = [new if new.source == source else old for new, old in zip(under_n, found, strict=True)]
    return found, second


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
        told = {name: str(value) for name in TOLD if name not in untold and (value := getattr(entry, name))}
        try:
            answers = _answers(table, told)
        except RequestError as error:
            notes[entry.name] = str(error).strip()
            if told.pop("model", None) is None:
                continue
            try:  # of most models here is none by that name
                answers = _answers(table, told)
                notes[entry.name] = f"its model was left untold: {notes[entry.name]}"
            except RequestError:
                continue
        if len(answers) != len(entry.held):
            series = list(dict.fromkeys(answer["series"] for answer in answers))
            notes[entry.name] = (
                f"{len(answers)} answers to {len(entry.held)} counts ({'; '.join(series)}): the last taken"
            )
        by_count = {answer["gpus"]: answer for answer in answers}
        points += [_point(table, unit, gpus, by_count[gpus]) for gpus in entry.held if gpus in by_count]
    return points, notes


def _answers(table: Table, told: Mapping[str, str]) -> list[Answer]:
    entry = table.entry
    imported = [word for name in IMPORTED if name in told for word in (f"--{name}", told[name])]
    asked = ["--network", told["network"]] if "network" in told else []
    asked += ["--nodes-of", str(entry.per_node)] if entry.per_node else []
    return predicted(
        table.at(entry.fit), entry.held, import_options=["--format", "csv", *imported], predict_options=asked
    )


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
        return TypeAdapter(list[Point]).validate_python(json.loads(path.read_text(encoding="utf-8"))["points"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = str(error).partition("\n")[0]
        raise RequestError(
            f"--against {shown(str(path))} cannot be used: {why}", next_step="Give a file that --out wrote"
        ) from None


def _listed(text: str | None) -> list[str]:
    return [one.strip() for one in (text or "").split(",") if one.strip()]


if __name__ == "__main__":
    main()
