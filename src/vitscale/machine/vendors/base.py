"""The interface of a vendor of GPUs: which GPUs there are, how they are set, and what one does at a moment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VALUES_THAT_HIDE_GPUS = ("", "-1", "NoDevFiles", "none", "void")
"""Values of a variable such as CUDA_VISIBLE_DEVICES by which users and launchers hide every GPU on purpose."""
_PCI_DEVICES = Path("/sys/bus/pci/devices")
"""The kernel's folder of PCI devices."""
_ARCHITECTURES_WITHOUT_FAST_BF16 = ("gfx8", "gfx900", "gfx902", "gfx904", "gfx906", "gfx909", "gfx90c", "gfx10")
"""Beginnings of AMD architectures without matrix instructions for bf16: GCN, the MI50 and MI60, RDNA 1 and 2."""


class GpusUnreadable(Exception):
    """There are signs of GPUs, but none can be read; the message says which signs and why."""


class VendorLibraryFailed(Exception):
    """A vendor's library is not there, or answers nothing; the message names it and says why."""


class EnergyUnknown(Exception):
    """A GPU does not count its energy; the message says why."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one slice of a GPU in MIG mode; None stands for what its vendor's library does not know."""

    uuid: str
    name: str
    memory_bytes: int | None
    driver: str | None
    compute_capability: tuple[int, int] | None
    """NVIDIA's number of what it can compute; None for other vendors."""
    numa_node: int | None = None
    """The memory node that it is attached to."""
    slices: tuple[Gpu, ...] = ()
    """Its slices, in MIG mode."""
    mig: bool = False
    """Whether it is in MIG mode, in which only its slices compute."""
    architecture: str | None = None
    """LLVM's name of what an AMD GPU can compute, "gfx90a"; None for other vendors."""

    @property
    def has_fast_bf16(self) -> bool:
        """Whether its matrix units multiply bf16; False where that is not known."""
        if self.architecture is not None:
            return not self.architecture.startswith(_ARCHITECTURES_WITHOUT_FAST_BF16)
        return self.compute_capability is not None and self.compute_capability >= (8, 0)


@dataclass(frozen=True)
class GpuReading:
    """Values of a GPU at one moment; None where the GPU does not report it."""

    utilisation: float | None
    """Share of time in which a kernel ran, in [0, 1]."""
    sm_clock_mhz: int | None
    """Clock of its multiprocessors (NVIDIA) or compute units (AMD)."""
    temperature_celsius: int | None
    power_watts: float | None
    slowed_by: tuple[str, ...] | None
    """Reasons why its clocks are lower than they could be, other than a user's setting; empty for none."""
    is_idle: bool | None
    """Whether it has nothing to do."""


class OpenGpu(ABC):
    """One GPU, ready to be read any number of times, from any thread."""

    @abstractmethod
    def take_reading(self) -> GpuReading:
        """Ask for all values once."""


@dataclass(frozen=True)
class EnergyCounter:
    """A GPU's counter of energy, which only rises."""

    read_millijoules: Callable[[], float]
    """Raises whatever the vendor's library raises where the GPU has been lost."""
    source: str
    """The library, and what is counted, for the record."""
    devices: tuple[str, ...]
    """UUIDs of the GPUs that it counts, so that no GPU is counted twice."""


class GpuVendor(ABC):
    """A vendor's GPUs on this host. A GPU or slice is known by its UUID."""

    library: str
    """Name of the vendor's library, as users know it."""
    tool: str
    """The vendor's command that lists GPUs and what runs on them."""
    cause_command: str
    """The command that says why clocks are slowed."""
    limits_command: str
    """The command that shows clocks and power, and their limits."""
    power_limit_command: str
    """The command that sets the power limit."""
    unreadable_advice: str
    """What to do where there are signs of GPUs that cannot be read."""
    network_plugins: tuple[str, ...]
    """File names under which the vendor's library of collectives looks for a plug-in for the network, in its order."""

    @abstractmethod
    def visible_gpus(self) -> tuple[Gpu, ...]:
        """Return the GPUs that this process may use, as its runtime numbers them; empty where there are none.

        Raises:
            GpusUnreadable: none can be used, although there are signs of some.
        """

    @abstractmethod
    def host_gpus(self) -> tuple[Gpu, ...]:
        """Return the GPUs of the host, also those that variables hide; none where the library cannot be asked."""

    @abstractmethod
    def device_prefixes(self) -> tuple[str, ...]:
        """Return beginnings of the paths of device files that a process has open when it uses a GPU."""

    @abstractmethod
    def owns(self, uuid: str) -> bool:
        """Whether a UUID has the form of this vendor's."""

    @abstractmethod
    def uuids_of(self, torch_uuid: str) -> tuple[str, ...]:
        """Return the UUIDs that a device may have of which torch says that its UUID is `torch_uuid`."""

    @abstractmethod
    def gpu_with_uuid(self, uuid: str) -> Gpu | None:
        """Return the GPU or slice with this UUID; None where the library does not know it or cannot be asked."""

    @abstractmethod
    def settings(self, uuid: str) -> dict[str, Any]:
        """Return the settings and links of a GPU, by the field names of `vitscale.store.records.GpuSettings`.

        A value is None where the library does not know it. Return an empty dict where it does not know the GPU at all,
        or cannot be asked.
        """

    @abstractmethod
    def open(self, uuid: str) -> OpenGpu:
        """Return the GPU with this UUID, to be read.

        Raises:
            VendorLibraryFailed: the library does not know it or cannot be asked.
        """

    @abstractmethod
    def energy_counter(self, uuid: str) -> EnergyCounter:
        """Return the GPU's counter of energy.

        Raises:
            EnergyUnknown: the GPU has none of its own.
            Exception: whatever the vendor's library raises.
        """


def is_count(text: str) -> bool:
    """Whether `text` is a number of at most 15 plain digits."""
    return text.isascii() and text.isdigit() and len(text) < 16


def is_hidden(visible: str | None) -> bool:
    """Whether the value of a variable such as CUDA_VISIBLE_DEVICES hides all GPUs on purpose; None: it is not set."""
    return visible is not None and visible.strip() in VALUES_THAT_HIDE_GPUS


def numa_node_of_pci_device(address: str) -> int | None:
    """Return the memory node that the kernel has for a PCI device; None where it has none.

    Args:
        address: domain, bus, device and function: "0000:3b:00.0". The domain may have more digits, as NVML writes it.
    """
    kernel_name = address.lower()[-12:]
    try:
        node = int((_PCI_DEVICES / kernel_name / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None  # -1: the firmware does not know it


def all_slices(gpus: tuple[Gpu, ...]) -> Iterator[Gpu]:
    """Yield the slices of all GPUs, in their order."""
    for gpu in gpus:
        yield from gpu.slices
