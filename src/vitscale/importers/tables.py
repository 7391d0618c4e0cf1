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

from vitscale.engines import ENGINES
from vitscale.errors import RequestError, shown
from vitscale.importers import contents
from vitscale.importers.contents import Options, Problems, Setting, precision_of
from vitscale.importers.drawn_tables import DrawnGrid, refusal
from vitscale.importers.grids import read_document
from vitscale.importers.headings import (
    BATCH,
    CELLS_OF,
    OF_A_SETTING,
    OWN,
    RATES,
    SPEEDS,
    Count,
    Heading,
    not_of_training,
)
from vitscale.importers.records import hold, nodes_of
from vitscale.importers.table_forms import Form, forms
from vitscale.present.units import listed
from vitscale.trial.model_cost import counted

_MOST_IN_BATCH = 1_000_000
_MOST_COLUMNS = 1000
_LONGEST_TEXT = 100
_UNTOLD = re.compile(r"[^\w .,:;+/()%-]+")


_STAGE = re.compile(r"(?:zero)?[ -]?(?:stage)?[ -]?([0-3])")


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
    told, apart = precision_of(row["precision"])
    stage = _STAGE.fullmatch(row["zero_stage"].lower())
    return Setting(
        gpus=gpus,
        nodes=nodes,
        micro_batch=micro_batch,
        grad_accum=grad_accum,
        fraction=contents.parse_share(row["fraction"] or "1.0"),
        cluster=text_of(row["cluster"]),
        layout=layout,
        dataset=text_of(row["dataset"]),
        series=text_of(", ".join(filter(None, (row["series"], apart)))),
        engine=next((name for name in ENGINES if name == row["engine"].lower()), text_of(row["engine"])),
        zero_stage=contents.parse_whole(stage[1] if stage else row["zero_stage"], 0, 3) if row["zero_stage"] else None,
        precision=told,
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
        factors = [f"{gpus} GPUs"]
        if micro_batch:
            factors.append(f"{micro_batch} images")
        if grad_accum:
            factors.append(f"{grad_accum} micro-steps")
        raise ValueError(f"global_batch {whole} does not share out over {' x '.join(factors)}")
    return (rest, grad_accum or 1) if micro_batch is None else (micro_batch, grad_accum or rest)


@dataclass(frozen=True, kw_only=True)
class Header(Form):
    """The names of the columns of one table, and its rows where it stands in a document."""

    line: int
    separator: str
    """The sign between the cells of a CSV file, whose rows are read line by line; empty: a table in a document."""
    title: str = ""
    gpus: int | None = None
    """The GPUs of all rows, where no column tells them."""
    drawn: DrawnGrid | None = None
    """The first table of the file that is in a form which is not read, where none that is read has GPUs and a speed."""
    untrained: str = ""
    """The heading or the caption that says that it is not of training."""
    left_out: tuple[str, ...] = ()
    """Sentences on tables of the file that are not taken."""
    commas: tuple[tuple[str, str], ...] = ()
    """(What a comma in a number is, a number with one) of each column (`_with_commas`)."""
    clocks: frozenset[Heading] = frozenset()
    """Columns of which some time is h:mm:ss."""

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
        return self.gpus is not None or self.tells_gpus

    @property
    def tells_gpus(self) -> bool:
        """Whether its columns do."""
        return "gpus" in self.columns or {"nodes", "gpus_per_node"} <= set(self.columns)

    @property
    def unit_lacking(self) -> str:
        """A clause on the first column that would be a speed if it told its unit; empty: there is none."""
        for own in self.headings:
            unit = "(images/s)" if re.search(r"\b(?:throughput|speed)\b", own.text.lower()) else "(s)"
            named = unit != "(s)" or "time" in own.text.lower()
            if own.column not in OWN and named and Heading.of(f"{own.text} {unit}").column in SPEEDS:
                return f"; only the unit of {shown(own.text)} is missing, as in {shown(f'{own.text} {unit}')}"
        return ""

    @property
    def known(self) -> tuple[int, int]:
        """How much it tells, for a comparison."""
        return self.tells, len(OWN.intersection(self.columns))

    def notes(self, known: Collection[str]) -> Iterator[str]:
        """Notes on how columns were understood, and on those that are not among the `known` ones."""
        yield from (*self.left_out, *self.filled)
        told = [own for own in self.headings if own.column]
        if read := [
            f"{shown(own.text)} as {own.column}"
            for own in told
            if own.column in known and own.text.lower() != own.column
        ]:
            yield f"columns are taken by what they say: {listed(read)}"
        if self.series:
            yield f"the table at line {self.line} is taken for the series {shown(self.series)}"
        ignored = [own for own in told if own.column not in known]
        if ignored:
            yield f"columns that mean nothing here are ignored: {listed([text_of(own.text) for own in ignored])}"
        others = [own.text.lower() for own in self.headings if own.column not in known]
        if any(re.fullmatch(rf"(?:train[ _])?{BATCH}", text) for text in others):
            yield "a batch is each GPU's or that of all: name its column micro_batch or global_batch"
        for own, (sign, number) in zip(self.headings, self.commas, strict=False):
            if sign == "points" and "," not in number:
                yield f"points in {shown(own.text)} stand between thousands: {number} is {_as_number(number, sign)}"
            elif sign in _SURE:
                yield f"commas in {shown(own.text)} are decimal ones: {number} is {_as_number(number, sign)}"
            elif sign == "either":
                taken = _as_number(number, sign)
                yield f"commas in {shown(own.text)} may be decimal ones: {number} is taken for {taken}"

    def doubts(self, differ: Sequence[Heading]) -> Iterator[str]:
        """A note on the columns in which rows of one setting differ, where these may be no repeats."""
        if names := [text_of(own.text) for own in differ if not own.of_a_repeat]:
            yield (
                f"rows of one setting that differ in {listed(names)} are taken for its repeats: a column that tells "
                "settings apart is to be named series"
            )


_GROUPS = r"[1-9]\d{0,2}(?:%s\d{3})+"
_THOUSANDS = re.compile(_GROUPS % "," + r"(?:\.\d+)?")
_POINTS = re.compile(_GROUPS % r"\.")
_SPACES = "[ '\u2019\u00a0\u2009\u202f]"
_SPACED = re.compile(_GROUPS % _SPACES + r"(?:[.,]\d+)?")
_COMMA = re.compile(r"\d+(?:\.\d{3})*,\d+")
_SPREAD = re.compile(r"([\d.,]+) ?\(?(?:±|\+/-) ?([\d.,]+)%?\)?")
_BESIDE = re.compile(
    r"(?: ?(?:\[[\w*\u2020\u2021]{1,3}\]|\((?:[\d.,]+ ?[x\u00d7%]|[x\u00d7] ?[\d.,]+)\)"
    r"|[*\u2020\u2021\u00a7\u00b9\u00b2\u00b3]))+$"
)
_KILO = re.compile(r"(\d+(?:\.\d+)?) ?[kK]")
_WITH_UNIT = re.compile(r"([\d.,' \u2019\u00a0\u2009\u202f\u00b1+/-]*\d)( ?[kK]\b)? ?([A-Za-z][A-Za-z/. ]*)")
_WHOLE = {"gpus", "nodes", "gpus_per_node", "micro_batch", "grad_accum", "global_batch"}
_NUMBERS = {*SPEEDS, "fraction", "loss", "accuracy"}
"""Columns of numbers that need not be whole."""
_SURE = ("points", "decimal")
_SECONDS = ("step_seconds", "epoch_seconds")
_ENGLISH = re.compile(r"(?:\d{1,3}(?:,\d{3})*|\d+)\.\d{1,2} ?[x%\u00d7]?|\d{1,3}(?:,\d{3}){2,}")
"""Numbers that nobody writes who has decimal commas."""
_LOOKED_AT = 20_000
"""Rows that decide what a comma in their numbers is."""
_SUMMARIES = {"mean", "avg", "avg.", "average", "median", "std", "stddev", "min", "max", "total", "sum"}
_DIGIT = re.compile(r"\d")
_LAID_OUT = re.compile(r"(\d{1,6}) ?(?:= ?|\()(\d{1,6}) ?[x\u00d7*] ?(\d{1,6})\)?")
_TITLE = re.compile(r"""[^,;\t|{}]*[^,;\t|{}\s]([,;\t])\1*\s*""")
_NOTHING_SAID = Options()
_ABOVE, _MOST_ABOVE = re.compile(r"\s*(?:#|[,;\s]*$|sep=)", re.IGNORECASE), 100


def headers(path: Path, options: Options = _NOTHING_SAID) -> tuple[Header, ...]:
    """The headers of all tables in a file that tell GPU counts and speeds; if none does, of that which comes nearest.

    Args:
        path: a CSV file, or a document: Markdown, HTML, JSON records.
        options: what the user says of the file (`Options.of_file`). With a micro-batch, no column is taken for the
            batch of all GPUs. GPUs are those of all rows, for a table that does not tell them.

    Raises:
        RequestError: the file tells the GPUs that the user says of it.
        StoreError: it cannot be read.
    """
    return tuple(_with_rates_of(head, options.cells) for head in _headers(path, options))


def readable_headers(path: Path, options: Options) -> tuple[Header, ...]:
    """The headers of all tables in a file, as `headers`; for those who read its rows.

    Raises:
        RequestError: as `headers`; or the only table of the file is in a form that is not read.
        StoreError: it cannot be read.
    """
    nearest, *others = headers(path, options)
    if nearest.drawn is not None:
        raise refusal(path, nearest.drawn)
    return (nearest, *others)


def _with_rates_of(head: Header, cells: str | None) -> Header:
    """The header with its rates, where it has one column of them, taken for those that `--cells` names."""
    at = [number for number, column in enumerate(head.columns) if column in RATES]
    if cells not in RATES or len(at) != 1:
        return head
    headings = [replace(own, column=cells) if number in at else own for number, own in enumerate(head.headings)]
    return replace(head, headings=tuple(headings))


def _headers(path: Path, options: Options) -> tuple[Header, ...]:
    nearest = _first(path)
    document = read_document(path)
    tables = [
        Header(
            **vars(form),
            line=grid.line,
            separator="",
            title=grid.title,
            untrained=not_of_training((grid.caption, grid.title)),
        )
        for grid in document.grids
        for form in forms(grid, options.cells, options.micro_batch)
    ]
    if any(head.tells_gpus for head in (nearest, *tables)):
        if options.each_gpus:
            what = f"--gpus has {options.gpus} for {shown(path.name)}, whose table tells its GPUs"
            raise RequestError(what, next_step="Import tables that tell them by themselves, or leave --gpus out")
    elif options.gpus is not None:
        nearest, *tables = (replace(head, gpus=options.gpus) for head in (nearest, *tables))
    measured = [head for head in tables if head.tells == 2]
    if nearest.tells == 2 and all(head.columns == nearest.columns and not head.filled for head in measured):
        # As it stands, line by line: it may be without an end, or too long to be looked at whole.
        return (_with_commas(path, replace(nearest, precision=next((head.precision for head in measured), ""))),)
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
        left_out += [
            f"the table at line {drawn.line} is {drawn.form}: write it as Markdown or CSV" for drawn in document.drawn
        ]
        taken, *others = (_with_commas(path, head) for head in _told_apart(training))
        return (replace(taken, left_out=tuple(f"left out: {why}" for why in left_out)), *others)
    best = max([nearest, *tables], key=lambda head: head.known)
    return (replace(best, drawn=next(iter(document.drawn), None)),)


def _first(path: Path) -> Header:
    """The header of a CSV file: its first line, below blank ones, comments, the line "sep=;" of spreadsheets and a
    title in the first cell. A line break between quotes may stand in it."""
    nearest = title = _header(0, ",", "")
    before = ""
    for (number, text, _), _ in zip(contents.lines(path), range(_MOST_ABOVE), strict=False):
        text = f"{before} {text}".strip(" ")
        if text.count('"') % 2 and not text.startswith("#"):
            before = text
            continue
        if text.lstrip().startswith("|"):
            break  # no CSV file
        separated = [_header(number, separator, text) for separator in ",;\t"]
        nearest = max(separated, key=lambda head: head.known)
        if _TITLE.fullmatch(text) and not title.line:
            title = nearest
        elif not _ABOVE.match(text) or nearest.tells:
            break
    return nearest if nearest.tells == 2 or not title.line else title


def _told_apart(training: Sequence[Header]) -> Iterator[Header]:
    """Tables of one file, each with a series of its own."""
    has_several_tables = len({head.line for head in training}) > 1
    titles = {head.line: head.title for head in training}
    for head in training:
        name = head.title
        if Counter(titles.values())[head.title] > 1:
            name = f"{head.title}, line {head.line}".strip(", ")
        parts = [name, head.series] if has_several_tables else [head.series]
        yield replace(head, series=", ".join(filter(None, parts)))


def _header(number: int, separator: str, text: str) -> Header:
    return Header(Heading.of_all(_cells(text, separator)[:_MOST_COLUMNS]), line=number, separator=separator)


def rows(path: Path, head: Header, required: Sequence[str], problems: Problems) -> Iterator[Row]:
    """The rows of one table that have as many cells as its header.

    A last line without a line break may end within its last value: it counts if that has as many decimals as others.

    Raises:
        RequestError: a required column is missing.
        StoreError: the file cannot be read.
    """
    _check(path, head, required)
    for own in head.headings:
        if own.column == "gpus":  # of a table with a column for each count it has the texts of all
            for name in own.text.split(", "):
                _refuse_unclear_count(path, name)
    columns = head.columns
    told = {"precision": head.precision} if head.precision else {}
    told |= {} if head.tells_gpus or head.gpus is None else {"gpus": str(head.gpus)}
    again = {own: at for own in _WHOLE if len(at := [n for n, column in enumerate(columns) if column == own]) > 1}
    converted = [own for own in head.headings if own.factor != 1.0 or own.inverse]
    signs = [sign for sign, _ in head.commas] or ["" if head.separator != ";" else "none"] * len(columns)
    clocked = [own in head.clocks for own in head.headings]
    phases = [own for own in head.headings if own.tells_phases]
    named: dict[tuple[str, ...], set[str]] = {}
    fewest: int | None = None
    for number, cells, whole in _lines(path, head):
        if head.separator and not _DIGIT.search("".join(cells)) and _heads(cells):
            problems.line(number, "another table begins: it and what follows need a file of their own")
            return
        if len(cells) != len(columns):
            kind = "broken" if whole else "cut-off"
            problems.line(number, f"{len(cells)} cells where the header has {len(columns)}", kind)
        elif not whole and fewest is not None and _decimals(cells[-1]) < fewest:
            problems.line(number, "the file ends within it", "cut-off")
        else:
            decimals = _decimals(cells[-1])
            fewest = decimals if fewest is None else min(fewest, decimals)
            try:
                plain = [*map(_plain, cells, head.headings, signs, clocked)]
                for column, several in again.items():
                    if len({plain[at] for at in several}) > 1:
                        both = " and ".join(f"{plain[at]} in {shown(head.headings[at].text)}" for at in several)
                        raise ValueError(f"{column} is {both}: leave out the wrong column")
                row = dict(zip(columns, plain, strict=True)) | told
            except ValueError as error:
                problems.line(number, str(error))
                continue
            if untrained := not_of_training(row[own.column] for own in phases):
                problems.line(number, f"it is of {untrained}", "untrained")
                continue
            if (why := _of_no_run(row, head.headings, named)) is not None:
                problems.line(number, *why)
                continue
            for counts in ("gpus", "gpus_per_node"):
                _refuse_unclear_count(path, row.get(counts, ""))
                for column, said in _counted(row.get(counts, "")).items():
                    if column == "gpus":
                        row[counts] = said
                    elif counts == "gpus" or column != "nodes":
                        row[column] = row.get(column) or said
            for own in converted:
                row[own.column] = _in_seconds(row[own.column], own)
            if head.series:
                row["series"] = ", ".join(part for part in (head.series, row.get("series")) if part)
            yield Row(number, row)


def _heads(cells: Sequence[str]) -> bool:
    """Whether these cells are the headings of a table of measurements."""
    return Header(Heading.of_all(cells), line=0, separator=",").tells == 2


def _of_no_run(
    row: Mapping[str, str], headings: Sequence[Heading], named: dict[tuple[str, ...], set[str]]
) -> tuple[str, str] | None:
    """(Why a row tells of no run that ended, what such rows are called).

    The first mean of a table follows two runs or more; a run may be called "max".

    Args:
        row: the row.
        headings: those of its table.
        named: cells that tell the GPUs -> the runs of the rows before; `()` where the table has had such a mean.
    """
    if unfinished := [row[own.column] for own in headings if own.is_unfinished(row[own.column])]:
        return f"its run is {unfinished[0].lower()}", "unfinished"
    gpus = tuple([row.get(column, "") for column in ("gpus", "nodes", "gpus_per_node")])
    run, own = row.get("run", "").lower(), named.setdefault(gpus, set())
    if run in _SUMMARIES and own and (len(own - _SUMMARIES) > 1 or () in named):
        named[()] = set()
        return f"{run} of the runs above", "summary"
    own.add(run)
    return None


def _lines(path: Path, head: Header) -> Iterator[tuple[int, Sequence[str], bool]]:
    """(Number, cells, whether the line is whole) for each row."""
    if not head.separator:
        yield from ((number, cells, True) for number, cells in head.body)
        return
    for number, text, whole in contents.lines(path):
        if number > head.line and text.strip():
            yield number, _cells(text, head.separator), whole


def tells_steps(path: Path, head: Header) -> bool:
    """Whether most rows of a table of epochs lack the seconds of one and tell those of a step."""
    epoch, step = (head.columns.index(column) if column in head.columns else None for column in reversed(_SECONDS))
    if epoch is None or step is None:
        return False
    told = [
        bool(cells[step]) > bool(cells[epoch])
        for _, (_, cells, _) in zip(range(_MOST_ABOVE), _lines(path, head), strict=False)
        if len(cells) == len(head.columns)
    ]
    return 2 * sum(told) > len(told)


def _in_seconds(text: str, own: Heading) -> str:
    """A number of another unit in seconds; text that is no number stays as it is and is reported later."""
    try:
        return repr(1 / float(text) if own.inverse else float(text) * own.factor)
    except (ValueError, ZeroDivisionError):
        return text


def _decimals(cell: str) -> int:
    return len(cell.partition(".")[2])


def _cells(text: str, separator: str) -> list[str]:
    """The cells of one line."""
    try:
        return [cell.strip() for cell in next(csv.reader([text], delimiter=separator), [])]
    except csv.Error:
        return []


def _with_commas(path: Path, head: Header) -> Header:
    """The header with what a comma in a number is in each of its columns, as far as its rows tell.

    "decimal": some number has a decimal comma for sure ("0,945", "12,5") and none a decimal point; one such column
    decides for those of its table that may be either. "points": the same, and points stand between thousands
    ("1.400,5", or "1.164" beside "610" between semicolons). "either": "2,855", which may be 2.855. "none": nobody
    knows; "neither": nor of its points. Empty: it stands between thousands, in
    other columns too where figures of the table have a decimal point ("either" would be a doubt about plain English).
    """
    seen: list[dict[str, str]] = [{} for _ in head.columns]
    figures = {own for own in head.headings if own.column in _NUMBERS or own.holds_no(None)}
    english, clocks, first = False, set(), None
    for _, (_, cells, _) in zip(range(_LOOKED_AT), _lines(path, head), strict=False):
        first = first or cells
        for kinds, own, above, cell in zip(seen, head.headings, first, cells, strict=False):
            if own in figures and cell != above:  # a version is no figure, and what never differs may be anything
                english = english or any(map(_ENGLISH.fullmatch, (above, cell)))
            if own.column in _SECONDS and contents.CLOCK.fullmatch(cell):
                clocks.add(own)
            if cell.isdecimal():
                kinds.setdefault("whole", cell)
                if len(cell) == 3:
                    kinds.setdefault("hundreds", cell)
            elif own.column in _NUMBERS and ("," in cell or "." in cell):
                bare = _bare(cell, own)
                for number in match.groups() if (match := _SPREAD.fullmatch(bare)) else (bare,):
                    if _POINTS.fullmatch(number):
                        kinds.setdefault("thousands", number)
                    if (sign := _sign_in(number)) is not None:
                        kinds.setdefault(sign, number)
                        if sign == "either" and number.endswith("0"):
                            kinds.setdefault("round", number)
    for kinds in seen:
        if "padded" in kinds and "either" not in kinds:
            kinds.setdefault("decimal", kinds["padded"])
    order = (*_SURE, "either")
    signs = ["" if "" in kinds else next((sign for sign in order if sign in kinds), "") for kinds in seen]
    if "" not in set().union(*seen) and any(sign in _SURE for sign in signs):
        signs = ["decimal" if sign == "either" else sign for sign in signs]
    elif head.separator == ";":
        signs = [sign if sign in _SURE else "none" for sign in signs]
        if "" not in set().union(*seen):  # no figure of the table has a decimal point for sure
            signs = [_of_points(*each) for each in zip(signs, seen, head.headings, strict=True)]
    else:  # "400" and "3,000" are no decimals of one form
        plain = [english or {"whole", "round"} <= kinds.keys() for kinds in seen]
        signs = ["" if sign == "either" and sure else sign for sign, sure in zip(signs, plain, strict=True)]
    told = [
        kinds.get(sign) or kinds.get("either") or kinds.get("thousands", "")
        for sign, kinds in zip(signs, seen, strict=True)
    ]
    return replace(head, commas=tuple(zip(signs, told, strict=True)), clocks=frozenset(clocks))


def _of_points(sign: str, kinds: Mapping[str, str], own: Heading) -> str:
    """The sign of a column whose points may all stand between thousands: "610" beside "1.164" has no decimals.

    Alone, "1.164" images/s may be either; seconds are taken for what they look like, and losses always.
    """
    if sign != "none" or "thousands" not in kinds or not (own.column in SPEEDS and not own.inverse):
        return sign
    if "hundreds" in kinds and (own.column != "step_seconds" or own.factor < 1):
        return "points"
    return "neither" if own.column.startswith("images") else sign


def _sign_in(number: str) -> str | None:
    """What a comma is to whoever wrote this number, as in `_with_commas`; None: it does not tell."""
    if _COMMA.fullmatch(number):
        if "." in number or _THOUSANDS.fullmatch(number):
            return "points" if "." in number else "either"
        # "75,00" is written with as many decimals as all of its column: beside "9,800" it is a slip, and tells nothing.
        return "padded" if number.endswith("0") and len(number.partition(",")[2]) != 3 else "decimal"
    point = "." in number and not _POINTS.fullmatch(number)
    return "" if point or _THOUSANDS.fullmatch(number) else None


def _plain(cell: str, own: Heading, sign: str, clocked: bool) -> str:
    """A cell as a number without its spread, and without signs between thousands; other text as it is.

    Raises:
        ValueError: it may be two numbers.
    """
    if own.column in _NUMBERS or own.column in _WHOLE:
        cell = _bare(cell, own)
    if own.column in _SECONDS and cell.count(":") == 1:
        if own.factor == 3600:  # a column of hours
            return f"{cell}:00"
        if clocked or own.factor == 60:  # below an hour, as timers print it
            return f"0:{cell}"
    return _as_number(cell, sign)


def _as_number(cell: str, sign: str) -> str:
    if spread := _SPREAD.fullmatch(cell):
        cell = spread[1]
    if sign in _SURE:
        if _POINTS.fullmatch(cell) and sign != "points":
            raise ValueError(f"beside decimal commas {cell} may be {cell.replace('.', '')}")
        if _COMMA.fullmatch(cell) or _POINTS.fullmatch(cell):
            return cell.replace(".", "").replace(",", ".")
    if sign == "neither" and _POINTS.fullmatch(cell):
        raise ValueError(f"{cell} may be {cell.replace('.', '')}: write that, or {cell}0")
    return cell.replace(",", "") if sign not in ("none", "neither") and _THOUSANDS.fullmatch(cell) else cell


@lru_cache(4096)
def _bare(cell: str, own: Heading) -> str:
    """A number without what people write beside it: the mark of a footnote, "~", the multiple of another, a unit that
    is its column's, or any of time, and spaces or apostrophes between thousands. As a rate, "21k" is 21,000."""
    if len(cell) > _LONGEST_TEXT:
        return cell
    text = _BESIDE.sub("", cell.lstrip("~\u2248 "))
    if own.column in _SECONDS and not own.inverse and (seconds := contents.spelled_seconds(text)) is not None:
        return f"{seconds / own.factor!r}"  # in the heading's unit, whatever the cell's is
    if unit := _WITH_UNIT.fullmatch(text):
        kind, _, _ = own.column.partition("_")
        if any(
            replace(Heading.of(said), text="") == replace(own, text="")
            for said in (unit[3], f"{kind} time ({unit[3]})", f"{own.text} ({unit[3]})")
        ):
            text = unit[1] + (unit[2] or "")
    if _SPACED.fullmatch(text):
        text = re.sub(_SPACES, "", text)
    if own.column.startswith("images") and (thousands := _KILO.fullmatch(text)):
        text = f"{1000 * float(thousands[1]):.10g}"
    return text


def _refuse_unclear_count(path: Path, text: str) -> None:
    """Refuses a cell or heading of GPUs with letters after its count that are no GPU's name.

    Raises:
        RequestError: it says what the text may mean, and what to write for each.
    """
    if readings := Count.readings(text) or Count.readings(f"{text} gpus"):
        raise RequestError(
            f"{shown(text)} of {shown(path.name)} does not say how many GPUs there were: {'; or '.join(readings)}",
            next_step="Write the columns in the brackets for the one that is meant",
        )


@lru_cache(1024)
def _counted(cell: str) -> Mapping[str, str]:
    """The columns that a cell of GPUs tells, as "8 (1 node)", "8xA100", "2x8" and "16 (2x8)" do; empty: it is no more
    than a number."""
    if (whole := _LAID_OUT.fullmatch(cell)) and int(whole[1]) == int(whole[2]) * int(whole[3]):
        return {"gpus": whole[1], "nodes": whole[2]}
    readings = (cell, re.sub(r"^(\d+)\b", r"\1 gpus", cell), f"{cell} gpus")
    count = next(filter(None, map(Count.of, readings)), None)
    if cell.isdecimal() or count is None or count.speed is not None:
        return {}
    told = {"gpus": count.gpus, "nodes": count.nodes, "gpu": count.gpu}
    return {column: str(value) for column, value in told.items() if value}


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
    if twice := sorted({column for column in columns if column and columns.count(column) > 1} - _WHOLE):
        both = " and ".join(shown(own.text) for own in head.headings if own.column == twice[0])
        what = f"{shown(path.name)} has the column {shown(twice[0])} twice"
        if both.count(shown(twice[0])) < 2:  # the headings are other words for it
            what = f"{what}: {both}"
        raise RequestError(what, next_step="Leave one of them out")
