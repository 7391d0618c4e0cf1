"""Folders of class folders: which images, which labels, which split; and every way they can be wrong."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from image_files import cache, fill, seen
from vitscale import sources
from vitscale.errors import RequestError
from vitscale.sources import decoding, image_set
from vitscale.sources.image_set import FileSplit
from vitscale.trial.trial import DataSpec

__all__ = ["cache"]


def spec(root: Path, **keys: Any) -> DataSpec:
    return DataSpec(name="folder", root=str(root), **{"source_size": 8, "held_out": 0.25, **keys})


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    fill(tmp_path / "images" / "wolf", 8, 200)
    fill(tmp_path / "images" / "ant", 16, 100)
    return tmp_path / "images"


@pytest.fixture
def divided(tmp_path: Path) -> Path:
    for part, count in (("train", 6), ("val", 3)):
        fill(tmp_path / "images" / part / "ant", count, 100)
        fill(tmp_path / "images" / part / "wolf", count, 200)
    return tmp_path / "images"


def test_classes_are_sorted_and_split_by_share(plain: Path) -> None:
    dataset = sources.load(spec(plain))
    assert dataset.summary.classes == ("ant", "wolf")
    assert dataset.summary.image_shape == (8, 8, 3)
    train, held_out = seen(dataset.train), seen(dataset.held_out)
    everything = {(0, 100, n) for n in range(16)} | {(1, 200, n) for n in range(8)}
    assert train | held_out == everything
    assert len(train) + len(held_out) == 24
    assert sorted(label for label, _, _ in held_out) == [0, 0, 0, 0, 1, 1]
    assert sources.check(spec(plain)) == dataset.summary


@pytest.mark.parametrize(
    ("train", "name"),
    [*(("train", name) for name in ("val", "valid", "validation", "test", "testing", "Val")),
     ("Train", "Test"), ("training", "validation")],
)  # fmt: skip
def test_its_own_split_is_used(divided: Path, train: str, name: str) -> None:
    (divided / "train").rename(divided / train)
    (divided / "val").rename(divided / name)
    dataset = sources.load(spec(divided))
    assert seen(dataset.train) == {(label, red, n) for label, red in ((0, 100), (1, 200)) for n in range(6)}
    assert seen(dataset.held_out) == {(label, red, n) for label, red in ((0, 100), (1, 200)) for n in range(3)}


@pytest.mark.parametrize("name", ["train", "training", "training/alone"])
def test_a_class_may_be_called_train(tmp_path: Path, name: str) -> None:
    fill(tmp_path / "plane", 4, 10)
    fill(tmp_path / name, 4, 20)
    assert sources.check(spec(tmp_path)).classes == ("plane", name.partition("/")[0])


def test_images_at_any_depth_and_of_any_case_but_nothing_else(plain: Path) -> None:
    (plain / "ant" / "more").mkdir()
    (plain / "ant" / "00.png").rename(plain / "ant" / "more" / "A.PNG")
    (plain / "ant" / "notes.txt").write_text("not an image")
    (plain / "ant" / ".hidden.png").write_text("not an image")
    (plain / ".cache").mkdir()
    fill(plain / "ant" / ".ipynb_checkpoints", 4, 100)
    (plain / "README").write_text("not a class")
    (plain / "ant" / "dangling").symlink_to("/nowhere")
    assert seen(sources.load(spec(plain)).train) | seen(sources.load(spec(plain)).held_out) >= {(0, 100, 0)}
    assert sources.check(spec(plain)).train_samples == 18


def test_an_entry_is_reused_until_a_file_changes(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sources.load(spec(plain)).summary
    with monkeypatch.context() as patch:
        patch.setattr(decoding, "decode_square", lambda *_: pytest.fail("decoded again"))
        patch.setattr(decoding, "verify_picture", lambda *_: pytest.fail("opened again"))
        assert sources.load(spec(plain)).summary == before
        assert sources.check(spec(plain)) == before
    Image.new("RGB", (30, 30), (50, 60, 0)).save(plain / "ant" / "00.png")
    after = sources.load(spec(plain))
    assert after.summary.fingerprint != before.fingerprint
    assert (0, 50, 60) in seen(after.train) | seen(after.held_out)


def test_the_same_files_have_the_same_fingerprint_whatever_is_asked(plain: Path, divided: Path) -> None:
    of = {
        sources.check(spec(divided, source_size=size, held_out=share)).fingerprint
        for size in (8, 9)
        for share in (0.2, 0.4)
    }
    assert len(of) == 1
    sizes = {size: sources.load(spec(divided, source_size=size)).train.take(np.array([0])).shape for size in (8, 9)}
    assert sizes == {8: (1, 8, 8, 3), 9: (1, 9, 9, 3)}


def test_moving_images_between_splits_changes_the_fingerprint(divided: Path) -> None:
    before = sources.check(spec(divided)).fingerprint
    (divided / "train").rename(divided / "x")
    (divided / "val").rename(divided / "train")
    (divided / "x").rename(divided / "val")
    assert sources.check(spec(divided)).fingerprint != before


def test_moving_the_last_image_to_the_other_split_changes_the_fingerprint(divided: Path) -> None:
    """Though the list of places reads the same."""
    shutil.rmtree(divided / "val" / "ant")
    for number in range(3):
        (divided / "val" / "wolf" / f"{number:02d}.png").rename(divided / "val" / "wolf" / f"{number + 6:02d}.png")
    before = sources.check(spec(divided)).fingerprint
    (divided / "train" / "wolf" / "05.png").rename(divided / "val" / "wolf" / "05.png")
    assert sources.check(spec(divided)).fingerprint != before


def test_a_file_of_the_same_size_but_changed_is_decoded_again(plain: Path) -> None:
    before = sources.check(spec(plain)).fingerprint
    os.utime(plain / "ant" / "00.png", ns=(1, 1))
    assert sources.check(spec(plain)).fingerprint != before


def test_the_order_of_the_file_system_does_not_matter(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sources.load(spec(plain))
    walk = os.walk
    monkeypatch.setattr(os, "walk", lambda *a, **k: ((top, dirs, names[::-1]) for top, dirs, names in walk(*a, **k)))
    after = sources.load(spec(plain), plain)
    assert after.summary == before.summary
    ids = np.arange(18)
    np.testing.assert_array_equal(after.train.take(ids), before.train.take(ids))


@pytest.mark.parametrize("limits", [(0, 0), (0, 1 << 30)])
def test_too_many_for_the_cache_are_the_same_images(
    plain: Path, cache: Path, limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = sources.load(spec(plain))
    for path in cache.iterdir():
        path.rename(cache.parent / f"{cache.name}-{path.name}")
    monkeypatch.setattr(image_set, "MOST_CACHED_BYTES", limits[0])
    monkeypatch.setattr(image_set, "MOST_MEMORY_BYTES", limits[1])
    found = sources.load(spec(plain))
    assert isinstance(found.train, FileSplit) == (limits == (0, 0))
    assert list(cache.iterdir()) == []
    assert found.summary == expected.summary
    for ours, theirs in ((found.train, expected.train), (found.held_out, expected.held_out)):
        ids = np.arange(len(theirs))[::-1].copy()
        np.testing.assert_array_equal(ours.take(ids), theirs.take(ids))
        np.testing.assert_array_equal(ours.labels, theirs.labels)
        with pytest.raises(IndexError):
            ours.take(np.array([len(theirs)]))


def test_an_unwritable_cache_is_done_without(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert seen(sources.load(spec(plain), tmp_path / "file").train) == seen(sources.load(spec(plain)).train)


@pytest.mark.parametrize("damage", ["empty", "text", "truncated"])
def test_a_broken_image_is_named_before_anything_starts(plain: Path, cache: Path, damage: str) -> None:
    victim = plain / "wolf" / "03.png"
    content = victim.read_bytes()
    victim.write_bytes({"empty": b"", "text": b"hello", "truncated": content[:-20]}[damage])
    for action in (sources.check, sources.load):
        with pytest.raises(RequestError, match=rf"{victim}' is broken"):
            action(spec(plain))
    assert [path for path in cache.iterdir() if path.suffix != ".lock"] == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda root: root.rename(f"{root}-away"), "does not exist"),
        (lambda root: (root / "ant").rename(root / ".ant"), "has 1 class folders; at least 2"),
        (lambda root: (root / "zebra").mkdir(), r"zebra' holds no image. Valid: \.bmp"),
        (lambda root: (root / "ant" / "x.png").symlink_to("/nowhere"), r"cannot read '.*x\.png'"),
        (lambda root: (root / "ant" / "x.png").mkdir(), None),
        (lambda root: os.mkfifo(root / "ant" / "x.png"), None),
    ],
    ids=["absent", "one class", "empty class", "dangling link", "folder like an image", "pipe like an image"],
)
def test_a_folder_that_does_not_fit(plain: Path, change: Any, says: str | None) -> None:
    change(plain)
    if says is None:
        assert sources.check(spec(plain)).train_samples == 18
    else:
        with pytest.raises(RequestError, match=says):
            sources.check(spec(plain))


def test_no_root_and_a_file_as_root(plain: Path) -> None:
    with pytest.raises(RequestError, match=r"needs data\.root"):
        sources.check(DataSpec(name="folder"))
    with pytest.raises(RequestError, match="is not a folder"):
        sources.check(spec(plain / "ant" / "00.png"))


def test_held_out_classes_must_be_trained(divided: Path) -> None:
    fill(divided / "val" / "bear", 1, 30)
    with pytest.raises(RequestError, match="has the class 'bear', which is not among the training classes"):
        sources.check(spec(divided))


def test_an_empty_held_out_split_is_refused(divided: Path) -> None:
    for name in ("ant", "wolf"):
        (divided / "val" / name).rename(divided / f"{name}-away")
    with pytest.raises(RequestError, match="val' has no class folders"):
        sources.check(spec(divided))


def test_one_image_for_each_class_leaves_nothing_to_hold_out(tmp_path: Path) -> None:
    fill(tmp_path / "a", 1, 1)
    fill(tmp_path / "b", 1, 2)
    with pytest.raises(RequestError, match="one image for each class"):
        sources.check(spec(tmp_path))


def test_names_that_are_not_text_are_shown_as_far_as_they_are(plain: Path) -> None:
    (plain / "ant").rename(plain / os.fsdecode(b"\xff\xfe"))
    classes = sources.load(spec(plain)).summary.classes
    assert classes == ("wolf", "\ufffd\ufffd")
    assert "".join(classes).encode()


# --- which classes, and links ---------------------------------------------------------------------------------------


def test_the_named_classes_alone_are_read(divided: Path, tmp_path: Path) -> None:
    fill(divided / "train" / "bear cub", 5, 50)
    fill(divided / "val" / "bear cub", 2, 50)
    everything = sources.check(spec(divided))
    some = sources.load(spec(divided, classes=("wolf", "bear cub")))
    assert some.summary.classes == ("bear cub", "wolf")
    assert seen(some.train) == {(0, 50, n) for n in range(5)} | {(1, 200, n) for n in range(6)}
    assert seen(some.held_out) == {(0, 50, n) for n in range(2)} | {(1, 200, n) for n in range(3)}
    assert some.summary.fingerprint != everything.fingerprint
    # A line may go on after the class: "n01440764 tench".
    assert sources.check(spec(divided, classes=("wolf timber wolf", "wolf x", "ant y"))).classes == ("ant", "wolf")


@pytest.mark.parametrize(
    ("classes", "says"),
    [
        (("ant", "wulf", "bear"), r"names 'wulf' \(and 1 more\).*no such class.*Did you mean 'wolf'"),
        (("ant", "ant x"), "has 1 class folders; at least 2"),
        ("classes.txt", "names 'classes.txt'"),
    ],
)
def test_classes_that_are_not_there(plain: Path, classes: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        sources.check(spec(plain, classes=classes))


@pytest.mark.parametrize("linked", ["ant/out.png", "bear"])
def test_a_link_out_of_the_folder_is_refused_by_name(plain: Path, tmp_path: Path, linked: str) -> None:
    fill(tmp_path / "elsewhere", 2, 1)
    target = tmp_path / "elsewhere" / "00.png" if "." in linked else tmp_path / "elsewhere"
    (plain / linked).symlink_to(target)
    with pytest.raises(RequestError, match=rf"the link '.*{linked}' leads out of .*elsewhere"):
        sources.check(spec(plain))


def test_links_within_the_folder_and_to_it_are_followed(plain: Path, tmp_path: Path) -> None:
    (plain / "ant" / "again.png").symlink_to(plain / "ant" / "00.png")
    (tmp_path / "link").symlink_to(plain)
    assert sources.check(spec(tmp_path / "link")).train_samples == 19
    fill(plain / ".store" / "more", 17, 1)
    (plain / "wolf" / "ants").symlink_to(plain / ".store")
    assert sources.check(spec(tmp_path / "link")).train_samples == 32  # three quarters of 17 + 8 + 17


@pytest.mark.parametrize("target", ["ant", "ant/deep", ".", "wolf", ".store"])
def test_no_image_is_read_twice_through_a_link(plain: Path, target: str) -> None:
    """It may be trained on and held out: its own folder's, one inside or around it, another class's, another link's."""
    fill(plain / "ant" / "deep", 2, 1)
    fill(plain / ".store", 2, 1)
    (plain / "ant" / "again").symlink_to(plain / ".store")
    (plain / "ant" / "latest").symlink_to(plain / target)
    with pytest.raises(RequestError, match=r"the link '.*/ant/(again|latest)' leads to '.*', whose images are read"):
        sources.check(spec(plain))


@pytest.mark.parametrize(("link", "target"), [("val/a/more", "train/a"), ("train/a/more", "val/b")])
def test_no_link_joins_the_splits(tmp_path: Path, link: str, target: str) -> None:
    for name in ("train/a", "train/b", "val/a", "val/b"):
        fill(tmp_path / name, 4, 1)
    assert sources.check(spec(tmp_path)).train_samples == 8
    (tmp_path / link).symlink_to(tmp_path / target)
    with pytest.raises(RequestError, match=r"the link '.*more' leads to '.*', whose images are read already"):
        sources.check(spec(tmp_path))


def test_a_class_may_be_called_train_in_capitals(tmp_path: Path) -> None:
    for name in ("Train", "Bus", "Car"):
        for kind in ("old", "new"):
            fill(tmp_path / name / kind, 4, 1)
    assert sources.check(spec(tmp_path)).classes == ("Bus", "Car", "Train")
