"""What one collective takes as its library carries it out: the cheapest of its algorithms on links inside and across.

Every algorithm is a straight line over the bytes of the tensor, and the cheapest counts: without the tree the latency
of an all-reduce would grow with the number of ranks, and large jobs would be far too slow. All functions broadcast:
links are (draws, 1) or scalars, configurations (configs,), results (draws, configs).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

OPERATIONS = frozenset(
    {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "broadcast",
        "reduce",
        "gather",
        "scatter",
        "all_to_all",
        "barrier",
        "send",
    }
)
"""The operations that have a cost here."""
_TREE = 0.92
"""A tree's share of a ring's bandwidth: NCCL's own figure (`ncclTopoTuneModel` in src/graph/tuning.cc)."""

_CALL = 2.5
"""What a call of NCCL takes before its first hop, in hops: its own figures for small messages over a network are 6.6 us
and 2.7 us a hop (`baseLat`, `hwLat` in src/graph/tuning.cc). Without it, what two hosts took for a call would be taken
for hops, of which large jobs make thousands."""


@dataclass(frozen=True)
class LinkDraws:
    """One level of a network, (draws, 1) or scalars as arrays; see `links.Link`."""

    bandwidth_bytes_per_second: Array
    """Greater than 0. Across hosts it is a host's, and its ranks share it."""
    latency_seconds: Array
    """Latency of one hop. A call of NCCL takes 2.5 hops more before the first."""


@dataclass(frozen=True)
class Line:
    """One algorithm of one operation: `seconds + seconds_per_byte x bytes of the tensor`."""

    seconds: Array
    seconds_per_byte: Array


def collective_seconds(
    operation: str,
    tensor_bytes: float | Array,
    ranks: Array,
    ranks_per_node: Array,
    inside: LinkDraws,
    across: LinkDraws,
    backend: str,
    tree_advantage: Array | float = 1.0,
) -> Array:
    """Seconds of one call, (draws, configs); exactly 0 for one rank.

    Args:
        operation: one of `OPERATIONS`.
        tensor_bytes: size of the whole tensor: what an all-gather puts out, what a reduce-scatter takes in.
        ranks: N, those of the communicator.
        ranks_per_node: g, the most on one host; the ranks lie on n = ceil(N / g) hosts.
        inside: the link between ranks of a host.
        across: the link between hosts. Its bandwidth is a host's, as a check measures it with one rank per host; all
            ranks of the host share it.
        backend: "gloo", or any other for NCCL's algorithms.
        tree_advantage: of an all-reduce over two hosts, what an adapter is spared of the tensor's 2 S bytes, over S: 1
            with NCCL's two trees, 0 where a ring over all ranks is as good as it gets.

    Raises:
        ValueError: an operation that has no cost here.
    """
    algorithms = lines(operation, ranks, ranks_per_node, inside, across, backend, tree_advantage)
    return cheapest(algorithms, tensor_bytes)


def cheapest(algorithms: Iterable[Line], tensor_bytes: float | Array) -> Array:
    """Seconds of the cheapest of some algorithms."""
    return reduce(np.minimum, (line.seconds + line.seconds_per_byte * tensor_bytes for line in algorithms))


def lines(
    operation: str,
    ranks: Array,
    ranks_per_node: Array,
    inside: LinkDraws,
    across: LinkDraws,
    backend: str,
    tree_advantage: Array | float = 1.0,
) -> tuple[Line, ...]:
    """The algorithms that the backend has for an operation, to ask for many sizes; arguments as `collective_seconds`.

    NCCL's costs are those by which it chooses itself (`ncclTopoTuneModel`, src/graph/tuning.cc): a ring for every
    operation, and a tree too for an all-reduce. Its aggregated trees for all-gather and reduce-scatter with one rank
    per host grow with the ranks too, and are left out. Bytes are those of the bus bandwidth (PERFORMANCE.md of
    nccl-tests). gloo has only rings (gloo/allreduce.cc, allgather.cc; torch asks for no other). It carries out a
    reduce-scatter as an all-reduce, and sends nearly as much in a reduce (docs/traffic.md).

    Raises:
        ValueError: an operation that has no cost here.
    """
    if operation not in OPERATIONS:
        raise ValueError(f"no cost of {operation!r}")
    count = np.maximum(1.0, np.asarray(ranks, dtype=np.float64))
    local = np.clip(np.asarray(ranks_per_node, dtype=np.float64), 1.0, count)
    group = _Group(count, local, np.ceil(count / local), inside, across, np.asarray(tree_advantage))
    if backend == "gloo" and operation in ("reduce_scatter", "reduce"):
        operation = "all_reduce"
    algorithms = _of(operation, group, gloo=backend == "gloo")
    hop = np.where(group.nodes > 1.0, across.latency_seconds, inside.latency_seconds)
    begin = 0.0 if backend == "gloo" else _CALL * hop
    alone = count <= 1.0
    costs = ((begin + line.seconds, line.seconds_per_byte) for line in algorithms)
    return tuple(Line(np.where(alone, 0.0, fixed), np.where(alone, 0.0, per_byte)) for fixed, per_byte in costs)


