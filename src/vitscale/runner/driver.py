"""The driver: does the missing runs, one after the other or side by side, each with exactly one outcome."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType

from rich.console import Console

from vitscale import sources
from vitscale.base.parquet import end_decoding
from vitscale.errors import RequestError, StoreError, VitscaleError, shown
from vitscale.launchers import LOCAL
from vitscale.runner.among_ranks import refuse_among_ranks
from vitscale.runner.batch_file import wait_for_answer
from vitscale.runner.one_run import next_attempt, refuse_elsewhere, run_task, skip_if_out_of_memory
from vitscale.runner.planning import Plan, Report, check_folder
from vitscale.runner.progress import StudyProgress, decoding_progress
from vitscale.runner.todo import (
    AddedRuns,
    GpuHours,
    Lineup,
    NextRun,
    existing_outcomes,
    outstanding_runs,
    refuse_damaged,
    skip_unfit,
)
from vitscale.schedulers import Cause, Placement, Submitter
from vitscale.schedulers.prepared import PreparedProcesses
from vitscale.store import DISK_FULL_ERRORS, RunIndex, free_reserves, locked, pack_finished, read_study, write_study
from vitscale.store.packs import PACK_RUNS, finish_removing
from vitscale.store.reading import RunKey
from vitscale.store.results import Outcome, StudyRecord
from vitscale.trial.trial import Trial


@dataclass(frozen=True)
class RunOptions:
    """Options of `vitscale run` that are not in the study."""

    retry_failed: bool = False
    allow_version_change: bool = False
    unfit: Mapping[str, str] = field(default_factory=dict)
    """Trials to skip because they will not fit in memory -> why not."""


class DiskFullError(VitscaleError):
    """No disk space for the next run: what is written is whole, and the study can go on when there is space."""

    exit_code = 1


class AllocationOverError(VitscaleError):
    """The hosts are not ours any more: what is written is whole, and the study can go on in another allocation."""

    exit_code = 1


class Interrupted(VitscaleError):
    """Ctrl-C or SIGTERM: all ranks are ended, and runs that were under way do not count."""

    exit_code = 130


def run(plan: Plan, results: Path, options: RunOptions, console: Console) -> Report:
    """Do a study's missing runs, or submit them and wait, and report on all of the study's runs.

    Raises:
        RequestError: the data is damaged, what ranks need is not installed, or this process is a rank itself; nothing
            was started or written.
        StoreError: the folder cannot be used; nothing was started or overwritten.
        Interrupted: on Ctrl-C; no process is left.
        DiskFullError: the disk filled up.
        AllocationOverError: the allocation of a batch system around this process has ended.
    """
    has_other_hosts = plan.scheduler.default_launcher != LOCAL
    if has_other_hosts:
        refuse_among_ranks(os.environ)
    refuse_elsewhere(plan.scheduler, {trial.train.engine for trial in plan.record.trials.values()})
    check_folder(results, plan.record, allow_version_change=options.allow_version_change)
    results = results.absolute()
    new_folders = [folder for folder in (results, *results.parents) if not folder.exists()]
    try:
        results.mkdir(parents=True, exist_ok=True)
        # SIGTERM and a closed terminal end the study as Ctrl-C does: in order, with no process left.
        with locked(results) as lock, signals_interrupt(signal.SIGTERM, signal.SIGHUP):
            _refuse_deleted_lock(results, lock)
            # Check again under the lock: another driver may just have begun here.
            check_folder(results, plan.record, allow_version_change=options.allow_version_change)
            _decode_data(plan, results, new_folders, console)
            _write_study(results, plan)
            return _run_or_submit(plan, results, options, console, lock)
    except OSError as error:
        raise _write_error(results, error) from error
    except KeyboardInterrupt:
        raise Interrupted(
            "interrupted: all ranks are ended, and no finished run is lost. Run the same command again to go on."
        ) from None


def _run_or_submit(plan: Plan, results: Path, options: RunOptions, console: Console, lock: int) -> Report:
    """Do the missing runs here, or submit them to a batch system. Args: lock: descriptor of the folder's lock."""
    match plan.scheduler:
        case Submitter() as submitter:
            from vitscale.runner.batch_jobs import submit_outstanding

            return submit_outstanding(
                plan, submitter, results, console, options.unfit, retry_failed=options.retry_failed
            )
        case Placement() as placement:
            if (results / "jobs").is_dir():
                from vitscale.runner.batch_jobs import refuse_live_jobs

                refuse_live_jobs(results)
            return _run_outstanding(plan, placement, results, options, console, lock)


