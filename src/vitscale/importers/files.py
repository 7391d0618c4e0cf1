"""Reads others' files line by line, whatever their bytes, line lengths and size; parses numbers in untrusted text."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path

from vitscale.errors import StoreError, printable, shown
from vitscale.store.results import ImportedFile

LONGEST_LINE = 64 * 1024
"""Bytes of a line that are read; the rest of a longer one is skipped."""
MOST_LINES = 20_000_000


def identified(path: Path) -> ImportedFile:
    """The name of a file and what it holds.

    Raises:
        StoreError: it cannot be read.
    """
    _check(path)
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except (OSError, ValueError) as error:  # ValueError: a NUL in its name
        raise cannot_read(path, error) from None
    return ImportedFile(name=printable(path.name)[:200], sha256=digest.hexdigest())


def lines(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yields (number from 1, text without its end, whether it is whole) for each line.

    Whole: it ends with a line break and is no longer than `LONGEST_LINE`. What is no UTF-8 becomes a replacement
    character.

    Raises:
        StoreError: the file cannot be read, or has more than `MOST_LINES` lines.
    """
    _check(path)
    try:
        with path.open("rb") as file:
            number = 0
            while raw := file.readline(LONGEST_LINE):
                number += 1
                if number > MOST_LINES:
                    raise StoreError(
                        f"{shown(path.name)} has more than {MOST_LINES:,} lines", next_step="Cut it into parts"
                    )
                whole = raw.endswith(b"\n")
                if not whole and len(raw) == LONGEST_LINE:
                    while (rest := file.readline(LONGEST_LINE)) and not rest.endswith(b"\n"):
                        pass
                text = raw.decode("utf-8", errors="replace")
                yield number, (text.removeprefix("\ufeff") if number == 1 else text).rstrip("\r\n"), whole
    except (OSError, ValueError) as error:
        raise cannot_read(path, error) from None


def _check(path: Path) -> None:
    """Refuses devices and pipes, which may never end or never begin."""
    try:
        other = path.exists() and not path.is_file()
    except (OSError, ValueError) as error:
        raise cannot_read(path, error) from None
    if other:
        raise StoreError(f"{shown(str(path))} cannot be read: it is no file", next_step="Give the file of a log")


def cannot_read(path: Path, error: Exception) -> StoreError:
    """The error for a file that cannot be read."""
    why = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
    return StoreError(f"{shown(str(path))} cannot be read: {why}", next_step="Give the file of a log")


SHORTEST_SECONDS, LONGEST_SECONDS = 1e-9, 1e9
"""The resolution of a clock, and thirty years."""
_LONGEST_TEXT = 40


def parse_seconds(text: str) -> float:
    """The time in seconds that `text` states.

    Raises:
        ValueError: it is none, and why.
    """
    value = _number(text)
    if not SHORTEST_SECONDS <= value <= LONGEST_SECONDS:
        raise ValueError(f"{_short(text)} is no time")
    return value


def parse_whole(text: str, least: int, most: int) -> int:
    """An integer within bounds; "4.0" is one.

    Raises:
        ValueError: it is none, and why.
    """
    value = _number(text)
    if value != int(value) or not least <= value <= most:
        raise ValueError(f"{_short(text)} is no whole number from {least:,} to {most:,}")
    return int(value)


def parse_share(text: str) -> float:
    """A number above 0 and at most 1.

    Raises:
        ValueError: it is none, and why.
    """
    value = _number(text)
    if not 0 < value <= 1:
        raise ValueError(f"{_short(text)} is no share above 0 and up to 1")
    return value


def parse_finite(text: str) -> float | None:
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
