"""The work that remains for a study in a results folder: outstanding runs, runs to skip, and runs to add.

And which begins next on which hosts: one after another, or side by side on separate hosts (`measure.parallel_runs`;
docs/decisions/0031-runs-side-by-side.md has the reasons).

A run is named by its trial and its repeat (from 0), as `RunTask` or as a tuple of the two. Repeat 2 of all trials is a
round.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from vitscale import store
from vitscale.analysis.summaries import summarise
from vitscale.analysis.trials import TargetStatus, target_status
from vitscale.errors import RequestError, StoreError, shown
from vitscale.runner.one_run import (
    RunContext,
    RunTask,
    attempt_number,
    folder_times,
    new_attempt,
    next_attempt,
    unstarted,
)
from vitscale.runner.planning import Plan, begun_study
from vitscale.schedulers import Placement
from vitscale.store import RunIndex, write_outcome
from vitscale.store.results import Outcome, Run, StudyRecord


def outstanding(plan: Plan, index: RunIndex, *, retry_failed: bool) -> list[RunTask]:
    """Return the runs still to be done.

    These are runs without an outcome, runs that failed for a cause outside the trial, and runs that failed for a
    transient cause and have not been tried as often as the study says; with `retry_failed` all that did not complete.
    Runs that `measure.target_ci` added are among them only to be done again; which to add is not known here.
    """
    added_repeats = range(plan.record.repeats, plan.record.max_repeats or 0)
    added = [
        RunTask(trial_id, repeat)
        for trial_id, repeat in sorted(index.finished)
        if trial_id in plan.record.trials and repeat in added_repeats
    ]
    retries = plan.measure.retries
    return [
        task for task in (*plan.tasks, *added) if not _is_done(task, index, retries=retries, retry_failed=retry_failed)
    ]


def _is_done(task: RunTask, index: RunIndex, *, retries: int, retry_failed: bool) -> bool:
    finished = index.finished.get(task)
    if finished is None:
        return False
    folder_name, outcome = finished
    if outcome.kind == "completed":
        return True
    if outcome.external or retry_failed:
        return False
    # A transient failure whose next attempt was interrupted, or never began.
    is_to_be_tried_again = outcome.transient and attempt_number(folder_name) < retries
    return not is_to_be_tried_again


def refuse_damaged(results: Path, index: RunIndex) -> None:
    """Refuse to go on while packs cannot be read: their runs would be done again.

    Raises:
        StoreError: a pack is damaged.
    """
    if index.damaged:
        raise StoreError(
            f"{shown(str(results))} has finished runs that cannot be read: {index.damaged[0]}",
            next_step="Put the file back from a copy; or delete it, and the same command does its runs again",
        )


def done_before(plan: Plan, results: Path) -> frozenset[tuple[str, int]]:
    """Return the runs, as (trial, repeat), that `vitscale run` would not do; empty for another study's folder.

    They have their outcome, or `measure.target_ci` does not add them any more.
    """
    if begun_study(results, plan.record.name) is None:
        return frozenset()
    index = RunIndex(results)
    study = plan.record
    remaining = frozenset(outstanding(plan, index, retry_failed=False))
    most_repeats = study.max_repeats or study.repeats
    all_runs: set[tuple[str, int]] = set()
    for trial_id in study.trials:
        all_runs.update((trial_id, repeat) for repeat in range(most_repeats))
    addable = may_be_added(study, index.finished, remaining, results)
    return frozenset(all_runs - remaining - addable)


def may_be_added(
    study: StudyRecord,
    finished: Mapping[tuple[str, int], tuple[str, Outcome]],
    again: Collection[tuple[str, int]],
    results: Path | None,
) -> frozenset[tuple[str, int]]:
    """Return the runs, as (trial, repeat), that `measure.target_ci` may still add.

    There are none of a trial with a run that failed, or whose runs are enough.

    Args:
        study: the study's record.
        finished: the runs that have an outcome, as in `RunIndex`.
        again: runs that are to be done again, whose outcomes do not count.
        results: the folder, to read which trials' runs are enough; None: none are taken to be.
    """
    if study.target_ci is None or study.max_repeats is None:
        return frozenset()
    done_repeats: dict[str, set[int]] = {trial_id: set() for trial_id in study.trials}
    failed_trials: set[str] = set()
    for (trial_id, repeat), (_, outcome) in finished.items():
        if trial_id not in done_repeats or (trial_id, repeat) in again:
            continue
        done_repeats[trial_id].add(repeat)
        if outcome.kind != "completed":
            failed_trials.add(trial_id)
    open_trials = set(study.trials) - failed_trials
    if results is not None:
        judgeable = {
            trial_id for trial_id in open_trials if study.repeats <= len(done_repeats[trial_id]) < study.max_repeats
        }
        open_trials -= _trials_with_enough_runs(study, judgeable, study.target_ci, study.max_repeats, results)

    addable: set[tuple[str, int]] = set()
    for trial_id in open_trials:
        for repeat in range(study.repeats, study.max_repeats):
            if repeat not in done_repeats[trial_id]:
                addable.add((trial_id, repeat))
    return frozenset(addable)


def _trials_with_enough_runs(
    study: StudyRecord, trial_ids: set[str], target_ci: float, max_repeats: int, results: Path
) -> set[str]:
    """Return those of the trials that have reached their target, or cannot reach it; reads the lines of their runs."""
    runs_by_trial: dict[str, list[Run]] = {}
    if trial_ids:
        for run in store.load(results, only=trial_ids).runs:
            runs_by_trial.setdefault(run.header.trial_id, []).append(run)
    enough = set()
    for trial_id, runs in runs_by_trial.items():
        figures = summarise(trial_id, study.trials[trial_id], runs, combine_unlike=False)
        if target_status(figures, target_ci, max_repeats) != "open":
            enough.add(trial_id)
    return enough


def existing_outcomes(plan: Plan, index: RunIndex, todo: Collection[RunTask]) -> dict[tuple[str, int], Outcome]:
    """Return the outcomes of the study's trials that stand: all but those of runs that are to be done again."""
    again = frozenset(todo)
    outcomes = {}
    for key, (_, outcome) in index.finished.items():
        trial_id, _ = key
        if trial_id in plan.record.trials and key not in again:
            outcomes[key] = outcome
    return outcomes


