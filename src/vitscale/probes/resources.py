"""Measures what one rank uses: its memory, and over a stretch of timed steps its processor time, GPU and energy.

Energy is that of a rank's GPU, as its vendor counts it, or of its host's processors (RAPL, by the zeus library).

No counter is read between timed steps; a thread of its own reads the GPU once a second.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from vitscale.base.resident_memory import resident_memory
from vitscale.machine.gpus import (
    EnergyUnknown,
    GpusUnreadable,
    energy_counter,
    gpu_with_uuid,
    library_of,
    vendor_of_torch,
    visible_gpus,
)
from vitscale.machine.hardware import cpu_throttled_seconds
from vitscale.probes.gpu_monitor import SECONDS_BETWEEN_SAMPLES, GpuMonitor, gpu_monitor
from vitscale.processes.launch_file import boot_id
from vitscale.store.records import EnergyReading, GpuSamples, ResourcesLine

NOT_INSTALLED = "the zeus library is not here: it comes with vitscale's extra energy"
_GPU_UNKNOWN = "no library of its vendor knows this GPU"
BY_LOCAL_RANK_0 = "measured by local rank 0"
RAPL_FOLDERS = (Path("/sys/class/powercap/intel-rapl"), Path("/zeus_sys/class/powercap/intel-rapl"))
"""Folders in which zeus looks; the second is where it is mounted in containers."""
_SECONDS_BETWEEN_READINGS = 20.0
"""Some processors' RAPL counters wrap around at 65 kJ, which takes 65 seconds at 1 kW."""


class EnergyMeter:
    """Measures energy from `begin` to `end`, any number of times.

    This class measures nothing: it stands in where nothing can be measured, or where another rank measures.
    """

    def __init__(self, reason: str) -> None:
        """`reason`: why nothing is measured, for the record."""
        self._reason = reason

    def begin(self) -> None:
        """Begins to measure."""

    def end(self) -> EnergyReading:
        """Returns the energy used since `begin`, or why it is unknown."""
        return EnergyReading(joules=None, source=None, reason=self._reason)

    def close(self) -> None:
        """Stops measuring."""


@dataclass(frozen=True)
class Counter:
    """A counter of energy that only rises, except that it wraps around at `range_joules`."""

    read_joules: Callable[[], float]
    range_joules: float | None = None


class CounterMeter(EnergyMeter):
    """Measures energy by counters, and reports their sum.

    A counter that wraps around is read so often that it does not do so twice between two readings.
    """

    def __init__(
        self,
        counters: Sequence[Counter],
        source: str,
        devices: tuple[str, ...],
        seconds_between_readings: float = _SECONDS_BETWEEN_READINGS,
    ) -> None:
        """Starts a thread of its own if a counter wraps around.

        Args:
            counters: the counters.
            source: names them, for the record.
            devices: the devices that they count, so that no device is counted twice.
            seconds_between_readings: time from one reading to the next.
        """
        self._counters = counters
        self._source = source
        self._devices = devices
        self._seconds = seconds_between_readings
        self._lock = threading.Lock()
        """Guards the three that follow."""
        self._last_joules: list[float] = []
        """Latest reading of each counter; empty while nothing is measured."""
        self._joules = 0.0
        """Energy used since `begin`, up to the latest reading."""
        self._failure: str | None = None
        """Why that energy is wrong; None where it is right."""
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if any(counter.range_joules is not None for counter in counters):
            self._thread = threading.Thread(target=self._read_now_and_then, name="energy", daemon=True)
            self._thread.start()

    @override
    def begin(self) -> None:
        with self._lock:
            self._last_joules = []
            self._joules = 0.0
            self._failure = None
            self._add_gained_joules()

    @override
    def end(self) -> EnergyReading:
        with self._lock:
            self._add_gained_joules()
            joules = self._joules
            failure = self._failure
            self._last_joules = []
        if failure is None and joules == 0:
            failure = "the counter of energy did not move: it is updated every 20 to 100 ms"
        right_joules = joules if failure is None else None
        return EnergyReading(joules=right_joules, source=self._source, reason=failure, devices=self._devices)

    @override
    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _read_now_and_then(self) -> None:
        """Reads the counters from time to time, until `close`."""
        while not self._closed.wait(self._seconds):
            with self._lock:
                if self._last_joules:
                    self._add_gained_joules()

    def _add_gained_joules(self) -> None:
        """Reads all counters and adds what they gained since the last reading."""
        try:
            readings = [counter.read_joules() for counter in self._counters]
        except Exception as error:  # zeus lets through whatever its libraries raise
            self._failure = _in_one_line(error)
            return
        last_readings = self._last_joules or readings  # at `begin` there is none before
        for counter, before, after in zip(self._counters, last_readings, readings, strict=True):
            gained = after - before
            if gained < 0 and counter.range_joules is not None:  # it has wrapped around
                gained += counter.range_joules
            if gained < 0:
                self._failure = "the counter went back"
            self._joules += gained
        self._last_joules = readings


