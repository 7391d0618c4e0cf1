"""What links can carry in one direction, in bytes per second: NVLink and PCIe by generation, adapters by their rate.

Datasheets give NVLink in both directions together and for all links of a GPU: 900 GB/s of an H100 are 18 links of
25 GB/s in each direction.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class NvlinkGeneration(NamedTuple):
    """One generation of NVLink; rates are of one link in one direction."""

    peak_bytes_per_second: float
    nccl_bytes_per_second: float
    """The rate that NCCL reckons with (`SM*_NVLINK_BW` in src/graph/topo.h, NCCL 2.30): what its rings reach."""
    source: str


NVLINK_GENERATIONS = {
    1: NvlinkGeneration(20e9, 18.0e9, "NVIDIA Tesla P100 whitepaper WP-08019-001: 4 links, 160 GB/s"),
    2: NvlinkGeneration(25e9, 20.0e9, "NVIDIA Tesla V100 whitepaper WP-08608-001: 6 links, 300 GB/s"),
    3: NvlinkGeneration(25e9, 20.0e9, "NVIDIA A100 whitepaper v1.0: 12 links, 600 GB/s"),
    4: NvlinkGeneration(25e9, 20.6e9, "NVIDIA H100 whitepaper v1.04: 18 links, 900 GB/s"),
    5: NvlinkGeneration(50e9, 40.1e9, "NVIDIA Blackwell architecture technical brief: 18 links, 1.8 TB/s"),
}
_GA102 = NvlinkGeneration(14.0625e9, 12.0e9, "NVIDIA GA102 whitepaper v2.1: 4 links, 112.5 GB/s in both directions")
"""The third generation as workstation and gaming GPUs have it, with half of the lanes."""
_GA102_NAME = re.compile(r"RTX|A40\b|A10\b|A16\b")


class NvlinkBoard(NamedTuple):
    """A GPU whose board always has all of its NVLinks connected."""

    name: re.Pattern[str]
    generation: int
    links: int


NVLINK_BOARDS = (
    NvlinkBoard(re.compile(r"\bG?B[23]00\b"), generation=5, links=18),
    NvlinkBoard(re.compile(r"\bH200$|\bH100 80GB HBM3|\bH20$"), generation=4, links=18),
    NvlinkBoard(re.compile(r"\bA100-SXM"), generation=3, links=12),
    NvlinkBoard(re.compile(r"\bV100-SXM"), generation=2, links=6),
    NvlinkBoard(re.compile(r"\bP100-SXM"), generation=1, links=4),
)
"""Modules on a baseboard, by their drivers' names. Cards (PCIe, NVL) have NVLinks only where somebody plugged a bridge
in; of modules made for export (A800, H800) the number of links is not listed here."""


def nvlink_board(gpu_name: str) -> NvlinkBoard | None:
    """Return the board of a GPU by its driver's name, "NVIDIA H200"; None for cards, and for those not known here."""
    for board in NVLINK_BOARDS:
        if board.name.search(gpu_name):
            return board
    return None


def nvlink_generation(gpu_name: str, generation: int | None) -> NvlinkGeneration | None:
    """Return the rates of a GPU's NVLinks; None where neither NVML nor the GPU's name says which generation it is.

    Args:
        gpu_name: its driver's name, "NVIDIA H100 80GB HBM3".
        generation: as NVML says; None where it does not.
    """
    if generation is None:
        board = nvlink_board(gpu_name)
        generation = board.generation if board is not None else None
    if generation is None:
        return None
    if generation == 3 and _GA102_NAME.search(gpu_name):
        return _GA102
    return NVLINK_GENERATIONS.get(generation)


_PCIE_LANE_BYTES_PER_SECOND = {
    1: 0.250e9,
    2: 0.500e9,
    3: 0.985e9,
    4: 1.969e9,
    5: 3.938e9,
    6: 7.563e9,
}
"""Generation -> rate of a lane after line coding (PCI-SIG: 8b/10b in 1 and 2, 128b/130b up to 5, then flits)."""
_PCIE_GENERATION_BY_TRANSFERS = {"2.5": 1, "5.0": 2, "5": 2, "8.0": 3, "8": 3, "16.0": 4, "32.0": 5, "64.0": 6}
"""The kernel's GT/s -> generation (drivers/pci/probe.c: `pci_speed_string`)."""


def pcie_bytes_per_second(generation: int | None, lanes: int | None) -> float | None:
    """Return the rate of a PCIe link; None where generation or lanes are unknown."""
    lane_rate = _PCIE_LANE_BYTES_PER_SECOND.get(generation) if generation is not None else None
    if lane_rate is None or not lanes:
        return None
    return lane_rate * lanes


def pcie_generation(kernel_speed: str | None) -> int | None:
    """Return the generation of a PCIe link from the kernel's "32.0 GT/s PCIe"; None where it says none."""
    return _PCIE_GENERATION_BY_TRANSFERS.get((kernel_speed or "").partition(" ")[0])


_ADAPTER_RATE = re.compile(r"(?P<gigabits>[0-9]{1,5}(?:\.[0-9]{1,3})?) Gb/sec")


def adapter_bytes_per_second(kernel_rate: str) -> float | None:
    """Return the rate of a port from the kernel's "400 Gb/sec (4X NDR)"; None where it says none."""
    match = _ADAPTER_RATE.match(kernel_rate)
    rate = float(match["gigabits"]) * 1e9 / 8 if match is not None else 0.0
    return rate or None
