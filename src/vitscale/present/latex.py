"""A document as LaTeX, to be put into a paper: sections, sentences, tables with the rules of the package booktabs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from vitscale.present import document as doc

_HEADINGS = ("section", "subsection", "subsubsection", "paragraph")
_LATEX_BY_CHARACTER = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "_": r"\_", "%": r"\%",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': r"\textquotedbl{}", "\N{EN DASH}": r"\textendash{}", "\N{MINUS SIGN}": "$-$",
    "\N{DEGREE SIGN}": r"\textdegree{}", "[": "{[}", "]": "{]}", "*": "{*}",
}  # fmt: skip
"""Characters with a meaning in LaTeX -> how they are written literally.

Brackets and stars are in braces, because a line break (\\\\) before them would take them for its own options.
"""
_LINE_LETTERS = 110
_LONGEST_ONE_LINE_CELL = 40
"""Letters of a cell of words above which its column has lines of its own."""
_SHRINK_TO_LINE = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"
"""Sets what follows, to its closing brace, smaller where it is wider than a line."""


def to_latex(document: doc.Document) -> str:
    """Return the whole document, folded parts too, without a preamble: for where booktabs and graphicx are loaded."""
    lines = [
        "% Needs \\usepackage{booktabs,graphicx} and a font encoding with quotes, such as \\usepackage[T1]{fontenc}."
    ]
    if document.title:
        lines.append(rf"\section{{{escaped(document.title)}}}")
    for block in document.blocks:
        lines += _block_lines(block, depth=1)
    lines += map(escaped, document.last)
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """Return text in which everything that LaTeX would act on is taken literally."""
    latex = "".join(_LATEX_BY_CHARACTER.get(character, character) for character in doc.plain(text))
    return latex.replace("--", "-{}-").replace("--", "-{}-")  # two hyphens of an option are no dash, nor are three


def _block_lines(block: doc.Block, depth: int) -> Iterator[str]:
    """Yield the lines of a block. `depth`: position of its heading in `_HEADINGS`, if it has one."""
    match block:
        case doc.Section():
            yield rf"\{_HEADINGS[min(depth, len(_HEADINGS) - 1)]}{{{escaped(block.title)}}}"
            for part in block.blocks:
                yield from _block_lines(part, depth + 1)
        case doc.Paragraph():
            yield from _paragraph_lines(block.text)
        case doc.Bullets():
            if block.items:
                yield r"\begin{itemize}"
                for item in block.items:
                    yield from _wrapped_lines(rf"\item {escaped(item)}")
                yield from (r"\end{itemize}", "")
        case doc.Finding():
            severity = rf"\textbf{{{escaped(block.severity)}}}"
            yield from _wrapped_lines(f"{severity}: {escaped(block.message)}. {escaped(block.advice)}")
            yield ""
        case doc.Code():
            # Not verbatim: a user's line could end it. A break needs something in front of it, on an empty line too.
            yield from (
                r"\begin{flushleft}\ttfamily",
                *(rf"\mbox{{}}{escaped(line)}\\" for line in block.lines),
                r"\end{flushleft}",
                "",
            )
        case doc.Table():
            yield from _table_lines(block)
        case doc.Figure():
            yield from (rf"\textbf{{{escaped(block.title)}}} (file {escaped(block.views[0].name)}).", "")
            for text in block.text:
                yield from _paragraph_lines(text)


def _paragraph_lines(text: str) -> Iterator[str]:
    """Yield the lines of a paragraph, and the empty one that ends it."""
    yield from _wrapped_lines(escaped(text))
    yield ""


def _table_lines(table: doc.Table) -> Iterator[str]:
    """Yield the lines of a table; the label of a group stands above its rows, across all columns."""
    yield r"\begin{table}"
    if table.title:
        yield rf"\caption{{{escaped(table.title)}}}"
    yield from (_SHRINK_TO_LINE, rf"\begin{{tabular}}{{@{{}}{_column_types(table)}@{{}}}}")
    yield r"\toprule"
    yield _row_line([escaped(column.heading) for column in table.columns])
    yield r"\midrule"
    for index, group in enumerate(table.groups):
        if group.label:
            if index > 0:
                yield r"\addlinespace"
            yield rf"\multicolumn{{{len(table.columns)}}}{{@{{}}l}}{{{escaped(group.label)}}} \\"
        for row in group.rows:
            yield _row_line([_cell_text(cell) for cell in row])
    yield from (
        r"\bottomrule",
        r"\end{tabular}}",
        *(rf"\par {escaped(note)}" for note in table.notes),
        r"\end{table}",
        "",
    )


def _column_types(table: doc.Table) -> str:
    r"""Return the column types of a tabular: "r" for figures, "l" for words, "p{0.40\linewidth}" for long words.

    Columns of long words have their share of the letters of a line, by the longest cell of each column. Rows in which a
    cell spans several columns do not count for it.
    """
    longest_by_column = [0] * len(table.columns)
    for _, row in table.rows:
        has_spans = any(cell.spans != 1 for cell in row)
        if not has_spans:
            for position, cell in enumerate(row):
                longest_by_column[position] = max(longest_by_column[position], len(str(cell)))
    line_letters = sum(longest_by_column)
    types = []
    for column, letters in zip(table.columns, longest_by_column, strict=True):
        if not column.words:
            types.append("r")
        elif letters <= _LONGEST_ONE_LINE_CELL:
            types.append("l")
        else:
            types.append(rf"p{{{letters / line_letters:.2f}\linewidth}}")
    return "".join(types)


def _cell_text(cell: doc.Cell) -> str:
    text = escaped(str(cell))
    if cell.state == "baseline":
        text = rf"\textbf{{{text}}}"
    return rf"\multicolumn{{{cell.spans}}}{{l}}{{{text}}}" if cell.spans > 1 else text


def _row_line(cells: list[str]) -> str:
    return f"{' & '.join(cells)} \\\\"


def _wrapped_lines(text: str) -> list[str]:
    return textwrap.wrap(text, _LINE_LETTERS, break_long_words=False, break_on_hyphens=False)
