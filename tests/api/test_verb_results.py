"""A result is the same in Python as on the command line: its JSON is that of --json, its document what is printed."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import vitscale
from api_places import make_place
from vitscale import cli
from vitscale.present.document import Bullets, Document, Finding, Paragraph, Section, table
from vitscale.present.document import Column as DocumentColumn
from vitscale.present.verb_result import VerbResult
from vitscale.runner.planning import Report
from vitscale.store.reading import RunKey
from vitscale.store.results import Outcome

HOSTILE = "<script>alert(1)</script> ${x} {0}"
ASKED: dict[str, tuple[Callable[[], VerbResult], tuple[str, ...]]] = {
    "plan": (
        lambda: vitscale.plan("study.toml", ["train.micro_batch=16"], price=2, gpu_memory="80GB"),
        ("study.toml", "train.micro_batch=16", "--price", "2", "--gpu-memory", "80GB"),
    ),
    "lint": (
        lambda: vitscale.lint("ds.json", gpus=8, parameters="110M"),
        ("ds.json", "--gpus", "8", "--parameters", "110M"),
    ),
    "report": (lambda: vitscale.report("results"), ("results",)),
    "predict": (
        lambda: vitscale.predict(
            "results", [8, 16], network="25GbE", changes=vitscale.Changes(micro_batch=8), price=3, gpu_memory="80GB"
        ),
        ("results", "--gpus", "16,8", "--network", "25GbE", "--micro-batch", "8", "--price", "3",
         "--gpu-memory", "80GB"),
    ),
    "advise": (
        lambda: vitscale.advise(
            "results",
            limits=vitscale.AdviceLimits(deadline_seconds=7200, min_efficiency=0.8),
            choices=vitscale.AdviceChoices(gpus=[2, 8], split=True),
            training=vitscale.TrainingPlan(epochs=5, node_mtbf_hours=1000),
            price=2.5,
        ),
        ("results", "--deadline", "2h", "--min-efficiency", "80%", "--gpus", "2,8", "--split", "--epochs", "5",
         "--node-mtbf", "1000h", "--price", "2.5"),
    ),
    "compare": (
        lambda: vitscale.compare("results", "slower", fail_if_slower=0.05),
        ("results", "slower", "--fail-if-slower", "5%"),
    ),
    "import": (
        lambda: vitscale.import_results("table.csv", output="imported", engine="ddp", micro_batch=8),
        ("table.csv", "-o", "imported", "--engine", "ddp", "--micro-batch", "8"),
    ),
    "export": (lambda: vitscale.export("results", "b.tar.gz"), ("results", "-o", "b.tar.gz")),
}  # fmt: skip
"""A verb -> the call of its function, and the same as arguments of the command line."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("api")
    make_place(folder)
    return folder