def skip_unfit(
    context: RunContext,
    todo: list[RunTask],
    unfit: Mapping[str, str],
    index: RunIndex,
    outcomes: dict[tuple[str, int], Outcome],
) -> list[RunTask]:
    """Record each run of an unfit trial as skipped, once, and return the other runs.

    Args:
        context: values that the study's runs share.
        todo: the runs to do.
        unfit: trials to skip -> why.
        index: index of the runs in the folder.
        outcomes: outcomes by (trial, repeat), to which those of the skipped runs are added.
    """
    remaining = []
    for task in todo:
        reason = unfit.get(task.trial_id)
        if reason is None:
            remaining.append(task)
            continue
        _, outcome = index.finished.get(task, (None, None))
        is_skipped_already = outcome is not None and outcome.kind == "skipped" and outcome.external
        if outcome is None or not is_skipped_already:
            # External: the trial itself has not failed, so the next `vitscale run` does it.
            outcome = unstarted("skipped", reason, external=True)
            write_outcome(new_attempt(context, task, next_attempt(index.attempts, task)), outcome)
        outcomes[task] = outcome
    return remaining


class GpuHours:
    """GPU-hours of `measure.max_gpu_hours` that a study has spent: each run's GPUs times its time.

    A run that is tried again within this call counts with its last attempt; a later call counts all attempts. A run
    that was cut off has no outcome, and counts from the first to the last change in its folder.
    """

    def __init__(self, plan: Plan, index: RunIndex, results: Path) -> None:
        self._plan = plan
        self._spent = 0.0
        self._longest: dict[str, float] = {}
        """Trial -> GPU-hours of its longest run."""
        for (trial_id, _), (_, outcome) in index.finished.items():
            self.add(trial_id, outcome)
        for (trial_id, _), attempts in index.earlier.items():
            self._spent += sum(self._hours(trial_id, outcome.wall_seconds) for _, outcome in attempts)
        if plan.measure.max_gpu_hours is not None:
            self._add_runs_that_were_cut_off(index, results)

    def _add_runs_that_were_cut_off(self, index: RunIndex, results: Path) -> None:
        for folder_name, outcome in index.unpacked.items():
            if outcome is None:
                trial_id, _, _ = folder_name.partition("-")
                self._spent += self._hours(trial_id, folder_times(results / "runs" / folder_name).seconds)

    def add(self, trial_id: str, outcome: Outcome) -> None:
        """Add a run that has ended."""
        hours = self._hours(trial_id, outcome.wall_seconds)
        self._spent += hours
        self._longest[trial_id] = max(hours, self._longest.get(trial_id, 0.0))

    def refusal(self, trial_id: str, under_way: Iterable[str] = ()) -> str:
        """Return why no further run of this trial may begin beside those of the trials `under_way`; empty: one may.

        Nobody knows how long the first run of a trial takes: it may begin as long as anything is left.
        """
        limit = self._plan.measure.max_gpu_hours
        if limit is None:
            return ""
        needed = self._longest.get(trial_id, 0.0)
        expected = self._spent + sum(self._longest.get(other, 0.0) for other in under_way)
        if expected < limit and expected + needed <= limit:
            return ""
        next_run = f", and the next run is expected to take {needed:.3g}" if self._spent < limit else ""
        return f"measure.max_gpu_hours = {limit:g}: {self._spent:.3g} GPU-hours are spent{next_run}"

    def _hours(self, trial_id: str, seconds: float) -> float:
        """GPU-hours of a run of this trial; 0 for a trial of an earlier form of the study."""
        trial = self._plan.record.trials.get(trial_id)
        if trial is None:
            return 0.0
        return trial.world.size * seconds / 3600


