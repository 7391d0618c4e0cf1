"""Fixtures that several folders share."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB; skipped with its reason where none can be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if mount is None or umount is None:
        pytest.skip("a small disk cannot be mounted: there is no mount program")
    answer = subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if answer.returncode != 0:
        pytest.skip(f"a small disk cannot be mounted: {answer.stderr.strip()}")
    yield disk
    subprocess.run([umount, "--lazy", str(disk)], check=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start ranks come first: of several processes none is to begin with the longest file when the others
    have nothing left."""
    long = {item.path for item in items if item.get_closest_marker("ranks") is not None}
    items.sort(key=lambda item: item.path not in long)
