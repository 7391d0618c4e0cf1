"""A document as Markdown, for a README, an issue or a pager."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from vitscale.present.document import Block, Bullets, Code, Document, Figure, Finding, Paragraph, Section, Table, plain

_DEEPEST = 6


def to_markdown(document: Document) -> str:
    """The whole document; parts that are folded elsewhere are open here."""
    lines = [f"# {escaped(document.title)}", ""] if document.title else []
    for block in document.blocks:
        lines += _block(block, 2)
    lines += _bullets(map(escaped, document.last))
    return "\n".join(lines).rstrip("\n") + "\n"


def _block(block: Block, depth: int) -> Iterator[str]:
    """The lines of a block, with an empty one at its end."""
    match block:
        case Section():
            yield from (f"{'#' * min(depth, _DEEPEST)} {escaped(block.title)}", "")
            for part in block.blocks:
                yield from _block(part, depth + 1)
        case Paragraph():
            text = escaped(block.text)
            yield from (f"**{text}**" if block.tone in ("strong", "bad") else text, "")
        case Bullets():
            yield from _bullets(map(escaped, block.items))
        case Finding():
            source = f" (Source: {escaped(block.about.source)})" if block.about.source else ""
            key = f" `{_code(block.about.key)}`" if block.about.key else ""
            message, advice = escaped(block.message.rstrip(".")), escaped(block.advice.rstrip("."))
            yield from (f"- {block.severity}: **{escaped(block.kind)}**{key}: {message}. {advice}.{source}", "")
        case Code():
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", "\n".join(block.lines))), default=0))
            yield from (fence, *map(plain, block.lines), fence, "")
        case Table():
            yield from _table(block, depth)
        case Figure():
            yield from (f"{'#' * min(depth, _DEEPEST)} {escaped(block.title)}", "")
            yield from _bullets(map(escaped, block.text))


def _table(table: Table, depth: int) -> Iterator[str]:
    """A line per row; its first cell is the label of its group."""
    grouped = any(group.label for group in table.groups)
    if table.title:
        yield from (f"{'#' * min(depth, _DEEPEST)} {escaped(table.title)}", "")
    headings = [*([table.label] if grouped else []), *(column.heading for column in table.columns)]
    sides = [*([":--"] if grouped else []), *(":--" if column.words else "--:" for column in table.columns)]
    yield _row(map(escaped, headings))
    yield f"|{'|'.join(sides)}|"
    for label, row in table.rows:
        cells = [text for cell in row for text in (escaped(str(cell)), *[""] * (cell.spans - 1))]
        yield _row([*([escaped(label)] if grouped else []), *cells])
    yield ""
    yield from _bullets(map(escaped, table.notes))


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _bullets(items: Iterable[str]) -> Iterator[str]:
    lines = [f"- {item}" for item in items]
    yield from [*lines, ""] if lines else []


def _code(text: str) -> str:
    return plain(text).replace("`", "'").replace("|", "\\|")


def escaped(text: str) -> str:
    """User text in which everything that Markdown or HTML would act on is taken literally."""
    return "".join(f"\\{c}" if c in "\\`*_[]#|~$" else {"<": "&lt;", "&": "&amp;"}.get(c, c) for c in plain(text))
