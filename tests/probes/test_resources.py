"""What a rank on a host uses: against what the test itself spends."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from vitscale.machine.gpus import GpuReading
from vitscale.probes import resources
from vitscale.probes.gpu_monitor import summary
from vitscale.probes.resources import ResourceProbe, checked_energy
from vitscale.store.records import EnergyReading

CPU = torch.device("cpu")


@pytest.fixture
def probe() -> ResourceProbe:
    return ResourceProbe(CPU, local_rank=1)


def spend(cpu_seconds: float) -> float:
    """Computes until this process has used `cpu_seconds` more; the seconds it really used."""
    began = time.process_time()
    while time.process_time() - began < cpu_seconds:
        sum(range(1000))
    return time.process_time() - began


def test_processor_time_is_that_of_the_stretch_alone(probe: ResourceProbe) -> None:
    spend(0.1)
    for spent in (0.2, 0.1):
        probe.begin()
        used = spend(spent)
        line = probe.end(3, range(7, 9))
        assert line.cpu_seconds == pytest.approx(used, rel=0.1)
        assert (line.epoch, line.steps) == (3, (7, 8))
        assert line.seconds > line.cpu_seconds - 0.001  # of one thread; the two clocks are read one after the other


def test_other_threads_of_the_process_count(probe: ResourceProbe) -> None:
    probe.begin()
    began = time.thread_time()
    other = threading.Thread(target=spend, args=(0.2,))
    other.start()
    other.join()
    assert time.thread_time() - began < 0.1
    assert probe.end(0, range(1)).cpu_seconds >= 0.2


def test_on_a_host_what_is_of_gpus_is_unknown_with_its_reason(probe: ResourceProbe) -> None:
    probe.begin()
    line = probe.end(0, range(1))
    assert (line.cuda_allocated_bytes, line.cuda_reserved_bytes, line.cuda_device_bytes) == (None, None, None)
    assert (line.gpu, line.gpu_reason) == (None, "the rank computes on the host")
    assert line.energy is not None
    assert (line.energy.joules, line.energy.reason) == (None, "measured by local rank 0")
    assert probe.cuda_peak_bytes() == 0


@pytest.mark.parametrize(
    ("before", "after", "seconds"), [(None, None, None), (1.0, 1.25, 0.25), (None, 3.0, None), (2.0, 1.0, 0.0)]
)
def test_throttled_time_is_that_of_the_stretch(
    probe: ResourceProbe,
    monkeypatch: pytest.MonkeyPatch,
    before: float | None,
    after: float | None,
    seconds: float | None,
) -> None:
    monkeypatch.setattr(resources, "cpu_throttled_seconds", lambda: before)
    probe.begin()
    monkeypatch.setattr(resources, "cpu_throttled_seconds", lambda: after)
    assert probe.end(0, range(1)).cpu_throttled_seconds == seconds


@pytest.mark.parametrize(
    ("joules", "watts", "samples", "is_believed"),
    [
        (3000.0, 300.0, 10, True),
        (1600.0, 300.0, 10, True),
        (300.0, 300.0, 10, False),  # a tenth of what the power makes
        (30_000.0, 300.0, 10, False),
        (300.0, 300.0, 4, True),  # too few samples to know better
        (300.0, None, 10, True),
    ],
)
def test_a_counter_of_energy_is_not_believed_against_the_power(
    joules: float, watts: float | None, samples: int, is_believed: bool
) -> None:
    counted = EnergyReading(joules=joules, source="AMD SMI: the GPU, whoever uses it", reason=None, devices=("GPU-1",))
    gpu = summary([GpuReading(0.9, 1700, 60, watts, (), False)] * samples)
    reading = checked_energy(counted, gpu, seconds=10.0)
    assert reading.joules == (joules if is_believed else None)
    assert (reading.reason is None) == is_believed
    assert reading.devices == counted.devices
