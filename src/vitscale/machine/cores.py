"""Which cores a rank computes on: whole physical cores, of one memory node where they fit, near its GPU.

Also what the kernel tells of the processor."""

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


@dataclass(frozen=True)
class PhysicalCore:
    """A physical core that this process may use, at least in part."""

    node: int | None
    """Its memory node; None where the kernel does not tell."""
    number: int
    """The lowest number of its logical cores, allowed or not, which is the same for all processes of the host."""
    logical: tuple[int, ...]
    """Its logical cores that are allowed."""


def physical_cores(allowed: Iterable[int] | None = None, sysfs: Path = _SYSFS) -> tuple[PhysicalCore, ...]:
    """The physical cores of the logical cores `allowed` (default: this process's mask), by memory node and number.

    Where the kernel does not tell siblings, every logical core counts as a physical one.
    """
    cores = usable_cores() if allowed is None else frozenset(allowed)
    node_of = {core: node for node, own in _cores_of_nodes(sysfs).items() for core in own}
    logical: dict[tuple[int | None, int], list[int]] = {}
    for core in sorted(cores):
        logical.setdefault((node_of.get(core), min(_siblings(core, sysfs))), []).append(core)
    by_core = [PhysicalCore(node, number, tuple(own)) for (node, number), own in logical.items()]
    return tuple(sorted(by_core, key=lambda core: (-1 if core.node is None else core.node, core.number)))


def numa_nodes(cores: frozenset[int], sysfs: Path = _SYSFS) -> tuple[int, ...] | None:
    """The memory nodes that `cores` belong to, in order; None where the kernel does not tell of every core."""
    nodes = {node: own & cores for node, own in _cores_of_nodes(sysfs).items()}
    told = frozenset[int]().union(*nodes.values())
    return tuple(sorted(node for node, own in nodes.items() if own)) if told and told == cores else None


