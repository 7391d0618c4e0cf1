"""Finds the tables in a document: Markdown, HTML, a list of JSON records, or a CSV file; as texts by row.

Tables in other forms (LaTeX, RST, drawn on a terminal) are not read: `importers.drawn_tables` finds them.
"""

from __future__ import annotations

import csv
import html.parser
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from vitscale.importers.contents import lines
from vitscale.importers.drawn_tables import DRAWN_RULE, DrawnGrid, drawn_tables

_MOST_LINES, _MOST_CHARACTERS = 20_000, 16 << 20
"""How much of a document is searched for tables."""
_MOST_COLUMNS = 1000
_MOST_SPAN = 100
Line = tuple[int, tuple[str, ...]]
"""(Number of the line in the file, cells)."""


@dataclass(frozen=True)
class Grid:
    """One table of a document."""

    title: str
    """Nearest heading above the table; empty: there is none."""
    caption: str
    """The table's own caption, or the last text before it."""
    line: int
    """Number of the line with the names of the columns."""
    head: tuple[str, ...]
    body: tuple[Line, ...]


class Document(NamedTuple):
    """The tables of a document, of its first 20,000 lines."""

    grids: tuple[Grid, ...] = ()
    """Those that can be read, in order; of a longer CSV file none."""
    drawn: tuple[DrawnGrid, ...] = ()
    """Those in forms that are not read, in order."""


def read_document(path: Path) -> Document:
    """Reads the tables of a document; none where it is empty or its first lines are longer than any document's.

    Raises:
        StoreError: the file cannot be read.
    """
    texts, characters = [], 0
    for number, text, _ in islice(lines(path), _MOST_LINES + 1):
        texts.append((number, text))
        characters += len(text)
        if characters > _MOST_CHARACTERS:
            return Document()
    return Document(tuple(_grids(texts)), tuple(drawn_tables(texts)))


def _grids(texts: Sequence[tuple[int, str]]) -> Iterator[Grid]:
    full = [(number, text) for number, text in texts if text.strip()]
    if not full:
        return
    if full[0][1].lstrip().startswith(("[", "{")):
        yield from _of_records([text for _, text in full])
    yield from sorted([*_of_markdown(texts), *_of_html(texts)], key=lambda grid: grid.line)
    if len(texts) <= _MOST_LINES:
        yield from filter(None, (_separated(full, separator) for separator in ",;\t"))


def _separated(texts: Sequence[tuple[int, str]], separator: str) -> Grid | None:
    """The table of a CSV file, all of whose lines have several cells."""
    rows: list[Line] = []
    for number, text in texts:
        try:
            cells = next(csv.reader([text], delimiter=separator), [])
        except csv.Error:
            return None
        if len(cells) < 2 or text.count('"') % 2:  # a cell goes on in the next line
            return None
        rows.append((number, tuple(cell.strip() for cell in cells[:_MOST_COLUMNS])))
    return Grid("", "", *rows[0], tuple(rows[1:]))


def _of_records(texts: Sequence[str]) -> Iterator[Grid]:
    """The table of a JSON list of flat objects, or of one object a line."""
    try:
        read = json.loads("\n".join(texts))
    except (ValueError, RecursionError):
        try:
            read = [json.loads(text) for text in texts if text.strip()]
        except (ValueError, RecursionError):
            return
    if not isinstance(read, list) or not all(isinstance(record, dict) for record in read):
        return
    columns = tuple(dict.fromkeys(name for record in read for name in record))[:_MOST_COLUMNS]
    rows = (
        tuple("" if (value := record.get(column)) is None else _told(value) for column in columns) for record in read
    )
    if columns:
        yield Grid("", "", 1, columns, tuple(enumerate(rows, 1)))


def _told(value: object) -> str:
    return repr(value) if isinstance(value, int | float) else str(value)


_HEADING = re.compile(r"\s{0,3}#{1,6}\s+(.*?)[\s#]*")
_RULE = re.compile(r"(?=[^=-]*[=-])[\s|:+=-]*")
_UNDER_NAMES = re.compile(r"\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)+")
_BAR = re.compile(r"(?<!\\)\|")
_NOTE = re.compile(r"<su[pb]>([^<>]*)</su[pb]>", re.IGNORECASE)
_TAG = re.compile(r"</?[a-z][^<>]*>", re.IGNORECASE)


def _of_markdown(texts: Sequence[tuple[int, str]]) -> Iterator[Grid]:
    """Tables between bars; without outer bars where a rule stands under the names. One with a drawn rule is none."""
    title = caption = ""
    rows: list[Line] = []
    bare = is_drawn = False
    for (number, text), (_, under) in zip([*texts, (0, "")], [*texts[1:], (0, ""), (0, "")], strict=True):
        if DRAWN_RULE.search(text):
            is_drawn = True
            continue
        bare = "|" in text and (bare or (not rows and _UNDER_NAMES.fullmatch(under) is not None))
        if bare or text.lstrip().startswith("|"):
            if not _RULE.fullmatch(text):
                rows.append((number, _between_bars(text)))
            continue
        if rows and not is_drawn:
            yield Grid(title, caption, *rows[0], tuple(rows[1:]))
        if rows:
            rows, caption = [], ""
        is_drawn = False
        if heading := _HEADING.fullmatch(text):
            title, caption = heading[1], ""
        elif text.strip():
            caption = text.strip()


