"""RESULTS/jobs/NAME.json: what one batch job is to do, shared by the login node and the job.

Also looks at batch jobs: asks once for all of them, and writes the outcomes that ended ones have not written.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, TypeVar

from pydantic import Field

from vitscale.base.files import file_lock, read_record
from vitscale.errors import StoreError, shown
from vitscale.runner.evidence import log_tail
from vitscale.runner.one_run import RunContext, RunTask, new_attempt, touched
from vitscale.schedulers import Cause, Scheduler, Submitter, made
from vitscale.schedulers.base import JobState, SchedulerSilentError
from vitscale.store import read_study, write_outcome, write_record
from vitscale.store.private_values import is_private
from vitscale.store.results import Outcome, RunHeader, StudyRecord
from vitscale.study.sections import LaunchSection, MeasureSection, SlurmSection
from vitscale.trial.fields import Spec

_NAME = re.compile(r"vitscale-[0-9]+x[0-9]+-[0-9a-f]{8}")


class BatchTask(Spec):
    """One run of a job."""

    trial_id: str
    repeat: int
    attempt: int
    """Number of its first attempt in this job."""

    @property
    def task(self) -> RunTask:
        """Which run it is."""
        return RunTask(self.trial_id, self.repeat)


class JobFile(Spec):
    """One job, or one array with a run in each element."""

    format: int = 1
    name: str
    """Also the job's name in Slurm, by which it is found where its number was not written down."""
    job_id: str | None = None
    """Slurm's number; null until sbatch has answered."""
    array: bool
    tasks: tuple[BatchTask, ...] = Field(min_length=1)
    study_folder: str
    launch: LaunchSection
    slurm: SlurmSection
    measure: MeasureSection
    scheduler: str = "slurm"
    """The batch system, by its name in the table of schedulers."""
    results: str | None = None
    """The folder that its driver writes to; null in files from before this was kept."""
    closed: bool = False
    """Whether nothing more comes of it: its runs have outcomes, or others do them. A job that starts now leaves."""

    def context(self, record: StudyRecord, results: Path) -> RunContext:
        """The context that its runs share."""
        return RunContext(record, self.measure, self.launch, self.slurm, Path(self.study_folder), results)

    def submitter(self) -> Submitter:
        """The batch system that it was submitted to.

        Raises:
            RequestError: it is not installed any more.
            StoreError: it takes no jobs.
        """
        scheduler = made(self.scheduler, self.launch, self.slurm, None, Path(self.study_folder) / "study.toml")
        if not isinstance(scheduler, Submitter):
            raise StoreError(f"the job {self.name} was submitted to {shown(self.scheduler)}, which takes no jobs")
        return scheduler

    def write(self, results: Path) -> None:
        """Replaces the job's file in one go."""
        folder = results / "jobs"
        folder.mkdir(exist_ok=True)
        private = any(is_private(name, value) for name, value in self.launch.environment.items())
        write_record(folder / f"{self.name}.json", self.model_dump_json(indent=1), private=private)

    def elsewhere(self, results: Path) -> bool:
        """Whether it writes to another folder, of which `results` is a copy. One that is reached by two paths is one,
        and where the other path leads nowhere from here, nobody can tell."""
        try:
            return self.results is not None and not results.samefile(self.results)
        except OSError:
            return False

    def tasks_of(self, element: int | None) -> tuple[BatchTask, ...]:
        """The runs of one element of an array; all runs where `element` is None."""
        if element is None:
            return self.tasks
        return self.tasks[element : element + 1]


def read_job(results: Path, name: str) -> JobFile:
    """One job's file.

    Raises:
        StoreError: there is no such job, or its file cannot be read.
    """
    path = results / "jobs" / f"{name}.json"
    try:
        if not _NAME.fullmatch(name):
            raise ValueError("no name of a job")
        return JobFile.model_validate_json(read_record(path))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise StoreError(f"the job file {shown(str(path))} cannot be read: {reason}") from None


