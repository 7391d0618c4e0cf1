"""What all sets of encoded images have in common: they are verified, decoded once or each time, and read by ranks."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from vitscale.base.processors import usable_cores
from vitscale.errors import RequestError, nearest, shown
from vitscale.sources import base
from vitscale.sources.arrays import ArrayShape
from vitscale.sources.base import ArraySplit, Dataset, Encoded, Images, Labels, OnProgress, Summary
from vitscale.sources.cache import SPLITS, DecodedDataset, Room, cached, find, in_memory, in_threads
from vitscale.sources.decoding import UndecodedFiles, decode_image, decode_split, problems_of, refuse_broken
from vitscale.sources.scenes import SceneSplit
from vitscale.trial.model_spec import Task
from vitscale.trial.trial import DataSpec

MOST_CACHED_BYTES = 20_000_000_000
"""Most bytes of decoded images in the cache; more are decoded each time they are taken, if `data.source` is not set."""
MOST_MEMORY_BYTES = 2_000_000_000
"""Most bytes of decoded images that are kept in memory where no cache can be written."""


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

        for _ in in_threads(decode, range(len(ids))):
            pass
        return images

    def channels(self, first: int, stop: int) -> FileSplit:
        """Only these channels: in a scene, the first 3 are its picture and the last is its mask."""
        return replace(self, shape=self.shape._replace(channels=stop - first))

    def without(self, numbers: Sequence[int]) -> FileSplit:
        """All images except these."""
        kept = np.delete(np.arange(len(self)), list(numbers))
        return FileSplit(self.encoded.some(kept), self.labels[kept], self.shape)


@dataclass(frozen=True)
class Listing:
    """Every image of a set, in an order that does not depend on the file system."""

    classes: tuple[str, ...]
    train: FileSplit
    held_out: FileSplit
    fingerprint: str
    """Fingerprint of the files as they are, before any is left out for being broken."""
    key: str
    """Key of the cache entry, from the files, what they are stored as, and which of them are held out."""
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
        masked = self.task == "segmentation"
        return Summary(
            train_samples=len(self.train),
            held_out_samples=len(self.held_out),
            classes=self.classes,
            image_shape=(side, side, channels - masked),
            fingerprint=self.fingerprint,
            notes=self.notes,
            task=self.task,
            sizes_vary=masked,
        )

    def dataset(self, train: FileSplit | ArraySplit, held_out: FileSplit | ArraySplit) -> Dataset:
        """The dataset, given how each split's pixels are read."""
        if self.task == "classification":
            return Dataset(self.summary, train, held_out)
        mask = self.train.shape.channels - 1

        def scenes(split: FileSplit | ArraySplit) -> SceneSplit:
            return SceneSplit(split.channels(0, mask), split.channels(mask, mask + 1))

        return Dataset(self.summary, scenes(train), scenes(held_out))

    def judged(self, *, wholly: bool) -> dict[str, UndecodedFiles]:
        """Finds the broken images of each split."""
        return {split: problems_of(getattr(self, split).encoded, self.train.shape, wholly=wholly) for split in SPLITS}

    def without(self, problems: dict[str, UndecodedFiles]) -> Listing:
        """The set without its broken images, with a fingerprint and a key of its own."""
        names = [name for split in SPLITS for name, _ in problems[split].values()]
        if not names:
            return self
        digest = hashlib.sha256("\n".join((self.fingerprint, *names)).encode(errors="surrogateescape")).hexdigest()
        some = ", ".join(shown(name) for name in names[:10]) + (f" and {len(names) - 10} more" if names[10:] else "")
        return replace(
            self,
            train=self.train.without([*problems["train"]]),
            held_out=self.held_out.without([*problems["held_out"]]),
            fingerprint=digest,
            key=f"{self.key}-{digest[:12]}",
            notes=(*self.notes, f"{len(names)} broken image(s) left out: {some}"),
        )


