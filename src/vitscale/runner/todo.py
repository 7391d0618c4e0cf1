"""The work that remains for a study in a results folder: outstanding runs, runs to skip, and runs to add.

The module also chooses the run that begins next, and its hosts: runs go one after another, or side by side on separate
hosts (`measure.parallel_runs`; docs/decisions/0031-runs-side-by-side.md has the reasons).

A run is named by its trial and its repeat, counted from 0 (`RunKey`). Its outcome is that of its last attempt. One
repeat of all trials is a round.
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
from vitscale.runner.one_run import RunContext, attempt_number, folder_times, new_attempt, next_attempt, unstarted
from vitscale.runner.planning import Plan, begun_study
from vitscale.schedulers import Placement
from vitscale.store import RunIndex, write_outcome
from vitscale.store.reading import EndedAttempt, RunKey
from vitscale.store.results import Outcome, Run, StudyRecord


def outstanding_runs(plan: Plan, index: RunIndex, *, retry_failed: bool) -> list[RunKey]:
    """Return the runs still to be done, in the plan's order; runs that `measure.target_ci` added come last.

    Of the runs that `measure.target_ci` adds, only those are returned that have failed and are tried again. Which runs
    are added next is decided later, from the outcomes of the others (`AddedRuns`).

    Args:
        plan: the study.
        index: index of the runs in the folder.
        retry_failed: try all runs again that did not complete.
    """
    candidates = [*plan.tasks, *_added_runs_with_outcome(plan, index)]
    retries = plan.measure.retries
    return [
        run
        for run in candidates
        if _is_outstanding(index.finished.get(run), retries=retries, retry_failed=retry_failed)
    ]


def _added_runs_with_outcome(plan: Plan, index: RunIndex) -> list[RunKey]:
    """Return the runs that `measure.target_ci` added and that have an outcome, sorted."""
    added_repeats = range(plan.record.repeats, plan.record.max_repeats or 0)
    return [
        RunKey(trial_id, repeat)
        for trial_id, repeat in sorted(index.finished)
        if trial_id in plan.record.trials and repeat in added_repeats
    ]


def _is_outstanding(last_attempt: EndedAttempt | None, *, retries: int, retry_failed: bool) -> bool:
    """Whether a run is still to be done: it has no outcome, or has failed and is tried again.

    A failure for a cause outside the trial is always tried again, a transient one as often as the study says.

    Args:
        last_attempt: the run's last attempt that has ended; None: none has.
        retries: attempts that may follow the first one after a transient failure (`measure.retries`).
        retry_failed: try every failure again.
    """
    if last_attempt is None:
        return True
    outcome = last_attempt.outcome
    if outcome.kind == "completed":
        return False
    if outcome.external or retry_failed:
        return True
    # The driver that saw this failure was interrupted before, or during, the next attempt.
    return outcome.transient and attempt_number(last_attempt.folder) < retries


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


def done_before(plan: Plan, results: Path) -> frozenset[RunKey]:
    """Return the runs that `vitscale run` would not do any more; empty where the folder does not hold this study.

    They have their outcome, or are runs that `measure.target_ci` does not add any more.
    """
    if begun_study(results, plan.record.name) is None:
        return frozenset()
    index = RunIndex(results)
    study = plan.record
    remaining = frozenset(outstanding_runs(plan, index, retry_failed=False))
    addable = addable_runs(study, index.finished, remaining, results)
    most_repeats = study.max_repeats or study.repeats
    all_runs: set[RunKey] = set()
    for trial_id in study.trials:
        all_runs.update(RunKey(trial_id, repeat) for repeat in range(most_repeats))
    return frozenset(all_runs - remaining - addable)


def addable_runs(
    study: StudyRecord,
    finished: Mapping[RunKey, EndedAttempt],
    repeated_runs: Collection[tuple[str, int]],
    results: Path | None,
) -> frozenset[RunKey]:
    """Return the runs that `measure.target_ci` may still add.

    A trial with a run that failed, or whose runs are enough, gets none.

    Args:
        study: the study's record.
        finished: the runs that have an outcome, as in `RunIndex`.
        repeated_runs: runs that are to be done again, whose outcomes do not count.
        results: the folder, to read which trials' runs are enough. None: no trial's are taken to be, so that these may
            be too many.
    """
    if study.target_ci is None or study.max_repeats is None:
        return frozenset()
    outcomes_by_trial: dict[str, dict[int, Outcome]] = {trial_id: {} for trial_id in study.trials}
    for run, attempt in finished.items():
        if run.trial_id in outcomes_by_trial and run not in repeated_runs:
            outcomes_by_trial[run.trial_id][run.repeat] = attempt.outcome
    # Trials that may get more runs: none of theirs has failed, and they are not known to have enough.
    open_trials = {trial_id: outcomes for trial_id, outcomes in outcomes_by_trial.items() if _all_completed(outcomes)}
    if results is not None:
        judgeable = {
            trial_id for trial_id, outcomes in open_trials.items() if study.repeats <= len(outcomes) < study.max_repeats
        }
        for trial_id in _trials_with_enough_runs(study, judgeable, study.target_ci, study.max_repeats, results):
            del open_trials[trial_id]

    addable: set[RunKey] = set()
    for trial_id, outcomes in open_trials.items():
        for repeat in range(study.repeats, study.max_repeats):
            if repeat not in outcomes:
                addable.add(RunKey(trial_id, repeat))
    return frozenset(addable)


def _all_completed(outcomes: Mapping[int, Outcome]) -> bool:
    """Whether all of a trial's outcomes, by repeat, are of completed runs; True where there is none."""
    return all(outcome.kind == "completed" for outcome in outcomes.values())


