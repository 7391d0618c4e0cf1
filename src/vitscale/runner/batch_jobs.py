"""Batch jobs from a login node: submitted, watched to their end, found again after a logout. Each run is done once."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Console

from vitscale.errors import StoreError, VitscaleError, shown
from vitscale.present.units import counted
from vitscale.runner import batch_file
from vitscale.runner.one_run import RunContext, RunTask
from vitscale.runner.planning import Plan, Report
from vitscale.runner.progress import StudyProgress
from vitscale.runner.todo import AddedRuns, existing_outcomes, outstanding, refuse_damaged, skip_unfit
from vitscale.schedulers import Submitter
from vitscale.schedulers.base import BatchJob, SchedulerError, SchedulerMissingError
from vitscale.store import RunIndex, write_record
from vitscale.store.results import Outcome
from vitscale.trial.trial import World


class Detached(VitscaleError):
    """Nobody watches any more; the jobs go on."""

    exit_code = 130


def submit_outstanding(
    plan: Plan, submitter: Submitter, results: Path, console: Console, unfit: Mapping[str, str], *, retry_failed: bool
) -> Report:
    """Submits all missing runs that have no live job, and waits for all. The caller holds the folder's lock.

    Raises:
        Detached: on Ctrl-C or a logout; the jobs go on.
        SchedulerError: a job is refused.
        StoreError: finished runs cannot be read; nothing is submitted.
    """
    context = plan.in_folder(results)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    try:
        settle(submitter, results, say)
        index = RunIndex(results)
        refuse_damaged(results, index)
        todo = outstanding(plan, index, retry_failed=retry_failed)
        outcomes = existing_outcomes(plan, index, todo)
        todo = skip_unfit(context, todo, unfit, index, outcomes)
        added = AddedRuns(plan, results, outcomes, todo)
        done = 0
        with StudyProgress(console) as progress:

            def on_outcome(task: RunTask, outcome: Outcome) -> None:
                nonlocal done
                done += 1
                outcomes[task.trial_id, task.repeat] = outcome
                progress.end(plan.record.trials[task.trial_id], outcome)

            progress.expect(len(todo), added.most())
            submit_and_watch(context, submitter, todo, say, on_outcome)
            for task in added:
                submit_and_watch(context, submitter, [task], say, on_outcome)
    except KeyboardInterrupt:
        raise _detached(batch_file.open_jobs(results)) from None
    return Report(done, outcomes)


def refuse_live_jobs(results: Path) -> None:
    """Refuses to go on while jobs are live: a driver that is no job must not write beside them.

    Raises:
        StoreError: there are live jobs.
    """
    if jobs := live_jobs(results):
        raise StoreError(
            f"jobs of Slurm are still at work on {shown(str(results))}: {', '.join(jobs[:8])}",
            next_step="Wait for them with --scheduler slurm, cancel them (scancel), or give another folder with -o",
        )


def script_for(context: RunContext, submitter: Submitter, tasks: Sequence[RunTask]) -> list[str]:
    """The scripts that would be submitted, with zeros for the digits in each job's name; nothing is written.

    Raises:
        RequestError: a value of the study cannot stand in a script.
    """
    jobs = new_jobs(context, submitter, tasks, {}, lambda: "0" * 8, _most_elements(submitter, None))
    return [submitter.script(asked_for(context, job)) for job in jobs]


def live_jobs(results: Path) -> list[str]:
    """Numbers of the jobs that may still write to `results`; all open ones where their batch system is silent."""
    live = []
    own = [job for job in batch_file.open_jobs(results) if not job.elsewhere(results)]
    for _, group in groupby(sorted(own, key=lambda job: job.scheduler), lambda job: job.scheduler):
        jobs = list(group)
        try:
            states = jobs[0].submitter().states([job.name for job in jobs])
        except SchedulerMissingError:
            continue  # a copy of the folder, away from its cluster
        except SchedulerError:
            live += jobs
        else:
            under_way = {state.name for state in states if not state.over}
            live += [job for job in jobs if job.name in under_way]
    return [job.job_id or job.name for job in live]


def settle(submitter: Submitter, results: Path, say: batch_file.Say) -> None:
    """Closes the jobs of earlier calls that have ended, and writes outcomes that they have not. Live jobs stay open.

    Raises:
        StoreError: a job's file cannot be read.
    """
    jobs = []
    for job in batch_file.open_jobs(results):
        if job.elsewhere(results):
            say(f"job {job.job_id or job.name} works on {job.results}, of which this is a copy, and is left to it")
            batch_file.close(results, job)
        else:
            jobs.append(job)
    states = batch_file.patiently(submitter, lambda: batch_file.look(submitter, results, jobs), say)
    for job in jobs:
        known = next((state for (name, _), state in states.items() if name == job.name), None)
        if job.job_id is None and known is not None:
            # The call that submitted the job ended before it could write down its number.
            job = job.model_copy(update={"job_id": known.array_id})
            job.write(results)
        if job.job_id is None:
            # Never submitted, or long gone. If it starts after all, it finds itself closed.
            batch_file.close(results, job)
        else:
            batch_file.settle_ended(submitter, results, job, states)


def submit_and_watch(
    context: RunContext,
    submitter: Submitter,
    tasks: Sequence[RunTask],
    say: batch_file.Say,
    on_outcome: Callable[[RunTask, Outcome], None],
) -> None:
    """Submits the runs that no live job holds, and returns when every task has its outcome.

    Args:
        context: what the study's runs share.
        submitter: batch system that takes the jobs.
        tasks: the outstanding runs.
        say: prints one line for the user.
        on_outcome: called once with each run's outcome, when it is first seen.

    Raises:
        SchedulerError: a job is refused; the others are submitted, and go on.
        RequestError: a value of the study cannot stand in a script.
    """
    results, wanted = context.results, set(tasks)
    jobs = []
    for job in batch_file.open_jobs(results):
        left = batch_file.waiting(results, job)
        if not left:
            batch_file.close(results, job)  # its last run has ended since `settle` looked
        elif wanted & left:
            jobs.append(job)
    held = {task for job in jobs for task in batch_file.waiting(results, job)}
    new = [task for task in tasks if task not in held]
    most_elements = _most_elements(submitter, say) if new else 1
    attempts = RunIndex(results).attempts
    coming = list(new_jobs(context, submitter, new, attempts, lambda: secrets.token_hex(4), most_elements))

    refused: dict[str, list[str]] = {}

    def submit_more() -> None:
        most = context.measure.parallel_runs
        while coming and (most is None or sum(_at_a_time(results, job) for job in (*jobs, coming[0])) <= most):
            job = coming.pop(0)
            try:
                jobs.append(submitted(context, submitter, job, say))
            except SchedulerMissingError:
                raise
            except SchedulerError as error:  # of this shape of world: another may be taken
                refused.setdefault(str(error), []).append(_shape(context, job))
        if refused and not coming:
            raise SchedulerError(" ".join(f"{', '.join(shapes)}: {said}" for said, shapes in refused.items()))

    try:
        for job in jobs:
            to_come = counted(len(batch_file.waiting(results, job)), "run")
            say(f"job {job.job_id} was submitted before: {to_come} to come")
        submit_more()
        _watch(submitter, results, jobs, wanted, say, on_outcome, submit_more)
    except SchedulerError as error:
        if jobs:
            raise type(error)(f"{error} {_go_on(jobs)}") from None
        raise


def _watch(
    submitter: Submitter,
    results: Path,
    jobs: list[batch_file.JobFile],
    wanted: set[RunTask],
    say: batch_file.Say,
    on_outcome: Callable[[RunTask, Outcome], None],
    submit_more: Callable[[], None],
) -> None:
    """Looks at all jobs together, ever less often. Jobs that have ended leave `jobs`, and more may be submitted."""
    told: dict[str, str] = {}
    seconds = batch_file.FIRST_LOOK_SECONDS
    while jobs:
        # States first: once a job is over, the outcomes read afterwards are all that will come.
        states = batch_file.patiently(submitter, lambda: batch_file.look(submitter, results, jobs), say)
        for job in list(jobs):
            closed = batch_file.settle_ended(submitter, results, job, states).closed
            for task, state in batch_file.run_states(results, job).items():
                if state.outcome is not None and task in wanted:
                    wanted.discard(task)
                    on_outcome(task, state.outcome)
            if closed:
                jobs.remove(job)
            elif (line := batch_file.line_of(submitter, job, states)) != told.get(job.name):
                told[job.name] = line
                say(line)
        submit_more()
        if jobs:
            time.sleep(seconds)
            seconds = min(batch_file.LATEST_LOOK_SECONDS, batch_file.LOOK_GROWTH * seconds)


def _at_a_time(results: Path, job: batch_file.JobFile) -> int:
    """How many of the job's runs may run at the same time from now on."""
    left = len(batch_file.waiting(results, job))
    return min(left, (job.measure.parallel_runs or left) if job.array else 1)


