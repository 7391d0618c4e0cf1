"""A document on a terminal: 80 columns or more, 25 lines unless all are asked for, no number broken across lines."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from vitscale.present import document as doc
from vitscale.present.terminal_table import table_lines
from vitscale.present.units import KEPT, counted, listed, unbroken

MOST_LINES = 25
_NARROWEST = 40
_FEWEST = 3
"""Fewest lines of a block that is cut; one that would have fewer is named instead."""
_SEVERITY_STYLES: dict[doc.Severity, str] = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_TONES = {"": "", "strong": "bold", "quiet": "dim", "bad": "red"}


_LONGEST_NAMES = 40
"""Letters of the names of what is left out that still stand on one line of 80 columns."""


@dataclass(frozen=True)
class _Part:
    """The lines of one block, and how they may be shortened."""

    name: str
    """Name to show where it is left out."""
    lines: tuple[Text, ...]
    units: tuple[int, ...] = ()
    """Numbers of lines of the things in it that stand or go as a whole, in order; empty: the block is not cut."""
    before: int = 0
    """Number of lines before those: a heading."""
    notes: int = 0
    """Number of lines after those, before the empty one: the first to go."""
    unit_names: tuple[str, ...] = ()
    """What to call each of `units` where it is left out; empty: they are only counted."""
    more: int = 0
    """Number of further things that are not in `lines`: those before them are too many already, so it is cut."""


def redraws(console: Console) -> bool:
    """Whether what moves can be shown. In an editor's shell (TERM=dumb) no cursor moves, and rich shows nothing."""
    return console.is_terminal and not console.is_dumb_terminal


def show(console: Console, document: doc.Document, verbose: bool = False, most_lines: int = MOST_LINES) -> None:
    """Prints a document at the console's width."""
    for line in lines(document, console.width, verbose, most_lines):
        console.print(line, highlight=False, soft_wrap=True)