def _trials_with_enough_runs(
    study: StudyRecord, trial_ids: set[str], target_ci: float, max_repeats: int, results: Path
) -> set[str]:
    """Return those of the trials that have reached their target, or cannot reach it; reads all steps of their runs."""
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


def existing_outcomes(plan: Plan, index: RunIndex, todo: Collection[RunKey]) -> dict[RunKey, Outcome]:
    """Return the outcomes of the study's runs, except those of `todo`, which are replaced by the runs to come."""
    replaced_runs = frozenset(todo)
    outcomes = {}
    for run, attempt in index.finished.items():
        if run.trial_id in plan.record.trials and run not in replaced_runs:
            outcomes[run] = attempt.outcome
    return outcomes


def skip_unfit(
    context: RunContext,
    todo: list[RunKey],
    unfit: Mapping[str, str],
    index: RunIndex,
    outcomes: dict[RunKey, Outcome],
) -> list[RunKey]:
    """Record each run of an unfit trial as skipped, and return the other runs.

    A run that an earlier call has skipped on request keeps that outcome.

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
        finished = index.finished.get(task)
        outcome = finished.outcome if finished is not None else None
        if outcome is None or not _is_skipped_on_request(outcome):
            # External: the trial itself has not failed, so the next `vitscale run` does it.
            outcome = unstarted("skipped", reason, external=True)
            write_outcome(new_attempt(context, task, next_attempt(index.attempts, task)), outcome)
        outcomes[task] = outcome
    return remaining


def _is_skipped_on_request(outcome: Outcome) -> bool:
    """Whether a run was skipped because the user asked for it (--skip-unfit), and not for another run's outcome."""
    return outcome.kind == "skipped" and outcome.external


