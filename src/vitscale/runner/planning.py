"""A study's plan, worked out before anything starts: trials, their order, the state of a results folder."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from vitscale import sources
from vitscale.base import program
from vitscale.engines.packages import installed_versions
from vitscale.errors import RequestError, StoreError, VitscaleError, shown
from vitscale.launchers import LOCAL, Spawn, find_launcher
from vitscale.machine.hardware import Machine
from vitscale.runner.changed_study import changes, changes_in_brackets, threads_of, ways_to_continue
from vitscale.runner.one_run import RANK_MODULE, RunContext, launch_plan
from vitscale.schedulers import Placement, Submitter, scheduler_for
from vitscale.store import RunIndex, read_study
from vitscale.store.reading import RunKey
from vitscale.store.results import Outcome, StudyRecord
from vitscale.study import user_model
from vitscale.study.cards import find_cards
from vitscale.study.expand import Expansion, expand
from vitscale.study.file import FEWEST_FOR_TARGET, Overlay, StudyFile
from vitscale.study.model_checks import check_blocks
from vitscale.study.sections import AUTO, MeasureSection
from vitscale.trial.model_card import ModelCard
from vitscale.trial.trial import DataSpec, DeviceName, Trial, World, samples_used

_ANY_RUN_FOLDER = Path("/RESULTS/runs/TRIAL")
"""Stands for a run's folder where only the form of a command matters."""


@dataclass(frozen=True)
class Plan:
    """A study, ready to run."""

    context: RunContext
    scheduler: Placement | Submitter
    expansion: Expansion
    tasks: tuple[RunKey, ...]
    """All runs of the study in their random order, done or not, without those that `measure.target_ci` may add."""
    alone: frozenset[RunKey] = frozenset()
    """Runs that have no other run beside them in a study with runs side by side (`_trials_alone`)."""

    @property
    def record(self) -> StudyRecord:
        """The study's record, as in study.json."""
        return self.context.record

    @property
    def measure(self) -> MeasureSection:
        """The study's [measure] section."""
        return self.context.measure

    def in_folder(self, results: Path) -> RunContext:
        """Return the context that all runs share, for this results folder."""
        return replace(self.context, results=results, interrupted=threading.Event())

    def steps_of(self, trial_id: str) -> StepCounts:
        """Return the optimizer steps of a trial."""
        trial = self.record.trials[trial_id]
        per_epoch = trial.steps_per_epoch(samples_used(self.expansion.train_samples[trial_id], trial.data.fraction))
        if trial.window.steps is not None:
            return StepCounts(per_epoch, trial.window.steps + trial.window.warmup_steps)
        return StepCounts(per_epoch, per_epoch * (trial.train.epochs or 0))

    @property
    def fewest_repeats(self) -> int:
        """Fewest runs of a trial, unless one fails: `measure.target_ci` adds some to every trial."""
        measure = self.measure
        return measure.repeats if measure.target_ci is None else max(measure.repeats, FEWEST_FOR_TARGET)

    @property
    def certain_runs(self) -> tuple[RunKey, ...]:
        """The runs that are made unless one fails: the fewest of every trial."""
        runs: list[RunKey] = []
        for trial_id in self.record.trials:
            runs += [RunKey(trial_id, repeat) for repeat in range(self.fewest_repeats)]
        return tuple(runs)

    @property
    def most_runs(self) -> int:
        """Most runs there can be, with those that `measure.target_ci` may add."""
        measure = self.measure
        most_repeats = measure.repeats if measure.target_ci is None else measure.max_repeats
        return len(self.record.trials) * most_repeats


class StepCounts(NamedTuple):
    """Optimizer steps of a trial."""

    per_epoch: int
    per_run: int
    """With those of warm-up."""


