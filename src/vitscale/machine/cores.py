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
from typing import Literal

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
    """A physical core that this process may use, at least in part."""

    node: int | None
    """Its memory node; None where the kernel does not say."""
    number: int
    """The lowest number of its logical cores, allowed or not, which is the same for all processes of the host."""
    logical: tuple[int, ...]
    """Its logical cores that are allowed."""


def physical_cores(allowed: Iterable[int] | None = None, sysfs: Path = _SYSFS) -> tuple[PhysicalCore, ...]:
    """Return the physical cores that have logical cores in `allowed`, by memory node and number.

    Where the kernel does not say which are siblings, every logical core counts as a physical one.

    Args:
        allowed: numbers of logical cores; None: this process's mask.
        sysfs: the kernel's folder of devices.
    """
    logical_cores = usable_cores() if allowed is None else frozenset(allowed)
    node_by_core: dict[int, int] = {}
    for node, cores in _cores_by_node(sysfs).items():
        node_by_core |= dict.fromkeys(cores, node)
    siblings: dict[tuple[int | None, int], list[int]] = {}
    for core in sorted(logical_cores):
        number = min(_siblings(core, sysfs))
        siblings.setdefault((node_by_core.get(core), number), []).append(core)
    physical = [PhysicalCore(node, number, tuple(logical)) for (node, number), logical in siblings.items()]
    return tuple(sorted(physical, key=_node_then_number))


def _node_then_number(core: PhysicalCore) -> tuple[int, ...]:
    """Key by which cores are sorted; those whose node is not known come first."""
    return (-1 if core.node is None else core.node), core.number


def numa_nodes(cores: frozenset[int], sysfs: Path = _SYSFS) -> tuple[int, ...] | None:
    """Return the memory nodes of these logical cores, in order; None where the kernel does not know that of each."""
    allowed_by_node = {node: cores & node_cores for node, node_cores in _cores_by_node(sysfs).items()}
    known_cores = frozenset[int]().union(*allowed_by_node.values())
    if not known_cores or known_cores != cores:
        return None
    return tuple(sorted(node for node, allowed in allowed_by_node.items() if allowed))


def _siblings(core: int, sysfs: Path) -> list[int]:
    """Return the logical cores of a logical core's physical one; itself alone where the kernel does not say."""
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
    """Read the kernel's lists of numbers: "0-2,8" is [0, 1, 2, 8].

    Raises:
        ValueError: it is none, or empty.
    """
    cores: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
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
            row = [int(word) for word in (sysfs / f"node/node{node}/distance").read_text(encoding="ascii").split()]
        except (OSError, ValueError):
            continue
        if len(row) == len(nodes):  # else there are nodes without cores, whose place in the row is not known
            distances[node] = dict(zip(nodes, row, strict=True))
    return distances


def is_bound(own: frozenset[int], parent: frozenset[int], host: frozenset[int]) -> bool:
    """Whether the launcher has bound a rank: the rank has fewer cores than the launcher has within the rank's cpuset.

    Args:
        own: the rank's mask when it started.
        parent: the mask of the process that started the rank.
        host: the cores that the rank's cpuset allows (a container's, a job step's).
    """
    return own < parent & host


def bound_by_launcher() -> bool:
    """Whether the launcher has bound this process (`is_bound`).

    For a moment the process asks for all cores: the kernel grants those of its cpuset.
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
    """Return the logical cores that a rank is pinned to; None where the host has fewer than all ranks' threads.

    A rank gets as many physical cores as it has threads, or its equal share where there are fewer, each with its
    siblings. Every rank works out the same table of all ranks of its host. Ranks whose GPU's memory node has room come
    first, then those that fit on another node, the nearest first, and last those that fit on no single node.

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
        return _consecutive(local_rank, ranks, threads, cores)
    if 0 < len(gpu_nodes) < ranks:
        # The launcher shows each rank only its own GPU: the others have different ones, but which is not known. What is
        # decided here must not depend on this rank's, or ranks would take one another's cores.
        cores_by_node = _by_node(cores)
        every_node_holds_all = all(len(on_node) >= ranks * cores_per_rank for on_node in cores_by_node.values())
        if cores_per_rank == threads and every_node_holds_all:
            first_node = next(iter(cores_by_node.values()))
            near_gpu = cores_by_node.get(gpu_nodes[local_rank % len(gpu_nodes)], first_node)
            start = local_rank * cores_per_rank
            return _logical(near_gpu[start : start + cores_per_rank], threads)
        gpu_nodes = host_nodes if len(host_nodes) >= ranks else ()
    node_by_rank = [gpu_nodes[rank % len(gpu_nodes)] if gpu_nodes else None for rank in range(ranks)]
    table = _FreeCores(cores, cores_per_rank, distances or {}).dealt_to(node_by_rank)
    shares = [_logical(physical, threads) for physical in table]
    return shares[local_rank] if all(shares) else _consecutive(local_rank, ranks, threads, cores)


