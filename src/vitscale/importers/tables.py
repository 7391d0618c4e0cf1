"""Rows of tables by column name, each with its line number, and the setting each tells.

A table is a CSV file, with commas, semicolons or tabs, or any in a document that has GPUs and a speed.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from vitscale.errors import RequestError, shown
from vitscale.importers import contents
from vitscale.importers.contents import Options, Problems, Setting, precision
from vitscale.importers.grids import Line, grids
from vitscale.importers.headings import BATCH, CELLS_OF, OF_A_SETTING, OWN, SPEEDS, Heading, not_of_training
from vitscale.importers.records import hold, nodes_of
from vitscale.importers.table_forms import forms
from vitscale.present.units import listed
from vitscale.trial.engines import ENGINES
from vitscale.trial.model_cost import counted

_MOST_IN_BATCH = 1_000_000
_MOST_COLUMNS = 1000
_LONGEST_TEXT = 100
_UNTOLD = re.compile(r"[^\w .,:;+/()-]+")


@dataclass(frozen=True)
class Row:
    """One row; a column that the file lacks gives an empty text."""

    line: int
    cells: Mapping[str, str]

    def __getitem__(self, column: str) -> str:
        return self.cells.get(column, "")


def text_of(text: str) -> str | None:
    """A name, cut to a believable length and plain characters; None where the text is empty."""
    return _UNTOLD.sub("?", text.strip())[:_LONGEST_TEXT] or None


def setting_of(row: Row, options: Options) -> Setting:
    """What a row says of its run's trial. The reader adds the devices.

    Raises:
        ValueError: a number or a name that no run can have, and why.
    """
    return _setting(tuple([row[column] for column in OF_A_SETTING]), options)


@lru_cache(1024)  # a table has many rows of few settings
def _setting(cells: tuple[str, ...], options: Options) -> Setting:
    row = Row(0, dict(zip(OF_A_SETTING, cells, strict=True)))
    layout = text_of(row["layout"])
    gpus, nodes = _counts(row, layout)
    if not hold(gpus, nodes):
        raise ValueError(f"{gpus} GPUs do not share out over {nodes} nodes")
    micro_batch, grad_accum = _batches(row, gpus, options)
    return Setting(
        gpus=gpus,
        nodes=nodes,
        micro_batch=micro_batch,
        grad_accum=grad_accum,
        fraction=contents.parse_share(row["fraction"] or "1.0"),
        cluster=text_of(row["cluster"]),
        layout=layout,
        dataset=text_of(row["dataset"]),
        series=text_of(row["series"]),
        engine=next((name for name in ENGINES if name == row["engine"].lower()), text_of(row["engine"])),
        zero_stage=contents.parse_whole(row["zero_stage"], 0, 3) if row["zero_stage"] else None,
        precision=precision(row["precision"].lower()) if row["precision"] else None,
        model=text_of(row["model"]),
        parameters=counted(row["parameters"]) if row["parameters"] else None,
    )


def _counts(row: Row, layout: str | None) -> tuple[int, int]:
    """(GPUs, nodes); one may follow from the GPUs of a node. Beside both these are what the hardware has, and tell
    nothing."""
    most = contents.MOST_GPUS
    if not row["gpus"] and row["gpus_per_node"]:
        of_node = contents.parse_whole(row["gpus_per_node"], 1, most)
        nodes = contents.parse_whole(row["nodes"], 1, most // of_node)
        return nodes * of_node, nodes
    gpus = contents.parse_whole(row["gpus"], 1, most)
    if row["nodes"]:
        return gpus, contents.parse_whole(row["nodes"], 1, gpus)
    if row["gpus_per_node"] and layout is None:
        return gpus, -(-gpus // contents.parse_whole(row["gpus_per_node"], 1, most))
    return gpus, nodes_of(layout, gpus) or 1


def _batches(row: Row, gpus: int, options: Options) -> tuple[int | None, int]:
    """(images per GPU and micro-step, micro-steps); what the row lacks is worked out from the batch of all GPUs."""
    micro_batch = (
        contents.parse_whole(row["micro_batch"], 1, _MOST_IN_BATCH) if row["micro_batch"] else options.micro_batch
    )
    grad_accum = contents.parse_whole(row["grad_accum"], 1, _MOST_IN_BATCH) if row["grad_accum"] else None
    if not row["global_batch"]:
        return micro_batch, grad_accum or 1
    whole = contents.parse_whole(row["global_batch"], 1, gpus * _MOST_IN_BATCH)
    rest, over = divmod(whole, gpus * (micro_batch or 1) * (grad_accum or 1))
    if over or not rest or (rest > 1 and micro_batch and grad_accum):
        shares = f" x {micro_batch} images" * bool(micro_batch) + f" x {grad_accum} micro-steps" * bool(grad_accum)
        raise ValueError(f"global_batch {whole} does not share out over {gpus} GPUs{shares}")
    return (rest, grad_accum or 1) if micro_batch is None else (micro_batch, grad_accum or rest)


@dataclass(frozen=True)
class Header:
    """The names of the columns of one table, and its rows where it stands in a document."""

    line: int
    separator: str
    """The sign between the cells of a CSV file, whose rows are read line by line; empty: a table in a document."""
    headings: tuple[Heading, ...]
    body: tuple[Line, ...] = ()
    series: str = ""
    """The name that tells this table's rows from those of others in the file."""
    precision: str = ""
    title: str = ""
    untrained: str = ""
    """The heading or the caption that says that it is not of training."""
    filled: tuple[str, ...] = ()
    """Sentences on cells that are taken from rows above."""
    left_out: tuple[str, ...] = ()
    """Sentences on tables of the file that are not taken."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(heading.column for heading in self.headings)

    @property
    def tells(self) -> int:
        """How many of the two columns that a table of measurements needs it has: a GPU count and a speed."""
        return self.counts_gpus + any(speed in self.columns for speed in SPEEDS)

    @property
    def counts_gpus(self) -> bool:
        """Whether rows tell a GPU count, or those of a node and the nodes."""
        return "gpus" in self.columns or {"nodes", "gpus_per_node"} <= set(self.columns)

    @property
    def known(self) -> tuple[int, int]:
        """How much it tells, for a comparison."""
        return self.tells, len(OWN.intersection(self.columns))

    def notes(self, known: Collection[str]) -> Iterator[str]:
        """Notes on how columns were understood, and on those that are not among the `known` ones."""
        yield from (*self.left_out, *self.filled)
        told = [own for own in self.headings if own.column]
        if read := [f"{shown(own.text)} as {own.column}" for own in told if own.text.lower() != own.column]:
            yield f"columns are taken by what they say: {listed(read)}"
        if self.series:
            yield f"the table at line {self.line} is taken for the series {shown(self.series)}"
        ignored = [own for own in told if own.column not in known]
        if ignored:
            yield f"columns that mean nothing here are ignored: {listed([text_of(own.text) for own in ignored])}"
        if any(re.fullmatch(BATCH, own.text.lower()) for own in self.headings if own.column not in known):
            yield "a batch is each GPU's or that of all: name its column micro_batch or global_batch"

    def doubts(self, differ: Sequence[Heading]) -> Iterator[str]:
        """A note on the columns in which rows of one setting differ, where these may be no repeats."""
        if names := [text_of(own.text) for own in differ if not own.of_a_repeat]:
            yield (
                f"rows of one setting that differ in {listed(names)} are taken for its repeats: a column that tells "
                "settings apart is to be named series"
            )


_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_SPREAD = re.compile(r"([\d.,]+) ?(?:±|\+/-) ?[\d.,]+%?")


def headers(path: Path, cells: str | None = None) -> tuple[Header, ...]:
    """The headers of all tables in a file that tell GPU counts and speeds; if none does, of that which comes nearest.

    Args:
        path: a CSV file, or a document: Markdown, HTML, LaTeX, JSON records.
        cells: what the cells of a table are that has a column or row for each GPU count: the name of a speed.

    Raises:
        StoreError: the file cannot be read.
    """
    number, text = next(((number, text) for number, text, _ in contents.lines(path)), (0, ""))
    nearest = Header(0, ",", ())
    if not text.lstrip().startswith("|"):
        separated = [_header(number, separator, text) for separator in ",;\t"]
        nearest = max(separated, key=lambda head: head.known)
    tables = [
        replace(
            Header(grid.line, "", form.headings, form.body, form.series, form.precision, grid.title),
            untrained=not_of_training((grid.caption, grid.title)),
            filled=form.filled,
        )
        for grid in grids(path)
        for form in forms(grid, cells)
    ]
    measured = [head for head in tables if head.tells == 2]
    if nearest.tells == 2 and all(head.columns == nearest.columns and not head.filled for head in measured):
        return (nearest,)  # as it stands, line by line: a file without an end, or too long to be looked at whole
    if measured:
        unclear = [head.line for head in tables if any(column.startswith(CELLS_OF) for column in head.columns)]
        training = [head for head in measured if not head.untrained] or [
            replace(
                head, filled=(*head.filled, f"the table under {shown(head.untrained)} is taken for one of training")
            )
            for head in measured
            if not re.search(r"\b(?:inference|latency)\b", head.untrained.lower())  # papers have a section Evaluation
        ]
        if not training:
            raise RequestError(
                f"the table at line {measured[0].line} of {shown(path.name)} is not of training: "
                f"{shown(measured[0].untrained)}",
                next_step="Name it after its training, if it is of one",
            )
        left_out = [f"the table at line {line} does not say what its cells are (--cells SPEED)" for line in unclear]
        left_out += [
            f"the table at line {head.line} is not of training: {shown(head.untrained)}"
            for head in measured
            if head.untrained and head.line not in {taken.line for taken in training}
        ]
        taken, *others = _told_apart(training)
        return (replace(taken, left_out=tuple(f"left out: {why}" for why in left_out)), *others)
    return (max([nearest, *tables], key=lambda head: head.known),)


def _told_apart(training: Sequence[Header]) -> Iterator[Header]:
    """Tables of one file, each with a series of its own."""
    several = len({head.line for head in training}) > 1
    titles = {head.line: head.title for head in training}
    for head in training:
        own = head.title if Counter(titles.values())[head.title] == 1 else f"{head.title}, line {head.line}".strip(", ")
        yield replace(head, series=", ".join(part for part in (own * several, head.series) if part))


def _header(number: int, separator: str, text: str) -> Header:
    return Header(number, separator, Heading.of_all(_cells(text, separator)[:_MOST_COLUMNS]))


def rows(path: Path, head: Header, required: Sequence[str], problems: Problems) -> Iterator[Row]:
    """The rows of one table that have as many cells as its header.

    A last line without a line break may end within its last value: it counts if that has as many decimals as others.

    Raises:
        RequestError: a required column is missing.
        StoreError: the file cannot be read.
    """
    _check(path, head, required)
    columns = head.columns
    told = {"precision": head.precision} if head.precision else {}
    factors = [(own.column, own.factor) for own in head.headings if own.factor != 1.0]
    fewest: int | None = None
    for number, cells, whole in _lines(path, head):
        if len(cells) != len(columns):
            kind = "broken" if whole else "cut-off"
            problems.line(number, f"{len(cells)} cells where the header has {len(columns)}", kind)
        elif not whole and fewest is not None and _decimals(cells[-1]) < fewest:
            problems.line(number, "the file ends within it", "cut-off")
        else:
            decimals = _decimals(cells[-1])
            fewest = decimals if fewest is None else min(fewest, decimals)
            row = dict(zip(columns, cells, strict=True)) | told
            for column, factor in factors:
                row[column] = _in_seconds(row[column], factor)
            if head.series:
                row["series"] = ", ".join(part for part in (head.series, row.get("series")) if part)
            yield Row(number, row)


def _lines(path: Path, head: Header) -> Iterator[tuple[int, Sequence[str], bool]]:
    """(Number, cells, whether the line is whole) for each row."""
    if not head.separator:
        yield from ((number, [_plain_number(cell) for cell in cells], True) for number, cells in head.body)
        return
    for number, text, whole in contents.lines(path):
        if number > head.line and text.strip():
            yield number, _cells(text, head.separator), whole


def _in_seconds(text: str, factor: float) -> str:
    """A number of another unit in seconds; text that is no number stays as it is and is reported later."""
    try:
        return repr(float(text) * factor)
    except ValueError:
        return text


def _decimals(cell: str) -> int:
    return len(cell.partition(".")[2])


def _cells(text: str, separator: str) -> list[str]:
    """The cells of one line, without commas between thousands. Between semicolons a comma may as well be a decimal
    one."""
    try:
        cells = [cell.strip() for cell in next(csv.reader([text], delimiter=separator), [])]
    except csv.Error:
        return []
    if separator == ";" or (separator == "," and '"' not in text):
        return cells
    return [_plain_number(cell) for cell in cells]


def _plain_number(cell: str) -> str:
    """A number without commas between thousands and without its spread; other text as it is."""
    if spread := _SPREAD.fullmatch(cell):
        cell = spread[1]
    return cell.replace(",", "") if _THOUSANDS.fullmatch(cell) else cell


def _check(path: Path, head: Header, required: Sequence[str]) -> None:
    columns = head.columns
    missing = [column for column in required if column not in columns and not (column == "gpus" and head.counts_gpus)]
    if missing:
        raise RequestError(
            f"{shown(path.name)} lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}; "
            f"its first line is {shown(','.join(columns))}",
            valid=required,
            next_step="Give a CSV file whose first line names its columns, or another --format",
        )
    if twice := sorted({column for column in columns if column and columns.count(column) > 1}):
        both = " and ".join(shown(own.text) for own in head.headings if own.column == twice[0])
        what = f"{shown(path.name)} has the column {shown(twice[0])} twice"
        raise RequestError(what + f": {both}" * (both.count(shown(twice[0])) < 2), next_step="Leave one of them out")
