"""Calls that submit, and find jobs of earlier calls, without a cluster: Slurm's answers are those of a test."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from study_factory import EIGHT_CORES, summary, write_study
from vitscale.errors import VitscaleError
from vitscale.runner import Options, Plan, batch_jobs, plan
from vitscale.runner import run as drive
from vitscale.runner.batch_file import BatchTask, JobFile, read_job
from vitscale.runner.batch_jobs import Detached, submit_and_watch
from vitscale.runner.one_run import RunContext
from vitscale.schedulers.base import JobState, SchedulerError
from vitscale.schedulers.slurm_cluster import SlurmCluster
from vitscale.store import RunIndex, write_outcome
from vitscale.store.results import Outcome, StudyRecord
from vitscale.study.sections import LaunchSection, MeasureSection, SlurmSection


def submitted(results: Path, name: str, trial_id: str) -> None:
    JobFile(
        name=name,
        job_id="7",
        array=False,
        tasks=tuple(BatchTask(trial_id=trial_id, repeat=repeat, attempt=0) for repeat in (0, 1)),
        study_folder=str(results),
        launch=LaunchSection(),
        slurm=SlurmSection(),
        measure=MeasureSection(),
    ).write(results)


def complete(results: Path, trial_id: str, repeat: int) -> None:
    folder = results / "runs" / f"{trial_id}-r{repeat}-a0"
    folder.mkdir(parents=True)
    write_outcome(folder, Outcome(kind="completed", reason="", started_unix_seconds=1.0, wall_seconds=1.0))


def test_what_ended_since_the_last_look_is_closed_and_the_runs_of_others_stay_open(tmp_path: Path) -> None:
    ended, half = "vitscale-1x1-aaaaaaaa", "vitscale-2x1-bbbbbbbb"
    submitted(tmp_path, ended, "0" * 12)
    submitted(tmp_path, half, "1" * 12)
    for trial_id, repeat in (("0" * 12, 0), ("0" * 12, 1), ("1" * 12, 0)):
        complete(tmp_path, trial_id, repeat)
    record = StudyRecord(name="s", text="", repeats=2, curves=(), trials={}, versions={}, dataset_fingerprints={})
    context = RunContext(record, MeasureSection(), LaunchSection(), SlurmSection(), tmp_path, tmp_path)
    said: list[str] = []
    submit_and_watch(context, SlurmCluster(SlurmSection(), None), [], said.append, lambda *_: None)
    assert said == []
    assert (read_job(tmp_path, ended).closed, read_job(tmp_path, half).closed) == (True, False)


class Queue(SlurmCluster):
    """Takes jobs that never begin, or refuses them; Ctrl-C may come while it is asked something."""

    def __init__(self, refused: str = "none", interrupted_at: str = "") -> None:
        super().__init__(SlurmSection(), None)
        self.taken: list[str] = []
        self._refused = refused
        self._interrupted_at = interrupted_at

    def submit(self, script: Path) -> str:
        if self._refused in script.name:
            raise SchedulerError("Slurm refuses `sbatch`: Requested node configuration is not available")
        self.taken.append(script.stem)
        self._interrupt("submit")
        return str(100 + len(self.taken))

    def states(self, names: Sequence[str]) -> list[JobState]:
        queue = [(str(101 + n), name) for n, name in enumerate(self.taken) if name in names]
        if queue:
            self._interrupt("watch")
        return [JobState(number, name, None, "PENDING", "", over=False) for number, name in queue]

    def _interrupt(self, when: str) -> None:
        if when == self._interrupted_at:
            raise KeyboardInterrupt


class Login:
    """A study of several worlds, on a login node."""

    def __init__(self, folder: Path, gpus: list[int]) -> None:
        changes: dict[str, dict[str, Any]] = {
            "train": {"epochs": 1},
            "scaling": {"gpus": gpus, "gpus_per_node": 1},
            "launch": {"scheduler": "slurm", "launcher": "srun"},
            "measure": {"repeats": 1},
            "node": {"cores": 8},
        }
        self.plan: Plan = plan(write_study(folder, changes), EIGHT_CORES, lambda _: summary())
        self.results = folder / "results"

    def fails(self, queue: Queue) -> VitscaleError:
        """How `vitscale run` ends."""
        with pytest.raises(VitscaleError) as caught:
            drive(dataclasses.replace(self.plan, scheduler=queue), self.results, Options(), Console(file=io.StringIO()))
        return caught.value

    def jobs(self) -> dict[str, str | None]:
        """Shapes of the jobs' worlds -> their numbers."""
        names = [path.stem for path in self.results.glob("jobs/*.json")]
        return {name.split("-")[1]: read_job(self.results, name).job_id for name in names}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITSCALE_CACHE", str(tmp_path / "cache"))


def test_a_world_that_slurm_refuses_is_named_and_those_after_it_are_submitted(tmp_path: Path) -> None:
    study = Login(tmp_path, [1, 2, 4])
    error = study.fails(Queue(refused="vitscale-2x1-"))
    assert str(error).startswith("2 x 1 ranks: Slurm refuses `sbatch`: Requested node configuration is not available.")
    assert "Submitted jobs go on (101 102)." in str(error)
    jobs = study.jobs()
    assert (sorted(jobs), sorted(map(str, jobs.values()))) == (["1x1", "4x1"], ["101", "102"])


def test_worlds_that_are_refused_for_the_same_reason_are_told_together(tmp_path: Path) -> None:
    error = Login(tmp_path, [1, 2]).fails(Queue(refused="vitscale-"))
    shapes, _, said = str(error).partition(": ")
    assert sorted(shapes.split(", ")) == ["1 x 1 ranks", "2 x 1 ranks"]
    assert said == "Slurm refuses `sbatch`: Requested node configuration is not available."


def test_ctrl_c_while_sbatch_answers_says_that_a_job_may_have_been_submitted(tmp_path: Path) -> None:
    study, queue = Login(tmp_path, [1]), Queue(interrupted_at="submit")
    error = study.fails(queue)
    assert isinstance(error, Detached)
    (name,) = queue.taken
    assert str(error) == (
        f"no longer watching. Whether {name} was submitted too is not known: squeue --name={name} shows it, and the "
        "same command again finds it."
    )
    assert study.jobs() == {"1x1": None}
    # It does.
    queue = Queue(interrupted_at="watch")
    queue.taken = [name]
    assert "nothing" not in str(study.fails(queue))


def test_ctrl_c_while_the_folder_is_read_tells_of_live_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study, queue = Login(tmp_path, [1]), Queue(interrupted_at="watch")
    assert "Submitted jobs go on (101)" in str(study.fails(queue))

    def interrupted(_: Path) -> RunIndex:
        raise KeyboardInterrupt

    monkeypatch.setattr(batch_jobs, "RunIndex", interrupted)
    queue._interrupted_at = ""
    error = study.fails(queue)
    assert isinstance(error, Detached)
    assert "Submitted jobs go on (101)" in str(error)


def test_ctrl_c_before_anything_is_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Path) -> RunIndex:
        raise KeyboardInterrupt

    monkeypatch.setattr(batch_jobs, "RunIndex", interrupted)
    assert str(Login(tmp_path, [1]).fails(Queue())) == "interrupted: nothing was submitted."
