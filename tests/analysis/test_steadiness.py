"""Where the report finds runs unstable, `predict`, `advise` and the page say so first, in one and the same sentence."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from pathlib import Path

import pytest

from prediction_factory import resolved_study
from results_factory import make_curve, make_results, make_trial, one_curve, steady_run, write_results
from vitscale import cli
from vitscale.analysis import Analysis, analyse
from vitscale.analysis.quality.steadiness import RUNS_DIFFER, steady_first
from vitscale.pages.answers import what_next
from vitscale.present.document import Bullets

NOISY = {1: [0.1, 0.18, 0.32], 2: [0.104, 0.105, 0.106]}
STEADY = {1: [0.1, 0.101, 0.102], 2: [0.104, 0.105, 0.106]}


def sentence(analysis: Analysis) -> str:
    return steady_first([trial for trial in analysis.trials.values() if trial.run_figures])


def test_it_tells_the_spread_the_worst_trial_and_what_to_do() -> None:
    said = sentence(analyse(resolved_study(NOISY)))
    assert said.startswith("Run-to-run spread is 58 % (ddp on 1 rank")
    assert "1 of 2 trials is above 5 %" in said
    assert said.endswith("first stop what else runs there, then add runs (measure.target_ci).")


@pytest.mark.parametrize("spread", [0.9 * RUNS_DIFFER, 1.1 * RUNS_DIFFER])
def test_it_is_said_where_the_finding_is(spread: float) -> None:
    analysis = analyse(one_curve({2: [math.exp(-spread), 1.0, math.exp(spread)]}))
    assert bool(sentence(analysis)) == ("unstable" in {finding.kind for finding in analysis.findings})
    assert bool(sentence(analysis)) == (spread > RUNS_DIFFER)


def printed(folder: Path, verb: str, *arguments: str) -> None:
    sys.argv = ["vitscale", verb, str(folder), *arguments]
    with contextlib.suppress(SystemExit):
        cli.main()


@pytest.mark.parametrize("verb", ["predict", "advise"])
def test_a_verb_says_it_before_all_else_and_in_json(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(sys, "argv", [])
    for study, name in ((NOISY, "noisy"), (STEADY, "steady")):
        write_results(resolved_study(study), tmp_path / name)
    said = sentence(analyse(resolved_study(NOISY)))
    printed(tmp_path / "noisy", verb)
    assert " ".join(capsys.readouterr().out.split()).startswith(said)
    printed(tmp_path / "noisy", verb, "--json")
    assert json.loads(capsys.readouterr().out)["unstable_runs"] == said
    printed(tmp_path / "steady", verb, "--json")
    assert json.loads(capsys.readouterr().out)["unstable_runs"] is None


def test_every_verb_and_the_page_have_the_number_of_all_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A training without an engine is the noisiest, and no curve that `predict` continues has it."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(sys, "argv", [])
    measured = resolved_study({1: [0.1, 0.12, 0.14], 2: [0.104, 0.105, 0.106]})
    plain = make_trial("none", 1)
    runs = [steady_run(plain, seconds, repeat) for repeat, seconds in enumerate((0.1, 0.2, 0.4))]
    curves = [
        (curve, [measured.study.trials[point.trial_id] for point in curve.points]) for curve in measured.study.curves
    ]
    study = make_results([*curves, (make_curve([plain]), [plain])], [*measured.runs, *runs])
    write_results(study, tmp_path / "results")
    said = sentence(analyse(study))
    assert "2 of 3 trials are above 5 %" in said
    for verb in ("predict", "advise"):
        printed(tmp_path / "results", verb, "--json")
        assert json.loads(capsys.readouterr().out)["unstable_runs"] == said


def test_the_page_begins_what_next_with_it() -> None:
    for study, is_said in ((NOISY, True), (STEADY, False)):
        analysis = analyse(resolved_study(study))
        section = what_next(analysis, None, None)
        lines = [item for block in section.blocks if isinstance(block, Bullets) for item in block.items]
        assert (lines[0] == sentence(analysis)) == is_said
