"""Files that a function writes on request, and that must not be there yet."""

from __future__ import annotations

from pathlib import Path

from vitscale.errors import RequestError, shown


def write_new(path: Path, text: str) -> None:
    """Write a file that does not exist yet, and makes its folder where that is missing.

    Raises:
        RequestError: it exists, cannot be written, or is `-`.
    """
    if str(path) == "-":
        raise RequestError("-o - names no file", next_step="Name one with -o, or leave -o out")
    try:
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise RequestError(f"{shown(str(path))} is there already", next_step="Name another file with -o") from None
    except (OSError, ValueError) as error:  # a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"{shown(str(path))} cannot be written: {reason}") from None
