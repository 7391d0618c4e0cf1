"""What the command line does when its output goes nowhere, or is asked for twice."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from driving import TINY_MODEL, vitscale
from results_factory import one_curve, write_results
from vitscale import cli, store

STUDY = f"""
name = "output"
{TINY_MODEL}
[data]
name = "digits"
[train]
precision = "fp32"
micro_batch = 8
[scaling]
gpus = [1]
[launch]
launcher = "LAUNCHER"
[measure]
steps = 20
repeats = 3
"""


def study(folder: Path, launcher: str) -> Path:
    path = folder / "study.toml"
    path.write_text(STUDY.replace("LAUNCHER", launcher))
    return path


@pytest.mark.parametrize("verb", ["--help", "plan"])
def test_a_verb_waits_for_no_library_that_it_has_no_use_for(tmp_path: Path, verb: str) -> None:
    """Help is to be there in 0.2 s, a plan in 0.8 (`benchmarks/configurations.py`)."""
    heavy = {"torch", "scipy", "polars", "PIL", "psutil", "tarfile", "multiprocessing", "vitscale.pages"}
    words = [verb] if verb == "--help" else [verb, str(study(tmp_path, "local"))]
    heavy |= {"numpy", "pydantic", "vitscale.runner"} if verb == "--help" else set()
    program = f"import atexit, sys; atexit.register(lambda: print({heavy} & {{*sys.modules}}))"
    program += "; from vitscale.cli import main; main()"
    answer = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    assert {"--help": "completion", "plan": "3 runs"}[verb] in answer.stdout
    assert answer.stdout.endswith("set()\n")


def test_a_full_disk_behind_standard_output_is_told(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vitscale", "plan", str(study(tmp_path, "local"))]
    for more in ([], ["--json"]):
        with Path("/dev/full").open("w") as full:
            answer = subprocess.run([*command, *more], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert answer.returncode == 1
        assert answer.stderr == "vitscale: standard output cannot be written: No space left on device\n"


def test_a_study_goes_on_when_nobody_listens_any_more(tmp_path: Path) -> None:
    """As under `vitscale run ... | head -1`."""
    driver = Path(__file__).parent / "runner" / "record_only.py"
    process = subprocess.Popen(
        [sys.executable, driver, "cli", "run", study(tmp_path, "record-only"), "-o", tmp_path / "results"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().startswith("run 1 of 3")
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 0
    assert len(store.load(tmp_path / "results").runs) == 3


def test_json_and_a_format_are_not_both_taken(tmp_path: Path) -> None:
    answer = vitscale("report", tmp_path, "--json", "--format", "html")
    assert answer.returncode == 2
    assert "--json and --format are both given" in answer.stderr


def told(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """The exit code of `vitscale ARGUMENTS` in this process."""
    monkeypatch.setattr(sys, "argv", ["vitscale", *map(str, arguments)])
    try:
        cli.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.mark.parametrize("columns", ["0", "", "wide", "-3"])
def test_a_width_that_is_none_is_as_if_nobody_told_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, columns: str
) -> None:
    write_results(one_curve({1: [0.1]}), tmp_path / "results")
    monkeypatch.setenv("COLUMNS", columns)
    assert told(monkeypatch, "report", tmp_path / "results") == 0
    assert "1 of 1 trial completed" in capsys.readouterr().out
    assert told(monkeypatch, "report", tmp_path / "nothing") == 2
    assert "nothing" in capsys.readouterr().err


def ends_with(monkeypatch: pytest.MonkeyPatch, does: Callable[[], None]) -> int:
    """The exit code where a verb does `does`."""
    monkeypatch.setattr(cli, "_program", lambda _: lambda **_: does())
    return told(monkeypatch, "report")


@pytest.mark.parametrize(("encoding", "printed"), [("ascii", b"caf? ?"), ("latin-1", b"caf\xe9 ?"), ("UTF8", None)])
def test_a_terminal_that_lacks_letters_gets_all_others(
    monkeypatch: pytest.MonkeyPatch, encoding: str, printed: bytes | None
) -> None:
    content = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(content, encoding=encoding))
    assert ends_with(monkeypatch, lambda: print("caf\xe9 \u2501", end="")) == 0
    assert content.getvalue() == (printed or "caf\xe9 \u2501".encode())
    assert sys.stdout.errors == ("replace" if printed else "strict")


def test_a_file_of_another_package_is_not_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for file, named in (("/data/x", "'/data/x'"), (b"/data/x", "'/data/x'"), (5, "file descriptor 5")):

        def refused(file: str | bytes | int = file) -> None:
            raise PermissionError(13, "Permission denied", file)

        assert ends_with(monkeypatch, refused) == 1
        assert capsys.readouterr().err == f"vitscale: {named} cannot be used: Permission denied\n"


@pytest.mark.parametrize("verb", ["report", "export", "compare"])
def test_a_file_that_no_system_has_is_a_wrong_request(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_results(one_curve({1: [0.1]}), tmp_path)
    given = [str(tmp_path)] * (2 if verb == "compare" else 1)
    monkeypatch.setattr(sys, "argv", ["vitscale", verb, *given, "-o", f"{'x' * 300}.html"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "(305 characters) cannot be used: File name too long" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("named", ["results/study.json", "link.json", "results/runs/*/outcome.json"])
def test_a_report_does_not_take_the_place_of_a_record(
    named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_results(one_curve({1: [0.1]}), tmp_path / "results")
    (tmp_path / "link.json").symlink_to("results/study.json")
    (output,) = tmp_path.glob(named)
    before = output.read_bytes()
    for more in (["--format", "json"], ["--like", "paper", "--format", "json"]):
        argv = ["vitscale", "report", str(tmp_path / "results"), "-o", str(output), *more]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 2
        assert "is a file that results are read from" in " ".join(capsys.readouterr().err.split())
        assert output.read_bytes() == before


def test_tables_are_shown_where_no_page_can_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As in a folder that may only be read, which no test run by root has."""
    write_results(one_curve({1: [0.1]}), tmp_path)
    (tmp_path / "report.html").mkdir()
    assert told(monkeypatch, "report", tmp_path) == 2
    said = capsys.readouterr()
    assert "1 of 1 trial completed" in said.out
    assert "Report: " not in said.out
    assert said.err.startswith("vitscale: the report cannot be written to")
    assert "report.html': Is a directory" in said.err


