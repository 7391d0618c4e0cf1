"""RESULTS/jobs/NAME.json: the work of one batch job, shared by the login node and the job.

Also looks at batch jobs: asks once for all of them, and writes the outcomes that ended ones have not written.

A job is one job of the batch system, or an array with one run, or all runs of one trial, in each element. `element` is
the number of an element, and None for a job that is no array.
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
from vitscale.machine.batch_systems import SLURM
from vitscale.runner.evidence import log_tail
from vitscale.runner.one_run import RunContext, folder_times, new_attempt
from vitscale.schedulers import Cause, Scheduler, Submitter, make_scheduler
from vitscale.schedulers.base import JobState, SchedulerSilentError
from vitscale.schedulers.job_script import failed_line
from vitscale.store import read_study, write_outcome, write_record
from vitscale.store.private_values import is_private
from vitscale.store.reading import RunKey
from vitscale.store.results import Outcome, RunHeader, StudyRecord
from vitscale.study.sections import LaunchSection, MeasureSection, SlurmSection
from vitscale.trial.fields import Spec

_JOB_NAME = re.compile(r"vitscale-[0-9]+x[0-9]+-[0-9a-f]{8}")


class BatchTask(Spec):
    """One run of a job."""

    trial_id: str
    repeat: int
    attempt: int
    """Number of its first attempt in this job."""

    @property
    def run(self) -> RunKey:
        """The run's trial and repeat."""
        return RunKey(self.trial_id, self.repeat)


def tasks_by_element(tasks: Sequence[BatchTask], *, trial_per_element: bool) -> list[tuple[BatchTask, ...]]:
    """Return the runs of each element of an array, in the order of their first runs.

    Args:
        tasks: the array's runs.
        trial_per_element: whether an element does all runs of one trial; else it does one run.
    """
    if not trial_per_element:
        return [(task,) for task in tasks]
    tasks_by_trial: dict[str, list[BatchTask]] = {}
    for task in tasks:
        tasks_by_trial.setdefault(task.trial_id, []).append(task)
    return [tuple(tasks_of_trial) for tasks_of_trial in tasks_by_trial.values()]


class JobFile(Spec):
    """One job, or one array with a run, or a trial's runs, in each element."""

    format: int = 1
    name: str
    """Also the job's name in the batch system, by which it is found where its number was not written down."""
    job_id: str | None = None
    """The batch system's id of it; null until that has answered."""
    array: bool
    trial_per_element: bool = False
    """Whether an element of the array does all runs of one trial; else it does one run."""
    tasks: tuple[BatchTask, ...] = Field(min_length=1)
    study_folder: str
    launch: LaunchSection
    slurm: SlurmSection
    measure: MeasureSection
    scheduler: str = SLURM.name
    """The batch system, by its name in the table of schedulers."""
    results: str | None = None
    """The folder that its driver writes to; null in files from before this was kept."""
    closed: bool = False
    """Whether nothing more comes of it: its runs have outcomes, or other jobs do them. If it starts now, it ends."""

    def context(self, record: StudyRecord, results: Path) -> RunContext:
        """Return the context that its runs share. `record` is that of study.json in the folder `results`."""
        return RunContext(record, self.measure, self.launch, self.slurm, Path(self.study_folder), results)

    def submitter(self) -> Submitter:
        """Return the batch system that it was submitted to.

        Raises:
            RequestError: it is not installed any more.
            StoreError: it takes no jobs.
        """
        study_path = Path(self.study_folder) / "study.toml"
        scheduler = make_scheduler(self.scheduler, self.launch, self.slurm, node=None, study_path=study_path)
        if not isinstance(scheduler, Submitter):
            raise StoreError(f"the job {self.name} was submitted to {shown(self.scheduler)}, which takes no jobs")
        return scheduler

    def write(self, results: Path) -> None:
        """Replace the job's file in one go; others cannot read it where the study's variables hold secrets."""
        folder = results / "jobs"
        folder.mkdir(exist_ok=True)
        has_secrets = any(is_private(name, value) for name, value in self.launch.environment.items())
        write_record(folder / f"{self.name}.json", self.model_dump_json(indent=1), private=has_secrets)

    def writes_elsewhere(self, results: Path) -> bool:
        """Whether it writes to another folder, of which `results` is a copy.

        A folder that is reached by two paths is one folder. Where the job's path leads nowhere from here, nobody can
        say, and the answer is False.
        """
        if self.results is None:
            return False
        try:
            return not results.samefile(self.results)
        except OSError:
            return False

    @property
    def elements(self) -> list[tuple[BatchTask, ...]]:
        """The runs of each element, in the order of the elements; of a job that is no array, all runs."""
        if not self.array:
            return [self.tasks]
        return tasks_by_element(self.tasks, trial_per_element=self.trial_per_element)

    def tasks_of_element(self, element: int | None) -> tuple[BatchTask, ...]:
        """Return the runs of an element of an array, none for an unknown one; all runs where `element` is None."""
        if element is None:
            return self.tasks
        elements = self.elements
        return elements[element] if element < len(elements) else ()


