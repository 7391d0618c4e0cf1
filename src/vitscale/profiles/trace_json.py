"""Streams the events of a trace in Chrome's format, plain or gzipped: memory follows a block, not the file."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from vitscale.errors import StoreError, shown

_BLOCK_BYTES = 1 << 20
"""Most bytes that are read, or unpacked, at a time."""
_GZIP_WINDOW_BITS = 16 + zlib.MAX_WBITS
"""The number by which zlib is asked for the gzip format."""
_LONGEST_EVENT_BYTES = 64 << 20
"""Largest number of bytes of one event, or of what stands before or after all of them."""
_MOST_BYTES = 64 << 30
"""Largest size of an unpacked file."""
_LARGEST_MENDED_BYTES = 8 << 20
"""Largest size of a buffer that is mended: a larger one was not helped by it when it was smaller."""
_MOST_ENDS_TRIED = 64
"""Cuts of a block in two that are tried before more of the file is read."""
_TAIL_BYTES = 1 << 16
"""Bytes at the end of the buffer in which that many cuts are mostly found."""
_BETWEEN_EVENTS = re.compile(rb"\}\s*,\s*\{")
_LIST = re.compile(rb'"traceEvents"\s*:\s*\[')
_BARE_WORD_FOR_NUMBER = re.compile(r"(?<=:)(\s*)-?(?:inf|nan|N/A)(?=\s*[,}])")
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
    """Return the first block of a file, unpacked; empty if it cannot be read."""
    try:
        return next(_unpacked_blocks(path), b"")
    except StoreError:
        return b""


def is_trace(path: Path) -> bool:
    """Whether a file begins like a trace; False if it cannot be read."""
    begin = beginning(path)
    is_list_of_events = begin.lstrip()[:1] == b"[" and b'"ph"' in begin
    return is_list_of_events or b'"traceEvents"' in begin or b'"schemaVersion"' in begin


class TraceText:
    """The text of a trace file: an object with facts and a list of events, or a list of events alone.

    Example: {"schemaVersion": 1, "traceEvents": [{"ph": "X", "name": "aten::mm", "ts": 12.5, "dur": 3.0, ...}, ...]}
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.about: dict[str, Any] = {}
        """The object's other fields, which stand before and after the events; complete once all events are read."""
        self._events = 0
        """Number of events read so far."""

    def lists(self) -> Iterator[list[Any]]:
        """Yields the events in order, some at a time.

        They have the fields `ph`, `cat`, `name`, `pid`, `tid`, `ts`, `dur` and `args`, of any type.

        Raises:
            StoreError: the file cannot be read, is cut off, is no trace, or is larger than what is read.
        """
        blocks = _unpacked_blocks(self._path)
        buffer = self._read_header(blocks)
        # A buffer in which no event could be decoded is tried again at twice its length, and not after each block.
        fewest_bytes_to_try = 0
        for block in blocks:
            buffer += block
            if len(buffer) < min(fewest_bytes_to_try, _LONGEST_EVENT_BYTES):
                continue
            part = _leading_events(buffer)
            if part is None:
                fewest_bytes_to_try = 2 * len(buffer)
            else:
                self._events += len(part.events)
                yield part.events
                buffer = part.remainder
                fewest_bytes_to_try = 0
            if len(buffer) > _LONGEST_EVENT_BYTES:
                raise self._no_trace_error(f"more than {_LONGEST_EVENT_BYTES >> 20} MiB of it are no events")
        yield self._last_events(buffer)

    def _read_header(self, blocks: Iterator[bytes]) -> bytes:
        """Reads up to the "[" of the list of events, and adds the facts before it to `about`.

        Args:
            blocks: the blocks of the file; those that the header needs are taken.

        Returns:
            What has been read behind the "[".
        """
        buffer = next(blocks, b"").lstrip(b"\xef\xbb\xbf \t\r\n")
        is_bare_list = buffer[:1] == b"["
        if is_bare_list:
            return buffer[1:]
        if buffer[:1] != b"{":
            raise self._no_trace_error("it is no JSON object")
        match = _LIST.search(buffer)
        while match is None:
            block = next(blocks, b"") if len(buffer) <= _LONGEST_EVENT_BYTES else b""
            if not block:
                raise self._no_trace_error("it has no list of traceEvents")
            buffer += block
            match = _LIST.search(buffer)
        # {"schemaVersion": 1, "traceEvents": [ -> {"schemaVersion": 1}
        self._add_facts(buffer[: match.start()].rstrip(b", \t\r\n") + b"}")
        return buffer[match.end() :]

    def _last_events(self, buffer: bytes) -> list[Any]:
        """Return the last events, and add the facts that stand after them to `about`.

        Args:
            buffer: the end of the file, from an event on: `{...}, {...}], "traceName": "a.json"}`.
        """
        try:
            text = _as_valid_json(b"[" + buffer)
            last_events, end = json.JSONDecoder(strict=False).raw_decode(text)
            footer = text[end:].strip(" \t\r\n")
            if footer.startswith(","):
                self._add_facts(("{" + footer[1:]).encode())
        except (ValueError, RecursionError) as error:
            if isinstance(error, StoreError):
                raise
            message = f"{shown(self._path.name)} is cut off or broken after {self._events:,} events"
            raise StoreError(message, next_step="Copy it again from where it was written") from None
        return [_as_event(value) for value in last_events]

    def _add_facts(self, text: bytes) -> None:
        """Adds the fields of a JSON object to `about`."""
        try:
            facts = json.loads(_as_valid_json(text), strict=False)
        except (ValueError, RecursionError):
            raise self._no_trace_error("what stands around its events is no JSON") from None
        if isinstance(facts, dict):
            self.about |= facts

    def _no_trace_error(self, reason: str) -> StoreError:
        message = f"{shown(self._path.name)} is no trace of the PyTorch profiler: {reason}"
        return StoreError(message, next_step="Give a file that profile.export_chrome_trace wrote")


