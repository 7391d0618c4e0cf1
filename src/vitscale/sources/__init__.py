"""Sources of images, used by the driver, to plan and refuse, and by every rank, to read. No torch in here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitscale.base.plugins import answer, known, referred
from vitscale.errors import RequestError
from vitscale.sources import base
from vitscale.sources.base import ChannelStatistics, Dataset, OnProgress, Source, Split, Summary, default_cache_root
from vitscale.trial import script
from vitscale.trial.hints import meant_value
from vitscale.trial.trial import DataSpec

__all__ = ["SOURCES", "ChannelStatistics", "Dataset", "Source", "Split", "Summary", "check", "load", "prepare"]

SOURCES: Mapping[str, str] = {
    "ade20k": "vitscale.sources.ade20k:ADE20K",
    "cifar10": "vitscale.sources.cifar:CIFAR10_FILES",
    "cifar100": "vitscale.sources.cifar:CIFAR100_FILES",
    "digits": "vitscale.sources.digits:DIGITS",
    "folder": "vitscale.sources.image_folder:FOLDER",
    "hf": "vitscale.sources.hf_datasets:HF",
    "shards": "vitscale.sources.shards:SHARDS",
    "synthetic": "vitscale.sources.synthetic:SYNTHETIC",
    "synthetic-masks": "vitscale.sources.synthetic:SYNTHETIC_MASKS",
}
"""`data.name` to its source, as module:object; imported when it is used."""
_BUILT_IN_NAMES = (*SOURCES, script.NAME)
"""Names of datasets that are no plug-in's."""


def check(spec: DataSpec) -> Summary:
    """Finds the images and verifies them before anything starts.

    Writes only the archive, where `spec.download` asks for it, and into the cache's folder which broken images are left
    out. Raises `RequestError` naming what is wrong and what to do.
    """
    source = _source(spec)
    return answer("dataset", spec.name, _BUILT_IN_NAMES, lambda: source.check(spec), Summary)


def prepare(spec: DataSpec, progress: OnProgress | None = None) -> None:
    """Does once what every rank would do in `load`; damage inside an image shows before anything starts.

    Raises `RequestError` as `load` does.
    """
    from vitscale.sources.image_set import ImageSet

    source = _source(spec)
    if isinstance(source, ImageSet):
        source.prepare(spec, default_cache_root(), progress)
    else:
        answer("dataset", spec.name, _BUILT_IN_NAMES, lambda: source.load(spec, default_cache_root()), Dataset)


def load(spec: DataSpec, cache_root: Path | None = None) -> Dataset:
    """Opens the images for reading: decoded once into `cache_root`, then memory-mapped by every rank of the host.

    `cache_root` None is `$VITSCALE_CACHE`, else `$XDG_CACHE_HOME/vitscale`, else `~/.cache/vitscale`; where it cannot
    be written the images are decoded into memory. Any number of processes may call this at once. Raises
    `RequestError` as `check` does, and for an image that turns out broken only when decoded.
    """
    dataset = _source(spec).load(spec, cache_root if cache_root is not None else default_cache_root())
    if (spec.channels, spec.dtype) == (3, "uint8"):
        return dataset
    return replace(dataset, statistics=_channel_statistics(dataset.train))


def _channel_statistics(split: Split) -> ChannelStatistics:
    """Computes mean and deviation of each channel over evenly spread training images: 8 to 256, up to 1 GiB of them.

    Every rank comes to the same numbers, for they look at the same images.
    """
    image_bytes = split.take(np.zeros(1, dtype=np.int64)).nbytes
    count = min(len(split), max(8, min(256, (1 << 30) // image_bytes)))
    sums: NDArray[np.float64] | float = 0.0
    sums_of_squares: NDArray[np.float64] | float = 0.0
    pixel_count = 0
    for number in np.linspace(0, len(split) - 1, count).astype(np.int64):
        pixels = split.take(np.array([number])).astype(np.float64)
        sums = sums + pixels.sum(axis=(0, 1, 2))
        sums_of_squares = sums_of_squares + (pixels**2).sum(axis=(0, 1, 2))
        pixel_count += pixels[..., 0].size
    mean = np.asarray(sums / pixel_count)
    deviation = np.sqrt(np.maximum(sums_of_squares / pixel_count - mean**2, 0.0))
    # A channel that is the same everywhere is not scaled: only its mean is taken off.
    scale = np.where(deviation > 0, deviation, 1.0)
    return ChannelStatistics(mean=tuple(mean.tolist()), std=tuple(scale.tolist()))


def _source(spec: DataSpec) -> Source:
    """Returns the source of `data.name`, a built-in one or a plug-in's.

    Raises:
        RequestError: there is none.
    """
    if spec.name == script.NAME:
        return _ScriptSource()
    built_in: Mapping[str, str | Source] = SOURCES
    source = known("dataset", spec.name, built_in, "check", "load", next_step=meant_value("data.name", spec.name))
    return referred(source) if isinstance(source, str) else source


class _ScriptSource:
    """The dataset `script`, which only a user's own script reads.

    Of its images only their number in an epoch is known, `samples`, which the user states.
    """

    def check(self, spec: DataSpec) -> Summary:
        """Needs nothing but the numbers in `spec`."""
        base.refuse_other_keys(spec, ("channels",))
        return Summary(
            train_samples=spec.samples,
            held_out_samples=0,
            classes=tuple(f"class {number}" for number in range(base.class_count(spec))),
            image_shape=(spec.source_size, spec.source_size, spec.channels),
            fingerprint=f"script: {spec.samples} images, not seen here",
        )

    def load(self, spec: DataSpec, cache_root: Path) -> Dataset:  # noqa: ARG002  one signature for every source
        """Nothing to load.

        Raises:
            RequestError: always.
        """
        raise RequestError('data.name = "script" is of train.script alone', next_step="Name a dataset, or a script")
