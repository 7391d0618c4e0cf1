"""Verifies and reads sets of encoded images, which are decoded once or each time; all such sets share this."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitscale.base.processors import usable_cores
from vitscale.errors import RequestError, nearest, shown
from vitscale.sources import base
from vitscale.sources.arrays import ArrayShape
from vitscale.sources.base import ArraySplit, Dataset, Encoded, Images, Labels, OnProgress, Summary
from vitscale.sources.cache import SPLITS, Build, DecodedDataset, Room, cached, find, in_memory, map_in_threads
from vitscale.sources.decoding import (
    ImageProblem,
    UndecodedFiles,
    decode_image,
    decode_split,
    problems_of,
    refuse_broken,
)
from vitscale.sources.scenes import SceneSplit
from vitscale.trial.model_spec import Task
from vitscale.trial.trial import DataSpec

MOST_CACHED_BYTES = 20_000_000_000
"""Most bytes of decoded images in the cache; more are decoded each time they are taken, if `data.source` is not set."""
MOST_MEMORY_BYTES = 2_000_000_000
"""Most bytes of decoded images that are kept in memory where no cache can be written."""
_MOST_NAMES_LISTED = 10
"""Most broken images that a note names."""


@dataclass(frozen=True, eq=False)
class FileSplit:
    """A split that is decoded on demand."""

    encoded: Encoded
    labels: Labels
    shape: ArrayShape

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, ids: Labels) -> Images:
        """Decodes the images in threads; see `Split.take`. Raises `RequestError` naming a broken file."""
        base.require_ids(ids, len(self))
        side, channels, dtype = self.shape
        images = np.empty((len(ids), side, side, channels), dtype=dtype)

        def decode(position: int) -> None:
            images[position] = decode_image(self.encoded, int(ids[position]), self.shape)

        for _ in map_in_threads(decode, range(len(ids))):
            pass
        return images

    def channels(self, first: int, stop: int) -> FileSplit:
        """Returns the split with these channels alone: of a scene, the first 3 are its picture, the last its mask."""
        return replace(self, shape=self.shape._replace(channels=stop - first))

    def without(self, numbers: Sequence[int]) -> FileSplit:
        """Returns the split with all images except these."""
        remaining = np.delete(np.arange(len(self)), list(numbers))
        return FileSplit(self.encoded.some(remaining), self.labels[remaining], self.shape)


@dataclass(frozen=True)
class Listing:
    """Every image of a set, in an order that does not depend on the file system."""

    classes: tuple[str, ...]
    train: FileSplit
    held_out: FileSplit
    fingerprint: str
    """Fingerprint of the files as they are, before any is left out for being broken."""
    key: str
    """Key of the cache entry. It depends on the files, on how they are stored, and on which of them are held out."""
    notes: tuple[str, ...] = ()
    task: Task = "classification"
    """In segmentation the last stored channel is the mask."""

    @property
    def decoded_bytes(self) -> int:
        """Bytes of both splits once decoded."""
        side, channels, dtype = self.train.shape
        return (len(self.train) + len(self.held_out)) * side**2 * channels * np.dtype(dtype).itemsize

    @property
    def summary(self) -> Summary:
        """What is known before decoding."""
        side, channels, _ = self.train.shape
        has_masks = self.task == "segmentation"
        return Summary(
            train_samples=len(self.train),
            held_out_samples=len(self.held_out),
            classes=self.classes,
            image_shape=(side, side, channels - 1 if has_masks else channels),
            fingerprint=self.fingerprint,
            notes=self.notes,
            task=self.task,
            sizes_vary=has_masks,
        )

    def dataset(self, train: FileSplit | ArraySplit, held_out: FileSplit | ArraySplit) -> Dataset:
        """Returns the dataset, given how each split's pixels are read."""
        if self.task == "classification":
            return Dataset(self.summary, train, held_out)
        mask_channel = self.train.shape.channels - 1  # the last one

        def scenes(split: FileSplit | ArraySplit) -> SceneSplit:
            pictures = split.channels(0, mask_channel)
            masks = split.channels(mask_channel, mask_channel + 1)
            return SceneSplit(pictures, masks)

        return Dataset(self.summary, scenes(train), scenes(held_out))

    def split(self, name: str) -> FileSplit:
        """Returns the split "train" or "held_out"."""
        return self.train if name == "train" else self.held_out

    def find_broken(self, *, decode: bool) -> dict[str, UndecodedFiles]:
        """Returns the broken images of each split.

        Args:
            decode: whether each image is decoded; else each is only opened, which finds less.
        """
        return {name: problems_of(self.split(name).encoded, self.train.shape, decode=decode) for name in SPLITS}

    def without(self, problems: dict[str, UndecodedFiles]) -> Listing:
        """Returns the set without its broken images, with a fingerprint and a key of its own."""
        names = [problem.name for problem in _all_problems(problems)]
        if not names:
            return self
        digest = hashlib.sha256("\n".join((self.fingerprint, *names)).encode(errors="surrogateescape")).hexdigest()
        quoted_names = ", ".join(shown(name) for name in names[:_MOST_NAMES_LISTED])
        if len(names) > _MOST_NAMES_LISTED:
            quoted_names += f" and {len(names) - _MOST_NAMES_LISTED} more"
        return replace(
            self,
            train=self.train.without([*problems["train"]]),
            held_out=self.held_out.without([*problems["held_out"]]),
            fingerprint=digest,
            key=f"{self.key}-{digest[:12]}",
            notes=(*self.notes, f"{len(names)} broken image(s) left out: {quoted_names}"),
        )


