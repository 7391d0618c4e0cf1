"""The CUDA step clock against kernels of known relative length, and that it waits for nothing."""

from __future__ import annotations

import time

import pytest
import torch

from vitscale.probes.steps import CudaStepClock

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is False"),
]
CYCLES = 50_000_000


def test_times_what_the_device_does_not_what_the_host_does() -> None:
    """Steps of 1, 2 and 3 equal waits on the device are timed 1 : 2 : 3, though the host queues them in no time."""
    clock: CudaStepClock[int] = CudaStepClock()
    loss = torch.ones((), device="cuda")
    for _ in range(20):  # clocks have risen, kernels are loaded and memory is pinned before what is timed
        torch.cuda._sleep(CYCLES)
        clock.mark(0, loss * 2)
    clock.drain()
    clock.start()
    queued = time.perf_counter()
    early = []
    for waits in (1, 2, 3):
        for _ in range(waits):
            torch.cuda._sleep(CYCLES)
        early += clock.mark(waits, loss * waits)
    queued = time.perf_counter() - queued
    late = clock.drain()
    timed = {waits: (seconds, value) for waits, seconds, value in early + late}
    assert list(timed) == [1, 2, 3]
    assert [value for _, value in timed.values()] == [1.0, 2.0, 3.0]
    unit = timed[1][0]
    assert timed[2][0] == pytest.approx(2 * unit, rel=0.05)
    assert timed[3][0] == pytest.approx(3 * unit, rel=0.05)
    # `mark` returned before the device was done: it did not synchronise.
    assert queued < 3 * unit
