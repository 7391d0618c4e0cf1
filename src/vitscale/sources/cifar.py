"""Reads CIFAR-10 and CIFAR-100 from the official python-version archives, packed or unpacked.

What these contain is from https://www.cs.toronto.edu/~kriz/cifar.html: Alex Krizhevsky, "Learning Multiple Layers of
Features from Tiny Images", 2009. The MD5 of the archives are published there; those of the files are of their members.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitscale.errors import RequestError, shown
from vitscale.sources import base
from vitscale.sources.base import Dataset, Images, Labels, Summary
from vitscale.sources.cache import Room, cached, in_memory
from vitscale.sources.download import fetch, read_members
from vitscale.sources.restricted_pickle import read_pickle
from vitscale.trial.trial import DataSpec


class StoredFile(NamedTuple):
    """A file of an archive."""

    name: str
    md5: str


@dataclass(frozen=True)
class ArchiveLayout:
    """Names, checksums and keys of one of the two archives."""

    name: str
    archive: str
    url: str
    archive_md5: str
    folder: str
    train_files: Mapping[str, str]
    """File name -> MD5."""
    held_out_files: Mapping[str, str]
    meta_file: StoredFile
    """The file of class names."""
    label_key: str
    class_names_key: str
    classes: tuple[str, ...]

    @property
    def files(self) -> dict[str, str]:
        """File name -> MD5 of every file that is read."""
        return {**self.train_files, **self.held_out_files, self.meta_file.name: self.meta_file.md5}


TRAIN_SAMPLES = 50_000
HELD_OUT_SAMPLES = 10_000
IMAGE_SHAPE = (32, 32, 3)
MOST_BYTES = 256 << 20
"""Most bytes of an archive and of its content; officially 170,498,071 and 169,001,437, unpacked about 186 MB."""

_CIFAR100_CLASSES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""

CIFAR10 = ArchiveLayout(
    name="cifar10",
    archive="cifar-10-python.tar.gz",
    url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    archive_md5="c58f30108f718f92721af3b95e74349a",
    folder="cifar-10-batches-py",
    train_files={
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    },
    held_out_files={"test_batch": "40351d587109b95175f43aff81a1287e"},
    meta_file=StoredFile("batches.meta", "5ff9c542aee3614f3951f8cda6e48888"),
    label_key="labels",
    class_names_key="label_names",
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
)

CIFAR100 = ArchiveLayout(
    name="cifar100",
    archive="cifar-100-python.tar.gz",
    url="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
    archive_md5="eb9058c3a382ffc7106e4002c42a8d85",
    folder="cifar-100-python",
    train_files={"train": "16019d7e3df5f24257cddd939b257f8d"},
    held_out_files={"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
    meta_file=StoredFile("meta", "7973b15100ade9c7d40fb424638fde48"),
    label_key="fine_labels",
    class_names_key="fine_label_names",
    classes=tuple(_CIFAR100_CLASSES.split()),
)

_LONGEST_CLASS_NAME = 100


@dataclass(frozen=True)
class _CifarFiles:
    """The files of a dataset, and what their checksums say."""

    fingerprint: str
    """The archive's MD5, also of its files unpacked; another digest of unpacked files that differ from them."""
    notes: tuple[str, ...]
    read: Callable[[], Mapping[str, bytes]]
    """Reads the contents by file name (without folder)."""


