"""The energy of a stretch of steps, by the zeus library: of a rank's GPU (NVML) or its host's processors (RAPL)."""

from __future__ import annotations

import logging
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import override

from vitscale.store.records import EnergyReading

NOT_INSTALLED = "the zeus library is not here: install vitscale[energy]"
BY_LOCAL_RANK_0 = "measured by local rank 0"
RAPL_FOLDERS = (Path("/sys/class/powercap/intel-rapl"), Path("/zeus_sys/class/powercap/intel-rapl"))
"""Where zeus looks; the second is how it is mounted into containers."""
_SECONDS_BETWEEN_READINGS = 20.0
"""RAPL counters begin again at 65 kJ on some processors: at 1 kW that is after 65 seconds."""


class EnergyMeter(ABC):
    """Measures energy from `begin` to `end`, time after time."""

    @abstractmethod
    def begin(self) -> None:
        """What is to be measured begins."""

    @abstractmethod
    def end(self) -> EnergyReading:
        """What was used since `begin`, or why that is unknown."""

    @abstractmethod
    def close(self) -> None:
        """Stops measuring."""


class NoEnergyMeter(EnergyMeter):
    """Stands in where nothing can be measured, or where another rank measures."""

    def __init__(self, reason: str) -> None:
        self._reading = EnergyReading(joules=None, source=None, reason=reason)

    @override
    def begin(self) -> None:
        pass

    @override
    def end(self) -> EnergyReading:
        return self._reading

    @override
    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Counter:
    """A counter of energy that only goes up, but for a beginning again at `range_joules`."""

    read_joules: Callable[[], float]
    range_joules: float | None = None


class CounterMeter(EnergyMeter):
    """The sum of some counters, each read often enough that none begins again twice unseen."""

    def __init__(
        self,
        counters: Sequence[Counter],
        source: str,
        devices: tuple[str, ...],
        seconds_between_readings: float = _SECONDS_BETWEEN_READINGS,
    ) -> None:
        self._counters, self._source, self._devices = counters, source, devices
        self._seconds = seconds_between_readings
        self._lock = threading.Lock()
        self._last: list[float] = []
        self._joules = 0.0
        self._failure: str | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if any(counter.range_joules is not None for counter in counters):
            self._thread = threading.Thread(target=self._keep_up, name="energy", daemon=True)
            self._thread.start()

    @override
    def begin(self) -> None:
        with self._lock:
            self._last, self._joules, self._failure = [], 0.0, None
            self._advance()

    @override
    def end(self) -> EnergyReading:
        with self._lock:
            self._advance()
            joules, failure = self._joules, self._failure
            self._last = []
        if failure is None and joules == 0:
            failure = "the counter of energy did not move: it is updated every 20 to 100 ms"
        if failure is not None:
            return EnergyReading(joules=None, source=self._source, reason=failure, devices=self._devices)
        return EnergyReading(joules=joules, source=self._source, reason=None, devices=self._devices)

    @override
    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _keep_up(self) -> None:
        while not self._closed.wait(self._seconds):
            with self._lock:
                if self._last:
                    self._advance()

    def _advance(self) -> None:
        """Reads all counters and adds what they gained since they were last read."""
        try:
            now = [counter.read_joules() for counter in self._counters]
        except Exception as error:  # zeus lets through whatever its libraries raise
            self._failure = _reason(error)
            return
        for counter, before, after in zip(self._counters, self._last or now, now, strict=True):
            gained = after - before
            if gained < 0 and counter.range_joules is not None:
                gained += counter.range_joules
            if gained < 0:
                self._failure = "the counter went back"
            self._joules += gained
        self._last = now


def energy_meter(gpu_uuid: str | None, local_rank: int, host: str) -> EnergyMeter:
    """The meter for one rank.

    Args:
        gpu_uuid: of the GPU it computes on; None: it computes on the host.
        local_rank: on a host, RAPL is read by local rank 0 alone.
        host: what names this machine among all of a run.
    """
    try:
        if gpu_uuid is not None:
            return _gpu_meter(gpu_uuid)
        if local_rank != 0:
            return NoEnergyMeter(BY_LOCAL_RANK_0)
        if not any(folder.is_dir() for folder in RAPL_FOLDERS):
            return NoEnergyMeter(f"no RAPL on this host: {RAPL_FOLDERS[0]} is missing")
        return _rapl_meter(host)
    except ModuleNotFoundError as error:
        return NoEnergyMeter(NOT_INSTALLED if error.name == "zeus" else f"zeus cannot be used: {_reason(error)}")
    except Exception as error:  # zeus raises in many ways where hardware is missing, and wraps only some of them
        return NoEnergyMeter(_reason(error))


def _gpu_meter(uuid: str) -> EnergyMeter:
    _import_quietly()
    import pynvml
    from zeus.device.gpu.nvidia import NVIDIAGPU

    # Not through zeus.device.get_gpus: that reads CUDA_VISIBLE_DEVICES as a list of numbers, and it may name UUIDs.
    pynvml.nvmlInit()
    gpu = NVIDIAGPU(pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID(uuid)))
    if not gpu.supports_get_total_energy_consumption():
        return NoEnergyMeter("this GPU does not count its energy: Volta and later do")
    return CounterMeter([_counter(gpu.get_total_energy_consumption)], "NVML: the GPU, whoever uses it", (uuid,))


def _rapl_meter(host: str) -> EnergyMeter:
    _import_quietly()
    from zeus.device.cpu.rapl import RAPLCPUs, ZeusdRAPLCPU

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cpus = RAPLCPUs()
    counters: list[Counter] = []
    packages: list[str] = []
    with_memory = False
    for cpu in cpus.cpus:
        name = (Path(cpus.rapl_dir) / f"intel-rapl:{cpu.cpu_index}" / "name").read_text(encoding="utf-8").strip()
        if not name.startswith("package"):
            continue  # "psys" is the whole machine: it holds the packages once more
        packages.append(name)
        if isinstance(cpu, ZeusdRAPLCPU):  # its daemon keeps up with counters that begin again
            counters.append(_counter(partial(_package_and_memory_mj, cpu)))
            with_memory |= cpu.supports_get_dram_energy_consumption()
            continue
        for file in (cpu.rapl_file, cpu.dram):
            if file is not None:
                # Else zeus starts a process for each counter that watches it, and lives on where a rank is killed.
                file._wraparound_tracker = _NoTracker()
                counters.append(_counter(file.read, file.max_energy_range_uj / 1e6))
        with_memory |= cpu.dram is not None
    if not counters:
        return NoEnergyMeter(f"no RAPL on this host: {cpus.rapl_dir} holds no processor package")
    source = f"RAPL: {', '.join(packages)}{' and memory' if with_memory else ''}, whoever uses them"
    return CounterMeter(counters, source, tuple(f"{host}/{name}" for name in packages))


class _NoTracker:
    """Stands in for zeus's RaplWraparoundTracker."""

    def get_num_wraparounds(self) -> int:
        return 0


def _counter(read_millijoules: Callable[[], float], range_joules: float | None = None) -> Counter:
    return Counter(lambda: read_millijoules() / 1000, range_joules)


def _package_and_memory_mj(cpu: Any) -> float:
    energy = cpu.get_total_energy_consumption()
    return float(energy.cpu_mj + (energy.dram_mj or 0.0))


def _import_quietly() -> None:
    """Imports zeus's devices: a tenth of a second. Its monitors take a second, for pandas, and are not needed."""
    logging.getLogger("zeus").setLevel(logging.CRITICAL)
    import zeus.device  # noqa: F401


def _reason(error: Exception) -> str:
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
