"""NVIDIA's GPUs, from NVML: which ones this process may use, how they are set and linked, what they do.

In MIG mode a GPU is cut into slices, each of which counts as a GPU of its own, and only they compute.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import override

from vitscale.machine.vendors.base import (
    EnergyCounter,
    EnergyUnknown,
    Gpu,
    GpuReading,
    GpusUnreadable,
    GpuVendor,
    OpenGpu,
    VendorLibraryFailed,
    all_slices,
    is_count,
    is_hidden,
    numa_node_of_pci_device,
)

_DEVICES = Path("/dev")
_SLICE_PREFIX = "MIG-"
_MOST_NVLINKS = 36
"""NVLinks that are asked for where pynvml does not say how many there may be."""

# Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h): reasons that slow the clocks, other than a user's setting.
THROTTLE_REASONS = {
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "thermal (driver)",
    0x040: "thermal (hardware)",
    0x080: "power brake",
    0x200: "board limit",
    0x400: "reliability",
}
_IDLE = 0x001
"""Bit of a GPU that has nothing to do."""
_CLOCKS_SET = 0x002 | 0x100
"""Bits of clocks that are set by the user, and for a display: they are the usual clocks of that GPU."""

_T = TypeVar("_T")


class NvidiaGpus(GpuVendor):
    """The GPUs of this host that NVML knows; CUDA_VISIBLE_DEVICES says which ones this process may use."""

    library = "NVML"
    tool = "nvidia-smi"
    cause_command = "nvidia-smi -q -d PERFORMANCE"
    limits_command = "nvidia-smi -q -d CLOCK,POWER"
    power_limit_command = "nvidia-smi -pl"
    unreadable_advice = (
        "Correct CUDA_VISIBLE_DEVICES, or give the container NVML (NVIDIA_DRIVER_CAPABILITIES with 'utility')"
    )
    network_plugins = ("libnccl-net.so",)

    @override
    def visible_gpus(self) -> tuple[Gpu, ...]:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if is_hidden(visible):
            return ()
        gpus: tuple[Gpu, ...] = ()
        try:
            with started_nvml() as nvml:
                gpus = _all_gpus(nvml)
            nvml_problem = "NVML tells of none that this process may use"
        except VendorLibraryFailed as error:
            nvml_problem = str(error)
        selected = select_visible(gpus, visible)
        if not selected:
            _refuse_unusable_gpus(gpus, visible, nvml_problem)
        return selected

    @override
    def host_gpus(self) -> tuple[Gpu, ...]:
        with contextlib.suppress(VendorLibraryFailed), started_nvml() as nvml:
            return _all_gpus(nvml)
        return ()

    @override
    def device_prefixes(self) -> tuple[str, ...]:
        return ("/dev/nvidia",)

    @override
    def owns(self, uuid: str) -> bool:
        return uuid.startswith(("GPU-", _SLICE_PREFIX))

    @override
    def uuids_of(self, torch_uuid: str) -> tuple[str, ...]:
        return (f"GPU-{torch_uuid}", f"{_SLICE_PREFIX}{torch_uuid}")

    @override
    def gpu_with_uuid(self, uuid: str) -> Gpu | None:
        try:
            with started_nvml() as nvml:
                return _read_gpu(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
        except VendorLibraryFailed:
            return None

    @override
    def settings(self, uuid: str) -> dict[str, Any]:
        try:
            with started_nvml() as nvml:
                return _settings(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
        except VendorLibraryFailed:
            return {}

    @override
    def open(self, uuid: str) -> OpenGpu:
        try:
            import pynvml
        except ImportError as error:
            raise VendorLibraryFailed(f"pynvml cannot be imported: {error}") from None
        try:
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except pynvml.NVMLError as error:
            raise VendorLibraryFailed(f"NVML: {error}") from None
        return _OpenNvidiaGpu(pynvml, handle)

    @override
    def energy_counter(self, uuid: str) -> EnergyCounter:
        # A slice's index is that among the slices of its GPU: under it zeus would read another GPU.
        if uuid.startswith(_SLICE_PREFIX):
            raise EnergyUnknown("a slice of a GPU (MIG) does not count its energy apart from the others")
        logging.getLogger("zeus").setLevel(logging.CRITICAL)
        import pynvml
        from zeus.device.gpu.nvidia import NVIDIAGPU

        # Not by zeus.device.get_gpus, which takes CUDA_VISIBLE_DEVICES for a list of numbers; it may name UUIDs.
        pynvml.nvmlInit()
        gpu = NVIDIAGPU(pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID(uuid)))
        if not gpu.supports_get_total_energy_consumption():
            raise EnergyUnknown("this GPU does not count its energy: Volta and later do")
        return EnergyCounter(gpu.get_total_energy_consumption, "NVML: the GPU, whoever uses it", (uuid,))


class _OpenNvidiaGpu(OpenGpu):
    """A GPU that NVML has opened."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        """`nvml` is the module pynvml, initialised; `handle` is the GPU's."""
        self._nvml = nvml
        self._handle = handle

    @override
    def take_reading(self) -> GpuReading:
        nvml = self._nvml
        handle = self._handle
        utilisation = self._first_answer(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        power = self._first_answer(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        # Older drivers know the last two only by their older names.
        temperature = self._first_answer(
            lambda: nvml.nvmlDeviceGetTemperatureV(handle, nvml.NVML_TEMPERATURE_GPU),
            lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        )
        reason_bits = self._first_answer(
            lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
            lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        )
        return GpuReading(
            utilisation=None if utilisation is None else utilisation / 100,
            sm_clock_mhz=self._first_answer(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            temperature_celsius=temperature,
            power_watts=None if power is None else power / 1000,
            slowed_by=None if reason_bits is None else throttling(reason_bits),
            is_idle=None if reason_bits is None else bool(reason_bits & _IDLE),
        )

    def _first_answer(self, *ways: Callable[[], int]) -> int | None:
        """Return the answer of the first of these calls that this GPU and driver know; None where they know none."""
        for way in ways:
            try:
                return int(way())
            except (self._nvml.NVMLError, AttributeError):  # a later pynvml may have dropped an older name
                continue
        return None


def throttling(bits: int) -> tuple[str, ...]:
    """Return names of the reasons in NVML's bits that slow the clocks; an unknown one as "reason 0x1000"."""
    names = [name for bit, name in THROTTLE_REASONS.items() if bits & bit]
    unknown_bits = bits & ~(_IDLE | _CLOCKS_SET) & ~sum(THROTTLE_REASONS)
    for position in range(unknown_bits.bit_length()):
        bit = 1 << position
        if unknown_bits & bit:
            names.append(f"reason {bit:#x}")
    return tuple(names)


def _refuse_unusable_gpus(gpus: tuple[Gpu, ...], visible: str | None, nvml_problem: str) -> None:
    """Report that no GPU can be used, where there are signs of GPUs all the same.

    Args:
        gpus: the GPUs that NVML reports.
        visible: the value of CUDA_VISIBLE_DEVICES; None where it is not set.
        nvml_problem: why NVML reports none, where `gpus` is empty.

    Raises:
        GpusUnreadable: there are signs: GPUs that NVML reports, a device file, or CUDA_VISIBLE_DEVICES.
    """
    signs_of_gpus = _device_files()[:1]
    if visible is not None:
        signs_of_gpus.append(f"CUDA_VISIBLE_DEVICES = {visible!r}")
    if not gpus and not signs_of_gpus:
        return
    subject = " and ".join(signs_of_gpus) or "GPUs in MIG mode"
    if not gpus:
        problem = nvml_problem
    elif visible is None:
        problem = "none has a slice to compute on"
    else:
        problem = f"NVML tells of {len(gpus)}, and none of them is named"
    raise GpusUnreadable(f"{subject} are there, but {problem}")


def _device_files() -> list[str]:
    """Return the device files of NVIDIA's GPUs, which exist even in a container without NVML."""
    return sorted(str(path) for path in _DEVICES.glob("nvidia[0-9]*"))


def select_visible(gpus: tuple[Gpu, ...], visible: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, in its order.

    As in CUDA, the list ends at the first entry that names nothing, and a process sees at most one slice: the first of
    a GPU in MIG mode, unless another is named by its UUID. A GPU named twice counts once, for two ranks on it would
    share it. Source: NVIDIA Multi-Instance GPU User Guide, sections "Device Enumeration" and "CUDA_VISIBLE_DEVICES".

    Args:
        gpus: all GPUs of the host, by index.
        visible: the variable's value, indices or unique beginnings of UUIDs: "0,1" or "GPU-8a6d,MIG-2f". None where it
            is not set, and all GPUs are visible.
    """
    if visible is None:
        without_slices = tuple(gpu for gpu in gpus if not gpu.mig)
        return without_slices or tuple(all_slices(gpus))[:1]
    selected: list[Gpu] = []
    for entry in visible.split(","):
        gpu = _named_gpu(gpus, entry.strip())
        if gpu is None:
            break
        selected.append(gpu)
        if gpu.uuid.startswith(_SLICE_PREFIX):
            break
    return tuple(dict.fromkeys(selected))


def _named_gpu(gpus: tuple[Gpu, ...], entry: str) -> Gpu | None:
    """Return the GPU or slice that one entry of CUDA_VISIBLE_DEVICES names; None where it names none, or several."""
    if is_count(entry):
        number = int(entry)
        matches = list(gpus[number : number + 1])
    elif entry.startswith(_SLICE_PREFIX):
        matches = [part for part in all_slices(gpus) if part.uuid.startswith(entry)]
    elif entry.startswith("GPU-"):
        matches = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
    else:
        return None
    if len(matches) != 1:
        return None
    gpu = matches[0]
    if not gpu.mig:
        return gpu
    return gpu.slices[0] if gpu.slices else None


def _settings(nvml: Any, handle: Any) -> dict[str, Any]:
    """Return the settings and links of the GPU with a handle of NVML's; None for what NVML does not know."""
    answers = {
        "power_limit_watts": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
        "power_limit_default_watts": lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1000,
        "application_clock_mhz": lambda: nvml.nvmlDeviceGetApplicationsClock(handle, nvml.NVML_CLOCK_SM),
        "memory_application_clock_mhz": lambda: nvml.nvmlDeviceGetApplicationsClock(handle, nvml.NVML_CLOCK_MEM),
        "persistence": lambda: bool(nvml.nvmlDeviceGetPersistenceMode(handle)),
        "ecc": lambda: bool(nvml.nvmlDeviceGetEccMode(handle)[0]),
        "mig": lambda: bool(nvml.nvmlDeviceGetMigMode(handle)[0]),
        # The current generation falls while a GPU idles.
        "pcie_generation": lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle),
        "pcie_width": lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
    }
    settings: dict[str, Any] = {name: answer_or_none(nvml, ask) for name, ask in answers.items()}
    is_up_by_link = nvlink_states(nvml, handle)
    return settings | {"nvlinks": sum(is_up_by_link.values()) if is_up_by_link else None}


@contextlib.contextmanager
def started_nvml() -> Iterator[Any]:
    """Give the module pynvml, started.

    Raises:
        VendorLibraryFailed: it cannot be imported or started, or a question in the block has no answer.
    """
    try:
        import pynvml
    except ImportError as error:
        raise VendorLibraryFailed(f"pynvml cannot be imported: {error}") from None
    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except (pynvml.NVMLError, OSError) as error:
        raise VendorLibraryFailed(f"NVML: {error}") from None


def answer_or_none(nvml: Any, ask: Callable[[], _T]) -> _T | None:
    """Return what `ask` returns; None where this GPU, driver or pynvml has no answer."""
    try:
        return ask()
    except (nvml.NVMLError, AttributeError):
        return None


def _all_gpus(nvml: Any) -> tuple[Gpu, ...]:
    """Return the GPUs that this process may talk to; NVML counts those too that a job's devices leave out."""
    gpus = []
    for number in range(nvml.nvmlDeviceGetCount()):
        with contextlib.suppress(nvml.NVMLError_NoPermission):
            gpus.append(_read_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(number)))
    return tuple(gpus)


def _read_gpu(nvml: Any, handle: Any) -> Gpu:
    """Return the GPU with a handle of NVML's, and its slices."""
    memory_bytes = answer_or_none(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total)
    is_in_mig_mode = answer_or_none(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle)[0])
    gpu = Gpu(
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=nvml.nvmlDeviceGetName(handle),
        memory_bytes=None if memory_bytes is None else int(memory_bytes),
        driver=answer_or_none(nvml, nvml.nvmlSystemGetDriverVersion),
        compute_capability=answer_or_none(nvml, lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        numa_node=_numa_node(nvml, handle),
    )
    if not is_in_mig_mode:
        return gpu
    return replace(gpu, mig=True, slices=tuple(_read_slices(nvml, handle, gpu)))


def _read_slices(nvml: Any, handle: Any, gpu: Gpu) -> Iterator[Gpu]:
    """Yield the slices of a GPU in MIG mode; they have the GPU's properties, but less memory."""
    count = answer_or_none(nvml, lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0
    for index in range(count):
        slice_handle = answer_or_none(nvml, partial(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index))
        if slice_handle is None:
            continue
        uuid = answer_or_none(nvml, partial(nvml.nvmlDeviceGetUUID, slice_handle))
        if uuid is None:
            continue
        memory = answer_or_none(nvml, partial(nvml.nvmlDeviceGetMemoryInfo, slice_handle))
        name = answer_or_none(nvml, partial(nvml.nvmlDeviceGetName, slice_handle))
        yield replace(
            gpu,
            uuid=uuid,
            name=name or f"{gpu.name} MIG",
            memory_bytes=int(memory.total) if memory is not None else None,
        )


def _numa_node(nvml: Any, handle: Any) -> int | None:
    """Return the number of the GPU's memory node, from the kernel, else from NVML; None where neither knows it."""
    node = _numa_node_of_kernel(nvml, handle)
    return _numa_node_of_nvml(nvml, handle) if node is None else node


def _numa_node_of_kernel(nvml: Any, handle: Any) -> int | None:
    """Return the memory node that the kernel has for the GPU as a PCI device; None where it has none."""
    address = pci_address(nvml, handle)
    return None if address is None else numa_node_of_pci_device(address)


def _numa_node_of_nvml(nvml: Any, handle: Any) -> int | None:
    """Return the memory node to which the GPU has affinity by NVML; None where that is not exactly one."""
    words = answer_or_none(
        nvml, lambda: list(nvml.nvmlDeviceGetMemoryAffinity(handle, 4, nvml.NVML_AFFINITY_SCOPE_NODE))
    )
    nodes: list[int] = []
    for word_index, word in enumerate(words or ()):  # a bit for each node, 64 nodes to a word
        nodes += [64 * word_index + bit for bit in range(64) if word >> bit & 1]
    return nodes[0] if len(nodes) == 1 else None


def pci_address(nvml: Any, handle: Any) -> str | None:
    """Return the PCI address of a GPU as the kernel writes it, "0000:3b:00.0"; None where NVML does not know it."""
    info = answer_or_none(nvml, partial(nvml.nvmlDeviceGetPciInfo, handle))
    return kernel_pci_address(info.busId) if info is not None else None


def kernel_pci_address(bus_id: bytes | str) -> str:
    """Return NVML's "00000000:3B:00.0" as "0000:3b:00.0", the form of the kernel."""
    text = bus_id.decode("ascii", "replace") if isinstance(bus_id, bytes) else str(bus_id)
    return text.lower()[-12:]


def nvlink_states(nvml: Any, handle: Any) -> dict[int, bool]:
    """Return NVLink of a GPU, by its number -> whether it is up; links of which NVML knows no state are left out."""
    is_up_by_link = {}
    for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", _MOST_NVLINKS)):
        state = answer_or_none(nvml, partial(nvml.nvmlDeviceGetNvLinkState, handle, link))
        if state is not None:
            is_up_by_link[link] = bool(state)
    return is_up_by_link
