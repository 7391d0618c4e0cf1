"""A table in columns of text: figures stand on the right and are never broken, words stand on the left and are wrapped.

Columns that do not fit are left out, or go into a further table below.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from rich.cells import cell_len
from rich.text import Text

from vitscale.present.document import Cell, Column, Row, RowGroup, Table, plain
from vitscale.present.units import NO_BREAK_SPACE, UNKNOWN, unbroken

_WIDE_GAP = 2
_NARROW_GAP = 1
"""Blanks between columns."""
_NARROWEST_WORD_COLUMN = 12
"""Width to which a column of words may always be wrapped."""
_WIDEST_LABEL = 24
"""Most columns for the labels of groups, and for the longest word that is never broken."""
_UNLIMITED_WIDTH = 10**6
_STATE_STYLES = {"": "", "failed": "red", "missing": "dim", "baseline": "bold"}
"""State of a cell -> the style of its row."""


@dataclass(frozen=True)
class LaidTable:
    """The lines of a table."""

    head: tuple[Text, ...]
    """Lines above the rows: columns with one value in all rows, the headings, and a rule."""
    rows: tuple[tuple[Text, ...], ...]
    """Lines of each row; a row with wrapped words has several."""


class _ColumnExtent(NamedTuple):
    """Columns of the terminal that the texts of one column of a table take."""

    widest: int
    longest_word: int
    """Width of the longest word, at most `_WIDEST_LABEL`."""


class _WidthBounds(NamedTuple):
    """The least and the most width of a column, or of the labels of the groups."""

    narrowest: int
    """Width for the heading and whole figures; words are wrapped as far as they may be."""
    natural: int
    """Width at which no text is wrapped."""


class _LaidCell(NamedTuple):
    """A cell as lines, and its place in a row."""

    lines: Sequence[str]
    width: int
    on_left: bool
    """Whether its lines stand on the left of that width: words do, figures do not."""


@dataclass(frozen=True)
class _TableWithExtents:
    """A table and the extents of its columns.

    The extents are worked out once, although the widths of columns are worked out each time that a column is left out.
    """

    table: Table

    @cached_property
    def texts(self) -> tuple[tuple[str, ...], ...]:
        """The texts of each column from top to bottom, without those that span several columns."""
        texts: list[list[str]] = [[] for _ in self.table.columns]
        for _, row in self.table.rows:
            start = 0
            for cell in row:
                if cell.spans == 1:
                    texts[start].append(_cell_text(cell))
                start += cell.spans
        return tuple(map(tuple, texts))

    @cached_property
    def extents(self) -> tuple[_ColumnExtent, ...]:
        """The extent of each column."""
        extents = []
        for column_texts in self.texts:
            distinct = set(column_texts)
            extents.append(_ColumnExtent(max(map(cell_len, distinct), default=0), _longest_word(distinct)))
        return tuple(extents)


def table_lines(table: Table, width: int, most_lines: int | None = None) -> tuple[LaidTable, ...]:
    """Return a table in lines within `width`; as several tables, below one another, where one cannot hold all figures.

    A table that is too wide is changed in this order. Words are wrapped, and columns stand closer. Columns without a
    narrow heading are left out, and then those with one value in all rows; such a value is shown once, above. What
    remains is split into several tables, each with the first column. A figure is never wrapped nor shortened.

    Args:
        table: the table.
        width: columns of the terminal.
        most_lines: rows that begin below this many lines of rows are not laid out, although they count for the widths,
            and for the values that are the same in all rows. None: all rows are laid out.
    """
    if not table.columns:
        return ()
    shortened = _without_dispensable(_TableWithExtents(table), width)
    pieces = [_laid_table(piece, width, most_lines) for piece in _split_by_columns(shortened.measured, width)]
    if shortened.constants:
        above = tuple(Text(line) for line in textwrap.wrap(f"in all: {', '.join(shortened.constants)}", width))
        pieces[0] = replace(pieces[0], head=(*above, *pieces[0].head))
    return tuple(pieces)


class _TableAndConstants(NamedTuple):
    """A table without the columns that it can do without."""

    measured: _TableWithExtents
    constants: list[str]
    """Heading and value of each left-out column that has one value in all rows: "engine ddp"."""


def _without_dispensable(measured: _TableWithExtents, width: int) -> _TableAndConstants:
    """Return the table without dispensable columns, of which no more are left out than it takes to fit."""
    constants: list[str] = []
    while not _fits_into(measured, width):
        position = _next_dispensable(measured)
        if position is None:
            break
        if _is_constant(measured, position):
            value = measured.texts[position][0]
            if value not in (UNKNOWN, ""):
                constants.append(f"{plain(measured.table.columns[position].heading)} {value}")
        measured = _without_column(measured, position)
    return _TableAndConstants(measured, constants)


def _next_dispensable(measured: _TableWithExtents) -> int | None:
    """Return the position of the column to leave out next; None where no further column may go.

    Columns go in this order, and of equal ones the last first: columns without a narrow heading that have one value in
    all rows; other columns without a narrow heading; other columns with one value in all rows. The first column stays.
    """
    columns = measured.table.columns
    last_first = range(len(columns) - 1, 0, -1)
    optional = [position for position in last_first if columns[position].narrow is None]
    constant = [position for position in last_first if _is_constant(measured, position)]
    optional_and_constant = [position for position in optional if position in constant]
    candidates = [*optional_and_constant, *optional, *constant]
    return candidates[0] if candidates else None


def _is_constant(measured: _TableWithExtents, position: int) -> bool:
    texts = measured.texts[position]
    return len(texts) > 1 and len(set(texts)) == 1


def _without_column(measured: _TableWithExtents, position: int) -> _TableWithExtents:
    """Return the table without one column."""
    table = measured.table
    columns = (*table.columns[:position], *table.columns[position + 1 :])
    groups = []
    for group in table.groups:
        rows = tuple(_row_without_column(row, position) for row in group.rows)
        groups.append(RowGroup(group.label, rows))
    return _TableWithExtents(replace(table, columns=columns, groups=tuple(groups)))


def _row_without_column(row: Row, position: int) -> Row:
    """Return a row without the cell in that column; a cell that spans it and others spans one fewer."""
    cells: list[Cell] = []
    start = 0
    for cell in row:
        is_in_column = start <= position < start + cell.spans
        if not is_in_column:
            cells.append(cell)
        elif cell.spans > 1:
            cells.append(replace(cell, spans=cell.spans - 1))
        start += cell.spans
    return tuple(cells)


def _split_by_columns(measured: _TableWithExtents, width: int) -> Iterator[_TableWithExtents]:
    """Yield the table where it fits; else several tables, each with the first column and as many others as fit.

    Example: columns 1 to 6 of which four fit are yielded as 1, 2, 3, 4 and as 1, 5, 6.
    """
    remaining = measured
    while not _fits_into(remaining, width) and len(remaining.table.columns) > 2:
        piece = remaining
        while not _fits_into(piece, width) and len(piece.table.columns) > 2:
            piece = _without_column(piece, len(piece.table.columns) - 1)
        yield piece
        for _ in piece.table.columns[1:]:
            remaining = _without_column(remaining, 1)
        has_only_first_column = len(remaining.table.columns) == 1
        if has_only_first_column:
            return
    yield remaining


def _fits_into(measured: _TableWithExtents, width: int, gap: int = _NARROW_GAP) -> bool:
    """Whether the table fits into `width` with all of its columns at their narrowest."""
    return _line_width([bounds.narrowest for bounds in _width_bounds(measured)], gap) <= width


def _line_width(widths: Sequence[int], gap: int) -> int:
    """Return the width of a line of cells of these widths."""
    return sum(widths) + gap * (len(widths) - 1)


def _column_gap(measured: _TableWithExtents, width: int) -> int:
    """Return the widest gap between columns with which no words are wrapped.

    Where words are wrapped with either gap, return the wide one if the columns fit with it, else the narrow one.
    """
    column_count = len(measured.table.columns)
    for gap in (_WIDE_GAP, _NARROW_GAP):
        unwrapped_width = sum(_column_widths(measured, _UNLIMITED_WIDTH, gap)) + gap * column_count
        if unwrapped_width <= width:
            return gap
    return _WIDE_GAP if _fits_into(measured, width, _WIDE_GAP) else _NARROW_GAP


def _has_labels(table: Table) -> bool:
    return any(group.label for group in table.groups)


def _cell_text(cell: Cell) -> str:
    """Return the cell's text with its interval, "4.19 s (4.1 s to 4.3 s)"; control characters are written out."""
    return plain(f"{cell.text} ({cell.bounds})" if cell.bounds else cell.text)