@dataclass(frozen=True)
class _Group:
    """N ranks, g of them on each of n hosts."""

    ranks: Array
    local: Array
    nodes: Array
    inside: LinkDraws
    across: LinkDraws
    tree_advantage: Array

    @property
    def slowest(self) -> Array:
        """Bandwidth of the slowest link that a ring over all ranks crosses."""
        b_in, b_ax = self.inside.bandwidth_bytes_per_second, self.across.bandwidth_bytes_per_second
        both = np.where(self.local > 1.0, np.minimum(b_in, b_ax), b_ax)
        return np.where(self.nodes > 1.0, both, b_in)


def _of(operation: str, group: _Group, *, gloo: bool) -> tuple[Line, ...]:
    if operation == "all_to_all":
        return (_all_to_all(group),)
    if operation == "send":
        # From each rank to the next: the slowest of those boundaries sets the pace.
        hop = np.where(group.nodes > 1.0, group.across.latency_seconds, group.inside.latency_seconds)
        return (Line(hop, 1.0 / group.slowest),)
    if operation == "all_reduce":
        return (_ring(group, 2.0),) if gloo else (_ring(group, 2.0), _tree(group))
    if operation == "barrier":
        # gloo has a dissemination barrier (gloo/barrier.cc), NCCL an all-reduce of one element.
        tree = _tree(group)
        return (Line(tree.seconds, np.zeros_like(tree.seconds)),)
    return (_ring(group, 1.0),)


def _ring(group: _Group, turns: float) -> Line:
    """`turns` x ((N - n) a_in + (n - 1) a_ax + (N - 1)/N S/B): an all-reduce goes around twice, all others once."""
    hops_inside, hops_across = group.ranks - group.nodes, group.nodes - 1.0
    return Line(
        turns * (hops_inside * group.inside.latency_seconds + hops_across * group.across.latency_seconds),
        turns * (group.ranks - 1.0) / group.ranks / group.slowest,
    )


def _tree(group: _Group) -> Line:
    """`2 ((g - 1) a_in + ceil(log2 n) a_ax)`, and the bytes: a chain inside each host, a tree of hosts, up and down.

    Inside, a rank sends 2 S. So does an adapter at its worst, among more than two hosts. Between two hosts it sends as
    little as S, because each of NCCL's two trees has one of the hosts as its root: that is how bus bandwidths above an
    adapter's come about (nccl-tests, issue 196). Not every job gets that: in twelve published series exposed transfers
    grew 1.26 times from two to four hosts (median), and not twofold. So it is a parameter.
    """
    depth = np.ceil(np.log2(group.nodes))
    over = np.where(group.nodes > 2.0, 2.0, 2.0 - group.tree_advantage) / group.across.bandwidth_bytes_per_second
    inside = np.where(group.local > 1.0, 2.0 / group.inside.bandwidth_bytes_per_second, 0.0)
    return Line(
        2.0 * ((group.local - 1.0) * group.inside.latency_seconds + depth * group.across.latency_seconds),
        np.maximum(inside, np.where(group.nodes > 1.0, over, 0.0)) / _TREE,
    )


def _all_to_all(group: _Group) -> Line:
    """Each rank sends S/N to each other: (g - 1)/N S inside, and a host's g ranks together g (N - g)/N S across."""
    ranks, local = group.ranks, group.local
    within = (local - 1.0) / ranks / group.inside.bandwidth_bytes_per_second
    beyond = local * (ranks - local) / ranks / group.across.bandwidth_bytes_per_second
    hops = (local - 1.0) * group.inside.latency_seconds + (group.nodes - 1.0) * group.across.latency_seconds
    return Line(hops, np.maximum(within, beyond))
