from __future__ import annotations

import re
from pathlib import Path

from results_factory import explained_run, make_curve, make_rank, make_results, make_run, make_trial, one_curve
from verdict_finder import STEP, kinds
from vitscale.analysis import analyse


def test_a_study_with_nothing_wrong_has_no_verdict() -> None:
    trials = [make_trial("ddp", gpus) for gpus in (1, 2)]
    runs = [
        explained_run(trial, [STEP] * trial.world.size, step_seconds=seconds, repeat=repeat)
        for trial in trials
        for repeat, seconds in enumerate([1.0, 1.01, 0.99])
    ]
    assert kinds(make_results([(make_curve(trials), trials)], runs)) == []


def test_every_verdict_says_what_to_do_and_warnings_come_first() -> None:
    found = analyse(one_curve({2: [0.001], 4: [0.001, 0.001]}, repeats=3)).findings
    assert all(one.advice for one in found)
    levels = [one.severity for one in found]
    assert levels == sorted(levels, key=lambda level: level != "warning")
    assert {"warning", "note"} <= set(levels)


def test_problems_of_records_are_passed_on_with_those_of_runs() -> None:
    trial = make_trial("ddp", 2)
    run = make_run(trial, [make_rank(trial, 0, [0.1] * 4)])
    found = analyse(make_results([(make_curve([trial]), [trial])], [run], problems=["runs/x is no run"])).problems
    assert found[0] == "runs/x is no run"
    assert any("no record of rank 1" in problem for problem in found)


def test_every_kind_of_verdict_is_in_the_docs() -> None:
    root = Path(__file__).parents[2]
    source = "".join(path.read_text() for path in (root / "src/vitscale/analysis/quality").glob("*.py"))
    found = set(re.findall(r'(?:warning|note|note\)|warning\))\(\s*"([a-z-]+)"', source))
    assert len(found) > 20
    page = (root / "docs/concepts.md").read_text()
    assert {kind for kind in found if f"`{kind}`" not in page} == set()
