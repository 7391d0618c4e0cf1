"""What will not fit is skipped when asked, recorded, and done when it is asked no more: by the real driver."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from driving import tree
from scripted_ranks import Scripted
from study_factory import EIGHT_CORES, write_study
from vitscale import analysis, cli, launchers, store
from vitscale.runner import Plan, Report, RunOptions, plan
from vitscale.runner import run as drive
from vitscale.runner.memory_fits import memory_fits, unfit
from vitscale.runner.preview import command_list

BESIDE_TENSORS = 500_000_000
"""Bytes that a rank on CPU takes beside its tensors, in the middle (`prediction.memory.forecast`)."""
REASON = "will not fit in memory: because the test says so"


class Study:
    """Two trials of two runs each: the second is said not to fit."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VITSCALE_CACHE", str(folder / "cache"))
        self.launcher = Scripted(folder / "records", {})
        monkeypatch.setitem(launchers.LAUNCHERS, "scripted", self.launcher)
        self.path = write_study(
            folder,
            {
                "train": {"epochs": 1, "precision": "fp32"},
                "scaling": {"gpus": [1]},
                "launch": {"launcher": "scripted"},
                "measure": {"repeats": 2, "warmup_steps": 0},
                "sweep": {"train.micro_batch": [8, 1024]},
            },
        )
        self.plan: Plan = plan(self.path, EIGHT_CORES)
        self.results = folder / "results"
        self.small, self.large = self.plan.record.trials
        self.launcher.script = {self.small: (1.0, 1.0), self.large: (2.0, 2.0)}

    def run(self, *, skip: bool) -> Report:
        options = RunOptions(unfit={self.large: REASON} if skip else {})
        return drive(self.plan, self.results, options, Console(file=io.StringIO()))


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    return Study(tmp_path, monkeypatch)


def test_each_run_of_an_unfit_trial_is_recorded_as_skipped_with_its_reason(study: Study) -> None:
    report = study.run(skip=True)

    assert {trial for trial, _ in study.launcher.started} == {study.small}
    assert set(report.skipped) == {(study.large, 0), (study.large, 1)}
    assert {outcome.reason for outcome in report.skipped.values()} == {REASON}
    assert report.failures == {}  # as asked
    assert report.done_now == 2
    found = analysis.analyse(store.load(study.results)).trials[study.large]
    assert (found.outcome, found.reason) == ("skipped", REASON)


def test_asked_again_nothing_is_written_again(study: Study) -> None:
    study.run(skip=True)
    before = {name: content for name, content in tree(study.results).items() if name != "lock"}

    report = study.run(skip=True)

    assert report.done_now == 0
    assert len(report.skipped) == 2
    assert {name: content for name, content in tree(study.results).items() if name != "lock"} == before


def test_without_the_flag_the_skipped_runs_are_done(study: Study) -> None:
    study.run(skip=True)

    report = study.run(skip=False)

    assert report.done_now == 2
    assert {outcome.kind for outcome in report.outcomes.values()} == {"completed"}
    assert [trial for trial, _ in study.launcher.started].count(study.large) == 2


def test_what_has_been_done_is_not_skipped_afterwards(study: Study) -> None:
    study.run(skip=False)

    report = study.run(skip=True)

    assert report.skipped == {}
    assert {outcome.kind for outcome in report.outcomes.values()} == {"completed"}


def test_the_commands_leave_skipped_trials_out(study: Study) -> None:
    listed = command_list(study.plan, None, unfit={study.large})

    assert study.small in listed
    assert study.large not in listed


def test_a_trial_is_unfit_where_its_forecast_exceeds_the_memory(study: Study) -> None:
    forecasts = {trial: fit.forecast_bytes or 0 for trial, fit in memory_fits(study.plan).items()}
    assert forecasts[study.small] < forecasts[study.large]
    between = (forecasts[study.small] + forecasts[study.large]) // 2

    found = unfit(memory_fits(study.plan, BESIDE_TENSORS + between))

    assert list(found) == [study.large]
    assert f"forecast {forecasts[study.large] / 1e9:.1f} GB" in found[study.large]
    assert unfit(memory_fits(study.plan, 10**15)) == {}


def test_the_command_says_what_it_skipped_and_that_is_no_failure(
    study: Study, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, said in (
        (["--skip-unfit", "--gpu-memory", "1MB"], "4 of 4 runs skipped: they will not fit in memory."),
        (["--skip-unfit", "--gpu-memory", "1MB", "--dry-run"], "# Nothing to do"),
    ):
        path = str(study.plan.context.folder / "study.toml")
        monkeypatch.setattr(sys, "argv", ["vitscale", "run", path, "-o", str(study.results), *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
        assert said in capsys.readouterr().out
    assert study.launcher.started == []


def test_a_record_of_a_skipped_run_says_what_it_was_to_be(study: Study) -> None:
    study.run(skip=True)

    folder = study.results / "runs" / f"{study.large}-r1-a0"
    assert json.loads((folder / "trial.json").read_text())["trial"]["train"]["micro_batch"] == 1024
    assert json.loads((folder / "outcome.json").read_text())["wall_seconds"] == 0.0


def test_fewer_repeats_take_nothing_back(study: Study) -> None:
    """What is measured stays, and so does what tells how it was."""
    study.run(skip=False)
    before = (study.results / "study.json").read_bytes()
    fewer = plan(study.path, EIGHT_CORES, overlay={"measure": {"repeats": 1}})
    drive(fewer, study.results, RunOptions(), Console(file=io.StringIO()))
    assert (study.results / "study.json").read_bytes() == before