class GpuHours:
    """The GPU-hours that a study has spent of `measure.max_gpu_hours`: each run's GPUs times its time.

    Of a run that is tried again within this call of `vitscale run` only the last attempt counts; a later call counts
    all attempts. A run that was cut off has no outcome: its time is that from the first to the last change in its
    folder.
    """

    def __init__(self, plan: Plan, index: RunIndex, results: Path) -> None:
        self._plan = plan
        self._spent_hours = 0.0
        self._longest_hours: dict[str, float] = {}
        """Trial id -> GPU-hours of its longest run."""
        for run, attempt in index.finished.items():
            self.add(run.trial_id, attempt.outcome)
        for run, attempts in index.earlier.items():
            self._spent_hours += sum(
                self._gpu_hours(run.trial_id, attempt.outcome.wall_seconds) for attempt in attempts
            )
        if plan.measure.max_gpu_hours is not None:
            self._add_runs_that_were_cut_off(index, results)

    def _add_runs_that_were_cut_off(self, index: RunIndex, results: Path) -> None:
        """Add the runs that have a folder and no outcome."""
        for folder_name, outcome in index.unpacked.items():
            if outcome is None:
                trial_id, _, _ = folder_name.partition("-")
                self._spent_hours += self._gpu_hours(trial_id, folder_times(results / "runs" / folder_name).seconds)

    def add(self, trial_id: str, outcome: Outcome) -> None:
        """Add a run that has ended."""
        hours = self._gpu_hours(trial_id, outcome.wall_seconds)
        self._spent_hours += hours
        self._longest_hours[trial_id] = max(hours, self._longest_hours.get(trial_id, 0.0))

    def refusal(self, trial_id: str, under_way: Iterable[str] = ()) -> str:
        """Return why the budget lets no further run of a trial begin; empty where it does.

        Every run is expected to take as long as the longest run of its trial so far. The first run of a trial, whose
        time nobody knows, may begin as long as anything is left.

        Args:
            trial_id: the trial of the run that is to begin.
            under_way: the trials of the runs under way, one for each run.
        """
        limit = self._plan.measure.max_gpu_hours
        if limit is None:
            return ""
        spent_with_under_way = self._spent_hours + sum(self._longest_hours.get(other, 0.0) for other in under_way)
        needed = self._longest_hours.get(trial_id, 0.0)
        if spent_with_under_way < limit and spent_with_under_way + needed <= limit:
            return ""
        next_run = f", and the next run is expected to take {needed:.3g}" if self._spent_hours < limit else ""
        return f"measure.max_gpu_hours = {limit:g}: {self._spent_hours:.3g} GPU-hours are spent{next_run}"

    def _gpu_hours(self, trial_id: str, seconds: float) -> float:
        """Return the GPU-hours of a run of this trial; 0 where the study does not have the trial any more."""
        trial = self._plan.record.trials.get(trial_id)
        if trial is None:
            return 0.0
        return trial.world.size * seconds / 3600


class _Judgement(NamedTuple):
    """A trial's status against its target (`measure.target_ci`)."""

    outcome_count: int
    """How many outcomes the trial had when the status was worked out: with more of them it is out of date."""
    status: TargetStatus
    """open: the trial needs another run."""


