"""The network as a check measured it, as the user declared it, or as clusters in general have it."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import numpy as np

from vitscale.prediction.network.links import Level, Link, LinkDraws, Network, lines
from vitscale.store.checks import SPLIT_GROUPS, CheckRecord, CollectiveFit, bus_factor

ASSUMED_INSIDE = Link(16e9, 10e-6, 1.2, 1.0, "assumed", "nothing measured inside a host")
"""Within two standard deviations: 1.5 to 180 GB/s. PCIe 3 through a host's memory reaches 3, NVLink 100 and more."""
ASSUMED_ACROSS = Link(5e9, 30e-6, 1.3, 1.0, "assumed", "nothing measured between hosts")
"""Within two standard deviations: 0.4 to 67 GB/s. 10GbE reaches 1 GB/s, a 400 Gb/s adapter 45."""

_LEAST_SPREAD = 0.05
"""Least spread of a measured bandwidth: what another day, or another pair of hosts, makes."""
_LATENCY_SPREAD = 0.3
"""Spread of a measured latency: what a call takes before its first hop is not told apart from the hops (`collectives`
assumes how much)."""
_OF_RDMA, _OF_RDMA_SPREAD = 0.88, 0.12
"""Share of what one host writes to another that a collective reaches: an adapter gives collectives 0.72 to 0.96 of its
line rate (`links`), and ib_write_bw 0.97 and more (linux-rdma/perftest issue 225: 98 of 100 Gb/s)."""
_LEAST_LATENCY = 5e-7
"""Least latency of a hop: a link of the same board takes as long. A fit may find none at all."""


def network_of(check: CheckRecord | None, declared: Link | None = None) -> Network:
    """The network between ranks as a check measured it, else as assumed; across hosts, as the user declared it if so.

    Args:
        check: a check of the cluster. One on a single host says nothing of the network between hosts, and one with a
            rank per host nothing of the network inside them.
        declared: the link across hosts; it takes the place of what was measured.
    """
    measured, of_two = ({}, {}) if check is None else _measured(check)
    if declared is not None:
        measured, of_two = ({k: v for k, v in links.items() if k[0] == "inside"} for links in (measured, of_two))
    inside = _typical(measured, "inside") or ASSUMED_INSIDE
    across = declared or _typical(measured, "across") or ASSUMED_ACROSS
    return Network(inside, across, measured, of_two)


_Links = dict[tuple[Level, str], Link]


def _typical(measured: _Links, level: Level) -> Link | None:
    """A level's link as measured with an all-reduce, else with any operation; None: not measured."""
    of_level = [link for (of, _), link in measured.items() if of == level]
    return measured.get((level, "all_reduce")) or (of_level[0] if of_level else None)


def _measured(check: CheckRecord) -> tuple[_Links, _Links]:
    """(level, operation) -> link, for three ranks or more and for two.

    All ranks together, several on each of several hosts, cross both levels. They reach no more than hosts pass between
    them. That counts where it is more than one rank of each host reached, which may have driven only one of a host's
    adapters.
    """
    world = check.request.world
    several: _Links = {}
    of_two: _Links = {}
    for fit in check.fits:
        # Several groups along an axis share links: what they reach is not what a link has.
        if fit.ranks < 2 or fit.bandwidth_bytes_per_second <= 0 or fit.group in SPLIT_GROUPS:
            continue
        nodes, local = _spread_over(fit, world.nodes, world.ranks_per_node)
        level: Level = "across" if nodes > 1 else "inside"
        links = of_two if fit.ranks == 2 else several
        link = _link(check, fit, nodes, local)
        other = links.get((level, fit.operation))
        if other is None:
            links[level, fit.operation] = link
        elif fit.group == "all ranks" and link.bandwidth_bytes_per_second > other.bandwidth_bytes_per_second:
            links[level, fit.operation] = replace(link, latency_seconds=other.latency_seconds)
    two = {key: _between_two(link, key[0], of_two) for key, link in of_two.items()}
    return {key: _beyond_two(link, key[0], of_two) for key, link in two.items()} | several, two


def _between_two(link: Link, level: Level, of_two: _Links) -> Link:
    """The link of an operation between two ranks, by what all operations of that check say of it.

    Its latency is at least the all-reduce's, because every operation takes a hop. A lower one is where the line through
    the sizes happened to meet 0, and would make many small calls cost nothing. An operation that reached less than the
    fastest is taken to reach the geometric mean of the two: gloo's all-gather between two takes the link's time or half
    as long again from one call to the next (docs/calibration-lab.md), and a check of a few large calls saw either.
    """
    like = [other for (its_level, _), other in of_two.items() if its_level == level]
    fastest = max(other.bandwidth_bytes_per_second for other in like)
    latest = of_two.get((level, "all_reduce"), link).latency_seconds
    return replace(
        link,
        bandwidth_bytes_per_second=math.sqrt(link.bandwidth_bytes_per_second * fastest),
        latency_seconds=max(link.latency_seconds, latest),
    )


