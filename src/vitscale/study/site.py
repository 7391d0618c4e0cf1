"""The site file: where and how a cluster wants things run, apart from any study, so that a study runs everywhere."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitscale.base.files import beside, has_long_keys, read_text
from vitscale.errors import RequestError, shown

SECTIONS = ("launch", "slurm", "node")
"""What a site file may say; it is put over what the study says of the same."""

Overlay = Mapping[str, Mapping[str, Any]]
"""Values by section and key that are put over those of a study file."""


def overlay(site: Path | None, *, launcher: str | None, scheduler: str | None, hostfile: Path | None) -> Overlay:
    """What a site file and the command line put over a study, the command line last.

    Raises:
        RequestError: the site file cannot be read, is not TOML or has other sections.
    """
    sections: dict[str, dict[str, Any]] = read_site(site) if site is not None else {}
    given = {"launcher": launcher, "scheduler": scheduler, "hostfile": str(hostfile.absolute()) if hostfile else None}
    chosen: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if scheduler in ("local", "slurm") and hostfile is None:
        chosen["hostfile"] = None  # of the study or the site: it has no meaning there
    if chosen:
        sections["launch"] = sections.get("launch", {}) | chosen
    return sections


def read_site(path: Path) -> dict[str, dict[str, Any]]:
    """Reads a site file; its values are validated as part of the study that they are put over.

    Raises:
        RequestError: as `overlay` says.
    """
    text = read_text(path, "site file", next_step="Give a TOML file with [launch], [slurm] or [node]")
    try:
        if has_long_keys(text):
            raise ValueError("it is nested too deeply")
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"site file {shown(str(path))} is not TOML: {error}", next_step="Strings need quotes, lists brackets"
        ) from None
    for name, section in raw.items():
        if name not in SECTIONS or not isinstance(section, dict):
            kind = f"section {shown(name)}" if isinstance(section, dict) else f"key {shown(name)} outside a section"
            raise RequestError(
                f"site file {shown(str(path))} has a {kind}",
                valid=[f"[{each}]" for each in SECTIONS],
                next_step="What is to be studied belongs in the study file",
            )
    hostfile = raw.get("launch", {}).get("hostfile")
    if isinstance(hostfile, str):
        raw["launch"]["hostfile"] = str(beside(path, hostfile).absolute())
    return raw