def energy_meter(gpu_uuid: str | None, local_rank: int, host: str) -> EnergyMeter:
    """Returns the energy meter of one rank.

    Args:
        gpu_uuid: UUID of the GPU that it computes on; None: it computes on the host.
        local_rank: on a host, RAPL is read by local rank 0 alone.
        host: name of this machine, another one for each machine of a run.
    """
    try:
        if gpu_uuid is not None:
            return _gpu_meter(gpu_uuid)
        if local_rank != 0:
            return EnergyMeter(reason=BY_LOCAL_RANK_0)
        if not any(folder.is_dir() for folder in RAPL_FOLDERS):
            return EnergyMeter(reason=f"no RAPL on this host: {RAPL_FOLDERS[0]} is missing")
        return _rapl_meter(host)
    except ModuleNotFoundError as error:
        is_zeus_missing = error.name == "zeus"  # else a library that zeus needs
        return EnergyMeter(reason=NOT_INSTALLED if is_zeus_missing else f"zeus cannot be used: {_in_one_line(error)}")
    except Exception as error:  # zeus raises many errors where hardware is missing, and wraps only some
        return EnergyMeter(reason=_in_one_line(error))


def _gpu_meter(uuid: str) -> EnergyMeter:
    """Returns the meter of a GPU. Raises whatever its vendor's library raises."""
    try:
        counter = energy_counter(uuid)
    except EnergyUnknown as error:
        return EnergyMeter(reason=str(error))
    return CounterMeter([_millijoule_counter(counter.read_millijoules)], counter.source, counter.devices)


def _rapl_meter(host: str) -> EnergyMeter:
    """Returns the meter of a host's processors and, where they count it, their memory. Raises whatever zeus raises."""
    _import_quietly()
    from zeus.device.cpu.rapl import RAPLCPUs, ZeusdRAPLCPU

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cpus = RAPLCPUs()
    counters: list[Counter] = []
    packages: list[str] = []
    counts_memory = False
    for cpu in cpus.cpus:
        name = (Path(cpus.rapl_dir) / f"intel-rapl:{cpu.cpu_index}" / "name").read_text(encoding="utf-8").strip()
        if not name.startswith("package"):
            continue  # "psys" is the whole machine, which includes the packages
        packages.append(name)
        if isinstance(cpu, ZeusdRAPLCPU):  # its daemon takes care of wrapping around
            counters.append(_millijoule_counter(partial(_package_and_memory_mj, cpu)))
            counts_memory |= cpu.supports_get_dram_energy_consumption()
        else:
            files = [file for file in (cpu.rapl_file, cpu.dram) if file is not None]
            counters += [_rapl_counter(file) for file in files]
            counts_memory |= cpu.dram is not None
    if not counters:
        return EnergyMeter(reason=f"no RAPL on this host: {cpus.rapl_dir} holds no processor package")
    memory = " and memory" if counts_memory else ""
    source = f"RAPL: {', '.join(packages)}{memory}, whoever uses them"
    return CounterMeter(counters, source, tuple(f"{host}/{name}" for name in packages))