def _write_error(results: Path, error: OSError) -> DiskFullError | StoreError:
    """Return the error for a results folder where something could not be written."""
    if error.errno in DISK_FULL_ERRORS:
        return DiskFullError(
            f"the disk of {shown(str(results))} is full",
            next_step="What is written is whole; free space, or delete files where it takes no more of them, and "
            "run the same command again",
        )
    return StoreError(
        f"results folder {shown(str(results))} cannot be written: {error.strerror or error}",
        next_step="Give a folder you may write to with -o",
    )


def _write_study(results: Path, plan: Plan) -> None:
    """Record the study in the folder.

    A study with fewer repeats than the recorded one leaves the record as it is, where nothing else of it has changed
    and all recorded repeats are done: the runs that were measured stay runs of the study.
    """
    recorded = read_study(results)
    planned = plan.record
    if recorded is not None and recorded.repeats > planned.repeats and _has_all_runs(recorded, results):
        # The text and the command line say how many repeats, so that they differ too.
        allowed_differences = {name: getattr(recorded, name) for name in ("repeats", "text", "overrides", "vitscale")}
        if planned.model_copy(update=allowed_differences) == recorded:
            write_study(results, recorded)
            return
    write_study(results, planned)


def _has_all_runs(study: StudyRecord, results: Path) -> bool:
    """Whether every repeat of every trial has its outcome."""
    finished = RunIndex(results).finished
    for trial_id in study.trials:
        if any(RunKey(trial_id, repeat) not in finished for repeat in range(study.repeats)):
            return False
    return True


def _decode_data(plan: Plan, results: Path, new_folders: Sequence[Path], console: Console) -> None:
    """Decode the images once, so that damage shows before anything starts and no run's time includes decoding.

    Where images are damaged, everything that was made for the results is removed again.

    Args:
        plan: the study.
        results: folder of the results, which has only the lock in it where it is new.
        new_folders: the folders that were made for the results, innermost first; empty where `results` existed.
        console: for progress.

    Raises:
        RequestError: images are damaged.
    """
    trials = [trial for trial in plan.record.trials.values() if trial.train.script is None]
    # All images are decoded, whatever share of them a trial trains on: trials that differ in it alone share a dataset.
    datasets = {trial.data.model_copy(update={"fraction": 1.0}) for trial in trials}
    try:
        with decoding_progress(console) as progress:
            for data in datasets:
                sources.prepare(data, progress)
    except RequestError:
        if new_folders:
            _remove_new_folders(results, new_folders)
        raise


def _remove_new_folders(results: Path, new_folders: Sequence[Path]) -> None:
    """Remove the folders that were made for the results, innermost first, and the lock in the innermost one."""
    (results / "lock").unlink()
    for folder in new_folders:
        folder.rmdir()


def _refuse_deleted_lock(results: Path, lock: int) -> None:
    """Refuse to begin another run where somebody has removed the lock: another driver may hold a new one.

    Args:
        results: folder of the results.
        lock: descriptor of the lock that this driver holds.

    Raises:
        StoreError: the lock in the folder is another file, or there is none, or no folder.
    """
    try:
        is_our_lock = os.path.samestat(os.fstat(lock), (results / "lock").stat())
    except FileNotFoundError:
        is_our_lock = False
    if is_our_lock:
        return
    if not results.exists():
        raise StoreError(
            f"results folder {shown(str(results))} is gone: it was moved or deleted during the study",
            next_step="Put it back where it was, and run the same command again",
        )
    raise StoreError(
        f"the file 'lock' of {shown(str(results))} was deleted: another `vitscale run` may be writing there now",
        next_step="Leave that file alone, and run the same command again once no other writes there",
    )


def _run_outstanding(
    plan: Plan, placement: Placement, results: Path, options: RunOptions, console: Console, lock: int
) -> Report:
    """Do the missing runs on hosts that are there now. Args: lock: descriptor of the folder's lock."""
    # We hold the lock, so drivers of interrupted runs are gone: the disk space they reserved is freed.
    finish_removing(results)
    index = RunIndex(results)
    end_decoding()  # a process that has read the packs is of no use while ranks are measured
    refuse_damaged(results, index)
    for name in index.unpacked:
        free_reserves(results / "runs" / name)
    runs = _StudyRuns(plan, placement, results, options, console, lock, index)
    with (
        PreparedProcesses(runs.say_why_not_forked, runs.upcoming_trials) as prepared,
        StudyProgress(console) as progress,
        _thread_pool(runs.lineup.most_at_a_time, runs.context.interrupted) as threads,
    ):
        return runs.do_all(prepared, progress, threads)


