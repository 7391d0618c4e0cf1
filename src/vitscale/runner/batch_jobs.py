"""Batch jobs from a login node: submitted, watched to their end, found again after a logout. Each run is done once."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from vitscale.errors import StoreError, VitscaleError, shown
from vitscale.present.units import counted
from vitscale.runner import batch_file
from vitscale.runner.one_run import RunContext, next_attempt
from vitscale.runner.planning import Plan, Report
from vitscale.runner.progress import StudyProgress
from vitscale.runner.todo import AddedRuns, existing_outcomes, outstanding_runs, refuse_damaged, skip_unfit
from vitscale.schedulers import Submitter
from vitscale.schedulers.base import BatchJob, SchedulerError, SchedulerMissingError
from vitscale.store import RunIndex, write_record
from vitscale.store.reading import RunKey
from vitscale.store.results import Outcome
from vitscale.trial.trial import World


class Detached(VitscaleError):
    """Nobody watches any more; the jobs go on."""

    exit_code = 130


def submit_outstanding(
    plan: Plan, submitter: Submitter, results: Path, console: Console, unfit: Mapping[str, str], *, retry_failed: bool
) -> Report:
    """Submit all missing runs that have no live job, and wait for all. The caller holds the folder's lock.

    Args:
        plan: the study.
        submitter: batch system that takes the jobs.
        results: folder of the results.
        console: for lines and the live display.
        unfit: trials to skip -> why.
        retry_failed: do runs again that did not complete.

    Raises:
        Detached: on Ctrl-C or a logout; the jobs go on.
        SchedulerError: a job is refused.
        StoreError: finished runs cannot be read; nothing is submitted.
    """
    context = plan.in_folder(results)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    try:
        settle_earlier_jobs(submitter, results, say)
        index = RunIndex(results)
        refuse_damaged(results, index)
        todo = outstanding_runs(plan, index, retry_failed=retry_failed)
        outcomes = existing_outcomes(plan, index, todo)
        todo = skip_unfit(context, todo, unfit, index, outcomes)
        added = AddedRuns(plan, results, outcomes, todo)
        done = 0
        with StudyProgress(console) as progress:

            def on_outcome(task: RunKey, outcome: Outcome) -> None:
                nonlocal done
                done += 1
                outcomes[task] = outcome
                progress.end(plan.record.trials[task.trial_id], outcome)

            progress.expect(len(todo), added.most_to_come())
            submit_and_watch(context, submitter, todo, say, on_outcome)
            for task in added:
                submit_and_watch(context, submitter, [task], say, on_outcome)
    except KeyboardInterrupt:
        raise _detached_error(submitter, batch_file.open_jobs(results)) from None
    return Report(done, outcomes)


def refuse_live_jobs(results: Path) -> None:
    """Refuse to go on while jobs are live: a driver that is no job must not write beside them.

    Raises:
        StoreError: there are live jobs.
    """
    job_ids = live_jobs(results)
    if job_ids:
        facts = batch_file.open_jobs(results)[0].submitter().facts
        raise StoreError(
            f"jobs of {facts.title} are still at work on {shown(str(results))}: {', '.join(job_ids[:8])}",
            next_step=f"Wait for them with --scheduler {facts.name}, cancel them ({facts.cancel_program}), or "
            "give another folder with -o",
        )


def job_scripts(context: RunContext, submitter: Submitter, tasks: Sequence[RunKey]) -> list[str]:
    """Return the scripts that would be submitted, with zeros for the digits in each job's name; nothing is written.

    Raises:
        RequestError: a value of the study cannot stand in a script.
    """
    most_elements = _most_elements(submitter, say=None)
    jobs = new_jobs(context, submitter, tasks, attempts={}, digits=lambda: "0" * 8, most_elements=most_elements)
    return [submitter.script(job_request(context, job)) for job in jobs]


def live_jobs(results: Path) -> list[str]:
    """Return the numbers of the jobs that may still write to a results folder.

    Of a batch system that is silent, or refuses to answer, these are all open jobs.
    """
    jobs_by_scheduler: dict[str, list[batch_file.JobFile]] = {}
    for job in batch_file.open_jobs(results):
        if not job.writes_elsewhere(results):
            jobs_by_scheduler.setdefault(job.scheduler, []).append(job)

    live: list[batch_file.JobFile] = []
    for _, jobs in sorted(jobs_by_scheduler.items()):
        try:
            states = jobs[0].submitter().states([job.name for job in jobs])
        except SchedulerMissingError:
            continue  # a copy of the folder, away from its cluster
        except SchedulerError:
            live += jobs
        else:
            live_names = {state.name for state in states if not state.over}
            live += [job for job in jobs if job.name in live_names]
    return [job.job_id or job.name for job in live]


def settle_earlier_jobs(submitter: Submitter, results: Path, say: batch_file.Say) -> None:
    """Close the jobs of earlier calls that have ended, and write the outcomes that they have left unwritten.

    Jobs that are live stay open.

    Raises:
        StoreError: a job's file cannot be read.
    """
    jobs = []
    for job in batch_file.open_jobs(results):
        if job.writes_elsewhere(results):
            say(f"job {job.job_id or job.name} works on {job.results}, of which this is a copy, and is left to it")
            batch_file.close_job(results, job)
        else:
            jobs.append(job)
    states = batch_file.wait_for_answer(submitter, lambda: batch_file.current_states(submitter, results, jobs), say)
    for job in jobs:
        known_job = job if job.job_id is not None else _with_job_id(results, job, states)
        if known_job.job_id is None:
            # Never submitted, or long gone. If it starts after all, it finds itself closed.
            batch_file.close_job(results, known_job)
        else:
            batch_file.settle_ended(submitter, results, known_job, states)


def _with_job_id(results: Path, job: batch_file.JobFile, states: batch_file.States) -> batch_file.JobFile:
    """Return the job with its number, in its file too, where the batch system knows its name; else the job as it is.

    The call that submitted it ended before it could write down the number.
    """
    for (name, _), state in states.items():
        if name == job.name:
            numbered_job = job.model_copy(update={"job_id": state.array_id})
            numbered_job.write(results)
            return numbered_job
    return job


def submit_and_watch(
    context: RunContext,
    submitter: Submitter,
    tasks: Sequence[RunKey],
    say: batch_file.Say,
    on_outcome: Callable[[RunKey, Outcome], None],
) -> None:
    """Submit the runs that no live job holds, and return when every task has its outcome.

    Args:
        context: values that the study's runs share.
        submitter: batch system that takes the jobs.
        tasks: the outstanding runs.
        say: prints one line for the user.
        on_outcome: called once with each run's outcome, when it is first seen.

    Raises:
        SchedulerError: a job is refused; the others are submitted, and go on.
        RequestError: a value of the study cannot stand in a script.
    """
    results = context.results
    jobs = _jobs_with_any_of(results, set(tasks))
    submitted_before: set[RunKey] = set()
    for job in jobs:
        submitted_before |= batch_file.runs_without_outcome(results, job)
    new_tasks = [task for task in tasks if task not in submitted_before]
    most_elements = _most_elements(submitter, say) if new_tasks else 1
    coming = new_jobs(
        context,
        submitter,
        new_tasks,
        attempts=RunIndex(results).attempts,
        digits=lambda: secrets.token_hex(4),
        most_elements=most_elements,
    )
    submission = _Submission(context, submitter, say, jobs, list(coming))
    try:
        for job in jobs:
            runs_to_come = counted(len(batch_file.runs_without_outcome(results, job)), "run")
            say(f"job {job.job_id} was submitted before: {runs_to_come} to come")
        submission.submit_more()
        _watch_jobs(submission, set(tasks), on_outcome)
    except SchedulerError as error:
        if jobs:
            raise type(error)(f"{error} {_how_to_go_on(submitter, jobs)}") from None
        raise


def _jobs_with_any_of(results: Path, tasks: set[RunKey]) -> list[batch_file.JobFile]:
    """Return the open jobs in which one of the runs has no outcome yet; closes those whose last run has ended."""
    jobs = []
    for job in batch_file.open_jobs(results):
        without_outcome = batch_file.runs_without_outcome(results, job)
        if not without_outcome:
            batch_file.close_job(results, job)  # its last run has ended since `settle_earlier_jobs` looked
        elif tasks & without_outcome:
            jobs.append(job)
    return jobs


class _Submission:
    """The jobs of one call: those that are live, and those that are still to be submitted."""

    def __init__(
        self,
        context: RunContext,
        submitter: Submitter,
        say: batch_file.Say,
        jobs: list[batch_file.JobFile],
        coming: list[batch_file.JobFile],
    ) -> None:
        """`jobs`: live ones; the submitted ones are added to it. `coming`: those to submit."""
        self.results = context.results
        self.submitter = submitter
        self.say = say
        self.jobs = jobs
        self._context = context
        self._coming = coming
        self._refused: dict[str, list[str]] = {}
        """The batch system's words -> shapes of worlds that it refused with them."""

    def submit_more(self) -> None:
        """Submit jobs for as long as `measure.parallel_runs` allows.

        Raises:
            SchedulerError: none is left to submit, and one of them was refused.
        """
        while self._coming and self._may_submit(self._coming[0]):
            job = self._coming.pop(0)
            try:
                self.jobs.append(submit_job(self._context, self.submitter, job, self.say))
            except SchedulerMissingError:
                raise
            except SchedulerError as error:  # of this shape of world: another may be taken
                self._refused.setdefault(str(error), []).append(_world_in_words(self._context, job))
        if self._refused and not self._coming:
            refusals = [f"{', '.join(shapes)}: {words}" for words, shapes in self._refused.items()]
            raise SchedulerError(" ".join(refusals))

    def _may_submit(self, job: batch_file.JobFile) -> bool:
        """Whether `measure.parallel_runs` allows this job beside the live ones."""
        limit = self._context.measure.parallel_runs
        if limit is None:
            return True
        return sum(_most_at_a_time(self.results, other) for other in (*self.jobs, job)) <= limit


