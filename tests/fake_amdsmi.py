"""libamd_smi as amdsmi sees it: C functions that fill in what they get a reference to, and return an error code.

The real amdsmi asks it: `ctypes.CDLL` gives it the fake while it is imported. The answers are written in the form that
AMD SMI's headers give them; they were not recorded from a machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vitscale.machine.vendors import amd

SUCCESS = 0
NOT_SUPPORTED = 2
INVALID = 1
_NOT_REPORTED = 2**64 - 1
_FIRST_HANDLE = 0x1000


@dataclass
class FakeGpu:
    """One GPU and its answers; None: this one is not supported."""

    serial: str
    hip_id: int | None
    """None: this release does not know HIP's numbers."""
    node_id: int | None = None
    name: str = "AMD Instinct MI300X"
    graphics_version: int = 0x942
    memory_bytes: int = 192 * 2**30
    bus: int = 0x11
    utilisation_percent: int | None = 97
    clock_mhz: int | None = 2100
    temperature_celsius: int | None = 61
    current_watts: int = 650
    average_watts: int = 0xFFFF
    power_cap_watts: int = 750
    default_power_cap_watts: int = 750
    violations: Mapping[str, int] | None = None
    """Field of amdsmi_violation_status_t -> 1 or 0; None: the GPU does not have them, as before MI300."""
    throttler_bits: int = _NOT_REPORTED
    chip_throttler_bits: int = 2**32 - 1
    energy_steps: int | None = 0
    microjoules_per_step: float = 15.3

    @property
    def uuid(self) -> str:
        """Its UUID, as ROCR_VISIBLE_DEVICES takes it."""
        return f"GPU-{self.serial.lower()}"

    @property
    def torch_uuid(self) -> str:
        """Its UUID, as torch gives it: the characters of the serial number, byte by byte in hexadecimal."""
        digits = self.serial.lower().encode().hex()
        return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


@dataclass
class FakeAmdSmi:
    """A host's GPUs, in AMD SMI's own order, each in a socket of its own."""

    gpus: list[FakeGpu]
    init_code: int = SUCCESS
    shut_downs: int = 0
    missing: set[str] = field(default_factory=set)
    """Functions that this driver's library does not have."""

    def gpu(self, handle: Any) -> FakeGpu:
        value: int = handle.value
        return self.gpus[value - _FIRST_HANDLE]

    def amdsmi_init(self, flags: Any) -> int:
        return self.init_code

    def amdsmi_shut_down(self) -> int:
        self.shut_downs += 1
        return SUCCESS

    def amdsmi_get_socket_handles(self, count: Any, handles: Any) -> int:
        count._obj.value = len(self.gpus)
        for index in range(len(self.gpus)) if handles else ():
            handles[index] = _FIRST_HANDLE + index
        return SUCCESS

    def amdsmi_get_processor_handles(self, socket: Any, count: Any, handles: Any) -> int:
        count._obj.value = 1
        if handles:
            handles[0] = socket.value
        return SUCCESS

    def amdsmi_get_gpu_asic_info(self, handle: Any, info: Any) -> int:
        gpu = self.gpu(handle)
        info._obj.market_name = gpu.name.encode()
        info._obj.asic_serial = f"0x{gpu.serial}".encode()
        info._obj.target_graphics_version = gpu.graphics_version
        return SUCCESS

    def amdsmi_get_gpu_enumeration_info(self, handle: Any, info: Any) -> int:
        hip_id = self.gpu(handle).hip_id
        if hip_id is None:
            return NOT_SUPPORTED
        info._obj.hip_id = hip_id
        return SUCCESS

    def amdsmi_get_gpu_kfd_info(self, handle: Any, info: Any) -> int:
        node_id = self.gpu(handle).node_id
        if node_id is None:
            return NOT_SUPPORTED
        info._obj.node_id = node_id
        return SUCCESS

    def amdsmi_get_gpu_device_bdf(self, handle: Any, address: Any) -> int:
        address._obj.struct_amdsmi_bdf_t.bus_number = self.gpu(handle).bus
        return SUCCESS

    def amdsmi_get_gpu_memory_total(self, handle: Any, kind: Any, total: Any) -> int:
        total._obj.value = self.gpu(handle).memory_bytes
        return SUCCESS

    def amdsmi_get_gpu_driver_info(self, handle: Any, info: Any) -> int:
        info._obj.driver_version = b"6.3.6"
        return SUCCESS

    def amdsmi_get_gpu_activity(self, handle: Any, usage: Any) -> int:
        return _answered(self.gpu(handle).utilisation_percent, usage._obj, "gfx_activity")

    def amdsmi_get_clock_info(self, handle: Any, kind: Any, clock: Any) -> int:
        assert kind == sys.modules["amdsmi"].AmdSmiClkType.GFX
        return _answered(self.gpu(handle).clock_mhz, clock._obj, "clk")

    def amdsmi_get_temp_metric(self, handle: Any, sensor: Any, metric: Any, value: Any) -> int:
        return _answered(self.gpu(handle).temperature_celsius, value._obj, "value")

    def amdsmi_get_power_info(self, handle: Any, info: Any) -> int:
        gpu = self.gpu(handle)
        info._obj.current_socket_power = gpu.current_watts
        info._obj.average_socket_power = gpu.average_watts
        return SUCCESS

    def amdsmi_get_power_cap_info(self, handle: Any, sensor: Any, info: Any) -> int:
        gpu = self.gpu(handle)
        info._obj.power_cap = gpu.power_cap_watts * 1_000_000
        info._obj.default_power_cap = gpu.default_power_cap_watts * 1_000_000
        return SUCCESS

    def amdsmi_get_pcie_info(self, handle: Any, info: Any) -> int:
        info._obj.pcie_static.pcie_interface_version = 5
        info._obj.pcie_metric.pcie_width = 16
        return SUCCESS

    def amdsmi_get_violation_status(self, handle: Any, status: Any) -> int:
        violations = self.gpu(handle).violations
        if violations is None:
            return NOT_SUPPORTED
        for name, _ in status._obj._fields_:
            if name.startswith("active_") and not name.startswith(("active_gfx_clk_below_host_limit_", "active_low")):
                setattr(status._obj, name, violations.get(name, 0))
        return SUCCESS

    def amdsmi_get_gpu_metrics_info(self, handle: Any, metrics: Any) -> int:
        gpu = self.gpu(handle)
        metrics._obj.indep_throttle_status = gpu.throttler_bits
        metrics._obj.throttle_status = gpu.chip_throttler_bits
        return SUCCESS

    def amdsmi_get_energy_count(self, handle: Any, steps: Any, resolution: Any, timestamp: Any) -> int:
        gpu = self.gpu(handle)
        if gpu.energy_steps is None:
            return NOT_SUPPORTED
        steps._obj.value = gpu.energy_steps
        resolution._obj.value = gpu.microjoules_per_step
        return SUCCESS


