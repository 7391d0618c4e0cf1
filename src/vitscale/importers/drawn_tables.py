"""Finds tables in forms that are not read, so that a message can name them and say what to write instead.

LaTeX       \\begin{tabular} and its kin
RST         rules of "+---+" (as terminals draw them too) or of "===  ===", and its directives for tables
box-drawn   cells between Unicode's box-drawing lines, as terminals print them
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from vitscale.errors import RequestError, shown

DRAWN_RULE = re.compile(r"^\s*(?:[|+]?[-=:]+(?:\+[-=:]+)+[|+]?|\+[-=:]+\+)\s*$")
"""A line between rows, with a "+" between columns: "+-----+-----+", "|-----+-----|", "+=====+"."""
_FORMS = {
    "in LaTeX": re.compile(r"\\begin\{(?:tabular[xy*]?|tabulary|longtable|tblr)\}"),
    "drawn with + and -, as in RST": DRAWN_RULE,
    "drawn with =, as in RST": re.compile(r"^\s*={2,}(?:\s+={2,})+\s*$"),
    "a directive of RST": re.compile(r"^\s*\.\. (?:list-table|csv-table|table)::"),
    "drawn with box characters": re.compile(r"[│┃║][^│┃║\w]*+\w[^│┃║]*+[│┃║]"),
}
"""Form in words -> what a line has that only a table of this form has."""


class DrawnGrid(NamedTuple):
    """A table in a form that is not read."""

    line: int
    """Number of its first line that shows the form."""
    form: str
    """The form in words: "in LaTeX"."""


def drawn_tables(texts: Sequence[tuple[int, str]]) -> Iterator[DrawnGrid]:
    """Yield the tables in forms that are not read; all lines up to an empty one are one table.

    Args:
        texts: (number, text) of each line of a file.
    """
    is_inside_table = False
    for number, text in texts:
        if not text.strip():
            is_inside_table = False
        elif not is_inside_table:
            form = _form(text)
            if form is not None:
                is_inside_table = True
                yield DrawnGrid(number, form)


def _form(text: str) -> str | None:
    """Return the form of which a line shows a sign; None where it shows none."""
    for form, sign in _FORMS.items():
        if sign.search(text):
            return form
    return None


def refusal(path: Path, table: DrawnGrid) -> RequestError:
    """Return the error for a file that has no other table."""
    return RequestError(
        f"the table at line {table.line} of {shown(path.name)} is {table.form}, which is not read",
        next_step="Write it as Markdown, with | GPUs | images/s | over | --- | --- |, or as CSV, whose first line is "
        "gpus,images/s",
    )
