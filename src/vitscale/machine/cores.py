"""Which cores a rank computes on: whole physical cores, of one memory node where they fit, near its GPU.

A physical core has one logical core or several, its siblings (SMT), which the kernel counts one by one. Memory nodes
are those of NUMA. Also how the kernel describes the processor.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from vitscale.base.processors import usable_cores

_SYSFS = Path("/sys/devices/system")
_MOST_CORES = 8192
"""NR_CPUS of the largest kernels for x86."""

Nodes = Sequence[int | None]
"""A memory node for each of several ranks or GPUs; None where it is not known."""
Distances = Mapping[int, Mapping[int, int]]
"""Distances between memory nodes, as `node_distances` returns them."""


@dataclass(frozen=True)
class PhysicalCore:
    """A physical core that this process may use, or a part of one.

    Example: logical cores 3 and 67 are siblings and make physical core 3 of memory node 0.
    """

    node: int | None
    """Its memory node; None where the kernel does not say."""
    number: int
    """The lowest number of its logical cores, allowed or not, which is the same for all processes of the host."""
    logical: tuple[int, ...]
    """Its logical cores that are allowed, in ascending order."""


class _CoreKey(NamedTuple):
    """What all logical cores of a physical core have in common."""

    node: int | None
    number: int
    """The lowest number of all its logical cores."""


def physical_cores(allowed: Iterable[int] | None = None, sysfs: Path = _SYSFS) -> tuple[PhysicalCore, ...]:
    """Return the physical cores that have logical cores in `allowed`, ordered by memory node, then by number.

    Where the kernel does not say which logical cores are siblings, each one counts as a physical core.

    Args:
        allowed: numbers of logical cores; None: those that this process may use.
        sysfs: the kernel's folder of devices.
    """
    allowed_cores = usable_cores() if allowed is None else frozenset(allowed)
    node_by_logical_core: dict[int, int] = {}
    for node, node_cores in _cores_by_node(sysfs).items():
        node_by_logical_core |= dict.fromkeys(node_cores, node)
    allowed_siblings: dict[_CoreKey, list[int]] = {}
    for logical_core in sorted(allowed_cores):
        lowest_sibling = min(_siblings_of(logical_core, sysfs))
        key = _CoreKey(node_by_logical_core.get(logical_core), lowest_sibling)
        allowed_siblings.setdefault(key, []).append(logical_core)
    cores = [PhysicalCore(key.node, key.number, tuple(siblings)) for key, siblings in allowed_siblings.items()]
    return tuple(sorted(cores, key=_node_then_number))


def _node_then_number(core: PhysicalCore) -> tuple[int, ...]:
    """Key by which cores are sorted; those whose node is not known come first."""
    node = -1 if core.node is None else core.node
    return (node, core.number)


def numa_nodes(cores: frozenset[int], sysfs: Path = _SYSFS) -> tuple[int, ...] | None:
    """Return the memory nodes of these logical cores, in order; None where the kernel does not say it for every core.

    Return None also for no cores.
    """
    cores_by_node = {node: cores & node_cores for node, node_cores in _cores_by_node(sysfs).items()}
    cores_with_node = frozenset[int]().union(*cores_by_node.values())
    if not cores_with_node or cores_with_node != cores:
        return None
    return tuple(sorted(node for node, cores_on_node in cores_by_node.items() if cores_on_node))


def _siblings_of(core: int, sysfs: Path) -> list[int]:
    """Return all logical cores of the physical core that a logical core belongs to, itself included.

    Return it alone where the kernel does not say which they are.
    """
    try:
        siblings = _cpu_list((sysfs / f"cpu/cpu{core}/topology/thread_siblings_list").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return [core]
    return siblings if core in siblings else [core]


def _cores_by_node(sysfs: Path) -> dict[int, frozenset[int]]:
    """Return memory node -> its logical cores, for nodes that have some."""
    nodes: dict[int, frozenset[int]] = {}
    for folder in (sysfs / "node").glob("node*"):
        number = folder.name.removeprefix("node")
        if number.isascii() and number.isdigit():
            try:
                nodes[int(number)] = frozenset(_cpu_list((folder / "cpulist").read_text(encoding="ascii")))
            except (OSError, ValueError):  # a node without cores has an empty list
                continue
    return nodes


def _cpu_list(text: str) -> list[int]:
    """Read a list of numbers as the kernel writes it: "0-2,8" is [0, 1, 2, 8].

    Raises:
        ValueError: the text is empty, or no such list.
    """
    cores: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")  # "8" has no last
        cores += range(int(first), int(last or first) + 1)
    return cores


def node_distances(sysfs: Path = _SYSFS) -> dict[int, dict[int, int]]:
    """Return node -> other node -> their distance, as the firmware states it; nodes without a known row are left out.

    Example: {0: {0: 10, 1: 21}, 1: {0: 21, 1: 10}}, where 10 is a node's distance to itself.
    """
    nodes = sorted(_cores_by_node(sysfs))
    distances = {}
    for node in nodes:
        try:
            text = (sysfs / f"node/node{node}/distance").read_text(encoding="ascii")
            row = [int(word) for word in text.split()]  # the distance to each node, in order of their numbers
        except (OSError, ValueError):
            continue
        if len(row) == len(nodes):  # else there are nodes without cores, whose place in the row is not known
            distances[node] = dict(zip(nodes, row, strict=True))
    return distances


def is_bound(own: frozenset[int], parent: frozenset[int], host: frozenset[int]) -> bool:
    """Whether a rank's launcher has bound the rank to some cores.

    It has if the rank may use fewer cores than the process that started it, of those that the rank's cpuset allows.

    Args:
        own: numbers of the logical cores that the rank may use when it starts.
        parent: those that the process may use which started the rank.
        host: those that the rank's cpuset allows (a container's, a job step's).
    """
    inheritable = parent & host
    return own < inheritable


def bound_by_launcher() -> bool:
    """Whether the launcher has bound this process to some cores (`is_bound`).

    To find out which cores its cpuset allows, the process asks for all cores for a moment: the kernel grants those.
    """
    if not hasattr(os, "sched_setaffinity"):
        return False
    own_mask = usable_cores()
    try:
        parent_mask = frozenset(os.sched_getaffinity(os.getppid()))
        os.sched_setaffinity(0, range(_MOST_CORES))
        cpuset = usable_cores()
        os.sched_setaffinity(0, own_mask)
    except OSError:
        return False
    return is_bound(own_mask, parent_mask, cpuset)


def share_of_cores(
    local_rank: int,
    ranks: int,
    threads: int,
    cores: Sequence[PhysicalCore],
    gpu_nodes: Nodes = (),
    distances: Distances | None = None,
    host_nodes: Nodes = (),
) -> tuple[int, ...] | None:
    """Return the logical cores that a rank is pinned to; None where the host has fewer than its ranks have threads.

    A rank gets as many physical cores as it has threads, or an equal share of them where there are fewer, each with its
    siblings. Every rank works out the cores of all ranks of its host, with the same result. Ranks get cores in this
    order: those whose GPU's memory node has room; those that fit on another node, the nearest one; those that fit on
    no single node.

    Args:
        local_rank: the rank's number on this host, from 0.
        ranks: number of ranks on this host.
        threads: threads of each rank.
        cores: the host's cores, in the order of `physical_cores`.
        gpu_nodes: the memory node of each GPU that this rank sees, in CUDA's order; None where unknown.
        distances: distances between memory nodes (`node_distances`).
        host_nodes: the memory node of each GPU of the host; asked where this rank sees fewer GPUs than there are ranks.
    """
    cores_per_rank = min(threads, len(cores) // ranks)
    if not cores_per_rank:
        return _consecutive_cores(local_rank, ranks, threads, cores)
    known_gpu_nodes = gpu_nodes
    sees_own_gpu_only = 0 < len(gpu_nodes) < ranks
    if sees_own_gpu_only:
        # Other ranks have other GPUs, but this rank does not know which. What follows must not depend on this rank's
        # GPU, or ranks would take one another's cores.
        cores_by_node = _group_by_node(cores)
        does_every_node_hold_all = all(len(on_node) >= ranks * threads for on_node in cores_by_node.values())
        if does_every_node_hold_all:
            gpu_node = gpu_nodes[local_rank % len(gpu_nodes)]
            return _share_of_node(local_rank, threads, cores_by_node, gpu_node)
        known_gpu_nodes = host_nodes if len(host_nodes) >= ranks else ()
    node_by_rank: list[int | None] = [None] * ranks
    if known_gpu_nodes:
        node_by_rank = [known_gpu_nodes[rank % len(known_gpu_nodes)] for rank in range(ranks)]
    cores_by_rank = _FreeCores(cores, cores_per_rank, distances or {}).take_for_ranks(node_by_rank)
    logical_by_rank = [_logical_cores(rank_cores, threads) for rank_cores in cores_by_rank]
    if not all(logical_by_rank):
        return _consecutive_cores(local_rank, ranks, threads, cores)
    return logical_by_rank[local_rank]


def _share_of_node(
    local_rank: int, threads: int, cores_by_node: Mapping[int | None, Sequence[PhysicalCore]], node: int | None
) -> tuple[int, ...] | None:
    """Return the logical cores of a rank on one memory node, where every node has room for all ranks.

    A rank has the same place on every node, so that no two ranks take the same cores, whichever nodes they choose. An
    unknown node stands for the first one.
    """
    first_node_cores = next(iter(cores_by_node.values()))
    node_cores = cores_by_node.get(node, first_node_cores)
    start = local_rank * threads
    return _logical_cores(node_cores[start : start + threads], threads)


def _group_by_node(cores: Iterable[PhysicalCore]) -> dict[int | None, list[PhysicalCore]]:
    """Return memory node -> its cores, in the order of `cores`."""
    cores_by_node: dict[int | None, list[PhysicalCore]] = {}
    for core in cores:
        cores_by_node.setdefault(core.node, []).append(core)
    return cores_by_node


class _FreeCores:
    """The cores of a host that no rank has yet."""

    def __init__(self, cores: Sequence[PhysicalCore], cores_per_rank: int, distances: Distances) -> None:
        """Begin with all cores of the host, which are enough for `cores_per_rank`, above 0, on each rank."""
        self._by_node = _group_by_node(cores)
        self._cores_per_rank = cores_per_rank
        self._distances = distances

    def take_for_ranks(self, node_by_rank: Nodes) -> list[list[PhysicalCore]]:
        """Take the cores of all ranks, and return the cores of each rank, by rank.

        Three rounds: ranks whose node has room, then those that fit on any one node, then those that fit on none.

        Args:
            node_by_rank: the memory node near which each rank should lie; None where that does not matter.
        """
        cores_by_rank: list[list[PhysicalCore]] = [[] for _ in node_by_rank]
        for rank, node in enumerate(node_by_rank):
            if node is not None:
                cores_by_rank[rank] = self._take_from_one([node])
        for rank, node in enumerate(node_by_rank):
            if not cores_by_rank[rank]:
                cores_by_rank[rank] = self._take_from_one(self._nearest_first(node))
        for rank, node in enumerate(node_by_rank):
            if not cores_by_rank[rank]:
                cores_by_rank[rank] = self._take_from_several(self._nearest_first(node))
        return cores_by_rank

    def _nearest_first(self, node: int | None) -> list[int | None]:
        """Return all nodes of the host by their distance to `node`; in the host's order where that is not known."""

        def distance_to(other: int | None) -> int:
            if node is None or other is None or other == node:
                return 0
            return self._distances.get(node, {}).get(other, _UNKNOWN_DISTANCE)

        return sorted(self._by_node, key=distance_to)

    def _take_from_one(self, nodes: Iterable[int | None]) -> list[PhysicalCore]:
        """Take a rank's cores from the first of these nodes that has enough; take none where no node has."""
        for node in nodes:
            free = self._by_node.get(node, [])
            if len(free) >= self._cores_per_rank:
                self._by_node[node] = free[self._cores_per_rank :]
                return free[: self._cores_per_rank]
        return []

    def _take_from_several(self, nodes: Iterable[int | None]) -> list[PhysicalCore]:
        """Take a rank's cores from as many of these nodes as it needs, in their order."""
        rank_cores: list[PhysicalCore] = []
        for node in nodes:
            lacking = self._cores_per_rank - len(rank_cores)
            rank_cores += self._by_node[node][:lacking]
            self._by_node[node] = self._by_node[node][lacking:]
        return rank_cores


