"""Defines what every source of images gives: a summary, and two splits of images.

A share is held out where a dataset has no held-out split of its own. Also: where datasets and the cache lie, and random
words that are the same everywhere. A path that cannot be used gives a message, not a traceback.
"""

from __future__ import annotations

import importlib
import os
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from vitscale.base.distribution import install_command
from vitscale.base.files import whole_file
from vitscale.errors import RequestError, shown
from vitscale.trial.model_spec import Task
from vitscale.trial.trial import DataSpec

_spent_lock = threading.Lock()
_spent_seconds = {"reading": 0.0, "decoding": 0.0, "both": 0.0}
"""Seconds that all threads of this process have spent so far; `spending` adds to it."""


class Spent(NamedTuple):
    """Seconds spent by threads, added up."""

    reading: float
    """Seconds for reading from files, a decoded cache or memory."""
    decoding: float


@contextmanager
def spending(on: Literal["reading", "decoding", "both"]) -> Iterator[None]:
    """Adds the seconds inside of the `with` to those spent on this; see `Meter`.

    Args:
        on: "both" where a library reads while it decodes, so that the two cannot be told apart.
    """
    start_seconds = time.perf_counter()
    try:
        yield
    finally:
        seconds = time.perf_counter() - start_seconds
        with _spent_lock:
            _spent_seconds[on] += seconds


class Meter:
    """Measures the seconds that threads have spent on reading and decoding since its creation."""

    def __init__(self) -> None:
        self._before = dict(_spent_seconds)

    def read(self) -> Spent | None:
        """Returns the seconds spent.

        Returns None where nothing was read or decoded (generated images), or where a library does both at once.
        """
        reading = _spent_seconds["reading"] - self._before["reading"]
        decoding = _spent_seconds["decoding"] - self._before["decoding"]
        is_mixed = _spent_seconds["both"] != self._before["both"]
        if reading + decoding <= 0 or is_mixed:
            return None
        return Spent(reading, decoding)


Images = NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.float32]
"""`[n, H, W, C]`, in the dtype in which the dataset is stored (`trial.PixelType`)."""
Labels = NDArray[np.int64]
Content = str | bytes
"""An encoded image: its file's path, or its bytes."""
OnProgress = Callable[[int, int], None]
"""Called with the number of images done, and of all."""
IGNORED = 255
"""Mask value of pixels whose label is unknown."""
OUTSIDE = 254
"""Mask value outside the image, where `Summary.sizes_vary`. Labels of such masks are 0 to 253."""


@dataclass(frozen=True)
class Summary:
    """What is known of a dataset before a single image is decoded: enough to plan a study."""

    train_samples: int
    held_out_samples: int
    classes: tuple[str, ...]
    """Names, in the order of the labels."""
    image_shape: tuple[int, int, int]
    """Height, width, channels as stored. Grey pictures have 3 equal channels too, unless one channel is asked for."""
    fingerprint: str
    """Hexadecimal digest of the content; two runs with different digests did not see the same images."""
    notes: tuple[str, ...] = ()
    """What a reader of the results should know, such as that the files are not the official ones."""
    task: Task = "classification"
    """What its labels describe: images, or pixels."""
    sizes_vary: bool = False
    """Whether images keep their proportions, in the upper left corner of what is stored; masks tell where they end."""


class Split(Protocol):
    """Images and labels of one split, safe to read from several threads."""

    def __len__(self) -> int: ...

    @property
    def labels(self) -> Any:
        """Class of every image, int64 `[samples]`.

        In segmentation it is an object that is indexed like an array of masks: `labels[ids]`, with ids `[n]`, returns
        masks uint8 `[n, H, W]`. They need not lie in memory. Masks are as large as their images; pixels of the value
        `IGNORED` are left out of losses and scores.
        """

    def take(self, ids: Labels) -> Images:
        """Returns a copy of some images, `[n, H, W, C]`. Args: ids: int64 `[n]`, each in `0 <= id < len(self)`."""


class Encoded(Protocol):
    """Images of one split as stored, not decoded. Parts of it are pickled for the processes that decode."""

    def __len__(self) -> int: ...

    def name(self, number: int) -> str:
        """Returns an image's name in messages: its file, as a user finds it. The extension gives its format."""

    def content(self, number: int) -> Content:
        """Returns the input of its decoder."""

    def part(self, number: int) -> int:  # noqa: ARG002  one signature for all
        """Returns the number of the image within its file, from 0."""
        return 0

    def some(self, numbers: Labels) -> Encoded:
        """Returns only these images, in this order."""


