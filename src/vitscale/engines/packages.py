"""Packages that engines need, and the versions that decide a result. Imports none of them."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

from vitscale.base import plugins, program
from vitscale.base.distribution import versions_of
from vitscale.engines import ENGINES, of_engine


def missing_packages(engines: Iterable[str]) -> list[str]:
    """Packages that ranks of these engines import and that are neither installed here nor on Python's path (where a
    cluster's module may have put them); imports nothing."""
    needed = ["torch", *(package for name in engines for package in of_engine(name).packages)]
    unknown = [name for name, version in versions_of(needed).items() if version is None]
    return [name for name in unknown if find_spec(name.replace("-", "_")) is None]


def needed_by(package: str, engines: Iterable[str]) -> tuple[str, str] | None:
    """The first engine of another package that needs `package`, and that package; None where vitscale's own do too."""
    asking = [name for name in engines if package in of_engine(name).packages]
    if not asking or any(name in ENGINES for name in asking):
        return None
    offered = plugins.package("engine", asking[0])
    return None if offered is None else (asking[0], offered)


def installed_versions(engines: Iterable[str] = ()) -> dict[str, str | None]:
    """Versions of the distributions that decide a result: those of vitscale's engines and of the engines named, and the
    digest of vitscale's measuring code where its files can be read. Imports nothing; None: not installed."""
    of_engines = [package for name in (*ENGINES, *engines) for package in of_engine(name).packages]
    names = ("vitscale", "torch", "deepspeed", "transformers", "numpy", *of_engines, "pytorch-optimizer")
    versions = versions_of(names)
    measuring = program.measuring_digest()
    return versions if measuring is None else versions | {program.MEASURING_NAME: measuring}