def read_job(results: Path, name: str) -> JobFile:
    """Read one job's file.

    Raises:
        StoreError: there is no such job, or its file cannot be read.
    """
    path = results / "jobs" / f"{name}.json"
    try:
        if not _JOB_NAME.fullmatch(name):
            raise ValueError("no name of a job")
        return JobFile.model_validate_json(read_record(path))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise StoreError(f"the job file {shown(str(path))} cannot be read: {reason}") from None


def open_jobs(results: Path) -> list[JobFile]:
    """Return all jobs of a results folder that are not closed, by name.

    Raises:
        StoreError: a file cannot be read.
    """
    names = sorted(path.stem for path in (results / "jobs").glob("vitscale-*.json"))
    jobs = [read_job(results, name) for name in names]
    return [job for job in jobs if not job.closed]


@dataclass(frozen=True)
class RunState:
    """How far a job has come with one of its runs, by the attempt that counts."""

    attempt: int
    """Number of the attempt."""
    folder: Path
    """Folder of the attempt; it does not exist before the attempt has begun."""
    outcome: Outcome | None
    """None: the attempt has not begun, or is under way, or was cut off."""

    @property
    def has_begun(self) -> bool:
        """Whether the attempt has begun, and so has its folder."""
        return self.folder.exists()


def run_state(results: Path, task: BatchTask, retries: int) -> RunState:
    """Return the state of a run, from its attempts in this job.

    Each transient failure is followed by another attempt, up to `retries` of them: the last attempt that has begun
    counts.

    Raises:
        StoreError: an outcome cannot be read.
    """
    for attempt in range(task.attempt, task.attempt + retries + 1):
        folder = results / "runs" / f"{task.trial_id}-r{task.repeat}-a{attempt}"
        try:
            outcome = Outcome.model_validate_json(read_record(folder / "outcome.json"))
        except FileNotFoundError:
            return RunState(attempt, folder, outcome=None)
        except (OSError, ValueError) as error:
            raise StoreError(f"{folder / 'outcome.json'} cannot be read: {str(error).splitlines()[0]}") from None
        if not outcome.transient:
            break
    return RunState(attempt, folder, outcome)


def run_states(results: Path, job: JobFile) -> dict[RunKey, RunState]:
    """Return how far a job has come with each of its runs."""
    return {task.run: run_state(results, task, job.measure.retries) for task in job.tasks}


def runs_without_outcome(results: Path, job: JobFile) -> set[RunKey]:
    """Return the runs of a job that have no outcome yet."""
    return {run for run, state in run_states(results, job).items() if state.outcome is None}


def driver_lock(
    results: Path, name: str, element: int | None, *, patience_seconds: float
) -> AbstractContextManager[TextIO | None]:
    """Take the lock of the driver of a job, or of one element of an array; None where it was not free in time.

    The driver holds it while it lives, so that nobody else writes outcomes of its runs.
    """
    suffix = "" if element is None else f"-{element}"
    return file_lock(results / "jobs" / f"{name}{suffix}.lock", patience_seconds)


