"""Streams the events of a trace in Chrome's format, plain or gzipped: memory follows a block, not the file."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from vitscale.errors import StoreError, shown

_BLOCK = 1 << 20
_LONGEST_EVENT = 64 << 20
"""Largest number of bytes of one event, or of what stands before or after all of them."""
_MOST_BYTES = 64 << 30
"""Largest size of an unpacked file."""
_MENDED = 8 << 20
"""A buffer of fewer bytes than this may be mended; a larger one is not, since mending did not help it."""
_MOST_CUTS = 64
"""Cuts of a block in two that are tried before more of the file is read."""
_TAIL = 1 << 16
"""Bytes at the end of the buffer in which that many cuts are mostly found."""
_CUT = re.compile(rb"\}\s*,\s*\{")
_LIST = re.compile(rb'"traceEvents"\s*:\s*\[')
_NO_NUMBER = re.compile(r"(?<=:)(\s*)-?(?:inf|nan|N/A)(?=\s*[,}])")
_ESCAPE = re.compile(
    r'\\(["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})?'
)
"""A backslash with what it escapes. Half of a surrogate pair is no text and stays as written."""
_RENAMED = {
    "external": "External id", "operation": "Collective name", "group": "Process Group Name", "dtype": "dtype",
    "inputs": "In msg nelems", "outputs": "Out msg nelems", "ranks": "Group size", "dims": "Input Dims",
    "types": "Input type", "concrete": "Concrete Inputs", "own": "vitscale",
}  # fmt: skip
"""Field of `_Arguments` -> its name in the file."""


class _Arguments(msgspec.Struct, rename=_RENAMED):
    """The arguments of an event that are read, of any type."""

    correlation: Any = 0
    stream: Any = None
    device: Any = None
    external: Any = 0
    operation: Any = ""
    group: Any = ""
    dtype: Any = ""
    inputs: Any = None
    outputs: Any = None
    ranks: Any = None
    dims: Any = None
    types: Any = None
    concrete: Any = None
    own: Any = None
    """What vitscale adds to its own events."""


class _Raw(msgspec.Struct):
    """An event as the file has it, with fields of any type."""

    ph: Any = ""
    cat: Any = ""
    name: Any = ""
    pid: Any = 0
    tid: Any = 0
    ts: Any = None
    dur: Any = None
    args: Any = None


class _Typed(_Raw):
    """An event whose arguments are an object or missing, as all events of a sound file are."""

    args: _Arguments | None = None


_TYPED = msgspec.json.Decoder(list[_Typed])


def beginning(path: Path) -> bytes:
    """The first block of a file, unpacked; empty if it cannot be read."""
    try:
        return next(_blocks(path), b"")
    except StoreError:
        return b""


def is_trace(path: Path) -> bool:
    """Whether a file begins like a trace; False if it cannot be read."""
    begin = beginning(path)
    is_list_of_events = begin.lstrip()[:1] == b"[" and b'"ph"' in begin
    return is_list_of_events or b'"traceEvents"' in begin or b'"schemaVersion"' in begin


class TraceText:
    """One file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.about: dict[str, Any] = {}
        """The facts around the events, once they have been read."""
        self._events = 0

    def lists(self) -> Iterator[list[Any]]:
        """Yields some events at a time, with `ph`, `cat`, `name`, `pid`, `tid`, `ts`, `dur` and `args` of any type.

        Raises:
            StoreError: the file cannot be read, is cut off, is no trace, or is larger than what is read.
        """
        blocks = _blocks(self._path)
        buffer = self._without_header(blocks)
        retried_from = 0  # bytes; otherwise each block would try a broken beginning again
        for block in blocks:
            buffer += block
            if len(buffer) < min(retried_from, _LONGEST_EVENT):
                continue
            part = _leading_events(buffer)
            if part is None:
                retried_from = 2 * len(buffer)
            else:
                self._events += len(part.events)
                yield part.events
                buffer = part.remainder
                retried_from = 0
            if len(buffer) > _LONGEST_EVENT:
                raise self._no_trace(f"more than {_LONGEST_EVENT >> 20} MiB of it are no events")
        yield self._rest(buffer)

    def _without_header(self, blocks: Iterator[bytes]) -> bytes:
        """Reads up to the list of events, and returns what of it has been read; the facts before it go to `about`.

        Args:
            blocks: the blocks of the file, of which those that are needed are taken.
        """
        buffer = next(blocks, b"").lstrip(b"\xef\xbb\xbf \t\r\n")
        is_bare_list = buffer[:1] == b"["
        if is_bare_list:
            return buffer[1:]
        if buffer[:1] != b"{":
            raise self._no_trace("it is no JSON object")
        match = _LIST.search(buffer)
        while match is None:
            block = next(blocks, b"") if len(buffer) <= _LONGEST_EVENT else b""
            if not block:
                raise self._no_trace("it has no list of traceEvents")
            buffer += block
            match = _LIST.search(buffer)
        self._learn(buffer[: match.start()].rstrip(b", \t\r\n") + b"}")
        return buffer[match.end() :]

    def _rest(self, buffer: bytes) -> list[Any]:
        """The last events; the facts that stand after them go to `about`."""
        try:
            text = _mended(b"[" + buffer)
            last_events, end = json.JSONDecoder(strict=False).raw_decode(text)
            footer = text[end:].strip(" \t\r\n")
            if footer.startswith(","):
                self._learn(("{" + footer[1:]).encode())
        except (ValueError, RecursionError) as error:
            if isinstance(error, StoreError):
                raise
            message = f"{shown(self._path.name)} is cut off or broken after {self._events:,} events"
            raise StoreError(message, next_step="Copy it again from where it was written") from None
        return [_lenient(event) for event in last_events]

    def _learn(self, text: bytes) -> None:
        """Adds the facts of a JSON object to `about`."""
        try:
            about = json.loads(_mended(text), strict=False)
        except (ValueError, RecursionError):
            raise self._no_trace("what stands around its events is no JSON") from None
        if isinstance(about, dict):
            self.about |= about

    def _no_trace(self, reason: str) -> StoreError:
        message = f"{shown(self._path.name)} is no trace of the PyTorch profiler: {reason}"
        return StoreError(message, next_step="Give a file that profile.export_chrome_trace wrote")