class _Part(NamedTuple):
    """A buffer, divided after its last event that is complete."""

    events: list[Any]
    remainder: bytes


def _leading_events(buffer: bytes) -> _Part | None:
    """Return the events with which a buffer begins, as many as can be decoded; None where more must be read first.

    The last places are tried first at which an event may end. Most of them do end one: a place is wrong only where
    "}, {" stands inside an event.
    """
    ends = _possible_ends(buffer)
    for end in reversed(ends):
        may_mend = end == ends[-1] and len(buffer) < _LARGEST_MENDED_BYTES
        events = _decode_events(b"[" + buffer[:end] + b"]", may_mend)
        if events is not None:
            return _Part(events, remainder=buffer[end:].lstrip(b", \t\r\n"))
    return None


def _possible_ends(buffer: bytes) -> list[int]:
    """Return the last places, at most `_MOST_ENDS_TRIED`, at which an event may end before another one begins.

    Example: in b'{"a": 1}, {"b": 2}, {"c"' they are 8 and 18, behind the "}".
    """
    tail_start = max(0, len(buffer) - _TAIL_BYTES)
    ends = [match.start() + 1 for match in _BETWEEN_EVENTS.finditer(buffer, tail_start)]
    if len(ends) < _MOST_ENDS_TRIED:
        ends = [match.start() + 1 for match in _BETWEEN_EVENTS.finditer(buffer)]
    return ends[-_MOST_ENDS_TRIED:]


def _unpacked_blocks(path: Path) -> Iterator[bytes]:
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
            for block in _gunzipped_blocks(file, path) if is_gzipped else _plain_blocks(file):
                total_bytes += len(block)
                if total_bytes > _MOST_BYTES:
                    message = f"{shown(path.name)} has more than {_MOST_BYTES >> 30} GiB unpacked"
                    raise StoreError(message, next_step="Profile fewer steps")
                yield block
    except (OSError, ValueError) as error:  # ValueError: a NUL in its name
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        raise StoreError(f"{shown(str(path))} cannot be read: {reason}") from None