def write_missing_outcomes(context: RunContext, tasks: Iterable[BatchTask], cause: Cause) -> None:
    """Give each of these runs that has no outcome one with this cause; the next `vitscale run` does them again.

    A run that was under way has a folder, which gets the outcome. For a run that never began the folder is made first.
    Runs of trials that have left the study are passed over.
    """
    for task in tasks:
        state = run_state(context.results, task, context.measure.retries)
        is_of_study = task.trial_id in context.record.trials
        if state.outcome is not None or not is_of_study:
            continue
        folder = state.folder if state.has_begun else new_attempt(context, task.run, state.attempt)
        write_outcome(folder, _external_outcome(cause, folder))


def _external_outcome(cause: Cause, folder: Path) -> Outcome:
    """Return the outcome of a run that a cause outside its trial ended.

    Its time is from the first to the last change in the run's folder.
    """
    times = folder_times(folder)
    return Outcome(
        kind=cause.kind,
        reason=cause.reason,
        detail=log_tail(folder / "log.txt"),
        host=cause.host,
        external=True,
        started_unix_seconds=times.first_unix_seconds,
        wall_seconds=times.seconds,
    )


FIRST_LOOK_SECONDS = 0.5
"""Pause after the first look at the batch system; each further one is `LOOK_GROWTH` times as long."""
LATEST_LOOK_SECONDS = 30.0
"""The longest pause between two looks."""
LOOK_GROWTH = 1.3
_SECOND_QUESTION_PAUSE_SECONDS = 1.0
"""Pause before a second look where the batch system does not know a job."""
_DRIVER_END_SECONDS = 30.0
"""How long the driver of a job that is over may go on writing its outcomes."""

Say = Callable[[str], None]
"""Prints one line for the user."""
States = Mapping[tuple[str, int | None], JobState]
"""(name of a job, element of its array) -> its state; what the batch system has forgotten is missing."""
Answer = TypeVar("Answer")


def wait_for_answer(
    scheduler: Scheduler, question: Callable[[], Answer], say: Say, pause: Callable[[float], object] = time.sleep
) -> Answer:
    """Ask the batch system a question until it answers, and return the answer.

    Args:
        scheduler: the batch system.
        question: asks it.
        say: called once with a line on the silence, and once the batch system answers again.
        pause: waits for a number of seconds between two questions.
    """
    pause_seconds = FIRST_LOOK_SECONDS
    was_silent = False
    while True:
        try:
            answer = question()
        except SchedulerSilentError as error:
            if not was_silent:
                say(f"waiting for {scheduler.title}: {error}")
            was_silent = True
            pause(pause_seconds)
            pause_seconds = min(LATEST_LOOK_SECONDS, LOOK_GROWTH * pause_seconds)
        else:
            if was_silent:
                say(f"{scheduler.title} answers again")
            return answer


def current_states(submitter: Submitter, results: Path, jobs: Sequence[JobFile]) -> States:
    """Ask the batch system for the states of these jobs; those that it has forgotten are missing.

    Where a job that still has runs to do is missing, the batch system is asked once more after a second.
    """
    states = _states_by_element(submitter, jobs)
    if any(_has_forgotten_part(job, runs_without_outcome(results, job), states) for job in jobs):
        time.sleep(_SECOND_QUESTION_PAUSE_SECONDS)
        states = {**states, **_states_by_element(submitter, jobs)}
    return states


def settle_ended(submitter: Submitter, results: Path, job: JobFile, states: States) -> JobFile:
    """Write the outcomes that a job has left unwritten where it has ended, and close it where all of it has.

    The elements of an array end separately.

    Returns:
        The job, with `closed` as it is now.

    Raises:
        StoreError: the study cannot be read.
    """
    study = read_study(results)
    if study is None:
        raise StoreError(f"{results} has jobs, but no study.json")
    context = job.context(study, results)
    without_outcome = runs_without_outcome(results, job)
    is_live = False
    for element in element_numbers(job):
        unfinished = [task for task in job.tasks_of_element(element) if task.run in without_outcome]
        if not unfinished:
            continue
        state = states.get((job.name, element))
        if state is not None and not state.over:
            is_live = True
            continue
        # The driver of a job on a node that failed may still be writing its own outcome.
        with driver_lock(results, job.name, element, patience_seconds=_DRIVER_END_SECONDS):
            cause = _cause_of_end(submitter, results, job, element, unfinished, states)
            write_missing_outcomes(context, unfinished, cause)
    return job if is_live else close_job(results, job)