@dataclass(frozen=True)
class Report:
    """The runs that one call did, and the study's state."""

    done_now: int
    outcomes: dict[RunKey, Outcome]
    """Outcomes of all the study's runs that have one, by (trial, repeat)."""
    ended: str = ""
    """Why the study ended before all of its runs were done; empty where nothing ended it."""

    @property
    def failures(self) -> dict[RunKey, Outcome]:
        """The runs that did not complete, except those skipped on request."""
        return {
            key: outcome
            for key, outcome in self.outcomes.items()
            if outcome.kind != "completed" and key not in self.skipped
        }

    @property
    def skipped(self) -> dict[RunKey, Outcome]:
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
    *,
    counts_models: bool = True,
) -> Plan:
    """Read a study and check it against its hosts and data; starts no rank and writes no results.

    Models that no formula counts are traced by a process of its own, and their cards kept in the user's cache; not
    where `counts_models` is false, as for commands alone.

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
    for launcher in file.launchers:
        if launcher != AUTO:
            find_launcher(launcher)
    scheduler = scheduler_for(file.study, file.path)
    measure = file.study.measure
    if isinstance(scheduler, Submitter) and measure.max_gpu_hours is not None:
        raise RequestError(
            f"measure.max_gpu_hours is kept by the driver, and jobs of {scheduler.facts.title} run without one",
            next_step="Limit them by slurm.time; or run inside an allocation "
            f"({scheduler.facts.allocation_command}), where there is a driver",
        )
    results = results or Path("results") / file.study.name
    begun = begun_study(results, file.study.name)
    expansion = _expanded_study(file, machine or scheduler.machine(), scheduler, check_data, begun)
    host_count = _hosts_side_by_side(scheduler, measure)
    _refuse_impossible_launches(scheduler, file, expansion.trials)
    alone = _trials_alone(expansion.trials, measure, host_count)
    context = RunContext(
        _study_record(file, expansion, counts_models=counts_models),
        measure,
        file.study.launch,
        file.study.slurm,
        folder=file.path.parent.absolute(),
        results=results,
    )
    return Plan(
        context,
        scheduler,
        expansion,
        tasks=tuple(_tasks_in_order(list(expansion.trials), measure, alone)),
        alone=alone.runs(measure),
    )


def _study_record(file: StudyFile, expansion: Expansion, *, counts_models: bool) -> StudyRecord:
    """Return the record of a study, as it is written to study.json.

    With `counts_models` those models are traced that no formula counts.

    Raises:
        RequestError: the study asks for what works block by block of a model without blocks.
    """
    measure = file.study.measure
    cards: tuple[ModelCard, ...] = ()
    if counts_models:
        cards = find_cards(expansion.trials, expansion.factory_digests, user_model.user_folders(file.path))
    if cards:  # whether a traced model has blocks is known only now
        for trial in expansion.trials.values():
            check_blocks(trial)
    return StudyRecord(
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
        cards=cards,
        vitscale=program.identity(),
    )


def _expanded_study(
    file: StudyFile,
    host: Machine,
    scheduler: Placement | Submitter,
    check_data: Callable[[DataSpec], sources.Summary],
    begun: StudyRecord | None,
) -> Expansion:
    """Return the study's trials for hosts like this one.

    A study that was `begun` keeps its launcher, and its threads where each rank's share of the cores is as large.
    """
    launcher = _only_launcher_of(begun) or scheduler.default_launcher
    if launcher == LOCAL and scheduler.default_launcher != LOCAL:
        launcher = scheduler.default_launcher  # the study was begun on one machine, and now has hosts
    slots = scheduler.slots()
    threads = threads_of(begun)
    expansion = expand(file, host, check_data, slots, launcher, threads)
    if begun is None or not host.node_cores or begun.trials.keys() & expansion.trials.keys():
        return expansion
    # Default threads once came from logical cores: a folder begun that way goes on that way.
    earlier_form = expand(file, replace(host, node_cores=()), check_data, slots, launcher, threads)
    return earlier_form if begun.trials.keys() & earlier_form.trials.keys() else expansion


def _refuse_impossible_launches(scheduler: Placement | Submitter, file: StudyFile, trials: Mapping[str, Trial]) -> None:
    """Refuse trials that their launcher cannot start, or whose ranks it puts on other hosts than their speeds are for.

    Raises:
        RequestError: a trial cannot be started as it is planned.
    """
    spawns: dict[tuple[str, World, DeviceName], Spawn] = {}
    for trial in trials.values():
        key = (trial.launcher, trial.world, trial.train.device)
        if key not in spawns:
            spawns[key] = launch_plan(
                scheduler,
                file.study.launch,
                trial.launcher,
                trial.world,
                _ANY_RUN_FOLDER,
                RANK_MODULE,
                device=trial.train.device,
            )
        spawn = spawns[key]
        if trial.train.micro_batches is not None and spawn.hosts != scheduler.hosts(trial.world):
            first_host = spawn.hosts[0].name
            raise RequestError(
                f"train.rank_speeds are in the order of the hostfile, and {trial.launcher} gives the first ranks to "
                f"{shown(first_host)}, this machine",
                next_step=f"Begin the hostfile with {first_host}, and the speeds with those of its ranks",
            )


def _tasks_in_order(trial_ids: list[str], measure: MeasureSection, alone: _TrialsAlone) -> list[RunKey]:
    """Return all runs of a study in their order: rounds of one run of each trial, each round in a random order.

    The order is random, so that drift favours no trial, and seeded, so that resumed studies keep it. Runs go in rounds,
    so that drift favours no repeat, and one process can fork the ranks of a whole round. Runs that are alone (no
    other run goes beside them) begin the first round, and end the last one.
    """
    tasks: list[RunKey] = []
    order = random.Random(measure.order_seed)  # noqa: S311 - an order, not a secret
    last_repeat = measure.repeats - 1
    for repeat in range(measure.repeats):
        round_ids = order.sample(trial_ids, len(trial_ids))
        if repeat == 0:
            round_ids.sort(key=lambda trial_id: trial_id not in alone.first_round)  # False, which is alone, goes first
        elif repeat == last_repeat:
            round_ids.sort(key=lambda trial_id: trial_id in alone.last_round)
        tasks += [RunKey(trial_id, repeat) for trial_id in round_ids]
    return tasks


def _hosts_side_by_side(scheduler: Placement | Submitter, measure: MeasureSection) -> int:
    """Return the number of hosts on which runs go side by side; 0 where runs go one after another.

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
            next_step="Name several in launch.hostfile, or run in a job of several nodes; or remove it",
        )
    return hosts