class _Judgement(NamedTuple):
    """A trial's status against its target, and how many outcomes it had when that was worked out."""

    outcomes: int
    status: TargetStatus


class AddedRuns:
    """The added runs of a study, in rounds of one run per trial; empty without `measure.target_ci`.

    Whether a trial needs another run is decided when its turn comes, from all its recorded runs. So a study that is
    interrupted and begun again goes on where it was, and adds nothing once all targets are reached.
    """

    def __init__(
        self, plan: Plan, results: Path, outcomes: Mapping[tuple[str, int], Outcome], todo: Collection[RunTask] = ()
    ) -> None:
        """`outcomes`: those of finished runs, to which the driver adds. `todo`: the runs that it does before."""
        self._plan = plan
        self._results = results
        self._outcomes = outcomes
        self._todo = frozenset(todo)
        measure = plan.measure
        most_repeats = measure.max_repeats if measure.target_ci is not None else measure.repeats
        self._rounds = range(measure.repeats, most_repeats)
        self._judgements: dict[str, _Judgement] = {}
        """Trial -> its judgement, which is out of date where the trial has more outcomes by now."""
        self._read: dict[str, Run] = {}
        """Runs whose lines were read, by folder."""

    def __iter__(self) -> Iterator[RunTask]:
        if self._rounds:
            self._judge_all_trials()
        for repeat in self._rounds:
            for trial_id in self._order(repeat):
                task = RunTask(trial_id, repeat)
                # A run in `todo` is done again before these, and side by side it may still be under way.
                if task in self._todo or task in self._outcomes:
                    continue
                # Runs under way beside this one may show that more are needed; `wants` asks when they have ended.
                if self._awaits_earlier_run(task) or self._status(trial_id) == "open":
                    yield task
                    self._status(trial_id)  # worked out at once, for `most`

    def wants(self, task: RunTask) -> bool:
        """Whether a run that was given out is still needed, after what its trial has recorded since."""
        return task in self._todo or self._status(task.trial_id) == "open"

    def most(self) -> int:
        """Return how many runs may still be added, as far as is known by now."""
        if not self._rounds:
            return 0
        outcomes_by_trial: dict[str, dict[int, Outcome]] = {trial_id: {} for trial_id in self._plan.record.trials}
        for (trial_id, repeat), outcome in self._outcomes.items():
            outcomes_by_trial[trial_id][repeat] = outcome
        return sum(self._most_of(trial_id, outcomes) for trial_id, outcomes in outcomes_by_trial.items())

    def _judge_all_trials(self) -> None:
        """Read all runs at once, and work out the status of every trial."""
        self._read = {run.header.folder: run for run in store.load(self._results).runs}
        for trial_id in self._plan.record.trials:
            self._status(trial_id, [run for run in self._read.values() if run.header.trial_id == trial_id])

    def _order(self, repeat: int) -> list[str]:
        """Trials in a random order for each round, so that drift favours none; seeded, to be the same when resumed."""
        order = list(self._plan.record.trials)
        random.Random(f"{self._plan.measure.order_seed} {repeat}").shuffle(order)  # noqa: S311 - an order, not a secret
        return order

    def _awaits_earlier_run(self, task: RunTask) -> bool:
        """Whether a run of an earlier round of this trial is done again by the driver, and has not ended yet."""
        earlier_runs = [RunTask(task.trial_id, repeat) for repeat in range(task.repeat)]
        return any(run in self._todo and run not in self._outcomes for run in earlier_runs)

    def _most_of(self, trial_id: str, outcomes: Mapping[int, Outcome]) -> int:
        """Return how many runs of this trial may still be added. Args: outcomes: those of the trial, by repeat."""
        judgement = self._judgements.get(trial_id)
        is_current = judgement is not None and judgement.outcomes == len(outcomes)
        if judgement is not None and is_current and judgement.status != "open":
            return 0
        if any(outcome.kind != "completed" for outcome in outcomes.values()):
            return 0
        return sum(
            1 for repeat in self._rounds if repeat not in outcomes and RunTask(trial_id, repeat) not in self._todo
        )

    def _status(self, trial_id: str, trial_runs: list[Run] | None = None) -> TargetStatus:
        """Return a trial's status against its target, worked out anew where it has more outcomes than at the last time.

        `trial_runs`: its runs; None: those read before, and any that have ended since.
        """
        outcomes = sum(outcome_trial_id == trial_id for outcome_trial_id, _ in self._outcomes)
        judgement = self._judgements.get(trial_id)
        if judgement is None or judgement.outcomes != outcomes:
            if trial_runs is None:
                trial_runs = list(store.load(self._results, only={trial_id}, known=self._read).runs)
                self._read |= {run.header.folder: run for run in trial_runs}
            judgement = _Judgement(outcomes, self._status_from(trial_id, trial_runs))
            self._judgements[trial_id] = judgement
        return judgement.status

    def _status_from(self, trial_id: str, trial_runs: list[Run]) -> TargetStatus:
        figures = summarise(trial_id, self._plan.record.trials[trial_id], trial_runs, combine_unlike=False)
        target_ci = self._plan.measure.target_ci
        if target_ci is None:
            return "stopped"
        return target_status(figures, target_ci, self._plan.measure.max_repeats)