def _most_elements(submitter: Submitter, say: batch_file.Say | None) -> int:
    """How many elements one array may have; what is usual where that is refused, or nobody waits for it (no `say`)."""
    if not submitter.arrays:
        return 1
    try:
        return batch_file.patiently(submitter, submitter.most_elements, say) if say else submitter.most_elements()
    except SchedulerError:
        return Submitter.most_elements(submitter)


def new_jobs(
    context: RunContext,
    submitter: Submitter,
    tasks: Iterable[RunTask],
    attempts: Mapping[tuple[str, int], int],
    digits: Callable[[], str],
    most_elements: int,
) -> Iterator[batch_file.JobFile]:
    """One job, or one array, for each shape of world; tasks keep their order."""
    groups: dict[tuple[World, bool], list[batch_file.BatchTask]] = {}
    for task in tasks:
        attempt = attempts.get((task.trial_id, task.repeat), -1) + 1
        shape = (context.record.trials[task.trial_id].world, _on_gpus(context, task.trial_id))
        groups.setdefault(shape, []).append(
            batch_file.BatchTask(trial_id=task.trial_id, repeat=task.repeat, attempt=attempt)
        )
    array = submitter.arrays
    for (world, _), group in groups.items():
        most = most_elements if array else len(group)
        for first in range(0, len(group), most):
            yield batch_file.JobFile(
                name=f"vitscale-{world.nodes}x{world.ranks_per_node}-{digits()}",
                array=array,
                tasks=tuple(group[first : first + most]),
                study_folder=str(context.folder),
                launch=context.launch,
                slurm=context.slurm,
                measure=context.measure,
                scheduler=submitter.name,
                results=str(context.results),
            )


