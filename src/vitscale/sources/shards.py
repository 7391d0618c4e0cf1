"""Tar files in WebDataset's layout: `KEY.jpg` beside `KEY.cls`, read in place and never unpacked."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitscale.errors import RequestError, shown
from vitscale.sources.arrays import ARRAY_EXTENSIONS, images_in
from vitscale.sources.base import Labels, default_cache_root, reason, root_of, write_if_possible
from vitscale.sources.cache import in_threads
from vitscale.sources.image_folder import HELD_OUT_NAMES, files_under, fingerprint_of, split_folders, stamp
from vitscale.sources.image_set import ImageSet, Listing, chosen_classes, listing_of
from vitscale.sources.pictures import EXTENSIONS
from vitscale.trial.trial import DataSpec

_HOW = "Put shards there: ROOT/train/*.tar and ROOT/val/*.tar, or ROOT/train-000.tar, ROOT/val-000.tar"
_MOST_LABEL_BYTES = 1 << 20
FEWEST_REMEMBERED = 10_000
"""Fewest samples whose index is kept: going through a shard's headers takes about 0.1 ms a sample."""
_IMAGES = frozenset((*EXTENSIONS, *ARRAY_EXTENSIONS))


class _Member(NamedTuple):
    shard: int
    name: str
    offset: int
    size: int
    part: int
    label: str


_TYPES = [int, str, int, int, int, str]
"""Types of the fields of a `_Member`."""


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
    """The dataset `shards`. A sample is all members with the same name up to its first dot: an image, and its class as
    a number or a name in `.cls`, or under "label" in `.json`.

    Raises:
        RequestError: it is not laid out like this, or a shard is damaged.
    """
    folder, held_out_folder = split_folders(spec, _HOW, lambda _: True)
    root = Path(os.path.realpath(root_of(spec) or folder))
    read = [os.path.realpath(split) for split in (folder, held_out_folder) if split is not None]
    train = _shards(folder, root, read)
    held_out = _shards(held_out_folder, root, read) if held_out_folder is not None else {}
    if held_out_folder is None:
        own = [path for path in train if Path(path).name.lower().startswith(HELD_OUT_NAMES)]
        if len(own) < len(train):
            held_out = {path: train.pop(path) for path in own}
    members, held_out_members = _members(train), _members(held_out)
    names = chosen_classes(spec, [*{member.label for member in members}], str(folder))
    if all(name.isdecimal() for name in names):
        names.sort(key=int)
    number = {name: label for label, name in enumerate(names)}
    if stray := [member for member in held_out_members if member.label not in number and isinstance(spec.classes, int)]:
        what = f"{shown([*held_out][stray[0].shard])} has the class {shown(stray[0].label)} ({shown(stray[0].name)})"
        raise RequestError(f"{what}, which is not among the training classes", next_step="Remove its images")

    def chosen(shards: Iterable[str], of_split: list[_Member]) -> tuple[Members, Labels]:
        taken = [member for member in of_split if member.label in number]
        labels = np.array([number[member.label] for member in taken], dtype=np.int64)
        return Members(tuple(shards), tuple(taken)), labels

    own_split = chosen(held_out, held_out_members) if held_out else None
    digest = fingerprint_of([*train.values()], [*held_out.values()], names)
    return listing_of("shards", spec, names, chosen(train, members), own_split, digest, str(folder))


def _shards(folder: Path, root: Path, read: list[str]) -> dict[str, str]:
    """The path of each shard, in order, with its stamp."""
    files = files_under(folder, root, read)
    shards = sorted((path, status) for path, status in files if path.lower().endswith(".tar"))
    if not shards:
        raise RequestError(f"{shown(str(folder))} holds no shard (*.tar)", next_step=_HOW)
    return {path: stamp(path, folder, status) for path, status in shards}


def _members(shards: dict[str, str]) -> list[_Member]:
    """Every sample. Many samples are kept in the cache's folder, since else each rank would go through all headers."""
    path = default_cache_root() / f"shards-{fingerprint_of([*shards.values()])[:24]}.index.json"
    try:
        kept = [_Member(*member) for member in json.loads(path.read_text())]
        if all([*map(type, member)] == _TYPES and 0 <= member.shard < len(shards) for member in kept):
            return kept
    except (OSError, ValueError, TypeError):
        pass
    paths = [*shards]
    indices = in_threads(lambda number: _index(number, paths[number]), range(len(paths)))
    members = [member for index in indices for member in index]
    if len(members) >= FEWEST_REMEMBERED:
        write_if_possible(path, json.dumps(members))
    return members


def _index(number: int, path: str) -> list[_Member]:
    """The samples of a shard, in its order."""
    images: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, str] = {}
    try:
        with tarfile.open(path, mode="r:") as tar:
            for member in tar:
                if member.isdir():
                    continue
                if not member.isreg() or member.issparse():
                    raise _damaged(path, f"its member {shown(member.name)} is a link or a device")
                folder, _, name = member.name.rpartition("/")
                stem, _, extension = name.partition(".")
                key = f"{folder}/{stem}"
                if f".{extension.lower()}" in _IMAGES:
                    if key in images:
                        raise _damaged(path, f"it holds {shown(images[key][0])} and {shown(member.name)}, one sample's")
                    images[key] = member.name, member.offset_data, member.size
                elif extension.lower() in ("cls", "cls.txt", "json") and member.size <= _MOST_LABEL_BYTES:
                    content = tar.extractfile(member)
                    labels[key] = _label(content.read() if content is not None else b"", extension, path, member.name)
            size = Path(path).stat().st_size
    except RequestError:
        raise
    except Exception as error:  # hostile files make parsers raise nearly anything
        raise _damaged(path, reason(error) or type(error).__name__) from None
    if lost := next((name for name, offset, length in images.values() if offset + length > size), None):
        raise _damaged(path, f"it is truncated in {shown(lost)}")
    if single := images.keys() - labels.keys():
        raise _damaged(path, f"{shown(images[min(single)][0])} has no .cls or .json beside it that tells its class")
    samples = []
    for key, (name, offset, length) in images.items():
        sample = _Member(number, name, offset, length, 0, labels[key])
        volume = name.lower().endswith((".h5", ".hdf5"))
        slices = images_in(Members((path,), (sample._replace(shard=0),)).content(0), name) if volume else 1
        samples += [sample._replace(part=part) for part in range(slices)]
    return samples


def _label(content: bytes, extension: str, path: str, name: str) -> str:
    try:
        text = content.decode().strip()
        if extension.lower() == "json":
            facts = json.loads(text)
            value = facts.get("label", facts.get("class_name", facts.get("cls")))
            text = str(value) if isinstance(value, int | str) else ""
    except (ValueError, AttributeError, RecursionError):
        text = ""
    if not text or len(text) > 200:
        raise _damaged(path, f"its member {shown(name)} tells no class")
    return str(int(text)) if text.isdecimal() and text.isascii() else text


def _damaged(path: str, what: str) -> RequestError:
    return RequestError(f"the shard {shown(path)} is damaged: {what}", next_step="Repair or remove it")


SHARDS = ImageSet(list_shards)
