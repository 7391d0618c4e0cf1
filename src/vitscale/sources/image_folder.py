"""A folder with one folder of images per class, with or without its own held-out split."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitscale.errors import RequestError, shown
from vitscale.sources.arrays import ARRAY_EXTENSIONS, acquisition_of, images_in
from vitscale.sources.base import Labels, kind_of, reason, root_of
from vitscale.sources.image_set import ImageSet, Listing, chosen_classes, listing_of
from vitscale.sources.pictures import EXTENSIONS
from vitscale.trial.trial import DataSpec

HELD_OUT_NAMES = ("val", "valid", "validation", "test", "testing")
"""Names of a held-out split beside the training split; the first that exists is taken."""
_HOW = "Make a folder of images for each class: ROOT/CLASS/*.jpg, or ROOT/train/CLASS/* and ROOT/val/CLASS/*"
_READ = frozenset((*EXTENSIONS, *ARRAY_EXTENSIONS))
_VOLUMES = (".h5", ".hdf5")


@dataclass(frozen=True, eq=False)
class Files:
    """Images that are files, or slices of files."""

    paths: tuple[str, ...]
    parts: Labels

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, number: int) -> str:
        """See `Encoded`."""
        return self.paths[number]

    content = name

    def part(self, number: int) -> int:
        """See `Encoded`."""
        return int(self.parts[number])

    def some(self, numbers: Labels) -> Files:
        """See `Encoded`."""
        return Files(tuple(self.paths[number] for number in numbers), self.parts[numbers])


class _File(NamedTuple):
    path: str
    label: int
    stamp: str
    """Identifies the file: its place, size and time of change."""


def list_folder(spec: DataSpec) -> Listing:
    """The dataset `folder`: `root/CLASS/*.jpg`, or `root/train/CLASS/*` with `root/val/CLASS/*`.

    Raises:
        RequestError: it is not laid out like this, a file cannot be read, or a link leads out of it.
    """
    train_root, held_out_root = split_folders(spec, _HOW, lambda folder: bool(_entries(folder, _VOLUMES)))
    root = Path(os.path.realpath(root_of(spec) or train_root))
    if not _subfolders(train_root, root):
        return _flat_volumes(spec, train_root, held_out_root)
    names = chosen_classes(spec, _subfolders(train_root, root), str(train_root), "class folders", _HOW)
    splits = [(train_root, names)]
    if held_out_root is not None:
        present = _subfolders(held_out_root, root)
        if not isinstance(spec.classes, int):
            present = [name for name in present if name in set(names)]
        splits.append((held_out_root, present))
    read = [os.path.realpath(split / name) for split, present in splits for name in present]
    train, *others = (_files(split, present, names, root, read) for split, present in splits)
    held_out = others[0] if others else None
    return _listing(spec, names, train, held_out, train_root)


def split_folders(spec: DataSpec, how: str, is_split: Callable[[Path], bool]) -> tuple[Path, Path | None]:
    """The folder of the training images, and that of the held-out images where there is one.

    Args:
        spec: names the root.
        how: how the set is laid out, for messages.
        is_split: whether a folder called "train" is the training split; it may also be a class of that name. "Train" or
            "training" is a split only beside a held-out one.

    Raises:
        RequestError: there is no root, or it is no folder.
    """
    root = root_of(spec)
    if root is None:
        raise RequestError(f"the dataset '{spec.name}' needs data.root", next_step=how)
    if kind_of(root) != "folder":
        there = "is not a folder" if kind_of(root) else "does not exist"
        raise RequestError(f"data.root {shown(str(root))} {there}", next_step=how)
    names = {entry.name: Path(entry.path) for entry in sorted(_entries(root), key=lambda each: each.name)}
    folders = {name.lower(): path for name, path in names.items()}
    own = [folders[name] for name in HELD_OUT_NAMES if name in folders]
    train = names.get("train") or (folders.get("train") or folders.get("training") if own else None)
    if train is None or not is_split(train):
        return root, None
    return train, own[0] if own else None


def fingerprint_of(*parts: Sequence[str]) -> str:
    """Fingerprint of the stamps of every file of each split."""
    text = "\n\n".join("\n".join(part) for part in parts)
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def files_under(folder: Path, root: Path, beside: Sequence[str] = ()) -> Iterator[tuple[str, os.stat_result]]:
    """Yields every regular file at any depth with its status, except hidden ones and those of hidden folders.

    `beside`: real paths of folders that are read too, those of the other split among them.

    Raises:
        RequestError: one cannot be read, or a link leads out of `root`, a real path, or to a folder that is read
            already, so that an image would be both trained on and held out.
    """
    entered = {os.path.realpath(folder), *beside}
    try:
        for parent, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for path in (f"{parent}/{name}" for name in folders):
                if os.path.islink(path):  # noqa: PTH114  a million of them
                    refuse_link_out(path, root)
                    target = os.path.realpath(path)
                    if any(os.path.commonpath((target, own)) in (target, own) for own in entered):
                        what = f"the link {shown(path)} leads to {shown(target)}, whose images are read already"
                        raise RequestError(what, next_step="Remove it")
                    entered.add(target)
            for name in names:
                path = f"{parent}/{name}"
                if name.startswith("."):
                    continue
                if Path(name).suffix.lower() in (*_READ, ".tar"):
                    if os.path.islink(path):  # noqa: PTH114  a million of them
                        refuse_link_out(path, root)
                    status = os.stat(path)  # noqa: PTH116 - as above
                    if stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
                        yield path, status
    except OSError as error:
        raise _unreadable(folder, error) from None


def refuse_link_out(path: str, root: Path) -> None:
    """Raises `RequestError` for a link to a place outside of `root`, a real path."""
    target = os.path.realpath(path)
    if not Path(target).is_relative_to(root) and os.path.exists(target):  # noqa: PTH110 - as above
        raise RequestError(
            f"the link {shown(path)} leads out of {shown(str(root))}, to {shown(target)}",
            next_step="Put the file there instead; to take some classes of a folder, name them by data.classes",
        )


def _raise(error: OSError) -> None:
    raise error


def _entries(folder: Path, endings: tuple[str, ...] = ()) -> list[os.DirEntry[str]]:
    """The folders in a folder, and its files with one of these endings, without hidden ones."""
    try:
        with os.scandir(folder) as entries:
            seen = [entry for entry in entries if not entry.name.startswith(".")]
            return [entry for entry in seen if entry.is_dir() or entry.name.lower().endswith(endings)]
    except OSError as error:
        raise _unreadable(folder, error) from None


def _subfolders(folder: Path, root: Path) -> list[str]:
    folders = _entries(folder)
    for entry in folders:
        if entry.is_symlink():
            refuse_link_out(entry.path, root)
    return sorted(entry.name for entry in folders)


def _files(folder: Path, present: list[str], classes: list[str], root: Path, read: Sequence[str]) -> list[_File]:
    """The images of every class of `folder`, at any depth, sorted by class and path. `read`: real paths of them all."""
    if stray := sorted(set(present) - set(classes)):
        what = f"{shown(str(folder))} has the class {shown(stray[0])}, which is not among the training classes"
        raise RequestError(what, next_step="Rename or remove that folder")
    number = {name: label for label, name in enumerate(classes)}
    files: list[_File] = []
    for name in present:
        of_class = sorted(
            _File(path, number[name], stamp(path, folder, status))
            for path, status in files_under(folder / name, root, read)
            if not path.lower().endswith(".tar")
        )
        if not of_class:
            what = f"the class folder {shown(str(folder / name))} holds no image"
            raise RequestError(what, valid=sorted(_READ), next_step="Add images or remove the folder")
        files += of_class
    if not files:
        raise RequestError(f"{shown(str(folder))} has no class folders", next_step=_HOW)
    return files


def _flat_volumes(spec: DataSpec, train_root: Path, held_out_root: Path | None) -> Listing:
    """fastMRI's own layout: HDF5 files side by side, classed by their kind of acquisition."""
    real = Path(os.path.realpath(root_of(spec) or train_root))
    splits: list[list[tuple[str, str, str]]] = []
    for folder in (train_root, held_out_root):
        volumes = [
            (path, acquisition_of(path), stamp(path, folder, status))
            for path, status in sorted(files_under(folder, real) if folder is not None else ())
            if path.lower().endswith(_VOLUMES) and folder is not None
        ]
        if unknown := [path for path, kind, _ in volumes if kind is None]:
            what = f"{shown(unknown[0])} lies in no class folder, and no attribute 'acquisition' of it tells its class"
            raise RequestError(what, next_step=_HOW)
        splits.append([(path, kind or "", stamp) for path, kind, stamp in volumes])
    names = chosen_classes(spec, sorted({kind for _, kind, _ in splits[0]}), str(train_root), "class folders", _HOW)
    number = {name: label for label, name in enumerate(names)}
    train, held_out = (
        [_File(path, number[kind], stamp) for path, kind, stamp in split if kind in number] for split in splits
    )
    return _listing(spec, names, train, held_out or None, train_root)