def _heading_lines(column: Column, cells_width: int) -> list[str]:
    """Return the heading in lines no wider than the column's cells, or than its longest word; the unit stands last."""
    words = plain(column.narrow or column.name)
    longest_word = max((cell_len(word) for word in words.split()), default=1)
    wrapper = textwrap.TextWrapper(max(longest_word, cells_width, 1), break_long_words=False, break_on_hyphens=False)
    lines = wrapper.wrap(words)
    if column.unit:
        lines.append(f"({plain(column.unit)})")
    return lines


def _width_bounds(measured: _TableWithExtents) -> list[_WidthBounds]:
    """Return the bounds of the labels, if any, and of each column."""
    table = measured.table
    bounds: list[_WidthBounds] = []
    if _has_labels(table):
        bounds.append(_label_bounds(table))
    for column, extent in zip(table.columns, measured.extents, strict=True):
        heading_width = max(map(cell_len, _heading_lines(column, extent.widest)), default=0)
        natural = max(extent.widest, heading_width)
        if column.words:
            wrapped_width = min(extent.widest, max(_NARROWEST_WORD_COLUMN, extent.longest_word))
            bounds.append(_WidthBounds(max(heading_width, wrapped_width), natural))
        else:
            bounds.append(_WidthBounds(natural, natural))  # figures are never wrapped
    return bounds


