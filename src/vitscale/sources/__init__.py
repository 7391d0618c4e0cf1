"""Where images come from. Used by the driver (to plan and refuse) and by every rank (to read): no torch in here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vitscale.errors import unknown
from vitscale.sources.base import Dataset, Source, Split, Summary
from vitscale.sources.cifar import Cifar
from vitscale.sources.cifar_layout import CIFAR10, CIFAR100
from vitscale.sources.digits import Digits
from vitscale.sources.image_folder import ImageFolder
from vitscale.sources.paths import default_cache_root
from vitscale.sources.synthetic import Synthetic
from vitscale.trial import DataSpec

__all__ = ["SOURCES", "Dataset", "Source", "Split", "Summary", "check", "load"]

SOURCES: Mapping[str, Source] = {
    "cifar10": Cifar(CIFAR10),
    "cifar100": Cifar(CIFAR100),
    "digits": Digits(),
    "folder": ImageFolder(),
    "synthetic": Synthetic(),
}
"""`data.name` -> what reads it."""


def check(spec: DataSpec) -> Summary:
    """Finds the images and verifies them before anything starts.

    Writes nothing, except the archive where `spec.download` asks for it. Raises `RequestError` naming what is wrong
    and what to do.
    """
    return _source(spec).check(spec)


def load(spec: DataSpec, cache_root: Path | None = None) -> Dataset:
    """Opens the images for reading: decoded once into `cache_root`, then memory-mapped by every rank of the host.

    `cache_root` None is `$VITSCALE_CACHE`, else `$XDG_CACHE_HOME/vitscale`, else `~/.cache/vitscale`; where it cannot
    be written the images are decoded into memory. Any number of processes may call this at once. Raises
    `RequestError` as `check` does, and for an image that turns out broken only when decoded.
    """
    return _source(spec).load(spec, cache_root if cache_root is not None else default_cache_root())


def _source(spec: DataSpec) -> Source:
    if spec.name not in SOURCES:
        raise unknown("dataset", spec.name, SOURCES)
    return SOURCES[spec.name]
