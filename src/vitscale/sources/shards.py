"""Lists tar files in WebDataset's layout: `KEY.jpg` beside `KEY.cls`, read in place and never unpacked."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitscale.errors import RequestError, shown
from vitscale.sources.arrays import ARRAY_EXTENSIONS, images_in
from vitscale.sources.base import Labels, default_cache_root, reason, root_of, write_if_possible
from vitscale.sources.cache import map_in_threads
from vitscale.sources.image_folder import (
    HELD_OUT_NAMES,
    SplitFolders,
    file_stamp,
    files_under,
    fingerprint_of,
    split_folders,
)
from vitscale.sources.image_set import ImageSet, LabelledImages, Listing, chosen_classes, listing_of
from vitscale.sources.pictures import EXTENSIONS
from vitscale.trial.trial import DataSpec

_LAYOUT_ADVICE = "Put shards there: ROOT/train/*.tar and ROOT/val/*.tar, or ROOT/train-000.tar, ROOT/val-000.tar"
_MOST_LABEL_BYTES = 1 << 20
FEWEST_REMEMBERED = 10_000
"""Fewest samples of which an index is written: going through a shard's headers takes about 0.1 ms a sample."""
_IMAGE_EXTENSIONS = frozenset((*EXTENSIONS, *ARRAY_EXTENSIONS))
_CLASS_EXTENSIONS = ("cls", "cls.txt", "json")


class _Member(NamedTuple):
    """An image in a shard, with its class."""

    shard: int
    """Number of the shard within its split."""
    name: str
    offset: int
    """First byte of its file within the shard."""
    size: int
    """Bytes of its file."""
    part: int
    """Number of the image within its file."""
    label: str


_MEMBER_FIELD_TYPES = [int, str, int, int, int, str]
"""Types of the fields of a `_Member`."""


class _StoredFile(NamedTuple):
    """A file in a shard."""

    name: str
    offset: int
    """Its first byte within the shard."""
    size: int
    """Its bytes."""


@dataclass
class _ShardContent:
    """The files of a shard that are read, by sample.

    A sample is named by its folder and the name of its files up to the first dot: "train/0001" of "train/0001.jpg".
    """

    images: dict[str, _StoredFile] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)
    """Sample -> name of its class."""


@dataclass(frozen=True, eq=False)
class Members:
    """Images that lie in tar files."""

    shards: tuple[str, ...]
    members: tuple[_Member, ...]

    def __len__(self) -> int:
        return len(self.members)

    def name(self, number: int) -> str:
        """See `Encoded`."""
        member = self.members[number]
        return f"{self.shards[member.shard]}/{member.name}"

    def content(self, number: int) -> bytes:
        """See `Encoded`."""
        member = self.members[number]
        return _read_bytes(self.shards[member.shard], member.offset, member.size)

    def part(self, number: int) -> int:
        """See `Encoded`."""
        return self.members[number].part

    def some(self, numbers: Labels) -> Members:
        """See `Encoded`."""
        return Members(self.shards, tuple(self.members[number] for number in numbers))


def list_shards(spec: DataSpec) -> Listing:
    """Lists the dataset `shards`.

    A sample is all members with the same name up to its first dot: an image, and its class as a number or a name in
    `.cls`, or under "label" in `.json`.

    Raises:
        RequestError: it is not laid out like this, or a shard is damaged.
    """
    folders = split_folders(spec, _LAYOUT_ADVICE, is_split=_is_training_split)
    train, held_out = _read_splits(spec, folders)
    location = str(folders.train)
    classes = _sorted_classes(spec, train, location)
    label_by_class = {name: label for label, name in enumerate(classes)}
    if isinstance(spec.classes, int):  # else the images of all classes that `data.classes` does not name are left out
        _refuse_stray_classes(held_out, label_by_class)
    train_images = _labelled_images(train, label_by_class)
    has_own_held_out = bool(held_out.stamps)
    held_out_images = _labelled_images(held_out, label_by_class) if has_own_held_out else None
    fingerprint = fingerprint_of([*train.stamps.values()], [*held_out.stamps.values()], classes)
    return listing_of("shards", spec, classes, train_images, held_out_images, fingerprint, location)


def _is_training_split(_folder: Path) -> bool:
    """Whether a folder called "train" is the training split: always, for shards have no folders of classes."""
    return True


class _ShardSplit(NamedTuple):
    """The shards of one split, and the images in them."""

    stamps: dict[str, str]
    """Path of each shard, in order -> its stamp; empty for a held-out split that does not exist."""
    members: list[_Member]


