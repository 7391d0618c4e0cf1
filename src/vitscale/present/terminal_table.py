"""A table in columns of text: figures whole and on the right, words wrapped, and what does not fit shown elsewhere."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from rich.cells import cell_len
from rich.text import Text

from vitscale.present.document import Cell, Column, Row, RowGroup, Table, plain
from vitscale.present.units import KEPT, UNKNOWN, unbroken

_WIDE_GAP, _NARROW_GAP = 2, 1
_LEAST_WORDS = 12
_MOST_LABEL = 24
_STYLES = {"": "", "failed": "red", "missing": "dim", "baseline": "bold"}


@dataclass(frozen=True)
class LaidTable:
    """The lines of a table."""

    head: tuple[Text, ...]
    """Values that are the same in all rows, the headings, and a rule."""
    rows: tuple[tuple[Text, ...], ...]
    """Lines of each row; a row with wrapped words has several."""


class _Extent(NamedTuple):
    """Columns of the terminal that the texts of a table's column take."""

    widest: int
    longest_word: int
    """At most `_MOST_LABEL`."""


@dataclass(frozen=True)
class _Measured:
    """A table and the extent of its texts. Each text is looked at once, however often widths are worked out."""

    table: Table

    @cached_property
    def texts(self) -> tuple[tuple[str, ...], ...]:
        """Texts of each column from top to bottom, without those that span several columns."""
        texts: list[list[str]] = [[] for _ in self.table.columns]
        for _, row in self.table.rows:
            start = 0
            for cell in row:
                if cell.spans == 1:
                    texts[start].append(_text(cell))
                start += cell.spans
        return tuple(map(tuple, texts))

    @cached_property
    def extents(self) -> tuple[_Extent, ...]:
        """The extent of each column."""
        different = map(set, self.texts)
        return tuple(_Extent(max(map(cell_len, texts), default=0), _longest_word(texts)) for texts in different)


def table_lines(table: Table, width: int, most_lines: int | None = None) -> tuple[LaidTable, ...]:
    """A table within `width` columns; several tables, one below the other, where one cannot hold all figures.

    A table that is too wide is changed in this order. Words are wrapped, and columns stand closer. Columns without a
    narrow heading are left out, and then those with one value in all rows; such a value is shown once, above. What
    remains is split into several tables, each with the first column. A figure is never wrapped nor shortened.

    Args:
        table: the table.
        width: columns of the terminal.
        most_lines: rows that begin below this many lines of rows are not laid out. All rows decide the widths, and what
            is the same in all. None: all rows are laid out.
    """
    if not table.columns:
        return ()
    alike: list[str] = []
    measured = _Measured(table)
    while not _fits(measured, width) and (at := _dispensable(measured)) is not None:
        if _constant(measured, at) and (text := measured.texts[at][0]) not in (UNKNOWN, ""):
            alike.append(f"{plain(measured.table.columns[at].heading)} {text}")
        measured = _without(measured, at)
    said = [Text(line) for line in textwrap.wrap(f"in all: {', '.join(alike)}", width)] if alike else []
    pieces = [_laid(piece, width, most_lines) for piece in _split(measured, width)]
    return (LaidTable((*said, *pieces[0].head), pieces[0].rows), *pieces[1:])


def _dispensable(measured: _Measured) -> int | None:
    """The column to leave out next: one without a narrow heading, first where it is constant; then any constant one."""
    columns = measured.table.columns
    places = range(len(columns) - 1, 0, -1)
    optional = [at for at in places if columns[at].narrow is None]
    constant = [at for at in places if _constant(measured, at)]
    return next(iter([*(at for at in optional if at in constant), *optional, *constant]), None)


def _constant(measured: _Measured, at: int) -> bool:
    texts = measured.texts[at]
    return len(texts) > 1 and len(set(texts)) == 1


def _without(measured: _Measured, at: int) -> _Measured:
    """The table without one column; a cell that spans it spans one fewer."""
    table = measured.table

    def cut(row: Row) -> Row:
        cells: list[Cell] = []
        start = 0
        for cell in row:
            covers = start <= at < start + cell.spans
            if not covers or cell.spans > 1:
                cells.append(replace(cell, spans=cell.spans - 1) if covers else cell)
            start += cell.spans
        return tuple(cells)

    groups = tuple(RowGroup(group.label, tuple(map(cut, group.rows))) for group in table.groups)
    return _Measured(replace(table, columns=(*table.columns[:at], *table.columns[at + 1 :]), groups=groups))


def _split(measured: _Measured, width: int) -> Iterator[_Measured]:
    """The table, or several of as many columns as fit, each with the first."""
    while not _fits(measured, width) and len(measured.table.columns) > 2:
        piece = measured
        while not _fits(piece, width) and len(piece.table.columns) > 2:
            piece = _without(piece, len(piece.table.columns) - 1)
        yield piece
        for _ in piece.table.columns[1:]:
            measured = _without(measured, 1)
        if len(measured.table.columns) == 1:
            return
    yield measured


def _fits(measured: _Measured, width: int, gap: int = _NARROW_GAP) -> bool:
    widths = _widths(measured, None, gap)
    return sum(widths) + gap * (len(widths) - 1) <= width


def _gap(measured: _Measured, width: int) -> int:
    """The gap between columns: wide where no word is wrapped for it."""
    gaps = (_WIDE_GAP, _NARROW_GAP)
    columns = len(measured.table.columns)
    whole = [gap for gap in gaps if sum(_widths(measured, 10**6, gap)) + gap * columns <= width]
    return next(iter([*whole, *(gap for gap in gaps if _fits(measured, width, gap))]), _NARROW_GAP)


