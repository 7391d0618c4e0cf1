"""Packages that engines need, and the versions that decide a result. Imports none of them."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import NamedTuple

from vitscale.base import plugins, program
from vitscale.base.distribution import versions_of
from vitscale.engines import ENGINES, of_engine


def missing_packages(engines: Iterable[str]) -> list[str]:
    """Return the packages that ranks of these engines import and that are not here; imports nothing.

    A package is here if it is installed, or lies on Python's path, where a cluster's module may have put it.
    """
    needed = ["torch", *(package for name in engines for package in of_engine(name).packages)]
    not_installed = [name for name, version in versions_of(needed).items() if version is None]
    return [name for name in not_installed if find_spec(name.replace("-", "_")) is None]


class NeedingEngine(NamedTuple):
    """An engine of another package, which needs a package."""

    engine: str
    offered_by: str
    """The package that the engine comes from."""


def needed_by(package: str, engines: Iterable[str]) -> NeedingEngine | None:
    """Return the first engine of another package that needs `package`; None where one of vitscale's own does too."""
    needing = [name for name in engines if package in of_engine(name).packages]
    if not needing or any(name in ENGINES for name in needing):
        return None
    offered_by = plugins.package("engine", needing[0])
    return None if offered_by is None else NeedingEngine(needing[0], offered_by)


def installed_versions(engines: Iterable[str] = ()) -> dict[str, str | None]:
    """Return the versions of the distributions that decide a result; imports nothing.

    They are those of vitscale's engines and of the engines named. The digest of vitscale's measuring code is among
    them where its files can be read. None: not installed.
    """
    engine_packages = [package for name in (*ENGINES, *engines) for package in of_engine(name).packages]
    names = ("vitscale", "torch", "deepspeed", "transformers", "numpy", *engine_packages, "pytorch-optimizer")
    versions = versions_of(names)
    measuring = program.measuring_digest()
    if measuring is not None:
        versions |= {program.MEASURING_NAME: measuring}
    return versions
