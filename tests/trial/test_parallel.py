"""Where ranks stand that share models and images."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trial.test_trial import trial
from vitscale.trial.parallel import ParallelSpec, RankLayout

COUNTS = st.integers(1, 4)


def test_a_layout_by_hand() -> None:
    """Eight ranks, two models of two tensor x two sequence ranks: neighbours are of a tensor group."""
    layout = RankLayout.of(8, ParallelSpec(tensor=2, sequence=2))
    assert layout == RankLayout(pipeline=1, data=2, sequence=2, tensor=2)
    assert layout.coordinates(5) == (0, 1, 0, 1)
    assert layout.exchanges_in_groups
    assert not RankLayout.of(4, ParallelSpec(tensor=4)).exchanges_in_groups  # a group is all ranks
    assert layout.groups("tensor") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.groups("sequence") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.groups("data", "sequence") == ((0, 2, 4, 6), (1, 3, 5, 7))


@given(pipeline=COUNTS, data=COUNTS, sequence=COUNTS, tensor=COUNTS)
def test_every_rank_stands_somewhere_of_its_own(pipeline: int, data: int, sequence: int, tensor: int) -> None:
    parallel = ParallelSpec(tensor=tensor, sequence=sequence, pipeline=pipeline)
    ranks = pipeline * data * sequence * tensor
    layout = RankLayout.of(ranks, parallel)
    assert (layout.data, layout.sizes) == (data, (pipeline, data, sequence, tensor))
    assert len({layout.coordinates(rank) for rank in range(ranks)}) == ranks
    for axis, size in zip(layout.coordinates(0)._fields, layout.sizes, strict=True):
        groups = layout.groups(axis)  # type: ignore[arg-type]
        assert {len(group) for group in groups} == {size}
        assert sorted(rank for group in groups for rank in group) == list(range(ranks))


def test_ranks_that_do_not_divide_are_none() -> None:
    with pytest.raises(ValueError, match="6 ranks are not a multiple of 4, which share one model"):
        RankLayout.of(6, ParallelSpec(tensor=2, sequence=2))


def test_a_global_batch_is_of_the_data_parallel_ranks() -> None:
    """Two ranks that share a model take together what one takes of its own."""
    whole = trial()
    shared = whole.model_copy(update={"parallel": ParallelSpec(tensor=2)})
    each = whole.train.micro_batch * whole.train.grad_accum
    assert (whole.world.size, whole.global_batch, shared.global_batch) == (8, 8 * each, 4 * each)
    assert shared.identity() != whole.identity()
    assert whole.model_copy(update={"parallel": ParallelSpec()}).identity() == whole.identity()
