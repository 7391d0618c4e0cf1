"""Files in ADE20K's layout: pixels and labels as they are stored, and one message for all that is broken."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from image_files import blocks, cache, write_scene
from vitscale import sources
from vitscale.errors import RequestError
from vitscale.sources.base import OUTSIDE
from vitscale.sources.pictures import decode_labels, size_within
from vitscale.trial.trial import DataSpec

__all__ = ["cache"]

CLASSES = 5


def spec(root: Path, **keys: Any) -> DataSpec:
    return DataSpec.model_validate({"name": "ade20k", "root": str(root), "source_size": 40, "classes": CLASSES} | keys)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Four scenes for training and two held out; of 40 x 30, 20 x 40, 80 x 40, 6 x 5 and 12 x 12 pixels."""
    folder = tmp_path / "ADE ünd more"
    for number, (height, width) in enumerate([(30, 40), (40, 20), (40, 80), (5, 6)]):
        write_scene(folder, "training", f"ADE_train_{number}", blocks(height, width, CLASSES, number))
    for number in range(2):
        write_scene(folder, "validation", f"ADE_val {number} é", blocks(12, 12, CLASSES, 10 + number))
    return folder


def test_pictures_and_labels_lie_in_squares_in_their_own_proportions(root: Path) -> None:
    """Label 0 counts for nothing and k is class k - 1; what fits stays as it is, to the pixel."""
    split = sources.load(spec(root)).train
    ids = np.arange(4)
    images, masks = split.take(ids), split.labels[ids]
    assert (images.shape, masks.shape) == ((4, 40, 40, 3), (4, 40, 40))
    for number, (height, width) in {0: (30, 40), 1: (40, 20), 3: (5, 6)}.items():
        name = f"ADE_train_{number}"
        picture = np.asarray(Image.open(root / "images" / "training" / f"{name}.jpg"))
        labels = np.asarray(Image.open(root / "annotations" / "training" / f"{name}.png")).astype(int)
        assert number != 0 or {0, CLASSES} <= {*labels.flat}
        np.testing.assert_array_equal(images[number, :height, :width], picture)
        np.testing.assert_array_equal(masks[number, :height, :width], np.where(labels == 0, 255, labels - 1))
    # Twice as long as the square: half of it in each direction, and labels stay labels.
    assert (masks[2, :20] != OUTSIDE).all()
    labels = np.asarray(Image.open(root / "annotations" / "training" / "ADE_train_2.png")).astype(int)
    np.testing.assert_array_equal(masks[2, :20], np.where(labels == 0, 255, labels - 1)[1::2, 1::2])
    half = Image.open(root / "images" / "training" / "ADE_train_2.jpg")
    half.draft("RGB", (40, 20))  # decoded at half its size
    np.testing.assert_array_equal(images[2, :20], np.asarray(half))
    for number, (height, width) in enumerate([(30, 40), (40, 20), (20, 40), (5, 6)]):
        outside = np.ones((40, 40), dtype=bool)
        outside[:height, :width] = False
        assert ((masks[number] == OUTSIDE) == outside).all()
        assert (images[number][outside] == 0).all()


def test_every_source_gives_the_same(root: Path, cache: Path) -> None:
    found = []
    for source in ("jpeg", "cache", "memory"):
        sources.prepare(spec(root, source=source))
        assert any(path.is_dir() for path in cache.iterdir()) == (source != "jpeg")
        dataset = sources.load(spec(root, source=source))
        summary = dataset.summary
        assert (summary.train_samples, summary.held_out_samples) == (4, 2)
        assert (summary.task, summary.image_shape, len(summary.classes)) == ("segmentation", (40, 40, 3), CLASSES)
        assert summary.sizes_vary
        assert dataset.statistics is None
        found.append([(split.take(ids), split.labels[ids]) for split in (dataset.train, dataset.held_out)
                      for ids in (np.arange(len(split))[::-1].copy(),)])  # fmt: skip
    for others in found[1:]:
        for (images, masks), (other_images, other_masks) in zip(found[0], others, strict=True):
            np.testing.assert_array_equal(images, other_images)
            np.testing.assert_array_equal(masks, other_masks)


def test_there_are_150_classes_unless_it_is_said(root: Path) -> None:
    assert len(sources.check(DataSpec(name="ade20k", root=str(root))).classes) == 150
    named = sources.check(spec(root, classes=("wall", "sky", "tree", "road", "bed", "car")))
    assert named.classes == ("wall", "sky", "tree", "road", "bed", "car")
    with pytest.raises(RequestError, match=r"data.classes = 255 do not fit into masks. Valid: at most 254"):
        sources.check(spec(root, classes=255))