def _watch_jobs(submission: _Submission, tasks: set[RunKey], on_outcome: Callable[[RunKey, Outcome], None]) -> None:
    """Look at all jobs together, ever less often, until none is live; more are submitted as others end.

    Args:
        submission: the jobs; those that have ended leave its list.
        tasks: runs whose outcomes are reported; emptied as they are.
        on_outcome: called with each run's outcome.
    """
    results = submission.results
    submitter = submission.submitter
    jobs = submission.jobs
    say = submission.say
    last_lines: dict[str, str] = {}
    pause_seconds = batch_file.FIRST_LOOK_SECONDS
    while jobs:
        # States first: once a job is over, the outcomes read afterwards are all that will come.
        states = batch_file.wait_for_answer(submitter, lambda: batch_file.current_states(submitter, results, jobs), say)
        for job in list(jobs):
            is_closed = batch_file.settle_ended(submitter, results, job, states).closed
            for task, state in batch_file.run_states(results, job).items():
                if state.outcome is not None and task in tasks:
                    tasks.discard(task)
                    on_outcome(task, state.outcome)
            if is_closed:
                jobs.remove(job)
                continue
            line = batch_file.state_line(submitter, job, states)
            if line != last_lines.get(job.name):
                last_lines[job.name] = line
                say(line)
        submission.submit_more()
        if jobs:
            time.sleep(pause_seconds)
            pause_seconds = min(batch_file.LATEST_LOOK_SECONDS, batch_file.LOOK_GROWTH * pause_seconds)


