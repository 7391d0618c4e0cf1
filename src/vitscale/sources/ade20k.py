"""ADE20K as published for scene parsing (ADEChallengeData2016), and other sets with its layout."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitscale.errors import RequestError, shown
from vitscale.sources.arrays import ArrayShape
from vitscale.sources.base import OUTSIDE, class_count, kind_of
from vitscale.sources.image_folder import files_under, fingerprint_of, refuse_link_out, split_folders, stamp
from vitscale.sources.image_set import FileSplit, ImageSet, Listing
from vitscale.sources.pictures import EXTENSIONS
from vitscale.sources.scenes import SCENE_CHANNELS, ScenePairs
from vitscale.trial.trial import DataSpec

_HOW = "Unpack ADEChallengeData2016.zip, and name its folder, which holds images and annotations"
_SPLITS = ("training", "validation")


class _File(NamedTuple):
    path: str
    stamp: str


def list_ade20k(spec: DataSpec) -> Listing:
    """The dataset `ade20k`: `root/images/{training,validation}/*.jpg`, with a PNG of the same name for each in
    `root/annotations/{training,validation}`.

    The labels that count are the first `data.classes`, or as many as it names.

    Raises:
        RequestError: it is not laid out like this, a file cannot be read, or a link leads out of it.
    """
    root, _ = split_folders(spec, _HOW, lambda _: False)
    names = spec.classes if isinstance(spec.classes, tuple) else [f"class {n + 1}" for n in range(class_count(spec))]
    if len(names) > OUTSIDE:
        what = f"data.classes = {len(names)} do not fit into masks"
        raise RequestError(what, valid=[f"at most {OUTSIDE}"])
    stamps: list[list[str]] = []
    splits = []
    for split in _SPLITS:
        pictures = _files(root, "images", split, frozenset(EXTENSIONS))
        annotations = _files(root, "annotations", split, frozenset({".png"}))
        both = sorted(pictures.keys() | annotations.keys())
        nothing = _File("", "")
        paths = [[files.get(key, nothing).path for key in both] for files in (pictures, annotations)]
        pairs = ScenePairs(tuple(paths[0]), tuple(paths[1]), len(names))
        shape = ArrayShape(spec.source_size, SCENE_CHANNELS, "uint8")
        splits.append(FileSplit(pairs, np.zeros(len(pairs), dtype=np.int64), shape))
        stamps += [[file.stamp for _, file in sorted(files.items())] for files in (pictures, annotations)]
    fingerprint = fingerprint_of(*stamps)
    return Listing(
        classes=tuple(names),
        train=splits[0],
        held_out=splits[1],
        fingerprint=fingerprint,
        # 2: entries of version 0.1.0 may hold labels that Pillow multiplied, see `pictures.decode_labels`.
        key=f"ade20k-2-{fingerprint[:24]}-{spec.source_size}-{len(names)}",
        task="segmentation",
    )


def _files(root: Path, kind: str, split: str, extensions: frozenset[str]) -> dict[str, _File]:
    """Path below its folder without the extension, to the file: all files of one kind in a split."""
    folder, real = root / kind / split, Path(os.path.realpath(root))
    if kind_of(folder) != "folder":
        raise RequestError(f"{shown(str(folder))} is not a folder", next_step=_HOW)
    refuse_link_out(str(folder), real)
    files: dict[str, _File] = {}
    for path, status in files_under(folder, real, [os.path.realpath(root / kind)]):
        key, extension = os.path.splitext(os.path.relpath(path, folder))  # noqa: PTH122 - a hundred thousand of them
        if not stat.S_ISREG(status.st_mode) or extension.lower() not in extensions:
            continue
        if key in files:
            what = (
                f"{shown(files[key].path)} and {shown(path)} have one name: each picture has an annotation of its own"
            )
            raise RequestError(what, next_step="Rename or remove one of them")
        files[key] = _File(path, stamp(path, folder, status))
    if not files:
        raise RequestError(f"{shown(str(folder))} holds no {'picture' if kind == 'images' else 'PNG'}", next_step=_HOW)
    return files


ADE20K = ImageSet(list_ade20k, ("evaluation",))
