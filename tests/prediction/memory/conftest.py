"""What is worked out by hand is so for a processor with AVX512-BF16 and without AMX, whatever this machine has."""

from __future__ import annotations

import pytest

from vitscale.machine import cores


@pytest.fixture(autouse=True)
def _by_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "cpu_facts", lambda: {"flags": "avx512_bf16"})