def _plain_blocks(file: BinaryIO) -> Iterator[bytes]:
    """Yields the bytes of a file, a block at a time."""
    while block := file.read(_BLOCK_BYTES):
        yield block


def _gunzipped_blocks(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Yields the unpacked bytes of a gzipped file, a block of at most `_BLOCK_BYTES` bytes at a time.

    A file that is cut off is no error here: what it has is unpacked, and whoever reads the JSON misses its end.

    Raises:
        StoreError: the packed bytes are broken.
    """
    unpacker = zlib.decompressobj(_GZIP_WINDOW_BITS)
    packed_bytes = _BLOCK_BYTES // 16
    packed = file.read(packed_bytes)
    try:
        while packed:
            block = unpacker.decompress(packed, max_length=_BLOCK_BYTES)
            if block:
                yield block
            if unpacker.eof:  # a file may be several gzip streams, one after the other, with zeros between
                packed = unpacker.unused_data.lstrip(b"\0")
                unpacker = zlib.decompressobj(_GZIP_WINDOW_BITS)
            else:
                packed = unpacker.unconsumed_tail  # empty unless the block is full
            if not packed:
                packed = file.read(packed_bytes)
    except zlib.error as error:
        raise StoreError(f"{shown(path.name)} cannot be unpacked: {error}") from None


def _decode_events(text: bytes, mend: bool) -> list[Any] | None:
    """Return the events of a JSON list; None where it cannot be decoded.

    Args:
        text: the list.
        mend: whether invalid JSON is mended, which takes longer (`_as_valid_json`).
    """
    try:
        return _TYPED.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        is_valid_json = isinstance(error, msgspec.ValidationError)  # but some event has another form
        if not mend and not is_valid_json:
            return None
    try:
        return [_as_event(value) for value in json.loads(_as_valid_json(text), strict=False)]
    except (ValueError, RecursionError):
        return None


def _as_valid_json(text: bytes) -> str:
    """Return the text as valid JSON where one of these slips broke it, which some releases wrote.

    They are bare `inf`, `nan` and `N/A` (rates of what took no time), the backslashes of Windows' paths, and names in
    no UTF-8 (pytorch/kineto issues 80, 105, 131 and 617).
    """
    plain = text.decode("utf-8", errors="replace")
    if "\\" in plain:
        plain = _ESCAPE.sub(_valid_escape, plain)
    return _BARE_WORD_FOR_NUMBER.sub(r"\1null", plain)


def _valid_escape(match: re.Match[str]) -> str:
    """Return an escape of JSON as it is, and a backslash that escapes nothing as an escaped one."""
    is_valid = bool(match[1])
    return match[0] if is_valid else r"\\"


def _as_event(value: object) -> Any:
    """Return any JSON value as an event; one that is no object has no phase (`ph`), so that readers pass over it."""
    raw = msgspec.convert(value, _Raw) if isinstance(value, dict) else _Raw()
    raw.args = msgspec.convert(raw.args, _Arguments) if isinstance(raw.args, dict) else None
    return raw


def nanoseconds(microseconds: object) -> int | None:
    """Return a time of an event, which may be a number or text, in nanoseconds; None where it is no time."""
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
    """Return a whole number, given as a number or as text; None where it is none, or has more than 64 bits."""
    if isinstance(value, str) and len(value) < 20 and value.isascii() and value.isdigit():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if abs(value) < 1 << 63 else None


def text_of(arguments: Any, name: str) -> str:
    """Return one argument of an event, cut short and without quotes; empty where it is no text."""
    value = getattr(arguments, name, "") if arguments is not None else ""
    return value.strip('"')[:100] if isinstance(value, str) else ""
