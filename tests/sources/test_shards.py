"""Tar files in WebDataset's layout: the images and labels that were put in come out, read in place; damage is named."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from image_files import cache, encoded, seen, write_tar
from vitscale import sources
from vitscale.errors import RequestError
from vitscale.trial.trial import DataSpec

__all__ = ["cache"]

opened = tarfile.open


def spec(root: Path, **keys: Any) -> DataSpec:
    return DataSpec(name="shards", root=str(root), **{"source_size": 8, "held_out": 0.25, **keys})


def sample(key: str, red: int, green: int, label: str) -> dict[str, bytes]:
    return {f"{key}.png": encoded(Image.new("RGB", (12, 12), (red, green, 0))), f"{key}.cls": label.encode()}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Two shards of six samples of the classes 2 and 10, and a held-out one of four."""
    for shard in range(2):
        members: dict[str, bytes] = {}
        for n in range(6):
            members |= sample(f"part 1/ü{shard}{n:03}", n % 2, 10 * shard + n, ("2", "10\n")[n % 2])
        write_tar(tmp_path / "shards" / f"train-{shard:04}.tar", members)
    held_out = [sample(f"{n}", n % 2, 100 + n, ("2", "10")[n % 2]) for n in range(4)]
    write_tar(tmp_path / "shards" / "val-0000.tar", {name: c for one in held_out for name, c in one.items()})
    return tmp_path / "shards"


def test_what_was_put_in_comes_out(shards: Path) -> None:
    for source in ("jpeg", "cache"):
        dataset = sources.load(spec(shards, source=source))
        assert dataset.summary.classes == ("2", "10")  # numbers are in their own order
        assert seen(dataset.train) == {(n % 2, n % 2, 10 * shard + n) for shard in range(2) for n in range(6)}
        assert seen(dataset.held_out) == {(n % 2, n % 2, 100 + n) for n in range(4)}
        assert sources.check(spec(shards, source=source)) == dataset.summary


def test_a_pipe_called_a_shard_is_none(shards: Path) -> None:
    """Whoever opens it waits for ever."""
    whole = sources.check(spec(shards))
    os.mkfifo(shards / "train-0002.tar")
    assert sources.check(spec(shards)) == whole


def test_folders_of_shards_and_shares_of_one(shards: Path) -> None:
    in_one = sources.check(spec(shards))
    for name in ("train", "val"):
        (shards / name).mkdir()
        for path in shards.glob(f"{name}-*.tar"):
            path.rename(shards / name / path.name)
    apart = sources.load(spec(shards))
    assert (apart.summary.train_samples, apart.summary.held_out_samples) == (12, 4)
    assert apart.summary.classes == in_one.classes
    alone = sources.load(spec(shards / "train"))
    assert (alone.summary.train_samples, alone.summary.held_out_samples) == (9, 3)


def test_labels_of_json_and_named_classes(tmp_path: Path) -> None:
    members: dict[str, bytes] = {}
    for n, kind in enumerate(["cat", "dog", "cow"] * 3):
        members |= {f"{n}.jpg": encoded(Image.new("RGB", (9, 9), (n, 0, 0)), "JPEG"), f"{n}.txt": b"a caption"}
        members |= {f"{n}.json": f'{{"label": "{kind}", "size": 9}}'.encode()}
    write_tar(tmp_path / "x.tar", members)
    assert sources.check(spec(tmp_path)).classes == ("cat", "cow", "dog")
    some = sources.check(spec(tmp_path, classes=("dog", "cat")))
    assert (some.classes, some.train_samples + some.held_out_samples) == (("cat", "dog"), 6)


def test_the_fingerprint_follows_the_files(shards: Path) -> None:
    before = sources.check(spec(shards)).fingerprint
    assert sources.check(spec(shards)).fingerprint == before
    write_tar(shards / "train-0001.tar", sample("a", 0, 1, "2") | sample("b", 1, 1, "10"))
    assert sources.check(spec(shards)).fingerprint != before


def test_a_broken_image_is_named_with_its_shard(shards: Path) -> None:
    members = sample("good", 0, 1, "2") | sample("bad x", 1, 2, "10") | {"worse.png": b"", "worse.cls": b"2"}
    members["bad x.png"] = b"no image"
    write_tar(shards / "train-0001.tar", members)
    with pytest.raises(RequestError, match=r"2 images are broken: '.*train-0001\.tar/bad x\.png'.*tar/worse\.png'"):
        sources.check(spec(shards))
    assert sources.check(spec(shards, skip_broken=2)).train_samples == 7


