"""Two results of known times side by side: the ratio put in comes out, and a gate opens and closes as it says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from prediction_factory import resolved_study
from results_factory import failed_run, make_curve, make_results, make_trial, steady_run, write_results
from vitscale import cli
from vitscale.analysis.counterparts import _shortened
from vitscale.api import comparing
from vitscale.cli.base import ProgramConsole
from vitscale.errors import RequestError
from vitscale.runner import alternating
from vitscale.store.results import Run

SPREAD = (1.0, 1.004, 0.996, 1.002)


def results(folder: Path, name: str, factor: float = 1.0, runs: int = 4, ranks: tuple[int, ...] = (1, 2)) -> Path:
    """A study whose steps take `factor` times 0.1 s, with a spread of half a percent."""
    times = {n: [factor * 0.1 * spread for spread in SPREAD[:runs]] for n in ranks}
    write_results(resolved_study(times), folder / name)
    return folder / name


def compared(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
    """Exit code and data."""
    answer = CliRunner().invoke(cli.app, ["compare", *map(str, arguments), "--json"])
    return answer.exit_code, json.loads(answer.stdout) if answer.stdout else {}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return results(tmp_path_factory.mktemp("base"), "base")


@pytest.mark.parametrize(
    ("factor", "gate", "code", "strict"),
    [(1.0, "within", 0, 0), (0.8, "within", 0, 0), (1.2, "slower", 1, 1), (1.05, "undecided", 0, 1)],
)
def test_only_what_is_slower_for_certain_fails(
    base: Path, tmp_path: Path, factor: float, gate: str, code: int, strict: int
) -> None:
    """1.05 times as long is neither below nor beyond 5 % for certain."""
    other = results(tmp_path, "other", factor)
    exit_code, told = compared(base, other, "--fail-if-slower", "5%")
    assert [pair["gate"] for pair in told["pairs"]] == [gate, gate]
    assert [pair["time_ratio"] for pair in told["pairs"]] == pytest.approx([factor, factor])
    assert exit_code == code
    assert compared(base, other, "--fail-if-slower", "0.05", "--strict")[0] == strict


def test_without_a_limit_nothing_fails(base: Path, tmp_path: Path) -> None:
    code, told = compared(base, results(tmp_path, "other", 1.5))
    assert code == 0
    assert {pair["verdict"] for pair in told["pairs"]} == {"slower"}
    assert {pair["gate"] for pair in told["pairs"]} == {None}


def test_one_run_decides_nothing(base: Path, tmp_path: Path) -> None:
    code, told = compared(base, results(tmp_path, "other", 2.0, runs=1), "--fail-if-slower", "5%")
    assert code == 0
    assert {pair["verdict"] for pair in told["pairs"]} == {"too few repeats to tell"}
    assert {pair["gate"] for pair in told["pairs"]} == {"undecided"}


def test_all_comparisons_are_corrected_together(base: Path, tmp_path: Path) -> None:
    """Holm over 2 trials x 2 results: the smallest of four p-values counts four times."""
    others = [results(tmp_path, name, factor) for name, factor in (("b", 1.004), ("c", 1.2))]
    _, told = compared(base, *others)
    p = sorted(pair["p"] for pair in told["pairs"])
    smallest = min(told["pairs"], key=lambda pair: pair["p"])
    assert smallest["p_adjusted"] == pytest.approx(4 * p[0])
    assert len(told["pairs"]) == 4


def test_of_digests_and_revisions_the_first_digits_are_told() -> None:
    assert _shortened("24e6f5a0f5c4" + "0" * 52) == "24e6f5a0f5c4"
    assert _shortened("de4a5cb40c3a" + "0" * 28 + ", changed") == "de4a5cb40c3a, changed"
    assert [_shortened(value) for value in (1234567890123, None, "abcdef" * 5)] == [
        "1234567890123",
        "None",
        "abcdef" * 5,
    ]


def test_what_has_no_counterpart_is_named_and_strict(base: Path, tmp_path: Path) -> None:
    other = results(tmp_path, "other", ranks=(1,))
    code, told = compared(base, other, "--fail-if-slower", "5%")
    assert code == 0
    assert told["unmatched"] == ["other has nothing like ddp (strong-micro) on 2 ranks"]
    assert compared(base, other, "--fail-if-slower", "5%", "--strict")[0] == 1


def test_one_rank_without_a_counterpart_is_one_rank(base: Path, tmp_path: Path) -> None:
    _, told = compared(base, results(tmp_path, "other", ranks=(2,)))
    assert told["unmatched"] == ["other has nothing like ddp (strong-micro) on 1 rank"]


def test_it_writes_a_page_and_markdown(base: Path, tmp_path: Path) -> None:
    other = results(tmp_path, "other", 1.2)
    for name in ("c.md", "c.html"):
        answer = CliRunner().invoke(cli.app, ["compare", str(base), str(other), "-o", str(tmp_path / name)])
        assert (answer.exit_code, answer.stdout, answer.stderr) == (0, f"{tmp_path / name}\n", "")
        text = (tmp_path / name).read_text().replace("\N{NO-BREAK SPACE}", " ")
        assert "2 trials compared with base: 2 slower" in text
        assert "1.20" in text
    page = tmp_path / "again.html"
    answer = CliRunner().invoke(cli.app, ["compare", str(base), str(other), "-o", str(page), "--json"])
    assert (json.loads(answer.stdout)["vitscale"], answer.stderr) == ("compare", f"{page}\n")
    assert page.is_file()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "one folder is given"),
        (["--strict"], "one folder is given"),
        (["OTHER", "--strict"], "--strict is of --fail-if-slower"),
        (["OTHER", "--fail-if-slower", "much"], "--fail-if-slower is 'much'. Valid: 5%, 0.05."),
        (["OTHER", "-o", "x.pdf"], "Valid: FILE.html, FILE.md."),
    ],
)
def test_a_wrong_request_is_one_message(base: Path, tmp_path: Path, arguments: list[str], says: str) -> None:
    other = str(results(tmp_path, "other"))
    answer = CliRunner().invoke(cli.app, ["compare", str(base), *(other if a == "OTHER" else a for a in arguments)])
    assert says in str(answer.exception)


def test_a_limit_without_its_sign_is_refused(base: Path) -> None:
    """5 may be meant as 5 %: as five times the time the gate would always be open."""
    answer = CliRunner().invoke(cli.app, ["compare", str(base), str(base), "--fail-if-slower", "5"])
    assert isinstance(answer.exception, RequestError)
    assert str(answer.exception).startswith("--fail-if-slower is '5'. Valid: 5%, 0.05")
    assert compared(base, base, "--fail-if-slower", "500%")[0] == 0


# --- the same runs --------------------------------------------------------------------------------------------------


def test_results_against_themselves_or_a_copy_are_the_same_runs_and_pass(tmp_path: Path) -> None:
    """Runs that differ by 20 % decide nothing about a limit of 5 %; that they are the same runs does."""
    first = unsteady(tmp_path, "first")
    copy = tmp_path / "copy"
    shutil.copytree(first, copy)
    for other in (first, copy):
        code, told = compared(first, other, "--fail-if-slower", "5%", "--strict")
        assert code == 0
        assert {pair["verdict"] for pair in told["pairs"]} == {"the same runs"}
        assert {pair["same_runs"] for pair in told["pairs"]} == {True}
        assert {pair["gate"] for pair in told["pairs"]} == {"within"}
        assert [pair["time_ratio"] for pair in told["pairs"]] == [1.0, 1.0]
        assert told["next_steps"] == told["sessions"] == []
    answer = CliRunner().invoke(cli.app, ["compare", str(first), str(copy)])
    assert "2 trials compared with first: 2 the same runs" in answer.stdout


def test_equal_runs_of_another_time_are_not_the_same(tmp_path: Path) -> None:
    """Nor are those of the same time with one step that took another one."""
    first = unsteady(tmp_path, "first")
    for name, changes in (("later", {"later_seconds": 1e6}), ("other", {"times": (0.1, 0.12, 0.0801)})):
        code, told = compared(first, unsteady(tmp_path, name, **changes), "--fail-if-slower", "5%", "--strict")
        assert {pair["same_runs"] for pair in told["pairs"]} == {False}
        assert {pair["gate"] for pair in told["pairs"]} == {"undecided"}
        assert code == 1


def test_runs_that_are_in_both_results_are_named(tmp_path: Path) -> None:
    fewer, more = unsteady(tmp_path, "fewer"), unsteady(tmp_path, "more", times=(*UNSTEADY, 0.11))
    _, told = compared(fewer, more)
    assert {pair["same_runs"] for pair in told["pairs"]} == {False}
    assert all("3 runs in both results" in pair["differs"] for pair in told["pairs"])


def test_the_same_trials_that_failed_or_never_ran_pass_too(tmp_path: Path) -> None:
    """A trial that failed has no times; one that has no run yet on either side is not compared."""
    trials = [make_trial("ddp", n) for n in (1, 2, 4)]
    runs = [steady_run(trials[0], 0.1), failed_run(trials[1], "oom", "out of memory")]
    write_results(make_results([(make_curve(trials), trials)], runs), tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    code, told = compared(tmp_path / "first", tmp_path / "copy", "--fail-if-slower", "5%", "--strict")
    assert code == 0
    assert [(pair["gpus"], pair["verdict"]) for pair in told["pairs"]] == [(1, "the same runs"), (2, "the same runs")]
    assert told["unmatched"] == []


def test_of_runs_that_are_the_same_none_is_tested(base: Path, tmp_path: Path) -> None:
    """Holm's correction is for what is compared: two trials, not four."""
    other = results(tmp_path, "other", 1.004)
    shutil.copytree(base, tmp_path / "copy")
    _, told = compared(base, other, tmp_path / "copy")
    p = sorted(pair["p"] for pair in told["pairs"] if not pair["same_runs"])
    assert min(pair["p_adjusted"] for pair in told["pairs"] if not pair["same_runs"]) == pytest.approx(2 * p[0])