def _cause_of_end(
    submitter: Submitter,
    results: Path,
    job: JobFile,
    element: int | None,
    unfinished: Sequence[BatchTask],
    states: States,
) -> Cause:
    """Return why a job, or one element of it, ended before its runs `unfinished` had outcomes."""
    state = states.get((job.name, element))
    job_id = f"{job.job_id}" if element is None else f"{job.job_id}_{element}"
    if state is None and _never_began(results, job, element, states):
        return Cause("failed", f"cancelled before it began (job {job_id})")
    known_id = state.job_id if state else job_id
    cause = submitter.cause(known_id, _hosts_of_begun_run(results, job, unfinished))
    script_failure = failed_line(results / "jobs" / f"{job.name}-{known_id}.out")
    if cause.kind != "failed" or script_failure is None:
        return cause
    return Cause("failed", f"{script_failure} (job {known_id})", cause.host)


def close_job(results: Path, job: JobFile) -> JobFile:
    """Mark a job, also in its file, as one from which nothing more comes, and return it."""
    closed_job = job.model_copy(update={"closed": True})
    closed_job.write(results)
    return closed_job


def state_line(submitter: Submitter, job: JobFile, states: States) -> str:
    """Return a job's state in one line: "array 12: 2 running, 4 pending (Resources)"."""
    counts = Counter[str]()
    for element in element_numbers(job):
        state = states.get((job.name, element))
        if state is not None:
            counts[_state_words(state)] += 1
    if not counts:
        clauses = [f"forgotten by {submitter.title}"]
    elif job.array:
        clauses = [f"{count} {words}" for words, count in counts.items()]
    else:
        clauses = list(counts)
    noun = "array" if job.array else "job"
    return f"{noun} {job.job_id}: {', '.join(clauses)}"


def _state_words(state: JobState) -> str:
    """Return "running", "out of memory", or "pending (Resources)"."""
    words = state.state.lower().replace("_", " ")
    if words == "pending" and state.reason:
        return f"{words} ({state.reason})"
    return words


def element_numbers(job: JobFile) -> Sequence[int | None]:
    """Return the parts of a job that run separately: 0, 1, ... of an array, None alone for a job."""
    return range(len(job.elements)) if job.array else [None]


def _never_began(results: Path, job: JobFile, element: int | None, states: States) -> bool:
    """Whether an element that Slurm does not know, of an array that it knows, never began.

    Slurm knows an element by itself only once it begins. One that is cancelled before leaves no trace, and no file of
    its output, which is made as it begins.
    """
    if element is None:
        return False
    is_array_known = any(name == job.name for name, _ in states)
    return is_array_known and not any((results / "jobs").glob(f"{job.name}-*_{element}.out"))


def _has_forgotten_part(job: JobFile, without_outcome: set[RunKey], states: States) -> bool:
    """Whether the batch system does not know a part of the job that has runs without an outcome."""
    unknown_tasks: list[BatchTask] = []
    for element in element_numbers(job):
        if (job.name, element) not in states:
            unknown_tasks += job.tasks_of_element(element)
    return any(task.run in without_outcome for task in unknown_tasks)


def _states_by_element(submitter: Submitter, jobs: Sequence[JobFile]) -> dict[tuple[str, int | None], JobState]:
    """Ask the batch system once for the states of these jobs; those that it has forgotten are missing."""
    states = submitter.states([job.name for job in jobs])
    return {(state.name, state.element): state for state in states}


def _hosts_of_begun_run(results: Path, job: JobFile, unfinished: Sequence[BatchTask]) -> tuple[str, ...]:
    """Return the hosts of the first of these runs that was under way; empty where none was."""
    for task in unfinished:
        header = run_state(results, task, job.measure.retries).folder / "trial.json"
        if header.exists():
            return RunHeader.model_validate_json(read_record(header)).hosts
    return ()
