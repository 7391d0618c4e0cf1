"""The GPUs of this host, from NVML: which ones this process may use, how they are set and linked."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

_PCI_DEVICES = Path("/sys/bus/pci/devices")
_HIDDEN = ("", "-1", "NoDevFiles", "none", "void")
"""Values of CUDA_VISIBLE_DEVICES by which users and launchers hide every GPU on purpose."""

_T = TypeVar("_T")


class GpusUnreadable(Exception):
    """There are signs of GPUs, but none can be read; the message says which signs and why."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one slice of a GPU in MIG mode; what NVML does not tell is None."""

    uuid: str
    name: str
    memory_bytes: int | None
    driver: str | None
    compute_capability: tuple[int, int] | None
    numa_node: int | None = None
    """The memory node that it is attached to."""
    slices: tuple[Gpu, ...] = ()
    """Its slices, in MIG mode."""
    mig: bool = False
    """Whether it is in MIG mode, in which only its slices compute."""


def visible_gpus() -> tuple[Gpu, ...]:
    """The GPUs that this process may use, honouring CUDA_VISIBLE_DEVICES; empty where there are none.

    Raises:
        GpusUnreadable: none can be used, although NVML, a device file or CUDA_VISIBLE_DEVICES tells of some.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in _HIDDEN:
        return ()
    try:
        with _nvml() as nvml:
            gpus = _all_gpus(nvml)
        why = "NVML tells of none that this process may use"
    except _NvmlFailed as error:
        gpus, why = (), str(error)
    chosen = select_visible(gpus, visible)
    if not chosen and (visible is not None or gpus or device_files()):
        signs = [*device_files()[:1], *([] if visible is None else [f"CUDA_VISIBLE_DEVICES = {visible!r}"])]
        if gpus:
            why = (
                f"NVML tells of {len(gpus)}, and none of them is named" if visible else "none has a slice to compute on"
            )
        raise GpusUnreadable(f"{' and '.join(signs) or 'GPUs in MIG mode'} are there, but {why}")
    return chosen


def host_gpus() -> tuple[Gpu, ...]:
    """The GPUs that NVML tells of, also those that CUDA_VISIBLE_DEVICES hides: the host's, or a job step's own."""
    with contextlib.suppress(_NvmlFailed), _nvml() as nvml:
        return _all_gpus(nvml)
    return ()


def device_files() -> list[str]:
    """The device files of NVIDIA GPUs, which exist even in a container without NVML."""
    return sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))


def select_visible(gpus: tuple[Gpu, ...], visible: str | None) -> tuple[Gpu, ...]:
    """The `gpus` that CUDA_VISIBLE_DEVICES names, by index or by a UUID's unique prefix, in its order.

    As in CUDA, the list ends at the first entry that names nothing, and a process sees at most one slice: the first of
    a GPU in MIG mode, unless another is named by its UUID. A GPU named twice counts once, for two ranks on it would
    share it. Source: NVIDIA Multi-Instance GPU User Guide, sections "Device Enumeration" and "CUDA_VISIBLE_DEVICES".
    """
    if visible is None:
        whole = tuple(gpu for gpu in gpus if not gpu.mig)
        return whole or tuple(part for gpu in gpus for part in gpu.slices)[:1]
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in visible.split(",")):
        if is_count(entry):
            named = gpus[int(entry) : int(entry) + 1]
        elif entry.startswith("MIG-"):
            named = tuple(part for gpu in gpus for part in gpu.slices if part.uuid.startswith(entry))
        else:
            named = tuple(gpu for gpu in gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry))
        if len(named) == 1 and named[0].mig:
            named = named[0].slices[:1]
        if len(named) != 1:
            break
        chosen += named
        if named[0].uuid.startswith("MIG-"):
            break
    return tuple(dict.fromkeys(chosen))


def is_count(text: str) -> bool:
    """Whether `text` is a small number in plain digits."""
    return text.isascii() and text.isdigit() and len(text) < 16


def gpu_settings(uuid: str) -> dict[str, Any]:
    """Settings and links of the GPU (or slice) with this UUID: the fields of `vitscale.store.records.GpuSettings`.

    A value is None where NVML does not tell it. Empty where NVML does not know the GPU or cannot be asked.
    """
    try:
        with _nvml() as nvml:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            answers = {
                "power_limit_watts": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
                "power_limit_default_watts": lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1000,
                "application_clock_mhz": lambda: nvml.nvmlDeviceGetApplicationsClock(handle, nvml.NVML_CLOCK_SM),
                "memory_application_clock_mhz": lambda: nvml.nvmlDeviceGetApplicationsClock(
                    handle, nvml.NVML_CLOCK_MEM
                ),
                "persistence": lambda: bool(nvml.nvmlDeviceGetPersistenceMode(handle)),
                "ecc": lambda: bool(nvml.nvmlDeviceGetEccMode(handle)[0]),
                "mig": lambda: bool(nvml.nvmlDeviceGetMigMode(handle)[0]),
                # The current generation falls while a GPU idles.
                "pcie_generation": lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle),
                "pcie_width": lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
            }
            return {name: _told(nvml, ask) for name, ask in answers.items()} | {"nvlinks": _links_up(nvml, handle)}
    except _NvmlFailed:
        return {}


def gpu_with_uuid(uuid: str) -> Gpu | None:
    """The GPU with this UUID, from NVML; None where NVML does not know it or cannot be asked."""
    try:
        with _nvml() as nvml:
            return _gpu(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
    except _NvmlFailed:
        return None


class _NvmlFailed(Exception):
    """NVML is not there, or answers nothing."""


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    try:
        import pynvml
    except ImportError as error:
        raise _NvmlFailed(f"pynvml cannot be imported: {error}") from None
    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except (pynvml.NVMLError, OSError) as error:
        raise _NvmlFailed(f"NVML: {error}") from None


def _told(nvml: Any, ask: Callable[[], _T]) -> _T | None:
    """What `ask` returns; None where this GPU, driver or pynvml has no answer."""
    try:
        return ask()
    except (nvml.NVMLError, AttributeError):
        return None


def _all_gpus(nvml: Any) -> tuple[Gpu, ...]:
    """The GPUs that this process may talk to; NVML counts those too that a job's devices leave out."""
    gpus = []
    for number in range(nvml.nvmlDeviceGetCount()):
        with contextlib.suppress(nvml.NVMLError_NoPermission):
            gpus.append(_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(number)))
    return tuple(gpus)


