"""The GPUs of this host, from NVML: which ones this process may use, how they are set and linked.

In MIG mode a GPU is cut into slices, each of which counts as a GPU of its own, and only they compute.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

_PCI_DEVICES = Path("/sys/bus/pci/devices")
"""The kernel's folder of PCI devices."""
_VALUES_THAT_HIDE_GPUS = ("", "-1", "NoDevFiles", "none", "void")
"""Values of CUDA_VISIBLE_DEVICES by which users and launchers hide every GPU on purpose."""

_T = TypeVar("_T")


class GpusUnreadable(Exception):
    """There are signs of GPUs, but none can be read; the message says which signs and why."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one slice of a GPU in MIG mode; None stands for what NVML does not know."""

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
    """Return the GPUs that this process may use, honouring CUDA_VISIBLE_DEVICES; empty where there are none.

    Raises:
        GpusUnreadable: none can be used, although NVML, a device file or CUDA_VISIBLE_DEVICES is a sign of some.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in _VALUES_THAT_HIDE_GPUS:
        return ()
    gpus: tuple[Gpu, ...] = ()
    try:
        with started_nvml() as nvml:
            gpus = _all_gpus(nvml)
        nvml_problem = "NVML tells of none that this process may use"
    except NvmlFailed as error:
        nvml_problem = str(error)
    selected = select_visible(gpus, visible)
    if not selected:
        _refuse_unusable_gpus(gpus, visible, nvml_problem)
    return selected


def _refuse_unusable_gpus(gpus: tuple[Gpu, ...], visible: str | None, nvml_problem: str) -> None:
    """Report that no GPU can be used, where there are signs of GPUs all the same.

    Args:
        gpus: the GPUs that NVML reports.
        visible: the value of CUDA_VISIBLE_DEVICES; None where it is not set.
        nvml_problem: why NVML reports none, where `gpus` is empty.

    Raises:
        GpusUnreadable: there are signs: GPUs that NVML reports, a device file, or CUDA_VISIBLE_DEVICES.
    """
    signs_of_gpus = device_files()[:1]
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


def host_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs of the host (in a job step: of the step), also those that CUDA_VISIBLE_DEVICES hides.

    Return none where NVML cannot be asked.
    """
    with contextlib.suppress(NvmlFailed), started_nvml() as nvml:
        return _all_gpus(nvml)
    return ()


def device_files() -> list[str]:
    """Return the device files of NVIDIA GPUs, which exist even in a container without NVML."""
    return sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))


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
        return without_slices or tuple(_all_slices(gpus)[:1])
    selected: list[Gpu] = []
    for entry in visible.split(","):
        gpu = _named_gpu(gpus, entry.strip())
        if gpu is None:
            break
        selected.append(gpu)
        if gpu.uuid.startswith(_SLICE_PREFIX):
            break
    return tuple(dict.fromkeys(selected))


_SLICE_PREFIX = "MIG-"


def _named_gpu(gpus: tuple[Gpu, ...], entry: str) -> Gpu | None:
    """Return the GPU or slice that one entry of CUDA_VISIBLE_DEVICES names; None where it names none, or several."""
    if is_count(entry):
        number = int(entry)
        matches = list(gpus[number : number + 1])
    elif entry.startswith(_SLICE_PREFIX):
        matches = [part for part in _all_slices(gpus) if part.uuid.startswith(entry)]
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


def _all_slices(gpus: tuple[Gpu, ...]) -> list[Gpu]:
    """Return the slices of all GPUs, in their order."""
    slices: list[Gpu] = []
    for gpu in gpus:
        slices += gpu.slices
    return slices


def is_count(text: str) -> bool:
    """Whether `text` is a number of at most 15 plain digits."""
    return text.isascii() and text.isdigit() and len(text) < 16


def gpu_settings(uuid: str) -> dict[str, Any]:
    """Return the settings and links of a GPU or slice, by the field names of `vitscale.store.records.GpuSettings`.

    A value is None where NVML does not know it. Return an empty dict where NVML does not know the GPU at all, or cannot
    be asked.
    """
    try:
        with started_nvml() as nvml:
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
            settings: dict[str, Any] = {name: answer_or_none(nvml, ask) for name, ask in answers.items()}
            return settings | {"nvlinks": _links_up(nvml, handle)}
    except NvmlFailed:
        return {}


def gpu_with_uuid(uuid: str) -> Gpu | None:
    """Return the GPU with this UUID, from NVML; None where NVML does not know it or cannot be asked."""
    try:
        with started_nvml() as nvml:
            return _read_gpu(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
    except NvmlFailed:
        return None


class NvmlFailed(Exception):
    """NVML is not there, or answers nothing."""


@contextlib.contextmanager
def started_nvml() -> Iterator[Any]:
    """Give the module pynvml, started.

    Raises:
        NvmlFailed: it cannot be imported or started, or a question in the block has no answer.
    """
    try:
        import pynvml
    except ImportError as error:
        raise NvmlFailed(f"pynvml cannot be imported: {error}") from None
    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except (pynvml.NVMLError, OSError) as error:
        raise NvmlFailed(f"NVML: {error}") from None


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
    bus = answer_or_none(nvml, lambda: nvml.nvmlDeviceGetPciInfo(handle).busId)
    if bus is None:
        return None
    nvml_name = bus.decode("ascii", "replace") if isinstance(bus, bytes) else str(bus)
    # NVML writes the domain in eight digits, "00000000:3B:00.0", the kernel in four, "0000:3b:00.0".
    kernel_name = nvml_name.lower()[-12:]
    try:
        node = int((_PCI_DEVICES / kernel_name / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None  # -1: the firmware does not know it


def _numa_node_of_nvml(nvml: Any, handle: Any) -> int | None:
    """Return the memory node to which the GPU has affinity by NVML; None where that is not exactly one."""
    words = answer_or_none(
        nvml, lambda: list(nvml.nvmlDeviceGetMemoryAffinity(handle, 4, nvml.NVML_AFFINITY_SCOPE_NODE))
    )
    nodes: list[int] = []
    for word_index, word in enumerate(words or ()):  # a bit for each node, 64 nodes to a word
        nodes += [64 * word_index + bit for bit in range(64) if word >> bit & 1]
    return nodes[0] if len(nodes) == 1 else None


def _links_up(nvml: Any, handle: Any) -> int | None:
    """Return the number of NVLinks that are up; None where NVML does not know the state of any link."""
    known_states = []
    for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18)):
        state = answer_or_none(nvml, partial(nvml.nvmlDeviceGetNvLinkState, handle, link))
        if state is not None:
            known_states.append(state)
    if not known_states:
        return None
    return sum(1 for state in known_states if state)
