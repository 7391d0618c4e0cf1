"""A study's plan, worked out before anything starts: trials, their order, the state of a results folder."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from vitscale import sources
from vitscale.base import program
from vitscale.engines.packages import installed_versions
from vitscale.errors import RequestError, StoreError, VitscaleError, shown
from vitscale.launchers import LOCAL, Spawn, find_launcher
from vitscale.machine.hardware import Machine
from vitscale.runner.changed_study import changes, in_brackets, threads_of, ways_to_continue
from vitscale.runner.one_run import RANK_MODULE, RunContext, Task, launch_plan
from vitscale.schedulers import Placement, Submitter, scheduler_for
from vitscale.store import RunIndex, read_study
from vitscale.store.results import Outcome, StudyRecord
from vitscale.study.expand import Expansion, expand
from vitscale.study.file import FEWEST_FOR_TARGET, Overlay, StudyFile
from vitscale.study.sections import AUTO, MeasureSection
from vitscale.trial.trial import DataSpec, Trial, World, samples_used

_ANY_FOLDER = Path("/RESULTS/runs/TRIAL")
"""Stands for a run's folder where only the form of a command matters."""


@dataclass(frozen=True)
class Plan:
    """A study, ready to run."""

    context: RunContext
    scheduler: Placement | Submitter
    expansion: Expansion
    tasks: tuple[Task, ...]
    """All runs of the study in their random order, done or not, without those that `measure.target_ci` may add."""
    alone: frozenset[Task] = frozenset()
    """Runs that have no other run beside them in a study with runs side by side (`_alone`)."""

    @property
    def record(self) -> StudyRecord:
        """The study's record, as in study.json."""
        return self.context.record

    @property
    def measure(self) -> MeasureSection:
        """The study's [measure] section."""
        return self.context.measure

    def in_folder(self, results: Path) -> RunContext:
        """The context that all runs share, for this results folder."""
        return replace(self.context, results=results, interrupted=threading.Event())

    def steps_of(self, trial_id: str) -> tuple[int, int]:
        """Optimizer steps of a trial: (in an epoch, in a run)."""
        trial = self.record.trials[trial_id]
        epoch = trial.steps_per_epoch(samples_used(self.expansion.train_samples[trial_id], trial.data.fraction))
        if trial.window.steps is not None:
            return epoch, trial.window.steps + trial.window.warmup_steps
        return epoch, epoch * (trial.train.epochs or 0)

    @property
    def fewest_repeats(self) -> int:
        """Fewest runs of a trial, unless one fails: `measure.target_ci` adds some to every trial."""
        measure = self.measure
        return measure.repeats if measure.target_ci is None else max(measure.repeats, FEWEST_FOR_TARGET)

    @property
    def certain_runs(self) -> tuple[tuple[str, int], ...]:
        """The runs, as (trial, repeat), that are made unless one fails: the fewest of every trial."""
        return tuple((trial_id, n) for trial_id in self.record.trials for n in range(self.fewest_repeats))

    @property
    def most_runs(self) -> int:
        """Most runs there can be, with those that `measure.target_ci` may add."""
        measure = self.measure
        return len(self.record.trials) * (measure.repeats if measure.target_ci is None else measure.max_repeats)


@dataclass(frozen=True)
class Report:
    """What one call did, and the study's state."""

    done_now: int
    outcomes: dict[tuple[str, int], Outcome]
    """Outcomes of all the study's runs that have one, by (trial, repeat)."""
    ended: str = ""
    """Why the study ended before all of its runs were done; empty where nothing ended it."""

    @property
    def failures(self) -> dict[tuple[str, int], Outcome]:
        """The runs that did not complete, except those skipped on request."""
        return {
            key: outcome
            for key, outcome in self.outcomes.items()
            if outcome.kind != "completed" and key not in self.skipped
        }

    @property
    def skipped(self) -> dict[tuple[str, int], Outcome]:
        """The runs that were skipped on request; the next call without that request does them."""
        return {
            key: outcome for key, outcome in self.outcomes.items() if outcome.kind == "skipped" and outcome.external
        }