_MOST_TRIALS_ALONE = 2
"""Most trials of each kind (within one host, over several) with a run alone in the first round, and in the last."""


class _TrialsAlone(NamedTuple):
    """The trials with a run that is alone, that is with no other run beside it on other hosts."""

    first_round: frozenset[str]
    """Those whose run in the first round is alone."""
    last_round: frozenset[str]

    def runs(self, measure: MeasureSection) -> frozenset[RunKey]:
        """Return the runs that are alone."""
        first = {RunKey(trial_id, 0) for trial_id in self.first_round}
        last = {RunKey(trial_id, measure.repeats - 1) for trial_id in self.last_round}
        return frozenset(first | last)


def _trials_alone(trials: Mapping[str, Trial], measure: MeasureSection, host_count: int) -> _TrialsAlone:
    """Choose the trials whose run in the first round is alone, and those whose run in the last round is.

    Such a run shows, beside the same trial's other runs, whether runs side by side disturb one another. Half of them
    come first and half last, so that steady drift of the machines makes no difference between the two kinds. Trials
    that take so many hosts that no other fits beside them show nothing, and are left out.

    Args:
        trials: all trials, by id.
        measure: the study's section.
        host_count: hosts for runs side by side; 0: there are none, and no run counts as alone.
    """
    if measure.repeats <= 1:
        return _TrialsAlone(frozenset(), frozenset())
    nodes_by_trial = {trial_id: trial.world.nodes for trial_id, trial in trials.items()}
    fewest_nodes = min(nodes_by_trial.values(), default=0)
    candidates = [trial_id for trial_id, nodes in nodes_by_trial.items() if nodes + fewest_nodes <= host_count]
    within_host = [trial_id for trial_id in candidates if nodes_by_trial[trial_id] == 1]
    across_hosts = [trial_id for trial_id in candidates if nodes_by_trial[trial_id] > 1]
    order = random.Random(f"{measure.order_seed} alone")  # noqa: S311 - an order, not a secret
    first_round: list[str] = []
    last_round: list[str] = []
    for trial_ids in (within_host, across_hosts):
        per_round = min(_MOST_TRIALS_ALONE, math.ceil(len(trial_ids) / 4))
        selection = order.sample(trial_ids, min(2 * per_round, len(trial_ids)))
        first_round += selection[:per_round]
        last_round += selection[per_round:]
    return _TrialsAlone(frozenset(first_round), frozenset(last_round))


def begun_study(results: Path, name: str) -> StudyRecord | None:
    """Return the record of the study `name` in a folder; None where the folder does not hold that study."""
    try:
        stored = read_study(results)
    except VitscaleError:
        return None  # `check_folder` reports it before anything is written there
    if stored is None or stored.name != name:
        return None
    return stored


