"""Tables in LaTeX, RST and drawn on a terminal are refused, with their line and what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from importers.logs import imported
from vitscale.errors import RequestError
from vitscale.importers.contents import Options
from vitscale.importers.drawn_tables import drawn_tables
from vitscale.importers.importing import guess, import_logs

MARKDOWN = "| GPUs | img/s |\n|---|---|\n| 1 | 363.5 |\n| 8 | 2860 |\n"
DRAWN = {
    "LaTeX": (
        "\\begin{table}\n\\caption{Scaling}\n\\begin{tabular}{lrr}\n\\toprule\n\\#GPUs & Images/s \\\\\n"
        "\\midrule\n1 & 363.5 \\\\\n8 & 2{,}860 \\\\\n\\bottomrule\n\\end{tabular}\n\\end{table}\n",
        3, "in LaTeX",
    ),
    "LaTeX over pages": (
        "\\begin{longtable}{lr}\nGPUs & Images/s \\\\ \\hline\n1 & 363.5 \\\\\n\\end{longtable}\n", 1, "in LaTeX",
    ),
    "RST": (
        "Speed\n=====\n\n+------+-------+\n| GPUs | img/s |\n+======+=======+\n| 1    | 363.5 |\n+------+-------+\n"
        "| 8    | 2860  |\n+------+-------+\n",
        4, "drawn with + and -, as in RST",
    ),
    "simple RST": (
        "====  =====\nGPUs  img/s\n====  =====\n1     363.5\n8     2860\n====  =====\n", 1, "drawn with =, as in RST",
    ),
    "RST by a directive": (
        ".. list-table:: Speed\n   :header-rows: 1\n\n   * - GPUs\n     - img/s\n   * - 1\n     - 363.5\n",
        1, "a directive of RST",
    ),
    "a database's": (
        "+------+-------+\n| GPUs | img/s |\n|------+-------|\n| 1    | 363.5 |\n| 8    | 2860  |\n+------+-------+\n",
        1, "drawn with + and -, as in RST",
    ),
    "a database's without a border": (
        " gpus | img/s\n------+-------\n 1    | 363.5\n 8    | 2860\n", 2, "drawn with + and -, as in RST",
    ),
    "box-drawn": (
        "┌──────┬───────┐\n│ GPUs │ img/s │\n├──────┼───────┤\n│ 1    │ 363.5 │\n│ 8    │ 2860  │\n└──────┴───────┘\n",
        2, "drawn with box characters",
    ),
    "box-drawn in bold": (
        "┏━━━━━━┳━━━━━━━┓\n┃ GPUs ┃ img/s ┃\n┡━━━━━━╇━━━━━━━┩\n│ 1    │ 363.5 │\n└──────┴───────┘\n",
        2, "drawn with box characters",
    ),
}  # fmt: skip
"""Form -> (text, line at which its table shows, the form in words)."""


@pytest.mark.parametrize("form", DRAWN)
def test_a_drawn_table_is_refused_with_its_line_and_what_to_write(tmp_path: Path, form: str) -> None:
    text, line, words = DRAWN[form]
    path = tmp_path / "table.txt"
    path.write_text(text)
    with pytest.raises(RequestError) as guessed:
        guess([path])
    with pytest.raises(RequestError) as as_csv:
        import_logs([path], "csv", Options(), tmp_path / "results")
    for message in (str(guessed.value), str(as_csv.value)):
        assert message == (
            f"the table at line {line} of 'table.txt' is {words}, which is not read. Write it as Markdown, with "
            "| GPUs | images/s | over | --- | --- |, or as CSV, whose first line is gpus,images/s."
        )


@pytest.mark.parametrize("form", DRAWN)
def test_beside_a_table_that_is_read_a_drawn_one_is_named(tmp_path: Path, form: str) -> None:
    text, line, words = DRAWN[form]
    path = tmp_path / "page.md"
    path.write_text(f"{MARKDOWN}\n{text}")
    analysis = imported(tmp_path, [path], "csv")
    assert {trial.trial.world.size for trial in analysis.trials.values()} == {1, 8}
    told = f"left out: the table at line {line + 5} is {words}: write it as Markdown or CSV"
    assert analysis.study.imported is not None
    assert any(told in note for note in analysis.study.imported.notes)


def test_what_the_message_asks_for_is_read(tmp_path: Path) -> None:
    for name, text in (("a.md", MARKDOWN), ("a.csv", "gpus,images/s\n1,363.5\n8,2860\n")):
        path = tmp_path / name
        path.write_text(text)
        assert guess([path]) == "csv"


@pytest.mark.parametrize(
    "text",
    [
        MARKDOWN,
        "│   ├── a.py\n│   │   └── b.py\n",
        "Title\n=====\n\nText\n----\n",
        "a | b\n--- | ---\n1 | 2\n",
        "x = 1 + 2 - 3\n",
        "2026-01-02 a+b\n",
    ],
)
def test_other_lines_are_no_drawn_table(text: str) -> None:
    assert list(drawn_tables(list(enumerate(text.splitlines(), 1)))) == []


def test_a_table_that_a_tool_drew_into_a_log_is_in_nobodys_way(tmp_path: Path) -> None:
    """As nvidia-smi's, above the lines of steps."""
    path = tmp_path / "train.log"
    steps = "".join(
        f"2026-01-02 10:00:{number:02} - mmengine - INFO - Epoch(train)  [1][{10 * number}/500]  lr: 1.0e-03  "
        f"eta: 0:10:00  time: 0.2500  data_time: 0.0100  memory: 5000  loss: 2.0\n"
        for number in range(1, 30)
    )
    path.write_text(f"+-----+------+\n| GPU | Name |\n+=====+======+\n|   0 | A100 |\n+-----+------+\n{steps}")
    assert guess([path]) == "train-log"
