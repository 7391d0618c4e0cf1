"""Numbers of untrusted text: finite, positive, of a believable size."""

from __future__ import annotations

import math

LONGEST_SECONDS = 1e9
"""Thirty years."""
_LONGEST_TEXT = 40


def seconds(text: str) -> float:
    """A time above 0.

    Raises:
        ValueError: it is none, and why.
    """
    value = _number(text)
    if not 0 < value <= LONGEST_SECONDS:
        raise ValueError(f"{_short(text)} is no time")
    return value


def whole(text: str, least: int, most: int) -> int:
    """An integer within bounds; "4.0" is one.

    Raises:
        ValueError: it is none, and why.
    """
    value = _number(text)
    if value != int(value) or not least <= value <= most:
        raise ValueError(f"{_short(text)} is no whole number from {least:,} to {most:,}")
    return int(value)


def share(text: str) -> float:
    """A number above 0 and at most 1.

    Raises:
        ValueError: it is none, and why.
    """
    value = _number(text)
    if not 0 < value <= 1:
        raise ValueError(f"{_short(text)} is no share above 0 and up to 1")
    return value


def finite(text: str) -> float | None:
    """A finite number, or None for an empty text and for what stands for "not finite".

    Raises:
        ValueError: it is no number.
    """
    if not text.strip():
        return None
    value = float(text) if len(text) <= _LONGEST_TEXT else math.nan
    return value if math.isfinite(value) else None


def _number(text: str) -> float:
    try:
        value = float(text) if len(text) <= _LONGEST_TEXT else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{_short(text)} is no number")
    return value


def _short(text: str) -> str:
    return repr(text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}...")
