"""Cores and memory nodes of known machines, as the kernel shows them below /sys/devices/system.

Written down from what `lscpu -p=CPU,CORE,NODE` shows of such machines; nothing but the fields that are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path


def sysfs(folder: Path, cores: int, sibling: Callable[[int], int], node: Callable[[int], int]) -> Path:
    """A tree of `cores` logical cores; `sibling`: the other hyper-thread of one; `node`: its memory node."""
    for core in range(cores):
        topology = folder / f"cpu/cpu{core}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(_cpu_list({core, sibling(core)}))
    nodes = sorted({node(core) for core in range(cores)})
    for number in nodes:
        home = folder / f"node/node{number}"
        home.mkdir(parents=True)
        (home / "cpulist").write_text(_cpu_list(core for core in range(cores) if node(core) == number))
        (home / "distance").write_text(" ".join("10" if other == number else "21" for other in nodes) + "\n")
    return folder


def _cpu_list(cores: Iterable[int]) -> str:
    return ",".join(map(str, sorted(cores))) + "\n"


def smt_desktop(folder: Path) -> Path:
    """16 cores, 32 threads: 0 and 16 are one core."""
    return sysfs(folder, 32, lambda core: (core + 16) % 32, lambda _: 0)


def two_sockets(folder: Path) -> Path:
    """Two sockets of 8 cores: node 0 has 0-7 and 16-23, node 1 has 8-15 and 24-31."""
    return sysfs(folder, 32, lambda core: (core + 16) % 32, lambda core: core % 16 // 8)


def dgx_h100(folder: Path) -> Path:
    """Two sockets of 56 cores: node 0 has 0-55 and 112-167, node 1 has 56-111 and 168-223."""
    return sysfs(folder, 224, lambda core: (core + 112) % 224, lambda core: core % 112 // 56)


def interleaved(folder: Path) -> Path:
    """Two sockets of 16 cores numbered in turn, as many Dell hosts do: even ones on node 0, odd ones on node 1."""
    return sysfs(folder, 64, lambda core: (core + 32) % 64, lambda core: core % 2)