class ImageSet:
    """A dataset of encoded images; such datasets differ only in how images are listed."""

    def __init__(self, list_images: Callable[[DataSpec], Listing], keys: Sequence[str] = ("channels", "dtype")) -> None:
        """`keys` are the keys of [data] that it takes, besides those of every image set."""
        self._list_images = list_images
        self._keys = (*keys, "source", "skip_broken", "classes")
        self._verified: set[str] = set()
        """Keys of listings without a broken image: a study that varies something else checks them only once."""

    def check(self, spec: DataSpec) -> Summary:
        """Opens every image, unless this user's cache holds these files decoded; names all that are broken.

        If some may be left out, each is decoded, and the result is kept in the cache's folder.
        """
        cache_root = base.default_cache_root()
        listing = self._listing(spec, cache_root)
        if not spec.skip_broken and listing.key not in self._verified and find(cache_root, listing.key) is None:
            refuse_broken(_all_problems(listing.find_broken(decode=False)))
            self._verified.add(listing.key)
        return listing.summary

    def prepare(self, spec: DataSpec, cache_root: Path, progress: OnProgress | None = None) -> None:
        """Decodes what ranks will map, in processes on all cores; checks what is already there by its checksums.

        Raises:
            RequestError: images are wrong, or the cache has no room or cannot be written.
        """
        listing = self._listing(spec, cache_root)
        if spec.source == "jpeg" or (spec.source is None and listing.decoded_bytes > MOST_CACHED_BYTES):
            return
        processes = len(usable_cores())
        build = partial(_decode_splits, listing, processes=processes, progress=progress)
        decoded = cached(cache_root, listing.key, build, verify=True)
        if decoded is None and spec.source == "cache":
            raise _no_cache_error(listing, cache_root)
        if decoded is None and listing.decoded_bytes <= MOST_MEMORY_BYTES:
            in_memory(build)  # only for its errors: each rank has to decode for itself

    def load(self, spec: DataSpec, cache_root: Path) -> Dataset:
        """See `Source.load`."""
        listing = self._listing(spec, cache_root)
        decoded = _load_decoded(spec, listing, cache_root)
        if decoded is None:
            return listing.dataset(listing.train, listing.held_out)
        return listing.dataset(decoded.train, decoded.held_out)

    def _listing(self, spec: DataSpec, cache_root: Path) -> Listing:
        """Lists the images, without broken ones where they may be left out.

        Raises:
            RequestError: the keys or the files are wrong, or more images are broken than may be.
        """
        base.refuse_other_keys(spec, self._keys)
        listing = self._list_images(spec)
        if spec.source_size == DataSpec.model_fields["source_size"].default:
            size = f"images are stored at {spec.source_size} pixels a side, the default of data.source_size"
            note = f"{size}: a model of larger images sees these enlarged"
            listing = replace(listing, notes=(*listing.notes, note))
        if spec.skip_broken:
            problems = _broken_images(listing, cache_root / f"{listing.key}.broken.json")
            refuse_broken(_all_problems(problems), spec.skip_broken)
            listing = listing.without(problems)
        return listing


def _load_decoded(spec: DataSpec, listing: Listing, cache_root: Path) -> DecodedDataset | None:
    """Returns the decoded images from where `data.source` says; None where they are decoded each time.

    Raises:
        RequestError: `data.source` needs a cache or memory that has no room for them.
    """
    build = partial(_decode_splits, listing)
    match spec.source:
        case "jpeg":
            return None
        case "cache":
            decoded = cached(cache_root, listing.key, build)
            if decoded is None:
                raise _no_cache_error(listing, cache_root)
            return decoded
        case "memory":
            decoded = cached(cache_root, listing.key, build)
            _require_memory(listing)
            return in_memory(build) if decoded is None else _copied_to_memory(decoded)
        case None:
            return _load_by_default(listing, cache_root, build)


