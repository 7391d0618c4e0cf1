"""The matrix-multiply rate: of a simulated device of known rate, and of this one."""

from __future__ import annotations

import time

import pytest
import torch

from vitscale.probes.matmul import arithmetic, best_rate, measured_matmul
from vitscale.trial.trial import Precision

LARGEST = 4096


class Simulated:
    """A device of `rate` FLOP/s that takes `overhead` seconds to start a product, with its own clock."""

    def __init__(self, rate: float, overhead: float = 0.0, memory: int = LARGEST, first_seconds: float = 0.0) -> None:
        self.rate, self.overhead, self.memory, self.first_seconds = rate, overhead, memory, first_seconds
        self.now = 0.0
        self.sizes: list[int] = []

    def __call__(self, size: int) -> float:
        if size > self.memory:
            raise torch.OutOfMemoryError("CUDA out of memory")
        seconds = self.overhead + 2 * size**3 / self.rate
        if size not in self.sizes:
            seconds += self.first_seconds
        self.sizes.append(size)
        self.now += seconds
        return seconds

    def best(self, long_enough_seconds: float = 5e-3) -> tuple[int, float] | None:
        return best_rate(self, LARGEST, long_enough_seconds, clock=lambda: self.now)


@pytest.mark.parametrize("rate", [1e9, 1e11, 1e12, 5e13, 1e15])
def test_the_rate_of_a_device_is_found(rate: float) -> None:
    device = Simulated(rate)
    found = device.best()
    assert found is not None
    assert found[1] == pytest.approx(rate)


def test_the_size_is_large_enough_for_starting_a_product_not_to_count() -> None:
    """At 100 GFLOP/s a product of 512 rows takes 2.7 ms, one of 1,024 rows 21 ms; 50 us to start are 0.2 % of that."""
    found = Simulated(1e11, overhead=50e-6).best()
    assert found is not None
    size, rate = found
    assert size == 1024
    assert rate == pytest.approx(1e11, rel=0.005)


def test_a_fast_device_gets_the_largest_size_and_no_larger_one() -> None:
    device = Simulated(1e15)
    found = device.best()
    assert found is not None
    assert found[0] == max(device.sizes) == LARGEST


def test_it_takes_a_fifth_of_a_second_or_three_products() -> None:
    fast = Simulated(1e12)
    fast.best()
    assert 0.2 <= fast.now < 0.2 + 2 * 2 * 2048**3 / 1e12
    slow = Simulated(1e7)  # 3.4 s a product
    slow.best()
    assert slow.sizes == [256] * 6


def test_the_first_product_of_a_size_counts_for_nothing() -> None:
    plain, slow_at_first = Simulated(1e11), Simulated(1e11, first_seconds=0.1)
    assert plain.best() == slow_at_first.best()


def test_one_product_that_was_disturbed_does_not_end_the_search() -> None:
    device = Simulated(1e11)

    def disturbed(size: int) -> float:
        return device(size) + (0.02 if len(device.sizes) == 2 else 0.0)

    found = best_rate(disturbed, LARGEST, 5e-3, clock=lambda: device.now)
    assert found is not None
    assert found[0] == 1024


def test_memory_that_is_nearly_full_takes_the_largest_size_that_fits() -> None:
    found = Simulated(1e15, memory=1500).best()
    assert found is not None
    assert found[0] == 1024


def test_memory_that_is_full_leaves_the_rate_unknown() -> None:
    assert Simulated(1e12, memory=0).best() is None


def test_this_cpu_against_a_timing_of_its_own() -> None:
    """Others use these cores too: of several measurements, each with products beside it, one is undisturbed."""
    rates = []
    for _ in range(8):
        line = measured_matmul(torch.device("cpu"), "fp32")
        assert line is not None
        assert line.dtype == "fp32"
        matrix = torch.randn(line.size, line.size)
        best = 0.0
        for _ in range(20):
            began = time.perf_counter()
            matrix @ matrix
            best = max(best, 2 * line.size**3 / (time.perf_counter() - began))
        rates.append(line.flops_per_second / best)
        if rates[-1] == pytest.approx(1.0, rel=0.35):
            return
    pytest.fail(f"measured, as a share of what products took: {rates}")


@pytest.mark.parametrize("precision", ["bf16", "bf16-params", "fp16"])
def test_half_precision_is_measured_in_its_own_arithmetic(precision: Precision) -> None:
    line = measured_matmul(torch.device("cpu"), precision)
    assert line is not None
    assert line.dtype == precision.removesuffix("-params")


def test_the_rate_is_that_of_settled_clocks() -> None:
    """A device that is a quarter faster for its first second."""

    class Boosting(Simulated):
        def __call__(self, size: int) -> float:
            rate, self.rate = self.rate, self.rate * (1.25 if self.now < 1.0 else 1.0)
            seconds = super().__call__(size)
            self.rate = rate
            return seconds

    def rate(settling_seconds: float) -> float:
        device = Boosting(1e13)
        found = best_rate(device, LARGEST, 5e-3, settling_seconds=settling_seconds, clock=lambda: device.now)
        assert found is not None
        return found[1]

    assert rate(0.0) == pytest.approx(1.25e13)
    assert rate(1.5) == pytest.approx(1e13)


@pytest.mark.parametrize(("override", "called"), [("0", "fp32"), ("1", "tf32"), ("", "tf32")])
def test_nvidia_s_override_decides_before_torch(override: str, called: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", override)
    torch.set_float32_matmul_precision("high")
    try:
        assert arithmetic(torch.device("cuda"), "fp32") == called
    finally:
        torch.set_float32_matmul_precision("highest")
    assert arithmetic(torch.device("cuda"), "fp32") == ("tf32" if override == "1" else "fp32")


def test_tf32_is_called_by_its_name() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert arithmetic(cuda, "fp32") == "fp32"
    torch.set_float32_matmul_precision("high")
    try:
        assert (arithmetic(cuda, "fp32"), arithmetic(cpu, "fp32"), arithmetic(cuda, "bf16")) == ("tf32", "fp32", "bf16")
    finally:
        torch.set_float32_matmul_precision("highest")
