"""JSON values side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

CLOSE = 1e-8
"""Relative: processors, sums in another order, and Python 3.12, which adds more exactly, differ in the last digits,
most of all in what is left of a difference (by 2e-9)."""


def apart(now: Any, before: Any, at: str = "") -> Iterator[str]:
    """Where two JSON values differ, whatever the order of their keys, in words."""
    if isinstance(now, dict) and isinstance(before, dict) and now.keys() == before.keys():
        for key in now:
            yield from apart(now[key], before[key], f"{at}.{key}")
    elif isinstance(now, list) and isinstance(before, list) and len(now) == len(before):
        for n, (own, other) in enumerate(zip(now, before, strict=True)):
            yield from apart(own, other, f"{at}[{n}]")
    elif type(now) is type(before) in (int, float):
        if now != pytest.approx(before, rel=CLOSE, abs=0):
            yield f"{at}: {now!r}, not {before!r}"
    elif type(now) is not type(before) or now != before:
        yield f"{at}: {now!r}, not {before!r}"