def _load_by_default(listing: Listing, cache_root: Path, build: Build) -> DecodedDataset | None:
    """Returns the decoded images from the cache where they fit, else from memory where they fit; else None."""
    decoded: DecodedDataset | None = None
    if listing.decoded_bytes <= MOST_CACHED_BYTES:
        decoded = cached(cache_root, listing.key, build)
    if decoded is None and listing.decoded_bytes <= MOST_MEMORY_BYTES:
        decoded = in_memory(build)
    return decoded


def _all_problems(problems_by_split: Mapping[str, UndecodedFiles]) -> list[ImageProblem]:
    """Returns the problems of the images of all splits."""
    all_problems: list[ImageProblem] = []
    for problems in problems_by_split.values():
        all_problems += problems.values()
    return all_problems


class LabelledImages(NamedTuple):
    """Images of one split, and their labels."""

    encoded: Encoded
    labels: Labels


def listing_of(
    kind: str,
    spec: DataSpec,
    classes: Sequence[str],
    train: LabelledImages,
    held_out: LabelledImages | None,
    fingerprint: str,
    location: str,
) -> Listing:
    """Makes a listing of images; without a split of its own, a share `data.held_out` of them is held out.

    Args:
        kind: kind of dataset, for the cache's key.
        spec: the [data] section.
        classes: names, in the order of the labels.
        train: the training images, or all where `held_out` is None.
        held_out: the held-out images; None: they have no split of their own.
        fingerprint: fingerprint of all files.
        location: the folder, for messages.

    Raises:
        RequestError: nothing can be held out.
    """
    if held_out is not None:
        splits = _Splits(train, held_out)
        share = "own"
    else:
        splits = _divide(train, len(classes), spec.held_out, location)
        share = str(spec.held_out)
    shape = ArrayShape(spec.source_size, spec.channels, spec.dtype)
    return Listing(
        classes=tuple(os.fsencode(name).decode(errors="replace") for name in classes),
        train=FileSplit(splits.train.encoded, splits.train.labels, shape),
        held_out=FileSplit(splits.held_out.encoded, splits.held_out.labels, shape),
        fingerprint=fingerprint,
        key=f"{kind}-{fingerprint[:24]}-{spec.source_size}{_pixel_key(spec)}-{share}",
    )


class _Splits(NamedTuple):
    """The images of both splits."""

    train: LabelledImages
    held_out: LabelledImages


def _divide(images: LabelledImages, classes: int, share: float, location: str) -> _Splits:
    """Divides the images of a set that has no held-out split of its own.

    Raises:
        RequestError: no class has two images.
    """
    if base.held_out_count(len(images.labels), classes, share) < 1:
        what = f"{shown(location)} has one image for each class: nothing can be held out"
        raise RequestError(what, next_step="Add images, or make the folders train and val")
    ids = base.split_ids(images.labels, share)
    return _Splits(train=_selected_images(images, ids.train), held_out=_selected_images(images, ids.held_out))


def _pixel_key(spec: DataSpec) -> str:
    """Returns the part of a cache key that stands for channels and dtype.

    It is "" for colours of 8 bits, and "-1-uint16-2" for grey of 16 bits.
    """
    if (spec.channels, spec.dtype) == (3, "uint8"):
        return ""
    key = f"-{spec.channels}-{spec.dtype}"
    return key if spec.dtype == "uint8" else f"{key}-2"  # until 0.1.0 pictures of 16 bits were decoded to 8


def _selected_images(images: LabelledImages, ids: Labels) -> LabelledImages:
    """Returns only the images `ids`, in this order."""
    return LabelledImages(images.encoded.some(ids), images.labels[ids])


def chosen_classes(
    spec: DataSpec, present: Sequence[str], location: str, kind: str = "classes", next_step: str = ""
) -> list[str]:
    """Returns the classes to read, sorted: all that are present, or those that `data.classes` names.

    A line of its file is a class, or begins with one: "n01440764 tench".

    Args:
        spec: the [data] section.
        present: names of the classes that have images.
        location: where they are, for messages.
        kind: what they are ("class folders"), for messages.
        next_step: what to do if there are too few, for messages.

    Raises:
        RequestError: one is not there, or fewer than 2 are left.
    """
    classes = sorted(present) if isinstance(spec.classes, int) else _named_classes(spec.classes, present, location)
    if len(classes) < 2:
        what = f"{shown(location)} has {len(classes)} {kind}; at least 2 are needed"
        raise RequestError(what, next_step=next_step)
    return classes