class _StudyRuns:
    """The runs of a study that one driver does: which are under way, and what has come of the others.

    `do_all` begins runs, as many at a time as the study allows, and begins the next ones when a run has ended. No
    further run begins once a reason to stop is noted. There are two: the hosts take no more runs (`_find_lost_cause`),
    or a run has ended for a cause outside its trial, such as a full disk (`_note_end`). Runs that are under way then
    are waited for, and `do_all` raises the error that belongs to the reason. A spent budget is no such reason: the
    report names it.
    """

    def __init__(
        self,
        plan: Plan,
        placement: Placement,
        results: Path,
        options: RunOptions,
        console: Console,
        lock: int,
        index: RunIndex,
    ) -> None:
        """`lock`: descriptor of the folder's lock. `index`: the runs that are in the folder. Else as of `run`."""
        self.context = plan.in_folder(results)
        self._plan = plan
        self._placement = placement
        self._results = results
        self._console = console
        self._lock = lock
        self._attempts = index.attempts
        todo = outstanding_runs(plan, index, retry_failed=options.retry_failed)
        self._outcomes = existing_outcomes(plan, index, todo)
        self._todo = skip_unfit(self.context, todo, options.unfit, index, self._outcomes)
        self._added = AddedRuns(plan, results, self._outcomes, self._todo)
        self.lineup = Lineup(plan, placement, self._todo, self._added)
        self._gpu_hours = GpuHours(plan, index, results)
        self._unpacked_runs = sum(outcome is not None for outcome in index.unpacked.values())
        """Number of finished runs that lie in folders of their own, and not in a pack, since the last packing."""
        self._under_way: dict[Future[Outcome], RunKey] = {}
        """Runs in threads; empty where runs go one after another."""
        self._ended_runs = 0
        """Number of runs that have ended, or were skipped, in this driver."""
        self._lost_cause: Cause | None = None
        """Why the hosts take no more runs; None while they do."""
        self._stop_reason = ""
        """Why no further run may begin, the study's budget apart; empty while runs may."""

    def do_all(
        self, prepared: PreparedProcesses, progress: StudyProgress, threads: ThreadPoolExecutor | None
    ) -> Report:
        """Do the runs, side by side where there are threads, and report on all runs of the study.

        Args:
            prepared: processes that ranks on this machine are forked from.
            progress: the display.
            threads: one for each run at a time; None: runs go one after another in this thread.

        Raises:
            AllocationOverError: the hosts take no more runs.
            DiskFullError: the disk filled up.
            StoreError: the folder's lock is gone.
        """
        budget_refusal = self._begin_runs(prepared, progress, threads)
        while self._under_way:
            for future in wait(self._under_way, return_when=FIRST_COMPLETED).done:
                self._note_end(self._under_way.pop(future), future.result(), progress)
            budget_refusal = self._begin_runs(prepared, progress, threads)
        if self._stop_reason:
            raise self._stop_error()
        if self._unpacked_runs >= PACK_RUNS:
            pack_finished(self._results)
        return Report(self._ended_runs, self._outcomes, budget_refusal)

    def _stop_error(self) -> AllocationOverError | DiskFullError:
        """Return the error for the reason why no further run could begin: lost hosts, else a full disk."""
        if self._lost_cause is None:
            return DiskFullError(self._stop_reason, next_step="What is written is whole")
        return AllocationOverError(
            self._stop_reason,
            next_step="No further run was begun, and what is written is whole: the same command in a new "
            "allocation goes on",
        )

    def _begin_runs(
        self, prepared: PreparedProcesses, progress: StudyProgress, threads: ThreadPoolExecutor | None
    ) -> str:
        """Begin, or without threads do, runs until none may begin.

        Returns:
            Why the study's budget (`measure.max_gpu_hours`) lets no further run begin; empty where the budget does.
        """
        while not self._stop_reason:
            next_run = self.lineup.next()
            if next_run is None:
                return ""
            lost_cause = self._find_lost_cause()
            if lost_cause is not None:
                self._stop_reason = lost_cause.reason
                return ""
            trials_under_way = [run.trial_id for run in self.lineup.under_way]
            budget_refusal = self._gpu_hours.refusal(next_run.task.trial_id, trials_under_way)
            if budget_refusal:
                return budget_refusal
            _refuse_deleted_lock(self._results, self._lock)
            self._begin_run(next_run, prepared, progress, threads)
        return ""

    def _begin_run(
        self,
        next_run: NextRun,
        prepared: PreparedProcesses,
        progress: StudyProgress,
        threads: ThreadPoolExecutor | None,
    ) -> None:
        """Begin a run in a thread; without threads do it to its end. A run that is to be skipped is only noted."""
        task = next_run.task
        self.lineup.begin(task, next_run.placement)
        progress.expect(max(0, len(self._todo) - self._ended_runs), self._added.most_to_come())
        attempt = next_attempt(self._attempts, task)
        skip_outcome = skip_if_out_of_memory(self.context, task, attempt, self._outcomes)
        if skip_outcome is not None:
            self._note_end(task, skip_outcome, progress)
            return
        on_progress = progress.begin(self._plan.record.trials[task.trial_id], task.repeat)
        # Runs in threads start their ranks anew: a prepared process answers one caller at a time.
        prepared_if_alone = prepared if threads is None else None
        do_run = partial(
            run_task,
            self.context,
            next_run.placement,
            task,
            attempt,
            on_progress,
            prepared_if_alone,
            self._find_lost_cause,
        )
        if threads is None:
            self._note_end(task, do_run(), progress)
        else:
            self._under_way[threads.submit(do_run)] = task

    def _note_end(self, task: RunKey, outcome: Outcome, progress: StudyProgress) -> None:
        """Note the outcome of a run that has ended, or that was skipped.

        A cause outside the trial (no disk space, hosts that are gone) lets no further run begin. Finished runs are
        packed into one file once there are enough of them.
        """
        self.lineup.end(task, outcome)
        self._outcomes[task] = outcome
        self._gpu_hours.add(task.trial_id, outcome)
        progress.end(self._plan.record.trials[task.trial_id], outcome)
        self._ended_runs += 1
        if outcome.external:
            self._stop_reason = outcome.reason
            return
        self._unpacked_runs += 1
        if self._unpacked_runs >= PACK_RUNS:
            pack_finished(self._results)
            # Those that could not be packed are tried again with the next packing, after as many more runs.
            self._unpacked_runs = 0

    def upcoming_trials(self) -> list[Trial]:
        """Return the trials of the runs that have no outcome yet."""
        return [self._plan.record.trials[task.trial_id] for task in self._todo if task not in self._outcomes]

    def say_why_not_forked(self, reason: str) -> None:
        """Print why ranks are started anew."""
        self._say(f"  ranks are started anew, not as forks: {reason}")

    def _say(self, text: str) -> None:
        """Print a line for the user as it is."""
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def _pause(self, seconds: float) -> None:
        """Wait; raises KeyboardInterrupt as soon as runs are to be ended."""
        if self.context.interrupted.wait(seconds):
            raise KeyboardInterrupt

    def _find_lost_cause(self) -> Cause | None:
        """Return why the hosts take no more runs; None while they do.

        Asks the batch system that the hosts are from, and waits until it answers: before that, no step can start
        either. Once they are lost they stay so, and nobody is asked again.
        """
        if self._lost_cause is None:
            self._lost_cause = wait_for_answer(self._placement, self._placement.lost, self._say, self._pause)
        return self._lost_cause


