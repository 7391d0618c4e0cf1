"""Lists ADE20K as published for scene parsing (ADEChallengeData2016), and other sets with its layout."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitscale.errors import RequestError, shown
from vitscale.sources.arrays import ArrayShape
from vitscale.sources.base import OUTSIDE, class_count, kind_of
from vitscale.sources.image_folder import file_stamp, files_under, fingerprint_of, refuse_link_out, split_folders
from vitscale.sources.image_set import FileSplit, ImageSet, Listing
from vitscale.sources.pictures import EXTENSIONS
from vitscale.sources.scenes import SCENE_CHANNELS, ScenePairs
from vitscale.trial.trial import DataSpec

_LAYOUT_ADVICE = "Unpack ADEChallengeData2016.zip, and name its folder, which holds images and annotations"


class _File(NamedTuple):
    """A picture or an annotation."""

    path: str
    stamp: str
    """Identifies the file: its place, size and time of change."""


class _SceneFiles(NamedTuple):
    """Files of a split, by their paths below its folder without the extension."""

    pictures: dict[str, _File]
    annotations: dict[str, _File]

    def pairs(self, classes: int) -> ScenePairs:
        """Returns pictures and annotations of the same name, sorted; "" for one that is missing."""
        keys = sorted(self.pictures.keys() | self.annotations.keys())
        return ScenePairs(
            pictures=tuple(_path_or_empty(self.pictures, key) for key in keys),
            annotations=tuple(_path_or_empty(self.annotations, key) for key in keys),
            classes=classes,
        )

    @property
    def stamps(self) -> list[list[str]]:
        """Stamps of the pictures, then those of the annotations, each sorted by path."""
        return [[files[key].stamp for key in sorted(files)] for files in self]


def _path_or_empty(files: dict[str, _File], key: str) -> str:
    """Returns the path of a file; "" where there is none of this key."""
    return files[key].path if key in files else ""


def list_ade20k(spec: DataSpec) -> Listing:
    """Lists the dataset `ade20k`: `root/images/{training,validation}/*.jpg`, with a PNG of the same name for each in
    `root/annotations/{training,validation}`.

    The labels that count are the first `data.classes`, or as many as it names.

    Raises:
        RequestError: it is not laid out like this, a file cannot be read, or a link leads out of it.
    """
    root = split_folders(spec, _LAYOUT_ADVICE, lambda _: False).train
    classes = _class_names(spec)
    if len(classes) > OUTSIDE:
        what = f"data.classes = {len(classes)} do not fit into masks"
        raise RequestError(what, valid=[f"at most {OUTSIDE}"])
    shape = ArrayShape(spec.source_size, SCENE_CHANNELS, "uint8")
    train = _scene_files(root, "training")
    held_out = _scene_files(root, "validation")
    fingerprint = fingerprint_of(*train.stamps, *held_out.stamps)
    return Listing(
        classes=classes,
        train=_file_split(train.pairs(len(classes)), shape),
        held_out=_file_split(held_out.pairs(len(classes)), shape),
        fingerprint=fingerprint,
        # 2: entries of version 0.1.0 may hold labels that Pillow multiplied, see `pictures.decode_labels`.
        key=f"ade20k-2-{fingerprint[:24]}-{spec.source_size}-{len(classes)}",
        task="segmentation",
    )


def _class_names(spec: DataSpec) -> tuple[str, ...]:
    """Returns the names of the labels from 1 on; "class 1", "class 2", ... where only their number is given."""
    if isinstance(spec.classes, tuple):
        return spec.classes
    return tuple(f"class {label}" for label in range(1, class_count(spec) + 1))


def _file_split(pairs: ScenePairs, shape: ArrayShape) -> FileSplit:
    """Returns a split of scenes, whose labels are in their masks: 0 for each image."""
    return FileSplit(pairs, np.zeros(len(pairs), dtype=np.int64), shape)


def _scene_files(root: Path, split: str) -> _SceneFiles:
    """Returns the files of the split "training" or "validation"."""
    pictures = _files_of_kind(root, "images", split, frozenset(EXTENSIONS))
    annotations = _files_of_kind(root, "annotations", split, frozenset({".png"}))
    return _SceneFiles(pictures, annotations)


def _files_of_kind(root: Path, kind: str, split: str, extensions: frozenset[str]) -> dict[str, _File]:
    """Returns all files of one kind in a split, by their paths below its folder without the extension.

    Args:
        root: folder of the dataset.
        kind: "images" or "annotations".
        split: "training" or "validation".
        extensions: the extensions in lower case; other files are left out.

    Raises:
        RequestError: there are none, or two of one name.
    """
    folder = root / kind / split
    real_root = Path(os.path.realpath(root))
    if kind_of(folder) != "folder":
        raise RequestError(f"{shown(str(folder))} is not a folder", next_step=_LAYOUT_ADVICE)
    refuse_link_out(str(folder), real_root)
    files: dict[str, _File] = {}
    for path, status in files_under(folder, real_root, [os.path.realpath(root / kind)]):
        key, extension = os.path.splitext(os.path.relpath(path, folder))  # noqa: PTH122 - a hundred thousand of them
        if not stat.S_ISREG(status.st_mode) or extension.lower() not in extensions:
            continue
        if key in files:
            what = (
                f"{shown(files[key].path)} and {shown(path)} have one name: each picture has an annotation of its own"
            )
            raise RequestError(what, next_step="Rename or remove one of them")
        files[key] = _File(path, file_stamp(path, folder, status))
    if not files:
        raise RequestError(
            f"{shown(str(folder))} holds no {'picture' if kind == 'images' else 'PNG'}", next_step=_LAYOUT_ADVICE
        )
    return files


ADE20K = ImageSet(list_ade20k, ("evaluation",))
