"""`python -m vitscale.runner.job RESULTS NAME`: the driver inside a batch job, which does the runs of its job file.

The batch system sends it SIGTERM before the time limit and when the job is cancelled; Flux sends SIGHUP, and LSF SIGINT
first. Then the run under way is ended in order, and every run that the job leaves undone gets an outcome with the
reason.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from vitscale.errors import RequestError, StoreError, VitscaleError
from vitscale.runner import batch_file
from vitscale.runner.driver import signals_interrupt
from vitscale.runner.one_run import RunContext, attempt_number, run_task, skip_if_out_of_memory
from vitscale.runner.progress import StudyProgress
from vitscale.schedulers import Cause, Placement, Submitter
from vitscale.store import RunIndex, read_study, refuse_links
from vitscale.store.reading import RunKey
from vitscale.store.results import Outcome


def main(arguments: Sequence[str]) -> int:
    """Do the job's runs and return the exit code."""
    if len(arguments) != 2:
        sys.exit("usage: python -m vitscale.runner.job RESULTS NAME")
    results, name = arguments
    try:
        # Later ones are ignored while the job is being ended.
        with signals_interrupt(signal.SIGTERM, signal.SIGHUP, signal.SIGINT, once=True):
            return _do_job(Path(results).absolute(), name)
    except KeyboardInterrupt:
        return 1
    except VitscaleError as error:
        print(f"vitscale: {error}", flush=True)
        return error.exit_code


def _do_job(results: Path, name: str) -> int:
    """Do the runs of the job, or of the element of its array, around this process; returns the exit code.

    Raises:
        KeyboardInterrupt: the job is being ended; every run has its outcome.
        RequestError: this process runs in no job of the batch system.
        StoreError: there is no study or no such job, or another process does its runs.
    """
    refuse_links(results)
    job = batch_file.read_job(results, name)
    study = read_study(results)
    if study is None:
        raise StoreError(f"{results} holds no study.json")
    submitter = job.submitter()
    own_job = submitter.own_job()
    if own_job is None or (job.array and own_job.element is None):
        raise RequestError(f"this is no job of {submitter.title}; `vitscale run` submits one for {name}")
    element = own_job.element if job.array else None
    tasks = [task for task in job.tasks_of_element(element) if task.trial_id in study.trials]
    context = job.context(study, results)
    with batch_file.driver_lock(results, name, element, patience_seconds=0.0) as lock:
        if lock is None:
            # Slurm may start a job again while a node that Slurm has lost still runs it.
            raise StoreError("another process does the runs of this job", next_step="Wait for it, or end it")
        # Runs that have begun without an outcome are left from an earlier process of this job, which is gone.
        begun = [task for task in tasks if batch_file.run_state(results, task, job.measure.retries).has_begun]
        cause = Cause("failed", f"{submitter.title} began job {own_job.job_id} anew")
        batch_file.write_missing_outcomes(context, begun, cause)
        try:
            return _do_runs(context, submitter, own_job.placement, job, tasks)
        except KeyboardInterrupt:
            cause = submitter.cause(own_job.job_id, [own_job.nodes])
            print(f"vitscale: {cause.reason}", flush=True)
            batch_file.write_missing_outcomes(context, tasks, cause)
            raise


def _do_runs(
    context: RunContext,
    submitter: Submitter,
    placement: Placement,
    job: batch_file.JobFile,
    tasks: Sequence[batch_file.BatchTask],
) -> int:
    """Do one run after the other, and return the job's exit code.

    Args:
        context: values that the study's runs share.
        submitter: the batch system.
        placement: the hosts of this job.
        job: the job, whose file may be closed meanwhile.
        tasks: the runs of this job that the study still has.

    Returns:
        0 where all are done, or where the job was given up; 1 where the remaining ones cannot be done.
    """

    def find_lost_cause() -> Cause | None:
        return batch_file.wait_for_answer(submitter, placement.lost, _say)

    first_attempts = _first_attempts(context.results)
    with StudyProgress(Console(width=120, emoji=False)) as progress:
        progress.expect(len(tasks), 0)
        for task in tasks:
            if batch_file.read_job(context.results, job.name).closed:
                _say("vitscale: this job was given up, and its runs are done elsewhere")
                return 0
            # No step can start while the batch system is silent: the runs wait for it.
            batch_file.wait_for_answer(submitter, lambda: submitter.states([job.name]), _say)
            lost_cause = find_lost_cause()
            if lost_cause is not None:
                _say(f"vitscale: {lost_cause.reason}")
                batch_file.write_missing_outcomes(context, tasks, lost_cause)
                return 1
            if batch_file.run_state(context.results, task, job.measure.retries).outcome is not None:
                continue
            outcome = _run_or_skip(context, placement, task, first_attempts, progress, find_lost_cause)
            if outcome is None:  # it could not be started, and has its outcome
                continue
            progress.end(context.record.trials[task.trial_id], outcome)
            if outcome.external:
                batch_file.write_missing_outcomes(context, tasks, Cause(outcome.kind, outcome.reason))
                return 1
    return 0


def _run_or_skip(
    context: RunContext,
    placement: Placement,
    task: batch_file.BatchTask,
    first_attempts: Mapping[RunKey, int],
    progress: StudyProgress,
    find_lost_cause: Callable[[], Cause | None],
) -> Outcome | None:
    """Do one run, unless its trial has run out of memory in another repeat.

    Args:
        context: values that the study's runs share.
        placement: the hosts of this job.
        task: the run.
        first_attempts: of each run in an open job, the number of its first attempt there.
        progress: the display.
        find_lost_cause: returns why the hosts take no more runs; None while they do.

    Returns:
        The outcome of the run, or of skipping it; None where it cannot be started here, which is printed and written
        down as its outcome.
    """
    outcomes = _standing_outcomes(context.results, first_attempts)
    skip_outcome = skip_if_out_of_memory(context, task.run, task.attempt, outcomes)
    if skip_outcome is not None:
        return skip_outcome
    on_progress = progress.begin(context.record.trials[task.trial_id], task.repeat)
    no_prepared_processes = None  # a job's ranks are started anew, by the batch system
    try:
        return run_task(context, placement, task.run, task.attempt, on_progress, no_prepared_processes, find_lost_cause)
    except VitscaleError as error:
        # The login node could not know that it cannot be started here: a failure like any other.
        batch_file.write_missing_outcomes(context, [task], Cause("failed", str(error)))
        _say(f"vitscale: {error}")
        return None


def _say(text: str) -> None:
    """Print a line to the job's output at once."""
    print(text, flush=True)


def _first_attempts(results: Path) -> dict[RunKey, int]:
    """Return the number of the first attempt in the open jobs, for each of their runs."""
    attempts: dict[RunKey, int] = {}
    for job in batch_file.open_jobs(results):
        attempts |= {task.run: task.attempt for task in job.tasks}
    return attempts


def _standing_outcomes(results: Path, first_attempts: Mapping[RunKey, int]) -> dict[RunKey, Outcome]:
    """Return the outcomes of finished runs, without those from before an open job that does the run again.

    An outcome from before a job must not decide on the job's other runs: all begin beside the old outcomes.
    """
    outcomes = {}
    for run, attempt in RunIndex(results).finished.items():
        if attempt_number(attempt.folder) >= first_attempts.get(run, 0):
            outcomes[run] = attempt.outcome
    return outcomes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
