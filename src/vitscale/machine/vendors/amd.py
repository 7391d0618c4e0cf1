"""AMD's GPUs, from AMD SMI: which ones this process may use, how they are set, what they do.

The Python package `amdsmi` comes with ROCm (/opt/rocm/share/amd_smi), and on the package index for those who have its
library, libamd_smi.so. It is imported only where the kernel has AMD's compute driver.

GPUs are numbered as HIP numbers them, and so torch, which may differ from AMD SMI's own order. An MI250 or MI250X is
two GPUs, its dies; only one of them counts the energy of both.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import override

from vitscale.base.distribution import install_command
from vitscale.machine.vendors.base import (
    EnergyCounter,
    EnergyUnknown,
    Gpu,
    GpuReading,
    GpusUnreadable,
    GpuVendor,
    OpenGpu,
    VendorLibraryFailed,
    is_count,
    is_hidden,
    numa_node_of_pci_device,
)

_COMPUTE_DRIVER = Path("/dev/kfd")
"""The device file of AMD's compute driver. Many a desktop has it, for the graphics of its processor."""
_COMPUTE_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
"""The driver's folder of processors and GPUs."""
_DATA_CENTRE_VERSIONS = frozenset((90006, 90008, 90010, 90400, 90401, 90402, 90500))
"""The driver's numbers of architectures of Instinct GPUs: MI50, MI100, MI200, MI300 (three) and MI350."""
_RUNTIME_VARIABLE = "ROCR_VISIBLE_DEVICES"
"""Which of the host's GPUs ROCm's runtime offers."""
_HIP_VARIABLES = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""Which of those the runtime offers HIP shows; the first one that is set counts."""
_UUID = re.compile(r"GPU-[0-9a-f]{16}")
_NOT_REPORTED_16_BITS = 0xFFFF
_NOT_REPORTED_32_BITS = 0xFFFF_FFFF
_NOT_REPORTED_64_BITS = 0xFFFF_FFFF_FFFF_FFFF

_ACTIVE_VIOLATIONS = {
    "active_ppt_pwr": "power cap",
    "active_socket_thrm": "thermal (hardware)",
    "active_vr_thrm": "thermal (voltage regulator)",
    "active_hbm_thrm": "thermal (memory)",
    "active_prochot_thrm": "hardware slowdown",
}
"""Fields of amdsmi_get_violation_status, which MI300 and later GPUs have, and what they stand for."""
CAUSE_NOT_REPORTED = "cause not reported"

_T = TypeVar("_T")


@dataclass(frozen=True)
class _ThrottlerBits:
    """A stretch of bits of indep_throttle_status that stand for one reason."""

    first: int
    last: int
    reason: str


_THROTTLER_BITS = (
    _ThrottlerBits(0, 7, "power cap"),
    _ThrottlerBits(16, 23, "board limit"),  # currents
    _ThrottlerBits(32, 33, "thermal (hardware)"),
    _ThrottlerBits(34, 34, "thermal (memory)"),
    _ThrottlerBits(35, 37, "thermal (hardware)"),
    _ThrottlerBits(38, 41, "thermal (voltage regulator)"),
    _ThrottlerBits(42, 43, "thermal (hardware)"),
    _ThrottlerBits(44, 45, "thermal (voltage regulator)"),
    _ThrottlerBits(46, 47, "hardware slowdown"),
    _ThrottlerBits(56, 56, "power cap"),
    _ThrottlerBits(57, 57, "reliability"),
)
"""Linux, drivers/gpu/drm/amd/pm/swsmu/inc/amdgpu_smu.h, SMU_THROTTLER_*_BIT."""


class AmdGpus(GpuVendor):
    """The GPUs of this host that AMD SMI knows; ROCR_VISIBLE_DEVICES and HIP's variables say which may be used."""

    library = "AMD SMI"
    tool = "amd-smi"
    cause_command = "amd-smi monitor --violation, or amd-smi metric --power before MI300"
    limits_command = "amd-smi metric --clock --power"
    power_limit_command = "amd-smi set --power-cap"
    unreadable_advice = (
        "Correct ROCR_VISIBLE_DEVICES, or give the container /dev/kfd, /dev/dri and the amdsmi of its ROCm"
    )
    network_plugins = ("librccl-net.so", "libnccl-net.so")

    @override
    def visible_gpus(self) -> tuple[Gpu, ...]:
        hip_variable = next((name for name in _HIP_VARIABLES if name in os.environ), None)
        offered = os.environ.get(_RUNTIME_VARIABLE)
        shown = os.environ[hip_variable] if hip_variable is not None else None
        if is_hidden(offered) or is_hidden(shown):
            return ()
        try:
            gpus = tuple(found.gpu for found in _found_gpus())
            problem = f"AMD SMI tells of {len(gpus)}, and none of them is named"
        except VendorLibraryFailed as error:
            gpus = ()
            problem = str(error)
        selected = select_visible(select_visible(gpus, offered), shown)
        if not selected:
            _refuse_unusable_gpus(problem)
        return selected

    @override
    def host_gpus(self) -> tuple[Gpu, ...]:
        with contextlib.suppress(VendorLibraryFailed):
            return tuple(found.gpu for found in _found_gpus())
        return ()

    @override
    def device_prefixes(self) -> tuple[str, ...]:
        return (str(_COMPUTE_DRIVER), "/dev/dri/render")

    @override
    def owns(self, uuid: str) -> bool:
        return _UUID.fullmatch(uuid) is not None

    @override
    def uuids_of(self, torch_uuid: str) -> tuple[str, ...]:
        # HIP's UUID is the text of 16 digits, and torch writes the code of each of its characters.
        try:
            digits = bytes.fromhex(torch_uuid.replace("-", "")).decode("ascii")
        except ValueError:
            return ()
        uuid = f"GPU-{digits.lower()}"
        return (uuid,) if self.owns(uuid) else ()

    @override
    def gpu_with_uuid(self, uuid: str) -> Gpu | None:
        with contextlib.suppress(VendorLibraryFailed):
            return _found_gpu(_found_gpus(), uuid).gpu
        return None

    @override
    def settings(self, uuid: str) -> dict[str, Any]:
        try:
            handle = _found_gpu(_found_gpus(), uuid).handle
            smi = _started_smi()
        except VendorLibraryFailed:
            return {}
        power = _answer_or_none(smi, lambda: smi.amdsmi_get_power_cap_info(handle)) or {}
        pcie = _answer_or_none(smi, lambda: smi.amdsmi_get_pcie_info(handle)) or {}
        return {
            "power_limit_watts": _watts_of_microwatts(power.get("power_cap")),
            "power_limit_default_watts": _watts_of_microwatts(power.get("default_power_cap")),
            "pcie_generation": _positive(pcie.get("pcie_static", {}).get("pcie_interface_version")),
            "pcie_width": _positive(pcie.get("pcie_metric", {}).get("pcie_width")),
        }

    @override
    def open(self, uuid: str) -> OpenGpu:
        return _OpenAmdGpu(_started_smi(), _found_gpu(_found_gpus(), uuid))

    @override
    def energy_counter(self, uuid: str) -> EnergyCounter:
        smi = _started_smi()
        found = _found_gpus()
        gpu = _found_gpu(found, uuid)
        if not gpu.is_die:
            return _counter(smi, gpu, (gpu,), source="AMD SMI: the GPU, whoever uses it")
        first, *others = _dies_of_module(found, gpu)
        if any(_is_counting_energy(smi, other.handle) for other in others):
            raise EnergyUnknown("the first die of a module counts for all, and here another one counts too")
        source = "AMD SMI: the GPU module, all its dies, whoever uses it"
        return _counter(smi, first, (first, *others), source=source)


