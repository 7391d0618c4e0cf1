"""The driver: does what is missing, one run after the other, each with exactly one outcome."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console

from vitscale import sources
from vitscale.errors import RequestError, StoreError, VitscaleError, explain, shown
from vitscale.launchers import launcher_for
from vitscale.record import Outcome, RunHeader
from vitscale.runner.added_runs import AddedRuns
from vitscale.runner.classify import outcome_of
from vitscale.runner.planning import Plan, Task, check_folder, outstanding
from vitscale.runner.progress import StudyProgress
from vitscale.runner.watch import watch
from vitscale.schedulers.local import LocalJob
from vitscale.store import RunIndex, locked, new_run_folder, read_ranks, write_outcome, write_study

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Options:
    """What `vitscale run` was asked for beyond the study."""

    retry_failed: bool = False
    allow_version_change: bool = False


@dataclass(frozen=True)
class Report:
    """What one call did, and how the study stands."""

    done_now: int
    outcomes: dict[tuple[str, int], Outcome]
    """By trial and repeat, all runs of the study that have an outcome."""

    @property
    def failures(self) -> dict[tuple[str, int], Outcome]:
        """The runs that did not complete."""
        return {key: outcome for key, outcome in self.outcomes.items() if outcome.kind != "completed"}


class DiskFullError(VitscaleError):
    """No room for the next run: what is written is whole, and the study can go on when there is space."""

    exit_code = 1


class Interrupted(VitscaleError):
    """Ctrl-C or SIGTERM: all ranks are ended, the run that was under way does not count."""

    exit_code = 130


def run(plan: Plan, results: Path, options: Options, console: Console) -> Report:
    """Runs what is missing of a study.

    Raises:
        RequestError: the data is damaged; nothing was started or written.
        StoreError: the folder cannot be used; nothing was started or overwritten.
        Interrupted: on Ctrl-C; no process is left.
        DiskFullError: the disk filled up.
    """
    check_folder(results, plan.record, allow_version_change=options.allow_version_change)
    results = results.absolute()
    made = [folder for folder in (results, *results.parents) if not folder.exists()]
    try:
        results.mkdir(parents=True, exist_ok=True)
        with locked(results), _signals_interrupt():
            # Again under the lock: another driver may just have begun here.
            check_folder(results, plan.record, allow_version_change=options.allow_version_change)
            _decode_data(plan, results, made)
            write_study(results, plan.record)
            return _run_outstanding(plan, results, options, console)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(
                explain(
                    f"the disk of {shown(str(results))} is full",
                    next_step="What is written is whole; free space and run the same command again",
                )
            ) from error
        raise StoreError(
            explain(
                f"results folder {shown(str(results))} cannot be written: {error.strerror or error}",
                next_step="Give a folder you may write to with -o",
            )
        ) from error
    except KeyboardInterrupt:
        raise Interrupted(
            "interrupted: all ranks are ended, and no finished run is lost. Run the same command again to go on."
        ) from None


def _decode_data(plan: Plan, results: Path, made: list[Path]) -> None:
    """Decodes the images once and here: damage inside one shows before anything starts, and no run pays for the others.

    Where they are damaged, the folders `made` for the results, innermost first, are taken away again.
    """
    try:
        for data in {trial.data.model_copy(update={"fraction": 1.0}) for trial in plan.record.trials.values()}:
            sources.load(data)
    except RequestError:
        if made:
            (results / "lock").unlink()
        for folder in made:
            folder.rmdir()
        raise


def _run_outstanding(plan: Plan, results: Path, options: Options, console: Console) -> Report:
    # The driver of an interrupted run is gone, for we hold the lock: the room it kept is given back.
    for reserve in results.glob("runs/*/.*reserve"):
        reserve.unlink()
    index = RunIndex(results)
    todo = outstanding(plan, index, retry_failed=options.retry_failed)
    again = frozenset(todo)
    outcomes = {
        key: outcome
        for key, (_, outcome) in index.finished.items()
        if key[0] in plan.record.trials and Task(*key) not in again
    }
    added = AddedRuns(plan, results, outcomes, todo)
    done = 0
    with StudyProgress(console) as progress:
        progress.expect(len(todo), added.most())
        for task in itertools.chain(todo, added):
            progress.expect(max(0, len(todo) - done), added.most())
            attempt = index.attempts.get((task.trial_id, task.repeat), -1) + 1
            trial = plan.record.trials[task.trial_id]
            outcome = _skip_reason(task, outcomes, results, plan, attempt)
            if outcome is None:
                on_steps = progress.begin(trial, task.repeat)
                outcome = _run_one(plan, task, attempt, results, on_steps)
            outcomes[task.trial_id, task.repeat] = outcome
            progress.end(trial, outcome)
            done += 1
            if outcome.external:
                raise DiskFullError(explain(outcome.reason, next_step="What is written is whole"))
    return Report(done, outcomes)


def _header(plan: Plan, task: Task, attempt: int, command: tuple[str, ...]) -> RunHeader:
    trial = plan.record.trials[task.trial_id]
    # How long an accuracy takes depends on the seed; how long a step takes does not, and there equal work is wanted.
    seed = trial.train.seed + (task.repeat if trial.train.target_accuracy is not None else 0)
    return RunHeader(
        trial_id=task.trial_id,
        repeat=task.repeat,
        attempt=attempt,
        trial=trial,
        seed=seed,
        command=command,
        dataset_fingerprint=plan.record.dataset_fingerprints[task.trial_id],
    )


def _skip_reason(
    task: Task, outcomes: dict[tuple[str, int], Outcome], results: Path, plan: Plan, attempt: int
) -> Outcome | None:
    """A trial that has run out of memory would do so again: its other repeats are skipped, and that is recorded."""
    earlier = [o for (trial_id, repeat), o in outcomes.items() if trial_id == task.trial_id and repeat != task.repeat]
    if not any(outcome.kind == "oom" for outcome in earlier):
        return None
    outcome = Outcome(
        kind="skipped",
        reason="another repeat of this trial ran out of memory",
        started_unix_seconds=time.time(),
        wall_seconds=0.0,
    )
    write_outcome(new_run_folder(results, _header(plan, task, attempt, ())), outcome)
    return outcome


def _run_one(plan: Plan, task: Task, attempt: int, results: Path, on_steps: Callable[[int], None]) -> Outcome:
    trial = plan.record.trials[task.trial_id]
    name = f"{task.trial_id}-r{task.repeat}-a{attempt}"
    command = launcher_for(trial).command(trial.world, results / "runs" / name)
    folder = new_run_folder(results, _header(plan, task, attempt, tuple(command)))
    job = LocalJob(
        command,
        log=folder / "log.txt",
        cwd=Path.cwd(),
        environment={
            "OMP_NUM_THREADS": str(trial.world.threads_per_rank),
            "VITSCALE_STARTED_NS": str(time.clock_gettime_ns(time.CLOCK_MONOTONIC)),
            # The working directory comes first by itself; a factory's module may also lie beside the study file.
            "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(plan.folder)])),
            "VITSCALE_BOOT_ID": _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.exists() else "",
        },
    )
    ending = watch(
        job,
        folder,
        hang_seconds=plan.measure.hang_seconds,
        timeout_seconds=plan.measure.timeout_seconds,
        on_steps=on_steps,
    )
    outcome = outcome_of(ending, read_ranks(folder), trial.world.size, folder / "log.txt")
    write_outcome(folder, outcome)
    return outcome


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM and a closed terminal end the study as Ctrl-C does: in order, with no process left."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
