"""Downloads a file over HTTP with a progress bar, and reads archives that may be a stranger's.

A download gets its name only once its checksum is right.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
import tempfile
import zlib
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from vitscale.errors import RequestError, shown
from vitscale.sources.base import reason

_TIMEOUT_SECONDS = 30
_CHUNK_BYTES = 1 << 18
_MOST_MEMBERS = 1000


def fetch(url: str, target: Path, *, md5: str | None, most_bytes: int) -> None:
    """Downloads `url` to `target`, through a temporary file beside it that never outlives the call.

    Args:
        url: an address of http or https.
        target: path of the file.
        md5: the MD5 that the content must have; None accepts any.
        most_bytes: most bytes of the content.

    Raises:
        RequestError: there is no network, the transfer breaks off, the content is larger or has another MD5, or the
            folder cannot be written.
    """
    import http.client  # imported here with TLS: mostly nothing is downloaded

    if not url.startswith(("http://", "https://")):
        raise RequestError(f"cannot download {shown(url)}: only http and https")
    next_step = f"Try again; without a network here, download {url} elsewhere and place it at {target}"
    partial = _new_partial_file(target)
    try:
        with os.fdopen(partial.descriptor, "wb") as file:
            received_md5 = _transfer(url, file, most_bytes)
        if md5 is not None and received_md5 != md5:
            what = f"what {url} sent has the MD5 {received_md5}, not {md5}: nothing was kept"
            raise RequestError(what, next_step=next_step)
        partial.path.replace(target)
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: a length that is no number
        raise RequestError(f"could not download {url}: {reason(error)}", next_step=next_step) from None
    finally:
        partial.path.unlink(missing_ok=True)


class _PartialFile(NamedTuple):
    """A file that is being downloaded, open for writing."""

    descriptor: int
    path: Path


def _new_partial_file(target: Path) -> _PartialFile:
    """Makes an empty file for a download, in the folder of `target`.

    Raises:
        RequestError: the folder cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent)
    except OSError as error:
        what = f"cannot write to {shown(str(target.parent))}: {reason(error)}"
        raise RequestError(what, next_step="Set data.root to a folder you can write to") from None
    return _PartialFile(descriptor, Path(name))


def _transfer(url: str, file: IO[bytes], most_bytes: int) -> str:
    """Copies the body of `url` into `file` and returns its MD5.

    Raises:
        OSError: the transfer breaks off, or the body is larger than `most_bytes`.
        ValueError: the server sends a length that is no number.
    """
    import urllib.request

    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    digest = hashlib.md5(usedforsecurity=False)
    received_bytes = 0
    with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response:  # noqa: S310  `fetch` admits only http(s)
        length = response.headers.get("Content-Length")
        expected_bytes = int(length) if length is not None else None
        # Where standard error is no terminal, rich prints one line at the end.
        with Progress(*columns, console=Console(stderr=True, emoji=False)) as bar:
            task = bar.add_task(f"downloading {url.rsplit('/', 1)[-1]}", total=expected_bytes)
            while chunk := response.read(_CHUNK_BYTES):
                received_bytes += len(chunk)
                if received_bytes > most_bytes:
                    raise OSError(f"it is larger than {most_bytes:,} bytes")
                digest.update(chunk)
                file.write(chunk)
                bar.advance(task, len(chunk))
    if expected_bytes is not None and received_bytes != expected_bytes:
        raise OSError(f"the transfer broke off after {received_bytes:,} of {expected_bytes:,} bytes")
    return digest.hexdigest()


class _Refused(Exception):
    """An archive with content that it should not have, damaged or not."""


def read_members(archive: Path, names: Collection[str], most_bytes: int) -> dict[str, bytes]:
    """Reads some files of an archive, a .tar.gz.

    Every member is judged, also those that are not among these files: a name that leads outside the folder, a link or a
    device refuses the whole archive. All of it is read, so that its checksum is verified.

    Args:
        archive: path of the archive.
        names: names of the files, such as "folder/name", all of which must be there.
        most_bytes: most bytes of the archive once decompressed.

    Raises:
        RequestError: a file is not there, or the archive is damaged or refused.
    """
    shown_archive = shown(archive.name)
    try:
        with archive.open("rb") as compressed:
            unzipped = _Bounded(gzip.GzipFile(fileobj=compressed), most_bytes)
            contents = _read_tar(unzipped, set(names))
    except _Refused as refusal:
        raise RequestError(
            f"the archive {shown_archive} was refused: {refusal}", next_step="Get the official archive again"
        ) from None
    except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError, RecursionError, OverflowError) as error:
        raise RequestError(
            f"the archive {shown_archive} is truncated or corrupt ({reason(error)})",
            next_step="Delete it and download it again",
        ) from None
    missing_names = sorted(set(names) - set(contents))
    if missing_names:
        what = f"the archive {shown_archive} lacks {', '.join(missing_names)}: it is truncated or another archive"
        raise RequestError(what, next_step="Delete it and download it again")
    return contents


class _Bounded(io.RawIOBase):
    """Reads at most `most_bytes` from `source`, then refuses: a small file may unpack to terabytes."""

    def __init__(self, source: IO[bytes] | gzip.GzipFile, most_bytes: int) -> None:
        self._source = source
        self._most_bytes = most_bytes
        self._remaining_bytes = most_bytes

    def readable(self) -> bool:
        """See `io.IOBase`."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Reads up to `size` bytes, below 0 all. Raises `_Refused` once the source has given more than it may."""
        one_too_many = self._remaining_bytes + 1
        content = self._source.read(one_too_many if size < 0 else min(size, one_too_many))
        self._remaining_bytes -= len(content)
        if self._remaining_bytes < 0:
            raise _Refused(f"it holds more than {self._most_bytes:,} bytes")
        return content


def _read_tar(stream: _Bounded, names: set[str]) -> dict[str, bytes]:
    """Reads a tar file to its end; returns the contents of those of the files in `names` that it has."""
    contents: dict[str, bytes] = {}
    with tarfile.open(fileobj=stream, mode="r|") as tar:
        for member_number, member in enumerate(tar):
            if member_number == _MOST_MEMBERS:
                raise _Refused(f"it has more than {_MOST_MEMBERS} members")
            name = _safe_name(member)
            if name not in names:
                continue
            content = tar.extractfile(member)
            if content is None or name in contents:
                raise _Refused(f"{name} is there twice, or is not a file")
            contents[name] = content.read()
            if len(contents[name]) != member.size:
                raise EOFError("the end is missing")
    while stream.read(_CHUNK_BYTES):  # to the end, where the checksum lies
        pass
    return contents


def _safe_name(member: tarfile.TarInfo) -> str:
    """Returns the path of a member within the archive. Raises `_Refused` unless it is a file or folder inside it."""
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or "\\" in member.name:
        raise _Refused(f"its member {shown(member.name)} would be written outside its folder")
    if not (member.isreg() or member.isdir()):
        raise _Refused(f"its member {shown(member.name)} is a link or a device")
    return str(path)
