"""What a terminal shows: the answer first, within its lines and columns, no figure broken, everything when asked."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from vitscale.present import terminal
from vitscale.present.document import (
    About,
    Bullets,
    Cell,
    Code,
    Column,
    Document,
    Figure,
    FigureView,
    Finding,
    Paragraph,
    RowGroup,
    Section,
    Table,
    table,
)
from vitscale.present.markdown import to_markdown
from vitscale.present.terminal import lines
from vitscale.present.terminal_table import table_lines
from vitscale.present.units import DASH

_TRIALS = {
    "plain (no wrapper)": ("1", "2 x 161", "93.3", "4.19", "343", "1.00", "bf16", "496 MiB", "measured"),
    "deepspeed ZeRO-2": ("1", "2 x 161", "98.3", "4.41", "343", "1.00", "bf16", "1.25 GiB", "measured"),
}
_FAILED = (Cell("2"), Cell("2 x 3"), Cell("out of memory", state="failed", spans=6), Cell("prior-driven"))
SCALING = Table(
    (
        Column("ranks"),
        Column("runs x steps", narrow=None),
        Column("step", "ms"),
        Column("epoch", "s"),
        Column("images/s"),
        Column("speedup"),
        Column("precision", narrow=None),
        Column("memory"),
        Column("label", words=True),
    ),
    tuple(
        RowGroup(label, (tuple(map(Cell, cells)), *([_FAILED] if label.startswith("deepspeed") else [])))
        for label, cells in _TRIALS.items()
    ),
    notes=("Two runs of an epoch of 120 s.",),
    title="Strong scaling",
)
FINDING = Finding("slow-rank", "warning", "rank 3 is slow", "mend it", About(key="zero.stage", source="a page"))


def _text(document: Document, width: int = 80, verbose: bool = False, most_lines: int = 25) -> str:
    return "\n".join(line.plain for line in lines(document, width, verbose, most_lines))


WHOLE = """\
Demo
2 ranks are 1.41x as fast.

Strong scaling
                            runs x  step  epoch
                    ranks    steps  (ms)    (s)  images/s  speedup  precision    memory  label
RULE
plain (no wrapper)      1  2 x 161  93.3   4.19       343     1.00       bf16   496 MiB  measured
deepspeed ZeRO-2        1  2 x 161  98.3   4.41       343     1.00       bf16  1.25 GiB  measured
                        2    2 x 3  out of memory                                        prior-driven
  Two runs of an epoch of 120 s.

warning  slow-rank  zero.stage
  rank 3 is slow.
  Next: mend it.

