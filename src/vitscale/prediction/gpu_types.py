"""How fast another type of GPU than the measured one is, by matrix rate and memory bandwidth, and how surely.

A step's computing takes the longer of its arithmetic at the matrix rate and its traffic at the memory bandwidth, which
are tied by its operations for each byte (the roofline: Williams, Waterman & Patterson, CACM 52(4), 2009). A program is
taken to reach the same share of either on both types. How many operations a byte it makes is not known; what is taken
lies between what ordinary cores need for their full rate (10 to 45) and what tensor cores do (140 to 300): training
keeps the former busy, and leaves the latter waiting for memory.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vitscale.analysis.runs.compute import DTYPES, Peak, peak
from vitscale.base.arrays import FloatArray
from vitscale.errors import RequestError, shown
from vitscale.trial.trial import Precision

_OPERATIONS_A_BYTE, _OPERATIONS_SPREAD = 80.0, 0.35
"""Median, and standard deviation of the logarithm: nine in ten between 45 and 140."""
_PROGRAM_SPREAD = 0.24
"""Standard deviation of the logarithm of what is left: a program may reach its share on one type and not on another.
Published tables time one program on three pairs of types (docs/predicting.md); each pair lies in the interval that the
two others give by Student's t. This value is that of all three, as a normal distribution."""


@dataclass(frozen=True)
class GpuType:
    """One type of GPU."""

    name: str
    """Its name as its driver reports it, without "NVIDIA" or "AMD"."""
    memory_bytes: int
    bytes_per_second: float
    """Bandwidth of its memory."""
    aliases: tuple[str, ...] = ()
    """What clouds and people call it."""

    def flops_per_second(self, precision: Precision) -> float:
        """Its peak in the arithmetic of a precision.

        Raises:
            RequestError: it has no such arithmetic.
        """
        gpu_peak = peak("cuda", self.name, DTYPES[precision])
        if not isinstance(gpu_peak, Peak):
            raise RequestError(f"{self.name} does not train in {precision}: {gpu_peak}")
        return gpu_peak.flops_per_second


def _type(name: str, gigabytes: float, gigabytes_per_second: float, *aliases: str) -> GpuType:
    return GpuType(name, int(gigabytes * 1e9), gigabytes_per_second * 1e9, aliases)


TYPES = (
    # Bandwidths and sizes are those of the documents that `analysis.runs.compute` names for each; of the oldest two:
    # NVIDIA Tesla P100 datasheet (2016) and NVIDIA Tesla K80 board specification (2015), for one of its two GPUs.
    _type("B300 SXM6 AC", 270, 8000, "B300"),
    _type("GB200", 186, 8000),
    _type("B200", 180, 8000, "B200-SXM"),
    _type("H200", 141, 4800, "H200-SXM"),
    _type("H200 NVL", 141, 4800),
    _type("GH200 480GB", 96, 4000, "GH200"),
    _type("H100 80GB HBM3", 80, 3350, "H100", "H100-SXM", "H100-80GB", "H100-MEGA", "H100 SXM5"),
    _type("H100 NVL", 94, 3900, "H100-NVLINK"),
    _type("H100 PCIe", 80, 2000),
    _type("H800", 80, 3350),
    _type("H20", 96, 4000),
    _type("L40S", 48, 864),
    _type("L40", 48, 864),
    _type("L20", 48, 864),
    _type("L4", 24, 300),
    _type("A100-SXM4-40GB", 40, 1555, "A100", "A100-40GB"),
    _type("A100-SXM4-80GB", 80, 2039, "A100-80GB", "A100-80GB-SXM"),
    _type("A100-PCIE-40GB", 40, 1555),
    _type("A100 80GB PCIe", 80, 1935, "A100-80GB-PCIE"),
    _type("A800-SXM4-80GB", 80, 2039, "A800"),
    _type("A40", 48, 696),
    _type("A30", 24, 933),
    _type("A10", 24, 600),
    _type("A10G", 24, 600),
    _type("Tesla T4", 16, 320),
    _type("Tesla V100-SXM2-16GB", 16, 900, "V100", "V100-16GB"),
    _type("Tesla V100-SXM2-32GB", 32, 900, "V100-32GB"),
    _type("Tesla V100-PCIE-16GB", 16, 900),
    _type("Tesla V100-PCIE-32GB", 32, 900),
    _type("Tesla V100S-PCIE-32GB", 32, 1134, "V100S"),
    _type("Tesla P100-SXM2-16GB", 16, 732, "P100"),
    _type("Tesla P100-PCIE-16GB", 16, 732),
    _type("Tesla K80", 12, 240),
    _type("RTX PRO 6000 Blackwell Workstation Edition", 96, 1792, "RTXPRO6000WS"),
    _type("RTX 6000 Ada Generation", 48, 960, "RTX6000-Ada"),
    _type("RTX A6000", 48, 768, "A6000"),
    _type("RTX A5000", 24, 768, "A5000"),
    _type("Quadro RTX 6000", 24, 672),
    _type("Quadro RTX 8000", 48, 672),
    _type("TITAN RTX", 24, 672),
    _type("GeForce RTX 5090", 32, 1792),
    _type("GeForce RTX 5080", 16, 960),
    _type("GeForce RTX 4090", 24, 1008),
    _type("GeForce RTX 4080", 16, 716.8),
    _type("GeForce RTX 3090 Ti", 24, 1008),
    _type("GeForce RTX 3090", 24, 936),
    _type("GeForce RTX 3080", 10, 760),
    _type("GeForce RTX 3070", 8, 448),
    # A die of an MI250 or MI250X is a GPU of its own, with half of the module's memory.
    _type("Instinct MI355X", 288, 8000, "MI355X"),
    _type("Instinct MI350X", 288, 8000, "MI350X"),
    _type("Instinct MI325X", 256, 6000, "MI325X"),
    _type("Instinct MI300X", 192, 5300, "MI300X"),
    _type("Instinct MI300A", 128, 5300, "MI300A"),
    _type("Instinct MI250X", 64, 1638.4, "MI250X"),
    _type("Instinct MI250", 64, 1638.4, "MI250"),
    _type("Instinct MI210", 64, 1638.4, "MI210"),
    _type("Instinct MI100", 32, 1228.8, "MI100"),
)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]|^ *(nvidia|amd)? *(tesla|geforce|quadro)?", "", name.lower())


