"""The links of one GPU, from NVML: its NVLinks and where they lead, its PCIe link, and which GPUs it may read."""

from __future__ import annotations

from functools import partial
from typing import Any

from vitscale.machine.vendors.base import VendorLibraryFailed
from vitscale.machine.vendors.nvidia import (
    answer_or_none,
    kernel_pci_address,
    nvlink_states,
    pci_address,
    started_nvml,
)

_GENERATION_BY_VERSION = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 5, 8: 6}
"""NVML_NVLINK_VERSION_* -> generation of NVLink: 2.2 is one of the second, 3.1 of the third (nvml.h)."""
SWITCH = "switch"
"""Stands for an NVSwitch as the neighbour of an NVLink, in records too."""
_PEER_STATUS_NAMES = {
    0: "ok",
    1: "chipset not supported",
    2: "GPU not supported",
    3: "topology not supported",
    4: "disabled by a driver setting",
    5: "not supported",
}
"""NVML_P2P_STATUS_* -> words (nvml.h)."""


def gpu_links(uuid: str) -> dict[str, Any]:
    """Return the links of a GPU, by the field names of `vitscale.store.checks.GpuLinks`.

    A value is None where NVML does not know it. Return an empty dict where NVML does not know the GPU at all, or cannot
    be asked.
    """
    try:
        with started_nvml() as nvml:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            pcie = {
                "pci_address": pci_address(nvml, handle),
                "pcie_generation": answer_or_none(nvml, partial(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle)),
                "pcie_gpu_generation": answer_or_none(nvml, lambda: nvml.nvmlDeviceGetGpuMaxPcieLinkGeneration(handle)),
                "pcie_width": answer_or_none(nvml, partial(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle)),
                "pcie_gpu_width": answer_or_none(nvml, partial(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle)),
            }
            return pcie | _nvlinks(nvml, handle) | {"peers": _peer_access(nvml, handle)}
    except VendorLibraryFailed:
        return {}


def _nvlinks(nvml: Any, handle: Any) -> dict[str, Any]:
    """Return the fields on NVLinks: generation, how many are up and down, and where those that are up lead."""
    is_up_by_link = nvlink_states(nvml, handle)
    if not is_up_by_link:
        return {"nvlinks_up": None, "nvlinks_down": None, "nvlink_generation": None, "nvlink_neighbours": ()}
    up = [link for link, is_up in is_up_by_link.items() if is_up]
    down = [link for link, is_up in is_up_by_link.items() if not is_up]
    version = answer_or_none(nvml, partial(nvml.nvmlDeviceGetNvLinkVersion, handle, (up or down)[0]))
    neighbours = [_neighbour(nvml, handle, link) for link in up]
    return {
        "nvlinks_up": len(up),
        "nvlinks_down": len(down),
        "nvlink_generation": _GENERATION_BY_VERSION.get(version) if version is not None else None,
        "nvlink_neighbours": tuple(neighbour for neighbour in neighbours if neighbour is not None),
    }


def _neighbour(nvml: Any, handle: Any, link: int) -> str | None:
    """Return where an NVLink leads: `SWITCH`, or the PCI address of the device; None where NVML does not know it."""
    kind = answer_or_none(nvml, lambda: nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link))
    if kind is not None and kind == getattr(nvml, "NVML_NVLINK_DEVICE_TYPE_SWITCH", 2):
        return SWITCH
    info = answer_or_none(nvml, lambda: nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link))
    return kernel_pci_address(info.busId) if info is not None else None


def _peer_access(nvml: Any, handle: Any) -> dict[str, str]:
    """Return PCI address of each other GPU of the host -> whether this GPU may read its memory: "ok", or why not.

    GPUs that this process may not talk to are left out, and so are those for which NVML has no answer.
    """
    address = pci_address(nvml, handle)
    access: dict[str, str] = {}
    for number in range(answer_or_none(nvml, nvml.nvmlDeviceGetCount) or 0):
        other = answer_or_none(nvml, partial(nvml.nvmlDeviceGetHandleByIndex, number))
        other_address = pci_address(nvml, other) if other is not None else None
        if other_address is None or other_address == address:
            continue
        # Not NVML_P2P_CAPS_INDEX_READ: pynvml has a comma behind it, and ctypes refuses the tuple. It is 0 in nvml.h.
        status = answer_or_none(nvml, partial(nvml.nvmlDeviceGetP2PStatus, handle, other, 0))
        if status is not None:
            access[other_address] = _PEER_STATUS_NAMES.get(status, "unknown")
    return access
