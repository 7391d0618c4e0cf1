"""Every answer from results says before all else which finished runs cannot be read: it would look like any other."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from prediction_factory import resolved_study
from results_factory import write_results
from study_factory import toml
from vitscale import cli
from vitscale.pages.outputs import UnreadWarning
from vitscale.pages.outputs import load as load_frames
from vitscale.store import load, pack_finished, reading
from vitscale.store.packs import pack_files

STUDY = {1: [0.1, 0.101, 0.102], 2: [0.06, 0.061, 0.062], 4: [0.04, 0.041, 0.042]}


class Printed(NamedTuple):
    out: str
    error: str
    code: Any

    @property
    def words(self) -> str:
        return " ".join(self.out.split())


Call = Callable[..., Printed]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path) -> Printed:
        monkeypatch.setattr(sys, "argv", ["vitscale", *map(str, arguments)])
        code: Any = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code
        return Printed(*capsys.readouterr(), code)

    return run


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Results of nine runs, in three packs."""
    monkeypatch.setattr(reading, "PACK_RUNS", 3)
    folder = tmp_path / "whole"
    write_results(resolved_study(STUDY), folder)
    pack_finished(folder)
    assert len(pack_files(folder)) == 3
    return folder


@pytest.fixture
def damaged(whole: Path, tmp_path: Path) -> Path:
    """The same without a pack that can be read."""
    folder = Path(shutil.copytree(whole, tmp_path / "damaged"))
    pack = pack_files(folder)[-1]
    pack.write_bytes(pack.read_bytes()[:100])
    return folder


BEGINNING = (
    "Finished runs are missing from this answer; put the file back from a copy, or delete it, and `vitscale run`"
)
ANSWERS: dict[str, Sequence[str]] = {
    "predict": ["predict", "RESULTS"],
    "advise": ["advise", "RESULTS"],
    "report": ["report", "RESULTS"],
    "report --like": ["report", "RESULTS", "--like", "paper"],
    "report as tables": ["report", "RESULTS", "--format", "csv"],
    "export": ["export", "RESULTS"],
}


@pytest.mark.parametrize("form", ANSWERS)
def test_an_answer_begins_with_what_cannot_be_read(form: str, damaged: Path, call: Call) -> None:
    printed = call(*[damaged if word == "RESULTS" else word for word in ANSWERS[form]])
    assert printed.words.startswith(BEGINNING), printed
    assert f"packs/{pack_files(damaged)[-1].name} cannot be read: " in printed.words


@pytest.mark.parametrize("form", ["predict", "advise", "report", "report --like", "export"])
def test_and_so_does_its_json(form: str, damaged: Path, whole: Path, call: Call) -> None:
    for folder, count in ((damaged, 1), (whole, 0)):
        printed = call(*[folder if word == "RESULTS" else word for word in ANSWERS[form]], "--json")
        unread = json.loads(printed.out)["unread"]
        assert len(unread) == count
    printed = call(*[damaged if word == "RESULTS" else word for word in ANSWERS[form]], "--json")
    (unread,) = json.loads(printed.out)["unread"]
    name = f"packs/{pack_files(damaged)[-1].name}"
    assert (unread["file"], unread["results"]) == (name, None)
    assert unread["reason"].startswith(f"{name} cannot be read: ")


@pytest.mark.parametrize("suffix", ["html", "md", "tex"])
def test_a_page_begins_with_it(suffix: str, damaged: Path, tmp_path: Path, call: Call) -> None:
    page = tmp_path / f"page.{suffix}"
    call("report", damaged, "-o", page)
    text = page.read_text()
    assert text.index("Finished runs are missing") < text.index("How does it scale")


def test_compare_names_the_results_and_strict_does_not_pass(
    damaged: Path, whole: Path, tmp_path: Path, call: Call
) -> None:
    printed = call("compare", whole, damaged)
    assert printed.words.startswith("Finished runs of damaged are missing from this answer; ")
    (unread,) = json.loads(call("compare", whole, damaged, "--json").out)["unread"]
    assert unread["results"] == "damaged"
    call("compare", whole, damaged, "-o", tmp_path / "page.md")
    assert "Finished runs of damaged are missing" in (tmp_path / "page.md").read_text()


