"""One run, from its folder to its outcome; tried again where the cause of a failure was passing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vitscale.errors import RequestError
from vitscale.launchers import Spawn
from vitscale.runner.classify import outcome_of
from vitscale.runner.evidence import Ending, Evidence
from vitscale.runner.starting import FindPrepared, launch_plan, start_ranks
from vitscale.runner.watch import watch
from vitscale.schedulers import Placement
from vitscale.schedulers.prepared import PreparedProcesses
from vitscale.store import new_run_folder, read_ranks, write_outcome
from vitscale.store.results import Outcome, OutcomeKind, RunHeader, StudyRecord
from vitscale.study.sections import LaunchSection, MeasureSection, SlurmSection
from vitscale.trial.trial import World

RANK_MODULE = "vitscale.worker"
"""What every rank runs."""


@dataclass(frozen=True)
class Task:
    """One run that is to be done."""

    trial_id: str
    repeat: int


@dataclass(frozen=True)
class RunContext:
    """What all runs of a study share."""

    record: StudyRecord
    measure: MeasureSection
    launch: LaunchSection
    slurm: SlurmSection
    folder: Path
    """Of the study file: a factory's module may lie beside it."""
    results: Path

    def run_folder(self, task: Task, attempt: int) -> Path:
        """Of one try of a run."""
        return self.results / "runs" / f"{task.trial_id}-r{task.repeat}-a{attempt}"


def new_attempt(
    context: RunContext, task: Task, attempt: int, command: tuple[str, ...] = (), hosts: tuple[str, ...] = ()
) -> Path:
    """Makes the folder of one attempt, with what its trial.json says.

    Raises:
        OSError: it exists, or there is no room.
    """
    trial = context.record.trials[task.trial_id]
    # How long an accuracy takes depends on the seed; how long a step takes does not, and there equal work is wanted.
    seed = trial.train.seed + (task.repeat if trial.train.target_accuracy is not None else 0)
    header = RunHeader(
        trial_id=task.trial_id,
        repeat=task.repeat,
        attempt=attempt,
        trial=trial,
        seed=seed,
        command=command,
        hosts=hosts,
        dataset_fingerprint=context.record.dataset_fingerprints[task.trial_id],
    )
    return new_run_folder(context.results, header)


def skip_reason(
    context: RunContext, task: Task, attempt: int, outcomes: Mapping[tuple[str, int], Outcome]
) -> Outcome | None:
    """A trial that has run out of memory would do so again: its other repeats are skipped, and that is recorded."""
    earlier = [o for (trial_id, repeat), o in outcomes.items() if trial_id == task.trial_id and repeat != task.repeat]
    if not any(outcome.kind == "oom" for outcome in earlier):
        return None
    outcome = unstarted("skipped", "another repeat of this trial ran out of memory")
    write_outcome(new_attempt(context, task, attempt), outcome)
    return outcome


def run_task(
    context: RunContext,
    placement: Placement,
    task: Task,
    attempt: int,
    on_progress: Callable[[int, str], None],
    prepared: PreparedProcesses | None = None,
) -> Outcome:
    """Does one run, and again up to `measure.retries` times where its cause was passing; every try keeps its folder.

    Args:
        context: of the study.
        placement: where it runs.
        task: which run.
        attempt: number of the first try.
        on_progress: is told how many steps rank 0 has recorded, and what ranks before their first step do.
        prepared: what ranks on this machine are forked from; None: all are started anew.
    """
    for again in range(context.measure.retries + 1):
        outcome = _attempt(context, placement, task, attempt + again, on_progress, prepared)
        if not outcome.transient:
            break
    return outcome


def _attempt(
    context: RunContext,
    placement: Placement,
    task: Task,
    attempt: int,
    on_progress: Callable[[int, str], None],
    prepared: PreparedProcesses | None,
) -> Outcome:
    trial = context.record.trials[task.trial_id]
    folder = context.run_folder(task, attempt)
    spawn = launch_plan(placement, context.launch, trial.launcher, trial.world, folder, RANK_MODULE)
    new_attempt(context, task, attempt, spawn.commands[0], tuple(host.name for host in spawn.hosts))
    try:
        ending = run_ranks(
            spawn,
            placement,
            context.launch,
            ranks_variables(trial.world, context.folder),
            hang_seconds=context.measure.hang_seconds,
            timeout_seconds=context.measure.timeout_seconds,
            ready=None if prepared is None else partial(prepared.ready, task.trial_id, trial),
            on_progress=on_progress,
        )
    except RequestError as error:
        # A host's name that is not known just now: the other runs need not suffer for it.
        outcome = unstarted("failed", str(error), transient=True)
    else:
        outcome = outcome_of(Evidence(ending, read_ranks(folder), trial.world.size, folder))
    write_outcome(folder, outcome)
    return outcome


def ranks_variables(world: World, *folders: Path) -> dict[str, str]:
    """What every rank of a world is given: its number of threads, and `folders` to import a user's modules from after
    the working directory, which comes first by itself."""
    paths = filter(None, [os.environ.get("PYTHONPATH"), *map(str, folders)])
    variables = {"OMP_NUM_THREADS": str(world.threads_per_rank), "PYTHONPATH": os.pathsep.join(paths)}
    return {name: value for name, value in variables.items() if value}


def run_ranks(
    spawn: Spawn,
    placement: Placement,
    section: LaunchSection,
    variables: Mapping[str, str],
    *,
    hang_seconds: float,
    timeout_seconds: float | None,
    ready: FindPrepared | None = None,
    on_progress: Callable[[int, str], None] = lambda _steps, _phase: None,
) -> Ending:
    """Starts the ranks of a run or of a check, and sees them to their end; no process of them is left.

    Args:
        spawn: from `launch_plan`.
        placement: the same.
        section: the same.
        variables: of every rank.
        hang_seconds: as `watch` takes it.
        timeout_seconds: as `watch` takes it.
        ready: as `start_ranks` takes it.
        on_progress: as `run_task` takes it.

    Raises:
        OSError: a file cannot be written, or a program cannot be started.
        RequestError: a host has no address, or the prepared process is gone.
    """
    job = start_ranks(spawn, placement, section, environment=variables, ready=ready)
    return watch(
        job, spawn.run_folder, hang_seconds=hang_seconds, timeout_seconds=timeout_seconds, on_progress=on_progress
    )


def unstarted(kind: OutcomeKind, reason: str, *, transient: bool = False, external: bool = False) -> Outcome:
    """Of a run whose ranks were never started."""
    return Outcome(
        kind=kind,
        reason=reason,
        transient=transient,
        external=external,
        started_unix_seconds=time.time(),
        wall_seconds=0.0,
    )
