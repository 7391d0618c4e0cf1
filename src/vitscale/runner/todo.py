"""What is still to do for a study in a results folder: outstanding runs, runs to skip, and runs to add.

And which begins next on which hosts: one after another, or side by side on separate hosts (`measure.parallel_runs`;
docs/decisions/0031-runs-side-by-side.md has the reasons).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

from vitscale import store
from vitscale.analysis.summaries import summarise
from vitscale.analysis.trials import TargetStatus, target_status
from vitscale.errors import RequestError, StoreError, shown
from vitscale.runner.one_run import RunContext, RunTask, new_attempt, touched, unstarted
from vitscale.runner.planning import Plan, begun_study
from vitscale.schedulers import Placement
from vitscale.store import RunIndex, write_outcome
from vitscale.store.results import Outcome, Run, StudyRecord


def outstanding(plan: Plan, index: RunIndex, *, retry_failed: bool) -> list[RunTask]:
    """The runs still to be done.

    These are runs without an outcome, runs that failed for a cause outside the trial, and runs that failed for a
    transient cause and have not been tried as often as the study says; with `retry_failed` all that did not complete.
    Runs that `measure.target_ci` added are among them only to be done again; which to add is not known here.
    """

    def done(task: RunTask) -> bool:
        finished = index.finished.get((task.trial_id, task.repeat))
        if finished is None:
            return False
        name, outcome = finished
        # A transient failure whose next attempt was interrupted, or never began.
        untried = outcome.transient and int(name.rpartition("-a")[2]) < plan.measure.retries
        return outcome.kind == "completed" or not (outcome.external or retry_failed or untried)

    added = [
        RunTask(trial_id, repeat)
        for trial_id, repeat in sorted(index.finished)
        if trial_id in plan.record.trials and plan.record.repeats <= repeat < (plan.record.max_repeats or 0)
    ]
    return [task for task in (*plan.tasks, *added) if not done(task)]


def refuse_damaged(results: Path, index: RunIndex) -> None:
    """Refuses to go on while packs cannot be read: their runs would be done again.

    Raises:
        StoreError: a pack is damaged.
    """
    if index.damaged:
        raise StoreError(
            f"{shown(str(results))} has finished runs that cannot be read: {index.damaged[0]}",
            next_step="Put the file back from a copy; or delete it, and the same command does its runs again",
        )


def done_before(plan: Plan, results: Path) -> frozenset[tuple[str, int]]:
    """The runs, as (trial, repeat), that `vitscale run` would not do; empty for another study's folder.

    They have their outcome, or `measure.target_ci` does not add them any more.
    """
    if begun_study(results, plan.record.name) is None:
        return frozenset()
    index, study = RunIndex(results), plan.record
    left = {(task.trial_id, task.repeat) for task in outstanding(plan, index, retry_failed=False)}
    most = range(study.max_repeats or study.repeats)
    every = frozenset((trial_id, repeat) for trial_id in study.trials for repeat in most)
    return every - left - may_be_added(study, index.finished, left, results)


def may_be_added(
    study: StudyRecord,
    finished: Mapping[tuple[str, int], tuple[str, Outcome]],
    again: Collection[tuple[str, int]],
    results: Path | None,
) -> frozenset[tuple[str, int]]:
    """The runs, as (trial, repeat), that `measure.target_ci` may still add.

    There are none of a trial with a run that failed, or whose runs are enough.

    Args:
        study: the study's record.
        finished: the runs that have an outcome, as in `RunIndex`.
        again: runs that are to be done again, whose outcomes do not count.
        results: the folder, to read which trials' runs are enough; None: none are taken to be.
    """
    if study.target_ci is None or study.max_repeats is None:
        return frozenset()
    kinds: dict[str, dict[int, str]] = {trial_id: {} for trial_id in study.trials}
    for (trial_id, repeat), (_, outcome) in finished.items():
        if trial_id in kinds and (trial_id, repeat) not in again:
            kinds[trial_id][repeat] = outcome.kind
    wanting = {trial_id: own for trial_id, own in kinds.items() if set(own.values()) <= {"completed"}}
    begun = {trial_id for trial_id, own in wanting.items() if study.repeats <= len(own) < study.max_repeats}
    by_trial: dict[str, list[Run]] = {}
    for run in store.load(results, only=begun).runs if begun and results is not None else ():
        by_trial.setdefault(run.header.trial_id, []).append(run)
    for trial_id, own_runs in by_trial.items():
        figures = summarise(trial_id, study.trials[trial_id], own_runs, combine_unlike=False)
        if target_status(figures, study.target_ci, study.max_repeats) != "open":
            del wanting[trial_id]
    rounds = range(study.repeats, study.max_repeats)
    return frozenset((trial_id, repeat) for trial_id, own in wanting.items() for repeat in rounds if repeat not in own)


def existing_outcomes(plan: Plan, index: RunIndex, todo: Collection[RunTask]) -> dict[tuple[str, int], Outcome]:
    """The outcomes of the study's trials that stand: all but those of runs that are to be done again."""
    again = frozenset(todo)
    return {
        key: outcome
        for key, (_, outcome) in index.finished.items()
        if key[0] in plan.record.trials and RunTask(*key) not in again
    }


