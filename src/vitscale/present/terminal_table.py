"""A table in columns of text: figures whole and on the right, words wrapped, and what does not fit shown elsewhere."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len
from rich.text import Text

from vitscale.present.document import Cell, Column, Group, Row, Table, plain
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


def table_lines(table: Table, width: int) -> tuple[LaidTable, ...]:
    """A table within `width` columns; several tables, one below the other, where one cannot hold all figures.

    A table that is too wide is changed in this order. Words are wrapped, and columns stand closer. Columns without a
    narrow heading are left out, and then those with one value in all rows; such a value is shown once, above. What
    remains is split into several tables, each with the first column. A figure is never wrapped nor shortened.
    """
    if not table.columns:
        return ()
    alike: list[str] = []
    while not _fits(table, width) and (at := _dispensable(table)) is not None:
        if _constant(table, at) and (text := next(_cells_at(table, at))) not in (UNKNOWN, ""):
            alike.append(f"{plain(table.columns[at].heading)} {text}")
        table = _without(table, at)
    said = [Text(line) for line in textwrap.wrap(f"in all: {', '.join(alike)}", width)] if alike else []
    pieces = [_laid(piece, width) for piece in _split(table, width)]
    return (LaidTable((*said, *pieces[0].head), pieces[0].rows), *pieces[1:])


def _dispensable(table: Table) -> int | None:
    """The column to leave out next: one without a narrow heading, first where it is constant; then any constant one."""
    places = range(len(table.columns) - 1, 0, -1)
    optional = [at for at in places if table.columns[at].narrow is None]
    constant = [at for at in places if _constant(table, at)]
    return next(iter([*(at for at in optional if at in constant), *optional, *constant]), None)


def _constant(table: Table, at: int) -> bool:
    texts = list(_cells_at(table, at))
    return len(texts) > 1 and len(set(texts)) == 1


def _without(table: Table, at: int) -> Table:
    """The table without one column; a cell that spans it spans one fewer."""

    def cut(row: Row) -> Row:
        cells: list[Cell] = []
        start = 0
        for cell in row:
            covers = start <= at < start + cell.spans
            if not covers or cell.spans > 1:
                cells.append(replace(cell, spans=cell.spans - 1) if covers else cell)
            start += cell.spans
        return tuple(cells)

    groups = tuple(Group(group.label, tuple(map(cut, group.rows))) for group in table.groups)
    return replace(table, columns=(*table.columns[:at], *table.columns[at + 1 :]), groups=groups)


def _split(table: Table, width: int) -> Iterator[Table]:
    """The table, or several of as many columns as fit, each with the first."""
    while not _fits(table, width) and len(table.columns) > 2:
        piece = table
        while not _fits(piece, width) and len(piece.columns) > 2:
            piece = _without(piece, len(piece.columns) - 1)
        yield piece
        for _ in piece.columns[1:]:
            table = _without(table, 1)
        if len(table.columns) == 1:
            return
    yield table


def _fits(table: Table, width: int, gap: int = _NARROW_GAP) -> bool:
    widths = _widths(table, None, gap)
    return sum(widths) + gap * (len(widths) - 1) <= width


def _gap(table: Table, width: int) -> int:
    """The gap between columns: wide where no word is wrapped for it."""
    gaps = (_WIDE_GAP, _NARROW_GAP)
    whole = [gap for gap in gaps if sum(_widths(table, 10**6, gap)) + gap * len(table.columns) <= width]
    return next(iter([*whole, *(gap for gap in gaps if _fits(table, width, gap))]), _NARROW_GAP)


def _labelled(table: Table) -> bool:
    return any(group.label for group in table.groups)


def _text(cell: Cell) -> str:
    return plain(f"{cell.text} ({cell.bounds})" if cell.bounds else cell.text)


def _cells_at(table: Table, at: int) -> Iterator[str]:
    """Texts of one column, without those that span several."""
    for _, row in table.rows:
        start = 0
        for cell in row:
            if start == at and cell.spans == 1:
                yield _text(cell)
            start += cell.spans


def _columns(table: Table) -> list[list[str]]:
    """Texts of each column, without those that span several; each cell is looked at once."""
    texts: list[list[str]] = [[] for _ in table.columns]
    for _, row in table.rows:
        start = 0
        for cell in row:
            if cell.spans == 1:
                texts[start].append(_text(cell))
            start += cell.spans
    return texts


def _heading(column: Column, narrowest: int) -> list[str]:
    """The heading in lines no wider than its figures, where its words allow this; the unit on a line of its own."""
    words = plain(column.narrow or column.name)
    longest = max((cell_len(word) for word in words.split()), default=1)
    wrapper = textwrap.TextWrapper(max(longest, narrowest, 1), break_long_words=False, break_on_hyphens=False)
    return [*wrapper.wrap(words), *([f"({plain(column.unit)})"] if column.unit else [])]


def _widths(table: Table, width: int | None, gap: int) -> list[int]:
    """Widths of the labels, if any, and of each column; words get what figures leave of `width`, or the least."""
    labels = [plain(group.label) for group in table.groups] if _labelled(table) else []
    bounds: list[tuple[int, int]] = []
    if labels:
        natural = max(map(cell_len, [*labels, plain(table.label)]))
        bounds.append((min(natural, max(_LEAST_WORDS, _longest_word(labels))), min(natural, _MOST_LABEL)))
    for column, texts in zip(table.columns, _columns(table), strict=True):
        widest = max(map(cell_len, texts), default=0)
        heading = max(map(cell_len, _heading(column, widest)), default=0)
        natural = max(widest, heading)
        narrowest = max(heading, min(widest, max(_LEAST_WORDS, _longest_word(texts)))) if column.words else natural
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


def _longest_word(texts: Sequence[str]) -> int:
    return min(_MOST_LABEL, max((cell_len(word) for text in texts for word in unbroken(text).split(" ")), default=0))


def _wrapped(text: str, width: int) -> list[str]:
    """Words in lines; a number stays with its unit."""
    lines = textwrap.wrap(unbroken(text), width, break_on_hyphens=False)
    return [line.replace(KEPT, " ") for line in lines]


def _laid(table: Table, width: int) -> LaidTable:
    gap = _gap(table, width)
    widths = _widths(table, width, gap)
    labelled = _labelled(table)
    sides = [*([True] if labelled else []), *(column.words for column in table.columns)]
    texts = [[*textwrap.wrap(plain(table.label), widths[0])]] if labelled else []
    offset = len(texts)
    texts += [
        _heading(column, max(map(cell_len, cells), default=0))
        for column, cells in zip(table.columns, _columns(table), strict=True)
    ]
    head = _physical([list(lines) for lines in texts], widths, sides, gap, bottom=True)
    rule = "\N{BOX DRAWINGS LIGHT HORIZONTAL}" * (sum(widths) + gap * (len(widths) - 1))
    rows: list[tuple[Text, ...]] = []
    for group in table.groups:
        label = _wrapped(plain(group.label), widths[0]) if labelled else []
        for n, row in enumerate(group.rows):
            cells: list[list[str]] = [[]] if labelled else []
            sizes, left = widths[:offset], [*sides[:offset]]
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
            rows.append(tuple(Text(line.plain, style) for line in _physical(cells, sizes, left, gap)))
    return LaidTable((*head, Text(rule, "dim")), tuple(rows))


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
