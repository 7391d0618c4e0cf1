"""Lists what Hugging Face's `datasets` reads: a dataset saved on disk, a folder of Parquet files, or one of the hub."""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import yaml

from vitscale.errors import RequestError, shown
from vitscale.sources.base import Encoded, Labels, library, reason
from vitscale.sources.image_folder import HELD_OUT_NAMES, fingerprint_of
from vitscale.sources.image_set import ImageSet, LabelledImages, Listing, chosen_classes, listing_of
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
_DATASET_ADVICE = "Name a dataset of images and classes: a folder, or a name of the hub where there is a network"


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
    """Lists the dataset `hf`: its split "train", and "validation" or "test" where it has one.

    Raises:
        RequestError: the library is not installed or cannot read it, or it is no set of images with classes.
    """
    splits = _load_splits(spec)
    train = splits.get("train") or next(iter(splits.values()))
    held_out = _held_out_split(splits, train)
    columns = _Columns(*spec.columns) if spec.columns else _columns_by_type(spec, train.features)
    train_table = _read_table(spec, train, columns)
    classes = _classes_in_order(spec, train_table)
    label_by_class = {name: label for label, name in enumerate(classes)}
    folders = _image_folders(str(spec.hf))
    held_out_images: LabelledImages | None = None
    if held_out is not None:
        held_out_table = _read_table(spec, held_out, columns)
        held_out_images = _labelled_rows(spec, held_out_table, columns, label_by_class, folders)
    train_images = _labelled_rows(spec, train_table, columns, label_by_class, folders)
    table_fingerprints = [split._fingerprint for split in (train, held_out) if split is not None]
    fingerprint = fingerprint_of(
        [str(spec.hf), *table_fingerprints], [str(len(train_table.labels)), *classes], [*columns]
    )
    return listing_of("hf", spec, classes, train_images, held_out_images, fingerprint, str(spec.hf))


def _held_out_split(splits: Mapping[str, Any], train: Any) -> Any:
    """Returns the first split that has a name of held-out images and is not `train`; None where there is none."""
    for name in HELD_OUT_NAMES:
        if name in splits and splits[name] is not train:
            return splits[name]
    return None


class _Columns(NamedTuple):
    """Names of a table's columns."""

    image: str
    label: str


class _HubRows(NamedTuple):
    """The rows of a split."""

    labels: list[str]
    """Class of each row."""
    class_names: list[str] | None
    """Names of the classes in the order of their numbers, where the table has them."""
    rows: Any
    """A `datasets.Dataset` that does not decode its images."""


def _read_table(spec: DataSpec, split: Any, columns: _Columns) -> _HubRows:
    """Reads the class of each row of a split, a `datasets.Dataset`.

    Raises:
        RequestError: it lacks a column, or a row has no class.
    """
    for column in columns:
        if column not in split.features:
            what = f"data.hf {shown(spec.hf)} has no column {shown(column)}"
            raise RequestError(what, valid=sorted(split.features))
    labels = split[columns.label][:]
    class_names = getattr(split.features[columns.label], "names", None)
    if class_names is not None:
        labels = [_class_name(label, class_names) for label in labels]
    if None in labels:
        what = f"data.hf {shown(spec.hf)} has rows without a class in {shown(columns.label)}"
        raise RequestError(what, next_step=_DATASET_ADVICE)
    rows = split.cast_column(columns.image, _datasets_library().Image(decode=False))
    return _HubRows([str(label) for label in labels], class_names, rows)


def _class_name(number: Any, class_names: list[str]) -> str | None:
    """Returns the name of class `number`; None where there is no such class."""
    if not isinstance(number, int) or not 0 <= number < len(class_names):
        return None
    return class_names[number]


def _classes_in_order(spec: DataSpec, table: _HubRows) -> list[str]:
    """Returns the classes to read, in the order of their labels: the table's own order, or by number, or by name."""
    present = {*table.labels}
    classes = chosen_classes(spec, [*present], str(spec.hf))
    if isinstance(spec.classes, int) and table.class_names is not None:
        return [name for name in table.class_names if name in present]
    if all(name.isdecimal() for name in classes):
        classes.sort(key=int)
    return classes


def _labelled_rows(
    spec: DataSpec, table: _HubRows, columns: _Columns, label_by_class: Mapping[str, int], folders: tuple[str, ...]
) -> LabelledImages:
    """Returns the images of the rows whose classes are read.

    Raises:
        RequestError: all classes are to be read, and a row has one that is not trained on.
    """
    stray = sorted({*table.labels} - label_by_class.keys())
    if isinstance(spec.classes, int) and stray:
        what = f"data.hf {shown(spec.hf)} holds out the class {shown(stray[0])}, which is not among the training"
        raise RequestError(f"{what} classes", next_step="Remove its rows, or name classes by data.classes")
    selected = [row for row, name in enumerate(table.labels) if name in label_by_class]
    rows = np.array(selected, dtype=np.int64)
    labels = np.array([label_by_class[table.labels[row]] for row in selected], dtype=np.int64)
    return LabelledImages(Rows(table.rows, columns.image, str(spec.hf), rows, folders), labels)


