"""One run, from its folder to its outcome; tried again where the cause of a failure was passing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vitscale.errors import RequestError
from vitscale.runner.classify import outcome_of
from vitscale.runner.starting import start_ranks, worked_out
from vitscale.runner.watch import watch
from vitscale.schedulers import Scheduler
from vitscale.schedulers.prepared import PreparedProcesses, Ready
from vitscale.store import new_run_folder, read_ranks, write_outcome
from vitscale.store.results import Outcome, RunHeader, StudyRecord
from vitscale.study.sections import LaunchSection, MeasureSection

RANK_MODULE = "vitscale.worker"
"""What every rank runs."""


@dataclass(frozen=True)
class Task:
    """One run that is to be done."""

    trial_id: str
    repeat: int


@dataclass(frozen=True)
class Setting:
    """What all runs of a study share."""

    record: StudyRecord
    measure: MeasureSection
    launch: LaunchSection
    folder: Path
    """Of the study file: a factory's module may lie beside it."""
    results: Path
    scheduler: Scheduler
    prepared: PreparedProcesses | None = None
    """What ranks on this machine are forked from; None: all are started anew."""


def header_of(
    record: StudyRecord, task: Task, attempt: int, command: tuple[str, ...], hosts: tuple[str, ...]
) -> RunHeader:
    """What trial.json of one attempt says."""
    trial = record.trials[task.trial_id]
    # How long an accuracy takes depends on the seed; how long a step takes does not, and there equal work is wanted.
    seed = trial.train.seed + (task.repeat if trial.train.target_accuracy is not None else 0)
    return RunHeader(
        trial_id=task.trial_id,
        repeat=task.repeat,
        attempt=attempt,
        trial=trial,
        seed=seed,
        command=command,
        hosts=hosts,
        dataset_fingerprint=record.dataset_fingerprints[task.trial_id],
    )


def skip_reason(
    setting: Setting, task: Task, attempt: int, outcomes: Mapping[tuple[str, int], Outcome]
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
    write_outcome(new_run_folder(setting.results, header_of(setting.record, task, attempt, (), ())), outcome)
    return outcome


def run_task(setting: Setting, task: Task, attempt: int, on_progress: Callable[[int, str], None]) -> Outcome:
    """Does one run, and again up to `measure.retries` times where its cause was passing; every try keeps its folder.

    Args:
        setting: of the study.
        task: which run.
        attempt: number of the first try.
        on_progress: is told how many steps rank 0 has recorded, and what ranks before their first step do.
    """
    outcome = _attempt(setting, task, attempt, on_progress)
    for again in range(1, setting.measure.retries + 1):
        if not outcome.transient:
            break
        outcome = _attempt(setting, task, attempt + again, on_progress)
    return outcome


def _attempt(setting: Setting, task: Task, attempt: int, on_progress: Callable[[int, str], None]) -> Outcome:
    trial = setting.record.trials[task.trial_id]
    folder = setting.results / "runs" / f"{task.trial_id}-r{task.repeat}-a{attempt}"
    ranks = worked_out(setting.scheduler, setting.launch, trial.launcher, trial.world, folder, RANK_MODULE)
    hosts = tuple(host.name for host in ranks.hosts)
    folder = new_run_folder(setting.results, header_of(setting.record, task, attempt, tuple(ranks.commands[0]), hosts))
    environment = {
        "OMP_NUM_THREADS": str(trial.world.threads_per_rank),
        # The working directory comes first by itself; a factory's module may also lie beside the study file.
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(setting.folder)])),
    }

    def ready(variables: Mapping[str, str], log: Path) -> Ready:
        if setting.prepared is None:
            return Ready()
        return setting.prepared.ready(task.trial_id, trial, variables, Path.cwd(), log)

    try:
        started = start_ranks(ranks, setting.scheduler, setting.launch, folder, environment=environment, ready=ready)
    except RequestError as error:
        # A host's name that is not known just now: the other runs need not suffer for it.
        outcome = Outcome(
            kind="failed", reason=str(error), transient=True, started_unix_seconds=time.time(), wall_seconds=0.0
        )
        write_outcome(folder, outcome)
        return outcome
    ending = watch(
        started,
        folder,
        hang_seconds=setting.measure.hang_seconds,
        timeout_seconds=setting.measure.timeout_seconds,
        on_progress=on_progress,
    )
    outcome = outcome_of(ending, read_ranks(folder), trial.world.size, folder / "log.txt")
    write_outcome(folder, outcome)
    return outcome
