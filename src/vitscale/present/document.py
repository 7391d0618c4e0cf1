"""The answer of a verb as plain values, the same for a terminal, Markdown, LaTeX and a page.

The answer comes first; parts that few readers need are `folded`. Texts are sentences without markup.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from vitscale.present.units import UNKNOWN, counted

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""Most severe first. Error: it will not work, or not as requested. Warning: it works, but costs time, memory or
accuracy, or its figures may mislead. Note: worth knowing, although nothing need be wrong."""


@dataclass(frozen=True)
class About:
    """The trials, ranks, hosts or key that a finding concerns; empty: everything that was looked at."""

    trials: tuple[str, ...] = ()
    """Identities of trials."""
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    key: str = ""
    """Dotted key of a configuration, as in the file."""
    line: int | None = None
    """Line of that key in its file, from 1; None: unknown, or it is in no file."""
    source: str = ""
    """Source for looking it up: a file of a release, a page, a paper."""


EVERYTHING = About()


@dataclass(frozen=True)
class Finding:
    """One thing a reader must know, and what to do about it."""

    kind: str
    """A fixed name: too-few-repeats, slow-rank, unknown-key, ..."""
    severity: Severity
    message: str
    advice: str
    about: About = EVERYTHING


def most_severe_first(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the findings by severity; those of one severity keep their order."""
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))


def counts_of(findings: Sequence[Finding]) -> str:
    """Return counts in words, such as "1 error, 2 notes" or "nothing to complain of"."""
    count_by_severity = Counter(finding.severity for finding in findings)
    counts = [counted(count_by_severity[severity], severity) for severity in SEVERITIES if count_by_severity[severity]]
    return ", ".join(counts) if counts else "nothing to complain of"


@dataclass(frozen=True)
class Paragraph:
    """A sentence or more."""

    text: str
    tone: Literal["", "strong", "quiet", "bad"] = ""


@dataclass(frozen=True)
class Bullets:
    """Sentences of equal rank."""

    items: tuple[str, ...]
    tone: Literal["", "bad"] = ""


@dataclass(frozen=True)
class Code:
    """Lines to be copied, such as commands: never wrapped."""

    lines: tuple[str, ...]


@dataclass(frozen=True)
class Column:
    """The heading of a column."""

    name: str
    unit: str = ""
    """Unit of its figures, where each does not carry its own."""
    narrow: str | None = ""
    """The heading where there is little room; empty: `name`; None: the column is among the first to be left out."""
    words: bool = False
    """Whether it holds words, which stand on the left and may be wrapped; figures stand on the right and never are."""

    @property
    def heading(self) -> str:
        """The name and the unit on one line."""
        return f"{self.name} ({self.unit})" if self.unit else self.name


@dataclass(frozen=True)
class Cell:
    """A figure or word as text, with its interval as text where it has one."""

    text: str
    bounds: str = ""
    state: Literal["", "failed", "missing", "baseline"] = ""
    """failed, missing: the text says what became of the trial, instead of a figure."""
    spans: int = 1
    """Number of columns that it takes: an outcome takes those of the figures that are not there."""
    run: str = ""
    """The interval of one future run, where `bounds` is that of the mean."""

    def __str__(self) -> str:
        intervals = "; ".join(interval for interval in (self.bounds, self.run) if interval)
        return f"{self.text} ({intervals})" if intervals else self.text


Row: TypeAlias = tuple[Cell, ...]
"""Cells whose spans add up to the number of columns."""


@dataclass(frozen=True)
class RowGroup:
    """Rows that belong together, such as the trials of one curve."""

    label: str
    """Empty where a table has no groups."""
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Table:
    """Rows in groups, all with the same columns, and notes that stand below them."""

    columns: tuple[Column, ...]
    groups: tuple[RowGroup, ...]
    notes: tuple[str, ...] = ()
    folded: bool = False
    title: str = ""
    """Also the name under which the table is folded."""
    label: str = ""
    """The heading above the groups' labels."""

    @property
    def rows(self) -> Iterator[tuple[str, Row]]:
        """Pairs (label of the group, row), in order."""
        for group in self.groups:
            for row in group.rows:
                yield group.label, row


@dataclass(frozen=True)
class ControlOption:
    """One option of a control: its value in an address, and what a reader sees."""

    value: str
    label: str


@dataclass(frozen=True)
class FigureView:
    """One picture of a figure. The rows of its table are those it draws."""

    name: str
    """Name of its file, without the ending."""
    choices: Mapping[str, ControlOption]
    """Name of a control ("measure") -> its option that shows this view."""
    title: str
    subtitle: str
    spec: Mapping[str, Any] = field(hash=False)
    """Vega-Lite of one plot, without title and theme; `datasets.rows` are the rows of the table."""
    columns: Mapping[str, str] = field(hash=False)
    """Field of a row -> the heading of its column."""
    summary: str
    """Its message, in a sentence or two."""

    def __post_init__(self) -> None:
        if "rows" not in self.spec.get("datasets", {}):
            raise ValueError(f"the spec of view {self.name!r} has no datasets.rows, the rows of its table")

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows that are drawn, in the order of the table."""
        rows: list[dict[str, Any]] = self.spec["datasets"]["rows"]
        return rows

    @property
    def text(self) -> tuple[str, ...]:
        """The rows of the table in words, "2; 4.19 s; ddp"; equal ones once."""
        lines: dict[str, None] = {}
        for row in self.rows:
            values = [str(row[name]) for name in self.columns if row.get(name) not in (None, "")]
            if values:
                lines["; ".join(values)] = None
        return tuple(lines)

    @property
    def titled(self) -> dict[str, Any]:
        """The spec with its title, as a picture outside a page has it."""
        title = {"text": self.title}
        if self.subtitle:
            title["subtitle"] = self.subtitle
        return {**self.spec, "title": title}


@dataclass(frozen=True)
class Figure:
    """All views of one subject; the first is shown at the start."""

    name: str
    title: str
    views: tuple[FigureView, ...]
    series: tuple[str, ...] = ()
    """Names of curves that can be switched off; empty where there are none."""

    @property
    def text(self) -> tuple[str, ...]:
        """The summary of the first view."""
        return (self.views[0].summary,)

    @property
    def controls(self) -> dict[str, tuple[ControlOption, ...]]:
        """Name of a control -> its options; without controls that have one option only."""
        options_by_control: dict[str, dict[str, ControlOption]] = {}
        for view in self.views:
            for control, option in view.choices.items():
                options_by_control.setdefault(control, {}).setdefault(option.value, option)
        return {control: tuple(options.values()) for control, options in options_by_control.items() if len(options) > 1}


@dataclass(frozen=True)
class Section:
    """Blocks under a heading; a folded section opens on request."""

    title: str
    blocks: tuple[Block, ...]
    folded: bool = False


Block: TypeAlias = "Paragraph | Bullets | Code | Table | Finding | Figure | Section"


@dataclass(frozen=True)
class Document:
    """The whole answer of a verb."""

    title: str
    """Empty where the first block is the answer itself."""
    blocks: tuple[Block, ...]
    last: tuple[str, ...] = ()
    """Lines at the end of even the shortest form: where it is stored, what to do next. A line that begins with a blank
    is a command, and is not wrapped."""


def table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[Cell | str]] | Mapping[str, Sequence[Sequence[Cell | str]]],
    *,
    title: str = "",
    notes: Sequence[str] = (),
    folded: bool = False,
    always: Sequence[str] = (),
    label: str = "",
) -> Table:
    """Return a table without its empty columns: those with nothing but empty texts and dashes.

    Args:
        columns: the columns.
        rows: rows of texts or cells, one for each column; or the label of each group of rows -> its rows.
        title: title of the table.
        notes: sentences below the table.
        folded: whether the table opens only on request.
        always: names of columns that stay even if they are empty.
        label: the heading above the groups' labels.
    """
    rows_by_label = rows if isinstance(rows, Mapping) else {"": rows}
    groups = []
    for group_label, group_rows in rows_by_label.items():
        groups.append(RowGroup(group_label, tuple(_cells(row) for row in group_rows)))
    shown_columns = []
    for index, column in enumerate(columns):
        if column.name in always or any(_has_value(group, index) for group in groups):
            shown_columns.append(index)
    return Table(
        columns=tuple(columns[index] for index in shown_columns),
        groups=tuple(_with_columns(group, shown_columns) for group in groups),
        notes=tuple(notes),
        folded=folded,
        title=title,
        label=label,
    )


def _cells(row: Sequence[Cell | str]) -> Row:
    return tuple(cell if isinstance(cell, Cell) else Cell(cell) for cell in row)


def _has_value(group: RowGroup, index: int) -> bool:
    """Whether a row of the group has anything but an empty text or a dash in the column with this index."""
    return any(row[index].text not in ("", UNKNOWN) for row in group.rows)


def _with_columns(group: RowGroup, indices: Sequence[int]) -> RowGroup:
    """Return the group with the columns of these indices alone."""
    rows = []
    for row in group.rows:
        rows.append(tuple(row[index] for index in indices))
    return RowGroup(group.label, tuple(rows))


def plain(text: str) -> str:
    """Return `text` on one line, with its control characters written out, so that a user's name cannot move a cursor.

    Example: "a\\tb" with a tab is "a b", and an escape character is "\\x1b".
    """
    if text.isprintable():
        return text
    return "".join(map(_printable, text))


def _printable(character: str) -> str:
    if character.isprintable():
        return character
    if character.isspace():
        return " "
    return character.encode("unicode_escape").decode()


_LONGEST_KEY = 70


def shown_key(key: str) -> str:
    """Return a dotted key on one line, at most 70 characters of it."""
    text = plain(key.replace("\n", "\\n"))
    return text if len(text) <= _LONGEST_KEY else f"{text[: _LONGEST_KEY - 3]}..."
