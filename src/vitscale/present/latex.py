"""A document as LaTeX, to be put into a paper: sections, sentences, tables with the rules of the package booktabs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from vitscale.present import document as doc

_HEADINGS = ("section", "subsection", "subsubsection", "paragraph")
_ESCAPED = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "_": r"\_", "%": r"\%",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': r"\textquotedbl{}", "\N{EN DASH}": r"\textendash{}", "\N{MINUS SIGN}": "$-$",
    "\N{DEGREE SIGN}": r"\textdegree{}", "[": "{[}", "]": "{]}", "*": "{*}",
}  # fmt: skip
"""In brackets: what a line break before it would take for its own."""
_WIDTH = 110
_LONG = 40
"""Letters of a cell of words above which its column has lines of its own."""
_FITTED = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"
"""Sets what follows, to its closing brace, smaller where it is wider than a line."""


def to_latex(document: doc.Document) -> str:
    """The whole document, folded parts too, without a preamble: for where booktabs and graphicx are loaded."""
    lines = [
        "% Needs \\usepackage{booktabs,graphicx} and a font encoding with quotes, such as \\usepackage[T1]{fontenc}."
    ]
    lines += [rf"\section{{{escaped(document.title)}}}"] if document.title else []
    for block in document.blocks:
        lines += _block(block, 1)
    return "\n".join([*lines, *map(escaped, document.last)]) + "\n"


def escaped(text: str) -> str:
    """Text in which everything that LaTeX would act on is taken literally."""
    told = "".join(_ESCAPED.get(character, character) for character in doc.plain(text))
    return told.replace("--", "-{}-").replace("--", "-{}-")  # two hyphens of an option are no dash, nor are three


def _block(block: doc.Block, depth: int) -> Iterator[str]:
    match block:
        case doc.Section():
            yield rf"\{_HEADINGS[min(depth, len(_HEADINGS) - 1)]}{{{escaped(block.title)}}}"
            for part in block.blocks:
                yield from _block(part, depth + 1)
        case doc.Paragraph():
            yield from (*_wrapped(escaped(block.text)), "")
        case doc.Bullets():
            items = [line for item in block.items for line in _wrapped(rf"\item {escaped(item)}")]
            yield from (r"\begin{itemize}", *items, r"\end{itemize}", "") if items else ()
        case doc.Finding():
            yield from (
                *_wrapped(rf"\textbf{{{escaped(block.severity)}}}: {escaped(block.message)}. {escaped(block.advice)}"),
                "",
            )
        case doc.Code():
            # Not verbatim: a user's line could end it. A break needs something in front of it, on an empty line too.
            yield from (
                r"\begin{flushleft}\ttfamily",
                *(rf"\mbox{{}}{escaped(line)}\\" for line in block.lines),
                r"\end{flushleft}",
                "",
            )
        case doc.Table():
            yield from _table(block)
        case doc.Figure():
            yield from (rf"\textbf{{{escaped(block.title)}}} (file {escaped(block.views[0].name)}).", "")
            yield from (line for text in block.text for line in (*_wrapped(escaped(text)), ""))


def _table(table: doc.Table) -> Iterator[str]:
    yield r"\begin{table}"
    if table.title:
        yield rf"\caption{{{escaped(table.title)}}}"
    yield from (_FITTED, rf"\begin{{tabular}}{{@{{}}{_alignments(table)}@{{}}}}")
    yield r"\toprule"
    yield _row([escaped(column.heading) for column in table.columns])
    yield r"\midrule"
    for index, group in enumerate(table.groups):
        if group.label:
            yield from ([r"\addlinespace"] if index else [])
            yield rf"\multicolumn{{{len(table.columns)}}}{{@{{}}l}}{{{escaped(group.label)}}} \\"
        for row in group.rows:
            yield _row([_cell(cell) for cell in row])
    yield from (
        r"\bottomrule",
        r"\end{tabular}}",
        *(rf"\par {escaped(note)}" for note in table.notes),
        r"\end{table}",
        "",
    )


def _alignments(table: doc.Table) -> str:
    rows = [row for group in table.groups for row in group.rows if not any(cell.spans > 1 for cell in row)]
    longest = [max((len(str(cell)) for cell in cells), default=0) for cells in zip(*rows, strict=True)]
    return "".join(
        "r" if not column.words else "l" if letters <= _LONG else rf"p{{{letters / sum(longest):.2f}\linewidth}}"
        for column, letters in zip(table.columns, longest or [0] * len(table.columns), strict=True)
    )


def _cell(cell: doc.Cell) -> str:
    text = rf"\textbf{{{escaped(str(cell))}}}" if cell.state == "baseline" else escaped(str(cell))
    return rf"\multicolumn{{{cell.spans}}}{{l}}{{{text}}}" if cell.spans > 1 else text


def _row(cells: list[str]) -> str:
    return f"{' & '.join(cells)} \\\\"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