def _most_at_a_time(results: Path, job: batch_file.JobFile) -> int:
    """Return how many of the job's runs may run at the same time from now on."""
    without_outcome = batch_file.runs_without_outcome(results, job)
    remaining_elements = sum(any(task.run in without_outcome for task in element) for element in job.elements)
    return min(remaining_elements, job.measure.parallel_runs or remaining_elements)


def _most_elements(submitter: Submitter, say: batch_file.Say | None) -> int:
    """Return how many elements one array may have; the usual number where the batch system refuses to answer.

    `say`: None: do not wait while it is silent, and take the usual number then too.
    """
    if not submitter.arrays:
        return 1
    try:
        if say is None:
            return submitter.most_elements()
        return batch_file.wait_for_answer(submitter, submitter.most_elements, say)
    except SchedulerError:
        return Submitter.most_elements(submitter)


class _Shape(NamedTuple):
    """The hosts that a run asks for; runs of one shape can be elements of one array."""

    world: World
    on_gpus: bool


def new_jobs(
    context: RunContext,
    submitter: Submitter,
    tasks: Iterable[RunKey],
    attempts: Mapping[RunKey, int],
    digits: Callable[[], str],
    most_elements: int,
) -> Iterator[batch_file.JobFile]:
    """Yield one job, or arrays of at most `most_elements` elements, for each shape of world; tasks keep their order.

    Args:
        context: values that the study's runs share.
        submitter: batch system that takes the jobs.
        tasks: the runs.
        attempts: highest attempt number in use, by (trial, repeat).
        digits: makes the eight hexadecimal digits by which a job's name differs from all others.
        most_elements: of one array.
    """
    tasks_by_shape: dict[_Shape, list[batch_file.BatchTask]] = {}
    for task in tasks:
        shape = _Shape(context.record.trials[task.trial_id].world, _trains_on_gpus(context, task.trial_id))
        batch_task = batch_file.BatchTask(
            trial_id=task.trial_id, repeat=task.repeat, attempt=next_attempt(attempts, task)
        )
        tasks_by_shape.setdefault(shape, []).append(batch_task)
    for shape, batch_tasks in tasks_by_shape.items():
        for tasks_of_job in _tasks_by_job(submitter, batch_tasks, most_elements):
            yield batch_file.JobFile(
                name=f"vitscale-{shape.world.nodes}x{shape.world.ranks_per_node}-{digits()}",
                array=submitter.arrays,
                trial_per_element=submitter.trial_per_element,
                tasks=tasks_of_job,
                study_folder=str(context.folder),
                launch=context.launch,
                slurm=context.slurm,
                measure=context.measure,
                scheduler=submitter.facts.name,
                results=str(context.results),
            )


