"""Rows of a CSV file by column name, each with its line number, and the setting each tells."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vitscale.errors import RequestError, shown
from vitscale.importers.contents import MOST_GPUS, Options, Problems, Setting, precision
from vitscale.importers.files import lines, parse_share, parse_whole
from vitscale.importers.trials import hold, nodes_of
from vitscale.trial.engines import ENGINES
from vitscale.trial.model_cost import counted

OF_A_SETTING = (
    *("gpus", "nodes", "layout", "micro_batch", "grad_accum", "global_batch", "fraction", "dataset", "cluster", "gpu"),
    *("series", "engine", "zero_stage", "precision", "model", "parameters"),
)
"""Columns that every table may have."""
_MOST_IN_BATCH = 1_000_000
_MOST_COLUMNS = 1000
_LONGEST_TEXT = 100
_UNTOLD = re.compile(r"[^\w .,:;+/()-]+")


@dataclass(frozen=True)
class Row:
    """One row; a column that the file lacks is an empty text."""

    line: int
    cells: Mapping[str, str]

    def __getitem__(self, column: str) -> str:
        return self.cells.get(column, "")


def text_of(text: str) -> str | None:
    """A name of a believable length and characters; None for none."""
    return _UNTOLD.sub("?", text.strip())[:_LONGEST_TEXT] or None


def setting_of(row: Row, options: Options) -> Setting:
    """What a row says of its run's trial; its devices are left to the reader.

    Raises:
        ValueError: a number or a name that no run can have, and why.
    """
    gpus = parse_whole(row["gpus"], 1, MOST_GPUS)
    layout = text_of(row["layout"])
    nodes = parse_whole(row["nodes"], 1, gpus) if row["nodes"] else nodes_of(layout, gpus) or 1
    if not hold(gpus, nodes):
        raise ValueError(f"{gpus} GPUs do not share out over {nodes} nodes")
    micro_batch, grad_accum = _batches(row, gpus, options)
    return Setting(
        gpus=gpus,
        nodes=nodes,
        micro_batch=micro_batch,
        grad_accum=grad_accum,
        fraction=parse_share(row["fraction"] or "1.0"),
        cluster=text_of(row["cluster"]),
        layout=layout,
        dataset=text_of(row["dataset"]),
        series=text_of(row["series"]),
        engine=next((name for name in ENGINES if name == row["engine"].lower()), text_of(row["engine"])),
        zero_stage=parse_whole(row["zero_stage"], 0, 3) if row["zero_stage"] else None,
        precision=precision(row["precision"].lower()) if row["precision"] else None,
        model=text_of(row["model"]),
        parameters=counted(row["parameters"]) if row["parameters"] else None,
    )


def _batches(row: Row, gpus: int, options: Options) -> tuple[int | None, int]:
    """(images per GPU and micro-step, micro-steps), what is not told of them from the batch of all GPUs together."""
    micro_batch = parse_whole(row["micro_batch"], 1, _MOST_IN_BATCH) if row["micro_batch"] else options.micro_batch
    grad_accum = parse_whole(row["grad_accum"], 1, _MOST_IN_BATCH) if row["grad_accum"] else None
    if not row["global_batch"]:
        return micro_batch, grad_accum or 1
    whole = parse_whole(row["global_batch"], 1, gpus * _MOST_IN_BATCH)
    rest, over = divmod(whole, gpus * (micro_batch or 1) * (grad_accum or 1))
    if over or not rest or (rest > 1 and micro_batch and grad_accum):
        shares = f" x {micro_batch} images" * bool(micro_batch) + f" x {grad_accum} micro-steps" * bool(grad_accum)
        raise ValueError(f"global_batch {whole} does not share out over {gpus} GPUs{shares}")
    return (rest, grad_accum or 1) if micro_batch is None else (micro_batch, grad_accum or rest)


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
            f"{shown(path.name)} lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}; "
            f"its first line is {shown(','.join(columns))}",
            valid=required,
            next_step="Give a CSV file whose first line names its columns, or another --format",
        )
    if twice := sorted({column for column in columns if column and columns.count(column) > 1}):
        raise RequestError(f"{shown(path.name)} has the column {shown(twice[0])} twice")