class AddedRuns:
    """The added runs of a study, in rounds of one run per trial; empty without `measure.target_ci`.

    Whether a trial needs another run is decided when its turn comes, from all its recorded runs. So a study that is
    interrupted and begun again goes on where it was, and adds nothing once all targets are reached.
    """

    def __init__(
        self, plan: Plan, results: Path, outcomes: Mapping[RunKey, Outcome], todo: Collection[RunKey] = ()
    ) -> None:
        """Take the state of a study. Which runs are added is decided one after another, as they are iterated over.

        Args:
            plan: the study.
            results: its folder.
            outcomes: the outcomes so far, to which the driver adds those of the runs that it does.
            todo: the runs that the driver does before the added ones.
        """
        self._plan = plan
        self._results = results
        self._outcomes = outcomes
        self._todo = frozenset(todo)
        measure = plan.measure
        most_repeats = measure.max_repeats if measure.target_ci is not None else measure.repeats
        self._rounds = range(measure.repeats, most_repeats)
        """The repeats that may be added; each is a round of one run per trial."""
        self._judgements: dict[str, _Judgement] = {}
        """Trial id -> its last judgement."""
        self._loaded_runs: dict[str, Run] = {}
        """Folder -> the run in it, whose steps were read."""

    def __iter__(self) -> Iterator[RunKey]:
        """Yield each run that is to be added, once its turn comes."""
        if self._rounds:
            self._judge_all_trials()
        for repeat in self._rounds:
            for trial_id in self._trials_in_order(repeat):
                task = RunKey(trial_id, repeat)
                # A run in `todo` is done again before these, and side by side it may still be under way.
                if task in self._todo or task in self._outcomes:
                    continue
                # Runs under way beside this one may show that more are needed; `wants` asks when they have ended.
                if self._awaits_earlier_run(task) or self._current_status(trial_id) == "open":
                    yield task
                    self._current_status(trial_id)  # worked out at once, for `most_to_come`

    def wants(self, task: RunKey) -> bool:
        """Whether a run that was yielded is still needed, after what its trial has recorded since."""
        return task in self._todo or self._current_status(task.trial_id) == "open"

    def most_to_come(self) -> int:
        """Return how many runs may still be added at most, as far as is known by now."""
        if not self._rounds:
            return 0
        outcomes_by_trial: dict[str, dict[int, Outcome]] = {trial_id: {} for trial_id in self._plan.record.trials}
        for run, outcome in self._outcomes.items():
            outcomes_by_trial[run.trial_id][run.repeat] = outcome
        return sum(self._most_of_trial(trial_id, outcomes) for trial_id, outcomes in outcomes_by_trial.items())

    def _judge_all_trials(self) -> None:
        """Read all runs at once, and work out the status of every trial."""
        self._loaded_runs = {run.header.folder: run for run in store.load(self._results).runs}
        for trial_id in self._plan.record.trials:
            self._current_status(
                trial_id, [run for run in self._loaded_runs.values() if run.header.trial_id == trial_id]
            )

    def _trials_in_order(self, repeat: int) -> list[str]:
        """Return the trials in the order of a round: random, so that drift favours none; seeded, so that it stays."""
        order = list(self._plan.record.trials)
        random.Random(f"{self._plan.measure.order_seed} {repeat}").shuffle(order)  # noqa: S311 - an order, not a secret
        return order

    def _awaits_earlier_run(self, task: RunKey) -> bool:
        """Whether a run of an earlier round of this trial is done again by the driver, and has not ended yet."""
        earlier_runs = [RunKey(task.trial_id, repeat) for repeat in range(task.repeat)]
        return any(run in self._todo and run not in self._outcomes for run in earlier_runs)

    def _most_of_trial(self, trial_id: str, outcomes: Mapping[int, Outcome]) -> int:
        """Return how many runs of this trial may still be added. Args: outcomes: those of the trial, by repeat."""
        if not _all_completed(outcomes):
            return 0
        judgement = self._judgements.get(trial_id)
        if judgement is not None:
            is_current = judgement.outcome_count == len(outcomes)
            if is_current and judgement.status != "open":
                return 0
        addable = [
            repeat for repeat in self._rounds if repeat not in outcomes and RunKey(trial_id, repeat) not in self._todo
        ]
        return len(addable)

    def _current_status(self, trial_id: str, trial_runs: list[Run] | None = None) -> TargetStatus:
        """Return a trial's status against its target.

        It is worked out again only where the trial has more outcomes than at the last time.

        Args:
            trial_id: the trial.
            trial_runs: its runs. None: those read before, and any that have ended since.
        """
        outcome_count = sum(run.trial_id == trial_id for run in self._outcomes)
        judgement = self._judgements.get(trial_id)
        if judgement is not None and judgement.outcome_count == outcome_count:
            return judgement.status
        if trial_runs is None:
            trial_runs = self._load_runs(trial_id)
        status = self._status_of_runs(trial_id, trial_runs)
        self._judgements[trial_id] = _Judgement(outcome_count, status)
        return status

    def _load_runs(self, trial_id: str) -> list[Run]:
        """Return a trial's runs; reads the steps only of those that have ended since the last time."""
        trial_runs = list(store.load(self._results, only={trial_id}, known=self._loaded_runs).runs)
        self._loaded_runs |= {run.header.folder: run for run in trial_runs}
        return trial_runs

    def _status_of_runs(self, trial_id: str, trial_runs: list[Run]) -> TargetStatus:
        """Work out a trial's status from its runs."""
        figures = summarise(trial_id, self._plan.record.trials[trial_id], trial_runs, combine_unlike=False)
        target_ci = self._plan.measure.target_ci
        if target_ci is None:
            return "stopped"  # without a target no run is added
        return target_status(figures, target_ci, self._plan.measure.max_repeats)


class NextRun(NamedTuple):
    """A run that may begin now, and its hosts."""

    task: RunKey
    placement: Placement