def _rapl_counter(file: Any) -> Counter:
    """Returns the counter of one of zeus's RAPL files, without the process that zeus would start to watch it.

    That process would live on where a rank is killed.
    """
    file._wraparound_tracker = _NoTracker()
    return _millijoule_counter(file.read, file.max_energy_range_uj / 1e6)


class _NoTracker:
    """Replaces zeus's RaplWraparoundTracker: `CounterMeter` takes care of wrapping around."""

    def get_num_wraparounds(self) -> int:
        return 0


def _millijoule_counter(read_millijoules: Callable[[], float], range_joules: float | None = None) -> Counter:
    """Returns a counter of what `read_millijoules` reads; `range_joules`: where it wraps around."""
    return Counter(lambda: read_millijoules() / 1000, range_joules)


def _package_and_memory_mj(cpu: Any) -> float:
    """Returns the millijoules that a processor and, where they are counted, its memory have used so far."""
    energy = cpu.get_total_energy_consumption()
    return float(energy.cpu_mj + (energy.dram_mj or 0.0))


def _import_quietly() -> None:
    """Imports zeus's devices, without its log.

    That takes a tenth of a second. Its monitors, which load pandas for a second, are not needed.
    """
    logging.getLogger("zeus").setLevel(logging.CRITICAL)
    import zeus.device  # noqa: F401 - it stays loaded


def _in_one_line(error: Exception) -> str:
    """Returns the type of an error and its message, without line breaks."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def gpu_uuid(device: torch.device) -> str | None:
    """Returns the name that a vendor's library has for a GPU, or for a slice of one (MIG); None for a host.

    None too where the library has no name for it: AMD's torch may not know the UUID of a GPU.
    """
    if device.type != "cuda":
        return None
    vendor = vendor_of_torch(torch.version.hip)
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    names = vendor.uuids_of(str(uuid)) if uuid is not None else ()
    for name in names:
        if gpu_with_uuid(name):
            return name
    return names[0] if names else _uuid_by_number(device)


def device_monitor(device: torch.device, seconds_between_samples: float = SECONDS_BETWEEN_SAMPLES) -> GpuMonitor:
    """Returns the monitor of a rank's device."""
    uuid = gpu_uuid(device)
    if device.type == "cuda" and uuid is None:
        return GpuMonitor(reason=_GPU_UNKNOWN)
    return gpu_monitor(uuid, seconds_between_samples)


def _uuid_by_number(device: torch.device) -> str | None:
    """Returns the UUID of the visible GPU with torch's number; None where they are not counted alike."""
    try:
        gpus = visible_gpus()
    except GpusUnreadable:
        return None
    number = device.index if device.index is not None else torch.cuda.current_device()
    return gpus[number].uuid if len(gpus) == torch.cuda.device_count() else None


