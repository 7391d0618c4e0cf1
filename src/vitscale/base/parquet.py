"""Parquet files that may be anybody's, decoded by a process of its own.

Parquet that is made for it ends the process that decodes it: polars 2.1 aborts where a page says that it has fewer than
no values, and asks for as much memory as another says. So a child decodes it, with a share of the machine's memory, and
answers in Arrow's own layout, which is read without being decoded. One child serves this process as long as that lives;
another one takes its place where a file has ended it.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import io
import json
import os
import resource
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vitscale.base.files import LARGEST_LINES_BYTES, open_regular
from vitscale.base.interpreter import python_code
from vitscale.errors import printable

if TYPE_CHECKING:
    import polars as pl

_SERVES = "from vitscale.base import parquet; parquet.serve()"
_MEMORY_SHARE = 0.5
"""Share of this machine's memory that the child's addresses may reach; what it answers may have half of that."""
_LEAST_BYTES = 2 << 30
"""What the child needs on any machine: libraries and threads reserve more addresses than they use."""
_SECONDS = 300.0
"""More than the largest files of vitscale take on a busy machine."""
_CHUNK_BYTES = 1 << 20


class ParquetError(Exception):
    """A file cannot be decoded, and why."""


class DecoderEndedError(ParquetError):
    """A file has ended the process that decoded it, or kept it too long."""


class Decoded(NamedTuple):
    """A file's content."""

    frame: pl.DataFrame
    digest: str
    """`digest_of` all of the file's bytes; empty where only some columns were read."""


def digest_of(data: bytes) -> str:
    """The digest by which a file names its content: BLAKE2b, 8 bytes, in hexadecimal."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def decoded(path: Path, columns: Sequence[str], *, whole: bool) -> Decoded:
    """Decodes columns of a Parquet file in another process.

    Args:
        path: the file; a link is not followed.
        columns: names of those that are wanted.
        whole: whether to read all of the file, for its digest.

    Raises:
        ParquetError: it cannot be read or decoded.
        DecoderEndedError: it has ended the process that decoded it.
    """
    import polars as pl

    decoder = _decoder()
    with decoder.lock:
        answer, content = decoder.ask({"path": os.fspath(path.absolute()), "columns": [*columns], "whole": whole})
    if "error" in answer:
        raise ParquetError(str(answer["error"]))
    return Decoded(pl.read_ipc(io.BytesIO(content)), str(answer["digest"]))


# --- this process's end ----------------------------------------------------------------------------------------------

_decoders: dict[int, _Decoder] = {}
"""Id of a process to its decoder: a fork of this process must not use this one's."""
_starting = threading.Lock()


class _Decoder:
    """A child that decodes, started when it is first asked."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held from a question to its answer."""
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: Mapping[str, object]) -> tuple[Mapping[str, Any], bytearray]:
        """Asks the child; returns its answer and the bytes that came with it.

        Raises:
            DecoderEndedError: it has ended, or has taken too long.
            ParquetError: it cannot be started, or its answer has no room here.
        """
        process = self._started()
        deadline = time.monotonic() + _SECONDS
        try:
            assert process.stdin is not None  # noqa: S101 - it was started with pipes
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            head = _received(process, _HEAD_BYTES, deadline)
            answer = json.loads(head.rstrip(b"\0"))
            size = int(answer["size"])
            if size > _memory_bytes() // 2:
                raise ParquetError("its content is larger than the memory that there is for it")
            return answer, _received(process, size, deadline)
        except (OSError, EOFError):
            self.end()
            raise DecoderEndedError("it has ended the process that decoded it") from None
        except BaseException:  # Ctrl-C too: the rest of an answer must not be taken for the next one
            self.end()
            raise

    def end(self) -> None:
        """Ends the child; the next question starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()
            self._process = None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            pipe = subprocess.PIPE
            command = python_code(_SERVES, str(os.getpid()))
            try:
                self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0)
            except OSError as error:
                raise ParquetError(f"no process can be started to decode it: {error.strerror}") from None
        return self._process


def _decoder() -> _Decoder:
    with _starting:
        own = os.getpid()
        if own not in _decoders:
            _decoders.clear()  # those of processes that this one is a fork of
            _decoders[own] = _Decoder()
            atexit.register(_decoders[own].end)
        return _decoders[own]


def end_decoding() -> None:
    """Ends the child, where a process goes on for long and decodes no more for now."""
    if (decoder := _decoders.get(os.getpid())) is not None:
        with decoder.lock:
            decoder.end()


def _received(process: subprocess.Popen[bytes], size: int, deadline: float) -> bytearray:
    """The next `size` bytes that a child writes.

    Raises:
        EOFError: it has ended before.
        DecoderEndedError: they did not come in time.
    """
    assert process.stdout is not None  # noqa: S101 - it was started with pipes
    descriptor = process.stdout.fileno()
    content = bytearray(size)
    view, filled = memoryview(content), 0
    while filled < size:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise DecoderEndedError(f"decoding it takes more than {_SECONDS:g} s")
        count = os.readv(descriptor, [view[filled : filled + _CHUNK_BYTES]])
        if count == 0:
            raise EOFError
        filled += count
    return content


# --- the child -------------------------------------------------------------------------------------------------------

_HEAD_BYTES = 1024
_ERROR_LETTERS = 200
"""Letters of an error, of up to 4 bytes each, that a head has room for."""


def serve() -> None:
    """What the child does: for each question on standard input, a head of JSON and the bytes that belong to it."""
    _limit_memory()
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints is no answer
    for line in sys.stdin.buffer:
        question = json.loads(line)
        content = memoryview(b"")
        try:
            digest, content = _as_arrow(Path(question["path"]), question["columns"], whole=question["whole"])
            head: dict[str, object] = {"digest": digest}
        except BaseException as error:  # polars' panics are no `Exception`
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            head = {"error": _reason(error)}
        whole_head = json.dumps(head | {"size": len(content)}, ensure_ascii=False).encode().ljust(_HEAD_BYTES, b"\0")
        for part in (memoryview(whole_head), content):
            while part:
                part = part[os.write(answers, part) :]


def _as_arrow(path: Path, columns: Sequence[str], *, whole: bool) -> tuple[str, memoryview]:
    """(digest of the file, its columns as an Arrow file)."""
    import polars as pl

    digest = ""
    with open_regular(path, largest_bytes=LARGEST_LINES_BYTES, follow_links=False) as file:
        source: Any = file
        if whole:
            data = file.read()
            digest = digest_of(data)
            source = io.BytesIO(data)
        frame = pl.read_parquet(source, columns=[*columns])
    memory = io.BytesIO()
    frame.write_ipc(memory, compression="uncompressed")
    return digest, memory.getbuffer()


def _reason(error: BaseException) -> str:
    """Why a file cannot be decoded, on one line."""
    if isinstance(error, MemoryError):
        return "its content is larger than the memory that there is for it"
    said = (error.strerror or "") if isinstance(error, OSError) else str(error)
    return printable(said).splitlines()[0][:_ERROR_LETTERS] if said else type(error).__name__


def _limit_memory() -> None:
    """Holds this process to its share of the machine's memory, and writes no core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = _memory_bytes()
    with contextlib.suppress(OSError, ValueError):  # macOS knows no such limit
        resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(hard, most), hard))


def _memory_bytes() -> int:
    """Bytes of the machine's memory that decoding may take."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(_LEAST_BYTES, int(installed * _MEMORY_SHARE))
