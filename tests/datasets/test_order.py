"""Who gets which image: every real one once, the same step on any number of ranks, padding with weight 0."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from vitscale.datasets.batches import EpochOrder, Slot
from vitscale.trial.trial import samples_used, steps_per_epoch

sizes = st.fixed_dictionaries(
    {
        "samples": st.integers(1, 120),
        "seed": st.integers(0, 2**31 - 1),
        "epoch": st.integers(0, 50),
        "micro_batches": st.lists(st.integers(1, 6), min_size=1, max_size=5),
        "grad_accum": st.integers(1, 4),
        "drop_last": st.booleans(),
        "fraction": st.sampled_from([1.0, 0.5, 0.3, 0.01]),
    }
)


def slots(order: EpochOrder, step: int) -> list[Slot]:
    """All slots of a step, in the order of their runs."""
    return [order.slot(step, micro, rank) for micro in range(order.grad_accum) for rank in range(order.world_size)]


def real_ids(order: EpochOrder, step: int) -> NDArray[np.int64]:
    return np.concatenate([slot.ids[: slot.real] for slot in slots(order, step)])


def epoch_ids(order: EpochOrder) -> list[int]:
    return [int(i) for step in range(order.steps) for i in real_ids(order, step)]


@given(sizes)
def test_every_image_counts_once_in_an_epoch(size: dict[str, Any]) -> None:
    order = EpochOrder(**size)
    used = samples_used(size["samples"], size["fraction"])
    at_once = sum(size["micro_batches"])
    assert order.steps == steps_per_epoch(used, 1, at_once, size["grad_accum"], size["drop_last"])
    ids = epoch_ids(order)
    assert len(ids) == len(set(ids))
    assert all(0 <= i < size["samples"] for i in ids)
    global_batch = at_once * size["grad_accum"]
    assert len(ids) == (used // global_batch * global_batch if size["drop_last"] else used)


@given(sizes)
def test_slots_shrink_alike_and_padding_is_never_counted(size: dict[str, Any]) -> None:
    order = EpochOrder(**size)
    sizes = size["micro_batches"] * size["grad_accum"]
    for step in range(order.steps):
        parts = slots(order, step)
        assert {s.step_real for s in parts} == {sum(s.real for s in parts)}
        # The share of a full slot that the step has of a full step, rounded up: at least one entry, so that all ranks
        # take part in each micro-step, and no more padding than rounding makes.
        assert [len(s.ids) for s in parts] == [math.ceil(Fraction(parts[0].step_real, sum(sizes)) * n) for n in sizes]
        assert sum(len(s.ids) for s in parts) - parts[0].step_real < len(parts)
        in_step = set(real_ids(order, step).tolist())
        for slot in parts:
            assert slot.ids.dtype == np.int64
            assert 0 <= slot.real <= len(slot.ids)
            assert set(slot.ids.tolist()) <= in_step


@given(sizes, st.integers(1, 12))
def test_the_same_global_batch_is_the_same_images_in_whatever_shares(size: dict[str, Any], ranks: int) -> None:
    order = EpochOrder(**size)
    global_batch = sum(size["micro_batches"]) * size["grad_accum"]
    alone = EpochOrder(**(size | {"micro_batches": [global_batch], "grad_accum": 1}))
    accumulated = EpochOrder(**(size | {"micro_batches": [1], "grad_accum": global_batch}))
    assert order.steps == alone.steps == accumulated.steps
    for step in range(order.steps):
        assert np.array_equal(real_ids(order, step), real_ids(alone, step))
        assert np.array_equal(real_ids(order, step), real_ids(accumulated, step))
    # And whatever the global batch, the epoch's order is one.
    wider = EpochOrder(**(size | {"micro_batches": [2] * ranks, "drop_last": False}))
    whole = EpochOrder(**(size | {"drop_last": False}))
    assert epoch_ids(wider) == epoch_ids(whole)


def whole_epoch(fraction: float, *, seed: int = 7, epoch: int = 0, samples: int = 1000) -> list[int]:
    order = EpochOrder(samples, seed=seed, epoch=epoch, micro_batches=[samples], grad_accum=1, fraction=fraction)
    return [int(i) for i in order.slot(0, 0, 0).ids]


def test_smaller_fractions_lie_within_larger_ones_and_stay_from_epoch_to_epoch() -> None:
    subsets = [set(whole_epoch(fraction)) for fraction in (0.1, 0.2, 0.7, 1.0)]
    assert [len(s) for s in subsets] == [100, 200, 700, 1000]
    assert all(small < large for small, large in itertools.pairwise(subsets))
    assert set(whole_epoch(0.1, epoch=9)) == subsets[0]
    assert set(whole_epoch(0.1, seed=8)) != subsets[0]


def test_epochs_and_seeds_differ_and_repeat() -> None:
    first = whole_epoch(1.0)
    assert first == whole_epoch(1.0)
    assert sorted(first) == list(range(1000))
    others = [whole_epoch(1.0, epoch=1), whole_epoch(1.0, seed=8), list(range(1000))]
    assert all(first != other for other in others)
    # As random as a permutation should be: about one image of 1000 stays in place.
    assert sum(i == place for place, i in enumerate(first)) < 10


def test_a_last_step_by_hand() -> None:
    order = EpochOrder(11, seed=0, epoch=0, micro_batches=[3, 3], grad_accum=1)
    ids = whole_epoch(1.0, seed=0, samples=11)
    full, last = slots(order, 0), slots(order, 1)
    assert [s.ids.tolist() for s in full] == [ids[:3], ids[3:6]]
    assert [(s.real, s.step_real) for s in full] == [(3, 6), (3, 6)]
    assert [s.ids.tolist() for s in last] == [ids[6:9], [*ids[9:11], ids[6]]]
    assert [(s.real, s.step_real) for s in last] == [(3, 5), (2, 5)]


def test_unequal_shares_by_hand() -> None:
    """17 images in steps of 2 x (4 + 2): 12, and 5, of which a rank's slots hold 5/12 of 4 and 2, rounded up."""
    order = EpochOrder(17, seed=0, epoch=0, micro_batches=[4, 2], grad_accum=2)
    ids = whole_epoch(1.0, seed=0, samples=17)
    full, last = slots(order, 0), slots(order, 1)
    assert [s.ids.tolist() for s in full] == [ids[:4], ids[4:6], ids[6:10], ids[10:12]]
    assert [(s.real, s.step_real) for s in full] == [(4, 12), (2, 12), (4, 12), (2, 12)]
    rest = ids[12:]
    assert [s.ids.tolist() for s in last] == [rest[:2], rest[2:3], rest[3:5], rest[:1]]
    assert [(s.real, s.step_real) for s in last] == [(2, 5), (1, 5), (2, 5), (0, 5)]


def test_drop_last_may_leave_nothing() -> None:
    order = EpochOrder(3, seed=0, epoch=0, micro_batches=[3, 1], grad_accum=1, drop_last=True)
    assert order.steps == 0


@pytest.mark.parametrize("place", [(2, 0, 0), (-1, 0, 0), (0, 2, 0), (0, 0, 2), (0, 0, -1)])
def test_a_slot_that_does_not_exist_is_a_bug(place: tuple[int, int, int]) -> None:
    order = EpochOrder(11, seed=0, epoch=0, micro_batches=[2, 2], grad_accum=2)
    with pytest.raises(IndexError):
        order.slot(*place)