def _listing(
    spec: DataSpec, names: list[str], train: list[_File], held_out: list[_File] | None, folder: Path
) -> Listing:
    stamps = [[file.stamp for file in files] for files in (train, held_out) if files is not None]
    held = _images(held_out) if held_out is not None else None
    return listing_of("folder", spec, names, _images(train), held, fingerprint_of(*stamps), str(folder))


def _images(files: list[_File]) -> tuple[Files, Labels]:
    """Every image with its label; a volume's images follow one another."""
    counts = [images_in(file.path, file.path) for file in files]
    paths = tuple(file.path for file, count in zip(files, counts, strict=True) for _ in range(count))
    parts = np.concatenate([np.arange(count) for count in counts]) if counts else np.empty(0, dtype=np.int64)
    return Files(paths, parts), np.repeat(np.array([file.label for file in files], dtype=np.int64), counts)


def stamp(path: str, folder: Path, status: os.stat_result) -> str:
    """Identifies a file: its place, size and time of change."""
    return f"{os.path.relpath(path, folder)} {status.st_size} {status.st_mtime_ns}"


def _unreadable(path: Path, error: OSError) -> RequestError:
    what = f"cannot read {shown(str(error.filename or path))}: {reason(error)}"
    return RequestError(what, next_step="Repair or remove it")


FOLDER = ImageSet(list_folder)