class _Splits(NamedTuple):
    """The shards of both splits."""

    train: _ShardSplit
    held_out: _ShardSplit


def _read_splits(spec: DataSpec, folders: SplitFolders) -> _Splits:
    """Returns the training and the held-out split.

    Without a folder of their own, held-out shards are those whose names begin with "val" or the like, unless all do.
    """
    root = Path(os.path.realpath(root_of(spec) or folders.train))
    real_paths = [os.path.realpath(folder) for folder in folders if folder is not None]
    train_stamps = _shard_stamps(folders.train, root, real_paths)
    if folders.held_out is not None:
        held_out_stamps = _shard_stamps(folders.held_out, root, real_paths)
    else:
        held_out_stamps = {path: shard_stamp for path, shard_stamp in train_stamps.items() if _is_named_held_out(path)}
        if len(held_out_stamps) == len(train_stamps):
            held_out_stamps = {}
        for path in held_out_stamps:
            del train_stamps[path]
    return _Splits(
        train=_ShardSplit(train_stamps, _all_members(train_stamps)),
        held_out=_ShardSplit(held_out_stamps, _all_members(held_out_stamps)),
    )


def _is_named_held_out(path: str) -> bool:
    """Whether a shard's name says that it is held out, as "val-000.tar" does."""
    return Path(path).name.lower().startswith(HELD_OUT_NAMES)


def _sorted_classes(spec: DataSpec, train: _ShardSplit, location: str) -> list[str]:
    """Returns the classes to read, in the order of their labels: numbers by value, names by the alphabet.

    Raises:
        RequestError: fewer than two, or one that `data.classes` names is not there.
    """
    present = {member.label for member in train.members}
    classes = chosen_classes(spec, [*present], location)
    if all(name.isdecimal() for name in classes):
        classes.sort(key=int)
    return classes


def _refuse_stray_classes(held_out: _ShardSplit, label_by_class: Mapping[str, int]) -> None:
    """Refuses a held-out image of a class that is not trained on."""
    paths = [*held_out.stamps]
    for member in held_out.members:
        if member.label not in label_by_class:
            what = f"{shown(paths[member.shard])} has the class {shown(member.label)} ({shown(member.name)})"
            raise RequestError(f"{what}, which is not among the training classes", next_step="Remove its images")


def _labelled_images(split: _ShardSplit, label_by_class: Mapping[str, int]) -> LabelledImages:
    """Returns the images of a split that are of one of the classes, with their labels."""
    selected = [member for member in split.members if member.label in label_by_class]
    labels = np.array([label_by_class[member.label] for member in selected], dtype=np.int64)
    return LabelledImages(Members(tuple(split.stamps), tuple(selected)), labels)


def _shard_stamps(folder: Path, root: Path, real_paths: list[str]) -> dict[str, str]:
    """Returns the path of each shard in a folder, in order -> its stamp; arguments as in `files_under`."""
    files = files_under(folder, root, real_paths)
    shards = sorted((path, status) for path, status in files if path.lower().endswith(".tar"))
    if not shards:
        raise RequestError(f"{shown(str(folder))} holds no shard (*.tar)", next_step=_LAYOUT_ADVICE)
    return {path: file_stamp(path, folder, status) for path, status in shards}


def _all_members(stamps: Mapping[str, str]) -> list[_Member]:
    """Returns every image of some shards, from an index in the cache's folder where one exists.

    An index of many samples is written there, since else each rank would go through the headers of all shards.

    Args:
        stamps: path of each shard -> its stamp.
    """
    index_path = default_cache_root() / f"shards-{fingerprint_of([*stamps.values()])[:24]}.index.json"
    indexed = _indexed_members(index_path, len(stamps))
    if indexed is not None:
        return indexed
    paths = [*stamps]
    members: list[_Member] = []
    for members_of_shard in map_in_threads(lambda shard: _shard_members(shard, paths[shard]), range(len(paths))):
        members += members_of_shard
    if len(members) >= FEWEST_REMEMBERED:
        write_if_possible(index_path, json.dumps(members))
    return members


def _indexed_members(path: Path, shards: int) -> list[_Member] | None:
    """Reads an index. Returns None where there is none, or where it is not the index of so many shards."""
    try:
        members = [_Member(*fields) for fields in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError):
        return None
    for member in members:
        has_types = [type(member_field) for member_field in member] == _MEMBER_FIELD_TYPES
        if not has_types or not 0 <= member.shard < shards:
            return None
    return members