def test_strict_fails_where_runs_are_unread(whole: Path, tmp_path: Path, call: Call) -> None:
    """The same digests pass; one run of the copy is damaged."""
    folder = tmp_path / "copy"
    write_results(resolved_study(STUDY), tmp_path / "plain")
    shutil.copytree(tmp_path / "plain", folder)
    limits = ["--fail-if-slower", "50%"]
    assert call("compare", tmp_path / "plain", folder, *limits, "--strict").code == 0
    next((folder / "runs").iterdir()).joinpath("trial.json").write_text("{")
    assert call("compare", tmp_path / "plain", folder, *limits).code == 0
    assert call("compare", tmp_path / "plain", folder, *limits, "--strict").code == 1


@pytest.mark.parametrize("file", ["trial.json", "outcome.json", "rank-0.jsonl"])
def test_a_run_whose_files_cannot_be_read_is_named_too(file: str, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    write_results(resolved_study(STUDY), folder)
    run = sorted((folder / "runs").iterdir())[0]
    (run / file).write_bytes((run / file).read_bytes()[:-9] + b"\xff\xff")
    (unread,) = load(folder).unread
    assert unread.file == f"runs/{run.name}"
    assert unread.reason.startswith(f"runs/{run.name}/{file}")
    assert "delete its run's folder" in unread.remedy


def test_a_run_that_was_done_again_is_not_missing(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    write_results(resolved_study(STUDY), folder)
    run = sorted((folder / "runs").iterdir())[0]
    again = run.with_name(run.name.replace("-a0", "-a1"))
    shutil.copytree(run, again)
    header = json.loads((again / "trial.json").read_text())
    (again / "trial.json").write_text(json.dumps(header | {"attempt": 1}))
    (run / "outcome.json").write_text("{")
    loaded = load(folder)
    assert loaded.unread == ()
    assert any("outcome.json cannot be read" in problem for problem in loaded.problems)


def test_frames_warn(damaged: Path, whole: Path) -> None:
    with pytest.warns(UnreadWarning, match=r"^Finished runs are missing from this answer; put the file back"):
        load_frames(damaged)
    load_frames(whole)  # a warning is an error in tests


def test_the_report_does_not_trust_itself(damaged: Path, call: Call) -> None:
    content = json.loads(call("report", damaged, "--json").out)
    assert [verdict["severity"] for verdict in content["verdicts"] if verdict["kind"] == "unread"] == ["warning"]


@pytest.mark.parametrize("redact", [False, True])
def test_a_bundle_of_what_is_left_is_read_and_says_what_it_lacks(
    redact: bool, damaged: Path, tmp_path: Path, call: Call
) -> None:
    bundle, again = tmp_path / "e.tgz", tmp_path / "again.tgz"
    pack = pack_files(damaged)[-1].name
    assert call("export", damaged, "-o", bundle, *(["--redact"] if redact else [])).code == 0
    for file in (bundle, again):
        printed = call("predict", file)
        assert printed.words.startswith(
            "Finished runs are missing from this answer; ask for a bundle of whole results, for this one was made "
            f"without them: packs/{pack} cannot be read"
        ), printed
        with contextlib.suppress(FileExistsError):
            call("export", bundle, "-o", again)
    assert len(load(bundle).runs) == len(load(damaged).runs)


def test_a_plan_that_predicts_from_results_says_it(damaged: Path, tmp_path: Path, call: Call) -> None:
    (tmp_path / "study.toml").write_text(toml())
    printed = call("plan", tmp_path / "study.toml", "--from", damaged)
    assert printed.words.startswith(BEGINNING), printed
    assert len(json.loads(call("plan", tmp_path / "study.toml", "--from", damaged, "--json").out)["unread"]) == 1
