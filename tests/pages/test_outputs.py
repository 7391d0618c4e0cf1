from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from results_factory import failed_run, make_curve, make_results, make_trial, one_curve, rich_study, steady_run
from vitscale.analysis import analyse
from vitscale.errors import RequestError
from vitscale.pages import outputs
from vitscale.pages.answers import terminal_document
from vitscale.pages.document import charts
from vitscale.pages.outputs import Reported, package_figures, write
from vitscale.present.document import Figure, FigureView
from vitscale.present.terminal import lines

SMALL = Reported(analyse(one_curve({1: [0.1]})))


def test_files_go_into_the_results_folder(tmp_path: Path) -> None:
    written = write(SMALL, tmp_path, ["html", "csv", "svg"], None)
    assert written[:3] == [tmp_path / name for name in ("report.html", "trials.csv", "runs.csv")]
    assert {path.parent for path in written[3:]} == {tmp_path / "figures"}
    assert all(path.stat().st_size for path in written)


@pytest.mark.parametrize(("kind", "starts"), [("md", "# example"), ("json", "{"), ("latex", "% Needs")])
def test_md_and_json_go_to_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, starts: str
) -> None:
    assert write(SMALL, tmp_path, [kind], None) == []
    assert capsys.readouterr().out.startswith(starts)
    assert list(tmp_path.iterdir()) == []


HOSTILE = "a|b\n## x <script>alert(1)</script> `c` [d](http://e) \\input{/etc/passwd} $x^2$ & 5 % [red]r[/red] \x1b[2J"


def test_text_of_users_stays_text_in_every_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A study's name, a key that tells curves apart, and why a run failed."""
    trial = make_trial()
    curve = make_curve([trial], train__note=HOSTILE)
    results = make_results([(curve, [trial])], [failed_run(trial, "failed", HOSTILE)], name=HOSTILE)
    reported = Reported(analyse(results))
    write(reported, tmp_path, ["md"], None)
    markdown = capsys.readouterr().out
    assert "alert(1)" in markdown
    assert "<script>" not in markdown
    assert "\n## x" not in markdown
    assert "[d](" not in markdown
    assert "$" not in markdown.replace("\\$", "")  # between two of them GitHub sets a formula
    write(reported, tmp_path, ["latex"], None)
    latex = capsys.readouterr().out
    assert "alert(1)" in latex
    assert "\\input" not in latex
    assert "$x" not in latex.replace("\\$x", "")
    assert " & 5 %" not in latex
    terminal = "\n".join(line.plain for line in lines(terminal_document(reported.analysis), verbose=True))
    assert "alert(1)" in terminal
    assert "[red]r[/red]" in " ".join(terminal.split())
    for text in (markdown, latex, terminal):
        assert "\x1b" not in text


def test_one_text_goes_to_the_file_that_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new" / "mine.json"
    assert write(SMALL, tmp_path, ["json"], target) == [target]
    assert json.loads(target.read_text(encoding="utf-8"))["version"] == 8
    assert capsys.readouterr().out == ""


def test_a_table_that_is_named_has_that_of_the_runs_beside_it(tmp_path: Path) -> None:
    assert write(SMALL, tmp_path, ["parquet"], tmp_path / "mine.parquet") == [
        tmp_path / "mine.parquet",
        tmp_path / "mine-runs.parquet",
    ]


def test_several_forms_go_into_the_folder_that_is_named(tmp_path: Path) -> None:
    target = tmp_path / "out"
    written = write(SMALL, tmp_path, ["md", "json", "png"], target)
    assert written[:2] == [target / "report.md", target / "report.json"]
    assert {path.parent for path in written} == {target}


def test_a_chart_of_another_package_takes_no_picture_s_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def figure(name: str, *views: str) -> Figure:
        rows: dict[str, Any] = {"datasets": {"rows": []}}
        return Figure(name, "Theirs", tuple(FigureView(view, {}, "Theirs", "", rows, {}, "") for view in views))

    rich = Reported(analyse(rich_study()))
    ours = charts(rich.analysis)["scaling"]
    drawn = {
        "good": figure("mine", "mine-1", "mine-2"),
        "none": None,
        "figure": figure("scaling", "other"),
        "view": figure("other", ours.views[0].name),
        "again": figure("more", "mine-2"),
    }
    monkeypatch.setattr(outputs, "known", lambda _, name, *__: lambda ___: drawn[name])
    monkeypatch.setattr(outputs, "target", lambda _, name: f"theirs.charts:{name}")
    assert package_figures(["good", "none", "good"], rich) == (drawn["good"],)
    for names, told in (
        (
            ["figure"],
            "chart 'figure' (theirs.charts:figure) draws 'scaling', which is the name of a picture of vitscale",
        ),
        (["view"], f"chart 'view' (theirs.charts:view) draws '{ours.views[0].name}', which is"),
        (["good", "again"], "draws 'mine-2', which is the name of a picture of chart 'good' (theirs.charts:good) too"),
    ):
        with pytest.raises(RequestError) as refused:
            package_figures(names, rich)
        assert told in str(refused.value)


def test_texts_count_runs_from_1_and_data_from_0(tmp_path: Path) -> None:
    trial = make_trial()
    runs = [steady_run(trial, 0.1, 0), failed_run(trial, "failed", "no room").model_copy(deep=True)]
    second = runs[1].model_copy(update={"header": runs[1].header.model_copy(update={"repeat": 1})})
    reported = Reported(analyse(make_results([(make_curve([trial]), [trial])], [runs[0], second])))
    text = reported.text("md")
    assert "repeat 2: failed: no room" in text
    assert "repeat 0" not in text
    (row,) = [
        line for line in text.splitlines() if line.startswith("|") and f"{trial.identity()}-r0-a0/log.txt" in line
    ]
    assert " 1 " in row
    assert json.loads(reported.text("json"))["trials"][0]["runs"][0]["repeat"] == 0


def test_what_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    with pytest.raises(RequestError, match="cannot be written"):
        write(SMALL, tmp_path, ["html"], tmp_path / "file" / "report.html")
    (tmp_path / "report.html").mkdir()
    with pytest.raises(RequestError, match=r"cannot be written to '[^']*/report\.html': Is a directory"):
        write(SMALL, tmp_path, ["html"], None)
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(RequestError, match="is no folder, and csv makes two files"):
        write(SMALL, tmp_path, ["csv"], tmp_path / "pipe.csv")
    with pytest.raises(RequestError, match="unknown format 'docx'"):
        write(SMALL, tmp_path, ["docx"], None)


def test_drawing_libraries_and_torch_are_not_loaded_until_something_is_drawn() -> None:
    code = (
        "import sys, vitscale.analysis, vitscale.pages; "
        "sys.exit(', '.join({'torch', 'altair', 'vl_convert', 'scipy', 'pandas', 'polars'} & set(sys.modules)) or 0)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")