def _siblings(core: int, sysfs: Path) -> list[int]:
    try:
        siblings = _cpu_list((sysfs / f"cpu/cpu{core}/topology/thread_siblings_list").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return [core]
    return siblings if core in siblings else [core]


def _cores_of_nodes(sysfs: Path) -> dict[int, frozenset[int]]:
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
    cores: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


def node_distances(sysfs: Path = _SYSFS) -> dict[int, dict[int, int]]:
    """Distances between memory nodes, from the firmware (10: the node itself); without nodes that it does not tell."""
    numbers = sorted(_cores_of_nodes(sysfs))
    distances = {}
    for node in numbers:
        try:
            told = [int(word) for word in (sysfs / f"node/node{node}/distance").read_text(encoding="ascii").split()]
        except (OSError, ValueError):
            continue
        if len(told) == len(numbers):  # else there are nodes without cores, whose place in the row is not known
            distances[node] = dict(zip(numbers, told, strict=True))
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
    """`is_bound` for this process, which for a moment asks for all cores: the kernel grants those of its cpuset."""
    if not hasattr(os, "sched_setaffinity"):
        return False
    own = usable_cores()
    try:
        parent = frozenset(os.sched_getaffinity(os.getppid()))
        os.sched_setaffinity(0, range(_MOST_CORES))
        host = usable_cores()
        os.sched_setaffinity(0, own)
    except OSError:
        return False
    return is_bound(own, parent, host)


def share_of_cores(
    local_rank: int,
    ranks: int,
    threads: int,
    cores: Sequence[PhysicalCore],
    gpu_nodes: Nodes = (),
    distances: Mapping[int, Mapping[int, int]] | None = None,
    host_nodes: Nodes = (),
) -> tuple[int, ...] | None:
    """The logical cores that a rank is pinned to; None where the host has fewer than all ranks' threads.

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
    each = min(threads, len(cores) // ranks)
    if not each:
        return _consecutive(local_rank, ranks, threads, cores)
    if 0 < len(gpu_nodes) < ranks:
        # The launcher shows each rank only its own GPU: the others have different ones, but which is not known. What is
        # decided here must not depend on this rank's, or ranks would take one another's cores.
        by_node: dict[int | None, list[PhysicalCore]] = {}
        for core in cores:
            by_node.setdefault(core.node, []).append(core)
        if each == threads and all(len(own) >= ranks * each for own in by_node.values()):
            near = by_node.get(gpu_nodes[local_rank % len(gpu_nodes)], next(iter(by_node.values())))
            return _logical(near[local_rank * each : (local_rank + 1) * each], threads)
        gpu_nodes = host_nodes if len(host_nodes) >= ranks else ()
    sides = [gpu_nodes[rank % len(gpu_nodes)] if gpu_nodes else None for rank in range(ranks)]
    shares = [_logical(own, threads) for own in _table(ranks, each, cores, sides, distances or {})]
    return shares[local_rank] if all(shares) else _consecutive(local_rank, ranks, threads, cores)


def _table(
    ranks: int, each: int, cores: Sequence[PhysicalCore], near: Nodes, distances: Mapping[int, Mapping[int, int]]
) -> list[list[PhysicalCore]]:
    """`each` physical cores for each rank; `near`: the node on which each rank should lie, where that matters."""
    free: dict[int | None, list[PhysicalCore]] = {}
    for core in cores:
        free.setdefault(core.node, []).append(core)
    table: list[list[PhysicalCore]] = [[] for _ in range(ranks)]

    def by_distance(rank: int) -> list[int | None]:
        node = near[rank]
        return sorted(free, key=lambda other: 0 if node is None or other is None else _distance(distances, node, other))

    def take(rank: int, nodes: Iterable[int | None]) -> None:
        room = next((node for node in nodes if len(free.get(node, ())) >= each), ...)
        if not table[rank] and room is not ...:
            table[rank], free[room] = free[room][:each], free[room][each:]

    for rank in range(ranks):
        if near[rank] is not None:
            take(rank, [near[rank]])
    for rank in range(ranks):
        take(rank, by_distance(rank))
    for rank in range(ranks):
        if not table[rank]:
            table[rank] = [core for node in by_distance(rank) for core in free[node]][:each]
            free = {node: [core for core in own if core not in table[rank]] for node, own in free.items()}
    return table


def _distance(distances: Mapping[int, Mapping[int, int]], node: int, other: int) -> int:
    return 0 if node == other else distances.get(node, {}).get(other, _MOST_CORES)


def _logical(cores: Sequence[PhysicalCore], threads: int) -> tuple[int, ...] | None:
    logical = tuple(sorted(core for own in cores for core in own.logical))
    return logical if len(logical) >= threads else None


def _consecutive(local_rank: int, ranks: int, threads: int, cores: Sequence[PhysicalCore]) -> tuple[int, ...] | None:
    """Consecutive logical cores, where whole physical ones do not suffice and ranks must share some of these."""
    logical = [core for own in cores for core in own.logical]
    first = local_rank * threads
    return tuple(sorted(logical[first : first + threads])) if ranks * threads <= len(logical) else None


Products = Literal["tiles", "words", "widened"]
"""Ways to multiply 16-bit numbers: AMX in tiles, AVX512-BF16, or, on a processor that has neither, in 32 bits."""


@cache
def cpu_facts(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """What the kernel tells of the first processor, by key; empty where it tells nothing."""
    try:
        first = cpuinfo.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}


def products_of_16_bits() -> Products:
    """How this machine's processor multiplies 16-bit numbers, within the limit set for oneDNN."""
    return _products(cpu_facts().get("flags", ""), os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper())


@cache
def _products(flags: str, told: str) -> Products:
    if "amx_bf16" in flags.split() and (told == "ALL" or "AMX" in told):
        return "tiles"
    return "words" if "avx512_bf16" in flags.split() else "widened"
