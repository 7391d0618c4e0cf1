"""Batches come in order and complete, with and without threads; errors arrive whole; nothing is left behind."""

from __future__ import annotations

import threading
import traceback
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from vitscale.datasets.batches import Batches, EpochOrder


class NumberedSplit:
    """Image i is 2 x 2 pixels of i % 256, of class 2 * i; remembers what was taken and can fail or wait."""

    def __init__(self, samples: int) -> None:
        self.labels: NDArray[np.int64] = np.arange(samples, dtype=np.int64) * 2
        self.labels.flags.writeable = False  # as a memory map is
        self.taken = 0
        self.bad_id: int | None = None
        self.gate = threading.Event()
        self.gate.set()

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        self.gate.wait(30)
        self.taken += 1
        if self.bad_id in ids:
            raise OSError(f"image {self.bad_id} cannot be read")
        return np.broadcast_to(ids[:, None, None, None] % 256, (len(ids), 2, 2, 3)).astype(np.uint8)


def order_of(samples: int = 50, **sizes: Any) -> EpochOrder:
    shape: dict[str, Any] = {"micro_batches": [3, 3], "grad_accum": 2} | sizes
    return EpochOrder(samples, seed=1, epoch=0, **shape)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_the_rate_of_reading_leaves_out_every_wait(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that each read moves on by 0.5 s: 3 images in 0.5 s in each thread, however long they are waited for."""
    now = threading.local()

    def clock() -> float:
        now.seconds = getattr(now, "seconds", 0.0) + 0.5
        return float(now.seconds)

    monkeypatch.setattr("vitscale.datasets.batches.time.perf_counter", clock)
    with Batches(NumberedSplit(50), order_of(micro_batches=[3]), rank=0, workers=workers) as batches:
        assert workers or batches.images_per_second is None
        for _ in range(6):
            next(batches)
        assert batches.images_per_second == pytest.approx(3 * max(1, workers) / 0.5)


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("vitscale-batches")]


@settings(deadline=None, max_examples=40)
@given(
    samples=st.integers(1, 60),
    micro_batches=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    grad_accum=st.integers(1, 3),
    workers=st.integers(0, 3),
)
def test_every_slot_comes_once_and_in_order(
    samples: int, micro_batches: list[int], grad_accum: int, workers: int
) -> None:
    order = order_of(samples, micro_batches=micro_batches, grad_accum=grad_accum)
    for rank in range(len(micro_batches)):
        with Batches(NumberedSplit(samples), order, rank=rank, workers=workers) as batches:
            got = list(batches)
        expected = [order.slot(step, micro, rank) for step in range(order.steps) for micro in range(grad_accum)]
        assert len(got) == len(expected)
        for batch, slot in zip(got, expected, strict=True):
            assert np.array_equal(batch.ids.numpy(), slot.ids)
            assert np.array_equal(batch.labels.numpy(), slot.ids * 2)
            assert np.array_equal(batch.images.numpy()[:, 1, 0, 2], slot.ids)
            assert (batch.real, batch.step_real) == (slot.real, slot.step_real)
            assert batch.images.dtype == torch.uint8
            assert batch.images.shape == (len(slot.ids), 2, 2, 3)
        assert our_threads() == []


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_arrives_at_its_batch_with_the_place_it_came_from(workers: int) -> None:
    split, order = NumberedSplit(50), order_of()
    split.bad_id = int(order.slot(1, 1, 0).ids[0])
    with Batches(split, order, rank=0, workers=workers) as batches:
        for _ in range(3):
            next(batches)
        with pytest.raises(OSError, match=rf"image {split.bad_id} cannot be read") as caught:
            next(batches)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "take" in frames
    assert our_threads() == []


def test_without_workers_nothing_is_read_ahead_and_no_thread_starts() -> None:
    split = NumberedSplit(50)
    with Batches(split, order_of(), rank=0) as batches:
        assert split.taken == 0
        next(batches)
        assert split.taken == 1
        assert our_threads() == []


def test_threads_read_ahead_before_the_first_batch_is_asked_for_but_not_without_bound() -> None:
    split = NumberedSplit(5000)
    order = order_of(5000)
    batches = Batches(split, order, rank=0, workers=2)
    with batches:
        assert len(our_threads()) > 0
        next(batches)
        next(batches)
    # Closing waits for what was begun: after that the count is final. Two taken, at most 2 x 2 more begun.
    assert 2 <= split.taken <= 2 + 4
    assert order.steps * order.grad_accum > 100


@pytest.mark.parametrize("workers", [1, 3])
def test_leaving_early_leaves_no_thread(workers: int) -> None:
    split = NumberedSplit(5000)
    with pytest.raises(KeyboardInterrupt), Batches(split, order_of(5000), rank=1, workers=workers) as batches:  # noqa: PT012 - in the block it is raised
        next(batches)
        assert our_threads() != []
        raise KeyboardInterrupt
    assert our_threads() == []
    batches.close()
    assert list(batches) == []


def test_closing_while_a_thread_is_reading_waits_for_it() -> None:
    split = NumberedSplit(500)
    split.gate.clear()
    batches = Batches(split, order_of(500), rank=0, workers=1)
    batches.__enter__()
    opener = threading.Timer(0.05, split.gate.set)
    opener.start()
    batches.close()
    opener.join()
    assert our_threads() == []
    assert split.taken <= 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_are_pinned_when_asked(workers: int) -> None:
    with Batches(NumberedSplit(50), order_of(), rank=0, workers=workers, pin=True) as batches:
        batch = next(batches)
    assert all(tensor.is_pinned() for tensor in (batch.images, batch.labels, batch.ids))
