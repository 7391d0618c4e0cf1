"""Watches a rank's GPU during training: load, clock, temperature, power and throttling, once a second."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from typing import TypeVar

from typing_extensions import override

from vitscale.machine.gpus import GpuReading, OpenGpu, VendorLibraryFailed, library_of, open_gpu
from vitscale.store.records import GPU_LIMITS, GpuSamples

SECONDS_BETWEEN_SAMPLES = 1.0


class GpuMonitor:
    """Watches one GPU from `begin` to `end`, any number of times.

    This class watches nothing and returns no samples: it stands in where there is no GPU, or no way to ask it.
    """

    def __init__(self, reason: str | None) -> None:
        """`reason`: why there are no samples; None for a subclass, which may have some."""
        self.reason = reason
        """Why the latest `end` returned None; None where it returned samples."""

    def begin(self) -> None:
        """Begins to watch."""

    def end(self) -> GpuSamples | None:
        """Ends watching; returns the figures of the samples since `begin`, None where there are none."""
        return None

    def close(self) -> None:
        """Stops watching."""


class SamplingMonitor(GpuMonitor):
    """Reads one GPU in a thread of its own.

    The first sample is taken a second after `begin`, and none at `end`, where the GPU is idle: a shorter time has none.
    """

    def __init__(self, gpu: OpenGpu, library: str, seconds_between_samples: float = SECONDS_BETWEEN_SAMPLES) -> None:
        """`library`: name of the vendor's library that reads it, for the record."""
        super().__init__(reason=None)
        self._gpu = gpu
        self._library = library
        self._seconds = seconds_between_samples
        self._samples: list[GpuReading] = []
        """Readings since the latest `begin`."""
        self._watching = False
        """Whether `begin` has been called, and `end` not yet."""
        self._closed = False
        self._stretch = 0
        """Number of calls of `begin` and `end` so far. A reading during which it changes belongs to no stretch."""
        self._condition = threading.Condition()
        """Guards the four above; notified when one of them changes."""
        self._thread = threading.Thread(target=self._watch, name="gpu-monitor", daemon=True)
        self._thread.start()

    @override
    def begin(self) -> None:
        with self._condition:
            self._samples = []
            self._watching = True
            self._stretch += 1
            self._condition.notify()

    @override
    def end(self) -> GpuSamples | None:
        with self._condition:
            samples = self._samples
            self._watching = False
            self._stretch += 1
            self._condition.notify()
        self.reason = (
            None if samples else f"{self._library} is asked every {self._seconds:g} s, and this was over before"
        )
        return summary(samples)

    @override
    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join()

    def _watch(self) -> None:
        """Takes a sample a second while the GPU is watched, until `close`."""
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._watching or self._closed)
                stretch = self._stretch
                self._condition.wait_for(partial(self._has_ended, stretch), self._seconds)
                if self._closed:
                    return
                if self._stretch != stretch:
                    continue
            reading = (
                self._gpu.take_reading()
            )  # without the lock: it may take milliseconds, and `end` must not wait for it
            with self._condition:
                if self._stretch == stretch:
                    self._samples.append(reading)

    def _has_ended(self, stretch: int) -> bool:
        """Whether the stretch with this number is over, or the monitor is closed."""
        return self._stretch != stretch or self._closed


def gpu_monitor(uuid: str | None, seconds_between_samples: float = SECONDS_BETWEEN_SAMPLES) -> GpuMonitor:
    """Returns the monitor of a GPU.

    Args:
        uuid: the GPU's, as its vendor's library writes it ("GPU-..."); None: the rank computes on the host.
        seconds_between_samples: time from one sample to the next.
    """
    if uuid is None:
        return GpuMonitor(reason="the rank computes on the host")
    try:
        return SamplingMonitor(open_gpu(uuid), library_of(uuid), seconds_between_samples)
    except VendorLibraryFailed as error:
        return GpuMonitor(reason=str(error))


