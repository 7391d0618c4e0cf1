"""What a function of the API answers from results begins with what cannot be read of them, in each of its forms."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import vitscale
from api_places import make_place
from vitscale.api.comparing import CompareResult
from vitscale.present.document import Document
from vitscale.present.verb_result import VerbResult
from vitscale.runner.planning import Report

MISSING = "Finished runs are missing from this answer; put the file back from a copy"
OF_DAMAGED = "Finished runs of damaged are missing from this answer; put the file back from a copy"
Answer = Callable[[str], VerbResult]


def ran(results: str) -> VerbResult:
    """What `run` returns for results that are there already."""
    return vitscale.RunResult(Path(results), Report(done_now=0, outcomes={}), vitscale.report(results).analysis)


ANSWERS: dict[str, Answer] = {
    "advise": vitscale.advise,
    "compare": lambda results: vitscale.compare("slower", results),
    "export": lambda results: vitscale.export(results, "bundle.tar.gz"),
    "plan": lambda results: vitscale.plan("study.toml", from_results=results),
    "predict": vitscale.predict,
    "report": vitscale.report,
    "run": ran,
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with whole `results`, and with `damaged`, of which one run cannot be read."""
    make_place(tmp_path)
    shutil.copytree(tmp_path / "results", tmp_path / "damaged")
    first, *_ = sorted((tmp_path / "damaged" / "runs").iterdir())
    (first / "trial.json").write_text("{")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("verb", ANSWERS)
@pytest.mark.usefixtures("place")
def test_each_form_of_an_answer_begins_with_what_is_unread(verb: str) -> None:
    result = ANSWERS[verb]("damaged")

    said = OF_DAMAGED if verb == "compare" else MISSING
    assert result.to_markdown().lstrip("*_ ").startswith(said)
    assert 0 <= result._repr_html_().find(said) < 200
    (unread,) = json.loads(result.to_json())["unread"]
    assert unread["file"].startswith("runs/")
    assert f"{unread['file']}/trial.json cannot be read" in unread["reason"]


@pytest.mark.parametrize("verb", ANSWERS)
@pytest.mark.usefixtures("place")
def test_and_says_nothing_of_it_where_all_was_read(verb: str) -> None:
    result = ANSWERS[verb]("results")

    assert json.loads(result.to_json())["unread"] == []
    assert "missing from this answer" not in result.to_markdown()


@pytest.mark.usefixtures("place")
def test_a_page_of_a_comparison_begins_with_it() -> None:
    compared = vitscale.compare("slower", "damaged", output="page.html")

    assert isinstance(compared, CompareResult)
    assert OF_DAMAGED in Path("page.html").read_text()


@pytest.mark.usefixtures("place")
def test_what_rests_on_no_results_has_no_such_field() -> None:
    assert "unread" not in json.loads(vitscale.lint("ds.json").to_json())


def test_a_result_cannot_be_made_that_does_not_say_what_is_unread() -> None:
    class Forgetful(VerbResult):
        verb = "predict"
        summary = "nothing"

        def _answer_fields(self) -> dict[str, Any]:
            return {}

        def _answer_document(self) -> Document:
            return Document("", ())

    with pytest.raises(TypeError, match=r"abstract .*unread"):
        Forgetful()  # type: ignore[abstract]
