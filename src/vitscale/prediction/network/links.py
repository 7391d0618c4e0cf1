"""Links: how fast and how late bytes pass between ranks, how surely that is known, and the names they go by.

And what one collective takes on them as its library carries it out. Every algorithm is a straight line over the bytes
of the tensor, and the cheapest counts: without the tree the latency of an all-reduce would grow with the number of
ranks, and large jobs would be far too slow. These functions broadcast: links are (draws, 1) or scalars, configurations
(configs,), results (draws, configs).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Literal

import numpy as np

from vitscale.base.arrays import FloatArray
from vitscale.errors import RequestError, shown

Level = Literal["inside", "across"]
"""Inside a host, or across hosts."""
LinkSource = Literal["check", "declared", "assumed"]
"""check: measured by `vitscale check`. declared: the user named the network. assumed: a prior about clusters."""


@dataclass(frozen=True)
class Link:
    """One level of a network, as a collective sees it."""

    bandwidth_bytes_per_second: float
    """Bus bandwidth (nccl-tests' convention): what passes a rank's slowest link in one direction."""
    latency_seconds: float
    """Latency of one hop: one step of a ring, one level of a tree."""
    bandwidth_spread: float
    """Standard deviation of the logarithm of the bandwidth: how surely it is known."""
    latency_spread: float
    source: LinkSource
    described: str
    """For messages: "check of 2026-11-20, all_reduce over 2 hosts", "25GbE", "nothing measured between hosts"."""
    hosts: int | None = None
    """How many hosts a check measured it between; None where no check did, or inside one."""


@dataclass(frozen=True)
class Network:
    """The links inside hosts and across them, in general and for each operation that a check measured."""

    inside: Link
    across: Link
    by_operation: Mapping[tuple[Level, str], Link] = field(default_factory=dict)
    """(level, operation) -> what a check measured of that very operation, for three ranks or more."""
    between_two: Mapping[tuple[Level, str], Link] = field(default_factory=dict)
    """The same for two ranks alone. There some operations are slower than the link, because both neighbours in a ring
    are the same rank (gloo's all-gather takes up to half as long again); with more ranks they are not."""

    def link(self, level: Level, operation: str) -> Link:
        """The link of an operation as the field names it (all_reduce, all_gather, reduce_scatter, all_to_all, ...)."""
        return self.by_operation.get((level, operation)) or (self.inside if level == "inside" else self.across)

    def link_between_two(self, level: Level, operation: str) -> Link:
        """The link of an operation between only two ranks."""
        return self.between_two.get((level, operation)) or self.link(level, operation)


VALID = ("25GbE", "HDR", "200Gb/s", "12.5GB/s", "100mbit", "4x200Gb/s")
"""An example of each form."""

_GBIT = {
    "SDR": 8.0, "DDR": 16.0, "QDR": 32.0, "FDR": 54.3, "EDR": 100.0, "HDR100": 100.0, "HDR": 200.0, "HDR200": 200.0,
    "NDR200": 200.0, "NDR": 400.0, "NDR400": 400.0, "XDR": 800.0,
}  # fmt: skip
"""Data rates of InfiniBand's generations on four lanes: up to FDR less than they signal (8b/10b, then 64b/66b)."""
_REACHED, _REACHED_SPREAD = 0.5, 0.7
"""Share of a line rate that the collectives of a training step reach, and the standard deviation of its logarithm. A
well set up InfiniBand adapter gives nccl-tests 0.96 (its issues 119 and 290), RoCE 0.75 (nccl issue 495), TCP without
tuning 0.72; what published trainings on named networks reached is less and varies more. Both were chosen on one source
of such tables (DLPerf, EDR): its 90 % intervals hold 71 % of held-out runs with them, and 47 % with 0.85 and 0.15. On
the other source (TensorFlow on 10GbE) it is 89 and 78 %."""
_ETHERNET_LATENCY, _INFINIBAND_LATENCY = 30e-6, 10e-6
"""Latencies of a hop. NCCL reckons with 10 to 14 us on its networks (`hwLat` in src/graph/tuning.cc); TCP goes through
the kernel at both ends."""
_LATENCY_SPREAD = 0.7

_RATE = re.compile(
    r"(?:(?P<count>[0-9]{1,4})\s*[xX*]\s*)?(?P<number>[0-9]{1,9}(?:\.[0-9]{1,9})?)\s*"
    r"(?:(?P<ethernet>[gG][bB][eE]|[gG][iI][gG][eE])|(?P<prefix>[kKmMgGtT])(?P<unit>[bB](?:[iI][tT])?)(?:/s|/sec|ps)?)"
)
_PREFIX = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_LANES = re.compile(r"[0-9]{1,4}\s*[xX*]\s*(?P<name>[a-zA-Z]{3}[0-9]{0,3})")


def declared_link(text: str) -> Link:
    """The link that collectives will get from a network across hosts that the user names.

    It is named as Ethernet ("25GbE"), as InfiniBand by generation ("HDR") or by rate: bits with a small b ("200Gb/s",
    "100mbit"), bytes with a large one ("12.5GB/s"), always decimal; several adapters of a host as "4x200Gb/s".

    Raises:
        RequestError: none of these forms, or a rate of 0.
    """
    named = text.strip()
    if named.upper() in _GBIT:
        return _link(named, _GBIT[named.upper()] * 1e9 / 8, _INFINIBAND_LATENCY)
    lanes = _LANES.fullmatch(named)
    if lanes is not None and lanes["name"].upper() in _GBIT:
        raise _refused(
            text,
            f"is either one link of so many lanes or so many adapters: {lanes['name'].upper()} names one adapter, "
            f"'4x{_GBIT[lanes['name'].upper()]:g}Gb/s' four",
        )
    rate = _RATE.fullmatch(named)
    if rate is None:
        raise _refused(text, "is no network that is known here")
    per_second = float(rate["number"]) * int(rate["count"] or 1)
    if rate["ethernet"]:
        per_second *= 1e9 / 8
    else:
        per_second *= _PREFIX[rate["prefix"].lower()] * (1.0 if rate["unit"] == "B" else 1 / 8)
    if per_second <= 0:
        raise _refused(text, "passes nothing")
    return _link(named, per_second, _ETHERNET_LATENCY)


def _link(named: str, bytes_per_second: float, latency: float) -> Link:
    return Link(
        bandwidth_bytes_per_second=_REACHED * bytes_per_second,
        latency_seconds=latency,
        bandwidth_spread=_REACHED_SPREAD,
        latency_spread=_LATENCY_SPREAD,
        source="declared",
        described=named,
    )


def _refused(text: str, why: str) -> RequestError:
    return RequestError(
        f"the network {shown(text)} {why}", valid=VALID, next_step="Or leave it out and measure it: `vitscale check`"
    )


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

    bandwidth_bytes_per_second: FloatArray
    """Greater than 0. Across hosts it is a host's, and its ranks share it."""
    latency_seconds: FloatArray
    """Latency of one hop. A call of NCCL takes 2.5 hops more before the first."""


@dataclass(frozen=True)
class AffineCost:
    """One algorithm of one operation: `seconds + seconds_per_byte x bytes of the tensor`."""

    seconds: FloatArray
    seconds_per_byte: FloatArray


def cheapest(algorithms: Iterable[AffineCost], tensor_bytes: float | FloatArray) -> FloatArray:
    """Seconds of the cheapest of some algorithms."""
    return reduce(np.minimum, (line.seconds + line.seconds_per_byte * tensor_bytes for line in algorithms))


def lines(
    operation: str,
    ranks: FloatArray,
    ranks_per_node: FloatArray,
    inside: LinkDraws,
    across: LinkDraws,
    backend: str,
    tree_advantage: FloatArray | float = 1.0,
) -> tuple[AffineCost, ...]:
    """The algorithms that the backend has for one call of an operation, to ask for many sizes (`cheapest`).

    Both of a line's numbers are (draws, configs), and exactly 0 for one rank. The tensor whose bytes are asked for is
    the whole one: what an all-gather puts out, what a reduce-scatter takes in.

    NCCL's costs are those by which it chooses itself (`ncclTopoTuneModel`, src/graph/tuning.cc): a ring for every
    operation, and a tree too for an all-reduce. Its aggregated trees for all-gather and reduce-scatter with one rank
    per host grow with the ranks too, and are left out. Bytes are those of the bus bandwidth (PERFORMANCE.md of
    nccl-tests). gloo has only rings (gloo/allreduce.cc, allgather.cc; torch asks for no other). It carries out a
    reduce-scatter as an all-reduce, and sends nearly as much in a reduce (docs/traffic.md).

    Args:
        operation: one of `OPERATIONS`.
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
    return tuple(AffineCost(np.where(alone, 0.0, fixed), np.where(alone, 0.0, per_byte)) for fixed, per_byte in costs)


@dataclass(frozen=True)
class _Group:
    """N ranks, g of them on each of n hosts."""

    ranks: FloatArray
    local: FloatArray
    nodes: FloatArray
    inside: LinkDraws
    across: LinkDraws
    tree_advantage: FloatArray

    @property
    def slowest(self) -> FloatArray:
        """Bandwidth of the slowest link that a ring over all ranks crosses."""
        b_in, b_ax = self.inside.bandwidth_bytes_per_second, self.across.bandwidth_bytes_per_second
        both = np.where(self.local > 1.0, np.minimum(b_in, b_ax), b_ax)
        return np.where(self.nodes > 1.0, both, b_in)


def _of(operation: str, group: _Group, *, gloo: bool) -> tuple[AffineCost, ...]:
    if operation == "all_to_all":
        return (_all_to_all(group),)
    if operation == "send":
        # From each rank to the next: the slowest of those boundaries sets the pace.
        hop = np.where(group.nodes > 1.0, group.across.latency_seconds, group.inside.latency_seconds)
        return (AffineCost(hop, 1.0 / group.slowest),)
    if operation == "all_reduce":
        return (_ring(group, 2.0),) if gloo else (_ring(group, 2.0), _tree(group))
    if operation == "barrier":
        # gloo has a dissemination barrier (gloo/barrier.cc), NCCL an all-reduce of one element.
        tree = _tree(group)
        return (AffineCost(tree.seconds, np.zeros_like(tree.seconds)),)
    return (_ring(group, 1.0),)


def _ring(group: _Group, turns: float) -> AffineCost:
    """`turns` x ((N - n) a_in + (n - 1) a_ax + (N - 1)/N S/B): an all-reduce goes around twice, all others once."""
    hops_inside, hops_across = group.ranks - group.nodes, group.nodes - 1.0
    return AffineCost(
        turns * (hops_inside * group.inside.latency_seconds + hops_across * group.across.latency_seconds),
        turns * (group.ranks - 1.0) / group.ranks / group.slowest,
    )


def _tree(group: _Group) -> AffineCost:
    """`2 ((g - 1) a_in + ceil(log2 n) a_ax)`, and the bytes: a chain inside each host, a tree of hosts, up and down.

    Inside, a rank sends 2 S. So does an adapter at its worst, among more than two hosts. Between two hosts it sends as
    little as S, because each of NCCL's two trees has one of the hosts as its root: that is how bus bandwidths above an
    adapter's come about (nccl-tests, issue 196). Not every job gets that: in twelve published series exposed transfers
    grew 1.26 times from two to four hosts (median), and not twofold. So it is a parameter.
    """
    depth = np.ceil(np.log2(group.nodes))
    over = np.where(group.nodes > 2.0, 2.0, 2.0 - group.tree_advantage) / group.across.bandwidth_bytes_per_second
    inside = np.where(group.local > 1.0, 2.0 / group.inside.bandwidth_bytes_per_second, 0.0)
    return AffineCost(
        2.0 * ((group.local - 1.0) * group.inside.latency_seconds + depth * group.across.latency_seconds),
        np.maximum(inside, np.where(group.nodes > 1.0, over, 0.0)) / _TREE,
    )


def _all_to_all(group: _Group) -> AffineCost:
    """Each rank sends S/N to each other: (g - 1)/N S inside, and a host's g ranks together g (N - g)/N S across."""
    ranks, local = group.ranks, group.local
    within = (local - 1.0) / ranks / group.inside.bandwidth_bytes_per_second
    beyond = local * (ranks - local) / ranks / group.across.bandwidth_bytes_per_second
    hops = (local - 1.0) * group.inside.latency_seconds + (group.nodes - 1.0) * group.across.latency_seconds
    return AffineCost(hops, np.maximum(within, beyond))
