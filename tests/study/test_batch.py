from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitscale.errors import RequestError
from vitscale.study.resolve import batch_of, fraction_of, micro_batches_of
from vitscale.study.sections import ScalingSection, Study, TrainSection
from vitscale.trial.model_spec import ModelSpec
from vitscale.trial.trial import DataSpec, samples_used


def train(micro_batch: int | None = 8, **fields: Any) -> TrainSection:
    return TrainSection(micro_batch=micro_batch, **fields)


@pytest.mark.parametrize("mode", ["strong-micro", "weak"])
@pytest.mark.parametrize("ranks", [1, 3, 64])
def test_micro_batch_and_accumulation_stay(mode: Any, ranks: int) -> None:
    assert batch_of(mode, train(8, grad_accum=3), ranks, 1) == (8, 3)


@pytest.mark.parametrize(
    ("section", "ranks", "smallest", "expected"),
    [
        (train(32, grad_accum=4), 1, 1, (32, 4)),  # 128 images a step
        (train(32, grad_accum=4), 2, 1, (32, 2)),  # accumulation shrinks first
        (train(32, grad_accum=4), 4, 1, (32, 1)),
        (train(32, grad_accum=4), 8, 1, (16, 1)),  # then the micro-batch
        (train(32, grad_accum=4), 128, 1, (1, 1)),
        (train(32), 2, 2, (32, 1)),  # 64 images, set by the smallest world
        (train(32), 4, 2, (16, 1)),
        (train(64, global_batch=100), 1, 1, (50, 2)),  # 64 does not divide 100
        (train(64, global_batch=97), 1, 1, (1, 97)),  # a prime
        (train(64, global_batch=48), 1, 1, (48, 1)),  # less than a micro-batch
        (train(16, global_batch=32), 2, 2, (16, 1)),  # the published study
        (train(1_000_000, global_batch=1_000_000_000), 1, 1, (1_000_000, 1_000)),
    ],
)
def test_strong_global_by_hand(section: TrainSection, ranks: int, smallest: int, expected: tuple[int, int]) -> None:
    assert batch_of("strong-global", section, ranks, smallest) == expected


@given(st.integers(1, 200), st.integers(1, 5_000), st.integers(1, 64))
def test_strong_global_keeps_the_global_batch_within_the_micro_batch(limit: int, share: int, ranks: int) -> None:
    micro_batch, accumulation = batch_of("strong-global", train(limit, global_batch=share * ranks), ranks, 1)
    assert micro_batch * accumulation == share
    assert 1 <= micro_batch <= limit
    # No fewer micro-steps would do.
    assert not any(share % fewer == 0 and share // fewer <= limit for fewer in range(1, accumulation))


@given(st.integers(1, 512), st.integers(1, 16), st.integers(1, 64))
def test_at_the_smallest_world_the_strong_policies_coincide(micro_batch: int, accumulation: int, ranks: int) -> None:
    section = train(micro_batch, grad_accum=accumulation)
    assert batch_of("strong-global", section, ranks, ranks) == batch_of("strong-micro", section, ranks, ranks)


def test_a_global_batch_that_does_not_divide_is_refused_with_those_nearby() -> None:
    with pytest.raises(RequestError) as caught:
        batch_of("strong-global", train(32), 3, 1)
    assert str(caught.value) == (
        "a global batch of 32 does not divide over 3 ranks. Valid: train.global_batch = 30, train.global_batch = 33. "
        "Or leave 3 out of scaling.gpus."
    )


def test_more_ranks_than_images_in_the_global_batch() -> None:
    with pytest.raises(RequestError, match=r"a global batch of 2 .* over 5 ranks. Valid: train.global_batch = 5\."):
        batch_of("strong-global", train(2), 5, 1)


@pytest.mark.parametrize("mode", ["strong-micro", "strong-global", "weak"])
def test_a_missing_micro_batch_is_named(mode: Any) -> None:
    with pytest.raises(RequestError, match=r"train\.micro_batch is missing\. Add micro_batch = 64"):
        batch_of(mode, train(None), 1, 1)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [(1, None), (2, None), (3, (11, 10, 3))],  # the first of the speeds are those of fewer ranks
)
def test_shares_follow_the_speeds_of_so_many_ranks(ranks: int, expected: tuple[int, ...] | None) -> None:
    assert micro_batches_of(train(rank_speeds=(1.0, 1.0, 0.31)), ranks, 8) == expected
    assert micro_batches_of(train(), ranks, 8) is None