def _gpu(nvml: Any, handle: Any) -> Gpu:
    memory = _told(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total)
    mig = _told(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle)[0])
    gpu = Gpu(
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=nvml.nvmlDeviceGetName(handle),
        memory_bytes=None if memory is None else int(memory),
        driver=_told(nvml, nvml.nvmlSystemGetDriverVersion),
        compute_capability=_told(nvml, lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        numa_node=_numa_node(nvml, handle),
    )
    if not mig:
        return gpu
    return replace(gpu, mig=True, slices=tuple(_slices(nvml, handle, gpu)))


def _slices(nvml: Any, handle: Any, gpu: Gpu) -> Iterator[Gpu]:
    """The slices of a GPU in MIG mode; they have the GPU's properties, but less memory."""
    for index in range(_told(nvml, lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0):
        part = _told(nvml, partial(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index))
        if part is None:
            continue
        uuid = _told(nvml, partial(nvml.nvmlDeviceGetUUID, part))
        if uuid is None:
            continue
        memory = _told(nvml, partial(nvml.nvmlDeviceGetMemoryInfo, part))
        name = _told(nvml, partial(nvml.nvmlDeviceGetName, part))
        yield replace(gpu, uuid=uuid, name=name or f"{gpu.name} MIG", memory_bytes=memory and int(memory.total))


def _numa_node(nvml: Any, handle: Any) -> int | None:
    """The GPU's memory node, from the kernel's PCI devices, else from NVML's memory affinity where that is one node."""
    bus = _told(nvml, lambda: nvml.nvmlDeviceGetPciInfo(handle).busId)
    if bus is not None:
        name = bus.decode("ascii", "replace") if isinstance(bus, bytes) else str(bus)
        with contextlib.suppress(OSError, ValueError):
            # NVML writes the domain in eight digits, the kernel in four.
            node = int((_PCI_DEVICES / name.lower()[-12:] / "numa_node").read_text(encoding="ascii"))
            if node >= 0:  # -1: the firmware does not tell
                return node
    words = _told(nvml, lambda: list(nvml.nvmlDeviceGetMemoryAffinity(handle, 4, nvml.NVML_AFFINITY_SCOPE_NODE)))
    nodes = [64 * n + bit for n, word in enumerate(words or ()) for bit in range(64) if word >> bit & 1]
    return nodes[0] if len(nodes) == 1 else None


def _links_up(nvml: Any, handle: Any) -> int | None:
    states = [
        _told(nvml, partial(nvml.nvmlDeviceGetNvLinkState, handle, link))
        for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18))
    ]
    told = [state for state in states if state is not None]
    return sum(map(bool, told)) if told else None
