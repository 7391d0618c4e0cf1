"""Datasets that Hugging Face's `datasets` reads: saved on disk, a folder of Parquet files, or a name on the hub."""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import yaml

from vitscale.errors import RequestError, shown
from vitscale.sources.base import Encoded, Labels, library, reason
from vitscale.sources.image_folder import HELD_OUT_NAMES, fingerprint_of
from vitscale.sources.image_set import ImageSet, Listing, chosen_classes, listing_of
from vitscale.sources.pictures import BrokenImage
from vitscale.trial.trial import DataSpec

_SETTINGS_FILE = ".huggingface.yaml"
"""A file of settings, which the library reads beside the head of README.md."""
_MOST_SETTINGS_LETTERS = 1 << 20
"""Longest head of a README.md, and longest file of settings, that is looked through."""
_CARD_BEGIN = re.compile(r"\s*---\n")
_CARD_HEAD = re.compile(rf"{_CARD_BEGIN.pattern}(?P<yaml>.*?)\n---[ \t]*\n", re.DOTALL)
"""The head as the library delimits it (`REGEX_YAML_BLOCK` in huggingface_hub.repocard): blanks may stand before it, and
a line that goes on behind "---" does not end it."""
_HOW = "Name a dataset of images and classes: a folder, or a name of the hub where there is a network"


@dataclass(frozen=True, eq=False)
class Rows(Encoded):
    """Images that are rows of a table: their bytes as saved, or files that the table names."""

    table: Any
    """A `datasets.Dataset` that does not decode its images."""
    column: str
    named: str
    rows: Labels
    folders: tuple[str, ...]
    """Real paths of the only folders in which image files may lie that the table names (`_image_folders`)."""

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, number: int) -> str:
        """See `Encoded`."""
        row = int(self.rows[number])
        path = (self.table[row][self.column] or {}).get("path") or ""
        return f"{self.named} row {row}{Path(path).suffix or '.png'}"

    def content(self, number: int) -> str | bytes:
        """See `Encoded`."""
        row = int(self.rows[number])
        image = self.table[row][self.column] or {}
        content = image.get("bytes") or image.get("path")
        if not isinstance(content, str | bytes):
            raise BrokenImage(self.name(number), "it has no content")
        if isinstance(content, str):
            self._check_path(content, number)
        return content

    def _check_path(self, path: str, number: int) -> None:
        """Checks the path that row `number` names: a table may be a stranger's.

        Raises:
            BrokenImage: it leads out of `folders`, or to no file.
        """
        target = Path(os.path.realpath(path))
        if not any(target.is_relative_to(folder) for folder in self.folders):
            raise BrokenImage(self.name(number), f"it names {shown(str(target))}, which lies outside of the dataset")
        if not target.is_file():
            raise BrokenImage(self.name(number), f"it names {shown(str(target))}, which is no file")

    def some(self, numbers: Labels) -> Rows:
        """See `Encoded`."""
        return Rows(self.table, self.column, self.named, self.rows[numbers], self.folders)


def list_hf(spec: DataSpec) -> Listing:
    """The dataset `hf`: its split "train", and "validation" or "test" where it has one.

    Raises:
        RequestError: the library is not installed or cannot read it, or it is no set of images with classes.
    """
    splits = _splits(spec)
    train = splits.get("train") or next(iter(splits.values()))
    held_out = next((splits[name] for name in HELD_OUT_NAMES if name in splits and splits[name] is not train), None)
    image, label = spec.columns or _columns(spec, train.features)

    def read(table: Any) -> tuple[list[str], Any]:
        if unknown := [name for name in (image, label) if name not in table.features]:
            what = f"data.hf {shown(spec.hf)} has no column {shown(unknown[0])}"
            raise RequestError(what, valid=sorted(table.features))
        values, names = table[label][:], getattr(table.features[label], "names", None)
        if names is not None:
            values = [names[value] if isinstance(value, int) and 0 <= value < len(names) else None for value in values]
        if None in values:
            raise RequestError(f"data.hf {shown(spec.hf)} has rows without a class in {shown(label)}", next_step=_HOW)
        return [str(value) for value in values], table.cast_column(image, _library().Image(decode=False))

    labels, table = read(train)
    present, names = {*labels}, getattr(train.features[label], "names", None)
    classes = chosen_classes(spec, [*present], str(spec.hf))
    if isinstance(spec.classes, int) and names is not None:  # in the order of the labels
        classes = [name for name in names if name in present]
    elif all(name.isdecimal() for name in classes):
        classes.sort(key=int)
    number = {name: position for position, name in enumerate(classes)}

    folders = _image_folders(str(spec.hf))

    def rows_with_classes(labels: list[str], table: Any) -> tuple[Rows, Labels]:
        if isinstance(spec.classes, int) and (stray := sorted({*labels} - number.keys())):
            what = f"data.hf {shown(spec.hf)} holds out the class {shown(stray[0])}, which is not among the training"
            raise RequestError(f"{what} classes", next_step="Remove its rows, or name classes by data.classes")
        rows = np.array([row for row, name in enumerate(labels) if name in number], dtype=np.int64)
        images = Rows(table, image, str(spec.hf), rows, folders)
        return images, np.array([number[labels[row]] for row in rows], dtype=np.int64)

    held_out_rows = rows_with_classes(*read(held_out)) if held_out is not None else None
    tables = [split._fingerprint for split in (train, held_out) if split is not None]
    digest = fingerprint_of([str(spec.hf), *tables], [str(len(labels)), *classes], [image, label])
    return listing_of("hf", spec, classes, rows_with_classes(labels, table), held_out_rows, digest, str(spec.hf))