def lines(document: doc.Document, width: int = 80, verbose: bool = False, most_lines: int = MOST_LINES) -> list[Text]:
    """The lines of a document.

    Args:
        document: the document.
        width: columns; what is neither a sentence nor a table (a path, a command) may be longer and stays whole.
        verbose: show everything; else folded parts are only named.
        most_lines: limit unless verbose; of a longer document the last parts are cut first, and a line says which.
    """
    width = max(width, _NARROWEST)
    head = [Text(line, "bold") for line in _wrapped(document.title, width)] if document.title else []
    last = [
        Text(line)
        for text in document.last
        for line in ([doc.plain(text)] if text[:1] == " " else _wrapped(text, width))
    ]
    parts = list(_parts(document.blocks, width, verbose, None if verbose else most_lines))
    if verbose:
        return _without_trailing([*head, *(line for part in parts for line in part.lines), *last])
    folded = [*_folded(document.blocks)]
    # The terminal breaks the longest of the last lines by itself.
    most_lines -= sum(max(0, cell_len(line.plain) - 1) // width for line in last)
    return _without_trailing(_within(head, parts, last, folded, most_lines, width))


def _within(
    head: list[Text], parts: list[_Part], last: list[Text], folded: list[str], most_lines: int, width: int
) -> list[Text]:
    """Everything within `most_lines`: the last parts are cut, then left out and named."""
    left_out: list[str] = []

    def closing() -> list[Text]:
        more = [*left_out, *folded]
        text = f"More with --verbose: {listed(dict.fromkeys(more), most=6)}." if more else ""
        return [Text(line, "dim") for line in _wrapped(text, width)] if more else []

    while parts and (over := _length(head, parts, closing(), last) - most_lines) > 0:
        part = parts.pop()
        if part.notes:
            parts.append(replace(part, lines=(*part.lines[: -part.notes - 1], part.lines[-1]), notes=0))
            left_out = [*(name for name in left_out if name != "notes"), "notes"]
        elif (shortened := _shortened(part, over)) is not None or not parts:
            parts.append(shortened or (_cut(part, len(part.units)) if part.more else part))
            if shortened is None:
                break
        else:
            left_out.insert(0, part.name)
    return [*head, *(line for part in parts for line in part.lines), *closing(), *last]


def _length(head: Sequence[Text], parts: Sequence[_Part], closing: Sequence[Text], last: Sequence[Text]) -> int:
    return len(head) + sum(len(part.lines) for part in parts) + len(closing) + len(last)


def _shortened(part: _Part, over: int) -> _Part | None:
    """The part with at least `over` lines fewer and a line that says so; None where too little would be left."""
    kept = list(part.units)
    while kept and sum(part.units) - sum(kept) < over + 1:
        kept.pop()
    if not kept or sum(kept) < _FEWEST:
        return None
    return _cut(part, len(kept))


def _cut(part: _Part, shown: int) -> _Part:
    """The part with the first `shown` of its units, and a line that says how many more there are."""
    end = part.before + sum(part.units[:shown])
    after = part.lines[part.before + sum(part.units) :]
    names = _first_names(part.unit_names[shown:])
    which = f" ({names})" if names else ""
    more = Text(f"  ... {len(part.units) - shown + part.more:,} more with --verbose{which}", "dim")
    return _Part(part.name, (*part.lines[:end], more, *after), before=part.before)


def _first_names(names: Sequence[str]) -> str:
    """As many different names as stand on a line: "bucket-memory, not-json, ..."."""
    distinct = list(dict.fromkeys(names))
    shown: list[str] = []
    for name in distinct:
        if len(", ".join([*shown, name])) > _LONGEST_NAMES:
            break
        shown.append(name)
    if shown and len(shown) < len(distinct):
        shown.append("...")
    return ", ".join(shown)


def _folded(blocks: Sequence[doc.Block]) -> Iterator[str]:
    """The names of what only --verbose shows."""
    for block in blocks:
        if isinstance(block, doc.Section | doc.Table) and block.folded:
            yield doc.plain(block.title)
        elif isinstance(block, doc.Section):
            yield from _folded(block.blocks)


def _parts(blocks: Sequence[doc.Block], width: int, verbose: bool, most_lines: int | None) -> Iterator[_Part]:
    """One part for each block that is shown, with an empty line at its end; findings in a row are one part.

    Of a table only so many rows are laid out that it is longer than `most_lines`; None: all.
    """
    findings: list[doc.Finding] = []
    for block in [*blocks, None]:
        if isinstance(block, doc.Finding):
            findings.append(block)
            continue
        if findings:
            yield _findings(findings, width, verbose)
            findings = []
        if isinstance(block, doc.Section):
            if block.folded and not verbose:
                continue
            inner = list(_parts(block.blocks, width, verbose, most_lines))
            heading = (Text(doc.plain(block.title), "bold"),)
            for n, part in enumerate(inner):
                titled = heading if n == 0 else ()
                yield _Part(
                    doc.plain(block.title) if n == 0 else part.name,
                    (*titled, *part.lines),
                    part.units,
                    part.before + len(titled),
                    part.notes,
                    more=part.more,
                )
        elif isinstance(block, doc.Table):
            yield from _table(block, width, most_lines) if verbose or not block.folded else ()
        elif block is not None:
            part = _part(block, width, verbose)
            if part.lines:
                yield part


def _table(table: doc.Table, width: int, most_lines: int | None) -> Iterator[_Part]:
    """One part for each of the tables that it takes to hold all figures."""
    title = (Text(doc.plain(table.title), "bold"),) if table.title else ()
    notes = tuple(Text(line, "dim") for note in table.notes for line in _wrapped(note, width, "  ", "  "))
    name = doc.plain(table.title) or "a table"
    laid = table_lines(table, width, most_lines)
    row_count = sum(len(group.rows) for group in table.groups)
    for n, piece in enumerate(laid):
        head = (*(title if n == 0 else ()), *piece.head)
        rows = tuple(line for row in piece.rows for line in row)
        below = (*(notes if n == len(laid) - 1 else ()), Text(""))
        named = name if n == 0 else f"{name}, continued"
        more = row_count - len(piece.rows)
        yield _Part(named, (*head, *rows, *below), tuple(map(len, piece.rows)), len(head), len(below) - 1, more=more)


def _part(block: doc.Paragraph | doc.Bullets | doc.Code | doc.Figure, width: int, verbose: bool) -> _Part:
    empty = Text("")
    match block:
        case doc.Paragraph():
            texts = [Text(line, _TONES[block.tone]) for line in _wrapped(block.text, width)]
            return _Part("a note", (*texts, empty))
        case doc.Bullets():
            items = [_wrapped(item, width, "- ", "  ") for item in block.items]
            texts = [Text(line, _TONES[block.tone]) for item in items for line in item]
            return _Part(
                counted(len(items), "note"), (*texts, empty) if texts else (), tuple(len(item) for item in items)
            )
        case doc.Code():
            texts = [Text(f"  {doc.plain(line)}") for line in block.lines]
            return _Part(counted(len(texts), "command"), (*texts, empty), (1,) * len(texts))
        case doc.Figure() if verbose:
            texts = [Text(line) for item in block.text for line in _wrapped(item, width, "- ", "  ")]
            return _Part(doc.plain(block.title), (Text(doc.plain(block.title), "bold"), *texts, empty))
        case doc.Figure():
            return _Part("", ())


def _findings(findings: Sequence[doc.Finding], width: int, verbose: bool) -> _Part:
    """Severity, kind and key on a line; what is there; what to do; with `verbose` also the source."""
    shown: list[list[Text]] = []
    for finding in findings:
        head = Text(finding.severity, _SEVERITY_STYLES[finding.severity])
        head.append(f"  {doc.plain(finding.kind)}", "bold")
        if finding.about.key:
            line = f", line {finding.about.line}" if finding.about.line else ""
            head.append(f"  {doc.shown_key(finding.about.key)}{line}", "default")
        texts = [f"{finding.message.rstrip('.')}.", f"Next: {finding.advice.rstrip('.')}." if finding.advice else ""]
        lines = [Text(line) for text in texts if text for line in _wrapped(text, width, "  ", "  ")]
        if verbose and finding.about.source:
            lines += [Text(line, "dim") for line in _wrapped(f"Source: {finding.about.source}", width, "  ", "  ")]
        shown.append([head, *lines, *([Text("")] if verbose and finding is not findings[-1] else [])])
    return _Part(
        counted(len(shown), "finding"),
        (*(line for lines in shown for line in lines), Text("")),
        units=tuple(len(lines) for lines in shown),
        unit_names=tuple(finding.kind for finding in findings),
    )


def _wrapped(text: str, width: int, first: str = "", following: str = "") -> list[str]:
    """`text` in lines; a number stays with its unit, and a long path or address stays whole, for the mouse."""
    wrapper = textwrap.TextWrapper(width, initial_indent=first, subsequent_indent=following)
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return [line.replace(KEPT, " ").rstrip() for line in wrapper.wrap(unbroken(doc.plain(text).strip()))]


def _without_trailing(texts: list[Text]) -> list[Text]:
    while texts and not texts[-1].plain:
        texts.pop()
    return texts