class NextRun(NamedTuple):
    """A run that may begin now, and its hosts."""

    task: RunTask
    placement: Placement


class Lineup:
    """The outstanding runs in their order, and the hosts of those under way.

    Neither a host nor a trial has two runs at a time: what one run of a trial shows (it ran out of memory, or its time
    is known closely enough) decides on the next. Later runs of the same round may overtake a run that does not fit yet,
    but no more of them than there are hosts. Runs that must be alone come first or last in their round (`planning`).
    """

    def __init__(self, plan: Plan, placement: Placement, todo: Iterable[RunTask], added: AddedRuns) -> None:
        """`todo`: the runs to do first; those of `added` come after them."""
        self.most = plan.measure.parallel_runs or 1
        """Most runs at a time."""
        self.under_way: set[RunTask] = set()
        self._plan = plan
        self._placement = placement
        self._hosts = placement.pool() if self.most > 1 else ()
        """Hosts to be divided among runs; empty where runs go one after another, each on the whole placement."""
        self._position = {host.name: position for position, host in enumerate(self._hosts)}
        self._added = added
        self._coming: Iterator[RunTask] = chain(todo, added)
        """Runs that were not looked at yet."""
        self._waiting: list[RunTask] = []
        """Runs from `_coming` that could not begin when they were looked at."""
        self._overtaken: Counter[RunTask] = Counter()
        """Run that waits -> how many later ones have begun before it."""
        self._busy_hosts: dict[RunTask, frozenset[str]] = {}
        """Run under way -> names of its hosts."""
        self._failures: Counter[str] = Counter()
        """Host -> how many runs failed because of it."""

    def next(self) -> NextRun | None:
        """Return the run that may begin now, and where; None where another must end first, or none is left."""
        if len(self.under_way) >= self.most or self.under_way & self._plan.alone:
            return None
        position = 0
        while position < len(self._waiting) or self._add_coming():
            task = self._waiting[position]
            is_of_later_round = task.repeat != self._waiting[0].repeat
            if is_of_later_round:
                return None
            if not self._must_wait(task):
                if not self._added.wants(task):
                    del self._waiting[position]
                    continue
                placement = self._free_placement(task)
                if placement is not None:
                    return NextRun(task, placement)
            if self._overtaken[task] >= len(self._hosts):
                return None
            position += 1
        return None

    def begin(self, task: RunTask, placement: Placement) -> None:
        """Note that a run from `next` begins on the hosts of its placement."""
        self._overtaken.update(self._waiting[: self._waiting.index(task)])
        self._waiting.remove(task)
        self.under_way.add(task)
        hosts = placement.pool() if self._hosts else ()
        self._busy_hosts[task] = frozenset(host.name for host in hosts)

    def end(self, task: RunTask, outcome: Outcome) -> None:
        """Note that a run has ended and free its hosts. Hosts that failed are given again only as a last choice."""
        self.under_way.remove(task)
        hosts = self._busy_hosts.pop(task)
        if outcome.transient and outcome.host is not None and outcome.host in hosts:
            self._failures[outcome.host] += 1

    def _add_coming(self) -> bool:
        """Move one more coming run to those that wait; False where there is none."""
        task = next(self._coming, None)
        if task is None:
            return False
        self._waiting.append(task)
        return True

    def _must_wait(self, task: RunTask) -> bool:
        """Whether a run must wait, whichever hosts are free."""
        if task in self._plan.alone and self.under_way:
            return True
        return any(task.trial_id == other.trial_id for other in self.under_way)

    def _free_placement(self, task: RunTask) -> Placement | None:
        """Return a placement on free hosts for this run alone; None where too few are free.

        Hosts are taken in the hostfile's order from a random one on, so that no trial always gets the same host, and
        runs that are alone do not always get the first.

        Raises:
            RequestError: all hosts are free, and are too few or too small.
        """
        if not self._hosts:
            return self._placement
        busy = frozenset(chain.from_iterable(self._busy_hosts.values()))
        free = [host for host in self._hosts if host.name not in busy]
        seed = f"{self._plan.measure.order_seed} {task.trial_id} {task.repeat}"
        start = random.Random(seed).randrange(len(free) or 1)  # noqa: S311 - an order, not a secret
        candidates = sorted(free[start:] + free[:start], key=lambda host: self._failures[host.name])
        try:
            hosts = self._placement.limited_to(candidates).hosts(self._plan.record.trials[task.trial_id].world)
        except RequestError:
            if not busy:
                raise
            return None
        # In their own order: srun numbers ranks by it, whatever the order of its --nodelist (srun(1), --nodefile), and
        # all other ranks are told rank 0's host.
        return self._placement.limited_to(sorted(hosts, key=lambda host: self._position[host.name]))
