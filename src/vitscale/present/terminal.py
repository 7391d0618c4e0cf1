"""A document on a terminal: 80 columns or more, 25 lines unless all are asked for, no number broken across lines."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from vitscale.present import document as doc
from vitscale.present.terminal_table import table_lines
from vitscale.present.units import NO_BREAK_SPACE, counted, listed, unbroken

MOST_LINES = 25
_NARROWEST_WIDTH = 40
"""Columns to which a narrower terminal is laid out all the same."""
_FEWEST_SHOWN_LINES = 3
"""Fewest lines of a block that is cut; one that would have fewer is named instead."""
_SEVERITY_STYLES: dict[doc.Severity, str] = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_TONE_STYLES = {"": "", "strong": "bold", "quiet": "dim", "bad": "red"}
_MOST_NAME_LETTERS = 40
"""Letters of the names of what is left out that still stand on one line of 80 columns."""


@dataclass(frozen=True)
class _Part:
    """The lines of one block, and how they may be shortened.

    The lines are, in this order: `heading_lines` lines of headings, the lines of the units, `note_lines` lines of
    notes, and an empty line. A unit is what is shown or left out as a whole: a row of a table, a finding, a bullet, a
    command.

    Example: a table with its title, two lines of column headings and a rule, two rows of which the second one is
    wrapped into two lines, and a note: heading_lines=4, unit_lines=(1, 2), note_lines=1, and 9 lines in all.
    """

    name: str
    """Name to show where the part is left out."""
    lines: tuple[Text, ...]
    unit_lines: tuple[int, ...] = ()
    """Number of lines of each unit; without units the part is not cut."""
    heading_lines: int = 0
    """Number of lines before the units."""
    note_lines: int = 0
    """Number of lines of notes after the units, which are left out first."""
    unit_names: tuple[str, ...] = ()
    """Name of each unit, to show where it is left out; empty: left-out units are only counted."""
    units_not_laid_out: int = 0
    """Number of further units that have no lines in `lines`, because the part will be cut before them."""

    def without_notes(self) -> _Part:
        """Return the part without the lines of its notes."""
        *lines, empty = self.lines
        return replace(self, lines=(*lines[: -self.note_lines], empty), note_lines=0)

    def titled(self, title: str) -> _Part:
        """Return the part under a heading, which is its name then."""
        lines = (Text(title, "bold"), *self.lines)
        return replace(self, name=title, lines=lines, heading_lines=self.heading_lines + 1)


def redraws(console: Console) -> bool:
    """Whether the console can redraw lines, as for a progress bar. An editor's shell (TERM=dumb) cannot."""
    return console.is_terminal and not console.is_dumb_terminal


def show(console: Console, document: doc.Document, verbose: bool = False, most_lines: int = MOST_LINES) -> None:
    """Print a document at the console's width."""
    for line in lines(document, console.width, verbose, most_lines):
        console.print(line, highlight=False, soft_wrap=True)


