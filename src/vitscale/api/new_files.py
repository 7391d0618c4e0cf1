"""Files that a function writes on request, and that must not be there yet."""

from __future__ import annotations

import os
from pathlib import Path

from vitscale.errors import RequestError, shown


def refuse_existing(path: Path, option: str) -> None:
    """Refuse a file that exists already, before the work whose result it is to hold.

    Raises:
        RequestError: it exists, or its name cannot be one.
    """
    _refuse_standard_output(path, option)
    try:
        exists = os.path.lexists(path)
    except ValueError as error:  # a NUL in the name
        raise RequestError(f"{shown(str(path))} cannot be written: {error}") from None
    if exists:
        raise RequestError(f"{shown(str(path))} is there already", next_step=f"Name another file with {option}")


def _refuse_standard_output(path: Path, option: str) -> None:
    if str(path) == "-":
        raise RequestError(f"{option} - names no file", next_step=f"Name one with {option}, or leave {option} out")


def write_new(path: Path, text: str, option: str = "-o") -> None:
    """Write a file that does not exist yet, and make its folder where that is missing.

    `option`: the one that names the file, for messages.

    Raises:
        RequestError: it exists, cannot be written, or is `-`.
    """
    _refuse_standard_output(path, option)
    try:
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise RequestError(
            f"{shown(str(path))} is there already", next_step=f"Name another file with {option}"
        ) from None
    except (OSError, ValueError) as error:  # a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"{shown(str(path))} cannot be written: {reason}") from None