def _named_classes(lines: tuple[str, ...] | str, present: Sequence[str], location: str) -> list[str]:
    """Returns the classes that lines begin with, each once, sorted; refuses a line of a class that is not present."""
    if isinstance(lines, str):
        lines = (lines,)
    present_names = set(present)
    names: set[str] = set()
    absent: list[str] = []
    for line in lines:
        name = line if line in present_names else line.split(maxsplit=1)[0]
        if name in present_names:
            names.add(name)
        else:
            absent.append(line)
    if absent:
        more = f" (and {len(absent) - 1} more)" if len(absent) > 1 else ""
        what = f"data.classes names {shown(absent[0])}{more}, and {shown(location)} has no such class"
        hint = nearest(absent[0], sorted(present_names))
        raise RequestError(what, next_step="Correct the file of classes", hint=hint)
    return sorted(names)


def _decode_splits(
    listing: Listing, room: Room, *, processes: int = 0, progress: OnProgress | None = None
) -> tuple[str, ...]:
    """Decodes both splits of a listing into a room.

    Args:
        listing: the images.
        room: makes the arrays to fill.
        processes: processes that decode, as in `decode_split`.
        progress: is called with the number of images done, of both splits, and of all.

    Returns:
        The names of the classes.
    """
    all_images = len(listing.train) + len(listing.held_out)
    images_before = 0  # of the splits before this one
    for name in SPLITS:
        split = listing.split(name)
        side, channels, dtype = split.shape
        images, labels = room(name, len(split), (side, side, channels), dtype)
        labels[:] = split.labels
        split_progress: OnProgress | None = None
        if progress is not None:
            split_progress = partial(_report_progress, progress, images_before, all_images)
        decode_split(room, name, images, split.encoded, split.shape, processes=processes, progress=split_progress)
        images_before += len(split)
    return listing.classes


def _report_progress(
    progress: OnProgress, images_before: int, all_images: int, split_images_done: int, _split_images: int
) -> None:
    """Reports the progress of one split as that of all images."""
    progress(images_before + split_images_done, all_images)


def _broken_images(listing: Listing, path: Path) -> dict[str, UndecodedFiles]:
    """Returns the broken images of each split, from the file `path` if an earlier call has written it.

    Else every image is decoded to find them, and they are written there.
    """
    stored = _read_problems(path)
    if stored is not None:
        return stored
    problems = listing.find_broken(decode=True)
    _write_problems(path, problems)
    return problems


def _read_problems(path: Path) -> dict[str, UndecodedFiles] | None:
    """Reads what `_write_problems` has written; None where there is no such file."""
    try:
        content = json.loads(path.read_text())
        return {split: _problems_from(content[split]) for split in SPLITS}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_problems(path: Path, problems: Mapping[str, UndecodedFiles]) -> None:
    """Writes broken images, as {"train": [[17, "cat/17.jpg", "not an image"], ...], "held_out": [...]}."""
    rows: dict[str, list[list[int | str]]] = {}
    for split in SPLITS:
        rows[split] = [[number, *problem] for number, problem in problems[split].items()]
    base.write_if_possible(path, json.dumps(rows))


def _problems_from(rows: Any) -> UndecodedFiles:
    """Returns one split's broken images from their rows in JSON.

    Raises:
        TypeError, ValueError: they are no such rows.
    """
    return {int(number): ImageProblem(str(name), str(what)) for number, name, what in rows}


def _copied_to_memory(decoded: DecodedDataset) -> DecodedDataset:
    """Returns a dataset with copies of its arrays in memory."""
    return replace(decoded, train=_copied_split(decoded.train), held_out=_copied_split(decoded.held_out))


def _copied_split(split: ArraySplit) -> ArraySplit:
    """Returns a split with copies of its arrays in memory."""
    return ArraySplit(split.images.copy(), split.labels.copy())


def _require_memory(listing: Listing) -> None:
    """Refuses a set that does not fit into this host's free memory once decoded."""
    import psutil

    free = psutil.virtual_memory().available
    if listing.decoded_bytes > free:
        raise RequestError(
            f"data.source = 'memory' takes {listing.decoded_bytes / 1e9:.1f} GB in each rank, and "
            f"{free / 1e9:.1f} GB are free here",
            next_step='Use source = "cache", which all ranks of a host share, or a smaller data.source_size',
        )


def _no_cache_error(listing: Listing, cache_root: Path) -> RequestError:
    """Returns the error where a study asks for the cache, and it cannot hold the images."""
    return RequestError(
        f"data.source = 'cache' needs {listing.decoded_bytes / 1e9:.1f} GB in {shown(str(cache_root))}, which "
        "is full or cannot be written",
        next_step="Set VITSCALE_CACHE to a folder that has room",
    )
