"""Rows of a table by column name, each with its line number, and the setting each tells.

A table is a CSV file, with commas, semicolons or tabs, or the first one of a Markdown file that has GPUs and a speed.
Columns go by this program's names, or by others that leave nothing open ("Images/sec", "step time (ms)").
"""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from vitscale.errors import RequestError, shown
from vitscale.importers.contents import MOST_GPUS, Options, Problems, Setting, precision
from vitscale.importers.files import lines, parse_share, parse_whole
from vitscale.importers.trials import hold, nodes_of
from vitscale.present.units import listed
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
_LOOKED_AT = 20_000
"""Lines that are searched for a Markdown table."""
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
    """(images per GPU and micro-step, micro-steps); what the row lacks is worked out from the batch of all GPUs."""
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


@dataclass(frozen=True)
class Heading:
    """The heading of one column."""

    text: str
    """The text in the file."""
    column: str
    """This program's name for the column; else the text in small letters."""
    factor: float = 1.0
    """Factor from the file's unit to seconds."""

    @classmethod
    def of(cls, text: str) -> Heading:
        """The heading that the text of a cell stands for."""
        lower = text.lower()
        if lower in _OWN:
            return cls(text, lower)
        words = _SPACES.sub(" ", lower.strip("*`")).strip()
        column = next((column for column, pattern in _MEANT.items() if pattern.fullmatch(words)), lower)
        units = _UNIT.findall(words) if column in _SECONDS else []
        return cls(text, column, _UNITS[units[-1]] if units else 1.0)


@dataclass(frozen=True)
class Header:
    """The line of a file that names its columns."""

    line: int
    separator: str
    headings: tuple[Heading, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(heading.column for heading in self.headings)

    @property
    def tells(self) -> int:
        """How many of the two columns that a table of measurements needs it has: a GPU count and a speed."""
        return ("gpus" in self.columns) + (not SPEEDS.isdisjoint(self.columns))

    def notes(self, known: Collection[str]) -> Iterator[str]:
        """Notes on how columns were understood, and on those that are not among the `known` ones."""
        told = [own for own in self.headings if own.column]
        if read := [f"{shown(own.text)} as {own.column}" for own in told if own.text.lower() != own.column]:
            yield f"columns are taken by what they say: {listed(read)}"
        ignored = [own for own in told if own.column not in known]
        if ignored:
            yield f"columns that mean nothing here are ignored: {listed([text_of(own.text) for own in ignored])}"
        if any(re.fullmatch(_BATCH, own.column) for own in ignored):
            yield "a batch is each GPU's or that of all: name its column micro_batch or global_batch"


SPEEDS = frozenset({"step_seconds", "epoch_seconds", "images_per_second", "images_per_second_per_gpu"})
"""Columns of which a table of measurements has at least one."""
_SECONDS = ("step_seconds", "epoch_seconds")
_OWN = {*OF_A_SETTING, *SPEEDS, "run", "epoch", "rank", "loss", "accuracy"}
_SPACES = re.compile(r"[\s_]+")
_UNITS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "seconds": 1.0, "min": 60.0, "minutes": 60.0, "h": 3600.0, "hours": 3600.0}
_UNIT = re.compile(rf"\b(?:{'|'.join(_UNITS)})\b")
_COUNT, _BATCH = r"(?:#|no\.?|n|num|number|total)?(?: of)? ?", r"batch(?:[ _-]?sizes?)?"
_PER, _IN = r"(?: ?/ ?| per )", rf"[ \[(,]+{_UNIT.pattern}[\])]?"
_OTHER = r"(?!.*\b(?:std|stddev|min|max|eval|evaluation|val|validation|test|inference)\b)"
_WHICH = r"(?:(?:mean|median|average|avg\.?|train|training) )?"
_RATE = rf"{_OTHER}(?:[\w .,:-]{{1,40}}[ \[(])?[\[(]?(?:images?|imgs?|samples?|sequences?){_PER}s(?:ec(?:ond)?)?"
_MEANT = {
    column: re.compile(pattern)
    for column, pattern in {
        "gpus": rf"{_COUNT}(?:gpus?|ranks|devices|accelerators)|world size|gpu count",
        "nodes": rf"{_COUNT}(?:nodes|hosts|machines|servers)",
        "images_per_second": rf"{_RATE}[\])]?",
        "images_per_second_per_gpu": rf"{_RATE}{_PER}(?:gpu|device)[\])]?",
        **{
            column: rf"{_WHICH}{what}(?: time)?{_IN}|time{_PER}{what}{_IN}|{_UNIT.pattern}{_PER}{what}"
            for column, what in (("step_seconds", "(?:step|iteration|iter|it)"), ("epoch_seconds", "epoch"))
        },
        "micro_batch": rf"(?:per[ -]gpu|local|micro|device)[ -]?{_BATCH}|{_BATCH} ?[\[(]?{_PER}(?:gpu|device)[\])]?",
        "global_batch": rf"(?:global|total)[ -]?{_BATCH}",
    }.items()
}
"""Column -> other names of it, in small letters and with spaces for underscores; none that may mean another column."""
_RULE = re.compile(r"[\s|:-]+")
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_MARKDOWN = "|"