class ImageSet:
    """A dataset of encoded images; such datasets differ only in how images are listed."""

    def __init__(self, list_images: Callable[[DataSpec], Listing], keys: Sequence[str] = ("channels", "dtype")) -> None:
        """`keys` are the keys of [data] that it takes, besides those of every image set."""
        self._list_images, self._keys = list_images, (*keys, "source", "skip_broken", "classes")
        self._verified: set[str] = set()
        """Keys of listings without a broken image: a study that varies something else checks them only once."""

    def check(self, spec: DataSpec) -> Summary:
        """Opens every image, unless this user's cache holds these files decoded; names all that are broken.

        If some may be left out, each is decoded, and the result is kept in the cache's folder.
        """
        cache_root = base.default_cache_root()
        listing = self._listing(spec, cache_root)
        if not spec.skip_broken and listing.key not in self._verified and find(cache_root, listing.key) is None:
            refuse_broken(_problems(listing.judged(wholly=False)))
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
        build = partial(_decode, listing, processes=processes, progress=progress)
        decoded = cached(cache_root, listing.key, build, verify=True)
        if decoded is None and spec.source == "cache":
            raise _no_cache(listing, cache_root)
        if decoded is None and listing.decoded_bytes <= MOST_MEMORY_BYTES:
            in_memory(build)  # only for its errors: each rank has to decode for itself

    def load(self, spec: DataSpec, cache_root: Path) -> Dataset:
        """See `Source.load`."""
        listing = self._listing(spec, cache_root)
        build = partial(_decode, listing)
        decoded: DecodedDataset | None = None
        small = listing.decoded_bytes <= MOST_CACHED_BYTES
        if spec.source in ("cache", "memory") or (spec.source is None and small):
            decoded = cached(cache_root, listing.key, build)
        match spec.source:
            case "cache" if decoded is None:
                raise _no_cache(listing, cache_root)
            case "memory":
                _require_memory(listing)
                decoded = in_memory(build) if decoded is None else _copied(decoded)
            case None if decoded is None and listing.decoded_bytes <= MOST_MEMORY_BYTES:
                decoded = in_memory(build)
        opened = listing if decoded is None else decoded
        return listing.dataset(opened.train, opened.held_out)

    def _listing(self, spec: DataSpec, cache_root: Path) -> Listing:
        base.refuse_other_keys(spec, self._keys)
        listing = self._list_images(spec)
        if spec.source_size == DataSpec.model_fields["source_size"].default:
            small = f"images are stored at {spec.source_size} pixels a side, the default of data.source_size"
            note = f"{small}: a model of larger images sees these enlarged"
            listing = replace(listing, notes=(*listing.notes, note))
        if spec.skip_broken:
            problems = _remembered(cache_root / f"{listing.key}.broken.json", listing)
            refuse_broken(_problems(problems), spec.skip_broken)
            listing = listing.without(problems)
        return listing


def _problems(of_splits: Mapping[str, UndecodedFiles]) -> list[tuple[str, str]]:
    return [problem for of_split in of_splits.values() for problem in of_split.values()]


def listing_of(
    kind: str,
    spec: DataSpec,
    classes: Sequence[str],
    train: tuple[Encoded, Labels],
    held_out: tuple[Encoded, Labels] | None,
    fingerprint: str,
    where: str,
) -> Listing:
    """A listing of what was found; without a split of its own, a share `data.held_out` of the images is held out.

    Args:
        kind: kind of dataset, for the cache's key.
        spec: what was asked for.
        classes: names, in the order of the labels.
        train: images and their labels.
        held_out: the same for their own split; None: there is none.
        fingerprint: fingerprint of all files.
        where: the folder, for messages.

    Raises:
        RequestError: nothing can be held out.
    """
    shape = ArrayShape(spec.source_size, spec.channels, spec.dtype)
    encoded, labels = train
    share = "own"
    if held_out is None:
        share = str(spec.held_out)
        if base.held_out_count(len(labels), len(classes), spec.held_out) < 1:
            what = f"{shown(where)} has one image for each class: nothing can be held out"
            raise RequestError(what, next_step="Add images, or make the folders train and val")
        train_ids, held_out_ids = base.split_ids(labels, spec.held_out)
        held_out = encoded.some(held_out_ids), labels[held_out_ids]
        encoded, labels = encoded.some(train_ids), labels[train_ids]
    stored = "" if (spec.channels, spec.dtype) == (3, "uint8") else f"-{spec.channels}-{spec.dtype}"
    stored += "" if spec.dtype == "uint8" else "-2"  # until 0.1.0 pictures of 16 bits were decoded to 8
    return Listing(
        classes=tuple(os.fsencode(name).decode(errors="replace") for name in classes),
        train=FileSplit(encoded, labels, shape),
        held_out=FileSplit(*held_out, shape),
        fingerprint=fingerprint,
        key=f"{kind}-{fingerprint[:24]}-{spec.source_size}{stored}-{share}",
    )


