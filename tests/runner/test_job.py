"""What a batch job does with its runs, by its own driver; the batch system and the runs are functions of a test."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from study_factory import EIGHT_CORES, summary, write_study
from vitscale.runner import job as driver
from vitscale.runner import plan
from vitscale.runner.batch_file import BatchTask, JobFile, element_numbers
from vitscale.runner.batch_jobs import _tasks_by_job, new_jobs
from vitscale.runner.one_run import RunContext, new_attempt, unstarted
from vitscale.runner.todo import outstanding_runs
from vitscale.schedulers.base import Cause, JobState, LocalHost
from vitscale.schedulers.slurm_cluster import SlurmCluster
from vitscale.store import RunIndex, write_outcome
from vitscale.store import write_study as write_study_record
from vitscale.store.reading import RunKey
from vitscale.store.results import Outcome, OutcomeKind
from vitscale.study.sections import LaunchSection, MeasureSection, SlurmSection


class Silent(SlurmCluster):
    """A batch system without jobs."""

    def states(self, names: Sequence[str]) -> list[JobState]:
        return []


class Nodes(LocalHost):
    """The nodes of a job."""

    def __init__(self) -> None:
        super().__init__()
        self.gone: Cause | None = None

    def lost(self) -> Cause | None:
        return self.gone


class Array:
    """A trial of three runs, and an array of jobs that does them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        changes: dict[str, dict[str, Any]] = {
            "scaling": {"gpus": [1]},
            "launch": {"scheduler": "slurm"},
            "slurm": {"jobs": "array"},
            "node": {"cores": 8},
        }
        self.plan = plan(write_study(folder, changes), EIGHT_CORES, lambda _: summary())
        self.results = folder / "results"
        self.results.mkdir()
        write_study_record(self.results, self.plan.record)
        self.context = self.plan.in_folder(self.results)
        (self.trial,) = self.plan.record.trials
        self.done: list[int] = []
        self.kind: OutcomeKind = "completed"
        self.nodes = Nodes()
        self.most_elements = 1000

        def run_task(context: RunContext, _where: object, task: RunKey, attempt: int, *_: object) -> Outcome:
            self.done.append(task.repeat)
            return self.ended(task.repeat, attempt, self.kind)

        monkeypatch.setattr(driver, "run_task", run_task)

    def ended(self, repeat: int, attempt: int, kind: OutcomeKind) -> Outcome:
        outcome = unstarted(kind, "")
        write_outcome(new_attempt(self.context, RunKey(self.trial, repeat), attempt), outcome)
        return outcome

    def run(self, elements: Sequence[int], *, retry_failed: bool = True) -> None:
        """Submits what is to be done, and does these elements in turn."""
        index = RunIndex(self.results)
        todo = outstanding_runs(self.plan, index, retry_failed=retry_failed)
        submitter = Silent(self.context.slurm, None)
        names = (f"{number:08d}" for number in range(9))
        jobs = [*new_jobs(self.context, submitter, todo, index.attempts, lambda: next(names), self.most_elements)]
        assert all(job.array for job in jobs)
        for job in jobs:
            job.write(self.results)
        every = [(job, element) for job in jobs for element in range(len(job.elements))]
        for job, element in (every[element] for element in elements):
            driver._do_runs(self.context, submitter, self.nodes, job, job.tasks_of_element(element))


@pytest.fixture
def array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Array:
    return Array(tmp_path, monkeypatch)


@pytest.mark.parametrize("most", [1000, 2])
def test_runs_of_an_array_that_ran_out_of_memory_together_are_all_done_again(array: Array, most: int) -> None:
    """Each element is the first to begin: the others' old outcomes are of runs that are to be done again too, also
    where these are in another array."""
    array.most_elements = most
    for repeat in range(3):
        array.ended(repeat, 0, "oom")
    array.run([0, 1, 2])
    assert array.done == [0, 1, 2]
    finished = RunIndex(array.results).finished
    assert {(name[-3:], outcome.kind) for name, outcome in finished.values()} == {("-a1", "completed")}