def _by_node(cores: Iterable[PhysicalCore]) -> dict[int | None, list[PhysicalCore]]:
    """Return memory node -> its cores, in the order of `cores`."""
    by_node: dict[int | None, list[PhysicalCore]] = {}
    for core in cores:
        by_node.setdefault(core.node, []).append(core)
    return by_node


class _FreeCores:
    """The cores of a host that no rank has yet."""

    def __init__(self, cores: Sequence[PhysicalCore], cores_per_rank: int, distances: Distances) -> None:
        """Begin with all cores of the host, which are enough for `cores_per_rank`, above 0, on each rank."""
        self._by_node = _by_node(cores)
        self._cores_per_rank = cores_per_rank
        self._distances = distances

    def dealt_to(self, node_by_rank: Nodes) -> list[list[PhysicalCore]]:
        """Return the cores of each rank.

        Args:
            node_by_rank: the memory node near which each rank should lie; None where that does not matter.
        """
        shares: list[list[PhysicalCore]] = [[] for _ in node_by_rank]
        for rank, node in enumerate(node_by_rank):
            if node is not None:
                shares[rank] = self._take_from_one([node])
        for rank, node in enumerate(node_by_rank):
            shares[rank] = shares[rank] or self._take_from_one(self._nearest_first(node))
        for rank, node in enumerate(node_by_rank):
            shares[rank] = shares[rank] or self._take_from_several(self._nearest_first(node))
        return shares

    def _nearest_first(self, node: int | None) -> list[int | None]:
        """Return all nodes by their distance to one; in the host's order where distances are not known."""

        def distance(other: int | None) -> int:
            if node is None or other is None or other == node:
                return 0
            return self._distances.get(node, {}).get(other, _UNKNOWN_DISTANCE)

        return sorted(self._by_node, key=distance)

    def _take_from_one(self, nodes: Iterable[int | None]) -> list[PhysicalCore]:
        """Take a rank's cores from the first of these nodes that has enough; none where no node has."""
        for node in nodes:
            free = self._by_node.get(node, [])
            if len(free) >= self._cores_per_rank:
                self._by_node[node] = free[self._cores_per_rank :]
                return free[: self._cores_per_rank]
        return []

    def _take_from_several(self, nodes: Iterable[int | None]) -> list[PhysicalCore]:
        """Take a rank's cores from as many of these nodes as it needs."""
        taken: list[PhysicalCore] = []
        for node in nodes:
            lacking = self._cores_per_rank - len(taken)
            taken += self._by_node[node][:lacking]
            self._by_node[node] = self._by_node[node][lacking:]
        return taken


_UNKNOWN_DISTANCE = 8192
"""More than any distance in the firmware's tables."""


def _logical(cores: Sequence[PhysicalCore], threads: int) -> tuple[int, ...] | None:
    """Return the logical cores of physical ones; None where they are fewer than threads."""
    logical: list[int] = []
    for core in cores:
        logical += core.logical
    return tuple(sorted(logical)) if len(logical) >= threads else None


def _consecutive(local_rank: int, ranks: int, threads: int, cores: Sequence[PhysicalCore]) -> tuple[int, ...] | None:
    """Return consecutive logical cores, where whole physical ones do not suffice and ranks must share some of these.

    None where the host has fewer logical cores than all ranks have threads.
    """
    logical: list[int] = []
    for core in cores:
        logical += core.logical
    if ranks * threads > len(logical):
        return None
    start = local_rank * threads
    return tuple(sorted(logical[start : start + threads]))


Products = Literal["tiles", "words", "widened"]
"""Ways to multiply 16-bit numbers: AMX in tiles, AVX512-BF16, or, on a processor that has neither, in 32 bits."""


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


def products_of_16_bits() -> Products:
    """Return how this machine's processor multiplies 16-bit numbers, within the limit set for oneDNN."""
    return _products(cpu_facts().get("flags", ""), os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper())


@cache
def _products(flags: str, limit: str) -> Products:
    """Return the way to multiply for /proc/cpuinfo's flags and oneDNN's limit ("ALL", "AVX512_CORE_BF16")."""
    is_amx_allowed = limit == "ALL" or "AMX" in limit
    if is_amx_allowed and "amx_bf16" in flags.split():
        return "tiles"
    return "words" if "avx512_bf16" in flags.split() else "widened"