def test_speeds_that_differ_too_little_for_another_image_make_the_same_trial() -> None:
    assert micro_batches_of(train(rank_speeds=(1.0, 0.99)), 2, 8) is None


@pytest.mark.parametrize("mode", ["strong-micro", "strong-global", "weak"])
def test_under_every_policy_the_global_batch_is_that_of_equal_shares(mode: Any) -> None:
    section = train(32, grad_accum=4, rank_speeds=(1.0, 0.5, 0.5, 0.25))
    for ranks in (2, 4):
        micro_batch, accumulation = batch_of(mode, section, ranks, 1)
        found = micro_batches_of(section, ranks, micro_batch)
        assert found is not None
        assert sum(found) * accumulation == ranks * micro_batch * accumulation


def test_fewer_speeds_than_ranks_are_refused_with_the_count() -> None:
    with pytest.raises(RequestError) as caught:
        micro_batches_of(train(rank_speeds=(1.0, 0.5)), 3, 8)
    assert str(caught.value) == (
        "train.rank_speeds holds 2 speeds for 3 ranks. Give 3, one for each rank in order (fewer ranks use the first "
        "of them), or leave 3 out of scaling.gpus."
    )


def test_a_share_beyond_all_reason_is_refused() -> None:
    with pytest.raises(RequestError, match=r"one rank 1,998,002 of 2,000,000 images\. Valid: at most 1,000,000 images"):
        micro_batches_of(train(rank_speeds=(1000.0, 1.0)), 2, 1_000_000)


def study(mode: str, gpus: tuple[int, ...], fraction: float = 1.0, per_gpu: float | None = None) -> Study:
    return Study(
        name="x",
        model=ModelSpec(name="vit-b16"),
        data=DataSpec(name="digits", fraction=fraction),
        scaling=ScalingSection.model_validate({"mode": mode, "gpus": gpus, "fraction_per_gpu": per_gpu}),
    )


@pytest.mark.parametrize(
    ("weak", "ranks", "dataset", "images"),
    [
        (study("weak", (1, 2, 3, 10), per_gpu=0.1), 3, 50_000, 15_000),
        (study("weak", (1, 2, 3, 10), per_gpu=0.1), 10, 50_000, 50_000),
        (study("weak", (1, 5, 7)), 5, 7_000, 5_000),
        (study("weak", (1, 5, 7)), 7, 7_000, 7_000),
        (study("weak", (1, 3)), 1, 50_000, 16_667),  # 16,666.67
        (study("weak", (1, 2, 4), fraction=0.6), 1, 1_000, 150),
        (study("weak", (1, 2, 4), fraction=0.6), 4, 1_000, 600),
        (study("strong-micro", (1, 2, 4), fraction=0.6), 1, 1_000, 600),
        (study("strong-global", (1, 2, 4), fraction=0.6), 4, 1_000, 600),
    ],
)
def test_images_used_by_hand(weak: Study, ranks: int, dataset: int, images: int) -> None:
    assert samples_used(dataset, fraction_of(weak, ranks)) == images


@given(st.integers(1, 4096), st.integers(1, 1000), st.data())
def test_weak_scaling_gives_every_rank_the_same_share_exactly(largest: int, per_rank: int, data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, largest))
    fraction = fraction_of(study("weak", (ranks, largest)), ranks)
    assert samples_used(largest * per_rank, fraction) == ranks * per_rank


def test_weak_scaling_beyond_the_dataset_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        fraction_of(study("weak", (1, 2, 4), per_gpu=0.3), 4)
    assert str(caught.value) == (
        "weak scaling with scaling.fraction_per_gpu = 0.3 needs 1.2 of the training images at 4 ranks. "
        "Valid: scaling.fraction_per_gpu <= 1/4. Use a smaller share per rank, or fewer ranks."
    )


def test_a_third_of_the_data_fits_three_ranks() -> None:
    assert Fraction(fraction_of(study("weak", (1, 2, 3), per_gpu=1 / 3), 3)) == 1
