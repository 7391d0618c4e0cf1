"""Packages that engines need, and the versions that decide a result. Imports none of them."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from itertools import chain
from typing import NamedTuple

from vitscale.base import plugins, program
from vitscale.base.distribution import versions_of
from vitscale.engines import ENGINES, of_engine


def missing_packages(engines: Iterable[str]) -> list[str]:
    """Return the packages that ranks of these engines import and that are not here; imports nothing.

    A package is here if it is installed, or lies on Python's path, where a cluster's module may have put it.
    """
    needed = ["torch", *_packages_of(engines)]
    not_installed = [package for package, version in versions_of(needed).items() if version is None]
    return [package for package in not_installed if find_spec(_import_name(package)) is None]


def _packages_of(engines: Iterable[str]) -> list[str]:
    """Return the distributions beyond torch that decide the results of these engines."""
    return list(chain.from_iterable(of_engine(name).packages for name in engines))


def _import_name(package: str) -> str:
    """Return the name by which a distribution is imported: "pytorch_optimizer" for "pytorch-optimizer"."""
    return package.replace("-", "_")


class NeedingEngine(NamedTuple):
    """An engine of another package, which needs a package."""

    engine: str
    offered_by: str
    """The package that the engine comes from."""


def needed_by(package: str, engines: Iterable[str]) -> NeedingEngine | None:
    """Return the first engine of another package that needs `package`; None where one of vitscale's own does too."""
    needing_engines = [name for name in engines if package in of_engine(name).packages]
    is_needed_by_vitscale = any(name in ENGINES for name in needing_engines)
    if not needing_engines or is_needed_by_vitscale:
        return None
    engine = needing_engines[0]
    offered_by = plugins.package("engine", engine)
    return None if offered_by is None else NeedingEngine(engine, offered_by)


def installed_versions(engines: Iterable[str] = ()) -> dict[str, str | None]:
    """Return the versions of the distributions that decide a result; imports nothing.

    They are those of vitscale's engines and of the engines named. The digest of vitscale's measuring code is among
    them where its files can be read. None: not installed.
    """
    engine_packages = _packages_of((*ENGINES, *engines))
    packages = ("vitscale", "torch", "deepspeed", "transformers", "numpy", *engine_packages, "pytorch-optimizer")
    versions = versions_of(packages)
    measuring_digest = program.measuring_digest()
    if measuring_digest is not None:
        versions |= {program.MEASURING_NAME: measuring_digest}
    return versions
