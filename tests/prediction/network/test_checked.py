"""A check's fits go in, and what it measured must come out of the network again."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from check_factory import checked, record, request, sweep
from vitscale.prediction.network.checked import ASSUMED_ACROSS, ASSUMED_INSIDE, network_of
from vitscale.prediction.network.links import Level, LinkDraws, Network, cheapest, declared_link, lines
from vitscale.preflight.fit import fits
from vitscale.store.checks import CheckGroup, CheckRecord, CollectiveFit, Operation
from vitscale.trial.trial import World

MB = 1e6


def fit(
    group: CheckGroup, operation: Operation, ranks: int, latency: float, bandwidth: float, **more: Any
) -> CollectiveFit:
    content = {
        "group": group, "operation": operation, "ranks": ranks, "latency_seconds": latency,
        "bandwidth_bytes_per_second": bandwidth, "largest_size_bytes": 2**26, "largest_seconds": 0.1,
        "worst_residual": 0.0,
    }  # fmt: skip
    return CollectiveFit.model_validate(content | more)


def check(nodes: int, ranks_per_node: int, *found: CollectiveFit, device: str = "cpu") -> CheckRecord:
    world = World(nodes=nodes, ranks_per_node=ranks_per_node, threads_per_rank=1)
    return record(request=request(2, world=world, device=device), fits=found)


def seconds(network: Network, level: Level, operation: str, ranks: int, size: float, backend: str) -> float:
    of = network.link_between_two(level, operation) if ranks == 2 else network.link(level, operation)
    draws = LinkDraws(np.asarray(of.bandwidth_bytes_per_second), np.asarray(of.latency_seconds))
    per_node = np.asarray(1.0 if level == "across" else float(ranks))
    return float(cheapest(lines(operation, np.asarray(float(ranks)), per_node, draws, draws, backend), size))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("ranks", [2, 4, 7])
@pytest.mark.parametrize(("group", "level"), [("inside nodes", "inside"), ("across nodes", "across")])
def test_what_was_fitted_comes_out_again(
    device: str, operation: Operation, ranks: int, group: CheckGroup, level: Level
) -> None:
    """The latency of a whole call at no bytes, and bus bytes over bandwidth at many, at the ranks that took part."""
    shape = (1, ranks) if level == "inside" else (ranks, 1)
    network = network_of(check(*shape, fit(group, operation, ranks, 1e-3, 500 * MB), device=device))
    backend = "gloo" if device == "cpu" else "nccl"
    assert seconds(network, level, operation, ranks, 0.0, backend) == pytest.approx(1e-3)
    bus = (2 if operation == "all_reduce" else 1) * (ranks - 1) / ranks
    largest = seconds(network, level, operation, ranks, 1e12, backend)
    assert largest == pytest.approx(bus * 1e12 / (500 * MB), rel=1e-4)


def test_by_hand() -> None:
    """Four ranks of a host: an all-reduce goes six hops. Three hosts under NCCL: a tree of two levels, up and down."""
    network = network_of(
        check(3, 4, fit("inside nodes", "all_reduce", 4, 60e-6, 1e9), fit("across nodes", "all_reduce", 3, 40e-6, 2e9))
    )
    assert (network.inside.latency_seconds, network.inside.bandwidth_bytes_per_second) == pytest.approx((10e-6, 1e9))
    assert network.across.latency_seconds == pytest.approx(10e-6)  # gloo: twice two hops
    nccl = network_of(check(3, 4, fit("across nodes", "all_reduce", 3, 65e-6, 2e9), device="cuda"))
    assert nccl.across.latency_seconds == pytest.approx(10e-6)  # NCCL: twice two levels, and what begins the call
    seven = network_of(check(8, 4, fit("across nodes", "all_reduce", 8, 85e-6, 2e9), device="cuda"))
    assert seven.across.latency_seconds == pytest.approx(10e-6)  # twice three


def test_one_host_says_nothing_of_the_network_between_hosts() -> None:
    for group in ("inside nodes", "all ranks"):
        network = network_of(check(1, 4, fit(group, "all_reduce", 4, 6e-5, 1e9)))
        assert network.inside.source == "check"
        assert network.across == ASSUMED_ACROSS
        assert network.link("across", "all_reduce").source == "assumed"


def test_one_rank_per_host_says_nothing_of_what_is_inside() -> None:
    for group in ("across nodes", "all ranks"):
        network = network_of(check(4, 1, fit(group, "all_reduce", 4, 6e-5, 1e9)))
        assert network.inside == ASSUMED_INSIDE
        assert network.across.source == "check"
        assert network.across.bandwidth_bytes_per_second == pytest.approx(1e9)


def test_all_ranks_together_count_where_one_of_each_host_drove_one_adapter_of_many() -> None:
    one, all_ranks = fit("across nodes", "all_gather", 4, 1e-4, 10e9), fit("all ranks", "all_gather", 32, 2e-3, 80e9)
    network = network_of(check(4, 8, one, all_ranks, device="cuda"))
    assert network.across.bandwidth_bytes_per_second == pytest.approx(80e9)
    assert network.across.latency_seconds == pytest.approx(1e-4 / 5.5)
    slower = fit("all ranks", "all_gather", 32, 2e-3, 4e9)
    assert network_of(check(4, 8, one, slower)).across.bandwidth_bytes_per_second == pytest.approx(10e9)


def test_each_operation_has_its_own_link_and_others_take_the_all_reduce() -> None:
    network = network_of(
        check(3, 1, fit("across nodes", "all_gather", 3, 1e-4, 3e9), fit("across nodes", "all_reduce", 3, 1e-4, 1e9))
    )
    assert network.link("across", "all_gather").bandwidth_bytes_per_second == pytest.approx(3e9)
    assert network.link("across", "broadcast").bandwidth_bytes_per_second == pytest.approx(1e9)


def test_two_ranks_tell_how_fast_the_link_is_by_their_fastest_operation() -> None:
    """gloo's all-gather between two is slower than the link, and between three it is not (docs/calibration-lab.md)."""
    network = network_of(
        check(2, 1, fit("across nodes", "all_gather", 2, 1e-4, 8e6), fit("across nodes", "all_reduce", 2, 2e-4, 11e6))
    )
    assert network.link("across", "all_gather").bandwidth_bytes_per_second == pytest.approx(11e6)
    assert network.link_between_two("across", "all_gather").bandwidth_bytes_per_second == pytest.approx(88**0.5 * 1e6)
    assert network.link("across", "all_gather").latency_seconds == pytest.approx(1e-4)  # twice one hop of all-reduce