def _between_bars(text: str) -> tuple[str, ...]:
    inner = text.strip().removeprefix("|")
    cells = _BAR.split(inner[:-1] if _BAR.search(inner, len(inner) - 1) else inner)
    return tuple(_marked_up(cell) if "<" in cell or "&" in cell or "\\" in cell else _unmarked(cell) for cell in cells)[
        :_MOST_COLUMNS
    ]


def _unmarked(cell: str) -> str:
    return cell.strip().strip("*`~ ")


def _marked_up(cell: str) -> str:
    """The text of a cell with marks of HTML in it; a raised or lowered text stands in brackets."""
    text = _TAG.sub(" ", _NOTE.sub(r" [\1]", cell.replace("\\|", "|")))
    return _unmarked(" ".join(html.unescape(text).split()))


_HEADINGS = {"h1", "h2", "h3", "h4", "h5", "h6"}
_CELLS = {"td", "th"}


class _Tables(html.parser.HTMLParser):
    """Cells of the tables of a page, those that span others repeated in each. A cell need not be closed."""

    def __init__(self) -> None:
        super().__init__()
        self.grids: list[Grid] = []
        self._title = self._caption = self._text = self._cell = ""
        self._rows: list[tuple[int, set[str], list[str]]] | None = None
        """(Line, kinds of cells, texts) of each row of the table that is read; None: outside one."""
        self._down: dict[int, tuple[int, str]] = {}
        """Column -> (how many more rows have this text in it, the text)."""
        self._spans = (1, 1)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = dict(attrs)
        if tag == "table":
            self._rows, self._caption, self._down, self._cell = [], "", {}, ""
        elif tag in {"tr", *_CELLS}:
            self._end_cell()
        if tag == "tr" and self._rows is not None:
            self._rows.append((self.getpos()[0], set(), []))
        elif tag in _CELLS and self._rows:
            self._cell, self._spans = tag, (_span(told.get("colspan")), _span(told.get("rowspan")))
        if tag in {"caption", *_CELLS, *_HEADINGS}:
            self._text = ""
        elif tag in {"br", "sup", "sub"}:
            self._text += " [" if tag != "br" else " "

    def handle_data(self, data: str) -> None:
        self._text += data

    def handle_endtag(self, tag: str) -> None:
        if tag in {"tr", "table", *_CELLS}:
            self._end_cell()
        if tag in {"sup", "sub"}:
            self._text += "]"
        if tag == "caption":
            self._caption = " ".join(self._text.split())
        elif tag in _HEADINGS:
            self._title = " ".join(self._text.split())
        elif tag == "table":
            self._end_table()

    def _end_cell(self) -> None:
        if not self._cell or not self._rows:
            return
        text = " ".join(self._text.split())
        _, kinds, cells = self._rows[-1]
        self._fill(cells)
        for _ in range(min(self._spans[0], _MOST_COLUMNS - len(cells))):
            if self._spans[1] > 1:
                self._down[len(cells)] = self._spans[1] - 1, text
            cells.append(text)
        self._fill(cells)
        kinds.add(self._cell)
        self._cell = ""

    def _fill(self, cells: list[str]) -> None:
        """Adds what cells above reach down into, up to the next free column."""
        while len(cells) in self._down and len(cells) < _MOST_COLUMNS:
            left, text = self._down.pop(len(cells))
            if left > 1:
                self._down[len(cells)] = left - 1, text
            cells.append(text)

    def _end_table(self) -> None:
        rows, self._rows = [row for row in self._rows or () if row[2]], None
        heads = next((at for at, (_, kinds, _) in enumerate(rows) if kinds != {"th"}), len(rows)) or 1
        if rows:
            head = _joined([cells for _, _, cells in rows[:heads]])[:_MOST_COLUMNS]
            body = tuple((line, tuple(cells[:_MOST_COLUMNS])) for line, _, cells in rows[heads:])
            self.grids.append(Grid(self._title, self._caption, rows[0][0], head, body))


def _span(text: str | None) -> int:
    return min(int(text), _MOST_SPAN) if text and text.isdecimal() and len(text) < 5 and int(text) else 1


def _joined(rows: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Names of columns from rows of names, the lower first: "FP16" under "Images/sec" is "FP16 Images/sec"."""
    width = max(map(len, rows))
    columns = ([row[at] for row in reversed(rows) if at < len(row) and row[at]] for at in range(width))
    return tuple(" ".join(dict.fromkeys(parts)) for parts in columns)


def _of_html(texts: Sequence[tuple[int, str]]) -> list[Grid]:
    if not any("<table" in text.lower() for _, text in texts):
        return []
    parser = _Tables()
    for _, text in texts:
        heading = _HEADING.fullmatch(text)  # of a Markdown file with a table in HTML
        parser.feed((f"<h6>{heading[1]}</h6>" if heading else text) + "\n")
    parser.close()
    return parser.grids
