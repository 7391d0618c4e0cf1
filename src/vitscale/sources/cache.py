"""Decoded images on disk, memory-mapped and shared by every rank of a host.

An entry is a folder that appears by one rename, so it is whole or absent; builders take turns by a kernel lock,
which is free again when its holder dies. Nothing in an entry is pickled.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from vitscale.sources.base import ArraySplit, Dataset, Images, Labels, Summary

_FACTS = "facts.json"


class Room(Protocol):
    """Where a builder puts a split: `images, labels = room(name, samples, (H, W, 3))`, then fills both."""

    def __call__(self, split: str, samples: int, shape: tuple[int, int, int]) -> tuple[Images, Labels]:
        """Uninitialised uint8 `[samples, H, W, C]` and int64 `[samples]`, to be filled by the caller."""
        ...


Build = Callable[[Room], tuple[str, ...]]
"""Fills the splits "train" and "held_out" and returns the names of the classes."""


@dataclass(frozen=True, eq=False)
class Decoded:
    """Both splits and the names of the classes."""

    train: ArraySplit
    held_out: ArraySplit
    classes: tuple[str, ...]

    def dataset(self, fingerprint: str, notes: tuple[str, ...]) -> Dataset:
        """With its summary."""
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


def in_memory(build: Build) -> Decoded:
    """Decodes into memory, for this process alone."""
    splits: dict[str, ArraySplit] = {}

    def room(split: str, samples: int, shape: tuple[int, int, int]) -> tuple[Images, Labels]:
        images = np.empty((samples, *shape), dtype=np.uint8)
        splits[split] = ArraySplit(images, np.empty(samples, dtype=np.int64))
        return images, splits[split].labels

    classes = build(room)
    return Decoded(splits["train"], splits["held_out"], classes)


def find(cache_root: Path, key: str) -> Decoded | None:
    """The entry `key`, or None where it is absent, unreadable or damaged."""
    folder = cache_root / key
    try:
        classes = json.loads((folder / _FACTS).read_text())["classes"]
        train, held_out = (_open_split(folder, split) for split in ("train", "held_out"))
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        return None
    return Decoded(train, held_out, tuple(classes))


def cached(cache_root: Path, key: str, build: Build) -> Decoded | None:
    """The entry `key`, built first where it is not there; None where the cache cannot be written.

    Of several callers at once one builds and the others wait for it. What `build` raises is passed on, and leaves
    nothing behind; it must not raise `OSError` for its own reasons.
    """
    if found := find(cache_root, key):
        return found
    try:
        cache_root.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _lock(cache_root / f"{key}.lock"):
            return find(cache_root, key) or _build(cache_root, key, build)
    except OSError:  # not writable, full, or without locks
        return None


def _open_split(folder: Path, split: str) -> ArraySplit:
    images = np.load(folder / f"{split}_images.npy", mmap_mode="r", allow_pickle=False)
    labels = np.load(folder / f"{split}_labels.npy", mmap_mode="r", allow_pickle=False)
    if images.dtype != np.uint8 or images.ndim != 4 or labels.dtype != np.int64:
        raise ValueError("not the arrays that are kept here")
    if labels.shape != images.shape[:1]:
        raise ValueError("as many labels as images are needed")
    return ArraySplit(images.view(np.ndarray), labels.view(np.ndarray))


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(cache_root: Path, key: str, build: Build) -> Decoded | None:
    # One builder per host holds the lock, so a folder of this name was left by one that was killed. The host is in
    # the name because on some network file systems the lock does not reach other hosts.
    partial = cache_root / f"{key}.{socket.gethostname()}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        written: list[np.memmap] = []

        def room(split: str, samples: int, shape: tuple[int, int, int]) -> tuple[Images, Labels]:
            images = _mapped(partial / f"{split}_images.npy", (samples, *shape), np.dtype(np.uint8))
            labels = _mapped(partial / f"{split}_labels.npy", (samples,), np.dtype(np.int64))
            written.extend((images, labels))
            return images, labels

        classes = build(room)
        for array in written:
            array.flush()
        with (partial / _FACTS).open("w") as file:
            json.dump({"classes": classes}, file)
            file.flush()
            os.fsync(file.fileno())
        _put_in_place(partial, cache_root / key, find(cache_root, key) is not None)
        return find(cache_root, key)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _put_in_place(partial: Path, final: Path, another_host_was_faster: bool) -> None:
    if another_host_was_faster:
        return
    if final.exists():  # damaged: `find` refused it
        shutil.rmtree(final)
    partial.rename(final)


def _mapped(path: Path, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> np.memmap:
    array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    with path.open("r+b") as file:
        # A full disk is an OSError here; in a sparse file it would be a SIGBUS at the first write.
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array
