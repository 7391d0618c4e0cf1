"""Passing failures are tried again, by the real driver; what each try says is scripted."""

from __future__ import annotations

import dataclasses
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from driving import tree
from scripted_ranks import Scripted
from study_factory import EIGHT_CORES, write_study
from vitscale import launchers
from vitscale.machine.hosts import Host
from vitscale.runner import Plan, Report, RunOptions, batch_file, one_run, plan
from vitscale.runner import run as drive
from vitscale.runner.driver import AllocationOverError, Interrupted
from vitscale.runner.evidence import Ending
from vitscale.runner.one_run import run_task
from vitscale.runner.preview import command_list
from vitscale.runner.watch import watch
from vitscale.schedulers import Cause, Hostfile, Job, LocalHost
from vitscale.schedulers.base import SchedulerSilentError
from vitscale.store.reading import RunKey
from vitscale.store.results import Outcome, RunHeader

WELL, PASSING, LASTING, INTERRUPTED = "well", "passing", "lasting", "interrupted"
SAID = "RuntimeError: [Errno 98] Address already in use"
FAILS = {
    PASSING: f"raise SystemExit({SAID!r})",
    LASTING: "raise SystemExit('RuntimeError: bad pixel')",
    # Of the driver, once that watches: a process may run before the one that starts it has taken note of it.
    INTERRUPTED: """
import os, signal, sys, time
while not os.path.exists(sys.argv[1] + "/watched"):
    time.sleep(0.01)
os.kill(os.getppid(), signal.SIGINT)
time.sleep(600)
""",
}


class Tries(Scripted):
    """The one rank of each try does as the script says."""

    tries: tuple[str, ...] = ()

    def _command(self, run_folder: Path) -> list[str]:
        if run_folder.name.count("-") != 2:
            return ["cp", "RECORD", str(run_folder)]
        attempt = int(run_folder.name.rpartition("-a")[2])
        self.started.append((run_folder.name, attempt))
        how = self.tries[attempt]
        if how == WELL:
            return ["cp", str(self._record(1.0)), str(run_folder)]
        return [sys.executable, "-S", "-c", FAILS[how], str(run_folder)]


class Study:
    """A study of one run."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, *tries: str, retries: int = 1, repeats: int = 1
    ) -> None:
        monkeypatch.setenv("VITSCALE_CACHE", str(folder / "cache"))
        self.launcher = Tries(folder / "records", {})
        self.launcher.tries = tries
        monkeypatch.setitem(launchers.LAUNCHERS, "tries", self.launcher)
        changes: dict[str, dict[str, Any]] = {
            "train": {"epochs": 1, "precision": "fp32"},
            "scaling": {"gpus": [1]},
            "launch": {"launcher": "tries"},
            "measure": {"repeats": repeats, "warmup_steps": 0, "retries": retries},
        }
        self.plan: Plan = plan(write_study(folder, changes), EIGHT_CORES)
        self.results = folder / "results"
        (self.trial,) = self.plan.record.trials

    def run(self, *, retry_failed: bool = False, on: LocalHost | None = None) -> Report:
        where = self.plan if on is None else dataclasses.replace(self.plan, scheduler=on)
        self.said = io.StringIO()
        return drive(where, self.results, RunOptions(retry_failed=retry_failed), Console(file=self.said, width=200))

    def kinds(self) -> list[str | None]:
        """Of each try's outcome of the first repeat, in order; None where it has none."""
        found: list[str | None] = []
        for attempt in range(len([*(self.results / "runs").glob(f"{self.trial}-r0-a*")])):
            folder = self.results / "runs" / f"{self.trial}-r0-a{attempt}"
            header = RunHeader.model_validate_json((folder / "trial.json").read_text())
            assert (header.trial_id, header.repeat, header.attempt) == (self.trial, 0, attempt)
            outcome = folder / "outcome.json"
            found.append(Outcome.model_validate_json(outcome.read_text()).kind if outcome.exists() else None)
        return found


Make = Callable[..., Study]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    def telling(job: Job, folder: Path, **options: Any) -> Ending:
        wait = job.wait

        def first_wait(seconds: float) -> int | None:
            (folder / "watched").touch()
            return wait(seconds)

        monkeypatch.setattr(job, "wait", first_wait)
        return watch(job, folder, **options)

    monkeypatch.setattr(one_run, "watch", telling)
    return lambda *tries, **changes: Study(tmp_path, monkeypatch, *tries, **changes)


class Allocation(LocalHost):
    """This machine, as if a batch system had lent it; what that says of it, in turn."""

    title = "Slurm"

    def __init__(self, *answers: Cause | SchedulerSilentError | None) -> None:
        super().__init__()
        self.answers = [*answers]

    def lost(self) -> Cause | None:
        answer = self.answers.pop(0)
        if isinstance(answer, SchedulerSilentError):
            raise answer
        return answer


SILENT = SchedulerSilentError("slurmctld does not answer")
LIMIT = Cause("timeout", "the job's time limit of 00:01:00 was reached (slurm.time, job 12)")


@pytest.mark.parametrize("ended_in", [PASSING, LASTING])
def test_what_the_end_of_an_allocation_does_to_a_run_is_no_failure_and_no_run_is_begun_after(
    make: Make, ended_in: str
) -> None:
    study = make(ended_in, WELL, repeats=2)
    with pytest.raises(AllocationOverError, match=r"limit of 00:01:00 was reached .* No further run was begun"):
        study.run(on=Allocation(None, LIMIT))
    (path,) = study.results.glob("runs/*/outcome.json")
    cut = Outcome.model_validate_json(path.read_text())
    assert (cut.kind, cut.reason, cut.external, cut.transient) == ("timeout", LIMIT.reason, True, False)
    # Over between two runs: none is begun.
    with pytest.raises(AllocationOverError):
        study.run(on=Allocation(LIMIT))
    assert len([*study.results.glob("runs/*")]) == 1
    # In the next allocation, without --retry-failed: both runs; a run of one that goes on may fail.
    study.launcher.tries = (WELL, WELL)
    assert not study.run(on=Allocation(None, None)).failures
    assert study.kinds() == ["timeout", "completed"]