def skip_unfit(
    context: RunContext,
    todo: list[RunTask],
    unfit: Mapping[str, str],
    index: RunIndex,
    outcomes: dict[tuple[str, int], Outcome],
) -> list[RunTask]:
    """Records each run of an unfit trial as skipped, once, and returns the others.

    Args:
        context: what the study's runs share.
        todo: the runs to do.
        unfit: trials to skip -> why.
        index: index of the runs in the folder.
        outcomes: outcomes by (trial, repeat), to which those of the skipped runs are added.
    """
    kept = []
    for task in todo:
        if (reason := unfit.get(task.trial_id)) is None:
            kept.append(task)
            continue
        key = (task.trial_id, task.repeat)
        _, before = index.finished.get(key, (None, None))
        if before is None or not (before.kind == "skipped" and before.external):
            # External: the trial itself has not failed, so the next `vitscale run` does it.
            before = unstarted("skipped", reason, external=True)
            attempt = index.attempts.get(key, -1) + 1
            write_outcome(new_attempt(context, task, attempt), before)
        outcomes[key] = before
    return kept


class GpuHours:
    """How much of `measure.max_gpu_hours` a study has spent: each run's GPUs times its time.

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
        for (trial_id, _), tries in index.earlier.items():
            self._spent += sum(self._hours(trial_id, outcome.wall_seconds) for _, outcome in tries)
        limited = plan.measure.max_gpu_hours is not None
        for name in (name for name, outcome in index.unpacked.items() if limited and outcome is None):
            self._spent += self._hours(name.partition("-")[0], touched(results / "runs" / name)[1])

    def add(self, trial_id: str, outcome: Outcome) -> None:
        """Adds a run that has ended."""
        hours = self._hours(trial_id, outcome.wall_seconds)
        self._spent += hours
        self._longest[trial_id] = max(hours, self._longest.get(trial_id, 0.0))

    def refusal(self, trial_id: str, under_way: Iterable[str] = ()) -> str:
        """Why no further run of this trial may begin beside those of the trials `under_way`; empty where one may.

        Nobody knows how long the first run of a trial takes: it may begin as long as anything is left.
        """
        limit, needs = self._plan.measure.max_gpu_hours, self._longest.get(trial_id, 0.0)
        expected = self._spent + sum(self._longest.get(other, 0.0) for other in under_way)
        if limit is None or (expected < limit and expected + needs <= limit):
            return ""
        wanted = f", and the next run is expected to take {needs:.3g}" if self._spent < limit else ""
        return f"measure.max_gpu_hours = {limit:g}: {self._spent:.3g} GPU-hours are spent{wanted}"

    def _hours(self, trial_id: str, seconds: float) -> float:
        trial = self._plan.record.trials.get(trial_id)  # None for a trial of an earlier form of the study
        return 0.0 if trial is None else trial.world.size * seconds / 3600


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
        self._rounds = range(measure.repeats, measure.max_repeats if measure.target_ci is not None else measure.repeats)
        self._stood: dict[str, tuple[int, TargetStatus]] = {}
        self._read: dict[str, Run] = {}

    def __iter__(self) -> Iterator[RunTask]:
        if self._rounds:
            self._read = {run.header.folder: run for run in store.load(self._results).runs}
            for trial_id in self._plan.record.trials:
                self._status(trial_id, [run for run in self._read.values() if run.header.trial_id == trial_id])
        for repeat in self._rounds:
            for trial_id in self._order(repeat):
                if RunTask(trial_id, repeat) in self._todo:
                    continue  # done again before these, and side by side it may still be under way
                due = any(
                    RunTask(trial_id, before) in self._todo and (trial_id, before) not in self._outcomes
                    for before in range(repeat)
                )
                # Runs under way beside this one may show that more are needed; `wants` asks when they have ended.
                if (trial_id, repeat) not in self._outcomes and (due or self._status(trial_id) == "open"):
                    yield RunTask(trial_id, repeat)
                    self._status(trial_id)  # worked out at once, for `most`

    def wants(self, task: RunTask) -> bool:
        """Whether a run that was given out is still needed, after what its trial has recorded since."""
        return task in self._todo or self._status(task.trial_id) == "open"

    def most(self) -> int:
        """How many runs may still be added, as far as is known by now."""
        if not self._rounds:
            return 0
        own: dict[str, dict[int, Outcome]] = {trial_id: {} for trial_id in self._plan.record.trials}
        for (trial_id, repeat), outcome in self._outcomes.items():
            own[trial_id][repeat] = outcome
        return sum(self._most_of(trial_id, outcomes) for trial_id, outcomes in own.items())

    def _order(self, repeat: int) -> list[str]:
        """Trials in a random order for each round, so that drift favours none; seeded, to be the same when resumed."""
        order = list(self._plan.record.trials)
        random.Random(f"{self._plan.measure.order_seed} {repeat}").shuffle(order)  # noqa: S311 - an order, not a secret
        return order

    def _most_of(self, trial_id: str, own: Mapping[int, Outcome]) -> int:
        runs, known = self._stood.get(trial_id, (0, "open"))
        decided = runs == len(own) and known != "open"
        if decided or any(outcome.kind != "completed" for outcome in own.values()):
            return 0
        return sum(1 for repeat in self._rounds if repeat not in own and RunTask(trial_id, repeat) not in self._todo)

    def _status(self, trial_id: str, own: list[Run] | None = None) -> TargetStatus:
        """A trial's status against its target. `own`: its runs; None: those read before, and any since."""
        runs = sum(trial == trial_id for trial, _ in self._outcomes)
        known = self._stood.get(trial_id)
        if known is None or known[0] != runs:
            trial = self._plan.record.trials[trial_id]
            if own is None:
                own = list(store.load(self._results, only={trial_id}, known=self._read).runs)
                self._read |= {run.header.folder: run for run in own}
            figures = summarise(trial_id, trial, own, combine_unlike=False)
            target = self._plan.measure.target_ci
            now = target_status(figures, target, self._plan.measure.max_repeats) if target is not None else "stopped"
            self._stood[trial_id] = known = (runs, now)
        return known[1]


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
        self._order = {host.name: number for number, host in enumerate(self._hosts)}
        self._added = added
        self._coming: Iterator[RunTask] = chain(todo, added)
        self._waiting: list[RunTask] = []
        self._overtaken: Counter[RunTask] = Counter()
        self._given: dict[RunTask, frozenset[str]] = {}
        self._failed: Counter[str] = Counter()

    def next(self) -> tuple[RunTask, Placement] | None:
        """The run that may begin now, and where; None where another must end first, or none is left."""
        if len(self.under_way) >= self.most or self.under_way & self._plan.alone:
            return None
        index = 0
        while index < len(self._waiting) or self._another():
            task = self._waiting[index]
            if task.repeat != self._waiting[0].repeat:
                return None
            if not self._blocked(task):
                if not self._added.wants(task):
                    del self._waiting[index]
                    continue
                if (where := self._where(task)) is not None:
                    return task, where
            if self._overtaken[task] >= len(self._hosts):
                return None
            index += 1
        return None

    def begin(self, task: RunTask, where: Placement) -> None:
        """Notes that a run from `next` begins on the hosts of its placement."""
        self._overtaken.update(self._waiting[: self._waiting.index(task)])
        self._waiting.remove(task)
        self.under_way.add(task)
        self._given[task] = frozenset(host.name for host in where.pool()) if self._hosts else frozenset()

    def end(self, task: RunTask, outcome: Outcome) -> None:
        """Notes that a run has ended and frees its hosts. Hosts that failed are given again only as a last choice."""
        self.under_way.remove(task)
        given = self._given.pop(task)
        if outcome.transient and outcome.host in given:
            self._failed[outcome.host or ""] += 1

    def _another(self) -> bool:
        """Moves one more coming run to those that wait; False where there is none."""
        task = next(self._coming, None)
        if task is not None:
            self._waiting.append(task)
        return task is not None

    def _blocked(self, task: RunTask) -> bool:
        """Whether a run must wait, whichever hosts are free."""
        alone = task in self._plan.alone and bool(self.under_way)
        return alone or any(task.trial_id == other.trial_id for other in self.under_way)

    def _where(self, task: RunTask) -> Placement | None:
        """A placement on free hosts for this run alone; None where too few are free.

        Hosts are taken in the hostfile's order from a random one on, so that no trial always gets the same host, and
        runs that are alone do not always get the first.
        """
        if not self._hosts:
            return self._placement
        busy = frozenset(chain.from_iterable(self._given.values()))
        free = [host for host in self._hosts if host.name not in busy]
        seed = f"{self._plan.measure.order_seed} {task.trial_id} {task.repeat}"
        start = random.Random(seed).randrange(len(free) or 1)  # noqa: S311 - an order, not a secret
        free = sorted(free[start:] + free[:start], key=lambda host: self._failed[host.name])
        try:
            hosts = self._placement.limited_to(free).hosts(self._plan.record.trials[task.trial_id].world)
        except RequestError:
            if not busy:
                raise
            return None
        # In their own order: srun numbers ranks by it, whatever the order of its --nodelist (srun(1), --nodefile), and
        # all other ranks are told rank 0's host.
        return self._placement.limited_to(sorted(hosts, key=lambda host: self._order[host.name]))