Stored: x"""


def test_the_whole_of_a_small_document() -> None:
    document = Document("Demo", (Paragraph("2 ranks are 1.41x as fast."), SCALING, FINDING), ("Stored: x",))
    assert _text(document, 110) == WHOLE.replace("RULE", 101 * "\N{BOX DRAWINGS LIGHT HORIZONTAL}")


def test_a_narrow_table_tells_constants_once_and_leaves_optional_columns_out() -> None:
    text = _text(Document("", (SCALING,)), 72)
    assert "in all: " in text
    assert "precision bf16" in text
    assert "runs x" not in text
    assert "out of memory" in text
    assert max(map(cell_len, text.split("\n"))) <= 72


@pytest.mark.parametrize("width", [40, 50, 60, 72, 80, 100, 200])
def test_every_figure_stands_whole_at_every_width(width: int) -> None:
    text = _text(Document("", (SCALING,)), width, verbose=True)
    for figure in ("93.3", "4.19", "98.3", "4.41", "496 MiB", "1.25 GiB", "1.00", "120 s"):
        assert figure in text
    assert max(map(cell_len, text.split("\n"))) <= width


@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=9), st.integers(40, 120))
def test_no_figure_of_any_table_is_broken(figures: list[float], width: int) -> None:
    texts = [f"{value:,.6f}" for value in figures]
    columns = [Column("name", words=True), *(Column(f"c{n}") for n in range(len(texts)))]
    text = _text(Document("", (table(columns, [["a long name of it", *texts]]),)), width, verbose=True)
    assert all(figure in text for figure in texts)


def test_no_number_leaves_its_unit() -> None:
    words = " ".join(f"it took {n} s of 2 h and 3 GiB at 4 GB/s," for n in range(60))
    for width in range(40, 60):
        assert not re.search(r"\d$", _text(Document("", (Paragraph(words),)), width, verbose=True), flags=re.MULTILINE)


def test_no_number_leaves_its_unit_in_a_table_s_words() -> None:
    words = ", ".join(f"{n} % launch gaps of {n} ms" for n in range(1, 9))
    laid = Table((Column("which goes into", words=True),), (RowGroup("on 2 ranks of 16 hosts", ((Cell(words),),)),))
    for width in range(40, 60):
        assert not re.search(r"\d$", _text(Document("", (laid,)), width, verbose=True), flags=re.MULTILINE)


def _long() -> Document:
    return Document(
        "Answer",
        (
            Paragraph("The answer."),
            table([Column("ranks"), Column("epoch", "s")], [[str(n), f"{n}.5"] for n in range(40)], title="Scaling"),
            Bullets(tuple(f"sentence {n}" for n in range(30))),
            *(Finding(f"kind-{n}", "note", "message", "advice") for n in range(9)),
            Section("Commands", (Code(("vitscale run x.toml",)),), folded=True),
        ),
        ("Stored: results/x",),
    )


def test_at_most_25_lines_with_the_answer_first_and_what_is_missing_named() -> None:
    shown = [line.plain for line in lines(_long())]
    assert len(shown) <= 25
    assert shown[:2] == ["Answer", "The answer."]
    assert shown[-1] == "Stored: results/x"
    assert "More with --verbose: 30 notes, 9 findings and Commands." in shown
    assert any(re.fullmatch(r"  \.\.\. \d+ more with --verbose", line) for line in shown)
    assert "vitscale run x.toml" not in "\n".join(shown)


def test_findings_that_are_cut_are_named_as_far_as_a_line_holds_them() -> None:
    findings = [Finding(f"kind-number-{n}", "note", "message " * 20, "advice") for n in range(12)]
    shown = [line.plain for line in lines(Document("Answer", tuple(findings)))]
    assert len(shown) <= 25
    (cut,) = [line for line in shown if "more with --verbose (" in line]
    match = re.fullmatch(r"  \.\.\. (\d+) more with --verbose \((.*), \.\.\.\)", cut)
    assert match is not None
    first = 12 - int(match[1])
    assert match[2].split(", ")[0] == f"kind-number-{first}"
    assert len(cut) <= 80


@given(st.integers(8, 60))
def test_any_number_of_lines_can_be_asked_for(most: int) -> None:
    assert len(lines(_long(), most_lines=most)) <= most


def test_verbose_has_everything_and_names_nothing() -> None:
    text = _text(_long(), verbose=True)
    assert all(f"sentence {n}\n" in text for n in range(30))
    assert all(f"kind-{n}" in text for n in range(9))
    assert "vitscale run x.toml" in text
    assert "--verbose" not in text


def test_a_source_is_shown_when_all_is_asked_for() -> None:
    assert "Source" not in _text(Document("", (FINDING,)))
    assert "  Source: a page" in _text(Document("", (FINDING,)), verbose=True)


def test_names_obey_nothing_and_lines_end_without_blanks() -> None:
    evil = "a\x1b[31m[red]\nb\u202e"
    document = Document(
        evil, (Paragraph(evil), table([Column(evil, words=True), Column("n")], [[evil, "1"], ["c", "2"]]))
    )
    text = _text(document)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "[red]" in text
    assert all(line == line.rstrip() for line in text.split("\n"))


def test_a_column_of_which_nothing_is_known_is_left_out() -> None:
    laid = table(
        [Column("ranks"), Column("cost"), Column("kept")], [["1", DASH, DASH], ["2", DASH, ""]], always=["kept"]
    )
    assert [column.name for column in laid.columns] == ["ranks", "kept"]


def test_markdown_has_every_block_open_and_takes_names_literally() -> None:
    view = FigureView("f", {}, "A chart", "", {"datasets": {"rows": []}}, {}, "It *rises*.")
    figure = Figure("f", "A chart", (view,))
    text = to_markdown(Document("T | <b>", (*_long().blocks, SCALING, figure), ("Stored: x",)))
    assert text.startswith("# T \\| &lt;b>\n\nThe answer.\n")
    assert "## Commands\n\n```\nvitscale run x.toml\n```\n" in text
    assert "- note: **kind-0**: message. advice.\n" in text
    assert "It \\*rises\\*." in text
    assert "| deepspeed ZeRO-2 | 2 | 2 x 3 | out of memory |  |  |  |  |  | prior-driven |" in text
    assert text.count("sentence") == 30


_LETTERS = st.text("ab 1", max_size=30)


@st.composite
def _tables(draw: st.DrawFn) -> Table:
    """A table of up to 40 rows with a group for each label, in which words are wrapped and outcomes span columns."""
    words = draw(st.lists(st.booleans(), min_size=1, max_size=6))
    columns = tuple(
        Column(f"column {at}", words=is_word, narrow=draw(st.sampled_from(["", "c", None])))
        for at, is_word in enumerate(words)
    )
    row = st.one_of(
        st.tuples(*(_LETTERS.map(Cell) if is_word else st.sampled_from(["1", "22.5"]).map(Cell) for is_word in words)),
        st.just((Cell("out of memory", state="failed", spans=len(words)),)),
    )
    rows = draw(st.lists(row, min_size=1, max_size=40))
    labels = draw(st.sampled_from([("",), ("ddp", "deepspeed ZeRO-2")]))
    groups = tuple(RowGroup(label, tuple(rows)) for label in labels)
    return Table(columns, groups, tuple(draw(st.lists(_LETTERS, max_size=2))), title=draw(_LETTERS))


@given(st.lists(_tables(), min_size=1, max_size=2), st.integers(40, 90), st.integers(15, 40), st.booleans())
def test_rows_that_are_not_shown_need_not_be_laid_out(
    tables: list[Table], width: int, most_lines: int, in_section: bool
) -> None:
    """The lines are those that remain of a document in which every row of every table is laid out."""
    blocks = (Section("Trials", tuple(tables)),) if in_section else tuple(tables)
    document = Document("Answer", (Paragraph("The answer."), *blocks), ("Stored: x",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(terminal, "table_lines", lambda table, width, _: table_lines(table, width))
        of_all_rows = lines(document, width, most_lines=most_lines)
    assert lines(document, width, most_lines=most_lines) == of_all_rows


def _numbered(rows: int, last: str) -> Table:
    return Table(
        (Column("rank"), Column("word", words=True)),
        (RowGroup("", (*((Cell(str(n)), Cell("a")) for n in range(rows)), (Cell(last), Cell("b")))),),
    )


def test_rows_that_are_not_shown_decide_the_widths_too() -> None:
    shown = _text(Document("", (_numbered(500, last="1,234,567,890"),)))
    assert "\n            0  a\n" in shown
    assert "1,234,567,890" not in shown
    assert "more with --verbose" in shown


def test_a_column_is_constant_only_where_rows_that_are_not_shown_have_its_value_too() -> None:
    narrow = Column("precision", words=True)
    others = tuple(Column(f"figure {n}", narrow=None) for n in range(9))
    rows = [tuple(map(Cell, (str(n), *("12,345.6",) * 9, "bf16"))) for n in range(500)]
    for last, said in (("bf16", True), ("fp32", False)):
        table = Table((Column("rank"), *others, narrow), (RowGroup("", (*rows[:-1], (*rows[-1][:-1], Cell(last)))),))
        laid = table_lines(table, 12, most_lines=25)
        text = " ".join(line.plain for piece in laid for line in piece.head)
        assert ("precision bf16" in text) is said


def test_a_table_of_which_too_little_would_stay_says_how_many_rows_it_leaves_out() -> None:
    last = tuple(f"sentence {n}" for n in range(22))
    shown = [line.plain for line in lines(Document("", (_numbered(500, last="9"),), last))]
    (cut,) = [line for line in shown if "more with --verbose" in line]
    rows = sum(re.fullmatch(r" *\d+  [ab]", line) is not None for line in shown)
    assert cut == f"  ... {501 - rows} more with --verbose"


def test_a_row_without_a_word_does_not_cost_its_group_the_label() -> None:
    rows = ((Cell(""),), (Cell("waits"),), (Cell("computes"),))
    text = _text(Document("", (Table((Column("doing", words=True),), (RowGroup("on 2 ranks", rows),)),)), verbose=True)
    assert "on 2 ranks  waits" in text