@dataclass(frozen=True)
class Cifar:
    """The datasets `cifar10` and `cifar100`."""

    layout: ArchiveLayout

    def check(self, spec: DataSpec) -> Summary:
        """Compares checksums if the files are the official ones; otherwise reads and verifies every file."""
        files = self._find_files(spec)
        if files.fingerprint == self.layout.archive_md5:
            return Summary(
                train_samples=TRAIN_SAMPLES,
                held_out_samples=HELD_OUT_SAMPLES,
                classes=self.layout.classes,
                image_shape=IMAGE_SHAPE,
                fingerprint=files.fingerprint,
                notes=files.notes,
            )
        return in_memory(partial(_fill_splits, self.layout, files)).dataset(files.fingerprint, files.notes).summary

    def load(self, spec: DataSpec, cache_root: Path) -> Dataset:
        """See `Source.load`."""
        files = self._find_files(spec)
        build = partial(_fill_splits, self.layout, files)
        decoded = cached(cache_root, f"{self.layout.name}-{files.fingerprint}", build) or in_memory(build)
        return decoded.dataset(files.fingerprint, files.notes)

    def _find_files(self, spec: DataSpec) -> _CifarFiles:
        """Finds the archive or the unpacked folder, downloading the archive if that is asked for, and its checksums.

        Raises:
            RequestError: there is neither, or another file than is expected.
        """
        base.refuse_other_keys(spec, ("md5", "download"))
        expected_md5 = _md5_of(spec)
        path = self._locate(spec)
        if base.kind_of(path) == "folder":
            if expected_md5 is not None:
                what = f"data.md5 is the checksum of an archive, but {shown(str(path))} is an unpacked folder"
                raise RequestError(what, next_step=f"Remove md5, or point data.root at {self.layout.archive}")
            return _unpacked_files(self.layout, path)
        return _archive_files(self.layout, path, expected_md5, spec.verify)

    def _locate(self, spec: DataSpec) -> Path:
        """Returns the path of the archive or of the unpacked folder; without either it may be downloaded.

        Raises:
            RequestError: neither exists, and `spec.download` does not ask for it.
        """
        layout = self.layout
        root = base.root_of(spec) or base.default_cache_root() / "archives"
        names_archive = root.name.endswith((".tar.gz", ".tgz"))
        kind = base.kind_of(root)
        if kind == "file":
            return root
        if kind == "other":
            raise RequestError(
                f"data.root {shown(str(root))} is neither a file nor a folder", next_step=self._layout_advice()
            )
        if kind == "folder":
            if base.kind_of(root / layout.archive) == "file":
                return root / layout.archive
            for folder in (root, root / layout.folder):
                if any(base.kind_of(folder / name) for name in layout.files):
                    return folder
        if spec.download:
            target = root if names_archive else root / layout.archive
            md5 = _md5_of(spec) or (layout.archive_md5 if spec.verify else None)
            fetch(layout.url, target, md5=md5, most_bytes=MOST_BYTES)
            return target
        raise RequestError(self._missing_message(spec, root, kind is None), next_step=self._layout_advice())

    def _missing_message(self, spec: DataSpec, root: Path, is_absent: bool) -> str:
        """Returns the message where there are no files; `is_absent`: nothing lies at `root`."""
        layout = self.layout
        if not spec.root:
            return f"the dataset '{layout.name}' needs data.root: the folder its archive is in"
        if is_absent:
            return f"data.root {shown(str(root))} does not exist"
        for other in (CIFAR10, CIFAR100):
            signs = (root / other.archive, root / other.folder, *(root / name for name in other.train_files))
            if other.name != layout.name and any(map(base.kind_of, signs)):
                return f"data.root {shown(str(root))} holds {other.name}, but data.name is '{layout.name}'"
        return f"data.root {shown(str(root))} holds neither {layout.archive} nor {layout.folder}"

    def _layout_advice(self) -> str:
        """Returns what data.root has to be."""
        layout = self.layout
        return (
            f"Set data.root to {layout.archive}, to the unpacked {layout.folder}, or to the folder of either, "
            f"or set data.download = true; the archive is at {layout.url}"
        )


def _md5_of(spec: DataSpec) -> str | None:
    """Returns the archive's MD5 that the study expects, in lower case; None where it names none."""
    if spec.md5 is None:
        return None
    if not re.fullmatch("[0-9a-fA-F]{32}", spec.md5):
        raise RequestError(
            f"data.md5 {shown(spec.md5)} is not an MD5 checksum",
            valid=["32 hexadecimal digits"],
            next_step="Write down what md5sum prints for the archive",
        )
    return spec.md5.lower()


def _file_md5(path: Path) -> str:
    """Returns the MD5 of a file of at most `MOST_BYTES`."""
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            what = f"{shown(str(path))} has {size:,} bytes, more than any CIFAR file ({MOST_BYTES:,} at most)"
            raise RequestError(what, next_step="Point data.root at the CIFAR archive")
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> RequestError:
    """Returns the error for a file or folder that cannot be read."""
    return RequestError(f"cannot read {shown(str(path))}: {base.reason(error)}")


def _archive_files(layout: ArchiveLayout, path: Path, expected_md5: str | None, verify: bool) -> _CifarFiles:
    """Opens an archive.

    Args:
        layout: the official one.
        path: the archive's path.
        expected_md5: the MD5 that it must have.
        verify: whether it must be the official one, where no MD5 is expected.

    Raises:
        RequestError: it is another archive, or cannot be read.
    """
    md5 = _file_md5(path)
    if expected_md5 is not None and md5 != expected_md5:
        what = f"{shown(str(path))} has the MD5 {md5}, but data.md5 is {expected_md5}"
        raise RequestError(what, next_step="Get the archive again, or correct md5")
    is_official = md5 == layout.archive_md5
    if not is_official and expected_md5 is None and verify:
        raise RequestError(
            f"{shown(str(path))} has the MD5 {md5}, but the official {layout.archive} has "
            f"{layout.archive_md5}: it is truncated, corrupt or another archive",
            next_step=f"Get it again from {layout.url}; for an archive of your own set "
            f'data.md5 = "{md5}" or data.verify = false',
        )
    notes = () if is_official else (f"not the official {layout.archive}: its MD5 is {md5}",)

    def read() -> Mapping[str, bytes]:
        name_by_member = {f"{layout.folder}/{name}": name for name in layout.files}
        contents = read_members(path, name_by_member, MOST_BYTES)
        return {name_by_member[member]: content for member, content in contents.items()}

    return _CifarFiles(md5, notes, read)


