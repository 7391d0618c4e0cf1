"""Runs side by side, without starting any: a clock of our own ends them, and what must hold at all times is checked."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from study_factory import EIGHT_CORES, summary, write_study
from vitscale.errors import RequestError
from vitscale.runner import Plan, plan
from vitscale.runner.one_run import unstarted
from vitscale.runner.todo import AddedRuns, Lineup
from vitscale.schedulers import Hostfile
from vitscale.store.reading import RunKey
from vitscale.store.results import Outcome

HOSTS = 8


def study(folder: Path, seeds: int, gpus: list[int], hosts: int = HOSTS, **measure: object) -> Plan:
    """Trials of one rank a host, over `hosts` addresses that nobody has (RFC 5737)."""
    (folder / "hosts").write_text("".join(f"192.0.2.{n + 1} slots=1\n" for n in range(hosts)))
    changes: dict[str, dict[str, Any]] = {
        "train": {"epochs": 1, "precision": "fp32"},
        "scaling": {"gpus": gpus, "gpus_per_node": 1},
        "sweep": {"train.seed": list(range(seeds))},
        "launch": {"hostfile": "hosts", "threads_per_rank": 1},
        "measure": {"parallel_runs": hosts, **measure},
    }
    return plan(write_study(folder, changes), EIGHT_CORES, lambda _: summary())


class Ran(NamedTuple):
    """One run of a simulated study."""

    task: RunKey
    began: float
    ended: float
    hosts: frozenset[str]


def simulated(
    plan: Plan, seconds: Callable[[RunKey], float], outcome: Callable[[Ran], Outcome] | None = None
) -> list[Ran]:
    """The study as the driver's loop has it, but that a run takes what `seconds` says; in the order of beginning."""
    assert isinstance(plan.scheduler, Hostfile)
    outcomes: dict[RunKey, Outcome] = {}
    lineup = Lineup(plan, plan.scheduler, plan.tasks, AddedRuns(plan, Path("none"), outcomes, plan.tasks))
    now, ran, under_way = 0.0, list[Ran](), list[Ran]()
    while True:
        while (begins := lineup.next()) is not None:
            task, where = begins
            assert isinstance(where, Hostfile)
            lineup.begin(task, where)
            under_way.append(Ran(task, now, now + seconds(task), frozenset(host.name for host in where.pool())))
            ran.append(under_way[-1])
        if not under_way:
            return ran
        ends = min(under_way, key=lambda run: run.ended)
        under_way.remove(ends)
        now = ends.ended
        lineup.end(ends.task, unstarted("completed", "") if outcome is None else outcome(ends))


def beside(run: Ran, ran: list[Ran]) -> list[Ran]:
    return [other for other in ran if other is not run and other.began < run.ended and run.began < other.ended]


def nodes(plan: Plan, task: RunKey) -> int:
    return plan.record.trials[task.trial_id].world.nodes


def check_all_that_must_hold(plan: Plan, ran: list[Ran]) -> None:
    assert sorted(run.task.trial_id for run in ran) == sorted(task.trial_id for task in plan.tasks)
    assert {run.task for run in ran} == set(plan.tasks)
    for run in ran:
        assert len(run.hosts) == nodes(plan, run.task)
        for other in beside(run, ran):
            assert not run.hosts & other.hosts, "two runs on one host"
            assert run.task.trial_id != other.task.trial_id, "a trial twice at a time"
            assert run.task not in plan.alone, "one that is to be alone"
    # Rounds begin one after another, and inside one nobody is overtaken by more runs than there are hosts.
    rounds = [run.task.repeat for run in ran]
    assert rounds == sorted(rounds)
    place = {run.task: n for n, run in enumerate(ran)}
    for n, task in enumerate(plan.tasks):
        overtaking = [later for later in plan.tasks[n + 1 :] if place[later] < place[task]]
        assert len(overtaking) <= HOSTS
        assert not overtaking or task not in plan.alone


def occupancy(plan: Plan, ran: list[Ran]) -> tuple[float, float]:
    """Share of the hosts' time in which they had a run: of all of it, and without what runs alone were given."""

    def host_seconds(runs: list[Ran]) -> float:
        return sum((run.ended - run.began) * nodes(plan, run.task) for run in runs)

    whole = max(run.ended for run in ran)
    alone = [run for run in ran if run.task in plan.alone]
    left = whole - sum(run.ended - run.began for run in alone)
    return host_seconds(ran) / (HOSTS * whole), (host_seconds(ran) - host_seconds(alone)) / (HOSTS * left)


def durations(plan: Plan, spread: float) -> Mapping[RunKey, float]:
    """Each trial takes its own time, and each of its runs about that."""
    random_times = random.Random(7)
    of_trial = {trial_id: random_times.uniform(1 - spread, 1 + spread) for trial_id in plan.record.trials}
    return {task: of_trial[task.trial_id] * random_times.uniform(0.98, 1.02) for task in plan.tasks}