class ChannelStatistics(NamedTuple):
    """Mean and standard deviation of each channel, in units of the stored values."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Dataset:
    """Both splits, ready to be read."""

    summary: Summary
    train: Split
    held_out: Split
    statistics: ChannelStatistics | None = None
    """Statistics of the training images; None for 8-bit colour pictures, whose statistics go by the dataset's name."""


class Source(Protocol):
    """One kind of dataset."""

    def check(self, spec: DataSpec) -> Summary:
        """Finds and verifies the images, or raises `RequestError`; writes nothing but a download that was asked for."""

    def load(self, spec: DataSpec, cache_root: Path) -> Dataset:
        """Opens the images; those that are not in the cache yet are decoded into it."""


@dataclass(frozen=True, eq=False)
class ArraySplit:
    """A split in one array: in memory, or a memory-mapped file shared by the ranks of a host."""

    images: Images
    labels: Labels

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, ids: Labels) -> Images:
        """Copies the images out; see `Split.take`."""
        require_ids(ids, len(self))
        with spending("reading"):
            return self.images[ids]

    def channels(self, first: int, stop: int) -> ArraySplit:
        """Returns the split with these channels alone, of the same array."""
        return ArraySplit(self.images[..., first:stop], self.labels)


def require_ids(ids: Labels, samples: int) -> None:
    """Raises `IndexError` unless every id is in `0 <= id < samples`: numpy would wrap a negative one silently."""
    if ids.size and (ids.min() < 0 or ids.max() >= samples):
        raise IndexError(f"image ids {ids.min()} to {ids.max()} in a split of {samples}")


_SPECIAL_KEYS = {
    "md5": "cifar10 or cifar100",
    "download": "cifar10 or cifar100",
    "hf": 'name = "hf"',
    "columns": 'name = "hf"',
    "channels": "synthetic, folder, shards or hf",
    "dtype": "folder, shards or hf",
    "source": "folder, shards, hf or ade20k",
    "skip_broken": "folder, shards, hf or ade20k",
    "evaluation": "ade20k",
}
"""Keys of [data] that only some sources take, and which sources."""


def refuse_other_keys(spec: DataSpec, accepted: Collection[str] = ()) -> None:
    """Refuses keys that mean nothing to a source.

    Args:
        spec: the [data] section.
        accepted: the keys of `_SPECIAL_KEYS` that the source takes, and "classes" if these may be names.

    Raises:
        RequestError: another key is given; with what to do in its place.
    """
    if "classes" not in accepted:
        class_count(spec)
    for key, sources in _SPECIAL_KEYS.items():
        is_given = getattr(spec, key) != DataSpec.model_fields[key].default
        if is_given and key not in accepted:
            clause = ", which has no archive" if key in ("md5", "download") else ""
            what = f"data.{key} does not apply to the dataset '{spec.name}'{clause}"
            raise RequestError(what, next_step=f"Remove {key} from [data], or use {sources}")


def class_count(spec: DataSpec) -> int:
    """Returns the number of classes of a generated dataset.

    Raises:
        RequestError: `classes` is no number.
    """
    if isinstance(spec.classes, int):
        return spec.classes
    raise RequestError(f"data.classes of the dataset '{spec.name}' is {shown(spec.classes)}", valid=["a number from 2"])


def unused_root_notes(spec: DataSpec) -> tuple[str, ...]:
    """Returns a note if `root` is given to a source that reads no files of the user."""
    if spec.root is None:
        return ()
    return (f"data.root is not used by the dataset '{spec.name}'",)


def library(module: str, subject: str, extra: str) -> Any:
    """Imports a module only now, for it comes with an extra of this package.

    Args:
        module: the module's name.
        subject: what it reads, for the message.
        extra: name of the extra.

    Raises:
        RequestError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        what = f"{subject} is read by {module}, which is not installed"
        raise RequestError(what, next_step=f"Run {install_command(extra)}") from None


Words = NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def mix64(positions: Words, stream: int) -> Words:
    """Returns pseudo-random 64-bit words, one per position, same shape; each `stream` is an independent sequence.

    The output function of SplitMix64 (Steele, Lea & Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014) applied to `(positions + 1) * gamma` offset by the finalised stream number.
    """
    offset = _finalise(np.array([stream], dtype=np.uint64) * _GAMMA + np.uint64(1))
    return _finalise((positions + np.uint64(1)) * _GAMMA + offset)


def _finalise(z: Words) -> Words:
    """Mixes the bits of each word, as SplitMix64 does at its end."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


