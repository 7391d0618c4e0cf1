"""`python -m vitscale.runner.job RESULTS NAME`: the driver inside a batch job, which does the runs of its job file.

Slurm asks it to end by SIGTERM, before the time limit and when the job is cancelled: the run under way is then ended in
order, and every run that the job leaves undone gets an outcome with the reason.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console

from vitscale.errors import StoreError, VitscaleError, explain
from vitscale.runner.batch_file import BatchTask, JobFile, drivers_lock, read_job, run_state
from vitscale.runner.batch_settling import write_missing_outcomes
from vitscale.runner.batch_watching import patiently
from vitscale.runner.one_run import Setting, run_task, skip_reason
from vitscale.runner.progress import StudyProgress
from vitscale.schedulers.slurm import SlurmAllocation
from vitscale.schedulers.slurm_causes import Cause, cause_of
from vitscale.schedulers.slurm_commands import job_states
from vitscale.store import RunIndex, read_study
from vitscale.store.results import Outcome


def main(arguments: Sequence[str]) -> int:
    """Does the job's runs; returns the exit code."""
    match arguments:
        case [results, name]:
            pass
        case _:
            sys.exit("usage: python -m vitscale.runner.job RESULTS NAME")
    try:
        with _terminable():
            return _work(Path(results).absolute(), name)
    except KeyboardInterrupt:
        return 1
    except VitscaleError as error:
        print(f"vitscale: {error}", flush=True)
        return error.exit_code


def _work(results: Path, name: str) -> int:
    job = read_job(results, name)
    study = read_study(results)
    if study is None:
        raise StoreError(f"{results} holds no study.json")
    element = int(os.environ["SLURM_ARRAY_TASK_ID"]) if job.array else None
    mine = [task for task in job.tasks_of(element) if task.trial_id in study.trials]
    folder = Path(job.study_folder)
    setting = Setting(study, job.measure, job.launch, folder, results, SlurmAllocation(job.slurm, None))
    with drivers_lock(results, name, element, patience_seconds=0.0) as lock:
        if lock is None:
            # Slurm may start a job again while a node that it has lost still runs it.
            raise StoreError(explain("another process does the runs of this job", next_step="Wait for it, or end it"))
        begun = [task for task in mine if run_state(results, task, job.measure.retries).folder.exists()]
        _give_up(setting, begun, Cause("failed", f"Slurm began job {job_id()} anew"))
        try:
            return _do(setting, job, mine)
        except KeyboardInterrupt:
            cause = cause_of(job_id(), [os.environ["SLURM_JOB_NODELIST"]])
            print(f"vitscale: {cause.reason}", flush=True)
            _give_up(setting, mine, cause)
            raise


def _do(setting: Setting, job: JobFile, tasks: Sequence[BatchTask]) -> int:
    """One run after the other; an exit code of 1 where the rest cannot be done."""
    with StudyProgress(Console(width=120)) as progress:
        progress.expect(len(tasks), 0)
        for task in tasks:
            if read_job(setting.results, job.name).closed:
                print("vitscale: this job was given up, and its runs are done elsewhere", flush=True)
                return 0
            # Without slurmctld no step could start: the runs wait for it.
            patiently(lambda: job_states([job.name]), lambda text: print(text, flush=True))
            trial = setting.record.trials[task.trial_id]
            if run_state(setting.results, task, job.measure.retries).outcome is not None:
                continue
            outcome = skip_reason(setting, task.task, task.attempt, _outcomes_of(setting.results, task.trial_id))
            if outcome is None:
                on_progress = progress.begin(trial, task.repeat)
                try:
                    outcome = run_task(setting, task.task, task.attempt, on_progress)
                except VitscaleError as error:
                    # Not startable here, which the login node could not know: as good as any other failure.
                    _give_up(setting, [task], Cause("failed", str(error)))
                    print(f"vitscale: {error}", flush=True)
                    continue
            progress.end(trial, outcome)
            if outcome.external:
                _give_up(setting, tasks, Cause("failed", outcome.reason))
                return 1
    return 0


def _give_up(setting: Setting, tasks: Sequence[BatchTask], cause: Cause) -> None:
    write_missing_outcomes(setting.results, setting.record, setting.measure.retries, tasks, cause)


def _outcomes_of(results: Path, trial_id: str) -> dict[tuple[str, int], Outcome]:
    return {key: outcome for key, (_, outcome) in RunIndex(results).finished.items() if key[0] == trial_id}


def job_id() -> str:
    """This job's number as users name it: 12, or 12_3 for element 3 of array 12."""
    array, element = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{element}" if array and element else os.environ.get("SLURM_JOB_ID", "unknown")


@contextmanager
def _terminable() -> Iterator[None]:
    """The first SIGTERM interrupts; those that follow leave the ending to its work."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