class ResourceProbe:
    """Measures one rank's use of its machine: over stretches of steps, and its memory over epochs.

    A stretch goes from `begin` (and `start_clocks`, if ranks have met since) to `end`. Stretches do not overlap.
    """

    def __init__(self, device: torch.device, local_rank: int) -> None:
        """Starts the threads that watch the machine, where there is something to watch."""
        self._device = device if device.type == "cuda" else None
        """The GPU; None where the rank computes on the host."""
        uuid = gpu_uuid(device)
        self._library = library_of(uuid) if uuid is not None else None
        """Name of the library that reads the GPU; None where there is none to read."""
        self._gpu = device_monitor(device)
        # Containers on one machine have their own hostnames, but share its counters of energy.
        if self._device is not None and uuid is None:
            self._energy = EnergyMeter(reason=_GPU_UNKNOWN)
        else:
            self._energy = energy_meter(uuid, local_rank, boot_id() or socket.gethostname())
        # At the beginning of the stretch.
        self._began = 0.0
        self._cpu_began = 0.0
        self._throttled_before: float | None = None
        """Seconds for which the CPU controller had held this rank back by then; None without a quota."""

        self._cuda_peak_bytes = 0
        """Highest device memory in all epochs before this one."""

    def begin_epoch(self) -> None:
        """Resets the memory peaks before an epoch's first step, on an idle device."""
        if self._device is not None:
            self._cuda_peak_bytes = self.cuda_peak_bytes()
            torch.cuda.reset_peak_memory_stats(self._device)

    def begin(self) -> None:
        """Asks all counters before the first step of a stretch. A driver may take milliseconds, differently by rank."""
        self._gpu.begin()
        self._energy.begin()
        self.start_clocks()

    def start_clocks(self) -> None:
        """Begins the stretch's time here, after ranks have waited for each other since `begin`."""
        self._throttled_before = cpu_throttled_seconds()
        self._cpu_began = time.process_time()
        self._began = time.perf_counter()

    def end(self, epoch: int, steps: range) -> ResourcesLine:
        """Ends the stretch after its last step. Memory is added at the epoch's end: see `with_memory`.

        Args:
            epoch: its number.
            steps: steps of the stretch.
        """
        seconds = time.perf_counter() - self._began
        cpu_seconds = time.process_time() - self._cpu_began
        counted = self._energy.end()
        gpu = self._gpu.end()
        energy = checked_energy(counted, gpu, seconds)
        gpu_reason = None if gpu is not None else self._gpu.reason or f"{self._library} tells nothing of this GPU"
        return ResourcesLine(
            epoch=epoch,
            steps=(steps.start, steps.stop - 1) if steps else None,  # none where drop_last leaves no steps
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            cpu_throttled_seconds=_difference(cpu_throttled_seconds(), self._throttled_before),
            rss_bytes=None,
            peak_rss_bytes=None,
            gpu=gpu,
            gpu_reason=gpu_reason,
            energy=energy,
        )

    def with_memory(self, line: ResourcesLine) -> ResourcesLine:
        """Returns `line` with the memory of its epoch, which is over."""
        resident = resident_memory()
        memory = {"rss_bytes": resident.now_bytes, "peak_rss_bytes": resident.peak_bytes}
        if self._device is not None:
            free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
            memory |= {
                "cuda_allocated_bytes": torch.cuda.max_memory_allocated(self._device),
                "cuda_reserved_bytes": torch.cuda.max_memory_reserved(self._device),
                "cuda_device_bytes": total_bytes - free_bytes,
            }
        return line.model_copy(update=memory)

    def cuda_peak_bytes(self) -> int:
        """Returns the highest device memory allocated since the process began; 0 without a GPU."""
        if self._device is None:
            return 0
        return max(self._cuda_peak_bytes, torch.cuda.max_memory_allocated(self._device))

    def peak_bytes(self, line: ResourcesLine) -> int | None:
        """Returns the highest device memory on a GPU; on a host the highest resident memory, from `line`."""
        return line.peak_rss_bytes if self._device is None else self.cuda_peak_bytes()

    def close(self) -> None:
        """Ends the watching threads."""
        self._gpu.close()
        self._energy.close()


_FEWEST_SAMPLES = 5
"""Fewest samples of a GPU's power by which its counter of energy is checked."""
_LARGEST_FACTOR = 2.0
"""How far the two may lie apart: one is a mean of samples, and the other counts."""


def checked_energy(energy: EnergyReading, gpu: GpuSamples | None, seconds: float) -> EnergyReading:
    """Returns a reading of energy, without joules where the GPU's power shows that its counter is wrong.

    Some of AMD's GPUs count ten times too much or too little (ROCm/amdsmi issue 38).

    Args:
        energy: what the counter gained.
        gpu: samples of the same GPU in the same time.
        seconds: that time.
    """
    if gpu is None or energy.joules is None or gpu.power_watts_mean is None or gpu.samples < _FEWEST_SAMPLES:
        return energy
    expected_joules = gpu.power_watts_mean * seconds
    if expected_joules / _LARGEST_FACTOR <= energy.joules <= expected_joules * _LARGEST_FACTOR:
        return energy
    reason = f"the counter gained {energy.joules:.3g} J where the GPU's power makes {expected_joules:.3g} J"
    return energy.model_copy(update={"joules": None, "reason": reason})


def _difference(after: float | None, before: float | None) -> float | None:
    """Returns `after` - `before`, 0 at least; None where one of them is unknown."""
    if after is None or before is None:
        return None
    return max(0.0, after - before)