class _Part(NamedTuple):
    """A buffer, divided after its last event that is complete."""

    events: list[Any]
    remainder: bytes


def _leading_events(buffer: bytes) -> _Part | None:
    """The events with which a buffer begins, as many as can be decoded; None where that cannot be seen yet."""
    cuts = [match.start() + 1 for match in _CUT.finditer(buffer, max(0, len(buffer) - _TAIL))]
    if len(cuts) < _MOST_CUTS:
        cuts = [match.start() + 1 for match in _CUT.finditer(buffer)]
    for cut in reversed(cuts[-_MOST_CUTS:]):
        may_mend = cut == cuts[-1] and len(buffer) < _MENDED
        events = _decoded(b"[" + buffer[:cut] + b"]", may_mend)
        if events is not None:
            return _Part(events, remainder=buffer[cut:].lstrip(b", \t\r\n"))
    return None


def _blocks(path: Path) -> Iterator[bytes]:
    """Yields the bytes of a file in blocks, unpacked where it is gzipped.

    Raises:
        StoreError: it cannot be read, is cut off, or is larger than what is read.
    """
    try:
        if path.exists() and not path.is_file():
            raise StoreError(f"{shown(str(path))} cannot be read: it is no file")
        with path.open("rb") as file:
            is_gzipped = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            total_bytes = 0
            for block in _unpacked(file, path) if is_gzipped else iter(lambda: file.read(_BLOCK), b""):
                total_bytes += len(block)
                if total_bytes > _MOST_BYTES:
                    message = f"{shown(path.name)} has more than {_MOST_BYTES >> 30} GiB unpacked"
                    raise StoreError(message, next_step="Profile fewer steps")
                yield block
    except (OSError, ValueError) as error:  # ValueError: a NUL in its name
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        raise StoreError(f"{shown(str(path))} cannot be read: {reason}") from None


def _unpacked(file: Any, path: Path) -> Iterator[bytes]:
    """Yields the unpacked bytes of a gzipped file, a block of at most `_BLOCK` bytes at a time."""
    unpacker = zlib.decompressobj(wbits=31)
    try:
        while packed := file.read(_BLOCK // 16):
            while packed:
                block = unpacker.decompress(packed, _BLOCK)
                if block:
                    yield block
                packed = unpacker.unconsumed_tail
                if unpacker.eof:  # a file may be several streams, one after the other
                    packed = unpacker.unused_data.lstrip(b"\0")
                    unpacker = zlib.decompressobj(wbits=31)
    except zlib.error as error:
        raise StoreError(f"{shown(path.name)} cannot be unpacked: {error}") from None


def _decoded(text: bytes, mend: bool) -> list[Any] | None:
    """The events of a list; None where it cannot be decoded. With `mend`, Kineto's slips in the JSON are mended."""
    try:
        return _TYPED.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if not (mend or isinstance(error, msgspec.ValidationError)):  # it is JSON, but of another form
            return None
    try:
        return [_lenient(event) for event in json.loads(_mended(text), strict=False)]
    except (ValueError, RecursionError):
        return None


def _mended(text: bytes) -> str:
    """Mends the invalid JSON that some releases wrote: bare `inf`, `nan` and `N/A` (rates of what took no time), the
    backslashes of Windows' paths, and names in no UTF-8 (pytorch/kineto issues 80, 105, 131 and 617)."""
    plain = text.decode("utf-8", errors="replace")
    if "\\" in plain:
        plain = _ESCAPE.sub(lambda match: match[0] if match[1] else r"\\", plain)
    return _NO_NUMBER.sub(r"\1null", plain)


def _lenient(value: object) -> Any:
    """An event from any JSON value; one that is no event has no phase, and is passed over."""
    raw = msgspec.convert(value, _Raw) if isinstance(value, dict) else _Raw()
    raw.args = msgspec.convert(raw.args, _Arguments) if isinstance(raw.args, dict) else None
    return raw


def nanoseconds(microseconds: object) -> int | None:
    """A time of an event in nanoseconds; None where it is no time."""
    if isinstance(microseconds, str):
        try:
            microseconds = float(microseconds)
        except ValueError:
            return None
    if isinstance(microseconds, bool) or not isinstance(microseconds, int | float):
        return None
    if not abs(microseconds) < 1e18:  # NaN is no time either
        return None
    return microseconds * 1000 if isinstance(microseconds, int) else round(microseconds * 1000)


def integer(value: object) -> int | None:
    """A whole number, given as a number or as text; None where it is none, or has more than 64 bits."""
    if isinstance(value, str) and len(value) < 20 and value.isascii() and value.isdigit():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if abs(value) < 1 << 63 else None


def text_of(arguments: Any, name: str) -> str:
    """One argument of an event, cut short and without quotes; empty where it is no text."""
    value = getattr(arguments, name, "") if arguments is not None else ""
    return value.strip('"')[:100] if isinstance(value, str) else ""