def _beyond_two(link: Link, level: Level, of_two: _Links) -> Link:
    """The link of an operation among more ranks, from two: its own latency of a hop, and the fastest's bandwidth."""
    fastest = max(other.bandwidth_bytes_per_second for (its_level, _), other in of_two.items() if its_level == level)
    return replace(link, bandwidth_bytes_per_second=fastest)


def _spread_over(fit: CollectiveFit, nodes: int, ranks_per_node: int) -> tuple[int, int]:
    """(hosts, ranks on each) of the ranks that took part."""
    if fit.group == "inside nodes":
        return 1, fit.ranks
    if fit.group == "across nodes":
        return fit.ranks, 1
    local = min(ranks_per_node, fit.ranks)
    return (math.ceil(fit.ranks / local), local) if nodes > 1 else (1, fit.ranks)


def _link(check: CheckRecord, fit: CollectiveFit, nodes: int, local: int) -> Link:
    """The link with which the cheapest of `collectives.lines` gives what was fitted.

    A fit has the latency of a whole call and nccl-tests' bus bandwidth. A link has the latency of one hop, and the
    bandwidth of what really passes: twice the fit's for gloo's reduce-scatter, which is an all-reduce.
    """
    backend = _backend(check)
    of = f"{fit.operation} over {f'{nodes} hosts' if nodes > 1 else f'{fit.ranks} ranks of a host'}"
    described = f"{check.imported}: {of}" if check.imported else f"check {check.id}: {of}"
    if fit.operation in ("rdma", "send_recv"):
        reached, spread = (_OF_RDMA, _OF_RDMA_SPREAD) if fit.operation == "rdma" else (1.0, _LEAST_SPREAD)
        assumed = ASSUMED_ACROSS if nodes > 1 else ASSUMED_INSIDE
        return replace(
            assumed,
            bandwidth_bytes_per_second=reached * fit.bandwidth_bytes_per_second,
            bandwidth_spread=spread,
            source="check",
            described=described,
        )
    unit, free = np.asarray(1.0), np.asarray(0.0)
    unhindered = np.asarray(np.inf)
    hop = LinkDraws(unhindered, unit)
    pipe = LinkDraws(unit, free)
    through_memory = LinkDraws(unhindered, free)
    transfer = (fit.operation, np.asarray(float(fit.ranks)), np.asarray(float(local)))
    hops = min(float(line.seconds) for line in lines(*transfer, hop, hop, backend))
    volume = min(
        float(line.seconds_per_byte) for line in lines(*transfer, through_memory if nodes > 1 else pipe, pipe, backend)
    )
    bandwidth = fit.bandwidth_bytes_per_second * volume / bus_factor(fit.operation, fit.ranks)
    assumed = ASSUMED_ACROSS if nodes > 1 else ASSUMED_INSIDE
    return Link(
        bandwidth_bytes_per_second=bandwidth,
        latency_seconds=max(_LEAST_LATENCY, fit.latency_seconds / hops)
        if fit.latency_known
        else assumed.latency_seconds,
        bandwidth_spread=math.hypot(_LEAST_SPREAD, min(1.0, fit.worst_residual) / 4, _repeats_differ(check, fit)),
        latency_spread=math.hypot(_LATENCY_SPREAD, min(1.0, fit.worst_residual))
        if fit.latency_known
        else assumed.latency_spread,
        source="check",
        described=described,
        hosts=nodes if nodes > 1 else None,
    )


def _backend(check: CheckRecord) -> str:
    """The backend that the ranks told; where none did, that of their device."""
    told = {rank.facts.environment.backend for rank in check.ranks if rank.facts is not None}
    return next((name for name in told if name), "gloo" if check.request.device == "cpu" else "nccl")


def _repeats_differ(check: CheckRecord, fit: CollectiveFit) -> float:
    """Standard error of the logarithm of the largest size's time, over repeats; 0 where there is one."""
    largest = [
        line.seconds
        for rank in check.ranks
        for line in rank.collectives
        if (line.group, line.operation, line.size_bytes) == (fit.group, fit.operation, fit.largest_size_bytes)
    ]
    slowest = [max(times) for times in zip(*largest, strict=False)]
    if len(slowest) < 2 or min(slowest) <= 0:
        return 0.0
    return min(1.0, statistics.stdev(map(math.log, slowest)) / math.sqrt(len(slowest)))
