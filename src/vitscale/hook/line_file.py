"""A rank's file of lines."""

from __future__ import annotations

import os

from .lines import Line

_MOST_BYTES = 200_000_000
"""Some 500,000 steps; a run that is longer is left without further lines."""


class LineFile:
    """Appends lines to a file that did not exist before; stops at the first error or at 200 MB."""

    def __init__(self, path: str) -> None:
        """Create the file.

        Raises:
            OSError: it exists, or its folder cannot be written.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._descriptor: int | None = os.open(path, flags, 0o644)
        self._bytes = 0

    def write(self, lines: list[Line]) -> None:
        """Append the lines at once."""
        if self._descriptor is None or not lines:
            return
        text = "".join(line.to_json() + "\n" for line in lines)
        remaining = text.encode("utf-8", "surrogateescape")
        self._bytes += len(remaining)
        if self._bytes > _MOST_BYTES:
            self.close()
            return
        try:
            while remaining:
                remaining = remaining[os.write(self._descriptor, remaining) :]
        except OSError:  # a full disk: the program goes on without the hook's lines
            self.close()

    def close(self) -> None:
        """Close the file; nothing is written any more."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