def test_out_of_memory_in_this_job_skips_its_other_runs(array: Array) -> None:
    array.ended(0, 0, "completed")
    array.ended(1, 0, "oom")
    array.kind = "oom"
    array.run([0, 1])
    assert array.done == [1]
    finished = RunIndex(array.results).finished
    assert [finished[RunKey(array.trial, repeat)][1].kind for repeat in range(3)] == ["completed", "oom", "skipped"]


def test_out_of_memory_in_a_run_that_is_not_done_again_skips_the_others(array: Array) -> None:
    array.ended(2, 0, "oom")
    array.run([0, 1], retry_failed=False)
    assert array.done == []
    finished = RunIndex(array.results).finished
    assert [finished[RunKey(array.trial, repeat)][1].kind for repeat in range(3)] == ["skipped", "skipped", "oom"]


def test_a_job_that_is_preempted_begins_no_run_and_its_runs_are_done_again(array: Array) -> None:
    """The driver lives on through the grace time, and would begin one after the other."""
    array.nodes.gone = Cause("failed", "preempted by a job of higher priority (job 7_0)")
    array.run([0, 1])
    assert array.done == []
    finished = RunIndex(array.results).finished
    told = {repeat: (outcome.kind, outcome.external) for (_, repeat), (_, outcome) in finished.items()}
    assert told == {0: ("failed", True), 1: ("failed", True)}
    array.nodes.gone = None
    array.run([0, 1, 2], retry_failed=False)
    assert array.done == [0, 1, 2]


def batch_tasks(*runs: str) -> list[BatchTask]:
    """Runs by trial and repeat: "a0"."""
    return [BatchTask(trial_id=run[0], repeat=int(run[1]), attempt=0) for run in runs]


def job_of(tasks: list[BatchTask], *, trial_per_element: bool) -> JobFile:
    return JobFile(
        name="vitscale-1x1-00000000",
        array=True,
        trial_per_element=trial_per_element,
        tasks=tuple(tasks),
        study_folder="/study",
        launch=LaunchSection(),
        slurm=SlurmSection(),
        measure=MeasureSection(),
    )


def test_an_element_of_an_array_of_trials_has_all_runs_of_one() -> None:
    """Tasks come in rounds, each in an order of its own."""
    job = job_of(batch_tasks("a0", "b0", "b1", "a1"), trial_per_element=True)
    assert [[f"{task.trial_id}{task.repeat}" for task in element] for element in job.elements] == [
        ["a0", "a1"],
        ["b0", "b1"],
    ]
    assert list(element_numbers(job)) == [0, 1]
    assert job.tasks_of_element(1) == job.elements[1]
    assert job.tasks_of_element(2) == ()
    assert job.tasks_of_element(None) == job.tasks


def test_an_array_of_runs_from_before_arrays_of_trials_is_read_as_one() -> None:
    job = job_of(batch_tasks("a0", "a1"), trial_per_element=False)
    old = JobFile.model_validate_json(job.model_dump_json(exclude={"trial_per_element"}))
    assert old == job
    assert [len(old.tasks_of_element(element)) for element in (0, 1, 2)] == [1, 1, 0]


@pytest.mark.parametrize(("most", "sizes"), [(1000, [6]), (2, [4, 2]), (1, [2, 2, 2])])
def test_arrays_of_trials_are_cut_between_trials(most: int, sizes: list[int]) -> None:
    slurm = SlurmSection(jobs="trial-array")
    tasks = batch_tasks("a0", "b0", "c0", "c1", "b1", "a1")
    jobs = _tasks_by_job(SlurmCluster(slurm, None), tasks, most)
    assert [len(job) for job in jobs] == sizes
    trials_of_jobs = [{task.trial_id for task in job} for job in jobs]
    assert sum(map(len, trials_of_jobs)) == 3, "no trial is in two arrays"


def test_an_array_of_trials_does_the_runs_of_an_element_in_turn(array: Array) -> None:
    array.context = dataclasses.replace(array.context, slurm=SlurmSection(jobs="trial-array"))
    array.run([0])
    assert array.done == [0, 1, 2]
