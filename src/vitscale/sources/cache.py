"""Keeps decoded images on disk, memory-mapped and shared by every rank of a host.

An entry is a folder that appears by one rename, so it is whole or absent; builders take turns by a kernel lock,
which is free again when its holder dies. What a killed builder had finished is in its folder's journal, with a checksum
of each chunk, and the next one goes on from there. Nothing in an entry is pickled.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TypeVar, get_args

import numpy as np

from vitscale.base.files import allocate, file_lock
from vitscale.base.processors import usable_cores
from vitscale.errors import RequestError
from vitscale.sources.base import ArraySplit, Dataset, Images, Labels, Summary
from vitscale.trial.trial import PixelType

T = TypeVar("T")
R = TypeVar("R")

_BLOCK_ITEMS = 4096
"""Items given to the threads at once: a future for each of a million items would cost a gigabyte."""


def map_in_threads(function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yields `function(item)` for each item, in order. One thread per core that this process may use calls it.

    The first exception is passed on, and ends the rest. Threads help since Pillow releases the interpreter lock while
    it decodes.
    """
    remaining = iter(items)
    with ThreadPoolExecutor(len(usable_cores())) as pool:
        while block := list(islice(remaining, _BLOCK_ITEMS)):
            yield from pool.map(function, block)


_FACTS_FILE = "facts.json"
_JOURNAL_FILE = "journal"
_CHUNK_BYTES = 64 << 20
SPLITS = ("train", "held_out")


