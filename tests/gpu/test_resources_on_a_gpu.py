"""The resource probe on a real GPU that is kept busy: NVML's figures, memory, energy and rates against each other."""

from __future__ import annotations

import importlib.util
import time

import pytest
import torch

from vitscale.analysis.runs.compute import peak
from vitscale.probes.matmul import arithmetic, measured_matmul
from vitscale.probes.resources import ResourceProbe
from vitscale.store.records import ResourcesLine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is False"),
]
SECONDS = 6.0
"""Long enough for several looks."""
SIZE = 4096


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda", 0)


@pytest.fixture(scope="module")
def busy_epoch(device: torch.device) -> ResourcesLine:
    """An epoch in which the GPU multiplies without a pause."""
    probe = ResourceProbe(device, local_rank=0)
    left = torch.randn(SIZE, SIZE, device=device, dtype=torch.float16)
    large = torch.empty(2**30, device=device, dtype=torch.uint8)
    del large
    peak_before = probe.cuda_peak_bytes()
    assert peak_before >= 2**30
    probe.begin_epoch()
    probe.begin()
    began = time.perf_counter()
    while time.perf_counter() - began < SECONDS:
        for _ in range(20):
            left @ left
        torch.cuda.synchronize(device)
    line = probe.with_memory(probe.end(0, range(1)))
    assert probe.cuda_peak_bytes() == peak_before, "the run's peak is more than the epoch's"
    probe.close()
    return line


def test_nvml_saw_a_busy_gpu(busy_epoch: ResourcesLine) -> None:
    gpu = busy_epoch.gpu
    assert gpu is not None, busy_epoch.gpu_reason
    assert gpu.samples >= SECONDS - 2
    assert gpu.utilisation is not None
    assert gpu.utilisation > 0.9
    assert gpu.sm_clock_mhz_min is not None
    assert gpu.sm_clock_mhz_median is not None
    assert 0 < gpu.sm_clock_mhz_min <= gpu.sm_clock_mhz_median < 5000
    assert gpu.temperature_celsius_max is not None
    assert 15 < gpu.temperature_celsius_max < 110
    assert gpu.throttled_share is not None
    assert bool(gpu.throttle_reasons) == (gpu.throttled_share > 0)


def test_memory_is_that_of_the_epoch(busy_epoch: ResourcesLine) -> None:
    """Two matrices in use, one more being made; not the gibibyte that was given back before."""
    matrix = SIZE * SIZE * 2
    assert busy_epoch.cuda_allocated_bytes is not None
    assert busy_epoch.cuda_reserved_bytes is not None
    assert busy_epoch.cuda_device_bytes is not None
    assert 2 * matrix <= busy_epoch.cuda_allocated_bytes < 2**30
    assert busy_epoch.cuda_allocated_bytes <= busy_epoch.cuda_reserved_bytes <= busy_epoch.cuda_device_bytes


@pytest.mark.skipif(importlib.util.find_spec("zeus") is None, reason="needs vitscale[energy]")
def test_energy_is_power_times_time(busy_epoch: ResourcesLine) -> None:
    assert busy_epoch.energy is not None
    assert busy_epoch.energy.joules is not None, busy_epoch.energy.reason
    assert busy_epoch.gpu is not None
    assert busy_epoch.gpu.power_watts_mean is not None
    watts = busy_epoch.energy.joules / busy_epoch.seconds
    assert watts == pytest.approx(busy_epoch.gpu.power_watts_mean, rel=0.3)


def test_the_measured_rate_is_below_the_published_peak(device: torch.device) -> None:
    line = measured_matmul(device, "bf16")
    assert line is not None
    name = torch.cuda.get_device_name(device)
    published = peak("cuda", name, arithmetic(device, "bf16"))
    if isinstance(published, str):
        pytest.skip(published)
    assert 0.4 < line.flops_per_second / published.flops_per_second < 1.05
