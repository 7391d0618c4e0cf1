"""What one rank uses in each epoch's longest stretch of timed steps: processor time, its GPU, energy; and its memory.

Nothing is asked inside a timed step.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from vitscale.machine.hardware import cpu_throttled_seconds
from vitscale.probes.energy import energy_meter
from vitscale.probes.gpu_monitor import gpu_monitor
from vitscale.store.records import ResourcesLine


class ResourceProbe:
    """One rank's use of its machine, epoch by epoch."""

    def __init__(self, device: torch.device, local_rank: int, host: str) -> None:
        """`host`: what names this machine among all of a run, the same in all its containers."""
        self._device = device if device.type == "cuda" else None
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}" if self._device else None
        self._gpu = gpu_monitor(uuid)
        self._energy = energy_meter(uuid, local_rank, host)
        self._began = self._cpu_began = 0.0
        self._throttled_seconds: float | None = None
        self._cuda_peak_bytes = 0

    def begin_epoch(self) -> None:
        """Before an epoch's first step, on a device that has nothing to do."""
        if self._device is not None:
            self._cuda_peak_bytes = self.cuda_peak_bytes()
            torch.cuda.reset_peak_memory_stats(self._device)

    def begin(self) -> None:
        """Asks all counters before the first step of a stretch. A driver may take milliseconds, each rank its own."""
        self._gpu.begin()
        self._energy.begin()
        self.start_clocks()

    def start_clocks(self) -> None:
        """Begins the stretch's time here, after what the ranks have waited for each other since `begin`."""
        self._throttled_seconds = cpu_throttled_seconds()
        self._cpu_began = time.process_time()
        self._began = time.perf_counter()

    def end(self, epoch: int, steps: range) -> ResourcesLine:
        """After the stretch's last step; memory is as yet that of the epoch until now: see `with_memory`.

        Args:
            epoch: its number.
            steps: of the stretch.
        """
        seconds, cpu_seconds = time.perf_counter() - self._began, time.process_time() - self._cpu_began
        energy = self._energy.end()
        gpu = self._gpu.end()
        return ResourcesLine(
            epoch=epoch,
            steps=(steps.start, steps.stop - 1) if steps else None,  # none where drop_last leaves nothing
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            cpu_throttled_seconds=_difference(cpu_throttled_seconds(), self._throttled_seconds),
            rss_bytes=None,
            peak_rss_bytes=None,
            gpu=gpu,
            gpu_reason=None if gpu is not None else self._gpu.reason or "NVML tells nothing of this GPU",
            energy=energy,
        )

    def with_memory(self, line: ResourcesLine) -> ResourcesLine:
        """The line of an epoch that is over, with the memory it took."""
        resident, peak_resident = resident_bytes()
        allocated, reserved, in_use = self._cuda_bytes()
        return line.model_copy(
            update={
                "rss_bytes": resident,
                "peak_rss_bytes": peak_resident,
                "cuda_allocated_bytes": allocated,
                "cuda_reserved_bytes": reserved,
                "cuda_device_bytes": in_use,
            }
        )

    def cuda_peak_bytes(self) -> int:
        """Device memory allocated at its highest since the process began; 0 where there is no GPU."""
        if self._device is None:
            return 0
        return max(self._cuda_peak_bytes, torch.cuda.max_memory_allocated(self._device))

    def close(self) -> None:
        """Ends the threads that watch."""
        self._gpu.close()
        self._energy.close()

    def _cuda_bytes(self) -> tuple[int | None, int | None, int | None]:
        """Allocated and reserved at their highest in this epoch, and in use on the device by whomever."""
        if self._device is None:
            return None, None, None
        free, whole = torch.cuda.mem_get_info(self._device)
        return (
            torch.cuda.max_memory_allocated(self._device),
            torch.cuda.max_memory_reserved(self._device),
            whole - free,
        )


def resident_bytes(status: Path = Path("/proc/self/status")) -> tuple[int | None, int | None]:
    """Resident memory of this process now and at its highest, or None where the kernel does not tell.

    From VmRSS and VmHWM. `getrusage` would give the highest of the launcher this process was forked from, if that was
    larger.
    """
    try:
        fields = dict(
            line.split(":", 1)
            for line in status.read_text(encoding="utf-8", errors="replace").splitlines()
            if ":" in line
        )
    except OSError:
        return None, None
    return _kibibytes(fields.get("VmRSS", "")), _kibibytes(fields.get("VmHWM", ""))


def _kibibytes(text: str) -> int | None:
    number, _, unit = text.strip().partition(" ")
    return int(number) * 1024 if unit == "kB" and number.isascii() and number.isdigit() else None


def _difference(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None else max(0.0, after - before)