def plan(
    study: Path | StudyFile,
    machine: Machine | None = None,
    check_data: Callable[[DataSpec], sources.Summary] = sources.check,
    overlay: Overlay | None = None,
    results: Path | None = None,
) -> Plan:
    """Reads a study and checks it against its hosts and data; starts nothing and writes nothing.

    Args:
        study: the study file's path, or the file read.
        machine: what one host offers; None: what the scheduler says.
        check_data: finds and verifies a dataset.
        overlay: values of a site file and the command line, used when `study` is a path.
        results: folder for the results. A study begun there keeps its launcher and threads where the file leaves them
            open; its threads only while each rank's share of the cores is as large. None: results/NAME.

    Raises:
        RequestError: the study, the data or the hosts do not allow it.
    """
    file = study if isinstance(study, StudyFile) else StudyFile.read(study, overlay)
    for named in file.launchers:
        if named != AUTO:
            find_launcher(named)
    scheduler = scheduler_for(file.study, file.path)
    if isinstance(scheduler, Submitter) and file.study.measure.max_gpu_hours is not None:
        raise RequestError(
            "measure.max_gpu_hours is kept by the driver, and the jobs of Slurm run without one",
            next_step="Limit them by slurm.time; or run inside an allocation (salloc), where there is a driver",
        )
    results = results or Path("results") / file.study.name
    begun = begun_study(results, file.study.name)
    launcher = _launcher_of(begun) or scheduler.default_launcher
    if launcher == LOCAL and scheduler.default_launcher != LOCAL:
        launcher = scheduler.default_launcher  # the study was begun on one machine, and now has hosts
    host = machine or scheduler.machine()
    threads = threads_of(begun)
    expansion = expand(file, host, check_data, scheduler.slots(), launcher, threads)
    if begun is not None and host.node_cores and not begun.trials.keys() & expansion.trials.keys():
        # Default threads once came from logical cores: a folder begun that way goes on that way.
        before = expand(file, replace(host, node_cores=()), check_data, scheduler.slots(), launcher, threads)
        expansion = before if begun.trials.keys() & before.trials.keys() else expansion
    hosts = _hosts_of_runs(scheduler, file.study.measure)
    launch = file.study.launch
    spawns: dict[tuple[str, World], Spawn] = {}
    for trial in expansion.trials.values():
        alike = trial.launcher, trial.world
        if alike not in spawns:
            spawns[alike] = launch_plan(scheduler, launch, trial.launcher, trial.world, _ANY_FOLDER, RANK_MODULE)
        spawn = spawns[alike]
        if trial.train.micro_batches is not None and spawn.hosts != scheduler.hosts(trial.world):
            own = spawn.hosts[0].name
            raise RequestError(
                f"train.rank_speeds are in the order of the hostfile, and {trial.launcher} gives the first ranks to "
                f"{shown(own)}, this machine",
                next_step=f"Begin the hostfile with {own}, and the speeds with those of its ranks",
            )
    measure = file.study.measure
    tasks = []
    first, last = _alone(expansion.trials, measure, hosts)
    # Seeded, so that a resumed study keeps its order. Random, so that drift favours no trial. In rounds of one run of
    # each trial, so that drift favours no repeat, and one process can fork the ranks of a whole round.
    order = random.Random(measure.order_seed)  # noqa: S311 - an order, not a secret
    for repeat in range(measure.repeats):
        whole_round = order.sample([*expansion.trials], len(expansion.trials))
        if repeat == 0:
            whole_round.sort(key=lambda trial_id: trial_id not in first)
        elif repeat == measure.repeats - 1:
            whole_round.sort(key=last.__contains__)
        tasks += [Task(trial_id, repeat) for trial_id in whole_round]
    alone = {Task(trial_id, 0) for trial_id in first} | {Task(trial_id, measure.repeats - 1) for trial_id in last}
    record = StudyRecord(
        name=file.study.name,
        text=file.text,
        overrides=file.overrides,
        repeats=measure.repeats,
        target_ci=measure.target_ci,
        max_repeats=measure.max_repeats if measure.target_ci is not None else None,
        curves=expansion.curves,
        trials=expansion.trials,
        versions=installed_versions({trial.train.engine for trial in expansion.trials.values()}),
        dataset_fingerprints=expansion.fingerprints,
        factory_digests=expansion.factory_digests,
        vitscale=program.identity(),
    )
    context = RunContext(record, measure, launch, file.study.slurm, file.path.parent.absolute(), results)
    return Plan(context, scheduler, expansion, tuple(tasks), frozenset(alone))


def _hosts_of_runs(scheduler: Placement | Submitter, measure: MeasureSection) -> int:
    """Number of hosts for runs side by side; 0 where runs go one after another.

    Raises:
        RequestError: there is only one host, or two names lead to one.
    """
    if measure.parallel_runs in (None, 1) or isinstance(scheduler, Submitter):
        return 0
    hosts = len(scheduler.pool())
    if hosts < 2:
        raise RequestError(
            f"measure.parallel_runs = {measure.parallel_runs}, and there is one host: runs on it would disturb one "
            "another",
            next_step="Name several in launch.hostfile, or run in a Slurm allocation of several nodes; or remove it",
        )
    return hosts


_ALONE = 2
"""Most trials of each kind (within one host, over several) with a run alone in the first round, and in the last."""


