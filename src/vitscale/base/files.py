"""Text files that a user names, read up to a limit, with one message for each way to be unreadable; files of a folder
that may be anybody's; files that are written whole; and kernel locks.

In a folder that may be anybody's (results) a name can stand for a pipe, which nobody writes to, for a device without an
end, or for a link to a file of the user's. `open_regular` reads from files alone; what is written there with
`follow_links=False`, and a lock, never goes through a link. A file that a user names may be any of these.

A lock goes with its holder, unless that is on a host which a network file system has lost.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TextIO

from vitscale.errors import RequestError, shown

_LARGEST_BYTES = 1 << 20
_KEY_CHAIN = re.compile(r"""(?<![\w"'.-])(?:[\w"'-]++[ \t]*+\.[ \t]*+){20}""")


def read_text(path: Path, file_kind: str, *, next_step: str) -> str:
    """Return the UTF-8 text of a file, without a byte order mark. No more than 1 MiB of the file is read.

    Args:
        path: the file; it may be a device without an end.
        file_kind: the word for it in messages: "study file".
        next_step: what the message advises.

    Raises:
        RequestError: the file is missing, unreadable, larger than 1 MiB, empty, or not UTF-8.
    """
    subject = f"{file_kind} {shown(str(path))}"
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL or a lone surrogate in the path
        reason = error.strerror if isinstance(error, OSError) else None
        raise RequestError(f"{subject} cannot be read: {reason or 'no such path'}", next_step=next_step) from None
    if len(content) > _LARGEST_BYTES:
        raise RequestError(f"{subject} is larger than 1 MiB", next_step=next_step)
    if not content.strip():
        raise RequestError(f"{subject} is empty", next_step=next_step)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(f"{subject} is not text (byte {error.start} is not UTF-8)", next_step=next_step) from None


LARGEST_RECORD_BYTES = 256 << 20
"""Bytes of the largest single record of results: a study, a trial, an outcome, a check, a job."""
LARGEST_LINES_BYTES = 4 << 30
"""Bytes of the largest file of many records: a rank's lines, a pack."""


def open_regular(path: Path, *, largest_bytes: int = LARGEST_LINES_BYTES, follow_links: bool = True) -> BinaryIO:
    """Opens a regular file for reading, in a folder that anybody may have written to.

    Returns or raises at once: a pipe without a writer would make a plain `open` wait.

    Raises:
        OSError: it cannot be opened, is a pipe, a device, a socket or a folder, or is larger than `largest_bytes`.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    if not follow_links:
        flags |= os.O_NOFOLLOW
    descriptor = os.open(path, flags)
    try:
        state = os.fstat(descriptor)
        if stat.S_ISDIR(state.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(state.st_mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, and no file", str(path))
        if state.st_size > largest_bytes:
            raise OSError(errno.EFBIG, f"it is larger than {largest_bytes >> 20:,} MiB", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_record(path: Path) -> str:
    """Return the UTF-8 text of a file that holds one record, in a folder that anybody may have written to.

    Raises:
        OSError: as `open_regular`.
        ValueError: it is not UTF-8.
    """
    with open_regular(path, largest_bytes=LARGEST_RECORD_BYTES) as file:
        return file.read().decode("utf-8")


def has_long_keys(text: str) -> bool:
    """Whether TOML text has dotted keys with very many parts.

    tomllib takes quadratic time over them, and vitscale's files need no more than two parts.
    """
    return _KEY_CHAIN.search(text) is not None


def path_named_in(file: Path, named: str) -> Path:
    """Return the path that a file's text names. A relative path starts at that file's folder, `~` is the home folder.

    Example: "data/images" in /home/me/study.toml is /home/me/data/images.

    Args:
        file: the file whose text names a path.
        named: the path as it stands there.

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


_MOST_LINKS_FOLLOWED = 40
"""Links to links that are followed; the kernel follows no more."""


def is_stream(path: Path) -> bool:
    """Whether a name stands for a device, a pipe, a socket, or a file that a process has open (/dev/stdout).

    Links are followed one at a time, since a name on the way may be one of these: /dev/stdout is itself a link, and may
    lead on to a plain file.
    """
    name = path
    for _ in range(_MOST_LINKS_FOLLOWED):
        folder = os.path.realpath(name.parent)
        is_standard_stream = folder == "/dev" and name.name in ("stdin", "stdout", "stderr")
        is_open_file = folder == "/dev/fd" or folder.startswith("/proc/")
        if is_standard_stream or is_open_file:
            return True
        if not name.is_symlink():
            break
        name = Path(folder, name.readlink())
    return path.exists() and not path.is_file() and not path.is_dir()


@contextmanager
def unwritable_as_request_error(
    written: str, path_or_name: object, next_step: str = "", *, is_answer: bool = True
) -> Iterator[None]:
    """Turn an OSError of the block, which writes a file, into a RequestError.

    Args:
        written: the word for what is written: "the report".
        path_or_name: the file or folder that the message names if the error names none.
        next_step: what the message advises.
        is_answer: whether it may be printed. A BrokenPipeError then stays as it is: the reader has seen enough.

    Raises:
        RequestError: an OSError has ended the block.
    """
    try:
        yield
    except OSError as error:
        if is_answer and isinstance(error, BrokenPipeError):
            raise
        target = shown(str(error.filename or path_or_name))
        message = f"{written} cannot be written to {target}: {error.strerror or error}"
        raise RequestError(message, next_step=next_step) from error


@contextmanager
def whole_file(
    path: Path, *, make_folder: bool = False, follow_links: bool = True, private: bool = False
) -> Iterator[BinaryIO]:
    """Opens a file that is written in a block: after a crash it holds the old content or the new, never a mix.

    A link stays, and what it leads to is replaced. A stream (`is_stream`) is written to as it is: a file in its place
    would be of no use to whoever reads from it.

    Args:
        path: the file.
        make_folder: make its folder where that is missing.
        follow_links: True for a name that a user gave. With False whatever has the name is itself replaced, be it a
            link or a pipe: for a folder that may be anybody's.
        private: let only its owner read it, whatever the umask, from its first byte on.

    Yields:
        The draft, or the stream.

    Raises:
        OSError: it cannot be written; it names `path`, never the draft.
    """
    if follow_links and is_stream(path):
        with path.open("ab") as stream:
            yield stream
        return
    target = Path(os.path.realpath(path)) if follow_links else path
    draft = draft_of(target)
    with _errors_naming(path, in_place_of=draft):
        if make_folder:
            target.parent.mkdir(parents=True, exist_ok=True)
        file = _new_file(draft, private=private)
        try:
            with file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            draft.replace(target)
        except BaseException:
            with suppress(OSError):
                draft.unlink()
            raise
        with suppress(OSError):  # a folder may not be readable, nor every file system sync one; the file is whole
            sync_folder(target.parent)


@contextmanager
def _errors_naming(path: Path, *, in_place_of: Path) -> Iterator[None]:
    """Lets an OSError in the block name the file that the user knows, and not its draft."""
    try:
        yield
    except OSError as error:
        if str(error.filename) != str(in_place_of):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def draft_of(path: Path) -> Path:
    """Returns a hidden, random name in the folder of `path`, for a file that is renamed to `path` when it is whole.

    Nobody can guess the name, so nobody can have put a link there. Example: ".study.json.1f0c9a44e0b2d3a7.draft".
    """
    return path.with_name(f".{path.name[:_DRAFT_LETTERS]}.{secrets.token_hex(8)}.draft")


_DRAFT_LETTERS = 40
"""Letters of a file's name that its draft's name begins with: a name has at most 255 bytes, and a letter up to 4."""


def _new_file(path: Path, *, private: bool) -> BinaryIO:
    """Makes a file and opens it for writing; with `private` only its owner may read and write it.

    Raises:
        OSError: it cannot be made, or something has its name already, which stays as it is.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    mode = 0o600 if private else 0o666
    return os.fdopen(os.open(path, flags, mode), "wb")


def sync_folder(folder: Path) -> None:
    """Forces the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_ZEROS = bytes(2**20)


def allocate(file: BinaryIO, size: int) -> None:
    """Reserves room on the disk for the first `size` bytes of a file that is shorter or has no data there yet.

    Where the system has no call for it (macOS) what is beyond the file's end is written as zeros, and holes stay.

    Raises:
        OSError: the disk is full.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
        return
    missing_bytes = size - file.seek(0, os.SEEK_END)
    while missing_bytes > 0:
        missing_bytes -= file.write(_ZEROS[:missing_bytes])
    file.flush()


_SECONDS_BETWEEN_TRIES = 0.1
"""Time from one try to take a lock to the next."""


@contextmanager
def file_lock(path: Path, patience_seconds: float = math.inf) -> Iterator[TextIO | None]:
    """Holds the kernel's lock on a file for the length of a block; the file is made where it is missing.

    Yields:
        The open file; None where another process held the lock for all of `patience_seconds`.

    Raises:
        OSError: it cannot be opened, or is a link, a pipe or a device.
    """
    deadline = time.monotonic() + patience_seconds
    waits_for_ever = patience_seconds == math.inf
    with _lock_file(path) as file:
        is_ours = _take_lock(file, wait=waits_for_ever)
        while not is_ours and time.monotonic() < deadline:
            time.sleep(_SECONDS_BETWEEN_TRIES)
            is_ours = _take_lock(file, wait=waits_for_ever)
        yield file if is_ours else None


def _lock_file(path: Path) -> TextIO:
    """Opens the file of a lock, made where missing.

    Raises:
        OSError: it cannot be opened, or is a link, a pipe or a device.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "a lock must not be a link", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "a lock must be a file", str(path))
    return os.fdopen(descriptor, "r+", encoding="ascii", errors="replace")


def _take_lock(file: TextIO, *, wait: bool) -> bool:
    """Try to take a file's lock, and return whether this process has it; with `wait` it waits until it has."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True