def _counter(smi: Any, counting: _FoundGpu, counted: tuple[_FoundGpu, ...], source: str) -> EnergyCounter:
    """Return the counter of energy of one GPU.

    Args:
        smi: the module amdsmi, started.
        counting: the GPU.
        counted: the GPUs whose energy it counts.
        source: what that is, for the record.

    Raises:
        EnergyUnknown: it does not count, or has never moved.
    """
    if not _is_counting_energy(smi, counting.handle):
        raise EnergyUnknown("this GPU does not count its energy")
    return EnergyCounter(
        read_millijoules=partial(_millijoules, smi, counting.handle),
        source=source,
        devices=tuple(found.gpu.uuid for found in counted),
    )


def _refuse_unusable_gpus(problem: str) -> None:
    """Report that no GPU can be used, where there are signs of GPUs all the same.

    The compute driver alone is no sign: desktops have it for the graphics of their processor, on which nobody trains.

    Raises:
        GpusUnreadable: there are signs: an Instinct GPU, or a variable that names GPUs of AMD's.
    """
    signs = [f"{name} = {os.environ[name]!r}" for name in (_RUNTIME_VARIABLE, _HIP_VARIABLES[0]) if name in os.environ]
    data_centre_gpus = _data_centre_gpus()
    if data_centre_gpus:
        signs.insert(0, f"{data_centre_gpus} AMD Instinct GPUs in {_COMPUTE_NODES}")
    if signs:
        raise GpusUnreadable(f"{' and '.join(signs)} are there, but {problem}")


