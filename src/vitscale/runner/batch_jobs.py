"""Batch jobs from a login node: submitted, watched to their end, found again after a logout; each run is done once."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from vitscale.errors import VitscaleError
from vitscale.runner.batch_file import JobFile, open_jobs, run_states, waiting
from vitscale.runner.batch_submitting import Batch, asked_for, new_jobs, submitted
from vitscale.runner.batch_watching import (
    FIRST_LOOK_SECONDS,
    LATEST_LOOK_SECONDS,
    LOOK_GROWTH,
    Say,
    close,
    line_of,
    look,
    patiently,
    settle_ended,
)
from vitscale.runner.one_run import Task
from vitscale.schedulers.slurm_commands import SlurmError, SlurmMissingError, job_states
from vitscale.schedulers.slurm_script import batch_script
from vitscale.store import RunIndex
from vitscale.store.results import Outcome


class Detached(VitscaleError):
    """Nobody watches any more; the jobs go on."""

    exit_code = 130


def script_for(batch: Batch, tasks: Sequence[Task]) -> list[str]:
    """The scripts that would be submitted, with zeros where each job has digits of its own; nothing is written.

    Raises:
        RequestError: a value of [slurm] cannot stand in a script.
    """
    jobs = new_jobs(batch, tasks, {}, digits=lambda: "0" * 8)
    return [batch_script(batch.slurm, asked_for(batch, job)) for job in jobs]


def live_jobs(results: Path) -> list[str]:
    """Numbers of the jobs that may still write to `results`; all that are open where slurmctld does not answer."""
    jobs = open_jobs(results)
    try:
        under_way = {state.name for state in job_states([job.name for job in jobs]) if not state.over}
    except SlurmMissingError:
        return []  # a copy of the folder, away from its cluster
    except SlurmError:
        under_way = {job.name for job in jobs}
    return [job.job_id or job.name for job in jobs if job.name in under_way]


def settle(batch: Batch, say: Say) -> None:
    """Closes the jobs of earlier calls that have ended, and writes the outcomes that they left out. Live jobs stay.

    Raises:
        Detached: on Ctrl-C.
        StoreError: a job's file cannot be read.
    """
    jobs = open_jobs(batch.results)
    try:
        states = patiently(lambda: look(batch.results, jobs), say)
    except KeyboardInterrupt:
        raise _detached(jobs) from None
    for job in jobs:
        known = next((state for (name, _), state in states.items() if name == job.name), None)
        if job.job_id is None and known is not None:
            # The call that submitted it ended before it could write the number down.
            job = job.model_copy(update={"job_id": known.array_id})
            job.write(batch.results)
        if job.job_id is None:
            # Never submitted, or long gone; should it start after all, it finds that it is closed.
            close(batch.results, job)
        else:
            settle_ended(batch.results, job, states)


def submit_and_watch(
    batch: Batch, tasks: Sequence[Task], say: Say, on_outcome: Callable[[Task, Outcome], None]
) -> None:
    """Submits what no live job holds, and returns when every task has its outcome.

    Args:
        batch: of the study.
        tasks: the outstanding runs.
        say: prints one line for the user.
        on_outcome: is told each run's outcome once, as it is seen.

    Raises:
        Detached: on Ctrl-C or a closed terminal; the jobs go on.
        SlurmError: Slurm refuses a job; those submitted before go on.
        RequestError: a value of [slurm] cannot stand in a script.
    """
    wanted = set(tasks)
    jobs = []
    for job in open_jobs(batch.results):
        left = waiting(batch.results, job)
        if not left:
            close(batch.results, job)  # its last run has ended since `settle` looked
        elif wanted & left:
            jobs.append(job)
    held = {task for job in jobs for task in waiting(batch.results, job)}
    new = [task for task in tasks if task not in held]
    try:
        for job in jobs:
            say(f"job {job.job_id} was submitted before: {len(waiting(batch.results, job))} run(s) to come")
        for job in list(new_jobs(batch, new, RunIndex(batch.results).attempts, lambda: secrets.token_hex(4))):
            jobs.append(submitted(batch, job, say))
        _watch(batch.results, jobs, wanted, say, on_outcome)
    except KeyboardInterrupt:
        raise _detached(jobs) from None
    except SlurmError as error:
        if jobs:
            raise type(error)(f"{error} {_go_on(jobs)}") from None
        raise


def _watch(
    results: Path, jobs: list[JobFile], wanted: set[Task], say: Say, on_outcome: Callable[[Task, Outcome], None]
) -> None:
    """Looks at all jobs at once, ever less often; what has come to its end leaves `jobs`."""
    told: dict[str, str] = {}
    seconds = FIRST_LOOK_SECONDS
    while jobs:
        # States first: outcomes read after a job was seen to be over are all that will come.
        states = patiently(lambda: look(results, jobs), say)
        for job in list(jobs):
            closed = settle_ended(results, job, states).closed
            for task, state in run_states(results, job).items():
                if state.outcome is not None and task in wanted:
                    wanted.discard(task)
                    on_outcome(task, state.outcome)
            if closed:
                jobs.remove(job)
            elif (line := line_of(job, states)) != told.get(job.name):
                told[job.name] = line
                say(line)
        if jobs:
            time.sleep(seconds)
            seconds = min(LATEST_LOOK_SECONDS, LOOK_GROWTH * seconds)


def _detached(jobs: Sequence[JobFile]) -> Detached:
    return Detached(f"no longer watching. {_go_on(jobs)}" if jobs else "interrupted: nothing was submitted.")


def _go_on(jobs: Sequence[JobFile]) -> str:
    numbers = " ".join(job.job_id for job in jobs if job.job_id is not None)
    return (
        f"Submitted jobs go on ({numbers}). The same command again watches them, and does what is missing then. "
        f"To cancel them: scancel {numbers}"
    )


__all__ = ["Batch", "Detached", "live_jobs", "script_for", "settle", "submit_and_watch"]
