"""Lists a folder with one folder of images per class, with or without its own held-out split."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitscale.errors import RequestError, shown
from vitscale.sources.arrays import ARRAY_EXTENSIONS, acquisition_of, images_in
from vitscale.sources.base import Labels, kind_of, reason, root_of
from vitscale.sources.image_set import ImageSet, LabelledImages, Listing, chosen_classes, listing_of
from vitscale.sources.pictures import EXTENSIONS
from vitscale.trial.trial import DataSpec

HELD_OUT_NAMES = ("val", "valid", "validation", "test", "testing")
"""Names of a held-out split beside the training split; the first that exists is taken."""
_LAYOUT_ADVICE = "Make a folder of images for each class: ROOT/CLASS/*.jpg, or ROOT/train/CLASS/* and ROOT/val/CLASS/*"
_IMAGE_EXTENSIONS = frozenset((*EXTENSIONS, *ARRAY_EXTENSIONS))
_LISTED_EXTENSIONS = _IMAGE_EXTENSIONS | {".tar"}
"""Extensions of the files that `files_under` yields: images, and shards of them."""
_VOLUME_EXTENSIONS = (".h5", ".hdf5")


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
    """A file of images, with the label of its class."""

    path: str
    label: int
    stamp: str
    """Identifies the file: its place, size and time of change."""


class SplitFolders(NamedTuple):
    """Folders of the two splits of a set."""

    train: Path
    held_out: Path | None
    """None: the set has no held-out split of its own."""


class _ClassFolders(NamedTuple):
    """The class folders of a split."""

    split: Path
    """Folder of the split."""
    classes: list[str]
    """Names of the class folders that are read, sorted."""

    @property
    def real_paths(self) -> list[str]:
        """Paths of the class folders, links followed."""
        return [os.path.realpath(self.split / name) for name in self.classes]


def list_folder(spec: DataSpec) -> Listing:
    """Lists the dataset `folder`: `root/CLASS/*.jpg`, or `root/train/CLASS/*` with `root/val/CLASS/*`.

    Raises:
        RequestError: it is not laid out like this, a file cannot be read, or a link leads out of it.
    """
    folders = split_folders(spec, _LAYOUT_ADVICE, lambda folder: bool(_visible_entries(folder, _VOLUME_EXTENSIONS)))
    root = Path(os.path.realpath(root_of(spec) or folders.train))
    subfolders = _subfolder_names(folders.train, root)
    if not subfolders:
        return _list_flat_volumes(spec, folders)
    classes = chosen_classes(spec, subfolders, str(folders.train), "class folders", _LAYOUT_ADVICE)
    train = _ClassFolders(folders.train, classes)
    if folders.held_out is None:
        return _listing(spec, classes, _class_files(train, classes, root, train.real_paths), None, folders.train)
    held_out = _ClassFolders(folders.held_out, _held_out_classes(spec, folders.held_out, classes, root))
    real_paths = [*train.real_paths, *held_out.real_paths]
    train_files = _class_files(train, classes, root, real_paths)
    held_out_files = _class_files(held_out, classes, root, real_paths)
    return _listing(spec, classes, train_files, held_out_files, folders.train)


def _held_out_classes(spec: DataSpec, folder: Path, classes: list[str], root: Path) -> list[str]:
    """Returns the class folders of the held-out split: all, or those that `data.classes` names."""
    subfolders = _subfolder_names(folder, root)
    if isinstance(spec.classes, int):
        return subfolders
    return [name for name in subfolders if name in set(classes)]


def split_folders(spec: DataSpec, how: str, is_split: Callable[[Path], bool]) -> SplitFolders:
    """Returns the folder of the training images, and that of the held-out images where there is one.

    Args:
        spec: names the root.
        how: how the set is laid out, for messages.
        is_split: decides whether a folder called "train" is the training split; it may also be a class of that name.
            Folders called "Train" or "training" are asked about only beside a held-out folder.

    Raises:
        RequestError: there is no root, or it is no folder.
    """
    root = root_of(spec)
    if root is None:
        raise RequestError(f"the dataset '{spec.name}' needs data.root", next_step=how)
    kind = kind_of(root)
    if kind != "folder":
        problem = "is not a folder" if kind else "does not exist"
        raise RequestError(f"data.root {shown(str(root))} {problem}", next_step=how)
    entries = sorted(_visible_entries(root), key=lambda entry: entry.name)
    folders = {entry.name: Path(entry.path) for entry in entries}
    folders_in_lower_case = {name.lower(): path for name, path in folders.items()}
    held_out_names = [name for name in HELD_OUT_NAMES if name in folders_in_lower_case]
    held_out = folders_in_lower_case[held_out_names[0]] if held_out_names else None
    train = folders.get("train")
    if train is None and held_out is not None:
        train = folders_in_lower_case.get("train") or folders_in_lower_case.get("training")
    if train is None or not is_split(train):
        return SplitFolders(train=root, held_out=None)
    return SplitFolders(train, held_out)


def fingerprint_of(*stamps: Sequence[str]) -> str:
    """Returns the SHA-256 of several lists of texts, such as the stamps of the files of each split."""
    text = "\n\n".join("\n".join(part) for part in stamps)
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def files_under(folder: Path, root: Path, other_folders: Sequence[str] = ()) -> Iterator[tuple[str, os.stat_result]]:
    """Yields the path and the status of every regular file of images below a folder, at any depth.

    Hidden files, and those in hidden folders, are left out.

    Args:
        folder: the folder.
        root: a real path, which no link may lead out of.
        other_folders: real paths of folders that are read too, those of the other split among them.

    Raises:
        RequestError: a file or folder cannot be read, or a link leads out of `root`. Or a link leads to a folder that
            is read anyway: its images could be both trained on and held out.
    """
    entered = {os.path.realpath(folder), *other_folders}
    try:
        for parent, subfolders, names in os.walk(folder, onerror=_raise_error, followlinks=True):
            subfolders[:] = [name for name in subfolders if not name.startswith(".")]
            for name in subfolders:
                path = f"{parent}/{name}"
                if os.path.islink(path):  # noqa: PTH114  a million of them
                    entered.add(_checked_link_target(path, root, entered))
            for name in names:
                if name.startswith(".") or Path(name).suffix.lower() not in _LISTED_EXTENSIONS:
                    continue
                path = f"{parent}/{name}"
                if os.path.islink(path):  # noqa: PTH114  a million of them
                    refuse_link_out(path, root)
                status = os.stat(path)  # noqa: PTH116 - as above
                if stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
                    yield path, status
    except OSError as error:
        raise _unreadable(folder, error) from None


def _checked_link_target(link: str, root: Path, entered: set[str]) -> str:
    """Returns the real path of the folder that a link leads to.

    Raises:
        RequestError: it leads out of `root`, or to a folder in `entered`, or to one above or below such a folder.
    """
    refuse_link_out(link, root)
    target = os.path.realpath(link)
    if any(os.path.commonpath((target, folder)) in (target, folder) for folder in entered):
        what = f"the link {shown(link)} leads to {shown(target)}, whose images are read already"
        raise RequestError(what, next_step="Remove it")
    return target


def refuse_link_out(path: str, root: Path) -> None:
    """Raises `RequestError` for a link to a place outside of `root`, a real path."""
    target = os.path.realpath(path)
    if not Path(target).is_relative_to(root) and os.path.exists(target):  # noqa: PTH110 - as above
        raise RequestError(
            f"the link {shown(path)} leads out of {shown(str(root))}, to {shown(target)}",
            next_step="Put the file there instead; to take some classes of a folder, name them by data.classes",
        )


def _raise_error(error: OSError) -> None:
    """Raises an error that `os.walk` would pass over."""
    raise error


def _visible_entries(folder: Path, endings: tuple[str, ...] = ()) -> list[os.DirEntry[str]]:
    """Returns the folders in a folder, and its files with one of these endings, without hidden ones."""
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if _is_listed(entry, endings)]
    except OSError as error:
        raise _unreadable(folder, error) from None


def _is_listed(entry: os.DirEntry[str], endings: tuple[str, ...]) -> bool:
    """Whether an entry is a folder, or a file with one of these endings, and is not hidden."""
    if entry.name.startswith("."):
        return False
    return entry.is_dir() or entry.name.lower().endswith(endings)


def _subfolder_names(folder: Path, root: Path) -> list[str]:
    """Returns the names of the folders in a folder, sorted; refuses links that lead out of `root`."""
    folders = _visible_entries(folder)
    for entry in folders:
        if entry.is_symlink():
            refuse_link_out(entry.path, root)
    return sorted(entry.name for entry in folders)


def _class_files(folders: _ClassFolders, classes: list[str], root: Path, real_paths: Sequence[str]) -> list[_File]:
    """Returns the images of a split, at any depth of its class folders, sorted by class and path.

    Args:
        folders: the class folders.
        classes: names of the training classes, in the order of their labels.
        root: a real path, which no link leads out of.
        real_paths: real paths of the class folders of all splits.

    Raises:
        RequestError: a class is not among the training classes, or there is no image of it.
    """
    stray = sorted(set(folders.classes) - set(classes))
    if stray:
        what = f"{shown(str(folders.split))} has the class {shown(stray[0])}, which is not among the training classes"
        raise RequestError(what, next_step="Rename or remove that folder")
    label_by_class = {name: label for label, name in enumerate(classes)}
    files: list[_File] = []
    for name in folders.classes:
        class_folder = folders.split / name
        class_files = sorted(
            _File(path, label_by_class[name], file_stamp(path, folders.split, status))
            for path, status in files_under(class_folder, root, real_paths)
            if not path.lower().endswith(".tar")
        )
        if not class_files:
            what = f"the class folder {shown(str(class_folder))} holds no image"
            raise RequestError(what, valid=sorted(_IMAGE_EXTENSIONS), next_step="Add images or remove the folder")
        files += class_files
    if not files:
        raise RequestError(f"{shown(str(folders.split))} has no class folders", next_step=_LAYOUT_ADVICE)
    return files


class _Volume(NamedTuple):
    """An HDF5 file of fastMRI."""

    path: str
    acquisition: str
    """Its class."""
    stamp: str


def _list_flat_volumes(spec: DataSpec, folders: SplitFolders) -> Listing:
    """Lists fastMRI's own layout: HDF5 files side by side, classed by their kind of acquisition."""
    root = Path(os.path.realpath(root_of(spec) or folders.train))
    train = _read_volumes(folders.train, root)
    held_out = _read_volumes(folders.held_out, root) if folders.held_out is not None else []
    acquisitions = sorted({volume.acquisition for volume in train})
    classes = chosen_classes(spec, acquisitions, str(folders.train), "class folders", _LAYOUT_ADVICE)
    label_by_class = {name: label for label, name in enumerate(classes)}
    train_files = _labelled_files(train, label_by_class)
    held_out_files = _labelled_files(held_out, label_by_class)
    return _listing(spec, classes, train_files, held_out_files or None, folders.train)


