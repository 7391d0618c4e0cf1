"""Costs by hand, and what must hold of any network."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitscale.prediction.network.links import OPERATIONS, LinkDraws, cheapest, lines

Array = Any


def link(bandwidth: float, latency: float) -> LinkDraws:
    return LinkDraws(np.asarray(bandwidth), np.asarray(latency))


def seconds(
    operation: str, size: float, ranks: float, per_node: float, inside: LinkDraws, across: LinkDraws, backend: str
) -> float:
    return float(cheapest(lines(operation, np.asarray(ranks), np.asarray(per_node), inside, across, backend), size))


FREE = link(np.inf, 0.0)
NONE = link(1e-9, 1e9)
"""A link so bad that nothing which crosses it can go unseen."""


@pytest.mark.parametrize(
    ("operation", "ranks", "per_node", "backend", "expected"),
    [
        # 100 bytes; inside 10 B/s and 1 s a hop, across 5 B/s and 3 s a hop. NCCL's calls take 2.5 hops to begin.
        # One host of four: 2 * 3 hops, 2 * 3/4 * 100 / 10.
        ("all_reduce", 4, 4, "gloo", 6 + 15),
        ("all_gather", 4, 4, "gloo", 3 + 7.5),
        # gloo's reduce-scatter is an all-reduce; NCCL's is half of one.
        ("reduce_scatter", 4, 4, "gloo", 6 + 15),
        ("reduce_scatter", 4, 4, "nccl", 2.5 + 3 + 7.5),
        # Two hosts of two: 2 * (2 inside + 1 across), 2 * 3/4 * 100 / 5.
        ("all_reduce", 4, 2, "gloo", 2 * (2 * 1 + 1 * 3) + 30),
        # NCCL's trees: 2 * (1 + 3) hops; of two hosts each sends the tensor once, as does each rank of them twice.
        ("all_reduce", 4, 2, "nccl", 7.5 + 8 + 100 / 5 / 0.92),
        # Of three an adapter sends it twice, at its worst: 2 * (1 + 2 * 3) hops.
        ("all_reduce", 24, 8, "nccl", 7.5 + 2 * (7 + 6) + 200 / 5 / 0.92),
        ("all_gather", 4, 2, "nccl", 7.5 + 2 * 1 + 1 * 3 + 15),
        # One rank on each of three hosts; the third host is not full where two share one.
        ("all_reduce", 3, 1, "gloo", 2 * 2 * 3 + 2 * 2 / 3 * 100 / 5),
        ("all_reduce", 3, 2, "gloo", 2 * (1 * 1 + 1 * 3) + 2 * 2 / 3 * 100 / 5),
        # Each of four sends 25 to each other: 25 inside, and a host's two ranks 4 * 25 across.
        ("all_to_all", 4, 2, "nccl", 7.5 + 1 + 3 + 100 / 5),
        ("broadcast", 4, 4, "nccl", 2.5 + 3 + 7.5),
        # From rank to rank, one of which is on the other host; inside one host no faster than its links.
        ("send", 4, 2, "gloo", 3 + 100 / 5),
        ("send", 4, 4, "gloo", 1 + 100 / 10),
        ("barrier", 4, 2, "nccl", 7.5 + 2 * (1 + 3)),
        ("all_reduce", 1, 1, "nccl", 0),
    ],
)
def test_by_hand(operation: str, ranks: int, per_node: int, backend: str, expected: float) -> None:
    assert seconds(operation, 100, ranks, per_node, link(10, 1), link(5, 3), backend) == pytest.approx(expected)


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
@pytest.mark.parametrize("backend", ["gloo", "nccl", "none"])
def test_one_rank_alone_costs_exactly_nothing(operation: str, backend: str) -> None:
    assert seconds(operation, 1e9, 1, 8, NONE, NONE, backend) == 0.0


def test_within_a_host_nothing_crosses_and_with_one_rank_per_host_nothing_stays() -> None:
    assert seconds("all_reduce", 8.0, 4, 4, link(1.0, 0.0), NONE, "nccl") == pytest.approx(2 * 3 / 4 * 8)
    assert seconds("all_reduce", 8.0, 4, 1, NONE, link(1.0, 0.0), "nccl") == pytest.approx(2 * 3 / 4 * 8)


def test_the_ranks_of_a_host_share_what_goes_out_of_it() -> None:
    """Eight to a host or one: the host's adapter carries the whole tensor either way."""
    one = seconds("all_reduce", 1e9, 64, 1, FREE, link(1e9, 0.0), "gloo")
    eight = seconds("all_reduce", 1e9, 512, 8, FREE, link(1e9, 0.0), "gloo")
    assert eight == pytest.approx(one, rel=0.02)
    assert eight > one