def open_jobs(results: Path) -> list[JobFile]:
    """All jobs that are not closed.

    Raises:
        StoreError: a file cannot be read.
    """
    names = sorted(path.stem for path in (results / "jobs").glob("vitscale-*.json"))
    return [job for job in (read_job(results, name) for name in names) if not job.closed]


@dataclass(frozen=True)
class RunState:
    """How far a job has come with one of its runs."""

    folder: Path
    """Folder of the attempt that counts; it does not exist before that attempt has begun."""
    outcome: Outcome | None


def run_state(results: Path, task: BatchTask, retries: int) -> RunState:
    """The state of a run, from its attempts in this job: each transient failure is followed by another attempt.

    Raises:
        StoreError: an outcome cannot be read.
    """
    for attempt in range(task.attempt, task.attempt + retries + 1):
        folder = results / "runs" / f"{task.trial_id}-r{task.repeat}-a{attempt}"
        try:
            outcome = Outcome.model_validate_json(read_record(folder / "outcome.json"))
        except FileNotFoundError:
            return RunState(folder, None)
        except (OSError, ValueError) as error:
            raise StoreError(f"{folder / 'outcome.json'} cannot be read: {str(error).splitlines()[0]}") from None
        if not outcome.transient:
            break
    return RunState(folder, outcome)


def run_states(results: Path, job: JobFile) -> dict[RunTask, RunState]:
    """How far a job has come with each of its runs."""
    return {task.task: run_state(results, task, job.measure.retries) for task in job.tasks}


def waiting(results: Path, job: JobFile) -> set[RunTask]:
    """The runs of a job that have no outcome yet."""
    return {task for task, state in run_states(results, job).items() if state.outcome is None}


def drivers_lock(
    results: Path, name: str, element: int | None, *, patience_seconds: float
) -> AbstractContextManager[TextIO | None]:
    """The lock of the driver of a job, or of one element of an array; None where it was not free in time.

    The driver holds it while it lives, so that nobody else settles its runs.
    """
    part = "" if element is None else f"-{element}"
    return file_lock(results / "jobs" / f"{name}{part}.lock", patience_seconds)


def write_missing_outcomes(context: RunContext, tasks: Iterable[BatchTask], cause: Cause) -> None:
    """Gives each run without an outcome one with this cause: the run that was under way and those that never began.

    The next `vitscale run` does them again. Runs of trials that have left the study are passed over.
    """
    for task in tasks:
        state = run_state(context.results, task, context.measure.retries)
        if state.outcome is not None or task.trial_id not in context.record.trials:
            continue
        folder = state.folder
        if not folder.exists():
            attempt = int(folder.name.rpartition("-a")[2])
            folder = new_attempt(context, task.task, attempt)
        write_outcome(folder, _outcome(folder, cause))


def _outcome(folder: Path, cause: Cause) -> Outcome:
    """An outcome for a run's folder; its time is from the first to the last change in the folder."""
    began, seconds = touched(folder)
    return Outcome(
        kind=cause.kind,
        reason=cause.reason,
        detail=log_tail(folder / "log.txt"),
        host=cause.host,
        external=True,
        started_unix_seconds=began,
        wall_seconds=seconds,
    )


FIRST_LOOK_SECONDS = 0.5
LATEST_LOOK_SECONDS = 30.0
LOOK_GROWTH = 1.3
_SECOND_LOOK_SECONDS = 1.0
_LAST_WORDS_SECONDS = 30.0

Say = Callable[[str], None]
States = Mapping[tuple[str, int | None], JobState]
"""States of jobs, by (name of the job, element of its array)."""
Answer = TypeVar("Answer")


def patiently(
    scheduler: Scheduler, question: Callable[[], Answer], say: Say, pause: Callable[[float], object] = time.sleep
) -> Answer:
    """The batch system's answer; waits while it is silent, and says so once."""
    seconds, silent = FIRST_LOOK_SECONDS, False
    while True:
        try:
            answer = question()
        except SchedulerSilentError as error:
            if not silent:
                say(f"waiting for {scheduler.title}: {error}")
            silent = True
            pause(seconds)
            seconds = min(LATEST_LOOK_SECONDS, LOOK_GROWTH * seconds)
        else:
            if silent:
                say(f"{scheduler.title} answers again")
            return answer


