"""Finds the tables in a document: Markdown, HTML, LaTeX, a list of JSON records, or a CSV file; as texts by row."""

from __future__ import annotations

import csv
import html.parser
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from vitscale.importers.contents import lines

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


def grids(path: Path) -> Iterator[Grid]:
    """Yields the tables of a document in order, of its first 20,000 lines. A longer CSV file yields none.

    Raises:
        StoreError: the file cannot be read.
    """
    texts, characters = [], 0
    for number, text, _ in islice(lines(path), _MOST_LINES + 1):
        texts.append((number, text))
        if (characters := characters + len(text)) > _MOST_CHARACTERS:
            return
    full = [(number, text) for number, text in texts if text.strip()]
    if not full:
        return
    if full[0][1].lstrip().startswith(("[", "{")):
        yield from _of_records([text for _, text in full])
    yield from sorted([*_of_markdown(texts), *_of_html(texts), *_of_latex(texts)], key=lambda grid: grid.line)
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
_BETWEEN = re.compile(r"\s*\+(?:[-=:]+\+)+\s*")
"""A rule of a table as RST and terminals draw it, which ends none."""
_UNDER_NAMES = re.compile(r"\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)+")
_BAR = re.compile(r"(?<!\\)\|")
_NOTE = re.compile(r"<su[pb]>([^<>]*)</su[pb]>", re.IGNORECASE)
_TAG = re.compile(r"</?[a-z][^<>]*>", re.IGNORECASE)


def _of_markdown(texts: Sequence[tuple[int, str]]) -> Iterator[Grid]:
    """Tables between bars, of Markdown and of terminals; without outer bars where a rule stands under the names."""
    title = caption = ""
    rows: list[Line] = []
    bare = False
    for (number, text), (_, under) in zip([*texts, (0, "")], [*texts[1:], (0, ""), (0, "")], strict=True):
        if rows and _BETWEEN.fullmatch(text):
            continue
        bare = "|" in text and (bare or (not rows and _UNDER_NAMES.fullmatch(under) is not None))
        if bare or text.lstrip().startswith("|"):
            if not _RULE.fullmatch(text):
                rows.append((number, _between_bars(text)))
            continue
        if rows:
            yield Grid(title, caption, *rows[0], tuple(rows[1:]))
            rows, caption = [], ""
        if heading := _HEADING.fullmatch(text):
            title, caption = heading[1], ""
        elif text.strip() and not _BETWEEN.fullmatch(text):
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


_COMMAND = re.compile(r"\\(?:textbf|textit|emph|mathbf|text|mathrm|underline|textsc|bf|it|small|centering)\b ?")
_SPANNING = re.compile(
    r"\\multicolumn\{(\d{1,2})\}\{[^{}]*\}"
    r"|\\multirow(?:\[\w\])?\{ ?(-?\d{1,3})?[^{}]*\}(?:\[[^\]]*\])?(?:\{[^{}]*\}|\*)"
)
_RULED = re.compile(r"\\(?:toprule|midrule|bottomrule|hline|c(?:mid|)rule(?:\([^()]*\))?\{[^{}]*\}|cline\{[^{}]*\})")


def _of_latex(texts: Sequence[tuple[int, str]]) -> Iterator[Grid]:
    """Tables of a paper's source: `tabular` and its kin."""
    title = caption = ""
    rows: list[tuple[int, bool, list[str]]] | None = None
    down: dict[int, tuple[int, str]] = {}
    for number, text in texts:
        text = re.sub(r"(?<!\\)%.*", "", text)
        if section := re.search(r"\\(?:sub)*section\*?\{([^{}]*)\}", text):
            title, caption = section[1], ""
        if told := re.search(r"\\caption(?:\[[^\]]*\])?\{(.*)", text):
            caption = _plain(told[1].rstrip("} "))
        if re.search(r"\\begin\{tabular[x*]?\}", text):
            rows, down, text = [], {}, re.sub(r".*\\begin\{tabular[x*]?\}(?:\{[^{}]*\})*", "", text)
        if rows is None:
            continue
        inner, ends, _ = text.partition(r"\end{tabular")
        for part in re.split(r"\\\\(?:\[[^\]]*\])?|\\tabularnewline", inner):
            ruled = bool(re.search(r"\\(?:midrule|hline)", part)) and bool(rows)
            spanned = [cell for spanning in _RULED.sub("", part).split("&") for cell in _repeated(spanning)]
            cells = [text for text, _ in spanned]
            if ruled or any(cells):
                rows.append((number, ruled, cells))
                _fill_rows(rows, [height for _, height in spanned], down)
        if ends:
            if grid := _of_rows(title, caption, rows):
                yield grid
            rows, caption = None, ""


def _of_rows(title: str, caption: str, rows: Sequence[tuple[int, bool, list[str]]]) -> Grid | None:
    """The table of rows as (line, whether a rule stands before it, cells). Rows above the first rule name columns."""
    first = next((at for at, (_, ruled, _) in enumerate(rows) if ruled), 1)
    heads = [cells for _, _, cells in rows[:first] if any(cells)]
    body = tuple((line, tuple(cells[:_MOST_COLUMNS])) for line, _, cells in rows[first:] if any(cells))
    return Grid(title, caption, rows[0][0], _joined(heads)[:_MOST_COLUMNS], body) if heads and body else None


def _repeated(cell: str) -> list[tuple[str, int]]:
    """(Text, rows that it spans) for each column of a cell; below 0: the rows that end with this one."""
    spans = list(_SPANNING.finditer(cell))
    text = _plain(_SPANNING.sub("", cell))
    width = next((int(span[1]) for span in spans if span[1]), 1)
    return [(text, next((int(span[2]) for span in spans if span[2]), 1))] * max(1, width)


def _fill_rows(
    rows: Sequence[tuple[int, bool, list[str]]], heights: Sequence[int], down: dict[int, tuple[int, str]]
) -> None:
    """Fills what cells of several rows cover: in the last row, whose cells span `heights`, and upwards from it.

    `down` maps a column to (how many more rows have this text in it, the text), as of the row before.
    """
    *_, cells = rows[-1]
    for at, height in enumerate(heights):
        left, text = down.pop(at, (0, ""))
        if left and not cells[at]:
            cells[at] = text
            down[at] = left - 1, text
        elif cells[at] and height > 1:
            down[at] = min(height, _MOST_SPAN) - 1, cells[at]
        for *_, above in rows[height:-1] if height < 0 else ():
            if at < len(above) and not above[at]:
                above[at] = cells[at]


def _plain(text: str) -> str:
    """LaTeX text without its commands."""
    text = _COMMAND.sub("", text).replace(r"\pm", "±").replace(r"\times", "x").replace(r"\#", "#").replace(r"\%", "%")
    return " ".join(re.sub(r"[{}$]|\\[,;!]", "", text.replace("~", " ")).replace("\\_", "_").split())
