"""Plans with images that lie on another machine: their numbers are taken from what is known of the dataset."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import NamedTuple

from vitscale import sources
from vitscale.errors import RequestError, shown
from vitscale.present.units import counted
from vitscale.sources.base import Summary
from vitscale.trial.trial import DataSpec


class _SplitSizes(NamedTuple):
    """Numbers of images of a dataset."""

    train_samples: int
    held_out_samples: int


_ADE20K = _SplitSizes(20_210, 2_000)
"""The scene parsing benchmark: Zhou et al., "Scene Parsing through ADE20K Dataset" (CVPR 2017), section 3.4."""
_PUBLISHED = "as published"
_BY_THE_STUDY = "as data.samples and data.classes say"
_FINGERPRINT = "not seen: planned without the images"


def check_or_expect(spec: DataSpec) -> Summary:
    """Return what `sources.check` does; where `data.root` is not on this machine, what is expected of the images.

    Those of CIFAR-10, CIFAR-100 and ADE20K are known. Of other images `data.samples` and `data.classes` must be given.
    A note says which was taken.

    Raises:
        RequestError: as `sources.check` does; also where the images are not here and their numbers are not known.
    """
    root = spec.root
    if root is None or spec.download or os.path.lexists(root):
        return sources.check(spec)
    expected = _expected(spec)
    if expected is None:
        raise RequestError(
            f"data.root {shown(root)} is not on this machine, and nothing says how many images of how many classes "
            "lie there",
            next_step="Correct the path; or to plan without the images, add data.samples=50000 data.classes=100 with "
            "their numbers",
        )
    return expected


def _expected(spec: DataSpec) -> Summary | None:
    """Return the numbers of images that are not here; None where they are not known."""
    # Both import libraries that a plan of images which are here does without.
    from vitscale.sources import cifar
    from vitscale.sources.scenes import SCENE_CHANNELS

    archives = {archive.name: archive for archive in (cifar.CIFAR10, cifar.CIFAR100)}
    archive = archives.get(spec.name)
    if archive is not None:
        sizes = _SplitSizes(cifar.TRAIN_SAMPLES, cifar.HELD_OUT_SAMPLES)
        return _summary(spec, sizes, archive.classes, cifar.IMAGE_SHAPE, origin=_PUBLISHED)
    classes = _class_names(spec)
    if spec.name == "ade20k":
        image_shape = (spec.source_size, spec.source_size, SCENE_CHANNELS)
        summary = _summary(spec, _ADE20K, classes, image_shape, origin=_PUBLISHED)
        return replace(summary, task="segmentation", sizes_vary=True)
    are_counts_given = {"samples", "classes"} <= spec.model_fields_set
    if not are_counts_given:
        return None
    sizes = _SplitSizes(spec.samples, round(spec.samples * spec.held_out))
    image_shape = (spec.source_size, spec.source_size, spec.channels)
    return _summary(spec, sizes, classes, image_shape, origin=_BY_THE_STUDY)


def _class_names(spec: DataSpec) -> tuple[str, ...]:
    if isinstance(spec.classes, tuple):
        return spec.classes
    return tuple(f"class {number}" for number in range(int(spec.classes)))


def _summary(
    spec: DataSpec, sizes: _SplitSizes, classes: tuple[str, ...], image_shape: tuple[int, int, int], *, origin: str
) -> Summary:
    """Return the expected numbers, with a note that says where they come from."""
    counts = f"{counted(sizes.train_samples, 'image')} of {counted(len(classes), 'class', 'classes')}"
    return Summary(
        train_samples=sizes.train_samples,
        held_out_samples=sizes.held_out_samples,
        classes=classes,
        image_shape=image_shape,
        fingerprint=_FINGERPRINT,
        notes=(f"data.root {shown(spec.root)} is not on this machine: planned with {counts}, {origin}",),
    )
