"""A folder with a folder of images for each class, with or without a held-out split of its own."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitscale.errors import RequestError, explain, shown
from vitscale.sources.base import Dataset, Images, Labels, Summary, refuse_archive_keys, require_ids
from vitscale.sources.cache import Room, cached, find, in_memory
from vitscale.sources.paths import default_cache_root, kind_of, reason, root_of
from vitscale.sources.pictures import EXTENSIONS, decode_square, in_threads, verify_picture
from vitscale.sources.split import held_out_count, split_ids
from vitscale.trial import DataSpec

MOST_CACHED_BYTES = 20_000_000_000
"""Decoded images of more than this stay files and are decoded whenever they are taken."""
MOST_MEMORY_BYTES = 2_000_000_000
"""The same where there is no cache to write to."""
_HELD_OUT_FOLDERS = ("val", "valid", "validation", "test")
"""The first of these beside a folder "train" is the held-out split."""
_HOW = "Make a folder of images for each class: ROOT/CLASS/*.jpg, or ROOT/train/CLASS/* and ROOT/val/CLASS/*"


@dataclass(frozen=True, eq=False)
class FileSplit:
    """A split that is decoded on demand."""

    paths: tuple[str, ...]
    labels: Labels
    side: int

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, ids: Labels) -> Images:
        """Decodes the images in threads; see `Split.take`. Raises `RequestError` naming a broken file."""
        require_ids(ids, len(self))
        images = np.empty((len(ids), self.side, self.side, 3), dtype=np.uint8)
        _decode_into(images, [self.paths[i] for i in ids], self.side)
        return images


@dataclass(frozen=True)
class _Listing:
    """Every image of the folder, in an order that does not depend on the file system."""

    classes: tuple[str, ...]
    train: FileSplit
    held_out: FileSplit
    fingerprint: str
    key: str
    """Of the cache entry: the files, their side, and which of them are held out."""

    @property
    def decoded_bytes(self) -> int:
        return (len(self.train) + len(self.held_out)) * self.train.side**2 * 3

    @property
    def summary(self) -> Summary:
        side = self.train.side
        return Summary(len(self.train), len(self.held_out), self.classes, (side, side, 3), self.fingerprint)


class ImageFolder:
    """The dataset `folder`: `root/CLASS/*.jpg`, or `root/train/CLASS/*` with `root/val/CLASS/*`."""

    def check(self, spec: DataSpec) -> Summary:
        """Opens every image, unless the cache of this user holds these very files decoded."""
        listing = _list(spec)
        if find(default_cache_root(), listing.key) is None:
            for _ in in_threads(verify_picture, (*listing.train.paths, *listing.held_out.paths)):
                pass
        return listing.summary

    def load(self, spec: DataSpec, cache_root: Path) -> Dataset:
        """See `Source.load`. Too many images for the cache are decoded on demand."""
        listing = _list(spec)
        build = partial(_decode, listing)
        decoded = None
        if listing.decoded_bytes <= MOST_CACHED_BYTES:
            decoded = cached(cache_root, listing.key, build)
        if decoded is None and listing.decoded_bytes <= MOST_MEMORY_BYTES:
            decoded = in_memory(build)
        if decoded is None:
            return Dataset(listing.summary, listing.train, listing.held_out)
        return Dataset(listing.summary, decoded.train, decoded.held_out)


def _decode(listing: _Listing, room: Room) -> tuple[str, ...]:
    for name, split in (("train", listing.train), ("held_out", listing.held_out)):
        images, labels = room(name, len(split), (split.side, split.side, 3))
        labels[:] = split.labels
        _decode_into(images, split.paths, split.side)
    return listing.classes


def _decode_into(images: Images, paths: Sequence[str], side: int) -> None:
    def decode(position: int) -> None:
        images[position] = decode_square(paths[position], side)

    for _ in in_threads(decode, range(len(paths))):
        pass


class _File(NamedTuple):
    path: str
    label: int
    stamp: str
    """What tells this file from another: its place, size and time of change."""


def _list(spec: DataSpec) -> _Listing:
    refuse_archive_keys(spec)
    train_root, held_out_root = _split_folders(spec)
    names = _subfolders(train_root)
    if len(names) < 2:
        what = f"{shown(str(train_root))} has {len(names)} class folders; at least 2 are needed"
        raise RequestError(explain(what, next_step=_HOW))
    train = _files(train_root, names, names)
    if held_out_root is not None:
        held_out = _files(held_out_root, _subfolders(held_out_root), names)
        fingerprint = _fingerprint(train, held_out)
        share = "own"
    else:
        fingerprint = _fingerprint(train)
        share = str(spec.held_out)
        labels = np.array([file.label for file in train], dtype=np.int64)
        if held_out_count(len(train), len(names), spec.held_out) < 1:
            what = f"{shown(str(train_root))} has one image for each class: nothing can be held out"
            raise RequestError(explain(what, next_step="Add images, or make the folders train and val"))
        train_ids, held_out_ids = split_ids(labels, spec.held_out)
        held_out = [train[i] for i in held_out_ids]
        train = [train[i] for i in train_ids]
    return _Listing(
        classes=tuple(os.fsencode(name).decode(errors="replace") for name in names),
        train=_split(train, spec.source_size),
        held_out=_split(held_out, spec.source_size),
        fingerprint=fingerprint,
        key=f"folder-{fingerprint[:24]}-{spec.source_size}-{share}",
    )


def _fingerprint(*parts: list[_File]) -> str:
    text = "\n\n".join("\n".join(file.stamp for file in part) for part in parts)
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def _split_folders(spec: DataSpec) -> tuple[Path, Path | None]:
    """The folder of the training classes, and that of the held-out classes where there is one."""
    root = root_of(spec)
    if root is None:
        raise RequestError(explain("the dataset 'folder' needs data.root", next_step=_HOW))
    if kind_of(root) != "folder":
        there = "is not a folder" if kind_of(root) else "does not exist"
        raise RequestError(explain(f"data.root {shown(str(root))} {there}", next_step=_HOW))
    train = root / "train"
    if kind_of(train) != "folder" or not _subfolders(train):  # it may also be a class of that name
        return root, None
    own = [root / name for name in _HELD_OUT_FOLDERS if kind_of(root / name) == "folder"]
    return train, own[0] if own else None


def _subfolders(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise _unreadable(folder, error) from None


def _files(folder: Path, present: list[str], classes: list[str]) -> list[_File]:
    """The images of every class of `folder`, at any depth, sorted by class and path."""
    if stray := sorted(set(present) - set(classes)):
        what = f"{shown(str(folder))} has the class {shown(stray[0])}, which is not among the training classes"
        raise RequestError(explain(what, next_step="Rename or remove that folder"))
    number = {name: label for label, name in enumerate(classes)}
    files: list[_File] = []
    for name in present:
        found = sorted(_images_under(folder, name, number[name]))
        if not found:
            what = f"the class folder {shown(str(folder / name))} holds no image"
            raise RequestError(explain(what, valid=sorted(EXTENSIONS), next_step="Add images or remove the folder"))
        files += found
    if not files:
        raise RequestError(explain(f"{shown(str(folder))} has no class folders", next_step=_HOW))
    return files


def _images_under(folder: Path, class_name: str, label: int) -> Iterator[_File]:
    def fail(error: OSError) -> None:
        raise error

    try:
        for parent, _, names in os.walk(folder / class_name, onerror=fail):
            for path in (Path(parent, name) for name in names if not name.startswith(".")):
                if path.suffix.lower() not in EXTENSIONS:
                    continue
                status = path.stat()
                if stat.S_ISREG(status.st_mode):
                    stamp = f"{path.relative_to(folder)} {status.st_size} {status.st_mtime_ns}"
                    yield _File(str(path), label, stamp)
    except OSError as error:
        raise _unreadable(folder / class_name, error) from None


def _split(files: list[_File], side: int) -> FileSplit:
    labels = np.array([file.label for file in files], dtype=np.int64)
    return FileSplit(tuple(file.path for file in files), labels, side)


def _unreadable(path: Path, error: OSError) -> RequestError:
    what = f"cannot read {shown(str(error.filename or path))}: {reason(error)}"
    return RequestError(explain(what, next_step="Repair or remove it"))