def _shard_members(shard: int, path: str) -> list[_Member]:
    """Returns the images of a shard, in its order. A volume of several slices is several images.

    Args:
        shard: number of the shard within its split.
        path: its file.

    Raises:
        RequestError: it is damaged, or a sample has no class.
    """
    content = _checked_content(path)
    members: list[_Member] = []
    for sample, image in content.images.items():
        for part in range(_image_count(path, image)):
            members.append(
                _Member(shard, image.name, image.offset, image.size, part=part, label=content.classes[sample])
            )
    return members


def _checked_content(path: str) -> _ShardContent:
    """Reads the headers and the classes of a shard, and checks that each image is whole and has a class.

    Raises:
        RequestError: the shard is damaged, or a sample has no class.
    """
    try:
        content = _read_headers(path)
        shard_bytes = Path(path).stat().st_size
    except RequestError:
        raise
    except Exception as error:  # hostile files make parsers raise nearly anything
        raise _damage_error(path, reason(error) or type(error).__name__) from None
    for image in content.images.values():
        if image.offset + image.size > shard_bytes:
            raise _damage_error(path, f"it is truncated in {shown(image.name)}")
    unlabelled_samples = content.images.keys() - content.classes.keys()
    if unlabelled_samples:
        name = content.images[min(unlabelled_samples)].name
        raise _damage_error(path, f"{shown(name)} has no .cls or .json beside it that tells its class")
    return content


def _read_headers(path: str) -> _ShardContent:
    """Goes through a shard, and returns its images and their classes. Members of other kinds are left out.

    Raises:
        RequestError: a member is no file, a class cannot be read, or two images are of one sample.
    """
    content = _ShardContent()
    with tarfile.open(path, mode="r:") as tar:
        for member in tar:
            if member.isdir():
                continue
            if not member.isreg() or member.issparse():
                raise _damage_error(path, f"its member {shown(member.name)} is a link or a device")
            folder, _, file_name = member.name.rpartition("/")
            stem, _, extension = file_name.partition(".")
            sample = f"{folder}/{stem}"
            if f".{extension.lower()}" in _IMAGE_EXTENSIONS:
                if sample in content.images:
                    other = content.images[sample].name
                    raise _damage_error(path, f"it holds {shown(other)} and {shown(member.name)}, one sample's")
                content.images[sample] = _StoredFile(member.name, member.offset_data, member.size)
            elif extension.lower() in _CLASS_EXTENSIONS and member.size <= _MOST_LABEL_BYTES:
                file = tar.extractfile(member)
                text = file.read() if file is not None else b""
                content.classes[sample] = _class_name(text, extension, path, member.name)
    return content


def _image_count(path: str, file: _StoredFile) -> int:
    """Returns the number of images in a file of the shard `path`: the slices of a volume, else 1."""
    if not file.name.lower().endswith((".h5", ".hdf5")):
        return 1
    return images_in(_read_bytes(path, file.offset, file.size), file.name)


def _read_bytes(path: str, offset: int, size: int) -> bytes:
    """Reads `size` bytes of a shard, from byte `offset` on."""
    with Path(path).open("rb") as file:
        return os.pread(file.fileno(), size, offset)


def _class_name(content: bytes, extension: str, path: str, name: str) -> str:
    """Returns the class that a member of a shard names; numbers lose leading zeros, as "007" becomes "7".

    Args:
        content: the member's bytes.
        extension: its extension, without a dot.
        path: path of the shard, for messages.
        name: name of the member, for messages.

    Raises:
        RequestError: it names none.
    """
    try:
        text = content.decode().strip()
        if extension.lower() == "json":
            fields = json.loads(text)
            value = fields.get("label", fields.get("class_name", fields.get("cls")))
            text = str(value) if isinstance(value, int | str) else ""
    except (ValueError, AttributeError, RecursionError):
        text = ""
    if not text or len(text) > 200:
        raise _damage_error(path, f"its member {shown(name)} tells no class")
    is_number = text.isdecimal() and text.isascii()
    return str(int(text)) if is_number else text


def _damage_error(path: str, what: str) -> RequestError:
    """Returns the error for a shard that cannot be used. Args: what: what is wrong with it."""
    return RequestError(f"the shard {shown(path)} is damaged: {what}", next_step="Repair or remove it")


SHARDS = ImageSet(list_shards)
