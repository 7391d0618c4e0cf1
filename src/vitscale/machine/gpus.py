"""The GPUs of this host, whoever made them: which ones this process may use, how they are set, and what one does.

`VENDORS` are asked in turn, and a process computes on the GPUs of the first one that has any.
"""

from __future__ import annotations

from typing import Any

from vitscale.machine.vendors.amd import AmdGpus
from vitscale.machine.vendors.base import (
    EnergyCounter,
    EnergyUnknown,
    Gpu,
    GpuReading,
    GpusUnreadable,
    GpuVendor,
    OpenGpu,
    VendorLibraryFailed,
)
from vitscale.machine.vendors.nvidia import NvidiaGpus

__all__ = (
    "DEVICE_PREFIXES",
    "VENDORS",
    "EnergyCounter",
    "EnergyUnknown",
    "Gpu",
    "GpuReading",
    "GpuVendor",
    "GpusUnreadable",
    "OpenGpu",
    "VendorLibraryFailed",
    "energy_counter",
    "gpu_settings",
    "gpu_with_uuid",
    "host_gpus",
    "library_of",
    "open_gpu",
    "vendor_of_name",
    "vendor_of_torch",
    "visible_gpus",
)

_NVIDIA = NvidiaGpus()
_AMD = AmdGpus()
VENDORS: tuple[GpuVendor, ...] = (_NVIDIA, _AMD)
DEVICE_PREFIXES = (*_NVIDIA.device_prefixes(), *_AMD.device_prefixes())
"""Beginnings of the paths of device files that a process has open when it uses a GPU."""


def visible_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that this process may use, as torch numbers them; empty where there are none.

    Variables such as CUDA_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES are honoured.

    Raises:
        GpusUnreadable: none can be used, although a library, a device file or such a variable is a sign of some.
    """
    problems: list[str] = []
    for vendor in VENDORS:
        try:
            gpus = vendor.visible_gpus()
        except GpusUnreadable as error:
            problems.append(str(error))
            continue
        if gpus:
            return gpus
    if problems:
        raise GpusUnreadable("; ".join(problems))
    return ()


def host_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs of the host (in a job step: of the step), also those that variables hide.

    Return none where no vendor's library can be asked.
    """
    for vendor in VENDORS:
        gpus = vendor.host_gpus()
        if gpus:
            return gpus
    return ()


def vendor_of_torch(hip_version: str | None) -> GpuVendor:
    """Return whose GPUs torch computes on.

    Args:
        hip_version: torch.version.hip: AMD's runtime for which it was built; None where it was built for CUDA.
    """
    return _NVIDIA if hip_version is None else _AMD


def vendor_of_name(device_name: str) -> GpuVendor:
    """Return whose GPU it is of which torch gives this name: "AMD Instinct MI250X", "NVIDIA H100", "Tesla T4".

    AMD makes processors too ("AMD EPYC"), so its own name alone says nothing of a GPU.
    """
    has_amd_brand = any(brand in device_name.upper() for brand in ("INSTINCT", "RADEON"))
    return _AMD if has_amd_brand else _NVIDIA


def gpu_settings(uuid: str) -> dict[str, Any]:
    """Return the settings and links of a GPU or slice, by the field names of `vitscale.store.records.GpuSettings`.

    A value is None where its vendor's library does not know it. Return an empty dict where the library does not know
    the GPU at all, or cannot be asked.
    """
    return _vendor_of(uuid).settings(uuid)


def gpu_with_uuid(uuid: str) -> Gpu | None:
    """Return the GPU with this UUID; None where its vendor's library does not know it or cannot be asked."""
    return _vendor_of(uuid).gpu_with_uuid(uuid)


def open_gpu(uuid: str) -> OpenGpu:
    """Return the GPU with this UUID, to be read.

    Raises:
        VendorLibraryFailed: its vendor's library does not know it or cannot be asked.
    """
    return _vendor_of(uuid).open(uuid)


def energy_counter(uuid: str) -> EnergyCounter:
    """Return the counter of energy of the GPU with this UUID.

    Raises:
        EnergyUnknown: the GPU has none of its own.
        Exception: whatever its vendor's library raises.
    """
    return _vendor_of(uuid).energy_counter(uuid)


def library_of(uuid: str) -> str:
    """Return the name of the vendor's library that knows the GPU with this UUID."""
    return _vendor_of(uuid).library


def _vendor_of(uuid: str) -> GpuVendor:
    """Return the vendor whose UUIDs have this form; AMD's is the narrower one, so it is asked first."""
    return _AMD if _AMD.owns(uuid) else _NVIDIA