def _labelled(table: Table) -> bool:
    return any(group.label for group in table.groups)


def _text(cell: Cell) -> str:
    return plain(f"{cell.text} ({cell.bounds})" if cell.bounds else cell.text)


def _heading(column: Column, narrowest: int) -> list[str]:
    """The heading in lines no wider than its figures, where its words allow this; the unit on a line of its own."""
    words = plain(column.narrow or column.name)
    longest = max((cell_len(word) for word in words.split()), default=1)
    wrapper = textwrap.TextWrapper(max(longest, narrowest, 1), break_long_words=False, break_on_hyphens=False)
    return [*wrapper.wrap(words), *([f"({plain(column.unit)})"] if column.unit else [])]


def _widths(measured: _Measured, width: int | None, gap: int) -> list[int]:
    """Widths of the labels, if any, and of each column; words get what figures leave of `width`, or the least."""
    table = measured.table
    labels = [plain(group.label) for group in table.groups] if _labelled(table) else []
    bounds: list[tuple[int, int]] = []
    if labels:
        natural = max(map(cell_len, [*labels, plain(table.label)]))
        bounds.append((min(natural, max(_LEAST_WORDS, _longest_word(labels))), min(natural, _MOST_LABEL)))
    for column, extent in zip(table.columns, measured.extents, strict=True):
        heading = max(map(cell_len, _heading(column, extent.widest)), default=0)
        natural = max(extent.widest, heading)
        words = max(heading, min(extent.widest, max(_LEAST_WORDS, extent.longest_word)))
        narrowest = words if column.words else natural
        bounds.append((narrowest, natural))
    if width is None:
        return [narrowest for narrowest, _ in bounds]
    spare = width - sum(narrowest for narrowest, _ in bounds) - gap * (len(bounds) - 1)
    widths = []
    for narrowest, natural in bounds:
        more = max(0, min(spare, natural - narrowest))
        widths.append(narrowest + more)
        spare -= more
    return widths


def _longest_word(texts: Iterable[str]) -> int:
    return min(_MOST_LABEL, max((cell_len(word) for text in texts for word in unbroken(text).split(" ")), default=0))


def _wrapped(text: str, width: int) -> list[str]:
    """Words in lines; a number stays with its unit."""
    lines = textwrap.wrap(unbroken(text), width, break_on_hyphens=False)
    return [line.replace(KEPT, " ") for line in lines]


def _laid(measured: _Measured, width: int, most_lines: int | None) -> LaidTable:
    table = measured.table
    gap = _gap(measured, width)
    widths = _widths(measured, width, gap)
    labelled = _labelled(table)
    sides = [*([True] if labelled else []), *(column.words for column in table.columns)]
    texts = [[*textwrap.wrap(plain(table.label), widths[0])]] if labelled else []
    texts += [_heading(column, extent.widest) for column, extent in zip(table.columns, measured.extents, strict=True)]
    head = _physical([list(lines) for lines in texts], widths, sides, gap, bottom=True)
    rule = "\N{BOX DRAWINGS LIGHT HORIZONTAL}" * (sum(widths) + gap * (len(widths) - 1))
    rows = _first(_laid_rows(table, widths, sides, gap), most_lines)
    return LaidTable((*head, Text(rule, "dim")), tuple(rows))


def _first(rows: Iterator[tuple[Text, ...]], most_lines: int | None) -> Iterator[tuple[Text, ...]]:
    """The rows until they have more than `most_lines` lines together; None: all rows."""
    lines = 0
    for row in rows:
        yield row
        lines += len(row)
        if most_lines is not None and lines > most_lines:
            return


def _laid_rows(table: Table, widths: Sequence[int], sides: Sequence[bool], gap: int) -> Iterator[tuple[Text, ...]]:
    """The lines of each row, laid out as they are asked for.

    Args:
        table: the table.
        widths: of the labels, if any, and of each column.
        sides: for each of these whether it stands on the left.
        gap: blanks between columns.
    """
    labelled = _labelled(table)
    offset = 1 if labelled else 0
    for group in table.groups:
        label = _wrapped(plain(group.label), widths[0]) if labelled else []
        for n, row in enumerate(group.rows):
            cells: list[list[str]] = [[]] if labelled else []
            sizes, left = [*widths[:offset]], [*sides[:offset]]
            at = offset
            for cell in row:
                span = widths[at : at + cell.spans]
                size = sum(span) + gap * (len(span) - 1)
                as_words = sides[at] or cell.spans > 1
                text = _text(cell)
                cells.append(_wrapped(text, size) if as_words else [text])
                sizes.append(size)
                left.append(as_words)
                at += cell.spans
            if labelled:  # the label goes over the lines of the group's rows; what is left of it under the last
                end = None if n == len(group.rows) - 1 else max(map(len, cells))
                cells[0], label = label[:end], label[end:] if end else []
            style = next((_STYLES[cell.state] for cell in row if cell.state), "")
            yield tuple(Text(line.plain, style) for line in _physical(cells, sizes, left, gap))


def _physical(
    cells: Sequence[Sequence[str]], widths: Sequence[int], left: Sequence[bool], gap: int, bottom: bool = False
) -> list[Text]:
    """The lines on which cells of several lines stand, without blanks at their ends."""
    height = max((len(lines) for lines in cells), default=0)
    laid = []
    for n in range(height):
        parts = []
        for lines, width, words in zip(cells, widths, left, strict=True):
            at = n - (height - len(lines)) if bottom else n
            text = lines[at] if 0 <= at < len(lines) else ""
            room = " " * max(0, width - cell_len(text))
            parts.append(text + room if words else room + text)
        laid.append(Text((" " * gap).join(parts).rstrip()))
    return laid
