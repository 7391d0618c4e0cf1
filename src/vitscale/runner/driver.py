"""The driver: does the missing runs, one after the other or side by side, each with exactly one outcome."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from rich.console import Console

from vitscale import sources
from vitscale.base.parquet import end_decoding
from vitscale.errors import RequestError, StoreError, VitscaleError, shown
from vitscale.runner.batch_file import patiently
from vitscale.runner.one_run import Task, refuse_elsewhere, run_task, skip_reason
from vitscale.runner.planning import Plan, Report, check_folder
from vitscale.runner.progress import StudyProgress, decoding_progress
from vitscale.runner.todo import AddedRuns, GpuHours, Lineup, existing_outcomes, outstanding, refuse_damaged, skip_unfit
from vitscale.schedulers import Cause, Placement, Submitter
from vitscale.schedulers.prepared import PreparedProcesses
from vitscale.store import DISK_FULL_ERRORS, RunIndex, free_reserves, locked, pack_finished, read_study, write_study
from vitscale.store.packs import PACK_RUNS, finish_removing
from vitscale.store.results import Outcome
from vitscale.trial.trial import Trial


@dataclass(frozen=True)
class Options:
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


def run(plan: Plan, results: Path, options: Options, console: Console) -> Report:
    """Does a study's missing runs.

    Raises:
        RequestError: the data is damaged, or what ranks need is not installed; nothing was started or written.
        StoreError: the folder cannot be used; nothing was started or overwritten.
        Interrupted: on Ctrl-C; no process is left.
        DiskFullError: the disk filled up.
        AllocationOverError: the allocation of a batch system around this process has ended.
    """
    refuse_elsewhere(plan.scheduler, {trial.train.engine for trial in plan.record.trials.values()})
    check_folder(results, plan.record, allow_version_change=options.allow_version_change)
    results = results.absolute()
    made = [folder for folder in (results, *results.parents) if not folder.exists()]
    try:
        results.mkdir(parents=True, exist_ok=True)
        # SIGTERM and a closed terminal end the study as Ctrl-C does: in order, with no process left.
        with locked(results) as lock, signals_interrupt(signal.SIGTERM, signal.SIGHUP):
            _refuse_deleted_lock(results, lock)
            # Check again under the lock: another driver may just have begun here.
            check_folder(results, plan.record, allow_version_change=options.allow_version_change)
            _decode_data(plan, results, made, console)
            _write_study(results, plan)
            match plan.scheduler:
                case Submitter() as submitter:
                    from vitscale.runner.batch_jobs import submit_outstanding

                    again = options.retry_failed
                    return submit_outstanding(plan, submitter, results, console, options.unfit, retry_failed=again)
                case Placement() as placement:
                    if (results / "jobs").is_dir():
                        from vitscale.runner.batch_jobs import refuse_live_jobs

                        refuse_live_jobs(results)
                    return _run_outstanding(plan, placement, results, options, console, lock)
    except OSError as error:
        if error.errno in DISK_FULL_ERRORS:
            raise DiskFullError(
                f"the disk of {shown(str(results))} is full",
                next_step="What is written is whole; free space, or delete files where it takes no more of them, and "
                "run the same command again",
            ) from error
        what = f"results folder {shown(str(results))} cannot be written: {error.strerror or error}"
        raise StoreError(what, next_step="Give a folder you may write to with -o") from error
    except KeyboardInterrupt:
        raise Interrupted(
            "interrupted: all ranks are ended, and no finished run is lost. Run the same command again to go on."
        ) from None


def _write_study(results: Path, plan: Plan) -> None:
    """Records the study. Fewer repeats than were measured of every trial take nothing back of that."""
    held, record = read_study(results), plan.record
    if held is not None and held.repeats > record.repeats:
        alike = {name: getattr(held, name) for name in ("repeats", "text", "overrides", "vitscale")}
        done = RunIndex(results).finished
        if record.model_copy(update=alike) == held and all(
            (trial, repeat) in done for trial in held.trials for repeat in range(held.repeats)
        ):
            record = held
    write_study(results, record)


def _decode_data(plan: Plan, results: Path, made: list[Path], console: Console) -> None:
    """Decodes the images once, so that damage shows before anything starts and no run's time includes decoding.

    Where images are damaged, removes the folders `made` for the results, innermost first.
    """
    try:
        with decoding_progress(console) as progress:
            for data in {
                trial.data.model_copy(update={"fraction": 1.0})
                for trial in plan.record.trials.values()
                if trial.train.script is None
            }:
                sources.prepare(data, progress)
    except RequestError:
        if made:
            (results / "lock").unlink()
        for folder in made:
            folder.rmdir()
        raise


def _refuse_deleted_lock(results: Path, lock: int) -> None:
    """Refuses to begin another run where somebody has removed the lock: another driver may hold a new one.

    Args:
        results: folder of the results.
        lock: descriptor of the lock that this driver holds.

    Raises:
        StoreError: the lock in the folder is another file, or there is none, or no folder.
    """
    try:
        kept = os.path.samestat(os.fstat(lock), (results / "lock").stat())
    except FileNotFoundError:
        kept = False
    if not kept and not results.exists():
        raise StoreError(
            f"results folder {shown(str(results))} is gone: it was moved or deleted during the study",
            next_step="Put it back where it was, and run the same command again",
        )
    if not kept:
        raise StoreError(
            f"the file 'lock' of {shown(str(results))} was deleted: another `vitscale run` may be writing there now",
            next_step="Leave that file alone, and run the same command again once no other writes there",
        )


def _run_outstanding(
    plan: Plan, placement: Placement, results: Path, options: Options, console: Console, lock: int
) -> Report:
    # We hold the lock, so drivers of interrupted runs are gone: the disk space they reserved is freed.
    finish_removing(results)
    index = RunIndex(results)
    end_decoding()  # a process that has read the packs is of no use while ranks are measured
    refuse_damaged(results, index)
    for name in index.unpacked:
        free_reserves(results / "runs" / name)
    todo = outstanding(plan, index, retry_failed=options.retry_failed)
    outcomes = existing_outcomes(plan, index, todo)
    context = plan.in_folder(results)
    todo = skip_unfit(context, todo, options.unfit, index, outcomes)
    added = AddedRuns(plan, results, outcomes, todo)
    lineup = Lineup(plan, placement, todo, added)
    done, ended, over = 0, "", ""
    gone: Cause | None = None
    spent = GpuHours(plan, index, results)
    unpacked = sum(outcome is not None for outcome in index.unpacked.values())
    under_way: dict[Future[Outcome], Task] = {}

    def say(text: str) -> None:
        console.print(text, soft_wrap=True, highlight=False, markup=False)

    def pause(seconds: float) -> None:
        if context.interrupted.wait(seconds):
            raise KeyboardInterrupt

    def lost() -> Cause | None:
        """Why the hosts take no more runs; waits for the answer. No step can start before it comes, either."""
        nonlocal gone
        gone = gone or patiently(placement, placement.lost, say, pause)
        return gone

    def upcoming() -> list[Trial]:
        return [plan.record.trials[task.trial_id] for task in todo if (task.trial_id, task.repeat) not in outcomes]

    def has_ended(task: Task, outcome: Outcome) -> None:
        nonlocal done, over, unpacked
        lineup.end(task, outcome)
        outcomes[task.trial_id, task.repeat] = outcome
        spent.add(task.trial_id, outcome)
        progress.end(plan.record.trials[task.trial_id], outcome)
        done += 1
        if outcome.external:
            over = outcome.reason
            return
        unpacked += 1
        if unpacked >= PACK_RUNS:
            pack_finished(results)
            unpacked = 0  # those that stay are looked at again once as many more have ended

    with (
        PreparedProcesses(lambda why: say(f"  ranks are started anew, not as forks: {why}"), upcoming) as prepared,
        StudyProgress(console) as progress,
        _threads(lineup.most, context.interrupted) as threads,
    ):
        while True:
            ended = ""
            while not over and (begins := lineup.next()) is not None:
                if (cause := lost()) is not None:
                    over = cause.reason
                    break
                task, where = begins
                if ended := spent.refusal(task.trial_id, [other.trial_id for other in lineup.under_way]):
                    break
                _refuse_deleted_lock(results, lock)
                lineup.begin(task, where)
                progress.expect(max(0, len(todo) - done), added.most())
                attempt = index.attempts.get((task.trial_id, task.repeat), -1) + 1
                outcome = skip_reason(context, task, attempt, outcomes)
                if outcome is not None:
                    has_ended(task, outcome)
                    continue
                on_progress = progress.begin(plan.record.trials[task.trial_id], task.repeat)
                if threads is None:
                    has_ended(task, run_task(context, where, task, attempt, on_progress, prepared, lost))
                else:
                    under_way[threads.submit(run_task, context, where, task, attempt, on_progress, None, lost)] = task
            if not under_way:
                break
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                has_ended(under_way.pop(future), future.result())
        if over and gone is not None:
            step = (
                "No further run was begun, and what is written is whole: the same command in a new allocation goes on"
            )
            raise AllocationOverError(over, next_step=step)
        if over:
            raise DiskFullError(over, next_step="What is written is whole")
        if unpacked >= PACK_RUNS:
            pack_finished(results)
    return Report(done, outcomes, ended)


@contextmanager
def _threads(most: int, interrupted: threading.Event) -> Iterator[ThreadPoolExecutor | None]:
    """A pool with a thread for each of `most` runs; None for one. An exception ends all runs under way in order.

    Threads stay until all runs have ended: when a thread ends, the kernel ends the processes that it has started.
    """
    if most == 1:
        yield None
        return
    threads = ThreadPoolExecutor(most, thread_name_prefix="run")
    try:
        yield threads
    except BaseException:
        interrupted.set()
        raise
    finally:
        ended = False
        while not ended:
            with suppress(KeyboardInterrupt):  # a second Ctrl-C leaves no ranks behind
                threads.shutdown()
                ended = True


@contextmanager
def signals_interrupt(*numbers: signal.Signals, once: bool = False) -> Iterator[None]:
    """Makes these signals interrupt as Ctrl-C does; with `once`, those that come later are ignored.

    A thread besides the main one, such as that of a notebook's server, gets no signals: there nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, _frame: FrameType | None) -> None:
        if once:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