_SPLIT_STREAM = 1
"""Stream of `mix64` that shuffles the images before they are divided."""


def held_out_count(samples: int, classes: int, share: float) -> int:
    """Returns the number of images to hold out: `round(samples * share)`, at least 1, leaving one of every class."""
    return min(max(1, round(samples * share)), samples - classes)


class SplitIds(NamedTuple):
    """Ids of the images of both splits, each ascending."""

    train: Labels
    held_out: Labels


def split_ids(labels: Labels, share: float) -> SplitIds:
    """Divides images into training and held-out ones. The same labels are always divided in the same way.

    Each class gives about `share` of its images. For this the images of a class are shuffled, and placed at equal
    distances between 0 and 1. The images that are placed lowest, over all classes, are held out. One image of each
    class always stays in training, so nothing is held out where no class has two images.

    Example: four images of class 0 are placed at 1/8, 3/8, 5/8 and 7/8, and two of class 1 at 1/4 and 3/4. If half of
    these six are to be held out, it is those at 1/8, 1/4 and 3/8.

    Args:
        labels: class of each image, int64 `[images]`.
        share: share of the images to hold out, between 0 and 1.
    """
    image_numbers = np.arange(len(labels), dtype=np.uint64)
    shuffled_ids = np.argsort(mix64(image_numbers, _SPLIT_STREAM), kind="stable")
    # All of class 0, then all of class 1, ...; within each class they stay shuffled.
    ids_by_class = shuffled_ids[np.argsort(labels[shuffled_ids], kind="stable")]
    _, class_sizes = np.unique(labels, return_counts=True)
    positions = np.concatenate([_positions_in_class(size) for size in class_sizes])  # [images], as ids_by_class
    ids_by_position = ids_by_class[np.argsort(positions, kind="stable")]
    held_out = held_out_count(len(labels), len(class_sizes), share)
    return SplitIds(
        train=np.sort(ids_by_position[held_out:]).astype(np.int64),
        held_out=np.sort(ids_by_position[:held_out]).astype(np.int64),
    )


def _positions_in_class(images: int) -> NDArray[np.float64]:
    """Returns where the shuffled images of a class are placed: `[1/8, 3/8, 5/8, inf]` for four images.

    Infinity is behind the images of all classes, so that the last image of each class is never held out.
    """
    positions = (np.arange(images) + 0.5) / images
    positions[-1] = np.inf
    return positions


def default_cache_root() -> Path:
    """Returns `$VITSCALE_CACHE`, else `$XDG_CACHE_HOME/vitscale`, else `~/.cache/vitscale`.

    Raises:
        RequestError: there is no home folder, and neither variable is set.
    """
    vitscale_cache = os.environ.get("VITSCALE_CACHE")
    if vitscale_cache:
        return Path(vitscale_cache)
    all_caches = os.environ.get("XDG_CACHE_HOME")
    if all_caches:
        return Path(all_caches) / "vitscale"
    try:
        return Path("~/.cache/vitscale").expanduser()
    except RuntimeError as error:  # neither HOME nor an entry for this user
        raise RequestError(str(error), next_step="Set VITSCALE_CACHE to a folder for decoded images") from None


def root_of(spec: DataSpec) -> Path | None:
    """Returns `spec.root` with `~` expanded; None where it is not given.

    Raises:
        RequestError: the home folder of `~` is not known.
    """
    if not spec.root:
        return None
    try:
        return Path(spec.root).expanduser()
    except RuntimeError as error:  # ~nobody: no such user
        raise RequestError(f"data.root {shown(spec.root)}: {error}") from None


def kind_of(path: Path) -> Literal["file", "folder", "other"] | None:
    """Returns the kind of what lies at `path` (links followed); None where there is nothing.

    Raises:
        RequestError: it cannot be looked at.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # no permission, a name too long, a null byte, a loop of links
        raise RequestError(
            f"cannot look at {shown(str(path))}: {reason(error)}", next_step="Correct data.root"
        ) from None
    if stat.S_ISREG(mode):
        return "file"
    return "folder" if stat.S_ISDIR(mode) else "other"


def write_if_possible(path: Path, text: str) -> None:
    """Writes a file whole, or not at all where the folder cannot be written: every rank could make its content anew."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with whole_file(path) as file:
            file.write(text.encode())


def reason(error: Exception) -> str:
    """Returns the text of an error without the path (which the message names already, and which would be truncated)."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)