def _read_volumes(folder: Path, root: Path) -> list[_Volume]:
    """Returns the HDF5 files of a split, sorted by path.

    Raises:
        RequestError: a file has no kind of acquisition.
    """
    volumes: list[_Volume] = []
    first_unknown: str | None = None
    for path, status in sorted(files_under(folder, root)):
        if not path.lower().endswith(_VOLUME_EXTENSIONS):
            continue
        acquisition = acquisition_of(path)
        if acquisition is None:
            first_unknown = first_unknown or path
        volumes.append(_Volume(path, acquisition or "", file_stamp(path, folder, status)))
    if first_unknown is not None:
        what = f"{shown(first_unknown)} lies in no class folder, and no attribute 'acquisition' of it tells its class"
        raise RequestError(what, next_step=_LAYOUT_ADVICE)
    return volumes


def _labelled_files(volumes: Sequence[_Volume], label_by_class: Mapping[str, int]) -> list[_File]:
    """Returns the files of the classes that are read."""
    return [
        _File(volume.path, label_by_class[volume.acquisition], volume.stamp)
        for volume in volumes
        if volume.acquisition in label_by_class
    ]


def _listing(
    spec: DataSpec, classes: list[str], train: list[_File], held_out: list[_File] | None, folder: Path
) -> Listing:
    """Makes a listing of the files of both splits; None: there is no held-out split."""
    splits = [train] if held_out is None else [train, held_out]
    stamps = [[file.stamp for file in files] for files in splits]
    held_out_images = _labelled_images(held_out) if held_out is not None else None
    return listing_of(
        "folder", spec, classes, _labelled_images(train), held_out_images, fingerprint_of(*stamps), str(folder)
    )


def _labelled_images(files: list[_File]) -> LabelledImages:
    """Returns every image with its label; a volume's images follow one another."""
    counts = [images_in(file.path, file.path) for file in files]
    paths: list[str] = []
    for file, count in zip(files, counts, strict=True):
        paths += [file.path] * count
    parts = np.concatenate([np.arange(count) for count in counts]) if counts else np.empty(0, dtype=np.int64)
    labels = np.repeat(np.array([file.label for file in files], dtype=np.int64), counts)
    return LabelledImages(Files(tuple(paths), parts), labels)


def file_stamp(path: str, folder: Path, status: os.stat_result) -> str:
    """Returns a text that identifies a file: its place below `folder`, size and time of change."""
    return f"{os.path.relpath(path, folder)} {status.st_size} {status.st_mtime_ns}"


def _unreadable(path: Path, error: OSError) -> RequestError:
    """Returns the error for a file or folder that cannot be read. Args: path: where `error` names none."""
    what = f"cannot read {shown(str(error.filename or path))}: {reason(error)}"
    return RequestError(what, next_step="Repair or remove it")


FOLDER = ImageSet(list_folder)