def _alone(trials: Mapping[str, Trial], measure: MeasureSection, hosts: int) -> tuple[frozenset[str], frozenset[str]]:
    """The trials whose run in the first round is alone, and those whose run in the last round is.

    These runs have no other beside them, to be compared with the same trial's other runs. Half come first and half
    last, so that steady drift of the machines makes no difference between runs alone and side by side. Trials that take
    so many hosts that no other fits beside them would tell nothing, and are left out.
    """
    first: list[str] = []
    last: list[str] = []
    if measure.repeats > 1:
        order = random.Random(f"{measure.order_seed} alone")  # noqa: S311 - an order, not a secret
        fewest = min((trial.world.nodes for trial in trials.values()), default=0)
        beside = {name: trial.world.nodes for name, trial in trials.items() if trial.world.nodes + fewest <= hosts}
        for group in (
            [name for name, nodes in beside.items() if nodes == 1],
            [name for name, nodes in beside.items() if nodes > 1],
        ):
            each = min(_ALONE, math.ceil(len(group) / 4))
            chosen = order.sample(group, min(2 * each, len(group)))
            first += chosen[:each]
            last += chosen[each:]
    return frozenset(first), frozenset(last)


def begun_study(results: Path, name: str) -> StudyRecord | None:
    """The record of the study `name` in a folder; None where the folder does not hold that study."""
    try:
        held = read_study(results)
    except VitscaleError:
        return None  # `check_folder` reports it before anything is written there
    return held if held is not None and held.name == name else None


def _launcher_of(begun: StudyRecord | None) -> str | None:
    """The launcher of a begun study; None where it has none, or more than one."""
    if begun is None:
        return None
    launchers = {trial.launcher for trial in begun.trials.values() if trial.origin is None}
    return launchers.pop() if len(launchers) == 1 else None


def check_folder(results: Path, record: StudyRecord, *, allow_version_change: bool) -> None:
    """Refuses a results folder unless it is new, empty, or already holds this study.

    Raises:
        StoreError: it is no folder, holds something else or another study, or was begun under other versions or data.
    """
    entries = _entries(results)
    if not entries:
        return
    held = read_study(results)
    if held is None:
        # A driver that died before it wrote study.json leaves its lock, and at most a hidden draft.
        # `vitscale check` may have been there first.
        foreign = [name for name in entries if name not in ("lock", "checks") and not name.startswith(".")]
        if foreign:
            raise StoreError(
                f"{shown(str(results))} is not empty and holds no results of vitscale (it has {shown(foreign[0])}, "
                "but no study.json)",
                next_step="Give a new folder with -o",
            )
        return
    _refuse_another_study(results, held, record)
    changed = [
        f"{name} {held.versions.get(name) or 'absent'} -> {version or 'absent'}"
        for name, version in record.versions.items()
        if name in held.versions and held.versions[name] != version
    ]
    if changed and not allow_version_change and RunIndex(results).finished:
        raise StoreError(
            f"{shown(str(results))} was begun under other versions: {', '.join(changed)}",
            next_step="Install those versions, begin a new folder with -o, or go on under the new ones with "
            "--allow-version-change: the report then leaves runs of the other versions out, or mixes them with "
            "--combine-unlike",
        )


def _entries(results: Path) -> list[str] | None:
    """Names in the folder; None where the folder does not exist."""
    try:
        return sorted(path.name for path in results.iterdir())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # a file, a name too long, a NUL in it, no permission
        reason = (isinstance(error, OSError) and error.strerror) or "no such path"
        raise StoreError(
            f"{shown(str(results))} cannot be a results folder: {reason}", next_step="Give another folder with -o"
        ) from None


def _refuse_another_study(results: Path, held: StudyRecord, record: StudyRecord) -> None:
    common = set(held.trials) & set(record.trials)
    if held.name != record.name or not common:
        causes = changes(held, record) if held.name == record.name else []
        same = f"other trials under the name {shown(held.name)}{in_brackets(causes)}"
        what = shown(held.name) if held.name != record.name else same
        own_folder = f"Give the results of {shown(record.name)} a folder of their own with -o"
        raise StoreError(
            f"{shown(str(results))} holds another study: {what}",
            next_step="; or ".join([own_folder, *ways_to_continue(causes, held, record)]),
        )
    for trial_id in common:
        before, now = held.dataset_fingerprints.get(trial_id), record.dataset_fingerprints.get(trial_id)
        if before != now:
            raise StoreError(
                f"the data of trial {trial_id} has changed since these results were begun "
                f"(fingerprint {before}, now {now})",
                next_step="Restore the data, or begin a new folder with -o",
            )
    _refuse_changed_factory(results, held, record)


def _refuse_changed_factory(results: Path, stored: StudyRecord, record: StudyRecord) -> None:
    """Refuses to go on with another model under the same name: what a factory builds is no part of an identity."""
    changed = [
        trial_id
        for trial_id, digest in record.factory_digests.items()
        if stored.factory_digests.get(trial_id, digest) != digest
    ]
    has_completed = any(outcome.kind == "completed" for _, outcome in RunIndex(results).finished.values())
    if changed and has_completed:
        factory = record.trials[changed[0]].model.factory
        raise StoreError(
            f"the file of model.factory {shown(factory)} has changed since the results in {shown(str(results))} were "
            "begun",
            next_step="Put that file back as it was, or begin a new folder with -o",
        )