def chosen_classes(
    spec: DataSpec, present: Sequence[str], where: str, kind: str = "classes", next_step: str = ""
) -> list[str]:
    """The classes that are taken from those present, sorted: all, or those that `data.classes` names.

    A line of its file is a class, or begins with one: "n01440764 tench". `where` the classes are, what `kind` of thing
    they are, and the `next_step` if there are too few are used in messages.

    Raises:
        RequestError: one is not there, or fewer than 2 are left.
    """
    if isinstance(spec.classes, int):
        chosen = sorted(present)
    else:
        lines = spec.classes if isinstance(spec.classes, tuple) else (spec.classes,)
        there = set(present)
        named = [line if line in there else line.split(maxsplit=1)[0] for line in lines]
        absent = [line for line, name in zip(lines, named, strict=True) if name not in there]
        if absent:
            more = f" (and {len(absent) - 1} more)" if absent[1:] else ""
            what = f"data.classes names {shown(absent[0])}{more}, and {shown(where)} has no such class"
            raise RequestError(what, next_step="Correct the file of classes", hint=nearest(absent[0], sorted(there)))
        chosen = sorted(set(named))
    if len(chosen) < 2:
        what = f"{shown(where)} has {len(chosen)} {kind}; at least 2 are needed"
        raise RequestError(what, next_step=next_step)
    return chosen


def _decode(listing: Listing, room: Room, *, processes: int = 0, progress: OnProgress | None = None) -> tuple[str, ...]:
    samples = {split: len(getattr(listing, split)) for split in SPLITS}
    before = 0
    for name in SPLITS:
        split: FileSplit = getattr(listing, name)
        side, channels, dtype = split.shape
        images, labels = room(name, samples[name], (side, side, channels), dtype)
        labels[:] = split.labels
        told = partial(_told, progress, before, sum(samples.values())) if progress is not None else None
        decode_split(room, name, images, split.encoded, split.shape, processes=processes, progress=told)
        before += samples[name]
    return listing.classes


def _told(progress: OnProgress, before: int, samples: int, done: int, _of_split: int) -> None:
    progress(before + done, samples)


def _remembered(path: Path, listing: Listing) -> dict[str, UndecodedFiles]:
    """The broken images, read from a file in the cache's folder if it exists: finding them decodes every image."""
    try:
        read = json.loads(path.read_text())
        return {split: {int(n): (str(name), str(what)) for n, name, what in read[split]} for split in SPLITS}
    except (OSError, ValueError, KeyError, TypeError):
        pass
    problems = listing.judged(wholly=True)
    content = {split: [[n, *problems[split][n]] for n in problems[split]] for split in SPLITS}
    base.write_if_possible(path, json.dumps(content))
    return problems


def _copied(decoded: DecodedDataset) -> DecodedDataset:
    def copied(split: ArraySplit) -> ArraySplit:
        return ArraySplit(split.images.copy(), split.labels.copy())

    return replace(decoded, train=copied(decoded.train), held_out=copied(decoded.held_out))


def _require_memory(listing: Listing) -> None:
    import psutil

    free = psutil.virtual_memory().available
    if listing.decoded_bytes > free:
        raise RequestError(
            f"data.source = 'memory' takes {listing.decoded_bytes / 1e9:.1f} GB in each rank, and "
            f"{free / 1e9:.1f} GB are free here",
            next_step='Use source = "cache", which all ranks of a host share, or a smaller data.source_size',
        )


def _no_cache(listing: Listing, cache_root: Path) -> RequestError:
    return RequestError(
        f"data.source = 'cache' needs {listing.decoded_bytes / 1e9:.1f} GB in {shown(str(cache_root))}, which "
        "is full or cannot be written",
        next_step="Set VITSCALE_CACHE to a folder that has room",
    )
