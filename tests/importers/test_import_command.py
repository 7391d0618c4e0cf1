"""`vitscale import` on the command line: what it prints, what it refuses, and that the same again is done already."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from driving import tree
from importers.logs import deepspeed_log, epoch_rows, epoch_table, steady
from vitscale import cli
from vitscale.base.program import identity


@pytest.fixture
def vitscale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Calls the command line in this process: (exit code, standard output, standard error)."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["vitscale", *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def table(tmp_path: Path) -> Path:
    rows = [row for gpus in (1, 2, 3, 4) for row in epoch_rows(gpus, [[100.0 / gpus] * gpus] * 2)]
    return epoch_table(tmp_path / "epochs.csv", [*rows, "broken"])


def test_what_it_prints(vitscale: Callable[..., tuple[int, str, str]], table: Path) -> None:
    code, out, _ = vitscale("import", str(table), "-o", "imported")
    assert code == 0
    assert "(taken for --format epochs)" in out
    assert "1-4" in out
    assert "cifar10" in out
    assert "note: the model is unknown" in out
    assert "problem: epochs.csv: 1 broken line left out: line 22" in out
    assert "vitscale report imported" in out


def test_the_same_again_is_done_already(
    vitscale: Callable[..., tuple[int, str, str]], table: Path, tmp_path: Path
) -> None:
    assert vitscale("import", str(table), "-o", "imported")[0] == 0
    before = tree(tmp_path)
    code, out, _ = vitscale("import", str(table), "-o", "imported")
    assert code == 0
    assert "Nothing to do" in out
    assert tree(tmp_path) == before


def test_another_import_into_the_same_folder_is_refused(
    vitscale: Callable[..., tuple[int, str, str]], table: Path, tmp_path: Path
) -> None:
    assert vitscale("import", str(table), "-o", "imported")[0] == 0
    before = tree(tmp_path / "imported")
    for change in (["--engine", "ddp"], ["--train-samples", "1000"]):
        code, _, err = vitscale("import", str(table), "-o", "imported", *change)
        assert code == 2
        assert "holds another import" in err
    table.write_text(table.read_text() + "\n")
    assert vitscale("import", str(table), "-o", "imported")[0] == 2
    assert tree(tmp_path / "imported") == before


def test_an_import_says_which_program_read_it(
    vitscale: Callable[..., tuple[int, str, str]], table: Path, tmp_path: Path
) -> None:
    code, out, _ = vitscale("import", str(table), "-o", "imported", "--json")
    assert (code, json.loads(out)["program"]) == (0, identity())
    assert json.loads((tmp_path / "imported" / "study.json").read_text())["vitscale"] == identity()
    headers = [json.loads(path.read_text()) for path in (tmp_path / "imported").rglob("trial.json")]
    assert {header["vitscale"] for header in headers} == {identity()}
    assert vitscale("--version") == (0, f"vitscale {identity()}\n", "")


def imported_by(folder: Path, program: str | None) -> None:
    """Makes an import one of another program; None: of a format that did not say which."""
    path = folder / "study.json"
    study = json.loads(path.read_text()) | ({"format": 11} if program is None else {})
    path.write_text(json.dumps(study | {"vitscale": program}))


@pytest.mark.parametrize("program", [None, "0.1.0+000000000000"])
def test_an_import_of_another_program_is_done_where_this_one_reads_the_same(
    vitscale: Callable[..., tuple[int, str, str]], table: Path, tmp_path: Path, program: str | None
) -> None:
    assert vitscale("import", str(table), "-o", "imported")[0] == 0
    imported_by(tmp_path / "imported", program)
    before = tree(tmp_path)
    code, out, _ = vitscale("import", str(table), "-o", "imported")
    assert code == 0
    assert "Nothing to do" in out
    assert tree(tmp_path) == before


def test_an_import_that_another_program_read_otherwise_is_not_called_done(
    vitscale: Callable[..., tuple[int, str, str]], table: Path, tmp_path: Path
) -> None:
    """A mended reader: figures of the folder are those of the old one until it is imported anew."""
    assert vitscale("import", str(table), "-o", "imported")[0] == 0
    imported_by(tmp_path / "imported", "0.1.0+000000000000")
    lines = next((tmp_path / "imported").rglob("rank-0.jsonl"))
    lines.write_text(lines.read_text().replace('"train_loss":', '"train_loss":1', 1))
    code, _, err = vitscale("import", str(table), "-o", "imported")
    assert code == 2
    assert "as vitscale 0.1.0+000000000000 read 'epochs.csv'; this one, 0.1.0+" in err
    assert "Give another folder with -o, or remove this one to import anew" in err
    assert vitscale("import", str(table), "-o", "again")[0] == 0


def test_a_folder_of_something_else_is_refused(
    vitscale: Callable[..., tuple[int, str, str]], table: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    code, _, err = vitscale("import", str(table), "-o", "mine")
    assert code == 2
    assert "something else than results" in err
    code, _, err = vitscale("import", str(table), "-o", "mine/thesis.tex")
    assert code == 2
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "precious"


def test_an_import_that_lost_a_run_is_not_taken_for_whole(
    vitscale: Callable[..., tuple[int, str, str]], table: Path, tmp_path: Path
) -> None:
    assert vitscale("import", str(table), "-o", "imported")[0] == 0
    next((tmp_path / "imported").rglob("outcome.json")).unlink()
    code, _, err = vitscale("import", str(table), "-o", "imported")
    assert code == 2
    assert "a part of this import" in err


def test_json(vitscale: Callable[..., tuple[int, str, str]], table: Path) -> None:
    code, out, _ = vitscale("import", str(table), "-o", "imported", "--json")
    content = json.loads(out)
    assert code == 0
    assert (content["vitscale"], content["version"], content["format"]) == ("import", 1, "epochs")
    assert content["written"] is True
    assert content["series"][0]["gpus"] == [1, 2, 3, 4]
    assert content["series"][0]["epochs"] == 8


def test_report_of_an_unknown_model_and_engine(
    vitscale: Callable[..., tuple[int, str, str]], table: Path, tmp_path: Path
) -> None:
    assert vitscale("import", str(table), "-o", "imported")[0] == 0
    code, _, err = vitscale("report", "imported", "--format", "md,json", "-o", "shown")
    assert code == 0, err
    content = json.loads((tmp_path / "shown" / "report.json").read_text())
    trial = content["trials"][0]
    assert trial["engine"] == "unknown"
    assert trial["model"] == "unknown model"
    assert trial["parameters"] is None
    assert trial["mfu"] is None
    assert trial["threads_per_rank"] is None
    kinds = {verdict["kind"] for verdict in content["verdicts"]}
    assert {"imported", "steps-from-epochs", "too-few-repeats"} <= kinds
    assert not kinds & {
        "few-steps",
        "profile-missing",
        "clock-anomaly",
        "drift-unknown",
        "unfinished",
        "loss-not-finite",
    }
    assert any("1 broken line" in problem for problem in content["problems"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--format", "epoch"], "Did you mean 'epochs'?"),
        (["--model", "vit-b17"], "vit-b17"),
        (["--precision", "fp8"], "unknown precision 'fp8'"),
        (["--gpus", "0"], "--gpus is '0'"),
        (["--train-samples", "-1"], "--train-samples is -1"),
        (["--image-size", "32"], "--image-size is given without --model"),
        (["--zero-stage", "4"], "--zero-stage is 4"),
        (["--engine", "\x1b[31m"], "--engine is"),
    ],
)
def test_wrong_options(
    vitscale: Callable[..., tuple[int, str, str]], table: Path, tmp_path: Path, arguments: list[str], said: str
) -> None:
    code, _, err = vitscale("import", str(table), "-o", "imported", *arguments)
    assert code == 2
    assert said in err
    assert "Traceback" not in err
    assert not (tmp_path / "imported").exists()


def test_files_that_are_none(vitscale: Callable[..., tuple[int, str, str]], table: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("hello\n")
    assert "tells its format" in vitscale("import", "text.txt", "-o", "imported")[2]
    for name in ("absent.csv", "."):
        code, _, err = vitscale("import", name, "--format", "epochs", "-o", "imported")
        assert code == 2
        assert "cannot be read" in err
    log = deepspeed_log(tmp_path / "a.log", steady(0, 5))
    assert "different formats" in vitscale("import", str(table), str(log), "-o", "imported")[2]
    assert not (tmp_path / "imported").exists()


def test_pipes_are_no_logs_and_an_empty_folder_takes_results(
    vitscale: Callable[..., tuple[int, str, str]], table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    code, _, err = vitscale("import", "pipe", "-o", "imported")
    assert code == 2
    assert "it is no file" in err
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert vitscale("import", str(table), "-o", ".")[0] == 0
    assert (tmp_path / "empty" / "study.json").exists()


def test_gpus_of_each_file_on_the_command_line(tmp_path: Path, vitscale: Callable[..., tuple[int, str, str]]) -> None:
    """Of rates alone, which tell no world size; a table is no run of its own."""
    logs = [tmp_path / "two.log", tmp_path / "eight.log"]
    for log in logs:
        log.write_text("global_step=10, RunningAvgSamplesPerSec=9.0, CurrSamplesPerSec=1000.0, MemAllocated=1.2GB\n")
    code, out, _ = vitscale("import", *map(str, logs), "--gpus", "2,8", "--json", "-o", "RESULTS")
    assert (code, json.loads(out)["series"][0]["gpus"]) == (0, [2, 8])
    code, _, err = vitscale("import", *map(str, logs), "--gpus", "2,8", "--format", "trace", "-o", "TRACE")
    assert code != 0
    assert "--gpus has 2 numbers, and trace tells them itself" in err


def test_tables_that_tell_no_gpus_take_them_from_the_command_line(
    tmp_path: Path, vitscale: Callable[..., tuple[int, str, str]]
) -> None:
    """As wandb exports the history of a run: 64 images in 0.4 s on one GPU, 512 in 0.44 s on eight."""
    files = [tmp_path / "one.csv", tmp_path / "eight.csv"]
    for file, seconds in zip(files, (0.4, 0.44), strict=True):
        steps = "".join(f"{step},64,{1000 * seconds}\n" for step in range(4))
        file.write_text(f"_step,micro_batch,step_time_ms\n{steps}")
    code, _, err = vitscale("import", *map(str, files), "-o", "RESULTS")
    assert (code, "has no column gpus, which counts them (or --gpus)" in err) == (2, True)
    files[0].with_name("four.csv").write_text("gpus,step_time_ms\n4,410\n")
    code, _, err = vitscale("import", str(files[0]), "four.csv", "--gpus", "1,8", "-o", "RESULTS")
    assert (code, "--gpus has 8 for 'four.csv', whose table tells its GPUs" in err) == (2, True)
    page = files[0].with_name("page.md")
    page.write_text("| model | img/s |\n|--|--|\n| vit | 100 |\n\n| gpus | img/s |\n|--|--|\n| 1 | 90 |\n| 2 | 170 |\n")
    code, out, _ = vitscale("import", str(page), "--gpus", "8", "--json", "-o", "PAGE")
    assert (code, [series["gpus"] for series in json.loads(out)["series"]]) == (0, [[1, 2]])
    code, out, _ = vitscale("import", *map(str, files), "--gpus", "1,8", "--json", "-o", "RESULTS")
    [series] = json.loads(out)["series"]
    assert (code, series["gpus"], series["runs"], series["steps"]) == (0, [1, 8], 2, 8)
    _, out, _ = vitscale("report", "RESULTS", "--json")
    assert [trial["images_per_second"] for trial in json.loads(out)["trials"]] == pytest.approx([160, 512 / 0.44])