def test_where_a_report_goes_is_what_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_results(one_curve({1: [0.1]}), tmp_path / "results")
    monkeypatch.chdir(tmp_path)
    assert told(monkeypatch, "report", "results", "--format", "md", "-o", "-") == 0
    assert capsys.readouterr().out.startswith("# example")
    os.mkfifo("pipe.md")
    reading = os.open("pipe.md", os.O_RDONLY | os.O_NONBLOCK)
    assert told(monkeypatch, "report", "results", "-o", "pipe.md") == 0
    assert os.read(reading, 9) == b"# example"
    os.close(reading)
    assert capsys.readouterr() == ("", "pipe.md\n"), "a pipe may be standard output"
    for arguments, said in (
        (("--format", "csv", "-o", "-"), "-o - is standard output, and csv cannot go there. Valid: --format md,"),
        (("-o", "-"), "-o - is standard output, and html cannot go there"),
        (("--format", "png", "-o", "pic.png"), "-o 'pic.png' names one file, and --format png makes several"),
        (("-o", "pic.svg"), "-o 'pic.svg' names one file, and --format svg makes several. Name a folder with -o."),
        (("--format", "html,csv", "-o", "x.html"), "-o 'x.html' names one file, and --format html,csv makes several"),
    ):
        assert told(monkeypatch, "report", "results", *arguments) == 2
        assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pipe.md", "results"]