def test_no_operation_between_two_is_earlier_than_the_all_reduce() -> None:
    """A line through sizes that begins at 0 would make many small calls free. A call of all-reduce is two hops."""
    network = network_of(
        check(2, 1, fit("across nodes", "all_gather", 2, 0.0, 1e9), fit("across nodes", "all_reduce", 2, 2e-3, 1e9))
    )
    assert network.link_between_two("across", "all_gather").latency_seconds == pytest.approx(1e-3)
    late = network_of(
        check(2, 1, fit("across nodes", "all_gather", 2, 5e-3, 1e9), fit("across nodes", "all_reduce", 2, 2e-3, 1e9))
    )
    assert late.link("across", "all_gather").latency_seconds == pytest.approx(5e-3)  # among more ranks too
    assert late.link("across", "broadcast").latency_seconds == pytest.approx(1e-3)


def test_what_is_declared_stands_before_what_was_measured_across_hosts_alone() -> None:
    declared = declared_link("100GbE")
    found = check(
        2, 2, fit("inside nodes", "all_reduce", 2, 1e-4, 3e9), fit("across nodes", "all_reduce", 2, 1e-4, 1e9)
    )
    network = network_of(found, declared)
    assert network.across == declared
    assert network.link("across", "all_reduce") == declared
    assert network.inside.source == "check"
    assert network_of(None, declared) == Network(ASSUMED_INSIDE, declared)


def test_nothing_known_is_wide_open() -> None:
    network = network_of(None)
    assert (network.inside.source, network.across.source) == ("assumed", "assumed")
    assert network.across.bandwidth_spread > 1
    assert network_of(check(2, 1)) == network


def test_a_measured_link_is_known_the_better_the_better_it_was_fitted() -> None:
    exact = network_of(check(2, 1, fit("across nodes", "all_reduce", 2, 1e-4, 1e9))).across
    rough = network_of(check(2, 1, fit("across nodes", "all_reduce", 2, 1e-4, 1e9, worst_residual=0.4))).across
    wild = network_of(check(2, 1, fit("across nodes", "all_reduce", 2, 1e-4, 1e9, worst_residual=1e300))).across
    assert 0.04 < exact.bandwidth_spread < rough.bandwidth_spread < wild.bandwidth_spread < 0.5
    assert exact.latency_spread < rough.latency_spread < 1.2


def test_repeats_that_differ_widen_it() -> None:
    lines = sweep("across nodes", "all_reduce", 2, 1e-4, 1e9)
    unlike = tuple(replace_seconds(line, (0.7, 1.0, 1.4)) for line in lines)

    def across(some: tuple[Any, ...]) -> float:
        ranks = tuple(checked(rank, 2, collectives=some) for rank in range(2))
        return network_of(record(*ranks, fits=fits(ranks))).across.bandwidth_spread

    expected = np.std(np.log([0.7, 1.0, 1.4]), ddof=1) / math.sqrt(3)
    assert across(unlike) == pytest.approx(math.hypot(0.05, expected), rel=1e-3)
    assert across(lines) == pytest.approx(0.05)


def replace_seconds(line: Any, factors: tuple[float, ...]) -> Any:
    return line.model_copy(update={"seconds": tuple(factor * line.seconds[0] for factor in factors)})


def test_fits_that_say_nothing_are_left_out() -> None:
    nothing = fit("across nodes", "all_reduce", 2, 1e-4, 0.0), fit("across nodes", "all_gather", 0, 1e-4, 1e9)
    assert network_of(check(2, 1, *nothing)) == network_of(None)


def test_a_hop_takes_some_time_whatever_the_fit_says() -> None:
    assert network_of(check(2, 1, fit("across nodes", "all_reduce", 2, 0.0, 1e9))).across.latency_seconds > 0


def test_it_says_where_it_is_from() -> None:
    link = network_of(check(2, 1, fit("across nodes", "all_reduce", 2, 1e-4, 1e9))).across
    assert link.described == "check 20260102T030405-abcdef: all_reduce over 2 hosts"
    assert replace(link, described="") != link
