"""Where the published measurements lie, for tests that want them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def paper(name: str) -> Path:
    """A file of the published data; the test is skipped where it is not there."""
    beside = Path(__file__).parents[2].parent / "shared" / "paper"
    path = Path(os.environ.get("VITSCALE_PAPER_DATA") or beside) / name
    if not path.is_file():
        pytest.skip(f"the published data is not here ({path.name}; VITSCALE_PAPER_DATA names its folder)")
    return path