def _tasks_by_job(
    submitter: Submitter, tasks: Sequence[batch_file.BatchTask], most_elements: int
) -> list[tuple[batch_file.BatchTask, ...]]:
    """Return the runs of each job that does runs of one shape: of one job, or of arrays of at most `most_elements`."""
    if not submitter.arrays:
        return [tuple(tasks)]
    elements = batch_file.tasks_by_element(tasks, trial_per_element=submitter.trial_per_element)
    jobs = []
    for first in range(0, len(elements), most_elements):
        elements_of_job = elements[first : first + most_elements]
        jobs.append(tuple(task for element in elements_of_job for task in element))
    return jobs


def _trains_on_gpus(context: RunContext, trial_id: str) -> bool:
    """Whether the ranks of a trial need GPUs."""
    return context.record.trials[trial_id].train.device == "cuda"


def job_request(context: RunContext, job: batch_file.JobFile) -> BatchJob:
    """Return what the job's script asks for."""
    trial_id = job.tasks[0].trial_id
    return BatchJob(
        name=job.name,
        world=context.record.trials[trial_id].world,
        on_gpus=_trains_on_gpus(context, trial_id),
        results=context.results,
        cwd=Path.cwd(),
        elements=len(job.elements) if job.array else None,
        at_a_time=context.measure.parallel_runs,
    )


def submit_job(
    context: RunContext, submitter: Submitter, job: batch_file.JobFile, say: batch_file.Say
) -> batch_file.JobFile:
    """Submit a job and return it with its number.

    Its file is written before, and its number after, so that a crash between never makes two jobs.

    Raises:
        SchedulerError: the job is refused, and nothing of it is kept.
        RequestError: a value of the study cannot stand in a script.
    """
    text = submitter.script(job_request(context, job))
    job.write(context.results)
    script = context.results / "jobs" / f"{job.name}.sh"
    write_record(script, text)

    def job_id() -> str:
        # An earlier answer may have been lost: the job may already exist.
        existing_ids = [state.array_id for state in submitter.states([job.name])]
        return existing_ids[0] if existing_ids else submitter.submit(script)

    try:
        submitted_job = job.model_copy(update={"job_id": batch_file.wait_for_answer(submitter, job_id, say)})
    except SchedulerError:
        for path in (script, script.with_suffix(".json")):
            path.unlink()
        raise
    submitted_job.write(context.results)
    noun = "array" if job.array else "job"
    runs = counted(len(job.tasks), "run")
    say(f"{noun} {submitted_job.job_id} submitted: {runs} on {_world_in_words(context, job)}")
    return submitted_job


def _world_in_words(context: RunContext, job: batch_file.JobFile) -> str:
    """Return the world of a job's runs in words: "2 x 4 ranks"."""
    world = context.record.trials[job.tasks[0].trial_id].world
    return f"{world.nodes} x {world.ranks_per_node} ranks"


def _detached_error(submitter: Submitter, jobs: Sequence[batch_file.JobFile]) -> Detached:
    """Return the error for a call that was interrupted while these jobs were open."""
    if not jobs:
        return Detached("interrupted: nothing was submitted.")
    sentences = []
    unanswered_names = [job.name for job in jobs if job.job_id is None]
    if len(unanswered_names) < len(jobs):
        sentences.append(_how_to_go_on(submitter, jobs))
    if unanswered_names:
        list_command = submitter.facts.list_command.format(names=",".join(unanswered_names))
        sentences.append(
            f"Whether {', '.join(unanswered_names)} was submitted too is not known: "
            f"{list_command} shows it, and the same command again finds it"
        )
    return Detached(f"no longer watching. {' '.join(sentences)}")


def _how_to_go_on(submitter: Submitter, jobs: Sequence[batch_file.JobFile]) -> str:
    """Return sentences on how submitted jobs are watched again, or cancelled."""
    numbers = " ".join(job.job_id for job in jobs if job.job_id is not None)
    return (
        f"Submitted jobs go on ({numbers}). The same command again watches them, and does what is missing then. "
        f"To cancel them: {submitter.facts.cancel_program} {numbers}"
    )