# --- what these runs could have shown -------------------------------------------------------------------------------


def test_the_smallest_slowdown_and_the_repeats_stand_beside_an_undecided_limit(tmp_path: Path) -> None:
    """3 runs that differ by 20 % cannot fail a slowdown of 20 %, and say so."""
    first, other = unsteady(tmp_path, "first"), unsteady(tmp_path, "other", times=(0.11, 0.13, 0.09))
    code, told = compared(first, other, "--fail-if-slower", "5%")
    assert code == 0
    for pair in told["pairs"]:
        assert pair["smallest_slowdown_shown"] > 0.5
        assert pair["target_slowdown"] == 0.05
        assert pair["repeats_to_show_target"] is None or pair["repeats_to_show_target"] > 50
    shown, next_step = told["next_steps"]
    assert "or more fails in 4 of 5 cases with these runs (" in shown
    assert shown.endswith("% in the least steady trial); a smaller one may be missed")
    assert "to decide 2 undecided trials (equal ones within 5 %, 10 % fails)" in next_step
    text = CliRunner().invoke(cli.app, ["compare", str(first), str(other), "--fail-if-slower", "5%"]).stdout
    assert shown in " ".join(text.split())


def test_steady_runs_show_more_and_need_no_further_repeats(base: Path, tmp_path: Path) -> None:
    """Of runs 0.3 % apart, 4 show 5 % as slower; a limit of 5 % fails from a little above it."""
    _, told = compared(base, results(tmp_path, "other", 1.05), "--fail-if-slower", "5%")
    for pair in told["pairs"]:
        assert 0.05 < pair["smallest_slowdown_shown"] < 0.07
        assert pair["repeats_to_show_target"] <= 4
        assert pair["repeats_to_decide"] <= 4
    _, without = compared(base, results(tmp_path, "another", 1.001))
    assert {pair["target_slowdown"] for pair in without["pairs"]} == {0.05}
    assert all(pair["smallest_slowdown_shown"] < 0.02 for pair in without["pairs"])
    assert len(without["next_steps"]) == 1
    assert "or more is reported in 4 of 5 cases with these runs" in without["next_steps"][0]