_UNKNOWN_DISTANCE = 8192
"""More than any distance in the firmware's tables."""


def _logical_cores(cores: Sequence[PhysicalCore], threads: int) -> tuple[int, ...] | None:
    """Return the logical cores of physical ones, in ascending order; None where they are fewer than `threads`."""
    logical: list[int] = []
    for core in cores:
        logical += core.logical
    return tuple(sorted(logical)) if len(logical) >= threads else None


def _consecutive_cores(
    local_rank: int, ranks: int, threads: int, cores: Sequence[PhysicalCore]
) -> tuple[int, ...] | None:
    """Return as many logical cores as a rank has threads, in ascending order, each of which belongs to this rank alone.

    The host's logical cores, siblings side by side, are dealt out in a row. So two ranks may share a physical core:
    this is for hosts on which the physical cores do not suffice. Return None where the host has fewer logical cores
    than all ranks have threads.
    """
    logical: list[int] = []
    for core in cores:
        logical += core.logical
    if ranks * threads > len(logical):
        return None
    start = local_rank * threads
    return tuple(sorted(logical[start : start + threads]))


@cache
def cpu_facts(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Return the kernel's description of the first processor, by key ("model name"); empty where there is none."""
    try:
        first_processor = cpuinfo.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return {}
    facts = {}
    for line in first_processor.splitlines():
        key, _, value = line.partition(":")
        facts[key.strip()] = value.strip()
    return facts