_BY_NAME = {_plain(name): gpu for gpu in TYPES for name in (gpu.name, *gpu.aliases)}
_NEAREST = 6


def gpu_type(name: str) -> GpuType:
    """The type that a driver, a cloud or a person names, whatever the case, blanks and brands ("NVIDIA Tesla", "AMD").

    Raises:
        RequestError: it is not known here.
    """
    named = _BY_NAME.get(_plain(name))
    if named is None:
        near = difflib.get_close_matches(_plain(name), _BY_NAME, _NEAREST, 0.0)
        raise RequestError(
            f"the GPU {shown(name)} is unknown", valid=list(dict.fromkeys(_BY_NAME[alias].name for alias in near))
        )
    return named


def common_type(devices: Sequence[str]) -> GpuType:
    """The one type that ranks ran on, by their devices' names.

    Raises:
        RequestError: there are several, none is recorded, or it is not known here.
    """
    names = list(dict.fromkeys(devices))
    if len(names) == 1 and _plain(names[0]) in _BY_NAME:
        return gpu_type(names[0])
    what, step = "the GPU of the runs is not recorded", "Import the table with a `gpu` column"
    if names:
        ran_on = ", ".join(map(shown, names))
        what = f"the runs were on unlike devices ({ran_on})" if len(names) > 1 else f"{ran_on} is no GPU known here"
        step = "" if len(names) > 1 else "Name it in `gpu` as its driver does, such as Tesla V100-SXM2-16GB"
    raise RequestError(f"another GPU cannot be told from these results: {what}", next_step=step)


def time_factors(
    old: GpuType, new: GpuType, precision: Precision, normals: tuple[FloatArray, FloatArray]
) -> FloatArray:
    """Logarithms of what computing takes on the new type over what it took on the old one, a draw for each normal.

    Args:
        old: the measured type.
        new: the type asked for.
        precision: that of the training.
        normals: standard normals, for the operations a byte and for what the program reaches.

    Raises:
        RequestError: one of them has no such arithmetic.
    """
    operations = _OPERATIONS_A_BYTE * np.exp(_OPERATIONS_SPREAD * normals[0])

    def seconds(gpu: GpuType) -> FloatArray:
        """Seconds of an operation."""
        return np.maximum(1 / gpu.flops_per_second(precision), 1 / (operations * gpu.bytes_per_second))

    factors: FloatArray = np.log(seconds(new) / seconds(old)) + _PROGRAM_SPREAD * normals[1]
    return factors


def optimizer_factor(old: GpuType, new: GpuType) -> float:
    """The logarithm of the same for the optimizer, which only reads and writes memory."""
    return math.log(old.bytes_per_second / new.bytes_per_second)