@pytest.mark.parametrize(
    ("runs", "says"),
    [
        (1, "next: measure.repeats = 3 on each side: one run does not say by how much runs differ"),
        (2, "next: to report 5 % as slower in 4 of 5 cases, measure.repeats = "),
    ],
)
def test_too_few_runs_say_how_many_to_make(base: Path, tmp_path: Path, runs: int, says: str) -> None:
    _, told = compared(base, results(tmp_path, "few", 1.01, runs=runs))
    assert told["next_steps"][0] == "fewer than 3 runs on a side: nothing is reported as slower or faster"
    assert told["next_steps"][1].startswith(says)


def test_it_says_in_plain_words_when_slower_is_reported(base: Path, tmp_path: Path) -> None:
    page = tmp_path / "c.md"
    CliRunner().invoke(cli.app, ["compare", str(base), str(results(tmp_path, "other", 1.01)), "-o", str(page)])
    text = page.read_text()
    assert '"slower" and "faster" are reported only if significant after Holm correction over all trials' in text
    assert "held against" not in text


def test_nothing_is_explained_that_the_table_does_not_have(base: Path, tmp_path: Path) -> None:
    """Of the same runs no slowdown is tested, so that none has one from which it would have been shown."""
    page = tmp_path / "c.md"
    CliRunner().invoke(cli.app, ["compare", str(base), str(results(tmp_path, "copy")), "-o", str(page)])
    text = page.read_text()
    assert "the same runs" in text
    assert "shown from" not in text
    assert "Holm" not in text