def test_label_255_counts_for_nothing_too(root: Path) -> None:
    labels = np.array([[0, 1], [255, 5]], dtype=np.uint8)
    write_scene(root, "training", "ADE_train_0", labels)
    mask = sources.load(spec(root)).train.labels[np.arange(1)][0]
    assert mask[:2, :2].tolist() == [[255, 0], [255, 4]]


@pytest.mark.parametrize("kind", ["16 bits", "palette", "grey picture", "CMYK picture"])
def test_odd_files_give_the_same_labels_and_three_channels(root: Path, kind: str) -> None:
    labels = blocks(9, 12, CLASSES, 3)
    picture, annotation = write_scene(root, "training", "ADE_train_0", labels)
    match kind:
        case "16 bits":
            Image.fromarray(labels.astype(np.uint16)).save(annotation)
        case "palette":
            coloured = Image.fromarray(labels, "P")
            coloured.putpalette([255, 0, 0, 0, 255, 0] * 128)
            coloured.save(annotation)
        case "grey picture":
            Image.open(picture).convert("L").save(picture)
        case "CMYK picture":
            Image.open(picture).convert("CMYK").save(picture)
    split = sources.load(spec(root, source="jpeg")).train
    expected = np.where(labels == 0, 255, labels.astype(int) - 1)
    np.testing.assert_array_equal(split.labels[np.arange(1)][0][:9, :12], expected)
    shown = split.take(np.arange(1))[0][:9, :12]
    np.testing.assert_array_equal(shown, np.asarray(Image.open(picture).convert("RGB")))


def test_two_pictures_of_one_name_are_refused(root: Path) -> None:
    twin = root / "images" / "training" / "ADE_train_0.png"
    Image.new("RGB", (40, 30)).save(twin)
    with pytest.raises(RequestError, match=r"'.*ADE_train_0.*' and '.*ADE_train_0.*' have one name"):
        sources.check(spec(root))
    twin.unlink()
    assert sources.check(spec(root)).train_samples == 4


