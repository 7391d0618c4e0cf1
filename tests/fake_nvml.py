"""libnvidia-ml as pynvml sees it: C functions that fill in what they get a reference to, and return an error code.

The real pynvml, and through it the real zeus, ask it. Its answers are written in the form NVML gives them; they were
not recorded from a machine.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pynvml
import pytest

UUID = "GPU-11111111-2222-3333-4444-555555555555"


@dataclass(frozen=True)
class Answers:
    """What one GPU says at one look; None: this one is not supported."""

    utilisation_percent: int | None = 97
    sm_clock_mhz: int | None = 1980
    temperature_celsius: int | None = 61
    power_milliwatts: int | None = 652_000
    clock_reasons: int | None = 0


@dataclass(frozen=True)
class FakeLinks:
    """NVLinks, PCIe and peers of each of two GPUs; None: not supported."""

    states: tuple[int | None, ...] = (1, 1, 0)
    """Of its NVLinks: 1 is up."""
    version: int = pynvml.NVML_NVLINK_VERSION_4_0
    neighbour_kind: int | None = pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
    peer_status: int | None = pynvml.NVML_P2P_STATUS_OK
    pcie_width: int = 8


class FakeNvml:
    """One GPU that answers `looks` in turn, the last one for ever."""

    def __init__(self, looks: Sequence[Answers] = (Answers(),)) -> None:
        self.looks = list(looks)
        self.missing: set[str] = set()
        """Functions that this driver's library does not have."""
        self.init_code: int = pynvml.NVML_SUCCESS
        self.architecture = pynvml.NVML_DEVICE_ARCH_HOPPER
        self.energy_millijoules = 0
        self.energy_code = pynvml.NVML_SUCCESS
        self.forbidden: tuple[int, ...] = ()
        """Indices of GPUs that this process may not talk to; NVML counts them all the same."""
        self.links: FakeLinks | None = None
        """Given: there are two GPUs, linked like this; None: no such question is answered."""
        self.looked = 0
        self.enough = threading.Event()
        """Set once all of `looks` have been answered."""
        self.on_look: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> Any:
        function = type(self).__dict__.get(f"c_{name}")
        if name in self.missing or function is None:
            raise AttributeError(name)
        return function.__get__(self)

    def _answer(self, field: str, reference: Any) -> int:
        value = getattr(self.looks[min(self.looked, len(self.looks)) - 1], field)
        if value is None:
            return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
        reference._obj.value = value
        return int(pynvml.NVML_SUCCESS)

    def c_nvmlInitWithFlags(self, flags: int) -> int:
        return self.init_code

    def c_nvmlShutdown(self) -> int:
        return int(pynvml.NVML_SUCCESS)

    def c_nvmlDeviceGetHandleByUUID(self, uuid: Any, device: Any) -> int:
        _set_handle(device, 0)
        return int(pynvml.NVML_SUCCESS if uuid.value == UUID.encode() else pynvml.NVML_ERROR_NOT_FOUND)

    def c_nvmlDeviceGetIndex(self, device: Any, index: Any) -> int:
        index._obj.value = 3
        return int(pynvml.NVML_SUCCESS)

    def c_nvmlDeviceGetHandleByIndex_v2(self, index: Any, device: Any) -> int:
        number = getattr(index, "value", index)
        if number in self.forbidden:
            return int(pynvml.NVML_ERROR_NO_PERMISSION)
        if self.links is not None:
            _set_handle(device, number)
            return int(pynvml.NVML_SUCCESS)
        return int(pynvml.NVML_SUCCESS if number in (0, 3) else pynvml.NVML_ERROR_INVALID_ARGUMENT)

    def c_nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = (2 if self.links is not None else 1) + len(self.forbidden)
        return int(pynvml.NVML_SUCCESS)

    def c_nvmlDeviceGetUUID(self, device: Any, text: Any, length: Any) -> int:
        text.value = UUID.encode()
        return int(pynvml.NVML_SUCCESS)

    def c_nvmlDeviceGetName(self, device: Any, text: Any, length: Any) -> int:
        text.value = b"NVIDIA H200"
        return int(pynvml.NVML_SUCCESS)

    def c_nvmlSystemGetDriverVersion(self, text: Any, length: Any) -> int:
        text.value = b"570.124.06"
        return int(pynvml.NVML_SUCCESS)

    def c_nvmlDeviceGetMemoryInfo(self, device: Any, memory: Any) -> int:
        memory._obj.total = 143_771 * 2**20
        return int(pynvml.NVML_SUCCESS)

    def c_nvmlDeviceGetCudaComputeCapability(self, device: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = 9, 0
        return int(pynvml.NVML_SUCCESS)

    def c_nvmlDeviceGetEnforcedPowerLimit(self, device: Any, limit: Any) -> int:
        limit._obj.value = 500_000
        return int(pynvml.NVML_SUCCESS)

    def c_nvmlDeviceGetPowerManagementDefaultLimit(self, device: Any, limit: Any) -> int:
        limit._obj.value = 700_000
        return int(pynvml.NVML_SUCCESS)

    def c_nvmlDeviceGetEccMode(self, device: Any, current: Any, pending: Any) -> int:
        current._obj.value, pending._obj.value = 1, 1
        return int(pynvml.NVML_SUCCESS)

    def c_nvmlDeviceGetUtilizationRates(self, device: Any, rates: Any) -> int:
        self.on_look()
        self.looked += 1
        if self.looked >= len(self.looks):
            self.enough.set()
        percent = self.looks[min(self.looked, len(self.looks)) - 1].utilisation_percent
        if percent is None:
            return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
        rates._obj.gpu = percent
        return int(pynvml.NVML_SUCCESS)

    def c_nvmlDeviceGetClockInfo(self, device: Any, kind: Any, clock: Any) -> int:
        assert kind.value == pynvml.NVML_CLOCK_SM
        return self._answer("sm_clock_mhz", clock)

    def c_nvmlDeviceGetTemperatureV(self, device: Any, temperature: Any) -> int:
        value = self.looks[min(self.looked, len(self.looks)) - 1].temperature_celsius
        if value is None:
            return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
        temperature._obj.temperature = value
        return int(pynvml.NVML_SUCCESS)

    def c_nvmlDeviceGetTemperature(self, device: Any, sensor: Any, temperature: Any) -> int:
        assert sensor.value == pynvml.NVML_TEMPERATURE_GPU
        return self._answer("temperature_celsius", temperature)

    def c_nvmlDeviceGetPowerUsage(self, device: Any, power: Any) -> int:
        return self._answer("power_milliwatts", power)

    def c_nvmlDeviceGetCurrentClocksEventReasons(self, device: Any, reasons: Any) -> int:
        return self._answer("clock_reasons", reasons)

    def c_nvmlDeviceGetCurrentClocksThrottleReasons(self, device: Any, reasons: Any) -> int:
        return self._answer("clock_reasons", reasons)

    def c_nvmlDeviceGetC2cModeInfoV(self, device: Any, info: Any) -> int:
        return int(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def c_nvmlDeviceGetArchitecture(self, device: Any, architecture: Any) -> int:
        architecture._obj.value = self.architecture
        return int(pynvml.NVML_SUCCESS)

    def c_nvmlDeviceGetTotalEnergyConsumption(self, device: Any, millijoules: Any) -> int:
        millijoules._obj.value = self.energy_millijoules
        return int(self.energy_code)

    def _answer_of_links(self, reference: Any, value: int | None) -> int:
        if self.links is None or value is None:
            return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
        reference._obj.value = value
        return int(pynvml.NVML_SUCCESS)

    def c_nvmlDeviceGetNvLinkState(self, device: Any, link: int, state: Any) -> int:
        states = self.links.states if self.links is not None else ()
        return self._answer_of_links(state, states[link] if link < len(states) else None)

    def c_nvmlDeviceGetNvLinkVersion(self, device: Any, link: int, version: Any) -> int:
        return self._answer_of_links(version, self.links.version if self.links is not None else None)

    def c_nvmlDeviceGetNvLinkRemoteDeviceType(self, device: Any, link: int, kind: Any) -> int:
        return self._answer_of_links(kind, self.links.neighbour_kind if self.links is not None else None)

    def c_nvmlDeviceGetNvLinkRemotePciInfo_v2(self, device: Any, link: int, info: Any) -> int:
        if self.links is None:
            return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
        info._obj.busId = _bus_id(1 - _number(device))
        return int(pynvml.NVML_SUCCESS)

    def c_nvmlDeviceGetPciInfo_v3(self, device: Any, info: Any) -> int:
        if self.links is None:
            return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
        info._obj.busId = _bus_id(_number(device))
        return int(pynvml.NVML_SUCCESS)

    def c_nvmlDeviceGetP2PStatus(self, device: Any, other: Any, capability: int, status: Any) -> int:
        assert capability == 0  # NVML_P2P_CAPS_INDEX_READ
        return self._answer_of_links(status, self.links.peer_status if self.links is not None else None)

    def c_nvmlDeviceGetMaxPcieLinkGeneration(self, device: Any, generation: Any) -> int:
        return self._answer_of_links(generation, 4)

    def c_nvmlDeviceGetGpuMaxPcieLinkGeneration(self, device: Any, generation: Any) -> int:
        return self._answer_of_links(generation, 5)

    def c_nvmlDeviceGetCurrPcieLinkWidth(self, device: Any, width: Any) -> int:
        return self._answer_of_links(width, self.links.pcie_width if self.links is not None else None)

    def c_nvmlDeviceGetMaxPcieLinkWidth(self, device: Any, width: Any) -> int:
        return self._answer_of_links(width, 16)


def _set_handle(device: Any, number: int) -> None:
    """Lets a handle, which is a pointer, point to 1 + the number of its GPU."""
    ctypes.cast(device, ctypes.POINTER(ctypes.c_void_p))[0] = 1 + number


def _number(handle: Any) -> int:
    return (ctypes.cast(handle, ctypes.c_void_p).value or 1) - 1


def _bus_id(number: int) -> bytes:
    return b"00000000:%02X:00.0" % (0x1A + number)


def installed(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """Puts `fake` where pynvml keeps the library it has loaded."""
    monkeypatch.setattr(pynvml, "nvmlLib", fake)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return fake
