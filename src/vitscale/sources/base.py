"""What every source of images gives: a summary, and two splits of uint8 images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vitscale.errors import RequestError, explain
from vitscale.trial import DataSpec

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class Summary:
    """What is known of a dataset before a single image is decoded: enough to plan a study."""

    train_samples: int
    held_out_samples: int
    classes: tuple[str, ...]
    """Names, in the order of the labels."""
    image_shape: tuple[int, int, int]
    """Height, width, channels as stored. Channels are always 3: grey is repeated."""
    fingerprint: str
    """Hexadecimal digest of the content; two runs with different ones did not see the same images."""
    notes: tuple[str, ...] = ()
    """What a reader of the results should know, e.g. that the files are not the official ones."""


class Split(Protocol):
    """Images and labels of one split. Safe to read from several threads."""

    def __len__(self) -> int: ...

    @property
    def labels(self) -> Labels:
        """Class of every image, int64 `[samples]`."""
        ...

    def take(self, ids: Labels) -> Images:
        """Images `ids` (int64 `[n]`, each in `0 <= id < len(self)`), as uint8 `[n, H, W, 3]` of the caller's own."""
        ...


@dataclass(frozen=True)
class Dataset:
    """Both splits, ready to be read."""

    summary: Summary
    train: Split
    held_out: Split


class Source(Protocol):
    """One kind of dataset."""

    def check(self, spec: DataSpec) -> Summary:
        """Finds and verifies; raises `RequestError`; writes nothing, except a download that was asked for."""
        ...

    def load(self, spec: DataSpec, cache_root: Path) -> Dataset:
        """Opens the images, decoding them into the cache where they are not there yet."""
        ...


@dataclass(frozen=True, eq=False)
class ArraySplit:
    """A split that lies in one array: in memory, or a memory-mapped file shared by the ranks of a host."""

    images: Images
    labels: Labels

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, ids: Labels) -> Images:
        """Copies the images out; see `Split.take`."""
        require_ids(ids, len(self))
        return self.images[ids]


def require_ids(ids: Labels, samples: int) -> None:
    """Raises `IndexError` unless every id is in `0 <= id < samples`: numpy would wrap a negative one silently."""
    if ids.size and (ids.min() < 0 or ids.max() >= samples):
        raise IndexError(f"image ids {ids.min()} to {ids.max()} in a split of {samples}")


def refuse_archive_keys(spec: DataSpec) -> None:
    """`md5` and `download` mean nothing to a source that has no archive: said, not ignored."""
    for key, is_set in (("md5", spec.md5 is not None), ("download", spec.download)):
        if is_set:
            raise RequestError(
                explain(
                    f"data.{key} does not apply to the dataset '{spec.name}', which has no archive",
                    next_step=f"Remove {key} from [data], or use cifar10 or cifar100",
                )
            )


def unused_root_notes(spec: DataSpec) -> tuple[str, ...]:
    """A note where `root` is given to a source that reads no files of the user."""
    return () if spec.root is None else (f"data.root is not used by the dataset '{spec.name}'",)
