"""Scenes: where the pixels of a crop come from, which crops are taken, other colours, and pictures in windows."""

from __future__ import annotations

import colorsys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from vitscale.datasets import scenes
from vitscale.datasets.batches import EpochOrder
from vitscale.datasets.preprocess import IMAGENET
from vitscale.datasets.scenes import Scenes, sliding
from vitscale.sources.base import IGNORED, OUTSIDE

SIDE = 40
_WORD = 2**31


def stored(*sizes: tuple[int, int], classes: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Noise of these heights and widths, each in its corner of a square of `SIDE`."""
    random = torch.Generator().manual_seed(seed)
    images = torch.zeros(len(sizes), SIDE, SIDE, 3, dtype=torch.uint8)
    masks = torch.full((len(sizes), SIDE, SIDE), OUTSIDE, dtype=torch.uint8)
    for number, (height, width) in enumerate(sizes):
        images[number, :height, :width] = torch.randint(0, 256, (height, width, 3), generator=random)
        masks[number, :height, :width] = torch.randint(0, classes, (height, width), generator=random)
    return images, masks


def ramps(count: int, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Scenes that tell of each pixel where it lies: red its row, green its column; labelled by its column."""
    images, masks = stored(*[(height, width)] * count)
    images[:, :height, :width, 0] = torch.arange(height, dtype=torch.uint8)[:, None]
    images[:, :height, :width, 1] = torch.arange(width, dtype=torch.uint8)
    masks[:, :height, :width] = torch.arange(width, dtype=torch.uint8)
    return images, masks


def plain(height: int, width: int, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A scene as stored [1, h, w(, 3)], then what is made of it without augmentation."""
    images, masks = stored((height, width))
    own = Scenes(size, augment=False, seed=0)
    view = own.view(masks, torch.zeros(1, dtype=torch.int64), epoch=0)
    return images[:, :height, :width], masks[:, :height, :width], view.pixels(images), view.masks(masks)


# --- where pixels come from -------------------------------------------------------------------------------------------


def test_a_picture_of_the_plain_scale_is_cropped_in_the_middle() -> None:
    image, mask, pixels, labels = plain(16, 25, 16)
    assert torch.equal(pixels, image[:, :, 4:20].permute(0, 3, 1, 2).float())
    assert torch.equal(labels, mask[:, :, 4:20])


@pytest.mark.parametrize(("height", "width", "size"), [(8, 8, 16), (32, 32, 16), (7, 7, 16), (30, 30, 13)])
def test_scaled_pixels_are_bilinear_and_labels_the_nearest(height: int, width: int, size: int) -> None:
    image, mask, pixels, labels = plain(height, width, size)
    expected = interpolate(image.permute(0, 3, 1, 2).double(), size=(size, size), mode="bilinear", align_corners=False)
    torch.testing.assert_close(pixels.double(), expected, rtol=0, atol=2e-4)
    assert torch.equal(labels, interpolate(mask[:, None], size=(size, size), mode="nearest-exact")[:, 0])


def test_a_long_picture_ends_in_padding() -> None:
    """5 x 40 at 16 pixels: not 16 x 128, but 8 x 64, as 4 x 16 is the longest."""
    _, mask, _, labels = plain(5, 40, 16)
    assert (labels[:, 8:] == IGNORED).all()
    assert (labels[:, :8] != IGNORED).all()
    scaled = interpolate(mask[:, None], size=(8, 64), mode="nearest-exact")[:, 0]
    assert torch.equal(labels[:, :8], scaled[:, :, 24:40])
    images, masks = stored((5, 40))
    ready, _ = Scenes(16, augment=False, seed=0).prepare(images, masks, torch.arange(1), epoch=0, training=True)
    black = torch.tensor([-mean / std for mean, std in zip(*IMAGENET, strict=True)]).view(1, 3, 1, 1)
    torch.testing.assert_close(ready()[:, :, 8:], black.expand(1, 3, 8, 16))
    assert not torch.isclose(ready()[:, :, :8], black).all(1).any()


@pytest.mark.parametrize(
    ("height", "width", "scaled"),
    [
        (480, 640, (512, 683)),
        (640, 480, (683, 512)),
        (512, 512, (512, 512)),
        (200, 2000, (205, 2048)),
        (1200, 1600, (512, 683)),
    ],
)
def test_whole_pictures_are_scaled_as_published(height: int, width: int, scaled: tuple[int, int]) -> None:
    """To (2048, 512) in their proportions: the shorter side is 512, unless the longer one would be more than 2048."""
    found = scenes._scaled_sizes(torch.tensor([[height, width]]), 512, torch.ones(1, dtype=torch.float64))
    assert tuple(found[0].tolist()) == scaled


def test_an_evaluated_scene_keeps_its_labels() -> None:
    images, masks = stored((30, 40))
    ready, labels = Scenes(16, augment=True, seed=0).prepare(images, masks, torch.arange(1), epoch=0, training=False)
    assert torch.equal(labels, masks[:, :30])
    expected = interpolate(images[:, :30].permute(0, 3, 1, 2).double() / 255, size=(16, 21), mode="bilinear")
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in IMAGENET)
    torch.testing.assert_close(ready().double(), (expected - mean) / std, rtol=1e-4, atol=1e-5)


# --- augmentation -----------------------------------------------------------------------------------------------------


def test_scale_place_and_side_are_random_and_the_same_for_picture_and_labels() -> None:
    """Of a ramp the columns tell where they come from: their distance the scale, their direction the side."""
    count, size, width = 400, 16, 36
    images, masks = ramps(count, 24, width)
    own = Scenes(size, augment=True, seed=2)
    view = own.view(masks, torch.arange(count), epoch=1)
    pixels, labels = view.pixels(images), view.masks(masks)
    ratios, mirrored, firsts = [], 0, set()
    for number in range(count):
        inside = view.inside[number]
        rows, columns = int(inside[:, 0].sum()), int(inside[0].sum())
        assert inside[:rows, :columns].all()
        assert not inside[rows:].any()
        assert not inside[:, columns:].any()
        assert (labels[number][~inside] == IGNORED).all()
        green = pixels[number, 1, 0, :columns]
        assert ((green - labels[number, 0, :columns].float()).abs() <= 0.5).all()
        inner = (green > 0.01) & (green < width - 1.01)  # at the edges pixels repeat
        steps = green.diff()[inner[1:] & inner[:-1]]
        assert (steps.max() - steps.min()) < 1e-4
        mirrored += bool(steps.mean() < 0)
        ratio = 24 / 16 / float(steps.abs().mean())  # of the plain scale, at which 24 rows are 16
        ratios.append(ratio)
        scaled_rows, scaled_columns = round(16 * ratio), round(24 * ratio)
        assert abs(rows - min(size, scaled_rows)) <= 1
        assert abs(columns - min(size, scaled_columns)) <= 1
        firsts.add(round(float(pixels[number, 0, 0, 0])))
    assert 0.45 < min(ratios) < 0.6
    assert 1.9 < max(ratios) < 2.1
    assert 1.1 < sum(ratios) / count < 1.4
    assert 160 < mirrored < 240
    assert len(firsts) > 8


def test_a_mirrored_crop_is_the_same_crop_mirrored() -> None:
    _, masks = stored((30, 40))
    own, sizes, first = Scenes(16, augment=True, seed=0), torch.tensor([[30, 40]]), torch.tensor([[3, 7]])
    crops = [own._crop(sizes, sizes, first, torch.tensor([mirrored])).masks(masks) for mirrored in (False, True)]
    assert torch.equal(crops[0], masks[:, 3:19, 7:23])
    assert torch.equal(crops[1], crops[0].flip(2))


def test_seed_epoch_and_id_decide_and_nothing_else() -> None:
    images, masks = stored(*[(30, 40), (20, 10)] * 8)
    ids = torch.arange(16)

    def made(seed: int, epoch: int, numbers: Tensor) -> tuple[Tensor, Tensor]:
        ready, labels = Scenes(16, augment=True, seed=seed).prepare(images, masks, numbers, epoch=epoch, training=True)
        return ready(), labels

    first = made(1, 0, ids)
    torch.manual_seed(9)
    assert all(map(torch.equal, first, made(1, 0, ids)))
    for other in (made(2, 0, ids), made(1, 1, ids), made(1, 0, ids + 16)):
        assert not any(map(torch.equal, first, other))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_many_ranks_see_what_one_would(ranks: int) -> None:
    """To the bit, whatever shares a batch is cut into."""
    sizes = [(30, 40), (40, 20), (10, 40), (7, 5), (33, 33)]
    images, masks = stored(*sizes, *sizes, *sizes[:3])
    own = Scenes(16, augment=True, seed=1)
    ready, labels = own.prepare(images, masks, torch.arange(13), epoch=2, training=True)
    alone = ready()
    order = EpochOrder(13, seed=0, epoch=2, micro_batches=[6 // ranks] * ranks, grad_accum=1)
    for step in range(order.steps):
        for rank in range(ranks):
            ids = torch.from_numpy(order.slot(step, 0, rank).ids)
            ready, of_rank = own.prepare(images[ids], masks[ids], ids, epoch=2, training=True)
            assert torch.equal(of_rank, labels[ids])
            assert torch.equal(ready(), alone[ids])


@pytest.mark.parametrize("counted", [128, 4])
def test_a_crop_has_less_than_three_quarters_of_one_class(counted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of ten tries that has, else the eleventh, unseen; held against every try, cut out and counted."""
    monkeypatch.setattr(scenes, "_COUNTED_SIDE", counted)
    count, size = 60, 16
    _, masks = stored(*[(40, 40)] * count)
    masks[:] = 3
    masks[:, 20:, 28:] = 1  # in some of the crops, and in few of those enough
    masks[:, :5] = IGNORED
    masks[50:] = 2  # never
    own = Scenes(size, augment=True, seed=4)
    ids = torch.arange(count)
    chosen = []

    def crops(tries: Tensor, stored_: Tensor, scaled: Tensor) -> list[Tensor]:
        side, mirrored = tries.shape[1], torch.zeros(count, dtype=torch.bool)
        return [own._crop(stored_, scaled, tries[:, n], mirrored).masks(masks) for n in range(side)]

    search = Scenes._first_mixed_try

    def watched(self: Scenes, masks_: Tensor, stored_: Tensor, scaled: Tensor, tries: Tensor) -> Tensor:
        found = search(self, masks_, stored_, scaled, tries)
        step = size // min(size, counted)
        fine = torch.stack(
            [several(crop[:, step // 2 :: step, step // 2 :: step]) for crop in crops(tries, stored_, scaled)]
        )
        assert fine.shape == (10, count)
        for number in range(count):
            first = next((n for n in range(10) if fine[n, number]), 10)
            assert found[number] == first
            chosen.append(first)
        return found

    monkeypatch.setattr(Scenes, "_first_mixed_try", watched)
    taken = several(own.view(masks, ids, epoch=0).masks(masks))
    assert set(chosen[50:]) == {10}
    assert {0, 1, 2} < set(chosen[:50])
    if counted == 128:
        assert all(taken[number] for number in range(50) if chosen[number] < 10)


def several(masks: Tensor) -> Tensor:
    """Whether each [h, w] has more than one class and none of three quarters."""
    found = []
    for mask in masks:
        counts = torch.bincount(mask[mask < OUTSIDE].long().flatten())
        counts = counts[counts > 0]
        found.append(len(counts) > 1 and bool(counts.max() < 0.75 * counts.sum()))
    return torch.tensor(found)


def draws(**given: float) -> Tensor:
    """What makes brightness, contrast, saturation and hue happen with a strength in [0, 1); the rest stays."""
    words = [_WORD - 1, 0] * 4 + [0 if given.pop("late", False) else _WORD - 1]
    for number, name in enumerate(("brightness", "contrast", "saturation", "hue")):
        if name in given:
            words[2 * number : 2 * number + 2] = 0, int(given[name] * _WORD)
    return torch.tensor([words])


def by_hand(pixel: tuple[float, float, float], change: dict[str, Any]) -> list[float]:
    """The same of one pixel, 0 to 255, by Python's own colour space."""

    def clipped(values: list[float]) -> list[float]:
        return [min(255.0, max(0.0, value)) for value in values]

    def contrasted(values: list[float]) -> list[float]:
        return clipped([value * (0.5 + change["contrast"]) for value in values]) if "contrast" in change else values

    found = clipped([value - 32 + 64 * change.get("brightness", 0.5) for value in pixel])
    if not change.get("late"):
        found = contrasted(found)
    hue, saturation, value = colorsys.rgb_to_hsv(*(channel / 255 for channel in found))
    saturation = min(1.0, saturation * (0.5 + change.get("saturation", 0.5)))
    hue = (hue + (72 * change.get("hue", 0.5) - 36) / 360) % 1.0
    found = [255 * channel for channel in colorsys.hsv_to_rgb(hue, saturation, value)]
    return contrasted(found) if change.get("late") else found


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"brightness": 0.9},
        {"contrast": 0.1},
        {"contrast": 0.9, "late": True},
        {"saturation": 0.95},
        {"saturation": 0.0},
        {"hue": 0.02},
        {"hue": 0.97},
        {"brightness": 0.1, "contrast": 0.8, "saturation": 0.9, "hue": 0.3},
        {"brightness": 0.9, "contrast": 0.8, "saturation": 0.9, "hue": 0.6, "late": True},
    ],
)
def test_colours_change_as_in_hsv(change: dict[str, Any]) -> None:
    pixels = stored((8, 8))[0][:, :8, :8].permute(0, 3, 1, 2).float()
    pixels[0, :, 0, :4] = torch.tensor([[0.0, 255.0, 7.0, 7.0], [0.0, 255.0, 7.0, 9.0], [0.0, 255.0, 7.0, 9.0]])
    found = scenes._distorted(pixels, draws(**change))[0]
    for row in range(8):
        for column in range(8):
            red, green, blue = pixels[0, :, row, column].tolist()
            assert found[:, row, column].tolist() == pytest.approx(by_hand((red, green, blue), change), abs=2e-3)


def test_each_colour_changes_in_half_of_the_images() -> None:
    found = scenes._random_draws(torch.arange(2000), 77, 9)
    happens = (found[:, ::2] < _WORD // 2).sum(0)
    assert ((happens > 900) & (happens < 1100)).all()
    grey = torch.full((400, 3, 2, 2), 128.0)
    changed = (scenes._distorted(grey, found[:400]) != grey).flatten(1).any(1)
    assert 250 < changed.sum() < 350  # grey has no hue and no saturation: three quarters


# --- by windows -------------------------------------------------------------------------------------------------------


def test_windows_lie_two_thirds_apart_and_end_with_the_image() -> None:
    assert scenes._window_starts(512, 512) == [0]
    assert scenes._window_starts(683, 512) == [0, 171]
    assert scenes._window_starts(853, 512) == [0, 341]
    assert scenes._window_starts(854, 512) == [0, 341, 342]
    assert scenes._window_starts(2048, 512) == [0, 341, 682, 1023, 1364, 1536]


def test_where_windows_overlap_their_mean_counts() -> None:
    """Six pixels, windows of three, two apart: the fourth window ends at the edge."""
    calls: list[Tensor] = []

    def numbered(images: Tensor) -> Tensor:
        calls.append(images)
        return torch.arange(len(images)).float().view(-1, 1, 1, 1).expand(-1, 2, 3, 3)

    images = torch.arange(18.0).view(1, 1, 3, 6).expand(-1, 3, -1, -1)
    found = sliding(numbered, images, 3)
    (windows,) = calls
    assert torch.equal(windows[:, 0, 0], torch.tensor([[0.0, 1, 2], [2, 3, 4], [3, 4, 5]]))
    assert found.shape == (1, 2, 3, 6)
    assert found[0, 0, 0].tolist() == [0.0, 0.0, 0.5, 1.5, 1.5, 2.0]


def test_windows_of_a_model_that_looks_at_one_pixel_are_the_whole_image() -> None:
    images = torch.rand(1, 3, 20, 33)
    assert torch.allclose(sliding(lambda windows: windows[:, :2] * 2, images, 16), images[:, :2] * 2)
    flat = images[:, :, :7]  # padded to a window, and cut again
    assert torch.allclose(sliding(lambda windows: windows[:, :2] * 2, flat, 16), flat[:, :2] * 2)
    coarse = sliding(lambda windows: torch.ones(len(windows), 4, 4, 4), images, 16)
    assert torch.equal(coarse, torch.ones(1, 4, 20, 33))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_makes_the_same_crops_without_waiting() -> None:
    images, masks = stored((30, 40), (40, 20), (10, 40), (7, 5))
    own, ids = Scenes(16, augment=True, seed=1), torch.arange(4)

    def made(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        ready, labels = own.prepare(*tensors, epoch=0, training=True)
        return ready(), labels

    expected = made(images, masks, ids)
    on_gpu = [tensor.cuda() for tensor in (images, masks, ids)]
    made(*on_gpu)  # copies the statistics once
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = made(*on_gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got[1].cpu(), expected[1])
    torch.testing.assert_close(got[0].cpu(), expected[0], rtol=1e-5, atol=1e-5)