def _label_bounds(table: Table) -> _WidthBounds:
    labels = [plain(group.label) for group in table.groups]
    widest = max(map(cell_len, [*labels, plain(table.label)]))
    wrapped = max(_NARROWEST_WORD_COLUMN, _longest_word(labels))
    return _WidthBounds(min(widest, wrapped), min(widest, _WIDEST_LABEL))


def _column_widths(measured: _TableWithExtents, width: int, gap: int) -> list[int]:
    """Return the widths of the labels, if any, and of each column, within `width` where that is possible.

    All get their narrowest width. What is spare goes to the columns from the left, to each as much as it needs.
    """
    bounds = _width_bounds(measured)
    spare_width = width - _line_width([column.narrowest for column in bounds], gap)
    widths = []
    for column in bounds:
        missing_width = column.natural - column.narrowest
        added_width = max(0, min(spare_width, missing_width))
        widths.append(column.narrowest + added_width)
        spare_width -= added_width
    return widths


def _longest_word(texts: Iterable[str]) -> int:
    """Return the width of the longest word, at most `_WIDEST_LABEL`; a number and its unit are one word."""
    longest = 0
    for text in texts:
        longest = max(longest, *map(cell_len, unbroken(text).split(" ")))
    return min(_WIDEST_LABEL, longest)


def _wrapped(text: str, width: int) -> list[str]:
    """Return words in lines; a number stays with its unit."""
    lines = textwrap.wrap(unbroken(text), width, break_on_hyphens=False)
    return [line.replace(NO_BREAK_SPACE, " ") for line in lines]


def _laid_table(measured: _TableWithExtents, width: int, most_lines: int | None) -> LaidTable:
    """Lay out a table as one, whether or not it fits."""
    table = measured.table
    gap = _column_gap(measured, width)
    widths = _column_widths(measured, width, gap)
    rule = "\N{BOX DRAWINGS LIGHT HORIZONTAL}" * _line_width(widths, gap)
    head = (*_laid_headings(measured, widths, gap), Text(rule, "dim"))
    rows = _first_rows(_laid_rows(table, widths, gap), most_lines)
    return LaidTable(head, tuple(rows))