def _on_gpus(context: RunContext, trial_id: str) -> bool:
    return context.record.trials[trial_id].train.device == "cuda"


def asked_for(context: RunContext, job: batch_file.JobFile) -> BatchJob:
    """What the job's script asks for."""
    trial_id = job.tasks[0].trial_id
    return BatchJob(
        name=job.name,
        world=context.record.trials[trial_id].world,
        on_gpus=_on_gpus(context, trial_id),
        results=context.results,
        cwd=Path.cwd(),
        elements=len(job.tasks) if job.array else None,
        at_a_time=context.measure.parallel_runs,
    )


def submitted(
    context: RunContext, submitter: Submitter, job: batch_file.JobFile, say: batch_file.Say
) -> batch_file.JobFile:
    """Submits a job; its file is written before, and its number after, so that a crash between never makes two jobs.

    Raises:
        SchedulerError: the job is refused, and nothing of it is kept.
        RequestError: a value of the study cannot stand in a script.
    """
    text = submitter.script(asked_for(context, job))
    job.write(context.results)
    script = context.results / "jobs" / f"{job.name}.sh"
    write_record(script, text)

    def job_id() -> str:
        # An earlier answer may have been lost: the job may already exist.
        known = [state.array_id for state in submitter.states([job.name])]
        return known[0] if known else submitter.submit(script)

    try:
        job = job.model_copy(update={"job_id": batch_file.patiently(submitter, job_id, say)})
    except SchedulerError:
        for path in (script, script.with_suffix(".json")):
            path.unlink()
        raise
    job.write(context.results)
    what = "array" if job.array else "job"
    runs = counted(len(job.tasks), "run")
    say(f"{what} {job.job_id} submitted: {runs} on {_shape(context, job)}")
    return job


def _shape(context: RunContext, job: batch_file.JobFile) -> str:
    """The world of a job's runs in words: "2 x 4 ranks"."""
    world = context.record.trials[job.tasks[0].trial_id].world
    return f"{world.nodes} x {world.ranks_per_node} ranks"


def _detached(jobs: Sequence[batch_file.JobFile]) -> Detached:
    if not jobs:
        return Detached("interrupted: nothing was submitted.")
    told = [_go_on(jobs)] if any(job.job_id is not None for job in jobs) else []
    if asked := [job.name for job in jobs if job.job_id is None]:
        told.append(
            f"Whether {', '.join(asked)} was submitted too is not known: squeue --name={','.join(asked)} shows it, and "
            "the same command again finds it"
        )
    return Detached(f"no longer watching. {' '.join(told)}")


def _go_on(jobs: Sequence[batch_file.JobFile]) -> str:
    numbers = " ".join(job.job_id for job in jobs if job.job_id is not None)
    return (
        f"Submitted jobs go on ({numbers}). The same command again watches them, and does what is missing then. "
        f"To cancel them: scancel {numbers}"
    )
