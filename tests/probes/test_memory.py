"""The count of tensors' memory on a CPU, against memory that the test itself takes."""

from __future__ import annotations

import threading

import pytest
import torch
from tensor_memory import CpuTensorMemory, tensor_memory

MIB = 2**20


def of(mebibytes: int) -> torch.Tensor:
    return torch.empty(mebibytes * MIB, dtype=torch.uint8)


@pytest.fixture
def memory() -> CpuTensorMemory:
    return CpuTensorMemory()


def test_it_is_the_meter_of_a_cpu() -> None:
    assert isinstance(tensor_memory(torch.device("cpu")), CpuTensorMemory)


def test_what_is_taken_and_released_shows_at_its_highest(memory: CpuTensorMemory) -> None:
    with memory.watch():
        kept = of(3)
        passing = of(5)
        del passing
        later = of(1)
    assert memory.peak_bytes == 8 * MIB
    del kept, later


def test_what_was_there_before_is_not_counted_and_what_came_between_is() -> None:
    before = of(4)
    memory = CpuTensorMemory()
    between = of(2)
    with memory.watch():
        inside = of(1)
    assert memory.peak_bytes == 3 * MIB
    del before, between, inside


def test_nothing_taken_is_what_is_there(memory: CpuTensorMemory) -> None:
    kept = of(2)
    with memory.watch():
        pass
    assert memory.peak_bytes == 2 * MIB
    del kept


def test_what_is_there_at_first_counts_though_it_goes_at_once(memory: CpuTensorMemory) -> None:
    kept = [of(6)]
    with memory.watch():
        kept.clear()
        small = of(1)
    assert memory.peak_bytes == 6 * MIB
    del small


def test_other_threads_count(memory: CpuTensorMemory) -> None:
    kept = [of(1)]

    def work() -> None:
        kept.clear()
        kept.append(of(7))

    for _ in range(3):
        with memory.watch():
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            last = of(2)
        # Were releases in other threads lost, this would grow from turn to turn.
        assert memory.peak_bytes == 9 * MIB
        del last


def test_gradients_and_activations_by_hand(memory: CpuTensorMemory) -> None:
    weight = torch.zeros(MIB // 4, 1, requires_grad=True)  # 1 MiB
    with memory.watch():
        # exp keeps its result for backward (1 MiB), sum a scalar; backward makes the gradient of exp's result, which
        # is expanded and takes nothing, and that of the weight (1 MiB).
        weight.exp().sum().backward()
    assert 3 * MIB <= memory.peak_bytes <= 3 * MIB + 4096
