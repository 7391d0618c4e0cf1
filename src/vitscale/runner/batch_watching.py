"""Looks at batch jobs: one question for all of them, and the outcomes that ended ones have left out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from vitscale.errors import StoreError
from vitscale.runner.batch_file import BatchTask, JobFile, drivers_lock, run_state, waiting, write_missing_outcomes
from vitscale.runner.one_run import Task
from vitscale.schedulers import Submitter
from vitscale.schedulers.base import JobState, SchedulerSilentError
from vitscale.store import read_study
from vitscale.store.results import RunHeader

FIRST_LOOK_SECONDS = 0.5
LATEST_LOOK_SECONDS = 30.0
LOOK_GROWTH = 1.3
_SECOND_LOOK_SECONDS = 1.0
_LAST_WORDS_SECONDS = 30.0

Say = Callable[[str], None]
States = Mapping[tuple[str, int | None], JobState]
"""By a job's name and the element of its array."""
Answer = TypeVar("Answer")


def patiently(submitter: Submitter, question: Callable[[], Answer], say: Say) -> Answer:
    """The batch system's answer, waited for where it is silent; says so once."""
    seconds, silent = FIRST_LOOK_SECONDS, False
    while True:
        try:
            answer = question()
        except SchedulerSilentError as error:
            if not silent:
                say(f"waiting for {submitter.title}: {error}")
            silent = True
            time.sleep(seconds)
            seconds = min(LATEST_LOOK_SECONDS, LOOK_GROWTH * seconds)
        else:
            if silent:
                say(f"{submitter.title} answers again")
            return answer


def look(submitter: Submitter, results: Path, jobs: Sequence[JobFile]) -> States:
    """What is known of these jobs. One that was forgotten is missing; that is believed on the second look."""
    states = _states(submitter, jobs)
    if any(_forgotten(job, waiting(results, job), states) for job in jobs):
        time.sleep(_SECOND_LOOK_SECONDS)
        states = {**states, **_states(submitter, jobs)}
    return states


def settle_ended(submitter: Submitter, results: Path, job: JobFile, states: States) -> JobFile:
    """Writes the outcomes that the ended parts of a job have left out; closes it where nothing more will come of it.

    Raises:
        StoreError: the study cannot be read.
    """
    study = read_study(results)
    if study is None:
        raise StoreError(f"{results} has jobs, but no study.json")
    left, live = waiting(results, job), False
    for element in elements(job):
        missing = [task for task in job.tasks_of(element) if task.task in left]
        state = _state_of(job, element, states)
        if state is not None and not state.over:
            live = live or bool(missing)
        elif missing:
            job_id = state.job_id if state is not None else _id_of(job, element)
            # The driver of a job on a node that failed may still be at work on its own last words.
            with drivers_lock(results, job.name, element, patience_seconds=_LAST_WORDS_SECONDS):
                cause = submitter.cause(job_id, _nodes(results, job, missing))
                write_missing_outcomes(job.context(study, results), missing, cause)
    return job if live else close(results, job)


def close(results: Path, job: JobFile) -> JobFile:
    """Marks the job as one of which nothing more comes."""
    job = job.model_copy(update={"closed": True})
    job.write(results)
    return job


def line_of(submitter: Submitter, job: JobFile, states: States) -> str:
    """Where a job stands, as one line: "array 12: 2 running, 4 pending (Resources)"."""
    counts: dict[str, int] = {}
    for element in elements(job):
        state = _state_of(job, element, states)
        if state is not None:
            word = state.state.lower().replace("_", " ")
            text = f"{word} ({state.reason})" if word == "pending" and state.reason else word
            counts[text] = counts.get(text, 0) + 1
    told = [f"{count} {text}" if job.array else text for text, count in counts.items()]
    kind = "array" if job.array else "job"
    return f"{kind} {job.job_id}: {', '.join(told) or f'forgotten by {submitter.title}'}"


def elements(job: JobFile) -> Sequence[int | None]:
    """The parts of a job that Slurm runs by themselves."""
    return range(len(job.tasks)) if job.array else [None]


def _forgotten(job: JobFile, left: set[Task], states: States) -> bool:
    """Whether Slurm does not know a part of the job that has runs without an outcome."""
    return any(
        _state_of(job, element, states) is None and any(task.task in left for task in job.tasks_of(element))
        for element in elements(job)
    )


def _states(submitter: Submitter, jobs: Sequence[JobFile]) -> dict[tuple[str, int | None], JobState]:
    return {(state.name, state.element): state for state in submitter.states([job.name for job in jobs])}


def _state_of(job: JobFile, element: int | None, states: States) -> JobState | None:
    return states.get((job.name, element))


def _nodes(results: Path, job: JobFile, missing: Sequence[BatchTask]) -> tuple[str, ...]:
    """The hosts of the run that was under way; empty where none was."""
    for task in missing:
        header = run_state(results, task, job.measure.retries).folder / "trial.json"
        if header.exists():
            return RunHeader.model_validate_json(header.read_text(encoding="utf-8")).hosts
    return ()


def _id_of(job: JobFile, element: int | None) -> str:
    return f"{job.job_id}_{element}" if element is not None else f"{job.job_id}"