# --- sessions -------------------------------------------------------------------------------------------------------


def test_results_of_two_sessions_say_so_and_results_in_turn_do_not(tmp_path: Path) -> None:
    first = unsteady(tmp_path, "first", every_seconds=1000.0)
    week = 7 * 86_400.0
    _, told = compared(first, unsteady(tmp_path, "later", later_seconds=week, every_seconds=1000.0))
    (sentence,) = told["sessions"]
    assert sentence.startswith("first was run on 2023-11-14, later on 2023-11-21 (UTC), not in turn: sessions usually")
    assert "vitscale compare --run alternates" in sentence
    assert {pair["rounds"] for pair in told["pairs"]} == {None}

    _, told = compared(first, unsteady(tmp_path, "after", later_seconds=3_000.0, every_seconds=1000.0))
    assert told["sessions"][0].startswith("on 2023-11-14 first was run from 22:13 to 22:47, after from 23:03 to 23:37")

    _, told = compared(first, unsteady(tmp_path, "turn", later_seconds=100.0, every_seconds=1000.0))
    assert told["sessions"] == []
    assert {pair["rounds"] for pair in told["pairs"]} == {3}
    assert {pair["time_ratio"] for pair in told["pairs"]} == {1.0}


UNSTEADY = (0.1, 0.12, 0.08)


def unsteady(
    folder: Path,
    name: str,
    times: Sequence[float] = UNSTEADY,
    *,
    later_seconds: float = 0.0,
    every_seconds: float = 100.0,
) -> Path:
    """Results of trials on 1 and 2 ranks whose runs took these times a step, one run of each every so many seconds."""
    study = resolved_study({1: list(times), 2: list(times)})

    def at_its_time(run: Run) -> Run:
        began = 1.7e9 + later_seconds + every_seconds * run.header.repeat
        return run.model_copy(update={"outcome": run.outcome.model_copy(update={"started_unix_seconds": began})})

    write_results(study.model_copy(update={"runs": tuple(map(at_its_time, study.runs))}), folder / name)
    return folder / name


def test_a_study_file_needs_run_and_repeats_do_too(base: Path, tmp_path: Path) -> None:
    study = tmp_path / "new.toml"
    study.write_text("name = 'new'\n")
    answer = CliRunner().invoke(cli.app, ["compare", str(base), str(study)])
    assert str(answer.exception).endswith(
        "is a study file, and compare reads results. Add --run to run the studies in turn; or give results folders."
    )
    answer = CliRunner().invoke(cli.app, ["compare", str(base), str(base), "--repeats", "5"])
    assert str(answer.exception).startswith("--repeats is of --run, which is not given")
    answer = CliRunner().invoke(cli.app, ["compare", "--run", str(study)])
    assert "one study is given" in str(answer.exception)


@pytest.mark.parametrize(
    ("failures", "says"),
    [(1, "1 run did not complete, and is not compared"), (2, "2 runs did not complete, and are not compared")],
)
def test_runs_in_turn_that_did_not_complete_are_counted_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failures: int, says: str
) -> None:
    report = SimpleNamespace(failures=dict.fromkeys(range(failures)))
    monkeypatch.setattr(alternating, "sides_of", lambda *_: [])
    monkeypatch.setattr(alternating, "run_in_turn", lambda *_: [report])
    console = ProgramConsole()
    assert comparing.run_in_turn([], None, comparing.DEFAULT_FOLDER, console).failures == failures
    assert f"{says}: vitscale report says why" in " ".join(capsys.readouterr().out.split())


def test_what_no_number_of_repeats_shows_says_to_look_for_the_cause(tmp_path: Path) -> None:
    wild = (0.01, 1.0, 0.1)
    first, other = unsteady(tmp_path, "first", times=wild), unsteady(tmp_path, "other", times=(1.0, 0.02, 0.1))
    _, told = compared(first, other, "--fail-if-slower", "5%")
    assert told["next_steps"] == [
        "these runs differ too much to show even a slowdown of 1000 %",
        "next: to report 5 % as slower in 4 of 5 cases, and to decide 2 undecided trials (equal ones within 5 %, 10 % "
        "fails) takes more than 200 repeats at this spread of runs: look first for what makes them differ",
    ]
    assert {pair["repeats_to_decide"] for pair in told["pairs"]} == {None}
