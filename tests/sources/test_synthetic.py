"""Synthetic images depend on their id alone, and their class can be learned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitscale import sources
from vitscale.errors import RequestError
from vitscale.trial.trial import DataSpec


@settings(deadline=None)
@given(
    ids=st.lists(st.integers(0, 99), min_size=0, max_size=20),
    classes=st.integers(2, 120),
    side=st.integers(4, 41),
)
def test_an_image_is_the_same_however_it_is_taken(ids: list[int], classes: int, side: int) -> None:
    train = sources.load(DataSpec(name="synthetic", samples=100, classes=classes, source_size=side)).train
    together = train.take(np.array(ids, dtype=np.int64))
    assert together.shape == (len(ids), side, side, 3)
    assert together.dtype == np.uint8
    for position, number in enumerate(ids):
        np.testing.assert_array_equal(together[position], train.take(np.array([number]))[0])
        assert train.labels[number] == number % classes


def test_the_images_are_what_they_were_when_this_was_written() -> None:
    """A change here changes every fingerprint: raise `_RECIPE_VERSION`."""
    dataset = sources.load(DataSpec(name="synthetic", samples=64, classes=3, source_size=5))
    assert dataset.train.take(np.array([7]))[0, 0].tolist() == [
        [169, 192, 81],
        [169, 150, 100],
        [78, 228, 53],
        [40, 185, 81],
        [114, 84, 57],
    ]
    assert dataset.held_out.take(np.array([7]))[0, 0].tolist() == [
        [162, 178, 101],
        [191, 98, 67],
        [144, 200, 123],
        [16, 142, 75],
        [86, 131, 68],
    ]


def test_more_samples_leave_the_first_ones_as_they_are() -> None:
    few, many = (sources.load(DataSpec(name="synthetic", samples=n)) for n in (10, 10_000_000))
    np.testing.assert_array_equal(few.train.take(np.arange(10)), many.train.take(np.arange(10)))
    last = many.train.take(np.array([9_999_999]))
    assert last.std() > 10
    assert (len(many.train), len(many.held_out)) == (10_000_000, 2_000_000)


def test_no_two_images_are_alike_and_the_splits_are_apart() -> None:
    dataset = sources.load(DataSpec(name="synthetic", samples=500, classes=4, source_size=8))
    images = np.concatenate([dataset.train.take(np.arange(500)), dataset.held_out.take(np.arange(100))])
    assert len(np.unique(images.reshape(600, -1), axis=0)) == 600


def test_the_class_can_be_learned_and_noise_is_real() -> None:
    """The nearest of the mean training images tells the class of held-out ones; chance is 1 in 20."""
    dataset = sources.load(DataSpec(name="synthetic", samples=1000, classes=20, source_size=16))
    train = dataset.train.take(np.arange(1000)).reshape(1000, -1).astype(float)
    means = np.stack([train[dataset.train.labels == label].mean(axis=0) for label in range(20)])
    held_out = dataset.held_out.take(np.arange(200)).reshape(200, 1, -1)
    guesses = np.square(held_out - means).sum(axis=2).argmin(axis=1)
    assert (guesses == dataset.held_out.labels).mean() > 0.95
    residual = train - means[dataset.train.labels]
    assert residual.std() == pytest.approx(128 / np.sqrt(12), rel=0.05)  # uniform over 128 values
    assert abs(np.corrcoef(residual[0], residual[20])[0, 1]) < 0.2


def test_ids_outside_the_split_are_refused() -> None:
    held_out = sources.load(DataSpec(name="synthetic", samples=10)).held_out
    for bad in (-1, 2):
        with pytest.raises(IndexError, match="split of 2"):
            held_out.take(np.array([0, bad]))


def test_the_fingerprint_follows_what_is_made() -> None:
    base = DataSpec(name="synthetic")
    prints = {sources.check(base).fingerprint}
    for key, value in (("samples", 5000), ("classes", 11), ("source_size", 33), ("held_out", 0.3)):
        prints.add(sources.check(base.model_copy(update={key: value})).fingerprint)
    assert len(prints) == 5
    assert sources.check(base.model_copy(update={"augment": False, "fraction": 0.5})).fingerprint in prints


# --- masks ------------------------------------------------------------------------------------------------------------


def test_masks_are_made_from_ids_alone_and_images_show_them(tmp_path: Path) -> None:
    spec = DataSpec(name="synthetic-masks", samples=40, classes=7, source_size=24)
    dataset = sources.load(spec, tmp_path)
    assert dataset.summary.task == "segmentation"
    assert (len(dataset.train), len(dataset.held_out)) == (40, 8)
    images, masks = dataset.train.take(np.arange(40)), dataset.train.labels[np.arange(40)]
    assert (images.shape, masks.shape) == ((40, 24, 24, 3), (40, 24, 24))
    assert masks.dtype == np.uint8
    assert np.array_equal(dataset.train.labels[np.array([31, 5])], masks[[31, 5]])
    assert np.array_equal(dataset.train.take(np.array([31, 5])), images[[31, 5]])
    counted = [int((mask != 255).sum()) for mask in masks]
    assert len(set(counted)) > 3, "every image has another number of pixels that count"
    assert min(counted) >= 24 * 18
    # The colour of a class is its mean over all its pixels, and tells it: there is something to learn.
    colours = np.stack([images[masks == label].mean(axis=0) for label in range(7)])
    guesses = np.abs(images[..., None, :] - colours).sum(axis=-1).argmin(axis=-1)
    assert (guesses == masks)[masks != 255].mean() > 0.4  # one in seven by chance
    assert not np.array_equal(masks[:8], dataset.held_out.labels[np.arange(8)])


def test_more_classes_than_a_byte_holds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"data.classes = 256 do not fit into masks. Valid: at most 255"):
        sources.load(DataSpec(name="synthetic-masks", classes=256), tmp_path)


@pytest.mark.parametrize(("name", "samples"), [("synthetic", 400), ("synthetic-masks", 100)])
def test_images_of_other_channels_are_normalised_by_their_own_statistics(
    tmp_path: Path, name: str, samples: int
) -> None:
    """Those of what is drawn, which so few images of 64 classes come near."""
    dataset = sources.load(DataSpec(name=name, samples=samples, classes=64, source_size=16, channels=5), tmp_path)
    pixels = dataset.train.take(np.arange(samples)).reshape(-1, 5).astype(float)
    assert dataset.statistics is not None
    assert pixels.mean() == pytest.approx(dataset.statistics.mean[0], abs=8)
    assert pixels.std() == pytest.approx(dataset.statistics.std[4], rel=0.1)
    assert len(dataset.statistics.mean) == len(dataset.statistics.std) == 5
    assert sources.load(DataSpec(name=name, samples=8), tmp_path).statistics is None