def _unpacked_files(layout: ArchiveLayout, folder: Path) -> _CifarFiles:
    """Reads an unpacked folder. Files of users may differ from the official ones: that gives a note, no refusal."""
    missing = [name for name in layout.files if base.kind_of(folder / name) != "file"]
    if missing:
        raise RequestError(
            f"the folder {shown(str(folder))} lacks {', '.join(missing)}", next_step=f"Unpack {layout.archive} again"
        )
    md5_by_name = {name: _file_md5(folder / name) for name in layout.files}
    differing = [name for name, md5 in layout.files.items() if md5_by_name[name] != md5]
    fingerprint = layout.archive_md5  # the same content as the archive
    notes: tuple[str, ...] = ()
    if differing:
        listing = "".join(f"{md5}  {name}\n" for name, md5 in sorted(md5_by_name.items()))
        fingerprint = hashlib.sha256(listing.encode()).hexdigest()
        notes = (f"not the official files: the MD5 of {', '.join(differing)} differs",)

    def read() -> Mapping[str, bytes]:
        try:
            return {name: (folder / name).read_bytes() for name in layout.files}
        except OSError as error:
            raise _unreadable(folder, error) from None

    return _CifarFiles(fingerprint, notes, read)


def _fill_splits(layout: ArchiveLayout, files: _CifarFiles, room: Room) -> tuple[str, ...]:
    """Reads and verifies every file, and fills both splits."""
    contents = files.read()
    classes = _class_names(layout, contents[layout.meta_file.name])
    for split, names in (("train", layout.train_files), ("held_out", layout.held_out_files)):
        files_of_split = [_decode_file(layout, name, contents[name], len(classes)) for name in names]
        images, labels = room(split, sum(len(file.labels) for file in files_of_split), IMAGE_SHAPE)
        np.concatenate([file.images for file in files_of_split], out=images)
        np.concatenate([file.labels for file in files_of_split], out=labels)
    return classes


class _DecodedFile(NamedTuple):
    """The content of one file."""

    images: Images
    """uint8 `[n, 32, 32, 3]`."""
    labels: Labels
    """int64 `[n]`."""


def _decode_file(layout: ArchiveLayout, name: str, content: bytes, classes: int) -> _DecodedFile:
    """Reads one file, whose labels are less than `classes`; refuses anything else than images and labels."""
    entries = read_pickle(content, name)
    data = entries.get("data")
    if not isinstance(data, np.ndarray) or not _is_image_array(data):
        raise _malformed(name, "'data' is not a uint8 array of [images, 3072]")
    labels = _labels(name, layout.label_key, entries.get(layout.label_key))
    if len(labels) != len(data) or not len(data):
        raise _malformed(name, f"it has {len(data):,} images and {len(labels):,} labels")
    if labels.min() < 0 or labels.max() >= classes:
        raise _malformed(name, f"it has labels outside 0 to {classes - 1}")
    # A row is the red, then the green, then the blue plane of an image.
    return _DecodedFile(data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels)


def _is_image_array(data: NDArray[Any]) -> bool:
    """Whether an array is uint8 [images, 3 x 32 x 32]."""
    return data.dtype == np.uint8 and data.ndim == 2 and data.shape[1] == 3072


def _labels(name: str, key: str, value: Any) -> Labels:
    """Returns the labels of file `name`, whose `key` has `value`; refuses anything else than whole numbers."""
    if isinstance(value, list) and all(type(label) is int for label in value):
        return np.array(value, dtype=np.int64)
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu":
        return value.astype(np.int64)
    raise _malformed(name, f"'{key}' is not a list of integers")


def _class_names(layout: ArchiveLayout, content: bytes) -> tuple[str, ...]:
    """Reads the names of the classes from the file that has them."""
    name = layout.meta_file.name
    key = layout.class_names_key
    names = read_pickle(content, name).get(key)
    if not isinstance(names, list) or len(names) != len(layout.classes):
        raise _malformed(name, f"'{key}' is not a list of {len(layout.classes)} names")
    texts = [item.decode("latin-1") if isinstance(item, bytes) else item for item in names]
    if not all(isinstance(text, str) and 0 < len(text) <= _LONGEST_CLASS_NAME for text in texts):
        raise _malformed(name, f"'{key}' holds something else than names")
    return tuple(texts)


def _malformed(name: str, what: str) -> RequestError:
    """Returns the error for a file that is not as CIFAR's files are. Args: what: what is wrong with it."""
    return RequestError(f"the CIFAR file {name} is malformed: {what}", next_step="Get the official archive again")


CIFAR10_FILES = Cifar(CIFAR10)
CIFAR100_FILES = Cifar(CIFAR100)
