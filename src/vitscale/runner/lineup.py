"""Which run begins next, and on which hosts: one after another, or side by side on separate hosts.

See `measure.parallel_runs`, and docs/decisions/0031-runs-side-by-side.md for the reasons.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain

from vitscale.errors import RequestError
from vitscale.runner.one_run import Task
from vitscale.runner.planning import Plan
from vitscale.runner.todo import AddedRuns
from vitscale.schedulers import Placement
from vitscale.store.results import Outcome


class Lineup:
    """The outstanding runs in their order, and the hosts of those under way.

    Neither a host nor a trial has two runs at a time: what one run of a trial shows (it ran out of memory, or its time
    is known closely enough) decides on the next. Later runs of the same round may overtake a run that does not fit yet,
    but no more of them than there are hosts. Runs that must be alone come first or last in their round (`planning`).
    """

    def __init__(self, plan: Plan, placement: Placement, todo: Iterable[Task], added: AddedRuns) -> None:
        """`todo`: the runs to do first; those of `added` come after them."""
        self.most = plan.measure.parallel_runs or 1
        """Most runs at a time."""
        self.under_way: set[Task] = set()
        self._plan = plan
        self._placement = placement
        self._hosts = placement.pool() if self.most > 1 else ()
        self._added = added
        self._coming: Iterator[Task] = chain(todo, added)
        self._waiting: list[Task] = []
        self._overtaken: Counter[Task] = Counter()
        self._given: dict[Task, frozenset[str]] = {}
        self._failed: Counter[str] = Counter()

    def next(self) -> tuple[Task, Placement] | None:
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

    def begin(self, task: Task, where: Placement) -> None:
        """Notes that a run from `next` begins on the hosts of its placement."""
        self._overtaken.update(self._waiting[: self._waiting.index(task)])
        self._waiting.remove(task)
        self.under_way.add(task)
        self._given[task] = frozenset(host.name for host in where.pool()) if self._hosts else frozenset()

    def end(self, task: Task, outcome: Outcome) -> None:
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

    def _blocked(self, task: Task) -> bool:
        """Whether a run must wait, whichever hosts are free."""
        alone = task in self._plan.alone and bool(self.under_way)
        return alone or any(task.trial_id == other.trial_id for other in self.under_way)

    def _where(self, task: Task) -> Placement | None:
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
        return self._placement.limited_to(hosts)
