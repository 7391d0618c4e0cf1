"""Lists tar files in WebDataset's layout: `KEY.jpg` beside `KEY.cls`, read in place and never unpacked."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitscale.errors import RequestError, shown
from vitscale.sources.arrays import ARRAY_EXTENSIONS, images_in
from vitscale.sources.base import Labels, default_cache_root, reason, root_of, write_if_possible
from vitscale.sources.cache import in_threads
from vitscale.sources.image_folder import (
    HELD_OUT_NAMES,
    SplitFolders,
    files_under,
    fingerprint_of,
    split_folders,
    stamp,
)
from vitscale.sources.image_set import ImageSet, LabelledImages, Listing, chosen_classes, listing_of
from vitscale.sources.pictures import EXTENSIONS
from vitscale.trial.trial import DataSpec

_HOW = "Put shards there: ROOT/train/*.tar and ROOT/val/*.tar, or ROOT/train-000.tar, ROOT/val-000.tar"
_MOST_LABEL_BYTES = 1 << 20
FEWEST_REMEMBERED = 10_000
"""Fewest samples whose index is kept: going through a shard's headers takes about 0.1 ms a sample."""
_IMAGES = frozenset((*EXTENSIONS, *ARRAY_EXTENSIONS))


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


_TYPES = [int, str, int, int, int, str]
"""Types of the fields of a `_Member`."""


class _StoredFile(NamedTuple):
    """A file in a shard."""

    name: str
    offset: int
    size: int


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
        with Path(self.shards[member.shard]).open("rb") as file:
            return os.pread(file.fileno(), member.size, member.offset)

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
    folders = split_folders(spec, _HOW, lambda _: True)
    train, held_out = _stamps_by_shard(spec, folders)
    train_members = _members(train)
    held_out_members = _members(held_out)
    classes = chosen_classes(spec, [*{member.label for member in train_members}], str(folders.train))
    if all(name.isdecimal() for name in classes):
        classes.sort(key=int)
    label_by_class = {name: label for label, name in enumerate(classes)}
    if isinstance(spec.classes, int):
        _refuse_stray_classes([*held_out], held_out_members, label_by_class)
    train_images = _labelled_images(train, train_members, label_by_class)
    held_out_images = _labelled_images(held_out, held_out_members, label_by_class) if held_out else None
    fingerprint = fingerprint_of([*train.values()], [*held_out.values()], classes)
    return listing_of("shards", spec, classes, train_images, held_out_images, fingerprint, str(folders.train))


class _Shards(NamedTuple):
    """Path of each shard of both splits, in order -> its stamp."""

    train: dict[str, str]
    held_out: dict[str, str]


def _stamps_by_shard(spec: DataSpec, folders: SplitFolders) -> _Shards:
    """Returns the shards of both splits.

    Without a folder of their own, held-out shards are those whose names begin with "val" or the like, unless all do.
    """
    root = Path(os.path.realpath(root_of(spec) or folders.train))
    real_paths = [os.path.realpath(folder) for folder in folders if folder is not None]
    train = _shards(folders.train, root, real_paths)
    if folders.held_out is not None:
        return _Shards(train, _shards(folders.held_out, root, real_paths))
    held_out_paths = [path for path in train if Path(path).name.lower().startswith(HELD_OUT_NAMES)]
    if len(held_out_paths) == len(train):
        return _Shards(train, {})
    held_out = {path: train.pop(path) for path in held_out_paths}
    return _Shards(train, held_out)


def _refuse_stray_classes(shards: list[str], members: list[_Member], label_by_class: Mapping[str, int]) -> None:
    """Refuses a held-out image of a class that is not trained on."""
    for member in members:
        if member.label not in label_by_class:
            what = f"{shown(shards[member.shard])} has the class {shown(member.label)} ({shown(member.name)})"
            raise RequestError(f"{what}, which is not among the training classes", next_step="Remove its images")


def _labelled_images(
    shards: Iterable[str], members: list[_Member], label_by_class: Mapping[str, int]
) -> LabelledImages:
    """Returns the images of the classes that are read."""
    selected = [member for member in members if member.label in label_by_class]
    labels = np.array([label_by_class[member.label] for member in selected], dtype=np.int64)
    return LabelledImages(Members(tuple(shards), tuple(selected)), labels)


