"""A study on a login node: what is missing is submitted as jobs, and their outcomes are watched for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from vitscale.errors import StoreError, explain, shown
from vitscale.runner.added_runs import AddedRuns
from vitscale.runner.batch_jobs import Batch, live_jobs, settle, submit_and_watch
from vitscale.runner.one_run import Task
from vitscale.runner.planning import Plan, Report, existing_outcomes, outstanding
from vitscale.runner.progress import StudyProgress
from vitscale.runner.skipping import skip_unfit
from vitscale.store import RunIndex
from vitscale.store.results import Outcome


def batch_of(plan: Plan, results: Path) -> Batch:
    """What all jobs of a study share."""
    return Batch(
        results=results,
        study_folder=plan.folder,
        trials=plan.record.trials,
        launch=plan.launch,
        slurm=plan.slurm,
        measure=plan.measure,
    )


def submit_outstanding(
    plan: Plan, results: Path, console: Console, unfit: Mapping[str, str], *, retry_failed: bool
) -> Report:
    """Submits what is missing and has no live job, and waits for all of it. The caller holds the folder's lock.

    Raises:
        Detached: on Ctrl-C or a logout; the jobs go on.
        SlurmError: Slurm refuses a job.
    """
    batch = batch_of(plan, results)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    settle(batch, say)
    index = RunIndex(results)
    todo = outstanding(plan, index, retry_failed=retry_failed)
    outcomes = existing_outcomes(plan, index, todo)
    todo = skip_unfit(plan.setting(results), todo, unfit, index, outcomes)
    added = AddedRuns(plan, results, outcomes, todo)
    done = 0
    with StudyProgress(console) as progress:

        def on_outcome(task: Task, outcome: Outcome) -> None:
            nonlocal done
            done += 1
            outcomes[task.trial_id, task.repeat] = outcome
            progress.end(plan.record.trials[task.trial_id], outcome)

        progress.expect(len(todo), added.most())
        submit_and_watch(batch, todo, say, on_outcome)
        for task in added:
            submit_and_watch(batch, [task], say, on_outcome)
    return Report(done, outcomes)


def refuse_live_jobs(results: Path) -> None:
    """A driver that is no job must not write beside jobs that still run.

    Raises:
        StoreError: there are some.
    """
    if jobs := live_jobs(results):
        raise StoreError(
            explain(
                f"jobs of Slurm are still at work on {shown(str(results))}: {', '.join(jobs[:8])}",
                next_step="Wait for them with --scheduler slurm, cancel them (scancel), or give another folder with -o",
            )
        )