def chunk_samples(shape: tuple[int, ...], dtype: PixelType) -> int:
    """Returns the number of images of `shape` in a chunk, which has one checksum and is decoded at once."""
    image_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return max(1, min(256, _CHUNK_BYTES // image_bytes))


def checksums(images: Images) -> list[int]:
    """Returns the CRC-32 of each chunk."""
    size = chunk_samples(images.shape[1:], images.dtype.name)  # type: ignore[arg-type]  # of one of these types
    first_images = range(0, len(images), size)
    return list(map_in_threads(lambda first: zlib.crc32(images[first : first + size].data), first_images))


class Unfinished(RequestError):
    """A builder could not go on; what it has finished is kept for the next builder."""


@dataclass
class Room:
    """Makes arrays for the splits of a dataset, on disk or in memory, which a builder then fills.

    `images, labels = room("train", samples, (H, W, C))` makes those of one split. They are not initialised, except for
    the chunks in `done`, whose images an earlier builder has left here.
    """

    folder: Path | None = None
    """Folder of the arrays; None: they are in memory."""
    splits: dict[str, ArraySplit] = field(default_factory=dict)
    done: dict[str, dict[int, int]] = field(default_factory=lambda: {split: {} for split in SPLITS})
    """Split -> number of each finished chunk -> its checksum."""

    def __call__(
        self, split: str, samples: int, shape: tuple[int, int, int], dtype: PixelType = "uint8"
    ) -> tuple[Images, Labels]:
        """Makes arrays for a split and returns them: images `[samples, H, W, C]` and labels int64 `[samples]`."""
        images: Images
        if self.folder is None:
            images = np.empty((samples, *shape), dtype=dtype)
            labels = np.empty(samples, dtype=np.int64)
        else:
            images = _mapped_array(self.folder / f"{split}_images.npy", (samples, *shape), np.dtype(dtype))
            labels = _mapped_array(self.folder / f"{split}_labels.npy", (samples,), np.dtype(np.int64))
            self._forget_damaged_chunks(split, images)
        self.splits[split] = ArraySplit(images, labels)
        return images, labels

    def finish(self, split: str, chunk: int, checksum: int) -> None:
        """Notes that a chunk of a split is filled, in a journal where the arrays are on disk."""
        self.done[split][chunk] = checksum
        if self.folder is not None:
            with (self.folder / _JOURNAL_FILE).open("a") as journal:
                journal.write(f"{json.dumps([split, chunk, checksum])}\n")

    def _forget_damaged_chunks(self, split: str, images: Images) -> None:
        """Removes from `done` the chunks whose images no longer have the checksum that was noted."""
        size = chunk_samples(images.shape[1:], images.dtype.name)  # type: ignore[arg-type]  # as above
        for chunk, checksum in [*self.done[split].items()]:
            first = chunk * size
            if first >= len(images) or checksums(images[first : first + size]) != [checksum]:
                del self.done[split][chunk]


Build = Callable[[Room], tuple[str, ...]]
"""Fills both `SPLITS` in a room and returns the names of the classes."""


@dataclass(frozen=True, eq=False)
class DecodedDataset:
    """Both splits and the names of the classes."""

    train: ArraySplit
    held_out: ArraySplit
    classes: tuple[str, ...]
    checksums: dict[str, list[int]] = field(default_factory=dict)
    """Split -> checksum of its labels, then those of its chunks of images."""

    def dataset(self, fingerprint: str, notes: tuple[str, ...]) -> Dataset:
        """Returns both splits with a summary."""
        height, width, channels = self.train.images.shape[1:]
        summary = Summary(
            train_samples=len(self.train),
            held_out_samples=len(self.held_out),
            classes=self.classes,
            image_shape=(height, width, channels),
            fingerprint=fingerprint,
            notes=notes,
        )
        return Dataset(summary, self.train, self.held_out)

    def unchanged_chunks(self) -> dict[str, dict[int, int]]:
        """Split -> number of each unchanged chunk -> its checksum. Reads all images."""
        return {"train": self._unchanged_chunks("train"), "held_out": self._unchanged_chunks("held_out")}

    def _unchanged_chunks(self, split: str) -> dict[int, int]:
        """Returns number -> checksum of the chunks of a split whose images have the checksum that was stored."""
        stored_checksums = self.checksums[split][1:]  # behind that of the labels
        unchanged: dict[int, int] = {}
        for chunk, checksum in enumerate(checksums(self._split_named(split).images)):
            if chunk < len(stored_checksums) and stored_checksums[chunk] == checksum:
                unchanged[chunk] = checksum
        return unchanged

    def is_unchanged(self, unchanged_chunks: dict[str, dict[int, int]]) -> bool:
        """Whether all chunks are in `unchanged_chunks`, and the labels are unchanged too."""
        for split in SPLITS:
            labels_checksum = zlib.crc32(self._split_named(split).labels.data)
            if self.checksums[split] != [labels_checksum, *unchanged_chunks[split].values()]:
                return False
        return True

    def _split_named(self, name: str) -> ArraySplit:
        """Returns the split "train" or "held_out"."""
        return self.train if name == "train" else self.held_out


def in_memory(build: Build) -> DecodedDataset:
    """Decodes into memory, for this process alone."""
    room = Room()
    classes = build(room)
    return DecodedDataset(room.splits["train"], room.splits["held_out"], classes)


def find(cache_root: Path, key: str) -> DecodedDataset | None:
    """Returns the entry `key`, or None where it is absent, unreadable or, by its sizes, damaged."""
    folder = cache_root / key
    try:
        facts = json.loads((folder / _FACTS_FILE).read_text())
        classes = facts["classes"]
        checksums_by_split = {split: list(map(int, facts["checksums"][split])) for split in SPLITS}
        train = _open_split(folder, "train", facts["dtype"])
        held_out = _open_split(folder, "held_out", facts["dtype"])
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        return None
    return DecodedDataset(train, held_out, tuple(classes), checksums_by_split)


def cached(cache_root: Path, key: str, build: Build, *, verify: bool = False) -> DecodedDataset | None:
    """Returns the entry `key`, built first where it is missing; None where the cache cannot be written.

    If several processes call this at once, one builds and the others wait for it. What `build` raises is passed on, and
    leaves nothing behind.

    Args:
        cache_root: folder of all entries.
        key: name of the entry.
        build: fills it; must not raise `OSError` for its own reasons.
        verify: whether to check the checksums of an entry that exists; chunks that have changed are built again.
    """
    existing = find(cache_root, key)
    if existing is not None and not verify:
        return existing
    try:
        cache_root.mkdir(parents=True, exist_ok=True, mode=0o700)
        with file_lock(cache_root / f"{key}.lock"):
            entry = find(cache_root, key)
            if entry is None:
                return _build_entry(cache_root, key, build)
            unchanged_chunks = entry.unchanged_chunks()
            if entry.is_unchanged(unchanged_chunks):
                return entry
            partial = _partial_folder(cache_root, key)
            shutil.rmtree(partial, ignore_errors=True)
            (cache_root / key).rename(partial)
            _write_journal(partial, unchanged_chunks)
            return _build_entry(cache_root, key, build)
    except OSError:  # not writable, full, or without locks
        return find(cache_root, key)


def _write_journal(partial: Path, chunks: dict[str, dict[int, int]]) -> None:
    """Notes finished chunks, as `Room.finish` does: split -> number -> checksum."""
    with (partial / _JOURNAL_FILE).open("w") as journal:
        for split in SPLITS:
            for chunk, checksum in chunks[split].items():
                journal.write(f"{json.dumps([split, chunk, checksum])}\n")


def _open_split(folder: Path, split: str, dtype: object) -> ArraySplit:
    """Maps the arrays of a split in the entry `folder`.

    Raises:
        ValueError: they are not images of this dtype with one label each.
    """
    images = np.load(folder / f"{split}_images.npy", mmap_mode="r", allow_pickle=False)
    labels = np.load(folder / f"{split}_labels.npy", mmap_mode="r", allow_pickle=False)
    has_pixel_type = images.dtype.name == dtype and dtype in get_args(PixelType)
    if not has_pixel_type or images.ndim != 4 or labels.dtype != np.int64:
        raise ValueError("not the arrays that are kept here")
    if labels.shape != images.shape[:1]:
        raise ValueError("as many labels as images are needed")
    return ArraySplit(images.view(np.ndarray), labels.view(np.ndarray))


def _partial_folder(cache_root: Path, key: str) -> Path:
    """Returns the folder of an entry that is being built."""
    # One builder per host holds the lock, so a folder of this name was left by one that was killed. The host is in
    # the name because on some network file systems the lock does not reach other hosts.
    return cache_root / f"{key}.{socket.gethostname()}.partial"


def _build_entry(cache_root: Path, key: str, build: Build) -> DecodedDataset | None:
    """Builds an entry, and gives it its name; this process has the lock.

    It goes on from what an earlier builder has left. What `build` raises is passed on, and leaves nothing behind; but
    after `Unfinished`, or if this process is killed, what is finished stays for the next builder.

    Returns:
        The entry; None where it cannot be read back.
    """
    partial = _partial_folder(cache_root, key)
    if partial.is_symlink():
        partial.unlink()  # what it leads to is no part of this cache
    partial.mkdir(exist_ok=True)
    try:
        _fill_entry(partial, build)
        _publish(partial, cache_root, key)
        entry = find(cache_root, key)
    except Unfinished:
        raise
    except Exception:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    # Not in a `finally`: KeyboardInterrupt leaves the folder, so that another build goes on from it.
    shutil.rmtree(partial, ignore_errors=True)
    return entry


def _fill_entry(partial: Path, build: Build) -> None:
    """Writes the files of an entry into the folder `partial`: arrays, then their checksums and the classes."""
    room = Room(partial, done=_journalled_chunks(partial))
    classes = build(room)
    checksums_by_split = {split: _flushed_checksums(room, split) for split in SPLITS}
    dtype = room.splits["held_out"].images.dtype.name
    with (partial / _FACTS_FILE).open("w") as file:
        json.dump({"classes": classes, "dtype": dtype, "checksums": checksums_by_split}, file)
        file.flush()
        os.fsync(file.fileno())
    (partial / _JOURNAL_FILE).unlink(missing_ok=True)


def _publish(partial: Path, cache_root: Path, key: str) -> None:
    """Gives a whole entry its name, unless another host, which the lock may not reach, was faster."""
    if find(cache_root, key) is not None:
        return
    target = cache_root / key
    if target.exists():  # damaged: `find` refused it
        shutil.rmtree(target)
    partial.rename(target)


def _flushed_checksums(room: Room, split: str) -> list[int]:
    """Writes a split's arrays to the disk; returns the checksum of its labels, then those of its chunks."""
    images = room.splits[split].images
    labels = room.splits[split].labels
    checksum_by_chunk = room.done[split]
    if checksum_by_chunk:
        chunk_checksums = [checksum_by_chunk[chunk] for chunk in sorted(checksum_by_chunk)]
    else:  # a builder that does not call `Room.finish`
        chunk_checksums = checksums(images)
    for array in (images, labels):
        if isinstance(array, np.memmap):
            array.flush()
    return [zlib.crc32(labels.data), *chunk_checksums]


def _journalled_chunks(partial: Path) -> dict[str, dict[int, int]]:
    """Returns the chunks that an earlier builder noted as finished: split -> number of the chunk -> its checksum.

    The first line that is anything else ends the journal: its writer was killed there.
    """
    done: dict[str, dict[int, int]] = {split: {} for split in SPLITS}
    try:
        for line in (partial / _JOURNAL_FILE).read_text().splitlines():
            split, chunk, checksum = json.loads(line)
            done[split][int(chunk)] = int(checksum)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return done


def _mapped_array(path: Path, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> np.memmap:
    """Maps the array of an earlier builder if it has this shape, else a new one.

    Raises:
        OSError: the disk has no room for it.
    """
    try:
        array = np.lib.format.open_memmap(path, mode="r+")
        if array.shape == shape and array.dtype == dtype:
            return array
    except (OSError, ValueError):
        pass
    array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    with path.open("r+b") as file:
        # A full disk raises OSError here; in a sparse file the first write would raise SIGBUS.
        allocate(file, path.stat().st_size)
    return array