def _load_splits(spec: DataSpec) -> dict[str, Any]:
    """Opens a dataset; returns its splits by name, each a `datasets.Dataset`.

    Raises:
        RequestError: it cannot be opened, or has no rows.
    """
    if spec.hf is None:
        raise RequestError("the dataset 'hf' needs data.hf", next_step=_DATASET_ADVICE)
    datasets = _datasets_library()
    datasets.disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs each try; one message is enough
    try:
        folder = Path(spec.hf).expanduser()
        _refuse_dangerous_files(folder)
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
        raise RequestError(f"data.hf {shown(spec.hf)} cannot be loaded: {text}", next_step=_DATASET_ADVICE) from None
    splits = dict(loaded) if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}
    if not splits or not all(isinstance(split, datasets.Dataset) and len(split) for split in splits.values()):
        raise RequestError(f"data.hf {shown(spec.hf)} has no rows", next_step=_DATASET_ADVICE)
    return {name: _without_format(split) for name, split in splits.items()}


def _without_format(split: Any) -> Any:
    """Returns the split with all columns as plain Python values.

    A format is saved with a dataset: `with_format("torch")` would give tensors for labels. A split without one is
    returned itself, for a copy has another fingerprint, under which no cache of it exists.
    """
    has_all_columns = split.format["columns"] == split.column_names
    if has_all_columns and split.format["type"] is None:
        return split
    return split.with_format(None)


def _refuse_dangerous_files(folder: Path) -> None:
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
    """Raise RequestError for a file with YAML aliases. Args: file_with_aliases: names the file, "a README.md ..."."""
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


def _read_begin(file: Path) -> _BeginOfFile:
    """Reads the begin of a text file; empty where there is none."""
    if not file.is_file():
        return _BeginOfFile("", is_cut=False)
    with file.open(encoding="utf-8-sig", errors="replace") as opened:
        text = opened.read(_MOST_SETTINGS_LETTERS)
    return _BeginOfFile(text, is_cut=len(text) == _MOST_SETTINGS_LETTERS)


def _head_has_aliases(card: Path) -> bool:
    """Whether the YAML head of a dataset's README.md has an alias, or is too long to look through."""
    begin = _read_begin(card)
    head = _CARD_HEAD.match(begin.text if begin.is_cut else f"{begin.text}\n")
    if head is not None:
        return _has_aliases(head["yaml"])
    return begin.is_cut and _CARD_BEGIN.match(begin.text) is not None


def _file_has_aliases(settings: Path) -> bool:
    """Whether a YAML file has an alias, or is too long to look through."""
    begin = _read_begin(settings)
    return begin.is_cut or _has_aliases(begin.text)


def _has_aliases(text: str) -> bool:
    """Whether YAML text has an alias; False for text that is no YAML, for the library says what is wrong with it."""
    try:
        return any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text))
    except yaml.YAMLError:
        return False


def _image_folders(hf: str) -> tuple[str, ...]:
    """Returns the real paths of the folders in which images of a dataset may lie.

    These are the folders of the library's downloads, and the dataset's own where `hf` is a folder.
    """
    config = _datasets_library().config
    folders = [config.HF_CACHE_HOME, config.HF_DATASETS_CACHE, config.DOWNLOADED_DATASETS_PATH]
    dataset_folder = Path(hf).expanduser()
    if dataset_folder.is_dir():
        folders.append(dataset_folder)
    return tuple(os.path.realpath(folder) for folder in folders)


def _datasets_library() -> Any:
    """Returns the module `datasets` of Hugging Face."""
    return library("datasets", "data.hf", "hf")


def _columns_by_type(spec: DataSpec, features: Any) -> _Columns:
    """Returns the names of the only column of images and of the only one of classes.

    Raises:
        RequestError: there are several, or none.
    """
    datasets = _datasets_library()
    images = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    labels = [name for name, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
    if not labels:
        labels = [name for name in ("label", "labels") if name in features]
    if len(images) != 1 or len(labels) != 1:
        what = f"data.hf {shown(spec.hf)} has {len(images)} columns of images and {len(labels)} of classes"
        raise RequestError(what, valid=sorted(features), next_step='Say which: columns = ["image", "label"]')
    return _Columns(images[0], labels[0])


HF = ImageSet(list_hf, ("channels", "dtype", "hf", "columns"))
