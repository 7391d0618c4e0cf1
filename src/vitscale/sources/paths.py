"""Where datasets and the cache lie; a path that cannot be used becomes a message instead of a traceback."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Literal

from vitscale.errors import RequestError, shown
from vitscale.trial.trial import DataSpec


def default_cache_root() -> Path:
    """`$VITSCALE_CACHE`, else `$XDG_CACHE_HOME/vitscale`, else `~/.cache/vitscale`."""
    if own := os.environ.get("VITSCALE_CACHE"):
        return Path(own)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "vitscale"
    try:
        return Path("~/.cache/vitscale").expanduser()
    except RuntimeError as error:  # neither HOME nor an entry for this user
        raise RequestError(str(error), next_step="Set VITSCALE_CACHE to a folder for decoded images") from None


def root_of(spec: DataSpec) -> Path | None:
    """`spec.root` with `~` expanded; None where it is not given."""
    if not spec.root:
        return None
    try:
        return Path(spec.root).expanduser()
    except RuntimeError as error:  # ~nobody: no such user
        raise RequestError(f"data.root {shown(spec.root)}: {error}") from None


def kind_of(path: Path) -> Literal["file", "folder", "other"] | None:
    """What lies at `path` (links followed); None where there is nothing.

    Raises `RequestError` where one cannot look.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # no permission, a name too long, a null byte, a loop of links
        raise RequestError(
            f"cannot look at {shown(str(path))}: {reason(error)}", next_step="Correct data.root"
        ) from None
    if stat.S_ISREG(mode):
        return "file"
    return "folder" if stat.S_ISDIR(mode) else "other"


def write_if_possible(path: Path, text: str) -> None:
    """Keeps what every rank would else find out for itself: whole or not at all, and not where it cannot be written."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial.write_text(text)
        partial.replace(path)
    except OSError:
        pass


def reason(error: Exception) -> str:
    """The text of an error without the path, which the message names already (and truncates)."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