def lines(document: doc.Document, width: int = 80, verbose: bool = False, most_lines: int = MOST_LINES) -> list[Text]:
    """Return the lines of a document.

    Args:
        document: the document.
        width: columns; what is neither a sentence nor a table (a path, a command) may be longer and stays whole.
        verbose: show everything; else folded parts are only named.
        most_lines: limit unless verbose; of a longer document the last parts are cut first, and a line says which.
    """
    width = max(width, _NARROWEST_WIDTH)
    title_lines = _styled(_wrapped(document.title, width), "bold") if document.title else []
    end_lines = _end_lines(document, width)
    if verbose:
        all_parts = _parts_of_blocks(document.blocks, width, verbose=True, most_lines=None)
        return _without_trailing([*title_lines, *_part_lines(all_parts), *end_lines])
    parts = list(_parts_of_blocks(document.blocks, width, verbose=False, most_lines=most_lines))
    folded_names = list(_folded_names(document.blocks))
    shortened = _ShortenedDocument(title_lines, parts, end_lines, folded_names, width)
    # The terminal breaks the longest of the end lines by itself, into as many lines more.
    broken_lines = sum(max(0, cell_len(line.plain) - 1) // width for line in end_lines)
    shortened.shorten_to(most_lines - broken_lines)
    return _without_trailing(shortened.lines())


def _end_lines(document: doc.Document, width: int) -> list[Text]:
    """Return the lines at the end of a document; one that begins with a blank is a command, and stays whole."""
    lines_of_text: list[str] = []
    for text in document.last:
        lines_of_text += [doc.plain(text)] if text.startswith(" ") else _wrapped(text, width)
    return _styled(lines_of_text)


class _ShortenedDocument:
    """A document that is shortened until it has few enough lines.

    Its last part is shortened first: the part loses its notes, then its last units. Where too few units would be left,
    the whole part is left out, and a line names it; then the part before it is the last one. The first part, which is
    the answer, is never left out.
    """

    def __init__(
        self,
        title_lines: list[Text],
        parts: list[_Part],
        end_lines: list[Text],
        folded_names: list[str],
        width: int,
    ) -> None:
        """`folded_names`: names of the parts that only --verbose shows."""
        self._title_lines = title_lines
        self._shown_parts = parts
        self._end_lines = end_lines
        self._folded_names = folded_names
        self._width = width
        self._left_out_names: list[str] = []

    def lines(self) -> list[Text]:
        """Return all lines, with one that names the parts that are left out."""
        return [*self._title_lines, *_part_lines(self._shown_parts), *self._left_out_line(), *self._end_lines]

    def shorten_to(self, most_lines: int) -> None:
        """Cut parts until there are at most `most_lines`, or only the first part is left."""
        while self._shown_parts:
            excess_lines = len(self.lines()) - most_lines
            if excess_lines <= 0:
                return
            if not self._shorten_last_part(excess_lines):
                return

    def _shorten_last_part(self, excess_lines: int) -> bool:
        """Cut the last part, or leave it out; return whether more could still be cut."""
        part = self._shown_parts.pop()
        if part.note_lines:
            self._shown_parts.append(part.without_notes())
            self._left_out_names = [*(name for name in self._left_out_names if name != "notes"), "notes"]
            return True
        shortened = _shortened_part(part, excess_lines)
        if shortened is not None:
            self._shown_parts.append(shortened)
            return True
        if self._shown_parts:
            self._left_out_names.insert(0, part.name)
            return True
        # This is the first part, which stays. Where only its first rows were laid out, a line counts the others.
        if part.units_not_laid_out:
            part = _cut_after_units(part, shown_units=len(part.unit_lines))
        self._shown_parts.append(part)
        return False

    def _left_out_line(self) -> list[Text]:
        """Return the line (wrapped) that names what only --verbose shows; none where all is shown."""
        names = dict.fromkeys([*self._left_out_names, *self._folded_names])
        if not names:
            return []
        return _styled(_wrapped(f"More with --verbose: {listed(names, most=6)}.", self._width), "dim")


def _part_lines(parts: Iterable[_Part]) -> Iterator[Text]:
    for part in parts:
        yield from part.lines


def _shortened_part(part: _Part, excess_lines: int) -> _Part | None:
    """Return the part without its last units, with at least that many lines fewer; None where too little is left.

    A line in place of the units says how many they are.
    """
    lines_to_cut = excess_lines + 1  # for the new line
    most_shown_lines = sum(part.unit_lines) - lines_to_cut
    shown_unit_lines = list(part.unit_lines)
    while shown_unit_lines and sum(shown_unit_lines) > most_shown_lines:
        shown_unit_lines.pop()
    if not shown_unit_lines or sum(shown_unit_lines) < _FEWEST_SHOWN_LINES:
        return None
    return _cut_after_units(part, shown_units=len(shown_unit_lines))


def _cut_after_units(part: _Part, shown_units: int) -> _Part:
    """Return the part with its first units alone, and a line such as "... 3 more with --verbose (not-json)"."""
    shown_end = part.heading_lines + sum(part.unit_lines[:shown_units])
    units_end = part.heading_lines + sum(part.unit_lines)
    hidden_names = _first_names(part.unit_names[shown_units:])
    names_in_brackets = f" ({hidden_names})" if hidden_names else ""
    hidden_units = len(part.unit_lines) - shown_units + part.units_not_laid_out
    count_line = Text(f"  ... {hidden_units:,} more with --verbose{names_in_brackets}", "dim")
    lines = (*part.lines[:shown_end], count_line, *part.lines[units_end:])
    return _Part(part.name, lines, heading_lines=part.heading_lines)


def _first_names(names: Sequence[str]) -> str:
    """Return as many of the distinct names as fit on a line: "bucket-memory, not-json, ..."."""
    distinct = list(dict.fromkeys(names))
    shown: list[str] = []
    for name in distinct:
        if len(", ".join([*shown, name])) > _MOST_NAME_LETTERS:
            break
        shown.append(name)
    if shown and len(shown) < len(distinct):
        shown.append("...")
    return ", ".join(shown)


def _folded_names(blocks: Sequence[doc.Block]) -> Iterator[str]:
    """Yield the titles of folded sections and tables, which only --verbose shows."""
    for block in blocks:
        if isinstance(block, doc.Section | doc.Table) and block.folded:
            yield doc.plain(block.title)
        elif isinstance(block, doc.Section):
            yield from _folded_names(block.blocks)


def _parts_of_blocks(
    blocks: Sequence[doc.Block], width: int, *, verbose: bool, most_lines: int | None
) -> Iterator[_Part]:
    """Yield a part for each block that is shown, with an empty line at its end; findings in a row are one part.

    Of a table only so many rows are laid out that it is longer than `most_lines`; None: all.
    """
    for is_finding, neighbours in itertools.groupby(blocks, lambda block: isinstance(block, doc.Finding)):
        if is_finding:
            findings = [block for block in neighbours if isinstance(block, doc.Finding)]
            yield _findings_part(findings, width, verbose=verbose)
        else:
            for block in neighbours:
                yield from _block_parts(block, width, verbose=verbose, most_lines=most_lines)


def _block_parts(block: doc.Block, width: int, *, verbose: bool, most_lines: int | None) -> Iterator[_Part]:
    """Yield the parts of a block that is no finding; none of one that is folded, or has nothing to show."""
    if isinstance(block, doc.Section | doc.Table) and block.folded and not verbose:
        return
    if isinstance(block, doc.Section):
        inner = _parts_of_blocks(block.blocks, width, verbose=verbose, most_lines=most_lines)
        yield from _under_heading(inner, doc.plain(block.title))
    elif isinstance(block, doc.Table):
        yield from _table_parts(block, width, most_lines)
    elif not isinstance(block, doc.Finding):
        part = _simple_part(block, width, verbose=verbose)
        if part.lines:
            yield part


def _under_heading(parts: Iterable[_Part], title: str) -> Iterator[_Part]:
    """Yield the parts of a section, the first one with the section's heading; nothing for a section without parts."""
    for number, part in enumerate(parts):
        without_names = replace(part, unit_names=())  # in a section, findings that are cut are only counted
        yield without_names.titled(title) if number == 0 else without_names


def _table_parts(table: doc.Table, width: int, most_lines: int | None) -> Iterator[_Part]:
    """Yield a part for each piece of a table.

    A table that is too wide for the terminal is laid out as several pieces below one another, each with all rows and
    some of the columns. The first piece has the title, the last one has the notes.

    Args:
        table: the table.
        width: columns of the terminal.
        most_lines: of a longer table only the rows up to that many lines are laid out; None: all.
    """
    pieces = table_lines(table, width, most_lines)
    title = doc.plain(table.title)
    name = title or "a table"
    row_count = sum(len(group.rows) for group in table.groups)
    for number, piece in enumerate(pieces):
        is_first = number == 0
        is_last = number == len(pieces) - 1
        title_lines = [Text(title, "bold")] if is_first and table.title else []
        heading_lines = [*title_lines, *piece.head]
        note_lines = _note_lines(table, width) if is_last else []
        yield _Part(
            name if is_first else f"{name}, continued",
            (*heading_lines, *itertools.chain.from_iterable(piece.rows), *note_lines, Text("")),
            unit_lines=tuple(len(row_lines) for row_lines in piece.rows),
            heading_lines=len(heading_lines),
            note_lines=len(note_lines),
            units_not_laid_out=row_count - len(piece.rows),
        )


def _note_lines(table: doc.Table, width: int) -> list[Text]:
    """Return the lines of the notes below a table."""
    lines: list[Text] = []
    for note in table.notes:
        lines += _styled(_indented(note, width), "dim")
    return lines


def _simple_part(block: doc.Paragraph | doc.Bullets | doc.Code | doc.Figure, width: int, *, verbose: bool) -> _Part:
    """Return the part of a block that is no heading, table or finding; without lines where there is nothing to show."""
    empty = Text("")
    match block:
        case doc.Paragraph():
            texts = _styled(_wrapped(block.text, width), _TONE_STYLES[block.tone])
            return _Part("a note", (*texts, empty))
        case doc.Bullets():
            items = [_styled(_wrapped(item, width, "- ", "  "), _TONE_STYLES[block.tone]) for item in block.items]
            texts = list(itertools.chain.from_iterable(items))
            item_lines = tuple(len(item) for item in items)
            return _Part(counted(len(items), "note"), (*texts, empty) if texts else (), unit_lines=item_lines)
        case doc.Code():
            texts = [Text(f"  {doc.plain(line)}") for line in block.lines]
            return _Part(counted(len(texts), "command"), (*texts, empty), unit_lines=(1,) * len(texts))
        case doc.Figure() if verbose:
            title = doc.plain(block.title)
            texts = [Text(line) for item in block.text for line in _wrapped(item, width, "- ", "  ")]
            return _Part(title, (Text(title, "bold"), *texts, empty))
        case doc.Figure():
            return _Part("", ())


def _findings_part(findings: Sequence[doc.Finding], width: int, *, verbose: bool) -> _Part:
    """Return the part of neighbouring findings; with `verbose` an empty line stands between two."""
    lines_by_finding: list[list[Text]] = []
    for finding in findings:
        finding_lines = _finding_lines(finding, width, with_source=verbose)
        if verbose and finding is not findings[-1]:
            finding_lines.append(Text(""))
        lines_by_finding.append(finding_lines)
    return _Part(
        counted(len(findings), "finding"),
        (*itertools.chain.from_iterable(lines_by_finding), Text("")),
        unit_lines=tuple(len(finding_lines) for finding_lines in lines_by_finding),
        unit_names=tuple(finding.kind for finding in findings),
    )


def _finding_lines(finding: doc.Finding, width: int, *, with_source: bool) -> list[Text]:
    """Return the lines of a finding: severity, kind and key on one; then its message, its advice and its source."""
    head = Text(finding.severity, _SEVERITY_STYLES[finding.severity])
    head.append(f"  {doc.plain(finding.kind)}", "bold")
    if finding.about.key:
        line = f", line {finding.about.line}" if finding.about.line else ""
        head.append(f"  {doc.shown_key(finding.about.key)}{line}", "default")
    finding_lines = [head, *_styled(_indented(f"{finding.message.rstrip('.')}.", width))]
    if finding.advice:
        finding_lines += _styled(_indented(f"Next: {finding.advice.rstrip('.')}.", width))
    if with_source and finding.about.source:
        finding_lines += _styled(_indented(f"Source: {finding.about.source}", width), "dim")
    return finding_lines


def _styled(texts: Iterable[str], style: str = "") -> list[Text]:
    return [Text(text, style) for text in texts]


def _indented(text: str, width: int) -> list[str]:
    return _wrapped(text, width, "  ", "  ")


def _wrapped(text: str, width: int, first: str = "", following: str = "") -> list[str]:
    """Return `text` in lines; a number stays with its unit, and a long path or address stays whole, for the mouse.

    Args:
        text: the text.
        width: columns.
        first: what the first line begins with.
        following: what the other lines begin with.
    """
    wrapper = textwrap.TextWrapper(
        width, initial_indent=first, subsequent_indent=following, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(NO_BREAK_SPACE, " ").rstrip() for line in wrapper.wrap(unbroken(doc.plain(text).strip()))]


def _without_trailing(texts: list[Text]) -> list[Text]:
    while texts and not texts[-1].plain:
        texts.pop()
    return texts
