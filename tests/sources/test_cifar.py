"""CIFAR in the official layout: found, verified, decoded exactly; or refused with a reason."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cifar_factory import (
    STYLES,
    Style,
    images_of,
    malicious_pickles,
    md5_of,
    member,
    pack,
    pack_escaping,
    pickled,
    truncate,
    write_cifar10,
    write_cifar100,
)
from vitscale import sources
from vitscale.errors import RequestError
from vitscale.sources.cifar import CIFAR10, CIFAR100, Cifar, StoredFile
from vitscale.trial.trial import DataSpec


def spec(root: Path | str | None, name: str = "cifar10", **keys: Any) -> DataSpec:
    return DataSpec(name=name, root=None if root is None else str(root), **keys)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("VITSCALE_CACHE", str(folder))
    return folder


def rewrite(file: Path, **changes: Any) -> None:
    """One file of the dataset with other entries; None takes one away."""
    entries = pickle.loads(file.read_bytes(), encoding="latin1") | changes  # noqa: S301  made by this test
    file.write_bytes(pickled({key: value for key, value in entries.items() if value is not None}, "python2"))


@pytest.mark.parametrize("style", STYLES)
def test_pixels_and_labels_come_out_as_they_went_in(tmp_path: Path, style: Style) -> None:
    folder = write_cifar10(tmp_path, per_batch=20, seed=3, style=style)
    dataset = sources.load(spec(folder))
    rows, labels = images_of(10, 20, 301)  # of data_batch_2
    ids = np.arange(20, 40)
    taken = dataset.train.take(ids)
    assert taken.shape == (20, 32, 32, 3)
    assert taken.dtype == np.uint8
    assert dataset.train.labels[ids].tolist() == labels
    assert dataset.train.labels.dtype == np.int64
    for channel in range(3):
        plane = rows[7, channel * 1024 : (channel + 1) * 1024].reshape(32, 32)
        np.testing.assert_array_equal(taken[7, :, :, channel], plane)
    test_rows, test_labels = images_of(10, 20, 305)
    assert dataset.held_out.labels.tolist() == test_labels
    np.testing.assert_array_equal(dataset.held_out.take(np.array([5]))[0, :, :, 2].ravel(), test_rows[5, 2048:])


def test_the_summary_says_what_is_there(tmp_path: Path) -> None:
    summary = sources.check(spec(write_cifar10(tmp_path, per_batch=7)))
    assert (summary.train_samples, summary.held_out_samples) == (35, 7)
    assert summary.classes == CIFAR10.classes
    assert summary.image_shape == (32, 32, 3)
    assert "MD5 of data_batch_1" in summary.notes[0]
    assert sources.load(spec(tmp_path)).summary == summary


def test_cifar100_has_its_fine_classes(tmp_path: Path) -> None:
    dataset = sources.load(spec(write_cifar100(tmp_path, train=300, test=200), "cifar100"))
    assert (len(dataset.train), len(dataset.held_out), len(dataset.summary.classes)) == (300, 200, 100)
    assert dataset.train.labels.max() == 99
    assert dataset.summary.classes[99] == "worm"


@pytest.mark.parametrize("where", ["archive", "folder of archive", "unpacked", "folder of unpacked", "home"])
def test_every_way_to_point_at_it(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked = write_cifar10(tmp_path / "a", per_batch=3)
    if "archive" in where:
        archive = pack(unpacked).rename(tmp_path / "cifar-10-python.tar.gz")
    monkeypatch.setenv("HOME", str(tmp_path))
    roots: dict[str, Path | str] = {
        "archive": tmp_path / "cifar-10-python.tar.gz",
        "folder of archive": tmp_path,
        "unpacked": unpacked,
        "folder of unpacked": tmp_path / "a",
        "home": "~/a",
    }
    root = roots[where]
    keys = {"md5": md5_of(archive).upper()} if "archive" in where else {}
    assert sources.check(spec(root, **keys)).train_samples == 15
    assert len(sources.load(spec(root, **keys)).train) == 15


def test_an_archive_is_never_unpacked_and_check_writes_nothing(tmp_path: Path, cache: Path) -> None:
    unpacked = write_cifar10(tmp_path / "elsewhere", per_batch=3)
    (tmp_path / "data").mkdir()
    archive = pack(unpacked).rename(tmp_path / "data" / CIFAR10.archive)
    sources.check(spec(archive, verify=False))
    assert list(cache.iterdir()) == []
    sources.load(spec(archive, verify=False))
    assert list((tmp_path / "data").iterdir()) == [archive]


def test_another_md5_is_refused_unless_given_or_waived(tmp_path: Path) -> None:
    archive = pack(write_cifar10(tmp_path, per_batch=3))
    md5 = md5_of(archive)
    with pytest.raises(RequestError, match=rf"{md5}.*{CIFAR10.archive_md5}.*verify = false"):
        sources.check(spec(archive))
    with pytest.raises(RequestError, match=CIFAR10.archive_md5):
        sources.load(spec(archive))
    assert sources.check(spec(archive, md5=md5)).fingerprint == md5
    assert md5 in sources.check(spec(archive, verify=False)).notes[0]
    for verify in (True, False):
        with pytest.raises(RequestError, match=rf"{md5}, but data.md5 is {'0' * 32}"):
            sources.check(spec(archive, md5="0" * 32, verify=verify))


@pytest.mark.parametrize("md5", ["", "xyz", "0" * 31, "0" * 33, "g" * 32, "0" * 200_000])
def test_what_is_no_md5_is_refused(tmp_path: Path, md5: str) -> None:
    with pytest.raises(RequestError, match="32 hexadecimal digits") as caught:
        sources.check(spec(pack(write_cifar10(tmp_path, 2)), md5=md5))
    assert len(str(caught.value)) < 500


def test_an_md5_does_not_apply_to_an_unpacked_folder(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="unpacked folder"):
        sources.check(spec(write_cifar10(tmp_path, 2), md5="0" * 32))


def official(folder: Path) -> Cifar:
    """The source for which the files of `folder` and their archive are the official ones."""
    md5 = {name: md5_of(folder / name) for name in CIFAR10.files}
    layout = replace(
        CIFAR10,
        archive_md5=md5_of(pack(folder)),
        train_files={name: md5[name] for name in CIFAR10.train_files},
        held_out_files={name: md5[name] for name in CIFAR10.held_out_files},
        meta_file=StoredFile("batches.meta", md5["batches.meta"]),
    )
    return Cifar(layout)


def test_the_official_files_are_known_by_their_checksums_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_cifar10(tmp_path, 2)
    source = official(folder)
    monkeypatch.setattr("vitscale.sources.cifar.read_pickle", lambda *_: pytest.fail("parsed"))
    packed, unpacked = source.check(spec(tmp_path / CIFAR10.archive)), source.check(spec(folder))
    assert packed == unpacked
    assert (packed.train_samples, packed.held_out_samples, packed.notes) == (50_000, 10_000, ())
    assert packed.fingerprint == md5_of(tmp_path / CIFAR10.archive)
    rewrite(folder / "data_batch_2", batch_label="another")
    with pytest.raises(pytest.fail.Exception, match="parsed"):
        source.check(spec(folder))


def test_a_changed_file_has_another_fingerprint(tmp_path: Path) -> None:
    folder = write_cifar10(tmp_path, 2)
    before = sources.load(spec(folder))
    rewrite(folder / "data_batch_5", data=np.full((2, 3072), 77, np.uint8))
    after = sources.load(spec(folder))
    assert after.summary.fingerprint != before.summary.fingerprint
    assert (after.train.take(np.array([8])) == 77).all()


@pytest.mark.parametrize(
    ("root", "says"),
    [
        (None, "needs data.root"),
        ("", "needs data.root"),
        ("/no/such/folder", "does not exist"),
        ("/dev/null", "neither a file nor a folder"),
        ("~nobody-of-this-name/x", "data.root"),
        ("nul\0byte", "cannot look at"),
        ("x" * 200_000, "cannot look at"),
        ("EMPTY", "holds neither cifar-10-python.tar.gz nor cifar-10-batches-py"),
        ("OTHER", "holds cifar100, but data.name is 'cifar10'"),
    ],
)
def test_a_missing_dataset_is_refused(tmp_path: Path, root: str | None, says: str) -> None:
    (tmp_path / "EMPTY").mkdir()
    write_cifar100(tmp_path / "OTHER", 2, 2)
    before = contents(tmp_path)
    with pytest.raises(RequestError, match=says) as caught:
        sources.check(spec(tmp_path / root if root and root.isupper() else root))
    assert len(str(caught.value)) < 600
    assert contents(tmp_path) == before


def test_the_archive_of_the_other_dataset_is_refused(tmp_path: Path) -> None:
    archive = pack(write_cifar100(tmp_path, 5, 5))
    with pytest.raises(RequestError, match=r"lacks cifar-10-batches-py/batches\.meta"):
        sources.check(spec(archive, verify=False))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.95])
@pytest.mark.parametrize("action", [sources.check, sources.load])
def test_a_truncated_archive_is_refused(
    tmp_path: Path, cache: Path, share: float, action: Callable[[DataSpec], object]
) -> None:
    archive = truncate(pack(write_cifar10(tmp_path, 50)), share)
    with pytest.raises(RequestError, match="truncated"):
        action(spec(archive))
    with pytest.raises(RequestError, match="truncated"):
        action(spec(archive, verify=False))
    assert [path for path in cache.rglob("*") if path.suffix != ".lock"] == []


@pytest.mark.parametrize("name", list(CIFAR10.files))
def test_a_truncated_or_missing_file_is_named(tmp_path: Path, name: str) -> None:
    folder = write_cifar10(tmp_path, 5)
    truncate(folder / name)
    with pytest.raises(RequestError, match=rf"{name} is damaged"):
        sources.check(spec(folder))
    (folder / name).unlink()
    with pytest.raises(RequestError, match=f"lacks {name}"):
        sources.check(spec(folder))
    with pytest.raises(RequestError, match=f"lacks cifar-10-batches-py/{name}"):
        sources.check(spec(pack(folder), verify=False))


@pytest.mark.parametrize("bad", ["../outside", "/vitscale-outside", "cifar-10-batches-py/../../outside"])
def test_an_archive_that_would_write_outside_its_folder_is_refused(tmp_path: Path, bad: str) -> None:
    archive = pack_escaping(write_cifar10(tmp_path / "a", 2), member(bad, b"gotcha"))
    with pytest.raises(RequestError, match="outside its folder"):
        sources.check(spec(archive, md5=md5_of(archive)))
    assert not (tmp_path / "outside").exists()
    assert not Path("/vitscale-outside").exists()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["os.system", "eval", "nested in labels", "numpy object array"])
def test_a_malicious_pickle_is_refused_and_not_executed(tmp_path: Path, name: str, packed: bool) -> None:
    folder = write_cifar10(tmp_path / "data", 2)
    trace = tmp_path / "trace"
    (folder / "data_batch_4").write_bytes(malicious_pickles(trace)[name])
    chosen = spec(pack(folder), verify=False) if packed else spec(folder)
    for action in (sources.check, sources.load):
        with pytest.raises(RequestError, match="data_batch_4 was refused, and nothing in it was executed"):
            action(chosen)
    assert not trace.exists()


DATA = images_of(10, 3, 0)[0]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"data": None}, "'data' is not a uint8 array"),
        ({"data": [1, 2, 3]}, "'data' is not a uint8 array"),
        ({"data": DATA[:, :3071]}, "'data' is not a uint8 array"),
        ({"data": DATA[:2]}, "2 images and 3 labels"),
        ({"data": DATA[:0], "labels": []}, "0 images and 0 labels"),
        ({"labels": None}, "'labels' is not a list of integers"),
        ({"labels": ["a", "b", "c"]}, "'labels' is not a list of integers"),
        ({"labels": [0, 1]}, "3 images and 2 labels"),
        ({"labels": [0, 1, 10]}, "labels outside 0 to 9"),
        ({"labels": [0, -1, 1]}, "labels outside 0 to 9"),
    ],
)
def test_a_malformed_batch_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    folder = write_cifar10(tmp_path, 3)
    rewrite(folder / "test_batch", **changes)
    with pytest.raises(RequestError, match=rf"test_batch is malformed: .*{says}"):
        sources.check(spec(folder))


@pytest.mark.parametrize(
    "names", [None, [], ["a"] * 9, ["a"] * 11, [1] * 10, [""] * 10, ["x" * 101] * 10, "abcdefghij"]
)
def test_malformed_class_names_are_refused(tmp_path: Path, names: Any) -> None:
    folder = write_cifar10(tmp_path, 3)
    rewrite(folder / "batches.meta", label_names=names)
    with pytest.raises(RequestError, match=r"batches\.meta is malformed"):
        sources.check(spec(folder))


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    folder = write_cifar10(tmp_path, 2)
    os.truncate(folder / "data_batch_1", 1 << 40)  # sparse
    with pytest.raises(RequestError, match=r"1,099,511,627,776 bytes, more than any CIFAR file"):
        sources.check(spec(folder))


def test_the_layouts_are_complete() -> None:
    assert [len(layout.classes) for layout in (CIFAR10, CIFAR100)] == [10, 100]
    assert [len(set(layout.classes)) for layout in (CIFAR10, CIFAR100)] == [10, 100]
    assert list(CIFAR100.classes) == sorted(CIFAR100.classes)
    assert [len(layout.files) for layout in (CIFAR10, CIFAR100)] == [7, 3]
