"""Runs beyond `measure.repeats`, one at a time, for trials whose epoch time is not yet known as closely as asked."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from vitscale import store
from vitscale.analysis.runs.target_ci import TargetStatus, target_status
from vitscale.analysis.summaries import summarise
from vitscale.runner.one_run import Task
from vitscale.runner.planning import Plan
from vitscale.store.results import Outcome


class AddedRuns:
    """The added runs of a study, in rounds of one run per trial; empty without `measure.target_ci`.

    Whether a trial wants another run is decided when its turn comes, from all that it has recorded: interrupted and
    begun again, a study goes on where it was, and where all is reached it adds nothing.
    """

    def __init__(
        self, plan: Plan, results: Path, outcomes: Mapping[tuple[str, int], Outcome], todo: Collection[Task] = ()
    ) -> None:
        """`outcomes`: of the runs that need not be done again; the driver adds to it. `todo`: what it does before."""
        self._plan = plan
        self._results = results
        self._outcomes = outcomes
        self._todo = frozenset(todo)
        measure = plan.measure
        self._rounds = range(measure.repeats, measure.max_repeats if measure.target_ci is not None else measure.repeats)
        self._stood: dict[str, tuple[int, TargetStatus]] = {}

    def __iter__(self) -> Iterator[Task]:
        if self._rounds:
            for trial_id in self._plan.record.trials:
                self._status(trial_id)
        for repeat in self._rounds:
            for trial_id in self._order(repeat):
                if (trial_id, repeat) not in self._outcomes and self._status(trial_id) == "open":
                    yield Task(trial_id, repeat)
                    self._status(trial_id)  # at once, for `most`

    def most(self) -> int:
        """How many runs may still be added, as far as is known by now."""
        return sum(self._most_of(trial_id) for trial_id in self._plan.record.trials)

    def _order(self, repeat: int) -> list[str]:
        """Random in each round, so that drift favours no trial; seeded, so that a study resumed keeps its order."""
        order = list(self._plan.record.trials)
        random.Random(f"{self._plan.measure.order_seed} {repeat}").shuffle(order)  # noqa: S311 - an order, not a secret
        return order

    def _most_of(self, trial_id: str) -> int:
        own = self._own(trial_id)
        runs, known = self._stood.get(trial_id, (0, "open"))
        decided = runs == len(own) and known != "open"
        if decided or any(outcome.kind != "completed" for outcome in own.values()):
            return 0
        return sum(1 for repeat in self._rounds if repeat not in own and Task(trial_id, repeat) not in self._todo)

    def _own(self, trial_id: str) -> dict[int, Outcome]:
        return {repeat: outcome for (trial, repeat), outcome in self._outcomes.items() if trial == trial_id}

    def _status(self, trial_id: str) -> TargetStatus:
        runs = len(self._own(trial_id))
        known = self._stood.get(trial_id)
        if known is None or known[0] != runs:
            found = store.load(self._results, only=trial_id)
            trial = self._plan.record.trials[trial_id]
            result = summarise(trial_id, trial, found.runs, combine_unlike=False)
            target = self._plan.measure.target_ci
            now = target_status(result, target, self._plan.measure.max_repeats) if target is not None else "stopped"
            self._stood[trial_id] = known = (runs, now)
        return known[1]
