"""A document as Markdown, for a README, an issue or a pager."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from vitscale.present.document import Block, Bullets, Code, Document, Figure, Finding, Paragraph, Section, Table, plain

_DEEPEST_HEADING = 6


def to_markdown(document: Document) -> str:
    """Return the whole document; parts that are folded elsewhere are open here."""
    lines: list[str] = []
    if document.title:
        lines += _heading_lines(document.title, depth=1)
    for block in document.blocks:
        lines += _block_lines(block, depth=2)
    lines += _bullet_lines(map(escaped, document.last))
    return "\n".join(lines).rstrip("\n") + "\n"


def _block_lines(block: Block, depth: int) -> Iterator[str]:
    """Yield the lines of a block, with an empty one at its end; its headings are of that depth."""
    match block:
        case Section():
            yield from _heading_lines(block.title, depth)
            for part in block.blocks:
                yield from _block_lines(part, depth + 1)
        case Paragraph():
            text = escaped(block.text)
            is_bold = block.tone in ("strong", "bad")
            yield from (f"**{text}**" if is_bold else text, "")
        case Bullets():
            yield from _bullet_lines(map(escaped, block.items))
        case Finding():
            yield from (_finding_line(block), "")
        case Code():
            fence = _fence(block.lines)
            yield from (fence, *map(plain, block.lines), fence, "")
        case Table():
            yield from _table_lines(block, depth)
        case Figure():
            yield from _heading_lines(block.title, depth)
            yield from _bullet_lines(map(escaped, block.text))


def _heading_lines(title: str, depth: int) -> Iterator[str]:
    yield f"{'#' * min(depth, _DEEPEST_HEADING)} {escaped(title)}"
    yield ""


def _finding_line(finding: Finding) -> str:
    """ "- warning: **slow-rank** `zero.stage`: Rank 3 is slow. Mend it. (Source: a page)"."""
    key = f" `{_inline_code(finding.about.key)}`" if finding.about.key else ""
    message = escaped(finding.message.rstrip("."))
    advice = escaped(finding.advice.rstrip("."))
    source = f" (Source: {escaped(finding.about.source)})" if finding.about.source else ""
    return f"- {finding.severity}: **{escaped(finding.kind)}**{key}: {message}. {advice}.{source}"


def _fence(lines: Iterable[str]) -> str:
    """Return backquotes, one more than stand in a row anywhere in `lines`, and at least three."""
    rows = re.findall("`+", "\n".join(lines))
    return "`" * max(3, 1 + max(map(len, rows), default=0))


def _table_lines(table: Table, depth: int) -> Iterator[str]:
    """Yield a line per row; its first cell is the label of its group, where the table has groups."""
    is_grouped = any(group.label for group in table.groups)
    headings = [column.heading for column in table.columns]
    alignments = [":--" if column.words else "--:" for column in table.columns]
    if table.title:
        yield from _heading_lines(table.title, depth)
    if is_grouped:
        headings.insert(0, table.label)
        alignments.insert(0, ":--")
    yield _row_line(map(escaped, headings))
    yield f"|{'|'.join(alignments)}|"
    for label, row in table.rows:
        texts = [escaped(label)] if is_grouped else []
        for cell in row:
            further_columns = [""] * (cell.spans - 1)
            texts += [escaped(str(cell)), *further_columns]
        yield _row_line(texts)
    yield ""
    yield from _bullet_lines(map(escaped, table.notes))


def _row_line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _bullet_lines(items: Iterable[str]) -> Iterator[str]:
    """Yield a list and an empty line; nothing of no items."""
    lines = [f"- {item}" for item in items]
    if lines:
        yield from (*lines, "")


def _inline_code(text: str) -> str:
    return plain(text).replace("`", "'").replace("|", "\\|")


_BACKSLASHED = frozenset("\\`*_[]#|~$")
_ENTITIES = {"<": "&lt;", "&": "&amp;"}


def escaped(text: str) -> str:
    """Return user text in which everything that Markdown or HTML would act on is taken literally."""
    return "".join(map(_escaped_character, plain(text)))


def _escaped_character(character: str) -> str:
    if character in _BACKSLASHED:
        return f"\\{character}"
    return _ENTITIES.get(character, character)
