"""Text files that a user names, read up to a limit, with one message for each way to be unreadable; files that are
written whole; and kernel locks.

A lock goes with its holder, unless that is on a host which a network file system has lost.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TextIO

from vitscale.errors import RequestError, shown

_LARGEST_BYTES = 1 << 20
_KEY_CHAIN = re.compile(r"""(?<![\w"'.-])(?:[\w"'-]++[ \t]*+\.[ \t]*+){20}""")


def read_text(path: Path, what: str, *, next_step: str) -> str:
    """The UTF-8 text of `path`, at most 1 MiB: an endless file is not read to its end.

    Raises:
        RequestError: `what` ("study file") is missing, unreadable, too large, empty or no text.
    """
    named = f"{what} {shown(str(path))}"
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL or a lone surrogate in the path
        reason = (isinstance(error, OSError) and error.strerror) or "no such path"
        raise RequestError(f"{named} cannot be read: {reason}", next_step=next_step) from None
    if len(content) > _LARGEST_BYTES:
        raise RequestError(f"{named} is larger than 1 MiB", next_step=next_step)
    if not content.strip():
        raise RequestError(f"{named} is empty", next_step=next_step)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(f"{named} is not text (byte {error.start} is not UTF-8)", next_step=next_step) from None


def has_long_keys(text: str) -> bool:
    """Whether TOML text has dotted keys with very many parts.

    tomllib takes quadratic time over them, and vitscale's files need no more than two parts.
    """
    return _KEY_CHAIN.search(text) is not None


def beside(file: Path, named: str) -> Path:
    """The path that `file` means by `named`: `~` is the home folder; a relative path starts at the folder of `file`.

    Raises:
        RequestError: the home folder of `~name` is not known.
    """
    try:
        path = Path(named).expanduser()
    except RuntimeError as error:  # "~nobody/data" where there is no such user
        raise RequestError(
            f"the path {shown(named)} in {shown(str(file))} cannot be used: {error}", next_step="Write it out"
        ) from None
    return path if path.is_absolute() else (file.parent / path).absolute()


_MOST_LINKS = 40
"""The kernel follows no more."""


def is_stream(path: Path) -> bool:
    """Whether a name stands for a device, a pipe, a socket, or a file that a process has open (/dev/stdout).

    So does a link to such a name, through any number of links.
    """
    name = path
    for _ in range(_MOST_LINKS):
        folder = os.path.realpath(name.parent)
        standard = folder == "/dev" and name.name in ("stdin", "stdout", "stderr")
        if standard or folder == "/dev/fd" or folder.startswith("/proc/"):
            return True
        if not name.is_symlink():
            break
        name = Path(folder, name.readlink())
    return path.exists() and not path.is_file() and not path.is_dir()


@contextmanager
def told_if_unwritable(what: str, where: object, next_step: str = "", *, is_answer: bool = True) -> Iterator[None]:
    """Tells in one message that `what` cannot be written to `where`.

    With `is_answer` a BrokenPipeError goes on as it is: the reader of the answer has seen enough.

    Raises:
        RequestError: an OSError has ended the block.
    """
    try:
        yield
    except OSError as error:
        if is_answer and isinstance(error, BrokenPipeError):
            raise
        said = f"{what} cannot be written to {shown(str(error.filename or where))}: {error.strerror or error}"
        raise RequestError(said, next_step=next_step) from error


@contextmanager
def whole_file(path: Path, *, make_folder: bool = False, private: bool = False) -> Iterator[BinaryIO]:
    """Opens a file that is written in a block: after a crash it holds the old content or the new, never a mix.

    A link stays, and what it leads to is replaced. A stream (`is_stream`) is written to as it is: a file in its place
    would be of no use to whoever reads from it.

    Args:
        path: the file.
        make_folder: make its folder where that is missing.
        private: let only its owner read it, whatever the umask, from its first byte on.

    Yields:
        The draft, or the stream.

    Raises:
        OSError: it cannot be written; it names `path`, never the draft.
    """
    if is_stream(path):
        with path.open("ab") as stream:
            yield stream
        return
    target = Path(os.path.realpath(path))
    draft = target.with_name(f".{target.name}.{os.getpid()}.draft")
    try:
        if make_folder:
            target.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(_new_file(draft, private=private), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
        with suppress(OSError):  # a folder may not be readable, nor every file system sync one; the file is whole
            sync_folder(target.parent)
    except BaseException as error:
        with suppress(OSError):
            draft.unlink()
        if isinstance(error, OSError) and str(error.filename) == str(draft):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def _new_file(path: Path, *, private: bool) -> int:
    """The descriptor of an empty file, which with `private` only its owner may read and write."""
    mode = 0o600 if private else 0o666
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    if private:
        os.fchmod(descriptor, mode)  # a draft that a killed process has left keeps its mode
    return descriptor


def sync_folder(folder: Path) -> None:
    """Forces the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_LOOK_SECONDS = 0.1


@contextmanager
def file_lock(path: Path, patience_seconds: float = math.inf) -> Iterator[TextIO | None]:
    """Holds the lock of `path`, which is made where missing, for the length of a block.

    Yields:
        The open file; None where another process held the lock for all of `patience_seconds`.
    """
    end = time.monotonic() + patience_seconds
    with path.open("a+", encoding="ascii", errors="replace") as file:
        while not (free := _taken(file, wait=patience_seconds == math.inf)) and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
        yield file if free else None


def _taken(file: TextIO, *, wait: bool) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True
