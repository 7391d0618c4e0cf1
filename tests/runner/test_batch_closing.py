"""Calls that submit, and find jobs of earlier calls, without a cluster: Slurm's answers are those of a test."""

from __future__ import annotations

import dataclasses
import io
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from study_factory import EIGHT_CORES, summary, write_study
from vitscale.errors import VitscaleError
from vitscale.runner import Plan, RunOptions, batch_jobs, plan
from vitscale.runner import run as drive
from vitscale.runner.batch_file import BatchTask, JobFile, read_job, settle_ended
from vitscale.runner.batch_jobs import Detached, submit_and_watch
from vitscale.runner.one_run import RunContext
from vitscale.schedulers import slurm_cluster
from vitscale.schedulers.base import Cause, JobState, SchedulerError, SchedulerSilentError
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

    def __init__(self, refused: str = "none", interrupted_at: str = "", slurm: SlurmSection | None = None) -> None:
        super().__init__(slurm or SlurmSection(), None)
        self.taken: list[str] = []
        self._refused = refused
        self._interrupted_at = interrupted_at

    def most_elements(self) -> int:
        return 3

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

    def __init__(self, folder: Path, gpus: list[int], repeats: int = 1) -> None:
        changes: dict[str, dict[str, Any]] = {
            "train": {"epochs": 1},
            "scaling": {"gpus": gpus, "gpus_per_node": 1},
            "launch": {"scheduler": "slurm", "launcher": "srun"},
            "measure": {"repeats": repeats},
            "node": {"cores": 8},
        }
        self.plan: Plan = plan(write_study(folder, changes), EIGHT_CORES, lambda _: summary())
        self.results = folder / "results"

    def fails(self, queue: Queue) -> VitscaleError:
        """How `vitscale run` ends."""
        with pytest.raises(VitscaleError) as caught:
            drive(
                dataclasses.replace(self.plan, scheduler=queue), self.results, RunOptions(), Console(file=io.StringIO())
            )
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


def test_arrays_are_cut_to_what_slurm_takes(tmp_path: Path) -> None:
    study = Login(tmp_path, [1], repeats=7)
    study.fails(Queue(interrupted_at="watch", slurm=SlurmSection(jobs="array")))
    names = [path.stem for path in study.results.glob("jobs/*.json")]
    assert sorted(len(read_job(study.results, name).tasks) for name in names) == [1, 3, 3]


def test_a_line_of_the_script_that_failed_is_the_reason_of_its_element_alone(tmp_path: Path) -> None:
    class Knowing(SlurmCluster):
        def cause(self, job_id: str, nodes: Sequence[str] = ()) -> Cause:
            return Cause("failed", f"why of {job_id}")

    study = Login(tmp_path, [1], repeats=2)
    study.fails(Queue(interrupted_at="watch", slurm=SlurmSection(jobs="array")))
    (path,) = study.results.glob("jobs/*.json")
    job = read_job(study.results, path.stem).model_copy(update={"job_id": "7"})
    said = "line 12 of its script failed with exit code 1: module load cuda/13"
    (study.results / "jobs" / f"{job.name}-7_1.out").write_text(f"vitscale: the job ends: {said}\n")
    (study.results / "jobs" / f"{job.name}-7_0.out").write_text("words of a driver\n")
    settle_ended(Knowing(SlurmSection(), None), study.results, job, states={})
    outcomes = {run.repeat: ended.outcome.reason for run, ended in RunIndex(study.results).finished.items()}
    assert outcomes == {0: "why of 7_0", 1: f"{said} (job 7_1)"}


def test_a_copy_of_a_folder_whose_job_waits_leaves_that_job_to_the_original(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(*_: str) -> str:
        raise SchedulerSilentError("slurmctld does not answer")

    monkeypatch.setattr(slurm_cluster, "ask", silent)
    study, queue = Login(tmp_path, [1]), Queue(interrupted_at="watch")
    study.fails(queue)
    (name,) = queue.taken
    original, study.results = study.results, tmp_path / "copy"
    shutil.copytree(original, study.results)
    assert batch_jobs.live_jobs(original) == ["101"]
    assert batch_jobs.live_jobs(study.results) == []
    study.fails(queue)
    assert len(queue.taken) == 2, "the run is submitted here too"
    assert (read_job(study.results, name).closed, read_job(original, name).closed) == (True, False)
    # By another path it is the same folder, and its job is found again.
    study.results = tmp_path / "link"
    study.results.symlink_to(original)
    assert "Submitted jobs go on (101)" in str(study.fails(queue))
    assert len(queue.taken) == 2


@pytest.mark.parametrize(
    ("known", "began", "reason"),
    [
        ([0], False, "cancelled before it began (job 7_1)"),
        # It began, and Slurm has forgotten since how it ended; and so of an array of which it knows nothing.
        ([0], True, "why of 7_1"),
        ([], False, "why of 7_1"),
    ],
)
def test_an_element_that_was_cancelled_before_it_began(
    tmp_path: Path, known: list[int], began: bool, reason: str
) -> None:
    """Slurm keeps nothing of it, as it does of elements that began, and were forgotten after MinJobAge."""

    class Forgetful(SlurmCluster):
        def cause(self, job_id: str, nodes: Sequence[str] = ()) -> Cause:
            return Cause("failed", f"why of {job_id}")

    study = Login(tmp_path, [1], repeats=2)
    study.fails(Queue(interrupted_at="watch", slurm=SlurmSection(jobs="array")))
    (path,) = study.results.glob("jobs/*.json")
    job = read_job(study.results, path.stem).model_copy(update={"job_id": "7"})
    if began:
        (study.results / "jobs" / f"{job.name}-7_1.out").touch()
    states: dict[tuple[str, int | None], JobState] = {
        (job.name, element): JobState(f"7_{element}", job.name, element, "RUNNING", "", over=False) for element in known
    }
    settle_ended(Forgetful(SlurmSection(), None), study.results, job, states)
    outcomes = {outcome.reason for _, outcome in RunIndex(study.results).finished.values()}
    assert reason in outcomes