def _shards(folder: Path, root: Path, real_paths: list[str]) -> dict[str, str]:
    """Returns the path of each shard of a split, in order, with its stamp; see `files_under`."""
    files = files_under(folder, root, real_paths)
    shards = sorted((path, status) for path, status in files if path.lower().endswith(".tar"))
    if not shards:
        raise RequestError(f"{shown(str(folder))} holds no shard (*.tar)", next_step=_HOW)
    return {path: stamp(path, folder, status) for path, status in shards}


def _members(shards: dict[str, str]) -> list[_Member]:
    """Returns every image of some shards, from an index in the cache's folder where it exists.

    The index of many samples is kept, since else each rank would go through all headers.
    """
    path = default_cache_root() / f"shards-{fingerprint_of([*shards.values()])[:24]}.index.json"
    members = _indexed_members(path, len(shards))
    if members is not None:
        return members
    paths = [*shards]
    members = []
    for shard_members in in_threads(lambda number: _members_of_shard(number, paths[number]), range(len(paths))):
        members += shard_members
    if len(members) >= FEWEST_REMEMBERED:
        write_if_possible(path, json.dumps(members))
    return members


def _indexed_members(path: Path, shards: int) -> list[_Member] | None:
    """Reads an index; None where there is none, or it is not one of so many shards."""
    try:
        members = [_Member(*fields) for fields in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError):
        return None
    for member in members:
        if [type(field) for field in member] != _TYPES or not 0 <= member.shard < shards:
            return None
    return members


def _members_of_shard(number: int, path: str) -> list[_Member]:
    """Returns the images of shard `number`, in its order.

    Raises:
        RequestError: it is damaged, or a sample has no class.
    """
    images: dict[str, _StoredFile] = {}
    labels: dict[str, str] = {}
    try:
        _read_headers(path, images, labels)
        shard_bytes = Path(path).stat().st_size
    except RequestError:
        raise
    except Exception as error:  # hostile files make parsers raise nearly anything
        raise _damaged(path, reason(error) or type(error).__name__) from None
    for image in images.values():
        if image.offset + image.size > shard_bytes:
            raise _damaged(path, f"it is truncated in {shown(image.name)}")
    unlabelled = images.keys() - labels.keys()
    if unlabelled:
        name = images[min(unlabelled)].name
        raise _damaged(path, f"{shown(name)} has no .cls or .json beside it that tells its class")
    members: list[_Member] = []
    for key, image in images.items():
        member = _Member(number, image.name, image.offset, image.size, part=0, label=labels[key])
        members += [member._replace(part=part) for part in range(_image_count(path, member))]
    return members


def _read_headers(path: str, images: dict[str, _StoredFile], labels: dict[str, str]) -> None:
    """Goes through a shard, and adds its images and their classes by sample.

    Raises:
        RequestError: a member is no file, a class cannot be read, or two images are of one sample.
    """
    with tarfile.open(path, mode="r:") as tar:
        for member in tar:
            if member.isdir():
                continue
            if not member.isreg() or member.issparse():
                raise _damaged(path, f"its member {shown(member.name)} is a link or a device")
            folder, _, name = member.name.rpartition("/")
            stem, _, extension = name.partition(".")
            sample = f"{folder}/{stem}"
            if f".{extension.lower()}" in _IMAGES:
                if sample in images:
                    other = images[sample].name
                    raise _damaged(path, f"it holds {shown(other)} and {shown(member.name)}, one sample's")
                images[sample] = _StoredFile(member.name, member.offset_data, member.size)
            elif extension.lower() in ("cls", "cls.txt", "json") and member.size <= _MOST_LABEL_BYTES:
                content = tar.extractfile(member)
                labels[sample] = _label(content.read() if content is not None else b"", extension, path, member.name)


def _image_count(path: str, member: _Member) -> int:
    """Returns the number of images in a member of the shard `path`: the slices of a volume, else 1."""
    if not member.name.lower().endswith((".h5", ".hdf5")):
        return 1
    content = Members((path,), (member._replace(shard=0),)).content(0)
    return images_in(content, member.name)


def _label(content: bytes, extension: str, path: str, name: str) -> str:
    """Returns the class that a member's text names; a number without leading zeros.

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
        raise _damaged(path, f"its member {shown(name)} tells no class")
    is_number = text.isdecimal() and text.isascii()
    return str(int(text)) if is_number else text


def _damaged(path: str, what: str) -> RequestError:
    return RequestError(f"the shard {shown(path)} is damaged: {what}", next_step="Repair or remove it")


SHARDS = ImageSet(list_shards)
