"""A rank's GPU during training: load, clock, temperature, power and throttling, as NVML tells them once a second."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from typing_extensions import override

from vitscale.store.records import GPU_LIMITS, GpuSamples

SECONDS_BETWEEN_SAMPLES = 1.0

# Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h) that slow the clocks though nobody asked for it.
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
_CLOCKS_SET = 0x002 | 0x100
"""Clocks set by the user, and for a display."""


class GpuMonitor:
    """Watches one GPU from `begin` to `end`, any number of times. This class watches nothing: it stands in where there
    is no GPU, or no way to ask it."""

    def __init__(self, reason: str | None) -> None:
        self.reason = reason
        """Why `end` told nothing; None where it told something."""

    def begin(self) -> None:
        """Begins to watch."""

    def end(self) -> GpuSamples | None:
        """Ends watching; returns what was seen since `begin`, None where nothing was."""
        return None

    def close(self) -> None:
        """Stops watching."""


@dataclass(frozen=True)
class GpuReading:
    """One look at a GPU; a value is None where the GPU does not tell it."""

    utilisation: float | None
    sm_clock_mhz: int | None
    temperature_celsius: int | None
    power_watts: float | None
    throttle_bits: int | None


class NvmlMonitor(GpuMonitor):
    """Asks NVML about one GPU, once a second. It tells nothing of less than a second, as the GPU is idle at its end."""

    def __init__(self, nvml: Any, handle: Any, seconds_between_samples: float = SECONDS_BETWEEN_SAMPLES) -> None:
        """`nvml` is the module pynvml, initialised; `handle` is the GPU's."""
        super().__init__(None)
        self._nvml, self._handle, self._seconds = nvml, handle, seconds_between_samples
        self._samples: list[GpuReading] = []
        self._watching = self._closed = False
        self._span = 0
        """Number of beginnings and ends so far: a look during which it changes belongs to no epoch."""
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._watch, name="gpu-monitor", daemon=True)
        self._thread.start()

    @override
    def begin(self) -> None:
        with self._changed:
            self._samples, self._watching = [], True
            self._span += 1
            self._changed.notify()

    @override
    def end(self) -> GpuSamples | None:
        with self._changed:
            samples, self._watching = self._samples, False
            self._span += 1
            self._changed.notify()
        self.reason = None if samples else f"NVML is asked every {self._seconds:g} s, and this was over before"
        return summary(samples)

    @override
    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def look(self) -> GpuReading:
        """Asks for all values once."""
        nvml, handle = self._nvml, self._handle
        utilisation = self._ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        power = self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        return GpuReading(
            utilisation=None if utilisation is None else utilisation / 100,
            sm_clock_mhz=self._ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            # Older drivers know these two only by their older names.
            temperature_celsius=self._ask(
                lambda: nvml.nvmlDeviceGetTemperatureV(handle, nvml.NVML_TEMPERATURE_GPU),
                lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            ),
            power_watts=None if power is None else power / 1000,
            throttle_bits=self._ask(
                lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
                lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
            ),
        )

    def _ask(self, *ways: Callable[[], int]) -> int | None:
        """The answer to the first of these ways that this GPU and driver answer; None where they answer none."""
        for way in ways:
            try:
                return int(way())
            except (self._nvml.NVMLError, AttributeError):  # a later pynvml may have dropped an older name
                continue
        return None

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._watching or self._closed)
                span = self._span
                self._changed.wait_for(partial(self._is_over, span), self._seconds)
                if self._closed:
                    return
                if self._span != span:
                    continue
            sample = self.look()
            with self._changed:
                if self._span == span:
                    self._samples.append(sample)

    def _is_over(self, span: int) -> bool:
        return self._span != span or self._closed


def gpu_monitor(uuid: str | None, seconds_between_samples: float = SECONDS_BETWEEN_SAMPLES) -> GpuMonitor:
    """The monitor of the GPU with `uuid` (as NVML writes it, "GPU-..."); for None the rank computes on the host."""
    if uuid is None:
        return GpuMonitor("the rank computes on the host")
    try:
        import pynvml
    except ImportError as error:
        return GpuMonitor(f"pynvml cannot be imported: {error}")
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError as error:
        return GpuMonitor(f"NVML: {error}")
    return NvmlMonitor(pynvml, handle, seconds_between_samples)


def summary(samples: Sequence[GpuReading]) -> GpuSamples | None:
    """The figures over some samples; None where none of them holds anything."""
    if not any(value is not None for sample in samples for value in vars(sample).values()):
        return None

    def told(name: str) -> list[Any]:
        return [value for sample in samples if (value := getattr(sample, name)) is not None]

    utilisations, clocks, powers = told("utilisation"), told("sm_clock_mhz"), told("power_watts")
    throttles = [throttling(bits) for bits in told("throttle_bits")]
    # A GPU that is mostly held back is still slow in the moments in which it is not.
    unheld = [
        sample.sm_clock_mhz
        for sample in samples
        if sample.sm_clock_mhz and sample.throttle_bits is not None and not sample.throttle_bits & ~_CLOCKS_SET
        if 2 * sum(map(bool, throttles)) <= len(throttles)
    ]
    slowed = [[name for name in names if name not in GPU_LIMITS] for names in throttles]
    limited = [[name for name in names if name in GPU_LIMITS] for names in throttles]
    return GpuSamples(
        samples=len(samples),
        utilisation=statistics.fmean(utilisations) if utilisations else None,
        sm_clock_mhz_median=statistics.median(clocks) if clocks else None,
        sm_clock_mhz_min=min(clocks, default=None),
        unheld_sm_clock_mhz=max(unheld, default=None),
        temperature_celsius_max=max(told("temperature_celsius"), default=None),
        power_watts_mean=statistics.fmean(powers) if powers else None,
        throttle_reasons=tuple(dict.fromkeys(name for names in slowed for name in names)),
        throttled_share=sum(map(bool, slowed)) / len(slowed) if slowed else None,
        limits=tuple(dict.fromkeys(name for names in limited for name in names)) if limited else None,
        limited_share=sum(map(bool, limited)) / len(limited) if limited else None,
    )


def throttling(bits: int) -> tuple[str, ...]:
    """Names of the reasons in NVML's bits that slow the clocks; those unknown here by their number."""
    known = [name for bit, name in THROTTLE_REASONS.items() if bits & bit]
    unknown = bits & ~(_IDLE | _CLOCKS_SET) & ~sum(THROTTLE_REASONS)
    return (*known, *(f"reason {1 << at:#x}" for at in range(unknown.bit_length()) if unknown >> at & 1))
