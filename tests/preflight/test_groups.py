"""Groups of ranks that share the study's model: which are checked, and what is said of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from check_factory import checked, record, request, sweep, trial
from vitscale.preflight import running
from vitscale.preflight.fit import points
from vitscale.preflight.judging import judged
from vitscale.preflight.running import CheckTarget, check_target, exchanges, run_check
from vitscale.store.checks import CheckRecord, HostAnswer, SplitGroup
from vitscale.trial.parallel import ParallelSpec
from vitscale.trial.trial import World

MB = 1e6


def shared(**split: Any) -> Any:
    own = trial()
    engine = {"engine": "fsdp2"} if "tensor" in split else {}
    train = own.train.model_copy(update=engine)
    parallel = ParallelSpec(**split)
    world = World(ranks_per_node=parallel.ranks_per_model, threads_per_rank=1)
    return own.model_copy(update={"parallel": parallel, "train": train, "world": world})


def of_groups(*bandwidths: float, hosts: int = 2, group: SplitGroup = "tensor", size: int = 4) -> CheckRecord:
    """Ranks on `hosts` in turn of `size / hosts`, each with the bandwidth that its group's exchange has."""
    split = {"tensor": {"tensor": 2}, "sequence": {"sequence": 2}}[group]
    each = size // hosts
    wanted = request(
        world=World(nodes=hosts, ranks_per_node=each, threads_per_rank=1),
        trial=shared(**split),
        exchanges={group: ("all_reduce",)},
    )
    ranks = [
        checked(
            rank,
            size,
            host=f"host{rank // each}",
            collectives=sweep(group, "all_reduce", 2, 1e-4, bandwidths[rank // 2]),
        )
        for rank in range(size)
    ]
    return record(*ranks, request=wanted)


def kinds(whole: CheckRecord) -> list[str]:
    return [finding.kind for finding in judged(whole) if "group" in finding.kind]


@pytest.mark.parametrize(
    ("split", "ranks", "expected"),
    [
        ({}, 4, {}),
        ({"tensor": 2}, 3, {}),
        ({"tensor": 2}, 2, {"tensor": ("all_reduce",)}),
        (
            {"tensor": 2, "shard_norms": True}, 4,
            {"replicas": ("all_gather", "reduce_scatter"), "tensor": ("all_gather", "reduce_scatter")},
        ),
        ({"sequence": 2}, 2, {"replicas": ("all_reduce",), "sequence": ("all_to_all",)}),
        ({"pipeline": 2}, 2, {"pipeline": ("send_recv",)}),
        ({"pipeline": 2}, 4, {"replicas": ("all_reduce",), "pipeline": ("send_recv",)}),
    ],
)  # fmt: skip
def test_what_groups_exchange(split: dict[str, Any], ranks: int, expected: dict[str, Any]) -> None:
    assert exchanges(shared(**split), ranks) == expected


def test_a_group_holds_the_ranks_of_its_axis() -> None:
    wanted = request(
        world=World(nodes=2, ranks_per_node=4, threads_per_rank=1),
        trial=shared(tensor=2, pipeline=2),
        exchanges=exchanges(shared(tensor=2, pipeline=2), 8),
    )
    assert wanted.split_groups("tensor") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert wanted.split_groups("pipeline") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert wanted.split_groups("replicas") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert wanted.split_groups("sequence") == ()


def test_groups_alike_on_one_host_each_get_no_verdict() -> None:
    assert kinds(of_groups(100 * MB, 80 * MB)) == []


def test_the_slow_group_is_named_with_its_ranks_and_host() -> None:
    (found,) = (finding for finding in judged(of_groups(100 * MB, 40 * MB)) if finding.kind == "slow-group")
    assert (found.severity, found.about.ranks, found.about.hosts) == ("warning", (2, 3), ("host1",))
    assert found.message.startswith("tensor 2+3 (host1): all-reduce of ")
    assert "2.5 times as long as in the other groups" in found.message


def test_a_lone_group_is_not_slower_than_others() -> None:
    assert kinds(of_groups(1 * MB, hosts=1, size=2)) == []


def test_the_slowest_group_is_fitted_at_the_sizes_that_all_came_to() -> None:
    whole = of_groups(100 * MB, 40 * MB)
    cut = [
        rank.model_copy(update={"collectives": rank.collectives[: 5 if rank.rank > 1 else None]})
        for rank in whole.ranks
    ]
    _, measured = points(cut, "tensor", "all_reduce")
    assert [point.size_bytes for point in measured] == [line.size_bytes for line in whole.ranks[0].collectives[:5]]
    assert measured[-1].seconds == pytest.approx(1e-4 + measured[-1].bus_bytes / (40 * MB))


@pytest.mark.parametrize(("hosts", "advice"), [(4, "Split the model over the ranks of a host alone"), (3, "2 ranks")])
def test_a_group_between_hosts_is_told(hosts: int, advice: str) -> None:
    whole = of_groups(*[MB] * 3, hosts=hosts, size=4 if hosts == 4 else 6)
    if hosts == 3:  # two ranks on each host, the first of them elsewhere
        first = whole.ranks[0].model_copy(update={"facts": checked(0, 6, host="host2").facts})
        whole = whole.model_copy(update={"ranks": (first, *whole.ranks[1:])})
    (found,) = (finding for finding in judged(whole) if finding.kind == "group-across-hosts")
    assert found.message.startswith("tensor 0+1 (" + ("2 of 2" if hosts == 4 else "1 of 3"))
    assert advice in found.advice


def test_ranks_that_make_no_groups_are_told() -> None:
    for ranks, told in ((1, "had 1 rank:"), (3, "had 3 ranks:")):
        wanted = request(ranks, trial=shared(tensor=2))
        whole = record(*(checked(rank, ranks) for rank in range(ranks)), request=wanted)
        (finding,) = judged(whole)
        assert finding.kind == "groups-unchecked"
        assert told in finding.message


@pytest.mark.parametrize(
    ("hosts", "groups", "said"),
    [
        (2, (), ["groups-unchecked"]),
        (3, ((0, 1),), ["group-across-hosts"]),
    ],
)
def test_hosts_that_are_left_out_take_their_groups_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: int, groups: tuple[tuple[int, ...], ...], said: list[str]
) -> None:
    """One of the hosts does not answer: the ranks of the others make groups of their own, or none."""
    names = [f"host{n}" for n in range(hosts)]
    (tmp_path / "hosts").write_text("".join(f"{name} slots=1\n" for name in names))
    target = check_target(None, {"launch": {"hostfile": str(tmp_path / "hosts")}})
    own = shared(tensor=2)
    target = CheckTarget(target.study, target.scheduler, target.hosts, target.nodes, own)
    world = World(nodes=hosts, ranks_per_node=1, threads_per_rank=1)
    wanted = request(world=world, trial=own, exchanges=exchanges(own, hosts))
    answers = [
        HostAnswer(name=name, address=None, seconds=0.1 if name != names[-1] else None, reason="it is off")
        for name in names
    ]
    ranks = tuple(checked(n, hosts - 1, host=names[n]) for n in range(hosts - 1))
    monkeypatch.setattr(running, "ask", lambda *_: answers)
    monkeypatch.setattr(running, "_measure_on_ranks", lambda *_: running._RanksEnd("ended"))
    monkeypatch.setattr("vitscale.store.checks.read_checked_ranks", lambda *_: ranks)
    monkeypatch.setattr("vitscale.sources.prepare", lambda *_: None)

    whole, _ = run_check(target, wanted, tmp_path / "results", lambda _: None)

    assert whole.request.split_groups("tensor") == groups
    assert kinds(whole) == said