def test_runs_and_their_retries_wait_while_the_batch_system_is_silent(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_file, "FIRST_LOOK_SECONDS", 0.0)
    study = make(PASSING, WELL)
    allocation = Allocation(SILENT, SILENT, None, SILENT, None)
    assert not study.run(on=allocation).failures
    assert allocation.answers == []
    assert study.kinds() == ["failed", "completed"]
    assert study.said.getvalue().count("waiting for Slurm: slurmctld does not answer") == 2
    assert study.said.getvalue().count("Slurm answers again") == 2


@pytest.mark.parametrize(
    ("tries", "retries", "kinds"),
    [
        ((WELL,), 1, ["completed"]),
        ((PASSING, WELL), 1, ["failed", "completed"]),
        ((PASSING, PASSING, PASSING), 1, ["failed", "failed"]),
        ((PASSING, PASSING, PASSING, WELL), 3, ["failed", "failed", "failed", "completed"]),
        ((PASSING, WELL), 0, ["failed"]),
        ((LASTING, WELL), 3, ["failed"]),
        ((PASSING, LASTING, WELL), 3, ["failed", "failed"]),
    ],
)
def test_a_passing_failure_is_tried_again_and_every_try_is_kept(
    make: Make, tries: tuple[str, ...], retries: int, kinds: list[str]
) -> None:
    study = make(*tries, retries=retries)
    report = study.run()
    assert study.kinds() == kinds
    (outcome,) = report.outcomes.values()
    assert (report.done_now, outcome.kind) == (1, kinds[-1])
    # The last try stands, and nothing is done again.
    before = tree(study.results)
    assert study.run().done_now == 0
    assert {name: content for name, content in tree(study.results).items() if name != "lock"} == {
        name: content for name, content in before.items() if name != "lock"
    }


def test_a_try_says_why_it_is_followed_by_another(make: Make) -> None:
    study = make(PASSING, WELL)
    study.run()
    first = Outcome.model_validate_json((study.results / "runs" / f"{study.trial}-r0-a0" / "outcome.json").read_text())
    assert (first.transient, first.external) == (True, False)
    assert SAID in first.detail


def test_a_study_that_is_interrupted_between_two_tries_goes_on_with_the_next(make: Make) -> None:
    study = make(PASSING, INTERRUPTED, WELL)
    with pytest.raises(Interrupted):
        study.run()
    assert study.kinds() == ["failed", None]
    report = study.run()
    assert study.kinds() == ["failed", None, "completed"]
    assert not report.failures


def test_one_killed_before_the_second_try_goes_on_with_it(make: Make) -> None:
    """SIGKILL falls between the outcome of the first and the folder of the second."""
    study = make(PASSING, PASSING, WELL)
    study.run()
    folder = study.results / "runs" / f"{study.trial}-r0-a1"
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    assert study.kinds() == ["failed"]
    study.launcher.tries = (PASSING, WELL)
    assert not study.run().failures
    assert study.kinds() == ["failed", "completed"]


def test_a_failure_that_was_tried_often_enough_is_tried_again_only_when_asked(make: Make) -> None:
    study = make(PASSING, PASSING, LASTING, WELL)
    study.run()
    assert study.run().done_now == 0
    assert len(study.run(retry_failed=True).failures) == 1
    assert study.kinds() == ["failed"] * 3
    study.run(retry_failed=True)
    assert study.kinds() == ["failed"] * 3 + ["completed"]


def test_a_finished_run_cannot_be_begun_anew(make: Make) -> None:
    """Its folder is there: what the attempt before left is never written into."""
    study = make(WELL, WELL)
    study.run()
    before = tree(study.results / "runs")
    with pytest.raises(FileExistsError):
        run_task(study.plan.in_folder(study.results), LocalHost(), RunKey(study.trial, 0), 0, print)
    assert tree(study.results / "runs") == before


def test_a_dry_run_lists_what_the_next_run_does(make: Make) -> None:
    study = make(LASTING, WELL)
    run = study.results / "runs" / f"{study.trial}-r0"
    listed = command_list(study.plan, study.results)
    assert listed.startswith(f"# {study.trial}: 1 x 1 ranks, 1 run\n{sys.executable} -S -c 'raise SystemExit(")
    assert listed.endswith(f" {run}-a0\n")
    study.run()
    nothing = "# Nothing to do: every run of this study has its outcome.\n"
    assert command_list(study.plan, study.results) == nothing
    assert command_list(study.plan, study.results, retry_failed=True).endswith(f" {run}-a1\n")
    assert study.kinds() == ["failed"]


def test_a_host_whose_name_is_not_known_just_now_fails_a_run_and_not_the_study(make: Make) -> None:
    study = make(WELL, WELL)
    away = dataclasses.replace(study.plan, scheduler=Hostfile((Host("node.invalid"),)))
    report = drive(away, study.results, RunOptions(), Console(file=io.StringIO()))
    (outcome,) = report.outcomes.values()
    assert (outcome.kind, outcome.transient) == ("failed", True)
    assert "host node.invalid cannot be found" in outcome.reason
    assert len(list(study.results.glob("runs/*/outcome.json"))) == 2