def _splits(spec: DataSpec) -> dict[str, Any]:
    if spec.hf is None:
        raise RequestError("the dataset 'hf' needs data.hf", next_step=_HOW)
    datasets = _library()
    datasets.disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs each try; one message is enough
    try:
        folder = Path(spec.hf).expanduser()
        _check_folder(folder)
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            loaded = datasets.load_from_disk(str(folder))
        elif folder.is_dir():
            loaded = datasets.load_dataset(str(folder))
        else:
            name, _, configuration = spec.hf.partition(":")
            loaded = datasets.load_dataset(name, configuration or None)
    except RequestError:
        raise
    except Exception as error:  # whatever files, parsers and the network raise
        text = " ".join((reason(error) or type(error).__name__).split())[:300]
        raise RequestError(f"data.hf {shown(spec.hf)} cannot be loaded: {text}", next_step=_HOW) from None
    splits = dict(loaded) if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}
    if not splits or not all(isinstance(split, datasets.Dataset) and len(split) for split in splits.values()):
        raise RequestError(f"data.hf {shown(spec.hf)} has no rows", next_step=_HOW)
    return {name: _without_format(split) for name, split in splits.items()}


def _without_format(split: Any) -> Any:
    """The split with all columns as plain Python values.

    A format is saved with a dataset: `with_format("torch")` would give tensors for labels. A split without one is
    returned itself, for a copy has another fingerprint, under which no cache of it exists.
    """
    has_all_columns = split.format["columns"] == split.column_names
    if has_all_columns and split.format["type"] is None:
        return split
    return split.with_format(None)


def _check_folder(folder: Path) -> None:
    """Refuses a local dataset that would stop or fill the library: by a pipe among its files, or by YAML aliases.

    Raises:
        RequestError: it holds a pipe or a device, or its settings have aliases.
        OSError: one of its files cannot be looked at.
    """
    for path, mode in _modes_below(folder):
        if not stat.S_ISREG(mode):
            what = f"data.hf {shown(str(folder))} holds {shown(path)}, a pipe or a device"
            raise RequestError(what, next_step="Remove it")
    if _head_has_aliases(folder / "README.md"):
        _refuse_aliases(folder, "a README.md whose head repeats itself")
    if _file_has_aliases(folder / _SETTINGS_FILE):
        _refuse_aliases(folder, f"a {_SETTINGS_FILE} that repeats itself")


def _refuse_aliases(folder: Path, file_with_aliases: str) -> NoReturn:
    what = f"data.hf {shown(str(folder))} has {file_with_aliases} by YAML aliases (*name)"
    raise RequestError(what, next_step="Remove them: written out, a few of them fill any memory")


def _modes_below(folder: Path) -> Iterator[tuple[str, int]]:
    """Yields path and mode of every file below a folder.

    A link to a file counts as that file. Links to folders are not entered, and links that lead nowhere are left out.
    """
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if path.exists():
                yield str(path), path.stat().st_mode


class _BeginOfFile(NamedTuple):
    """The first `_MOST_SETTINGS_LETTERS` of a text file."""

    text: str
    is_cut: bool
    """Whether the file may go on."""


def _begin_of(file: Path) -> _BeginOfFile:
    """Reads the begin of a text file; empty where there is none."""
    if not file.is_file():
        return _BeginOfFile("", is_cut=False)
    with file.open(encoding="utf-8-sig", errors="replace") as opened:
        text = opened.read(_MOST_SETTINGS_LETTERS)
    return _BeginOfFile(text, is_cut=len(text) == _MOST_SETTINGS_LETTERS)


def _head_has_aliases(card: Path) -> bool:
    """Whether the YAML head of a dataset's README.md has an alias, or is too long to look through."""
    begin = _begin_of(card)
    head = _CARD_HEAD.match(begin.text if begin.is_cut else f"{begin.text}\n")
    if head is not None:
        return _has_aliases(head["yaml"])
    return begin.is_cut and _CARD_BEGIN.match(begin.text) is not None


def _file_has_aliases(settings: Path) -> bool:
    """Whether a YAML file has an alias, or is too long to look through."""
    begin = _begin_of(settings)
    return begin.is_cut or _has_aliases(begin.text)


def _has_aliases(text: str) -> bool:
    """Whether YAML text has an alias; False for text that is no YAML, for the library says what is wrong with it."""
    try:
        return any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text))
    except yaml.YAMLError:
        return False


def _image_folders(hf: str) -> tuple[str, ...]:
    """Real paths of the folders in which images of a dataset may lie.

    These are the folders of the library's downloads, and the dataset's own where `hf` is a folder.
    """
    config = _library().config
    folders = [config.HF_CACHE_HOME, config.HF_DATASETS_CACHE, config.DOWNLOADED_DATASETS_PATH]
    dataset_folder = Path(hf).expanduser()
    if dataset_folder.is_dir():
        folders.append(dataset_folder)
    return tuple(os.path.realpath(folder) for folder in folders)


def _library() -> Any:
    return library("datasets", "data.hf", "hf")


def _columns(spec: DataSpec, features: Any) -> tuple[str, str]:
    """Names of the only column of images and of the only one of classes."""
    datasets = _library()
    images = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    labels = [name for name, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
    if not labels:
        labels = [name for name in ("label", "labels") if name in features]
    if len(images) != 1 or len(labels) != 1:
        what = f"data.hf {shown(spec.hf)} has {len(images)} columns of images and {len(labels)} of classes"
        raise RequestError(what, valid=sorted(features), next_step='Say which: columns = ["image", "label"]')
    return images[0], labels[0]


HF = ImageSet(list_hf, ("channels", "dtype", "hf", "columns"))