@pytest.mark.parametrize(
    ("seeds", "gpus", "spread", "least"),
    [
        pytest.param(100, [1], 0.0, (0.9, 0.95), id="100 trials of a host each"),
        pytest.param(100, [1], 0.5, (0.85, 0.95), id="of unequal length"),
        pytest.param(25, [1, 2, 4, 8], 0.5, (0.8, 0.85), id="up to all hosts"),
        pytest.param(34, [1, 3, 5], 0.5, (0.8, 0.85), id="that do not divide 8"),
        # Of four trials, which never run twice at a time, four hosts have one.
        pytest.param(4, [1], 0.0, (0.2, 0.3), id="fewer than hosts"),
    ],
)
def test_a_hundred_trials_keep_eight_hosts_busy_and_never_share_one(
    tmp_path: Path, seeds: int, gpus: list[int], spread: float, least: tuple[float, float]
) -> None:
    planned = study(tmp_path, seeds, gpus)
    took = durations(planned, spread)
    ran = simulated(planned, took.__getitem__)
    check_all_that_must_hold(planned, ran)
    for share, at_least in zip(occupancy(planned, ran), least, strict=True):
        assert share > at_least


def test_one_run_each_of_a_few_trials_is_alone_first_and_last(tmp_path: Path) -> None:
    planned = study(tmp_path, 25, [1, 2, 4, 8])
    alone = [task for task in planned.tasks if task in planned.alone]
    # Two of one host and two of several, in the first round and in the last: other trials each time, none of all hosts.
    assert [task.repeat for task in alone] == [0] * 4 + [2] * 4
    assert len({task.trial_id for task in alone}) == 8
    for part in (alone[:4], alone[4:]):
        sizes = [nodes(planned, task) for task in part]
        assert sizes.count(1) == 2
        assert max(sizes) < HOSTS
    assert [*planned.tasks[:4], *planned.tasks[-4:]] == alone
    # The others of a round stand in the order that they have without.
    one_by_one = study(tmp_path, 25, [1, 2, 4, 8], parallel_runs=1)
    assert not one_by_one.alone
    assert [t for t in planned.tasks if t not in planned.alone] == [
        t for t in one_by_one.tasks if t not in planned.alone
    ]
    # One run of a trial can be held against none of its own.
    assert not study(tmp_path, 4, [1, 2], repeats=1).alone


def test_hosts_are_drawn_for_runs_alone_as_for_others(tmp_path: Path) -> None:
    """Else what tells hosts apart would pass for what runs do to one another."""
    alone = set()
    for seed in range(10):
        planned = study(tmp_path, 8, [1], order_seed=seed)
        ran = simulated(planned, lambda _: 1.0)
        alone |= {host for run in ran if run.task in planned.alone for host in run.hosts}
    assert len(alone) == HOSTS


def test_the_hosts_of_a_run_are_in_their_own_order(tmp_path: Path) -> None:
    """srun numbers ranks by that order, whatever its --nodelist says, and rank 0's host is told to the others."""
    planned = study(tmp_path, 25, [1, 2, 3])
    assert isinstance(planned.scheduler, Hostfile)
    lineup = Lineup(planned, planned.scheduler, planned.tasks, AddedRuns(planned, Path("none"), {}, planned.tasks))
    places = {host.name: place for place, host in enumerate(planned.scheduler.pool())}
    first = set()
    while (begins := lineup.next()) is not None:
        task, where = begins
        lineup.begin(task, where)
        own = [places[host.name] for host in where.pool()]
        assert own == sorted(own)
        first.add(own[0])
        lineup.end(task, unstarted("completed", ""))
    assert len(first) > HOSTS // 2  # drawn, all the same


def test_a_host_that_fails_its_runs_is_given_where_no_other_is_free(tmp_path: Path) -> None:
    planned = study(tmp_path, 25, [1, 2], repeats=2, parallel_runs=2)
    bad = "192.0.2.3"

    def outcome(run: Ran) -> Outcome:
        gone = unstarted("failed", "does not answer", transient=True).model_copy(update={"host": bad})
        return gone if bad in run.hosts else unstarted("completed", "")

    ran = simulated(planned, lambda _: 1.0, outcome)
    check_all_that_must_hold(planned, ran)
    # Until it is known one run fails there, and another that has begun meanwhile may.
    assert 1 <= sum(bad in run.hosts for run in ran) <= 2


def test_one_at_a_time_is_the_order_of_the_plan_on_the_first_hosts(tmp_path: Path) -> None:
    planned = study(tmp_path, 3, [1, 2], parallel_runs=None)
    ran = simulated(planned, lambda _: 1.0)
    assert [run.task for run in ran] == list(planned.tasks)
    assert not [run for run in ran if beside(run, ran)]


@pytest.mark.parametrize(
    ("launch", "said"),
    [
        ({}, "there is one host: runs on it would disturb one another"),
        ({"hostfile": "one"}, "there is one host: runs on it would disturb one another"),
        ({"hostfile": "twice"}, "the hostfile names one machine twice, as 127.0.0.2 and as 127.0.0.3"),
    ],
)
def test_runs_side_by_side_need_hosts_of_their_own(tmp_path: Path, launch: dict[str, str], said: str) -> None:
    (tmp_path / "one").write_text("192.0.2.1\n")
    (tmp_path / "twice").write_text("127.0.0.2\n127.0.0.3\n")
    file = write_study(tmp_path, {"scaling": {"gpus": [1]}, "launch": launch, "measure": {"parallel_runs": 4}})
    with pytest.raises(RequestError, match=said):
        plan(file, EIGHT_CORES, lambda _: summary())
