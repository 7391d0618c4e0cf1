"""`python -m vitscale.runner.job RESULTS NAME`: the driver inside a batch job, which does the runs of its job file.

The batch system sends it SIGTERM before the time limit and when the job is cancelled. Then the run under way is ended
in order, and every run that the job leaves undone gets an outcome with the reason.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from vitscale.errors import RequestError, StoreError, VitscaleError
from vitscale.runner import batch_file
from vitscale.runner.driver import signals_interrupt
from vitscale.runner.one_run import RunContext, run_task, skip_reason
from vitscale.runner.progress import StudyProgress
from vitscale.schedulers import Cause, Placement, Submitter
from vitscale.store import RunIndex, read_study, refuse_links


def main(arguments: Sequence[str]) -> int:
    """Does the job's runs; returns the exit code."""
    match arguments:
        case [results, name]:
            pass
        case _:
            sys.exit("usage: python -m vitscale.runner.job RESULTS NAME")
    try:
        with signals_interrupt(signal.SIGTERM, once=True):  # later ones are ignored while the job is being ended
            return _work(Path(results).absolute(), name)
    except KeyboardInterrupt:
        return 1
    except VitscaleError as error:
        print(f"vitscale: {error}", flush=True)
        return error.exit_code


def _work(results: Path, name: str) -> int:
    refuse_links(results)
    job = batch_file.read_job(results, name)
    study = read_study(results)
    if study is None:
        raise StoreError(f"{results} holds no study.json")
    submitter = job.submitter()
    own = submitter.own_job()
    if own is None or (job.array and own.element is None):
        raise RequestError(f"this is no job of {submitter.title}; `vitscale run` submits one for {name}")
    element = own.element if job.array else None
    mine = [task for task in job.tasks_of(element) if task.trial_id in study.trials]
    context = job.context(study, results)
    with batch_file.drivers_lock(results, name, element, patience_seconds=0.0) as lock:
        if lock is None:
            # Slurm may start a job again while a node that Slurm has lost still runs it.
            raise StoreError("another process does the runs of this job", next_step="Wait for it, or end it")
        begun = [task for task in mine if batch_file.run_state(results, task, job.measure.retries).folder.exists()]
        cause = Cause("failed", f"{submitter.title} began job {own.job_id} anew")
        batch_file.write_missing_outcomes(context, begun, cause)
        try:
            return _do(context, submitter, own.placement, job, mine)
        except KeyboardInterrupt:
            cause = submitter.cause(own.job_id, [own.nodes])
            print(f"vitscale: {cause.reason}", flush=True)
            batch_file.write_missing_outcomes(context, mine, cause)
            raise


def _do(
    context: RunContext,
    submitter: Submitter,
    placement: Placement,
    job: batch_file.JobFile,
    tasks: Sequence[batch_file.BatchTask],
) -> int:
    """Does one run after the other; returns exit code 1 where the rest cannot be done."""

    def say(text: str) -> None:
        print(text, flush=True)

    def lost() -> Cause | None:
        return batch_file.patiently(submitter, placement.lost, say)

    # What jobs do again must not decide on their other runs: all begin beside the old outcomes.
    jobs = batch_file.open_jobs(context.results)
    again = {(task.trial_id, task.repeat): task.attempt for each in jobs for task in each.tasks}
    with StudyProgress(Console(width=120, emoji=False)) as progress:
        progress.expect(len(tasks), 0)
        for task in tasks:
            if batch_file.read_job(context.results, job.name).closed:
                print("vitscale: this job was given up, and its runs are done elsewhere", flush=True)
                return 0
            # No step can start while the batch system is silent: the runs wait for it.
            batch_file.patiently(submitter, lambda: submitter.states([job.name]), say)
            if (cause := lost()) is not None:
                say(f"vitscale: {cause.reason}")
                batch_file.write_missing_outcomes(context, tasks, cause)
                return 1
            trial = context.record.trials[task.trial_id]
            if batch_file.run_state(context.results, task, job.measure.retries).outcome is not None:
                continue
            standing = {
                key: earlier
                for key, (name, earlier) in RunIndex(context.results).finished.items()
                if int(name.rpartition("-a")[2]) >= again.get(key, 0)
            }
            outcome = skip_reason(context, task.task, task.attempt, standing)
            if outcome is None:
                on_progress = progress.begin(trial, task.repeat)
                try:
                    outcome = run_task(context, placement, task.task, task.attempt, on_progress, None, lost)
                except VitscaleError as error:
                    # The run cannot be started here, which the login node could not know: a failure like any other.
                    batch_file.write_missing_outcomes(context, [task], Cause("failed", str(error)))
                    print(f"vitscale: {error}", flush=True)
                    continue
            progress.end(trial, outcome)
            if outcome.external:
                batch_file.write_missing_outcomes(context, tasks, Cause(outcome.kind, outcome.reason))
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