def link_in(path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        member = tarfile.TarInfo("x.jpg")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(member)


def twice(path: Path) -> None:
    write_tar(path, {"x.jpg": b"x", "x.png": b"x"})


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:700]), "train-0000.tar' is damaged"),
        (lambda path: path.write_bytes(b"hello" * 300), "is damaged"),
        (lambda path: write_tar(path, {"x.jpg": b"1"}), r"'x\.jpg' has no \.cls or \.json beside it"),
        (lambda path: write_tar(path, {"x.jpg": b"1", "x.cls": b""}), r"member 'x\.cls' tells no class"),
        (lambda path: write_tar(path, {"x.jpg": b"1", "x.json": b"[1, "}), r"member 'x\.json' tells no class"),
        (link_in, "is a link or a device"),
        (twice, r"holds 'x\.jpg' and 'x\.png', one sample's"),
    ],
    ids=["truncated", "text", "no label", "empty label", "no json", "link", "twice"],
)
def test_a_damaged_shard_is_named(shards: Path, damage: Any, says: str) -> None:
    damage(shards / "train-0000.tar")
    with pytest.raises(
        RequestError, match=rf"the shard '.*train-0000\.tar' is damaged.*{says.split('is damaged')[-1]}"
    ):
        sources.check(spec(shards))


def test_no_link_joins_the_splits(shards: Path) -> None:
    for split in ("train", "val"):
        (shards / split).mkdir()
        (shards / f"{split}-0000.tar").rename(shards / split / "0000.tar")
    assert sources.check(spec(shards)).train_samples > 0
    (shards / "val" / "more").symlink_to(shards / "train")
    with pytest.raises(RequestError, match=r"the link '.*more' leads to '.*train', whose images are read already"):
        sources.check(spec(shards))


def test_a_shard_that_lies_elsewhere_and_none_at_all(shards: Path, tmp_path: Path) -> None:
    (shards / "val-0000.tar").rename(tmp_path / "val-0000.tar")
    (shards / "val-0000.tar").symlink_to(tmp_path / "val-0000.tar")
    with pytest.raises(RequestError, match=r"the link '.*val-0000\.tar' leads out of"):
        sources.check(spec(shards))
    (tmp_path / "empty").mkdir()
    with pytest.raises(RequestError, match=r"empty' holds no shard \(\*\.tar\)"):
        sources.check(spec(tmp_path / "empty"))


def test_a_class_that_is_held_out_must_be_trained(shards: Path) -> None:
    write_tar(shards / "val-0000.tar", sample("new", 0, 1, "7"))
    with pytest.raises(
        RequestError, match=r"has the class '7' \('new\.png'\), which is not among the training classes"
    ):
        sources.check(spec(shards))


def test_many_samples_are_remembered_until_a_shard_changes(
    shards: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitscale.sources.shards.FEWEST_REMEMBERED", 5)
    before = sources.check(spec(shards))
    (index,) = [path for path in cache.iterdir() if path.name.endswith(".index.json")]  # of the twelve, not of the four
    with monkeypatch.context() as patch:
        patch.setattr("tarfile.open", lambda path, **_: pytest.fail("read") if "train" in path else opened(path))
        assert sources.check(spec(shards)) == before
    for nonsense in (
        "[",
        "[[1]]",
        json.dumps([[9, "x.png", 0, 5, 0, "2"]]),
        json.dumps([[0, "x.png", "0", 5, 0, "2"]]),
    ):
        index.write_text(nonsense)
        assert sources.check(spec(shards)) == before
    write_tar(shards / "train-0001.tar", sample("a", 0, 1, "2") | sample("b", 1, 1, "10"))
    assert sources.check(spec(shards)).train_samples == 8


def test_an_index_reads_no_image(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = sources.load(spec(shards, source="jpeg")).train
    monkeypatch.setattr("os.pread", lambda *_: pytest.fail("read"))
    assert len(sources.load(spec(shards, source="jpeg")).train) == len(listing) == 12
    assert np.array_equal(listing.labels, [0, 1] * 6)