class Lineup:
    """The outstanding runs in their order, and the hosts of those under way.

    The driver asks `next` which run may begin, and reports with `begin` and `end`. A run is first coming (not looked at
    yet), then waiting (looked at, and perhaps overtaken by later runs), then under way, and is forgotten when it ends.

    Neither a host nor a trial has two runs at a time: what one run of a trial shows (it ran out of memory, or its time
    is known closely enough) decides on the next one. Where a run does not fit yet, later runs of the same round may
    overtake it, but no more of them than there are hosts. Runs that must be alone come first or last in their round
    (`planning`).
    """

    def __init__(self, plan: Plan, placement: Placement, todo: Iterable[RunKey], added: AddedRuns) -> None:
        """`todo`: the runs to do first; those of `added` come after them."""
        self.most_at_a_time = plan.measure.parallel_runs or 1
        """Most runs that may be under way at the same time."""
        self.under_way: set[RunKey] = set()
        self._plan = plan
        self._placement = placement
        self._hosts = placement.pool() if self.most_at_a_time > 1 else ()
        """Hosts to be divided among runs; empty where runs go one after another, each on the whole placement."""
        self._position_by_host = {host.name: position for position, host in enumerate(self._hosts)}
        self._added = added
        self._coming: Iterator[RunKey] = chain(todo, added)
        """Runs that were not looked at yet."""
        self._waiting: list[RunKey] = []
        """Runs from `_coming` that could not begin when they were looked at."""
        self._times_overtaken: Counter[RunKey] = Counter()
        """Run that waits -> how many later ones have begun before it."""
        self._busy_hosts: dict[RunKey, frozenset[str]] = {}
        """Run under way -> names of its hosts."""
        self._failures_by_host: Counter[str] = Counter()
        """Host -> how many runs failed because of it."""

    def next(self) -> NextRun | None:
        """Return the run that may begin now, and where; None where another must end first, or none is left."""
        has_run_alone = bool(self.under_way & self._plan.alone)
        if len(self.under_way) >= self.most_at_a_time or has_run_alone:
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
            may_be_overtaken = self._times_overtaken[task] < len(self._hosts)
            if not may_be_overtaken:
                return None
            position += 1
        return None

    def begin(self, task: RunKey, placement: Placement) -> None:
        """Note that a run from `next` begins on the hosts of its placement."""
        overtaken_runs = self._waiting[: self._waiting.index(task)]
        self._times_overtaken.update(overtaken_runs)
        self._waiting.remove(task)
        self.under_way.add(task)
        hosts = placement.pool() if self._hosts else ()
        self._busy_hosts[task] = frozenset(host.name for host in hosts)

    def end(self, task: RunKey, outcome: Outcome) -> None:
        """Note that a run has ended and free its hosts. Hosts that failed are given again only as a last choice."""
        self.under_way.remove(task)
        hosts = self._busy_hosts.pop(task)
        if outcome.transient and outcome.host is not None and outcome.host in hosts:
            self._failures_by_host[outcome.host] += 1

    def _add_coming(self) -> bool:
        """Move one more coming run to those that wait; False where there is none."""
        task = next(self._coming, None)
        if task is None:
            return False
        self._waiting.append(task)
        return True

    def _must_wait(self, task: RunKey) -> bool:
        """Whether a run must wait, whichever hosts are free."""
        if task in self._plan.alone and self.under_way:
            return True
        return any(task.trial_id == other.trial_id for other in self.under_way)

    def _free_placement(self, task: RunKey) -> Placement | None:
        """Return a placement on free hosts for this run alone; None where too few are free.

        Hosts are taken in the hostfile's order, from a random one on: so that no trial always gets the same host, and
        runs that are alone do not always get the first one. Hosts on which runs have failed come last.

        Raises:
            RequestError: all hosts are free, and are too few or too small.
        """
        if not self._hosts:
            return self._placement
        busy = frozenset(chain.from_iterable(self._busy_hosts.values()))
        free = [host for host in self._hosts if host.name not in busy]
        seed = f"{self._plan.measure.order_seed} {task.trial_id} {task.repeat}"
        start = random.Random(seed).randrange(len(free) or 1)  # noqa: S311 - an order, not a secret
        from_random_host = free[start:] + free[:start]
        candidates = sorted(from_random_host, key=lambda host: self._failures_by_host[host.name])
        try:
            hosts = self._placement.limited_to(candidates).hosts(self._plan.record.trials[task.trial_id].world)
        except RequestError:
            if not busy:
                raise
            return None
        # In their own order: srun numbers ranks by it, whatever the order of its --nodelist (srun(1), --nodefile), and
        # all other ranks are told rank 0's host.
        return self._placement.limited_to(sorted(hosts, key=lambda host: self._position_by_host[host.name]))