def _data_centre_gpus() -> int:
    """Return the number of GPUs of which the compute driver says that they are made for data centres."""
    count = 0
    for properties in _COMPUTE_NODES.glob("*/properties"):
        try:
            text = properties.read_text(encoding="ascii", errors="replace")
        except OSError:
            continue  # a job may not read the GPUs of others
        version = re.search(r"^gfx_target_version (\d{1,9})$", text, re.MULTILINE)
        if version is not None and int(version[1]) in _DATA_CENTRE_VERSIONS:
            count += 1
    return count


def select_visible(gpus: tuple[Gpu, ...], visible: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that a variable such as ROCR_VISIBLE_DEVICES names, in its order.

    The list ends at the first entry that names nothing. A GPU named twice counts once, for two ranks on it would share
    it. Source: ROCm documentation, "GPU isolation techniques".

    Args:
        gpus: the GPUs from which it selects: those of the host, or those that another variable has left.
        visible: the variable's value, indices or unique beginnings of UUIDs: "0,1" or "GPU-8a6d". None where it is not
            set, and all of them are visible.
    """
    if visible is None:
        return gpus
    selected: list[Gpu] = []
    for entry in visible.split(","):
        gpu = _named_gpu(gpus, entry.strip())
        if gpu is None:
            break
        selected.append(gpu)
    return tuple(dict.fromkeys(selected))


def _named_gpu(gpus: tuple[Gpu, ...], entry: str) -> Gpu | None:
    """Return the GPU that one entry of such a variable names; None where it names none, or several."""
    if is_count(entry):
        number = int(entry)
        matches = list(gpus[number : number + 1])
    elif entry.startswith("GPU-"):
        beginning = f"GPU-{entry.removeprefix('GPU-').lower()}"
        matches = [gpu for gpu in gpus if gpu.uuid.startswith(beginning)]
    else:
        return None
    return matches[0] if len(matches) == 1 else None


@dataclass(frozen=True)
class _FoundGpu:
    """A GPU and AMD SMI's handle of it, which stays valid as long as this process."""

    gpu: Gpu
    handle: Any
    index: int
    """Its number on this host, as HIP counts."""

    @property
    def is_die(self) -> bool:
        """Whether it is one of the two dies of a module that counts its energy and power as a whole."""
        return "MI250" in self.gpu.name.upper()


def _found_gpus() -> tuple[_FoundGpu, ...]:
    """Return the host's GPUs in HIP's order.

    Raises:
        VendorLibraryFailed: AMD SMI cannot be imported or started.
    """
    smi = _started_smi()
    try:
        handles = smi.amdsmi_get_processor_handles()
    except smi.AmdSmiException as error:
        raise VendorLibraryFailed(f"AMD SMI: {_in_one_line(error)}") from None
    handles = _in_hip_order(smi, handles)
    found: list[_FoundGpu] = []
    for index, handle in enumerate(handles):
        gpu = _read_gpu(smi, handle)
        if gpu is not None:
            found.append(_FoundGpu(gpu, handle, index))
    return tuple(found)


def _found_gpu(gpus: tuple[_FoundGpu, ...], uuid: str) -> _FoundGpu:
    """Return the GPU with this UUID.

    Raises:
        VendorLibraryFailed: there is none; or several, which are parts of one GPU that share its UUID.
    """
    matches = [found for found in gpus if found.gpu.uuid == uuid]
    if len(matches) != 1:
        raise VendorLibraryFailed(f"AMD SMI: {len(matches) or 'no'} GPUs have the UUID {uuid}")
    return matches[0]


def _in_hip_order(smi: Any, handles: list[Any]) -> list[Any]:
    """Return the handles in HIP's order: by HIP's own numbers, else by the driver's, from which HIP counts.

    AMD SMI before ROCm 6.4 does not know HIP's numbers. The handles stay as they are where it knows neither.
    """
    ways: tuple[Callable[[Any], Any], ...] = (
        lambda handle: smi.amdsmi_get_gpu_enumeration_info(handle)["hip_id"],
        lambda handle: smi.amdsmi_get_gpu_kfd_info(handle)["node_id"],
    )
    for way in ways:
        numbers = [_whole(_answer_or_none(smi, partial(way, handle))) for handle in handles]
        handle_by_number = {
            number: handle for number, handle in zip(numbers, handles, strict=True) if number is not None
        }
        if len(handle_by_number) == len(handles):
            return [handle_by_number[number] for number in sorted(handle_by_number)]
    return handles


def _dies_of_module(gpus: tuple[_FoundGpu, ...], die: _FoundGpu) -> tuple[_FoundGpu, ...]:
    """Return the dies of the module to which one belongs, as far as they are known, in HIP's order.

    HIP counts dies in pairs. Where a job has a die without the first one of its module, pairs are not modules: the
    first of such a pair then counts no energy.
    """
    return tuple(found for found in gpus if found.index // 2 == die.index // 2)


def _started_smi() -> Any:
    """Return the module amdsmi, started.

    It is never shut down: that would end it for torch too, and for the thread that reads a GPU, whose handles it frees.

    Raises:
        VendorLibraryFailed: there is no AMD GPU, or the module cannot be imported or started.
    """
    if not _COMPUTE_DRIVER.exists():
        raise VendorLibraryFailed(f"no AMD GPU: {_COMPUTE_DRIVER} is missing")
    try:
        with contextlib.redirect_stdout(None):  # it prints where it misses libamd_smi.so
            import amdsmi
    except ImportError as error:
        raise VendorLibraryFailed(
            f"amdsmi cannot be imported: {error} (ROCm has it in /opt/rocm/share/amd_smi; {install_command('amd')})"
        ) from None
    except Exception as error:  # OSError, KeyError or AttributeError: no libamd_smi.so, or one of another release
        raise VendorLibraryFailed(
            f"amdsmi does not find a libamd_smi.so that fits it: {_in_one_line(error)}; install the amdsmi of this ROCm"
        ) from None
    try:
        amdsmi.amdsmi_init(amdsmi.AmdSmiInitFlags.INIT_AMD_GPUS)
    except amdsmi.AmdSmiException as error:
        raise VendorLibraryFailed(f"AMD SMI: {_in_one_line(error)}") from None
    return amdsmi


def _answer_or_none(smi: Any, ask: Callable[[], _T]) -> _T | None:
    """Return what `ask` returns; None where this GPU, driver or amdsmi has no answer."""
    try:
        return ask()
    except (smi.AmdSmiException, AttributeError, KeyError, ValueError):  # older releases lack functions and fields
        return None


def _read_gpu(smi: Any, handle: Any) -> Gpu | None:
    """Return the GPU with a handle of AMD SMI's; None where it may not be asked, or has no number of its own."""
    chip = _answer_or_none(smi, lambda: smi.amdsmi_get_gpu_asic_info(handle)) or {}
    serial = re.fullmatch(r"0x([0-9A-Fa-f]{16})", str(chip.get("asic_serial")))
    if serial is None:
        return None
    memory_bytes = _answer_or_none(smi, lambda: smi.amdsmi_get_gpu_memory_total(handle, smi.AmdSmiMemoryType.VRAM))
    driver = _answer_or_none(smi, lambda: smi.amdsmi_get_gpu_driver_info(handle)["driver_version"])
    architecture = str(chip.get("target_graphics_version", ""))
    return Gpu(
        uuid=f"GPU-{serial[1].lower()}",
        name=str(chip.get("market_name", "AMD GPU")),
        memory_bytes=_positive(memory_bytes),
        driver=driver if driver != "N/A" else None,
        compute_capability=None,
        numa_node=_numa_node(smi, handle),
        architecture=architecture if re.fullmatch(r"gfx[0-9a-f]{3,5}", architecture) else None,
    )


def _numa_node(smi: Any, handle: Any) -> int | None:
    """Return the number of the GPU's memory node, from the kernel; None where it does not know it."""
    address = _answer_or_none(smi, lambda: smi.amdsmi_get_gpu_device_bdf(handle))
    return numa_node_of_pci_device(address) if address is not None else None


class _OpenAmdGpu(OpenGpu):
    """A GPU that AMD SMI can be asked about."""

    def __init__(self, smi: Any, found: _FoundGpu) -> None:
        """`smi` is the module amdsmi, started."""
        self._smi = smi
        self._handle = found.handle
        self._is_die = found.is_die

    @override
    def take_reading(self) -> GpuReading:
        percent = self._utilisation_percent()
        return GpuReading(
            utilisation=None if percent is None else percent / 100,
            sm_clock_mhz=self._clock_mhz(),
            temperature_celsius=self._temperature_celsius(),
            power_watts=self._power_watts(),
            slowed_by=self._slowed_by(),
            is_idle=None if percent is None else percent == 0,
        )

    def _ask(self, ask: Callable[[], _T]) -> _T | None:
        return _answer_or_none(self._smi, ask)

    def _utilisation_percent(self) -> int | None:
        percent = _whole(self._ask(lambda: self._smi.amdsmi_get_gpu_activity(self._handle)["gfx_activity"]))
        is_a_share = percent is not None and percent <= 100
        return percent if is_a_share else None

    def _clock_mhz(self) -> int | None:
        clock = self._ask(lambda: self._smi.amdsmi_get_clock_info(self._handle, self._smi.AmdSmiClkType.GFX)) or {}
        return _positive(clock.get("clk", clock.get("cur_clk")))  # its older name

    def _temperature_celsius(self) -> int | None:
        sensor = self._smi.AmdSmiTemperatureType.HOTSPOT
        metric = self._smi.AmdSmiTemperatureMetric.CURRENT
        return _positive(self._ask(lambda: self._smi.amdsmi_get_temp_metric(self._handle, sensor, metric)))

    def _power_watts(self) -> float | None:
        """Return the GPU's power; None for the die of a module, whose power is measured as a whole."""
        if self._is_die:
            return None
        power = self._ask(lambda: self._smi.amdsmi_get_power_info(self._handle)) or {}
        for name in (
            "current_socket_power",
            "average_socket_power",
        ):  # MI300 and later have the first, others the second
            watts = _positive(power.get(name))
            if watts is not None and watts < _NOT_REPORTED_16_BITS:
                return float(watts)
        return None

    def _slowed_by(self) -> tuple[str, ...] | None:
        """Return the reasons that slow the clocks: from MI300 on by violations, before by the throttler's bits."""
        violations = self._ask(lambda: self._smi.amdsmi_get_violation_status(self._handle)) or {}
        reasons = violation_reasons(violations)
        if reasons is not None:
            return reasons
        return self._ask(self._throttler_reasons)

    def _throttler_reasons(self) -> tuple[str, ...] | None:
        # amdsmi_get_gpu_metrics_info makes a bool of the bits; its own binding has them.
        binding = self._smi.amdsmi_interface.amdsmi_wrapper
        metrics = binding.amdsmi_gpu_metrics_t()
        if binding.amdsmi_get_gpu_metrics_info(self._handle, ctypes.byref(metrics)) != 0:
            return None
        return throttler_reasons(metrics.indep_throttle_status, metrics.throttle_status)


def violation_reasons(violations: dict[str, Any]) -> tuple[str, ...] | None:
    """Return names of the violations that are active; None where the GPU reports none of them, as before MI300.

    Args:
        violations: the answer of amdsmi_get_violation_status, in which "N/A" stands for what is not reported.
    """
    states = {reason: violations.get(field) for field, reason in _ACTIVE_VIOLATIONS.items()}
    if not any(isinstance(state, bool) for state in states.values()):
        return None
    return tuple(reason for reason, state in states.items() if state is True)


def throttler_reasons(bits: int, chip_bits: int) -> tuple[str, ...] | None:
    """Return names of the reasons in a throttler's bits; an unknown bit as "reason 0x100"; None if not reported.

    Args:
        bits: indep_throttle_status, which means the same on every GPU.
        chip_bits: throttle_status, which every chip numbers its own way; all that older drivers have.
    """
    if bits == _NOT_REPORTED_64_BITS:
        if chip_bits == _NOT_REPORTED_32_BITS:
            return None
        return (CAUSE_NOT_REPORTED,) if chip_bits else ()
    names: dict[str, None] = {}
    for position in range(bits.bit_length()):
        if bits >> position & 1:
            names[_throttler_reason(position)] = None
    return tuple(names)


def _throttler_reason(position: int) -> str:
    for stretch in _THROTTLER_BITS:
        if stretch.first <= position <= stretch.last:
            return stretch.reason
    return f"reason {1 << position:#x}"


def _millijoules(smi: Any, handle: Any) -> float:
    """Return a GPU's counter of energy."""
    counter = smi.amdsmi_get_energy_count(handle)
    steps = counter["energy_accumulator"] if "energy_accumulator" in counter else counter["power"]  # before ROCm 6.2.1
    return float(steps * counter["counter_resolution"]) / 1000  # it counts in microjoules


def _is_counting_energy(smi: Any, handle: Any) -> bool:
    """Whether a GPU's counter of energy is there, and has ever moved."""
    return (_answer_or_none(smi, partial(_millijoules, smi, handle)) or 0.0) > 0.0


def _whole(value: Any) -> int | None:
    """Return a whole number of AMD SMI's; None for "N/A"."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _positive(value: Any) -> int | None:
    """Return a whole number of AMD SMI's; None for "N/A", and for 0, which stands for what is not known."""
    number = _whole(value)
    return number if number is not None and number > 0 else None


def _watts_of_microwatts(value: Any) -> float | None:
    microwatts = _positive(value)
    return microwatts / 1e6 if microwatts is not None else None


def _in_one_line(error: Exception) -> str:
    """Return the type of an error and its message, without line breaks."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
