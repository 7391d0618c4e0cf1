"""Page, Markdown, LaTeX and terminal are laid out from one document: none of them leaves a part out."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator

from report_forms import latex, markdown, page
from results_factory import rich_study
from vitscale.analysis import analyse
from vitscale.pages.document import report_document
from vitscale.present.document import (
    Block,
    Bullets,
    Cell,
    Code,
    Column,
    Document,
    Figure,
    Finding,
    RowGroup,
    Section,
    Table,
)
from vitscale.present.latex import to_latex
from vitscale.present.terminal import lines


def named(blocks: Iterable[Block]) -> Iterator[str]:
    """Titles of sections, tables and figures, and what findings say."""
    for block in blocks:
        match block:
            case Section():
                yield block.title
                yield from named(block.blocks)
            case Table() | Figure():
                yield block.title
            case Finding():
                yield block.message


def letters(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", "", text)


def test_every_part_of_a_report_stands_in_every_form() -> None:
    analysis = analyse(rich_study())
    document = report_document(analysis)
    forms = {
        "markdown": markdown(analysis),
        "latex": latex(analysis),
        "terminal": "\n".join(line.plain for line in lines(document, 400, verbose=True)),
        "page": html.unescape(re.sub(r"<[^>]+>", " ", page(analysis))),
    }
    for form, text in forms.items():
        told = letters(text)
        # On the page a figure's views stand under their own titles.
        parts = {
            name
            for name in named(document.blocks)
            if form != "page" or name not in ("How it scales", "Loss and accuracy")
        }
        assert len(parts) > 35
        assert {name for name in parts if letters(name) not in told} == set(), form


def test_latex_has_a_line_before_each_break_and_none_takes_what_follows_for_its_own() -> None:
    """LaTeX stops at a break after nothing and reads "[model]" behind a break as a length: studies have both."""
    table = Table((Column("a"),), (RowGroup("", ((Cell("[1]"),), (Cell("*"),))),))
    lines = ("[model]", "", "* x", "run --a ---b")
    text = to_latex(Document("", (Code(lines), table, Bullets(("[y] z",)))))
    assert [line for line in text.splitlines() if line.startswith((r"\mbox", "{", r"\item"))] == [
        r"\mbox{}{[}model{]}\\", r"\mbox{}\\", r"\mbox{}{*} x\\", r"\mbox{}run -{}-a -{}-{}-b\\",
        r"{[}1{]} \\", r"{*} \\", r"\item {[}y{]} z",
    ]  # fmt: skip


def test_latex_tables_keep_within_the_page() -> None:
    """Columns of 90 letters and of 10 share the line as 0.9 to 0.1; what is still too wide is set smaller."""
    rows = ((Cell("a" * 90), Cell("b" * 10), Cell("")), (Cell("a"), Cell("b"), Cell("")))
    columns = (Column("long", words=True), Column("short", words=True), Column("number"))
    text = to_latex(Document("", (Table(columns, (RowGroup("", rows),)),)))
    assert r"\begin{tabular}{@{}p{0.90\linewidth}lr@{}}" in text
    fitted = text.index(r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%")
    assert fitted < text.index(r"\begin{tabular}") < text.index("\\end{tabular}}")
    assert text.count("{") == text.count("}")


def test_no_form_shows_the_secrets_of_a_study() -> None:
    """A page is shown around. Settings stay: they say how the study ran."""
    results = rich_study()
    text = """[train]
script = "train.py"
arguments = ["--token", "hunter31passabc", "--depth", "3"]
[launch]
environment = { WANDB_API_KEY = "hunter32passabc", NCCL_IB_HCA = "mlx5_0:1", MODE = "offline" }
"""
    study = results.study.model_copy(update={"text": text, "overrides": ("launch.environment.A_PAT=hunter33passabc",)})
    analysis = analyse(results.model_copy(update={"study": study}))
    for form in (page(analysis), markdown(analysis), latex(analysis)):
        assert "hunter" not in form
        assert "notshown" in letters(form)
        assert all(letters(word) in letters(form) for word in ("WANDB_API_KEY", "mlx5_0:1", "offline", "--depth"))