def grey_png(side: int, bits: int = 8, rows: bytes = b"") -> bytes:
    """A PNG that says it is `side` pixels wide and high, with whatever `rows` it has."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", side, side, bits, 0, 0, 0, 0)
    content = zlib.compress(rows) if rows else b""
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", content) + chunk(b"IEND", b"")


def test_grey_of_other_bits_is_refused() -> None:
    """Labels 1 and 2 in two pixels each way: of 4 bits Pillow makes 17 and 34 of them, of 2 bits 85 and 170."""
    assert decode_labels(grey_png(2, 8, b"\0\1\2" * 2)).tolist() == [[1, 2]] * 2
    for image in (
        grey_png(2, 4, b"\0\x12" * 2), grey_png(2, 2, b"\0\x60" * 2), b"P5 2 2 3\n\1\2\1\2",
    ):  # fmt: skip
        with pytest.raises(RequestError, match="one channel of 8 or 16 bits, and this is grey of fewer bits"):
            decode_labels(image)


def test_a_cache_of_multiplied_labels_is_not_read(root: Path, cache: Path) -> None:
    """Version 0.1.0 decoded grey of fewer bits, and its entries had this name without the 2."""
    masks = sources.load(spec(root, source="cache")).train.labels[np.arange(4)]
    entry = next(path for path in cache.iterdir() if path.is_dir())
    images = np.load(entry / "train_images.npy", mmap_mode="r+")
    images[..., 3] = 7
    del images
    entry.rename(cache / entry.name.replace("ade20k-2-", "ade20k-"))
    np.testing.assert_array_equal(sources.load(spec(root, source="cache")).train.labels[np.arange(4)], masks)


def break_all(root: Path) -> dict[str, str]:
    """Another scene for each thing that can be wrong; name -> what is said of it."""
    rng = np.random.default_rng(0)
    labels = blocks(8, 9, CLASSES, 0)

    def scene(name: str, labels: Any = labels) -> tuple[Path, Path]:
        return write_scene(root, "training", name, labels)

    Image.fromarray(blocks(9, 8, CLASSES, 0)).save(scene("turned")[1])
    scene("beyond", np.full((8, 9), CLASSES + 1, dtype=np.uint8))
    scene("no label")[1].unlink()
    scene("no picture")[0].unlink()
    cut = scene("cut", rng.integers(0, 3, (90, 90)).astype(np.uint8))[0]
    cut.write_bytes(cut.read_bytes()[:-200])
    Image.new("RGB", (9, 8)).save(scene("coloured")[1])
    Image.fromarray(np.full((8, 9), 1000, np.uint16)).save(scene("wide")[1])
    scene("bomb")[1].write_bytes(grey_png(12_000))
    both = scene("both")
    both[0].write_bytes(b"")
    both[1].write_text("hello")
    return {
        "turned.png": "it is 8 x 9 pixels, and '.*turned.jpg' is 9 x 8",
        "beyond.png": f"it has the label {CLASSES + 1}, and data.classes is {CLASSES}",
        "no label.jpg": "it has no annotation of its name",
        "no picture.png": "it has no picture of its name",
        "cut.jpg": "truncated",
        "coloured.png": "labels are one channel of 8 or 16 bits, and this is RGB",
        "wide.png": "it has the label 1,000, and labels are numbers from 0 to 255",
        "bomb.png": "it claims 12,000 x 12,000 pixels",
        "both.jpg": "not an image that can be read; and so is '.*both.png': not an image",
    }


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_all_that_is_broken_is_named_at_once_and_before_ranks_start(root: Path) -> None:
    broken = break_all(root)
    with pytest.raises(RequestError) as caught:
        sources.check(spec(root, source="jpeg"))
    message = str(caught.value)
    assert message.startswith(f"{len(broken)} images are broken: ")
    for name, what in broken.items():
        with pytest.raises(RequestError, match=rf"{name}' \([^;]*{what}"):
            raise caught.value
    # And whoever decodes them all finds the same ones.
    with pytest.raises(RequestError, match=f"^{len(broken)} images are broken: ") as decoded:
        sources.check(spec(root, skip_broken=len(broken) - 1))
    assert all(name in str(decoded.value) for name in broken)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_as_many_as_may_be_are_left_out(root: Path) -> None:
    whole = sources.load(spec(root))
    break_all(root)
    left = sources.load(spec(root, skip_broken=9))
    assert len(left.train) == 4
    (note,) = left.summary.notes
    assert note.startswith("9 broken image(s) left out: ")
    ids = np.arange(4)
    np.testing.assert_array_equal(left.train.labels[ids], whole.train.labels[ids])
    np.testing.assert_array_equal(left.train.take(ids), whole.train.take(ids))


def test_what_is_not_laid_out_so_is_said(root: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"needs data.root. Unpack ADEChallengeData2016.zip"):
        sources.check(DataSpec(name="ade20k"))
    with pytest.raises(RequestError, match=r"'.*images/training' is not a folder"):
        sources.check(spec(tmp_path))
    for path in (root / "annotations" / "validation").iterdir():
        path.unlink()
    with pytest.raises(RequestError, match=r"'.*annotations/validation' holds no PNG"):
        sources.check(spec(root))


@pytest.mark.parametrize("linked", ["images", "annotations/training", "images/validation/ADE_val 0 é.jpg"])
def test_links_stay_in_the_folder(root: Path, tmp_path: Path, linked: str) -> None:
    path, elsewhere = root / linked, tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(RequestError, match=r"the link '.*' leads out of '.*ADE ünd more', to '.*elsewhere"):
        sources.check(spec(root))
    os.unlink(path)  # noqa: PTH108  a link
    inside = root / "kept"
    elsewhere.rename(inside)
    path.symlink_to(inside)
    assert sources.check(spec(root)).train_samples == 4


def test_no_link_joins_the_splits(root: Path) -> None:
    (root / "images" / "training" / "more").symlink_to(root / "images" / "validation")
    with pytest.raises(RequestError, match=r"the link '.*more' leads to '.*validation', whose images are read already"):
        sources.check(spec(root))


def test_another_file_or_class_count_is_another_entry_of_the_cache(root: Path, cache: Path) -> None:
    sources.prepare(spec(root))
    sources.prepare(spec(root, classes=6))
    before = sources.check(spec(root)).fingerprint
    write_scene(root, "training", "ADE_train_0", blocks(8, 8, CLASSES, 5))
    assert sources.check(spec(root)).fingerprint != before
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 2
    # The labels of a smaller count were not looked at for a larger one.
    with pytest.raises(RequestError, match=r"and data.classes is 3"):
        sources.check(spec(root, classes=3))


@pytest.mark.parametrize(("key", "value"), [("channels", 1), ("dtype", "float32"), ("hf", "x"), ("md5", "x")])
def test_keys_that_mean_nothing_here_are_said(root: Path, key: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"data.{key} does not apply to the dataset 'ade20k'"):
        sources.check(spec(root, **{key: value}))
    with pytest.raises(RequestError, match=r"data.evaluation does not apply to the dataset 'digits'"):
        sources.check(DataSpec(name="digits", evaluation="sliding"))


@given(width=st.integers(1, 5000), height=st.integers(1, 5000), side=st.integers(4, 2000))
def test_a_scaled_picture_fits_and_keeps_its_proportions(width: int, height: int, side: int) -> None:
    small = size_within(width, height, side)
    if max(width, height) <= side:
        assert small == (width, height)
        return
    assert max(small) == side
    exact = min(width, height) * side / max(width, height)
    assert min(small) == max(1, int(exact + 0.5))
