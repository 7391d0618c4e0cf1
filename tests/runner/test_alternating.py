"""Studies that are run in turn: the order of their runs, what resumes, and what is refused; the ranks are scripted."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from scripted_ranks import FAILS, Scripted
from study_factory import write_study
from vitscale import analysis, launchers
from vitscale.analysis.counterparts import Pair, side_by_side
from vitscale.errors import RequestError
from vitscale.runner import RunOptions, alternating
from vitscale.runner import run as drive
from vitscale.runner.driver import Interrupted
from vitscale.runner.planning import Report
from vitscale.runner.planning import plan as planned
from vitscale.study.file import StudyFile

ROUNDS = 4


class Sides:
    """Two studies of one trial each, "old" and "new", and what their runs will say."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *scripts: Sequence[float | None]) -> None:
        monkeypatch.setenv("VITSCALE_CACHE", str(folder / "cache"))
        self.folder = folder
        self.launcher = Scripted(folder / "records", {})
        monkeypatch.setitem(launchers.LAUNCHERS, "scripted", self.launcher)
        self.studies = [study_of(folder / name, seed) for seed, name in enumerate(("old", "new"))]
        self.names: dict[str, str] = {}
        for study, script in zip(self.studies, scripts, strict=True):
            (trial,) = planned(study).record.trials
            self.names[trial] = study.parent.name
            self.launcher.script[trial] = script

    def run(self, repeats: int | None = ROUNDS) -> list[Report]:
        sides = alternating.sides_of(self.studies, self.folder / "results", repeats)
        return alternating.run_in_turn(sides, Console(file=io.StringIO(), width=200))

    @property
    def order(self) -> list[str]:
        """The sides of the runs that were started, each as "old 0": the side and the repeat."""
        return [f"{self.names[trial]} {repeat}" for trial, repeat in self.launcher.started]

    def pair(self) -> Pair:
        named = [(name, analysis.analyse_folder(self.folder / "results" / name)) for name in ("old", "new")]
        (pair,) = side_by_side(named)
        return pair


def study_of(folder: Path, seed: int, **measure: Any) -> Path:
    folder.mkdir(exist_ok=True)
    return write_study(
        folder,
        {
            "train": {"epochs": 1, "precision": "fp32", "seed": seed},
            "scaling": {"gpus": [1]},
            "launch": {"launcher": "scripted"},
            "measure": {"warmup_steps": 0} | measure,
        },
    )


def test_rounds_alternate_and_sides_take_turns_in_going_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sides = Sides(tmp_path, monkeypatch, [1.0, 1.2, 0.9, 1.1], [1.1, 1.33, 0.98, 1.2])
    reports = sides.run()
    assert sides.order == ["old 0", "new 0", "new 1", "old 1", "old 2", "new 2", "new 3", "old 3"]
    assert [len(report.outcomes) for report in reports] == [ROUNDS, ROUNDS]


def test_what_rounds_have_in_common_cancels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds differ by a third, the sides by 10 % in each: side against side nobody could tell."""
    sides = Sides(tmp_path, monkeypatch, [1.0, 1.2, 0.9, 1.1], [1.101, 1.319, 0.99, 1.21])
    sides.run()
    measured = sides.pair().measured
    assert measured is not None
    assert measured.rounds == ROUNDS
    assert measured.slowdown.value == pytest.approx(1.10, abs=0.002)
    assert measured.slowdown.low is not None
    assert measured.slowdown.low > 1.09
    assert measured.result.verdict == "slower"


@pytest.mark.parametrize("interrupted_at", [1, 2, 5])
def test_it_resumes_where_it_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted_at: int
) -> None:
    sides = Sides(tmp_path, monkeypatch, [1.0] * ROUNDS, [1.0] * ROUNDS)
    sides.launcher.interrupt_at = interrupted_at
    with pytest.raises(Interrupted):
        sides.run()
    sides.launcher.interrupt_at = None
    sides.run()
    assert sides.order == ["old 0", "new 0", "new 1", "old 1", "old 2", "new 2", "new 3", "old 3"]
    before = len(sides.order)
    sides.run()
    assert len(sides.order) == before  # nothing is left to do


def test_more_rounds_go_on_with_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sides = Sides(tmp_path, monkeypatch, [1.0] * 3, [1.0] * 3)
    sides.run(repeats=2)
    sides.run(repeats=3)
    assert sides.order == ["old 0", "new 0", "new 1", "old 1", "old 2", "new 2"]


def test_a_run_that_fails_leaves_its_round_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sides = Sides(tmp_path, monkeypatch, [1.0, 1.0, 1.0, 1.1], [1.0, FAILS, 1.0, 1.1])
    reports = sides.run()
    assert [len(report.failures) for report in reports] == [0, 1]
    measured = sides.pair().measured
    assert measured is not None
    assert measured.rounds == 3


def test_the_repeats_are_those_of_the_first_study_where_none_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = Sides(tmp_path, monkeypatch, [1.0] * 2, [1.0] * 2)
    sides.studies[0] = study_of(tmp_path / "old", 0, repeats=2)
    sides.run(repeats=None)
    assert len(sides.order) == 4


def test_what_has_no_rounds_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sides = Sides(tmp_path, monkeypatch, [1.0], [1.0])
    sides.studies[1] = study_of(tmp_path / "new", 1, target_ci=0.02)
    with pytest.raises(RequestError, match=r"measure\.target_ci, which adds runs to one side") as refused:
        sides.run()
    assert "--repeats N" in str(refused.value)
    sides.studies[1] = study_of(tmp_path / "new", 1, parallel_runs=2)
    with pytest.raises(RequestError, match=r"measure\.parallel_runs = 2"):
        sides.run()
    assert sides.order == []


def test_a_loop_of_run_with_one_repeat_more_each_time_is_in_turn_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for two environments, each with a program of its own."""
    sides = Sides(tmp_path, monkeypatch, [1.0] * ROUNDS, [1.1] * ROUNDS)
    for repeats in range(1, ROUNDS + 1):
        for study in sides.studies:
            results = tmp_path / "results" / study.parent.name
            plan = planned(StudyFile.read(study, None, [f"measure.repeats={repeats}"]), results=results)
            drive(plan, results, RunOptions(), Console(file=io.StringIO()))
    assert sides.order == [f"{side} {repeat}" for repeat in range(ROUNDS) for side in ("old", "new")]
    measured = sides.pair().measured
    assert measured is not None
    assert measured.rounds == ROUNDS


@pytest.mark.parametrize(
    ("studies", "names"),
    [
        (["old.toml", "new.toml"], ["old", "new"]),
        (["main/study.toml", "mine/study.toml"], ["main", "mine"]),
        (["a/b/study.toml", "c/b/study.toml"], ["1-study", "2-study"]),
    ],
)
def test_folders_are_named_after_what_tells_the_studies_apart(studies: list[str], names: list[str]) -> None:
    assert alternating._side_names([Path(study) for study in studies]) == names