@pytest.mark.parametrize("verb", ASKED)
def test_a_result_is_what_its_verb_prints(
    verb: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    call, arguments = ASKED[verb]
    if verb == "import":
        call()  # the second time, whether it was written is the same for both
    result = call()
    assert capsys.readouterr().out == "", "a function prints nothing"
    monkeypatch.setattr(sys, "argv", ["vitscale", verb, *arguments, "--json"])
    with pytest.raises(SystemExit):
        cli.main()
    printed = json.loads(capsys.readouterr().out)
    assert json.loads(result.to_json()) == printed
    assert printed["vitscale"] == verb
    assert result.verb == verb
    assert repr(result).startswith(f"<{verb}: ")
    assert len(repr(result)) < 200
    assert "\n" not in repr(result)


def test_a_repr_is_a_line_however_much_is_in_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    many = vitscale.predict("results", range(1, 40))
    assert repr(many) == "<predict: 1 series on 1, 2, 3, 4, 5, 6 and 33 more ranks>"


class Hostile(VerbResult):
    """A result in which every text is a user's own."""

    verb = "lint"
    summary = HOSTILE
    unread = None

    def _answer_fields(self) -> dict[str, str]:
        return {"text": HOSTILE}

    def _answer_document(self) -> Document:
        laid = table([DocumentColumn(HOSTILE)], [[HOSTILE]], title=HOSTILE, notes=[HOSTILE], folded=True)
        finding = Finding(HOSTILE, "error", HOSTILE, HOSTILE)
        section = Section(HOSTILE, (Bullets((HOSTILE,)),), folded=True)
        return Document(HOSTILE, (Paragraph(HOSTILE), laid, finding, section), (HOSTILE,))


def test_a_notebook_shows_the_texts_of_users_as_text() -> None:
    html = Hostile()._repr_html_()
    assert "<script" not in html
    assert html.count("&lt;script&gt;") >= 8
    assert "<details" in html, "what is folded opens on request"
    assert "<script" not in Hostile()._repr_markdown_()


def test_an_interval_stands_apart_from_its_figure_without_a_style_sheet(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    html = vitscale.predict("results", [8])._repr_html_()
    assert 'class="bounds"' not in html
    assert re.search(r"<td>1\.\d+\ss \(1\.\d+.1\.\d+\)</td>", html)


def test_a_folder_of_the_home_folder_is_found(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(place))
    assert repr(vitscale.report("~/results")) == repr(vitscale.report(place / "results"))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: vitscale.predict("results", []), "--gpus has no rank count"),
        (lambda: vitscale.predict("results", 0), "--gpus: 0 ranks cannot be"),
        (lambda: vitscale.predict("results", 8, gpu_memory=0), "--gpu-memory: 0 bytes cannot be"),
        (lambda: vitscale.predict("results", range(1, 2000)), "more than 1,000 rank counts"),
        (
            lambda: vitscale.advise("results", limits=vitscale.AdviceLimits(min_efficiency=1.5)),
            "--min-efficiency: 1.5 cannot be. Valid: numbers above 0 and at most 1.",
        ),
        (lambda: vitscale.compare("results"), "one folder is given"),
        (lambda: vitscale.compare(), "none is given"),
        (lambda: vitscale.compare("results", "slower", fail_if_slower=-0.1), "--fail-if-slower: -0.1 cannot be"),
        (lambda: vitscale.report("results").text("pdf"), "unknown form of text 'pdf'"),
        (lambda: vitscale.import_results([]), "no log is given"),
        (lambda: vitscale.import_results("table.csv", gpus=[1, 2]), "--gpus is '1,2': 2 numbers for 1 file"),
        (
            lambda: vitscale.plan("study.toml", launch=vitscale.LaunchOptions(scheduler="cron")),
            "launch.scheduler is 'cron'",
        ),
    ],
)
def test_a_wrong_argument_is_one_message(
    call: Callable[[], object], says: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    with pytest.raises(vitscale.RequestError) as refused:
        call()
    assert says in str(refused.value)


def test_what_an_import_leaves_open_is_asked_by_its_argument_with_its_choices(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    Path("cells.csv").write_text("model,1 GPU,2 GPUs,4 GPUs\nvit-b16,400,780,1500\n")
    with pytest.raises(vitscale.RequestError, match=r"does not say what they hold. Valid: --cells .*images_per_second"):
        vitscale.import_results("cells.csv", output="open")
    answered = vitscale.import_results("cells.csv", output="open", cells="images_per_second")
    assert isinstance(answered, vitscale.ImportResult)
    assert len(answered.done.runs) == 3


def test_a_report_is_written_and_not_printed(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    reported = vitscale.report("results")
    assert reported.write(["json", "md"]) == [Path("results/report.json"), Path("results/report.md")]
    assert vitscale.report_like("results", "paper", formats=["json"]).written == (
        Path("results/like-paper/like-paper.json"),
    )
    assert capsys.readouterr().out == ""
    assert Path("results/report.json").read_text() == reported.to_json() == reported.text("json")


def test_runs_that_were_skipped_are_not_said_to_be_done(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    analysed = vitscale.report("results").analysis
    unfit = Outcome(kind="skipped", reason="needs 2 GB", external=True, started_unix_seconds=0.0, wall_seconds=0.0)
    skipped = Report(done_now=0, outcomes={RunKey("trial", repeat): unfit for repeat in range(2)})
    said = vitscale.RunResult(Path("results"), skipped, analysed).to_markdown()
    assert "2 of 2 runs skipped: they will not fit in memory" in said
    assert "Nothing to do" not in said
    said_of_all_done = vitscale.RunResult(Path("results"), Report(done_now=0, outcomes={}), analysed).to_markdown()
    assert "Nothing to do" in said_of_all_done
