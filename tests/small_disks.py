"""Disks that take nothing more."""

from __future__ import annotations

from pathlib import Path

from vitscale.store import is_full


def fill_with_files(disk: Path) -> Path:
    """Makes files in a folder until the disk takes no more; returns the folder."""
    folder = disk / "files"
    folder.mkdir()
    number = 0
    while not is_full(disk):
        (folder / str(number)).touch()
        number += 1
    return folder
