"""Where pixels come from, broken images, and a cache that is resumed, repaired and built by processes."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from image_files import cache, encoded, fill, photograph
from vitscale import sources
from vitscale.errors import RequestError
from vitscale.sources import decoding, image_set
from vitscale.sources.arrays import ArrayShape
from vitscale.sources.base import ArraySplit, Images
from vitscale.sources.cache import chunk_samples, find
from vitscale.sources.image_folder import Files
from vitscale.sources.image_set import FileSplit
from vitscale.trial.trial import DataSpec

__all__ = ["cache"]


def spec(root: Path, **keys: Any) -> DataSpec:
    return DataSpec(name="folder", root=str(root), **{"source_size": 8, "held_out": 0.25, **keys})


@pytest.fixture
def images(tmp_path: Path) -> Path:
    fill(tmp_path / "images" / "ant", 12, 100)
    fill(tmp_path / "images" / "wölf hound", 12, 200)
    return tmp_path / "images"


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 images: 5 of them in the 18 images for training, 2 in the 6 held out."""
    monkeypatch.setattr("vitscale.sources.cache._CHUNK_BYTES", 4 * 8 * 8 * 3)


class Watched:
    """Stands before the decoder: which images were decoded; Ctrl-C comes before another than the first `stop_at`."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.stop_at: int | None = None
        self._decode = decoding.decode_image

    def __call__(self, encoded: Any, number: int, shape: ArrayShape) -> Images:
        if len(self.names) == self.stop_at:
            raise KeyboardInterrupt
        self.names.append(encoded.name(number))
        return self._decode(encoded, number, shape)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Watched:
    watched = Watched()
    monkeypatch.setattr(decoding, "decode_image", watched)
    return watched


def entry(cache: Path) -> Path:
    (only,) = [path for path in cache.iterdir() if path.is_dir()]
    return only


# --- where pixels come from ------------------------------------------------------------------------------------------


def test_every_source_gives_the_same_pixels(images: Path, cache: Path) -> None:
    pixels = {}
    for source in ("jpeg", "cache", "memory"):
        sources.prepare(spec(images, source=source))
        assert any(path.is_dir() for path in cache.iterdir()) == (source != "jpeg")
        dataset = sources.load(spec(images, source=source))
        assert isinstance(dataset.train, FileSplit) == (source == "jpeg")
        pixels[source] = dataset.train.take(np.arange(18))
        if source != "jpeg":
            assert isinstance(dataset.train, ArraySplit)
            assert isinstance(dataset.train.images.base, np.memmap) == (source == "cache")
    np.testing.assert_array_equal(pixels["jpeg"], pixels["cache"])
    np.testing.assert_array_equal(pixels["jpeg"], pixels["memory"])


def test_a_source_that_is_asked_for_is_not_replaced_by_another(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match=r"source = 'cache' needs 0\.0 GB in '.*file', which is full or cannot"):
        sources.load(spec(images, source="cache"), tmp_path / "file")
    monkeypatch.setattr(image_set, "MOST_CACHED_BYTES", 0)
    assert isinstance(sources.load(spec(images, source="cache")).train, ArraySplit)
    assert isinstance(sources.load(spec(images)).train, ArraySplit)  # small enough for memory
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Free", (), {"available": 4000}))
    with pytest.raises(RequestError, match=r"takes 0\.0 GB in each rank, and 0\.0 GB are free"):
        sources.load(spec(images, source="memory"))


@pytest.mark.parametrize(
    ("name", "key", "value", "says"),
    [
        ("digits", "source", "cache", "data.source does not apply to the dataset 'digits'"),
        ("synthetic", "skip_broken", 3, "data.skip_broken does not apply to the dataset 'synthetic'"),
        ("cifar10", "channels", 12, "data.channels does not apply to the dataset 'cifar10'"),
        (
            "synthetic",
            "classes",
            "names.txt",
            "data.classes of the dataset 'synthetic' is 'names.txt'. Valid: a number",
        ),
        ("digits", "columns", ("a", "b"), "data.columns does not apply"),
    ],
)
def test_keys_that_mean_nothing_to_a_source_are_said(name: str, key: str, value: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        sources.check(DataSpec.model_validate({"name": name, "root": "/", key: value}))


# --- broken images ---------------------------------------------------------------------------------------------------


def break_some(images: Path) -> list[Path]:
    """Two that their headers give away, and one that only decoding does."""
    empty, text, inside = (images / "ant" / f"{n:02d}.png" for n in (1, 5, 7))
    empty.write_bytes(b"")
    text.write_text("hello")
    content = bytearray(encoded(photograph()))
    content[len(content) // 2] ^= 0xFF
    inside.write_bytes(content)
    return [empty, text, inside]


def test_all_broken_images_are_named_at_once(images: Path, cache: Path) -> None:
    broken = break_some(images)
    with pytest.raises(RequestError) as caught:
        sources.check(spec(images))
    assert str(caught.value).startswith("2 images are broken: ")
    assert all(f"'{path}'" in str(caught.value) for path in broken[:2])
    assert "set data.skip_broken = 2 to leave them out" in str(caught.value)
    for path in broken[:2]:
        path.unlink()
    sources.check(spec(images))  # as far as headers tell
    with pytest.raises(RequestError, match=rf"the image '{broken[2]}' is broken"):
        sources.prepare(spec(images))
    assert [path for path in cache.iterdir() if path.suffix != ".lock"] == []


def test_the_size_by_default_is_told(images: Path) -> None:
    """A study of 224 pixels that does not name it would train on thumbnails, enlarged."""
    (note,) = sources.check(DataSpec(name="folder", root=str(images))).notes
    assert note.startswith("images are stored at 32 pixels a side, the default of data.source_size: a model")
    assert sources.check(spec(images)).notes == ()


def test_as_many_as_may_be_are_left_out_and_told(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sources.check(spec(images))
    broken = break_some(images)
    with pytest.raises(RequestError, match="3 images are broken"):
        sources.check(spec(images, skip_broken=2))
    summary = sources.check(spec(images, skip_broken=3))
    assert summary.train_samples + summary.held_out_samples == 21
    assert summary.fingerprint != whole.fingerprint
    (note,) = summary.notes
    assert note.startswith("3 broken image(s) left out: ")
    assert all(str(path) in note for path in broken)
    # What was found out is kept: no rank decodes everything again to know it.
    monkeypatch.setattr(decoding, "decode_square", lambda *_: pytest.fail("decoded again"))
    assert sources.check(spec(images, skip_broken=5)) == summary
    jpeg = sources.load(spec(images, skip_broken=3, source="jpeg"))
    assert jpeg.summary == summary
    monkeypatch.undo()
    taken = sources.load(spec(images, skip_broken=3, source="jpeg"))
    cached = sources.load(spec(images, skip_broken=3, source="cache"))
    ids = np.arange(summary.train_samples)
    np.testing.assert_array_equal(taken.train.take(ids), cached.train.take(ids))


def test_a_study_of_three_sources_looks_at_each_image_once(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    monkeypatch.setattr(decoding, "verify_picture", lambda content, name: looked.append(name))
    assert len({sources.check(spec(images, source=source)) for source in ("jpeg", "cache", "memory")}) == 1
    assert len(looked) == len(set(looked)) == 24


# --- the cache -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_chunks")
def test_an_interrupted_build_goes_on_where_it_was(
    images: Path, cache: Path, decoded: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = sources.load(spec(images), cache / "elsewhere").train.take(np.arange(18))
    decoded.names.clear()
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    decoded.stop_at = 10
    with pytest.raises(KeyboardInterrupt):
        sources.prepare(spec(images))
    assert len(decoded.names) == 10
    decoded.stop_at = None
    told: list[tuple[int, int]] = []
    sources.prepare(spec(images), lambda *done: told.append(done))
    assert len(decoded.names[10:]) == 24 - 8  # the two chunks that were whole are kept, half of the third is not
    assert told == [(12, 24), (16, 24), (18, 24), (22, 24), (24, 24)]
    np.testing.assert_array_equal(sources.load(spec(images)).train.take(np.arange(18)), expected)
    assert [path.name for path in cache.iterdir() if "partial" in path.name] == []


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("damaged", ["train_images", "train_labels"])
def test_what_has_changed_on_the_disk_is_found_and_built_again(
    images: Path, cache: Path, damaged: str, decoded: Watched
) -> None:
    sources.prepare(spec(images))
    before = sources.load(spec(images)).train
    expected, labels = before.take(np.arange(18)), before.labels.copy()
    file = entry(cache) / f"{damaged}.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # of the last image, in the chunk of two
    file.write_bytes(content)
    decoded.names.clear()
    sources.prepare(spec(images))
    assert len(decoded.names) == (2 if damaged == "train_images" else 0)
    after = sources.load(spec(images)).train
    np.testing.assert_array_equal(after.take(np.arange(18)), expected)
    np.testing.assert_array_equal(after.labels, labels)
    decoded.names.clear()
    sources.prepare(spec(images))
    assert decoded.names == []


@pytest.mark.usefixtures("small_chunks")
def test_a_journal_that_is_no_journal_is_done_without(images: Path, cache: Path) -> None:
    sources.prepare(spec(images))
    folder = entry(cache)
    key = folder.name
    partial = cache / f"{key}.{socket.gethostname()}.partial"
    folder.rename(partial)
    for journal in ("{", '["train", 0, 1]\n["nonsense"]', '["train", 10000, 3]'):
        (partial / "journal").write_text(journal)
        sources.prepare(spec(images))
        assert find(cache, key) is not None
        (cache / key).rename(partial)


def test_processes_decode_what_threads_do(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "FEWEST_FOR_PROCESSES", 1)
    monkeypatch.setattr("vitscale.sources.cache._CHUNK_BYTES", 4 * 16 * 16 * 3)
    for number in range(12):
        folder = tmp_path / "images" / f"class {number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.jpg").write_bytes(encoded(photograph(seed=number), "JPEG"))
    asked = spec(tmp_path / "images", source_size=16)
    told: list[tuple[int, int]] = []
    sources.prepare(asked, lambda *done: told.append(done))
    assert told[-1] == (12, 12)
    by_processes = sources.load(asked).train
    by_threads = sources.load(asked, cache / "elsewhere").train
    np.testing.assert_array_equal(by_processes.take(np.arange(9)), by_threads.take(np.arange(9)))
    facts = [json.loads(path.read_text()) for path in cache.rglob("facts.json")]
    assert facts[0] == facts[1]


def test_a_chunks_files_are_asked_for_before_the_first_is_decoded(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is gone is left to what decodes it."""
    paths = [*sorted(str(path) for path in images.rglob("*") if path.is_file())[:3], str(tmp_path / "gone.png")]
    happened: list[str] = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda file, *_: happened.append(str(Path(f"/proc/self/fd/{file}").readlink()))
    )
    monkeypatch.setattr(decoding, "_fill_chunk", lambda *_, **__: happened.append("decoded"))
    np.save(tmp_path / "pixels.npy", np.zeros((4, 16, 16, 3), np.uint8))
    decoding._fill_chunk_of_file(
        tmp_path / "pixels.npy", 0, Files(tuple(paths), np.zeros(4, np.int64)), ArrayShape(16, 3, "uint8")
    )
    assert happened == [*paths[:3], "decoded"]


def test_processes_name_every_broken_image(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "FEWEST_FOR_PROCESSES", 1)
    broken = break_some(images)
    with pytest.raises(RequestError) as caught:
        sources.prepare(spec(images, held_out=0.05))
    assert str(caught.value).startswith("3 images are broken: ")
    assert all(f"'{path}'" in str(caught.value) for path in broken)


def test_chunks_hold_64_mib_at_most_and_an_image_at_least() -> None:
    assert chunk_samples((256, 256, 3), "uint8") == 256
    assert chunk_samples((2048, 2048, 3), "uint8") == 5
    assert chunk_samples((2048, 2048, 12), "float32") == 1