@contextmanager
def _thread_pool(most_runs: int, interrupted: threading.Event) -> Iterator[ThreadPoolExecutor | None]:
    """Give a pool with a thread for each run that may be under way; None for one run at a time.

    Threads stay until all runs have ended: when a thread ends, the kernel ends the processes that it has started.

    Args:
        most_runs: most runs at a time.
        interrupted: set where the block raises an exception, so that the runs under way end in order.
    """
    if most_runs == 1:
        yield None
        return
    threads = ThreadPoolExecutor(most_runs, thread_name_prefix="run")
    try:
        yield threads
    except BaseException:
        interrupted.set()
        raise
    finally:
        all_have_ended = False
        while not all_have_ended:
            with suppress(KeyboardInterrupt):  # a second Ctrl-C leaves no ranks behind
                threads.shutdown()
                all_have_ended = True


@contextmanager
def signals_interrupt(*numbers: signal.Signals, once: bool = False) -> Iterator[None]:
    """Make these signals interrupt as Ctrl-C does; with `once`, all of them that come later are ignored.

    Only the main thread gets signals: in another one, such as that of a notebook's server, nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        if once:
            for later in numbers:
                signal.signal(later, signal.SIG_IGN)
        raise KeyboardInterrupt

    earlier_handlers = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in earlier_handlers.items():
            signal.signal(number, handler)