def summary(samples: Sequence[GpuReading]) -> GpuSamples | None:
    """Returns the figures over some samples; None where the GPU reported no value in any of them."""
    if not any(_has_a_value(sample) for sample in samples):
        return None
    utilisations = _without_none(sample.utilisation for sample in samples)
    clocks = _without_none(sample.sm_clock_mhz for sample in samples)
    temperatures = _without_none(sample.temperature_celsius for sample in samples)
    powers = _without_none(sample.power_watts for sample in samples)
    # From here on without the samples in which the GPU did not report its reasons.
    reasons_by_sample = [sample.slowed_by for sample in samples if sample.slowed_by is not None]
    faults_by_sample = [_faults_among(reasons) for reasons in reasons_by_sample]
    limits_by_sample = [_limits_among(reasons) for reasons in reasons_by_sample]
    return GpuSamples(
        samples=len(samples),
        utilisation=_mean(utilisations),
        sm_clock_mhz_median=statistics.median(clocks) if clocks else None,
        sm_clock_mhz_min=min(clocks, default=None),
        unheld_sm_clock_mhz=_highest_unheld_clock(samples, reasons_by_sample),
        temperature_celsius_max=max(temperatures, default=None),
        power_watts_mean=_mean(powers),
        throttle_reasons=_distinct_names(faults_by_sample),
        throttled_share=_share_with_any(faults_by_sample),
        limits=_distinct_names(limits_by_sample) if limits_by_sample else None,
        limited_share=_share_with_any(limits_by_sample),
    )


def _mean(values: Sequence[float]) -> float | None:
    """Returns the mean of the values; None where there are none."""
    return statistics.fmean(values) if values else None


def _limits_among(reasons: Iterable[str]) -> list[str]:
    """Returns the reasons that are usual limits of a GPU under load, such as its power."""
    return [name for name in reasons if name in GPU_LIMITS]


def _faults_among(reasons: Iterable[str]) -> list[str]:
    """Returns the reasons that are no usual limits: heat, or a fault."""
    return [name for name in reasons if name not in GPU_LIMITS]


def _has_a_value(sample: GpuReading) -> bool:
    return any(value is not None for value in vars(sample).values())


_Number = TypeVar("_Number", int, float)


def _without_none(values: Iterable[_Number | None]) -> list[_Number]:
    """Returns the values without None."""
    return [value for value in values if value is not None]


def _highest_unheld_clock(samples: Sequence[GpuReading], reasons_by_sample: Sequence[Sequence[str]]) -> int | None:
    """Returns the highest clock in MHz of samples in which nothing held the GPU back, and in which it was not idle.

    Returns None where there are none, or where most samples were held back: the GPU is still slow in the moments
    between.

    Args:
        samples: all samples.
        reasons_by_sample: why the clocks were held back in each of those samples for which it is known; empty for none.
    """
    samples_held_back = sum(1 for reasons in reasons_by_sample if reasons)
    if 2 * samples_held_back > len(reasons_by_sample):
        return None
    unheld_samples = [sample for sample in samples if _is_unheld(sample)]
    clocks = [sample.sm_clock_mhz for sample in unheld_samples if sample.sm_clock_mhz]
    return max(clocks, default=None)


def _is_unheld(sample: GpuReading) -> bool:
    """Whether it is known that a GPU was neither held back nor idle; clocks set by the user are its usual ones."""
    return sample.slowed_by == () and sample.is_idle is False


def _distinct_names(names_by_sample: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Returns each name once, in the order of their first samples."""
    return tuple(dict.fromkeys(chain.from_iterable(names_by_sample)))


def _share_with_any(names_by_sample: Sequence[Sequence[str]]) -> float | None:
    """Returns the share of samples that have a name; None without samples."""
    if not names_by_sample:
        return None
    return sum(1 for names in names_by_sample if names) / len(names_by_sample)