def test_two_hosts_send_little_more_than_half_of_what_a_ring_would() -> None:
    """As NCCL's trees over two hosts do, whose bus bandwidth is above that of the adapter."""
    nccl = seconds("all_reduce", 1e9, 16, 8, FREE, link(1e9, 0.0), "nccl")
    ring = seconds("all_reduce", 1e9, 16, 8, FREE, link(1e9, 0.0), "gloo")
    assert (nccl, ring) == pytest.approx((1 / 0.92, 1.875))


def test_latency_of_an_all_reduce_grows_with_the_logarithm_of_the_hosts_under_nccl_alone() -> None:
    hop = link(np.inf, 1.0)
    ranks = np.array([8.0, 64.0, 1024.0, 65_536.0])
    place = (ranks, np.ones(4), FREE, hop)
    assert cheapest(lines("all_reduce", *place, "nccl"), 0.0) == pytest.approx(2.5 + 2 * np.log2(ranks))
    assert cheapest(lines("all_reduce", *place, "gloo"), 0.0) == pytest.approx(2 * (ranks - 1))


def test_a_hundred_thousand_ranks() -> None:
    """344 MB over 12,500 hosts with 25 GB/s each: the tree, 2 S/(0.92 B) and fourteen levels up and down."""
    found = seconds("all_reduce", 344e6, 100_000, 8, link(200e9, 3e-6), link(25e9, 1e-5), "nccl")
    assert found == pytest.approx(2 * 344e6 / (0.92 * 25e9) + 2 * (7 * 3e-6 + 14 * 1e-5) + 2.5e-5)


def test_draws_and_configurations_broadcast() -> None:
    bandwidth = np.array([[1.0], [2.0], [4.0]])
    draws = LinkDraws(bandwidth, np.zeros((3, 1)))
    algorithms = lines("all_reduce", np.array([1.0, 3.0]), np.array([1.0, 1.0]), draws, draws, "gloo")
    found = cheapest(algorithms, 6.0)
    assert found.tolist() == [[0.0, 8.0], [0.0, 4.0], [0.0, 2.0]]


def test_an_operation_without_a_cost_is_refused() -> None:
    with pytest.raises(ValueError, match="no cost of 'recv'"):
        seconds("recv", 1.0, 2, 1, FREE, FREE, "nccl")


BANDWIDTHS = st.floats(1e6, 1e12)
LATENCIES = st.floats(0.0, 1e-2)


@given(
    st.sampled_from(sorted(OPERATIONS - {"barrier"})),
    st.sampled_from(["gloo", "nccl"]),
    st.integers(2, 100_000),
    st.integers(1, 16),
    st.floats(1.0, 1e12),
    BANDWIDTHS,
    BANDWIDTHS,
    LATENCIES,
)
def test_never_less_than_physics_and_never_slower_on_a_faster_network(
    operation: str,
    backend: str,
    ranks: int,
    per_node: int,
    size: float,
    inside: float,
    across: float,
    latency: float,
) -> None:
    def at(factor: float, later: float = 1.0) -> float:
        links = link(factor * inside, later * latency), link(factor * across, later * latency)
        return seconds(operation, size, ranks, per_node, *links, backend)

    found = at(1.0)
    assert np.isfinite(found)
    assert at(2.0) <= found * (1 + 1e-12)
    assert at(1.0, 2.0) >= found * (1 - 1e-12)
    # Whatever the algorithm, half of the tensor must leave some rank on the fastest of all links.
    assert found >= 0.4 * size / ranks / max(inside, across)
    more = seconds(operation, 2 * size, ranks, per_node, link(inside, latency), link(across, latency), backend)
    assert more >= found