def _answered(value: int | None, target: Any, name: str) -> int:
    if value is None:
        return NOT_SUPPORTED
    setattr(target, name, value)
    return SUCCESS


class _Function:
    """A C function of the library; it calls that of the fake that is installed."""

    def __init__(self, library: _Library, name: str) -> None:
        self._library = library
        self._name = name

    def __call__(self, *arguments: Any) -> int:
        fake = self._library.fake
        function: Callable[..., int] | None = getattr(fake, self._name, None)
        if fake is None or function is None or self._name in fake.missing:
            return NOT_SUPPORTED
        return function(*arguments)


class _Library:
    """What amdsmi takes for libamd_smi.so."""

    def __init__(self) -> None:
        self.fake: FakeAmdSmi | None = None

    def __getattr__(self, name: str) -> _Function:
        function = _Function(self, name)
        setattr(self, name, function)
        return function


_LIBRARY = _Library()
_modules: dict[str, ModuleType] = {}
"""The package amdsmi over `_LIBRARY`, once it has been imported: module by name."""


def _import_over_fake() -> None:
    """Imports amdsmi with the fake library, and leaves it out of `sys.modules`."""
    others = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "amdsmi"}
    real = ctypes.CDLL
    ctypes.CDLL = lambda *_, **__: _LIBRARY  # type: ignore[assignment, misc]
    try:
        with contextlib.redirect_stdout(None):
            pytest.importorskip("amdsmi", reason="needs vitscale[amd]")
    finally:
        ctypes.CDLL = real  # type: ignore[misc]
        found = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "amdsmi"}
        sys.modules.update(others)
    _modules.update(found)


def installed(fake: FakeAmdSmi, monkeypatch: pytest.MonkeyPatch, folder: Path) -> FakeAmdSmi:
    """Makes this a host with the compute driver and these GPUs; `folder` is for its files."""
    if not _modules:
        _import_over_fake()
    for name, module in _modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(_LIBRARY, "fake", fake)
    driver = folder / "kfd"
    driver.touch()
    monkeypatch.setattr(amd, "_COMPUTE_DRIVER", driver)
    monkeypatch.setattr(amd, "_COMPUTE_NODES", folder / "nodes")
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return fake


def with_compute_nodes(folder: Path, *versions: int) -> None:
    """Writes the compute driver's folder of a host: its processor, and GPUs of these architectures (90010: gfx90a)."""
    for number, version in enumerate((0, *versions)):
        node = folder / "nodes" / str(number)
        node.mkdir(parents=True)
        (node / "properties").write_text(f"cpu_cores_count 0\ngfx_target_version {version}\nunique_id 0\n")