def _laid_headings(measured: _TableWithExtents, widths: Sequence[int], gap: int) -> list[Text]:
    """Return the lines of the headings. A heading of fewer lines than others stands at the bottom, above the rule."""
    table = measured.table
    cells = []
    column_widths = widths
    if _has_labels(table):
        cells.append(_LaidCell(textwrap.wrap(plain(table.label), widths[0]), widths[0], on_left=True))
        column_widths = widths[1:]
    for column, extent, width in zip(table.columns, measured.extents, column_widths, strict=True):
        cells.append(_LaidCell(_heading_lines(column, extent.widest), width, on_left=column.words))
    height = max(len(cell.lines) for cell in cells)
    on_rule = []
    for cell in cells:
        empty_lines = [""] * (height - len(cell.lines))
        on_rule.append(cell._replace(lines=[*empty_lines, *cell.lines]))
    return _side_by_side(on_rule, gap)


def _first_rows(rows: Iterator[tuple[Text, ...]], most_lines: int | None) -> Iterator[tuple[Text, ...]]:
    """Yield rows until they have more than `most_lines` lines together; None: all rows."""
    lines = 0
    for row in rows:
        yield row
        lines += len(row)
        if most_lines is not None and lines > most_lines:
            return


def _laid_rows(table: Table, widths: Sequence[int], gap: int) -> Iterator[tuple[Text, ...]]:
    """Yield the lines of each row, laid out as they are asked for.

    The label of a group stands on the left of its rows, and may have more lines than the group has rows: each row has
    as many lines of the label as it has lines itself, and the last row has all that remain. Example of a label in three
    lines beside two rows:

        deepspeed,   1  4.19 s
        zero_stage   2  2.20 s
        3

    Args:
        table: the table.
        widths: width of the labels, if any, and then of each column.
        gap: blanks between columns.
    """
    has_labels = _has_labels(table)
    column_widths = widths[1:] if has_labels else widths
    for group in table.groups:
        remaining_label = _wrapped(plain(group.label), widths[0]) if has_labels else []
        for row_number, row in enumerate(group.rows, start=1):
            cells = _laid_cells(row, table.columns, column_widths, gap)
            if has_labels:
                is_last_row = row_number == len(group.rows)
                row_height = max(len(cell.lines) for cell in cells)
                row_label = remaining_label if is_last_row else remaining_label[:row_height]
                remaining_label = remaining_label[len(row_label) :]
                cells.insert(0, _LaidCell(row_label, widths[0], on_left=True))
            style = _row_style(row)
            yield tuple(Text(line.plain, style) for line in _side_by_side(cells, gap))


def _laid_cells(row: Row, columns: Sequence[Column], widths: Sequence[int], gap: int) -> list[_LaidCell]:
    """Return the cells of a row; one that spans several columns has their width, and its words stand on the left."""
    cells = []
    start = 0
    for cell in row:
        width = _line_width(widths[start : start + cell.spans], gap)
        on_left = columns[start].words or cell.spans > 1
        lines = _wrapped(_cell_text(cell), width) if on_left else [_cell_text(cell)]
        cells.append(_LaidCell(lines, width, on_left))
        start += cell.spans
    return cells


def _row_style(row: Row) -> str:
    """Return the style of the first cell that has a state."""
    for cell in row:
        if cell.state:
            return _STATE_STYLES[cell.state]
    return ""


def _side_by_side(cells: Sequence[_LaidCell], gap: int) -> list[Text]:
    """Return the lines of cells that stand side by side, without blanks at their ends."""
    height = max((len(cell.lines) for cell in cells), default=0)
    lines = []
    for number in range(height):
        parts = []
        for cell in cells:
            text = cell.lines[number] if number < len(cell.lines) else ""
            room = " " * max(0, cell.width - cell_len(text))
            parts.append(text + room if cell.on_left else room + text)
        lines.append(Text((" " * gap).join(parts).rstrip()))
    return lines
