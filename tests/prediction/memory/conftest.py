"""What is worked out by hand is so for a processor without AMX, whatever this machine has."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def _without_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    import vitscale.prediction.memory.forecast  # noqa: F401 - before a test replaces what it reads

    monkeypatch.setattr(sys.modules["vitscale.prediction.memory.forecast"], "multiplies_in_tiles", lambda: False)
