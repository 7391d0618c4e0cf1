"""Files that a function writes on request, and that must not be there yet."""

from __future__ import annotations

from pathlib import Path

from vitscale.errors import RequestError, shown


def refuse_unwritable(path: Path, option: str) -> None:
    """Refuse a new file that cannot be written, before the work whose result it is to hold.

    The file is made and removed again: nothing else shows a file system that is read-only, or a name that is too long.

    Args:
        path: the file; its folder has to be there.
        option: the one that names the file, for messages.

    Raises:
        RequestError: it exists already, its folder is missing, or it cannot be made there.
    """
    _refuse_standard_output(path, option)
    try:
        path.open("x", encoding="utf-8").close()
        path.unlink()
    except (OSError, ValueError) as error:
        raise _refusal(path, option, error) from None


def _refusal(path: Path, option: str, error: OSError | ValueError) -> RequestError:
    """Return the error of a new file that could not be written.

    Args:
        path: the file.
        option: the one that names the file.
        error: of the kernel; a ValueError is of a NUL in the name.
    """
    if isinstance(error, FileExistsError):
        return RequestError(f"{shown(str(path))} is there already", next_step=f"Name another file with {option}")
    is_folder_missing = isinstance(error, FileNotFoundError) and not path.parent.exists()
    if is_folder_missing:
        message = f"{shown(str(path))} cannot be written: there is no folder {shown(str(path.parent))}"
        return RequestError(message, next_step=f"Make it first, or name another file with {option}")
    reason = getattr(error, "strerror", None) or error
    next_step = f"Name a file with {option} in a folder that you may write to"
    return RequestError(f"{shown(str(path))} cannot be written: {reason}", next_step=next_step)


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
    except (OSError, ValueError) as error:
        raise _refusal(path, option, error) from None
