"""What is held out: the right number, from every class, always the same."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vitscale.sources.base import held_out_count, split_ids


@given(st.lists(st.integers(0, 6), min_size=2, max_size=200), st.floats(0.01, 0.99))
def test_the_splits_are_whole_and_leave_every_class_an_image(labels: list[int], share: float) -> None:
    known = np.array(labels, dtype=np.int64)
    train, held_out = split_ids(known, share)
    assert sorted([*train, *held_out]) == list(range(len(labels)))
    assert (np.diff(train) > 0).all()
    assert (np.diff(held_out) > 0).all()
    assert set(known[train]) == set(labels)
    assert len(held_out) == held_out_count(len(labels), len(set(labels)), share)


@given(st.lists(st.integers(10, 60), min_size=2, max_size=6), st.floats(0.1, 0.5))
def test_every_class_gives_its_share(sizes: list[int], share: float) -> None:
    labels = np.repeat(np.arange(len(sizes)), sizes)
    _, held_out = split_ids(labels, share)
    for label, size in enumerate(sizes):
        assert abs((labels[held_out] == label).sum() - size * share) <= 1.5


def test_the_split_is_what_it_was_when_this_was_written() -> None:
    """Runs of different versions must evaluate on the same images."""
    _, held_out = split_ids(np.arange(20) % 2, 0.3)
    assert held_out.tolist() == [2, 7, 8, 9, 12, 19]


def test_it_is_shuffled() -> None:
    _, held_out = split_ids(np.zeros(1000, dtype=np.int64), 0.5)
    assert 400 < (held_out < 500).sum() * 2 < 600
    assert 100 < (np.diff(held_out) == 1).sum() < 400


def test_the_count_by_hand() -> None:
    assert held_out_count(1797, 10, 0.2) == 359
    assert held_out_count(100, 10, 0.001) == 1
    assert held_out_count(100, 10, 0.999) == 90
    assert held_out_count(10, 10, 0.5) == 0
