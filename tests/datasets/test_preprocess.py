"""What happens to an image depends on seed, epoch and id alone; values are checked against hand-made images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vitscale.datasets.batches import EpochOrder
from vitscale.datasets.preprocess import IMAGENET, STATISTICS, Preprocess
from vitscale.sources import ChannelStatistics, load
from vitscale.trial.trial import DataSpec


def pictures(count: int, side: int = 32) -> Tensor:
    return torch.randint(0, 256, (count, side, side, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


def in_pixels(images: Tensor, dataset: str) -> Tensor:
    """Undoes the normalisation: uint8 `[n, H, W, 3]`."""
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in STATISTICS.get(dataset, IMAGENET))
    return ((images * std + mean) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)


# --- without augmentation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", ["cifar10", "cifar100", "digits", "folder", "synthetic"])
def test_without_augmentation_it_only_normalises(dataset: str) -> None:
    images = pictures(3)
    mean, std = STATISTICS.get(dataset, IMAGENET)
    expected = ((images.double() / 255 - torch.tensor(mean)) / torch.tensor(std)).permute(0, 3, 1, 2).float()
    for augment, training in ((False, True), (True, False)):
        got = Preprocess(dataset, 32, augment=augment, seed=1)(images, torch.arange(3), epoch=0, training=training)
        assert got.dtype == torch.float32
        assert got.is_contiguous()
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.float32])
@pytest.mark.parametrize("augment", [True, False])
def test_any_channels_and_bits_are_normalised_by_their_own_statistics(dtype: torch.dtype, augment: bool) -> None:
    """Of images that are the same everywhere one value a channel is left, wherever they are moved."""
    values = torch.tensor([0.0, 7.0, 200.0, 31.0, 5.0]).to(dtype)
    images = values.expand(4, 16, 16, 5).clone()
    statistics = ChannelStatistics((0.0, 5.0, 100.0, 31.0, 0.0), (1.0, 2.0, 50.0, 3.0, 0.5))
    preprocess = Preprocess("folder", 16, augment=augment, seed=1, statistics=statistics)
    got = preprocess(images, torch.arange(4), epoch=0, training=True)
    assert (got.shape, got.dtype) == ((4, 5, 16, 16), torch.float32)
    middle = got[:, :, 4:12, 4:12]
    torch.testing.assert_close(middle, torch.tensor([0.0, 1.0, 2.0, 0.0, 10.0]).view(1, 5, 1, 1).expand_as(middle))


def test_the_statistics_of_digits_are_those_of_its_training_images(tmp_path: Path) -> None:
    train = load(DataSpec(name="digits"), tmp_path).train
    pixels = train.take(np.arange(len(train))) / 255
    assert pixels.mean(axis=(0, 1, 2)) == pytest.approx(STATISTICS["digits"].mean, abs=1e-3)
    assert pixels.std(axis=(0, 1, 2)) == pytest.approx(STATISTICS["digits"].std, abs=1e-3)


@pytest.mark.parametrize(("stored", "image_size"), [(8, 32), (32, 224), (32, 20)])
def test_resizing_comes_to_the_same_before_and_after_normalising(stored: int, image_size: int) -> None:
    images = pictures(2, stored)
    got = Preprocess("cifar10", image_size, augment=False, seed=0)(images, torch.arange(2), epoch=0, training=True)
    resized = torch.nn.functional.interpolate(
        images.permute(0, 3, 1, 2).double(), size=(image_size, image_size), mode="bilinear", antialias=True
    )
    mean, std = (torch.tensor(v).double().view(1, 3, 1, 1) for v in STATISTICS["cifar10"])
    torch.testing.assert_close(got.double(), (resized / 255 - mean) / std, rtol=1e-4, atol=1e-5)


# --- with augmentation ------------------------------------------------------------------------------------------------


def candidates(image: Tensor, flip: bool) -> dict[tuple[int, int, bool], bytes]:
    """Every picture that augmentation may make of one 16 x 16 image, made by plain slicing."""
    made = {}
    for mirrored in (False, True) if flip else (False,):
        source = image.flip(1) if mirrored else image
        padded = torch.nn.functional.pad(source, (0, 0, 2, 2, 2, 2))
        for down in range(5):
            for right in range(5):
                made[down, right, mirrored] = padded[down : down + 16, right : right + 16].numpy().tobytes()
    return made


@pytest.mark.parametrize("flip", [True, False])
def test_an_image_is_shifted_over_black_by_up_to_an_eighth_and_mirrored(flip: bool) -> None:
    image = pictures(1, 16)
    count = 600
    preprocess = Preprocess("cifar10", 16, augment=True, seed=5)
    preprocess.flip = flip
    out = preprocess(image.expand(count, -1, -1, -1), torch.arange(count), epoch=0, training=True)
    by_bytes = {value: key for key, value in candidates(image[0], flip).items()}
    assert len(by_bytes) == (50 if flip else 25)
    seen = [by_bytes[picture.numpy().tobytes()] for picture in in_pixels(out, "cifar10")]
    assert set(seen) == set(by_bytes.values()), "every shift, and both sides, come up"
    if flip:
        assert 240 < sum(mirrored for *_, mirrored in seen) < 360


def test_digits_are_not_mirrored_and_photographs_are() -> None:
    assert not Preprocess("digits", 8, augment=True, seed=0).flip
    assert Preprocess("cifar10", 32, augment=True, seed=0).flip
    assert Preprocess("folder", 32, augment=True, seed=0).flip


def test_seed_epoch_and_id_decide_and_nothing_else() -> None:
    images, ids = pictures(64), torch.arange(64)
    preprocess = Preprocess("cifar10", 32, augment=True, seed=1)
    torch.manual_seed(0)
    first = preprocess(images, ids, epoch=0, training=True)
    torch.manual_seed(1)
    assert torch.equal(first, preprocess(images, ids, epoch=0, training=True))
    assert not torch.equal(first, preprocess(images, ids, epoch=1, training=True))
    assert not torch.equal(first, preprocess(images, ids + 64, epoch=0, training=True))
    other_seed = Preprocess("cifar10", 32, augment=True, seed=2)
    assert not torch.equal(first, other_seed(images, ids, epoch=0, training=True))


@settings(deadline=None, max_examples=30)
@given(micro_batches=st.lists(st.integers(1, 7), min_size=1, max_size=5), grad_accum=st.integers(1, 3))
def test_many_ranks_see_what_one_would(micro_batches: list[int], grad_accum: int) -> None:
    images = pictures(37, 16)
    preprocess = Preprocess("cifar10", 24, augment=True, seed=1)
    alone = preprocess(images, torch.arange(37), epoch=2, training=True)
    order = EpochOrder(37, seed=0, epoch=2, micro_batches=micro_batches, grad_accum=grad_accum)
    for step in range(order.steps):
        for micro_step in range(grad_accum):
            for rank in range(len(micro_batches)):
                ids = torch.from_numpy(order.slot(step, micro_step, rank).ids)
                assert torch.equal(preprocess(images[ids], ids, epoch=2, training=True), alone[ids])


def test_the_order_of_an_epoch_says_nothing_of_its_shifts() -> None:
    # One white image, so that what is black tells the shift; the first quarter of an epoch against the rest.
    order = EpochOrder(4000, seed=0, epoch=0, micro_batches=[1000], grad_accum=1)
    white = torch.full((1000, 16, 16, 3), 255, dtype=torch.uint8)
    preprocess = Preprocess("cifar10", 16, augment=True, seed=0)
    preprocess.flip = False
    for step in range(order.steps):
        ids = torch.from_numpy(order.slot(step, 0, 0).ids)
        shifted = in_pixels(preprocess(white, ids, epoch=0, training=True), "cifar10")
        black_on_top = (shifted[:, 0, 8, 0] == 0).sum().item()
        black_on_the_left = (shifted[:, 8, 0, 0] == 0).sum().item()
        assert 300 < black_on_top < 500  # two shifts of five
        assert 300 < black_on_the_left < 500


def test_images_that_are_not_square_or_very_small() -> None:
    preprocess = Preprocess("folder", 16, augment=True, seed=0)
    for height, width in ((24, 16), (4, 4), (1, 1)):
        images = torch.zeros(2, height, width, 3, dtype=torch.uint8)
        assert preprocess(images, torch.arange(2), epoch=0, training=True).shape == (2, 3, 16, 16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_prepares_the_same_images_without_waiting() -> None:
    images, ids = pictures(64), torch.arange(64)
    preprocess = Preprocess("cifar10", 32, augment=True, seed=1)
    expected = preprocess(images, ids, epoch=0, training=True)
    on_gpu = (images.cuda(), ids.cuda())
    preprocess(*on_gpu, epoch=0, training=True)  # copies the statistics once
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = preprocess(*on_gpu, epoch=0, training=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-6, atol=1e-6)


# --- masks ------------------------------------------------------------------------------------------------------------


def test_masks_are_moved_as_their_images_are() -> None:
    """Images whose pixels say their label: wherever one goes, its label goes too; outside nothing counts."""
    classes = torch.randint(1, 200, (6, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    images, ids = classes[..., None].expand(-1, -1, -1, 3).contiguous(), torch.arange(6)
    own = Preprocess("synthetic-masks", 16, augment=True, seed=3)
    moved = in_pixels(own(images, ids, epoch=2, training=True), "synthetic-masks")[..., 0]
    masks = own.masks(classes, ids, epoch=2, training=True)
    assert (masks == 255).any()
    assert not torch.equal(masks, classes)
    assert torch.equal(torch.where(masks == 255, 0, masks), moved)
    assert torch.equal(own.masks(classes, ids, epoch=2, training=False), classes)
    assert torch.equal(own.masks(classes[2:4], ids[2:4], epoch=2, training=True), masks[2:4])


def test_masks_take_the_nearest_label_where_images_are_resized() -> None:
    masks = torch.tensor([[[1, 7], [255, 3]]], dtype=torch.uint8)
    own = Preprocess("synthetic-masks", 4, augment=False, seed=0)
    resized = own.masks(masks, torch.arange(1), epoch=0, training=True)
    assert torch.equal(resized, masks.repeat_interleave(2, 1).repeat_interleave(2, 2))
    assert own.masks(masks, torch.arange(1), epoch=0, training=False).shape == (1, 2, 2)