def _only_launcher_of(begun: StudyRecord | None) -> str | None:
    """Return the one launcher of a begun study; None where no study is begun, or its trials have several.

    Imported trials do not count: nothing here has launched them.
    """
    if begun is None:
        return None
    launchers = {trial.launcher for trial in begun.trials.values() if trial.origin is None}
    return launchers.pop() if len(launchers) == 1 else None


def check_folder(results: Path, record: StudyRecord, *, allow_version_change: bool) -> None:
    """Refuse a results folder unless it is new, empty, or already holds this study.

    Raises:
        StoreError: it is no folder, holds something else or another study, or was begun under other versions or data.
    """
    entries = _entry_names(results)
    if not entries:
        return
    stored = read_study(results)
    if stored is None:
        _refuse_foreign_entries(results, entries)
        return
    _refuse_another_study(results, stored, record)
    if not allow_version_change:
        _refuse_changed_versions(results, stored, record)


def _refuse_foreign_entries(results: Path, entries: list[str]) -> None:
    """Refuse a folder without a study that has anything but what vitscale leaves there before it writes study.json.

    A driver that died before that leaves its lock, and at most a hidden draft. `vitscale check` may have been there
    first.
    """
    foreign = [name for name in entries if name not in ("lock", "checks") and not name.startswith(".")]
    if foreign:
        raise StoreError(
            f"{shown(str(results))} is not empty and holds no results of vitscale (it has {shown(foreign[0])}, "
            "but no study.json)",
            next_step="Give a new folder with -o",
        )


def _refuse_changed_versions(results: Path, stored: StudyRecord, record: StudyRecord) -> None:
    """Refuse a folder with finished runs of other versions of packages than the ones installed now."""
    changed = []
    for name, version in record.versions.items():
        stored_version = stored.versions.get(name)
        if name in stored.versions and stored_version != version:
            changed.append(f"{name} {stored_version or 'absent'} -> {version or 'absent'}")
    if changed and RunIndex(results).finished:
        raise StoreError(
            f"{shown(str(results))} was begun under other versions: {', '.join(changed)}",
            next_step="Install those versions, begin a new folder with -o, or go on under the new ones with "
            "--allow-version-change: the report then leaves runs of the other versions out, or mixes them with "
            "--combine-unlike",
        )


def _entry_names(results: Path) -> list[str] | None:
    """Return the names in the folder; None where the folder does not exist.

    Raises:
        StoreError: it is no folder, or cannot be read.
    """
    try:
        return sorted(path.name for path in results.iterdir())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # a file, a name too long, a NUL in it, no permission
        reason = (isinstance(error, OSError) and error.strerror) or "no such path"
        raise StoreError(
            f"{shown(str(results))} cannot be a results folder: {reason}", next_step="Give another folder with -o"
        ) from None


def _refuse_another_study(results: Path, stored: StudyRecord, record: StudyRecord) -> None:
    """Refuse a folder whose study has another name, none of these trials, or other data or models."""
    common_ids = set(stored.trials) & set(record.trials)
    if stored.name != record.name:
        raise _another_study_error(results, shown(stored.name), record, ways=ways_to_continue([], stored, record))
    if not common_ids:
        causes = changes(stored, record)
        description = f"other trials under the name {shown(stored.name)}{changes_in_brackets(causes)}"
        raise _another_study_error(results, description, record, ways=ways_to_continue(causes, stored, record))
    for trial_id in common_ids:
        stored_fingerprint = stored.dataset_fingerprints.get(trial_id)
        fingerprint = record.dataset_fingerprints.get(trial_id)
        if stored_fingerprint != fingerprint:
            raise StoreError(
                f"the data of trial {trial_id} has changed since these results were begun "
                f"(fingerprint {stored_fingerprint}, now {fingerprint})",
                next_step="Restore the data, or begin a new folder with -o",
            )
    _refuse_changed_factory(results, stored, record)


def _another_study_error(results: Path, description: str, record: StudyRecord, *, ways: list[str]) -> StoreError:
    """Return the error for a folder that holds another study. Args: ways: clauses on how that one can go on."""
    own_folder = f"Give the results of {shown(record.name)} a folder of their own with -o"
    return StoreError(
        f"{shown(str(results))} holds another study: {description}", next_step="; or ".join([own_folder, *ways])
    )


def _refuse_changed_factory(results: Path, stored: StudyRecord, record: StudyRecord) -> None:
    """Refuse to go on with another model under the same name: what a factory builds is no part of an identity."""
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