def header(path: Path) -> Header:
    """The header of the first table that tells speeds: in Markdown, or the file's first line. Empty for an empty file.

    Raises:
        StoreError: the file cannot be read.
    """
    nearest = Header(0, ",", ())
    for number, text, _ in islice(lines(path), _LOOKED_AT):
        separators = _MARKDOWN if text.lstrip().startswith(_MARKDOWN) else ",;\t" if number == 1 else ""
        for head in (_header(number, separator, text) for separator in separators):
            known = head.tells, len(_OWN.intersection(head.columns))
            if not nearest.columns or known > (nearest.tells, len(_OWN.intersection(nearest.columns))):
                nearest = head
        if nearest.tells == 2:
            break
    return nearest


def _header(number: int, separator: str, text: str) -> Header:
    return Header(number, separator, tuple(Heading.of(cell) for cell in _cells(text, separator)[:_MOST_COLUMNS]))


def rows(path: Path, head: Header, required: Sequence[str], problems: Problems) -> Iterator[Row]:
    """The rows under the header, one for each line that has as many cells as the header.

    A last line without a line break may end within its last value: it counts if that has as many decimals as others.

    Raises:
        RequestError: a required column is missing.
        StoreError: the file cannot be read.
    """
    _check(path, head, required)
    columns, in_markdown = head.columns, head.separator == _MARKDOWN
    factors = [(own.column, own.factor) for own in head.headings if own.factor != 1.0]
    fewest: int | None = None
    for number, text, whole in lines(path):
        if in_markdown and number > head.line and not text.lstrip().startswith(_MARKDOWN):
            return
        if number <= head.line or not text.strip() or (in_markdown and _RULE.fullmatch(text)):
            continue
        cells = _cells(text, head.separator)
        if len(cells) != len(columns):
            kind = "broken" if whole else "cut-off"
            problems.line(number, f"{len(cells)} cells where the header has {len(columns)}", kind)
        elif not in_markdown and not whole and fewest is not None and _decimals(cells[-1]) < fewest:
            problems.line(number, "the file ends within it", "cut-off")
        else:
            decimals = _decimals(cells[-1])
            fewest = decimals if fewest is None else min(fewest, decimals)
            row = dict(zip(columns, cells, strict=True))
            for column, factor in factors:
                row[column] = _in_seconds(row[column], factor)
            yield Row(number, row)


def _in_seconds(text: str, factor: float) -> str:
    """A number of another unit in seconds; text that is no number stays as it is and is reported later."""
    try:
        return repr(float(text) * factor)
    except ValueError:
        return text


def _decimals(cell: str) -> int:
    return len(cell.partition(".")[2])


def _cells(text: str, separator: str) -> list[str]:
    """The cells of one line, without commas between thousands and without Markdown's marks. Between semicolons a comma
    may as well be a decimal one."""
    if separator == _MARKDOWN:
        stripped = text.strip().removeprefix(_MARKDOWN).removesuffix(_MARKDOWN)
        cells = [cell.strip().strip("*`~ ") for cell in stripped.split(_MARKDOWN)]
    else:
        try:
            cells = [cell.strip() for cell in next(csv.reader([text], delimiter=separator), [])]
        except csv.Error:
            return []
        if separator == ";" or (separator == "," and '"' not in text):
            return cells
    return [cell.replace(",", "") if _THOUSANDS.fullmatch(cell) else cell for cell in cells]


def _check(path: Path, head: Header, required: Sequence[str]) -> None:
    columns = head.columns
    missing = [column for column in required if column not in columns]
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
