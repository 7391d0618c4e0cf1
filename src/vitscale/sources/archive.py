"""Reads a few named files out of a tar.gz, in memory. Nothing is ever unpacked on disk."""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import IO

from vitscale.errors import RequestError, explain, shown
from vitscale.sources.paths import reason

_MOST_MEMBERS = 1000
_CHUNK_BYTES = 1 << 20


class _Refused(Exception):
    """An archive that is not what it should be, whole or not."""


def read_members(archive: Path, wanted: Collection[str], most_bytes: int) -> dict[str, bytes]:
    """Contents of the files `wanted` (such as "folder/name"), all of which must be there.

    Every member is judged, wanted or not: a name that leads outside the folder, a link or a device refuses the whole
    archive, and so does content of more than `most_bytes` in all once decompressed. The whole file is read, so
    that its checksum is verified. Raises `RequestError`.
    """
    name = shown(archive.name)
    try:
        with archive.open("rb") as compressed:
            found = _read(_Bounded(gzip.GzipFile(fileobj=compressed), most_bytes), set(wanted))
    except _Refused as refusal:
        raise RequestError(
            explain(f"the archive {name} was refused: {refusal}", next_step="Get the official archive again")
        ) from None
    except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError, RecursionError, OverflowError) as error:
        raise RequestError(
            explain(
                f"the archive {name} is truncated or corrupt ({reason(error)})",
                next_step="Delete it and download it again",
            )
        ) from None
    if missing := sorted(set(wanted) - set(found)):
        raise RequestError(
            explain(
                f"the archive {name} lacks {', '.join(missing)}: it is truncated or another archive",
                next_step="Delete it and download it again",
            )
        )
    return found


class _Bounded(io.RawIOBase):
    """Reads `source` until `most_bytes` have come out of it, then refuses: a small file may hold terabytes."""

    def __init__(self, source: IO[bytes] | gzip.GzipFile, most_bytes: int) -> None:
        self._source, self._left, self._most = source, most_bytes, most_bytes

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        content = self._source.read(self._left + 1 if size < 0 else min(size, self._left + 1))
        self._left -= len(content)
        if self._left < 0:
            raise _Refused(f"it holds more than {self._most:,} bytes")
        return content


def _read(stream: _Bounded, wanted: set[str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    with tarfile.open(fileobj=stream, mode="r|") as tar:
        for count, member in enumerate(tar):
            if count == _MOST_MEMBERS:
                raise _Refused(f"it has more than {_MOST_MEMBERS} members")
            name = _safe_name(member)
            if name not in wanted:
                continue
            content = tar.extractfile(member)
            if content is None or name in found:
                raise _Refused(f"{name} is there twice, or is not a file")
            found[name] = content.read()
            if len(found[name]) != member.size:
                raise EOFError("the end is missing")
    while stream.read(_CHUNK_BYTES):  # to the end, where the checksum is
        pass
    return found


def _safe_name(member: tarfile.TarInfo) -> str:
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or "\\" in member.name:
        raise _Refused(f"its member {shown(member.name)} would be written outside its folder")
    if not (member.isreg() or member.isdir()):
        raise _Refused(f"its member {shown(member.name)} is a link or a device")
    return str(path)