def look(submitter: Submitter, results: Path, jobs: Sequence[JobFile]) -> States:
    """What the batch system knows of these jobs; those that it has forgotten are missing, after a second look."""
    states = _states(submitter, jobs)
    if any(_forgotten(job, waiting(results, job), states) for job in jobs):
        time.sleep(_SECOND_LOOK_SECONDS)
        states = {**states, **_states(submitter, jobs)}
    return states


def settle_ended(submitter: Submitter, results: Path, job: JobFile, states: States) -> JobFile:
    """Writes the outcomes that a job's ended parts have not written; closes it where nothing more will come.

    Raises:
        StoreError: the study cannot be read.
    """
    study = read_study(results)
    if study is None:
        raise StoreError(f"{results} has jobs, but no study.json")
    left, live = waiting(results, job), False
    for element in elements(job):
        missing = [task for task in job.tasks_of(element) if task.task in left]
        state = states.get((job.name, element))
        if state is not None and not state.over:
            live = live or bool(missing)
        elif missing:
            named = f"{job.job_id}_{element}" if element is not None else f"{job.job_id}"
            # The driver of a job on a node that failed may still be writing its own outcome.
            with drivers_lock(results, job.name, element, patience_seconds=_LAST_WORDS_SECONDS):
                if state is None and _never_began(results, job, element, states):
                    cause = Cause("failed", f"cancelled before it began (job {named})")
                else:
                    cause = submitter.cause(state.job_id if state else named, _nodes(results, job, missing))
                write_missing_outcomes(job.context(study, results), missing, cause)
    return job if live else close(results, job)


def close(results: Path, job: JobFile) -> JobFile:
    """Marks a job as one from which nothing more comes."""
    job = job.model_copy(update={"closed": True})
    job.write(results)
    return job


def line_of(submitter: Submitter, job: JobFile, states: States) -> str:
    """A job's state in one line: "array 12: 2 running, 4 pending (Resources)"."""
    counts = Counter[str]()
    for element in elements(job):
        if (state := states.get((job.name, element))) is not None:
            word = state.state.lower().replace("_", " ")
            counts[f"{word} ({state.reason})" if word == "pending" and state.reason else word] += 1
    told = [f"{count} {text}" if job.array else text for text, count in counts.items()]
    kind = "array" if job.array else "job"
    return f"{kind} {job.job_id}: {', '.join(told) or f'forgotten by {submitter.title}'}"


def elements(job: JobFile) -> Sequence[int | None]:
    """The parts of a job that Slurm runs separately."""
    return range(len(job.tasks)) if job.array else [None]


def _never_began(results: Path, job: JobFile, element: int | None, states: States) -> bool:
    """Whether an unknown element of a known array never began: a job's output is made as it begins.

    Slurm makes an element of its own only of one that begins; what is cancelled before leaves no trace.
    """
    known = any(name == job.name for name, _ in states)
    return known and element is not None and not any((results / "jobs").glob(f"{job.name}-*_{element}.out"))


def _forgotten(job: JobFile, left: set[RunTask], states: States) -> bool:
    """Whether Slurm does not know a part of the job that has runs without an outcome."""
    return any(
        states.get((job.name, element)) is None and any(task.task in left for task in job.tasks_of(element))
        for element in elements(job)
    )


def _states(submitter: Submitter, jobs: Sequence[JobFile]) -> dict[tuple[str, int | None], JobState]:
    return {(state.name, state.element): state for state in submitter.states([job.name for job in jobs])}


def _nodes(results: Path, job: JobFile, missing: Sequence[BatchTask]) -> tuple[str, ...]:
    """The hosts of the run that was under way; empty where none was."""
    for task in missing:
        header = run_state(results, task, job.measure.retries).folder / "trial.json"
        if header.exists():
            return RunHeader.model_validate_json(read_record(header)).hosts
    return ()
