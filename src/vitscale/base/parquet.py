"""Parquet files that may be anybody's, decoded by a child process.

A forged file can end the process that decodes it: polars 2.1 aborts where a page claims a negative number of values,
and asks for as much memory as a page claims to need. So a child decodes it, with a share of the machine's memory, and
answers in Arrow's own layout, which is read without being decoded. One child serves this process as long as that lives;
another one takes its place where a file has ended it.

A question is one line of JSON. An answer is a head of `_HEAD_BYTES`, JSON filled up with zeros, and behind it as many
bytes of an Arrow file as the head's `size` says.
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

_SERVE_CODE = "from vitscale.base import parquet; parquet.serve()"
_MEMORY_SHARE = 0.5
"""Share of this machine's memory that the child's addresses may reach; an answer may have half of that."""
_LEAST_MEMORY_BYTES = 2 << 30
"""What the child needs on any machine: libraries and threads reserve more addresses than they use."""
_ANSWER_SECONDS = 300.0
"""Time to an answer, after which the child is ended: more than the largest files take on a busy machine."""
_CHUNK_BYTES = 1 << 20


class ParquetError(Exception):
    """A file cannot be decoded, and why."""


class DecoderEndedError(ParquetError):
    """A file has ended the process that decoded it, or kept it too long."""


class ParquetContent(NamedTuple):
    """A file's content."""

    frame: pl.DataFrame
    digest: str
    """`content_digest` of all of the file's bytes; empty unless `decoded` was asked to read the whole file."""


def content_digest(data: bytes) -> str:
    """Return the digest by which a file names its content: BLAKE2b, 8 bytes, in hexadecimal."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def decoded(path: Path, columns: Sequence[str], *, whole: bool) -> ParquetContent:
    """Decodes columns of a Parquet file in another process.

    Args:
        path: the file; a link is not followed.
        columns: names of the columns to decode; a file that lacks one is an error.
        whole: whether to read all of the file, for its digest.

    Raises:
        ParquetError: it cannot be read or decoded.
        DecoderEndedError: it has ended the process that decoded it.
    """
    import polars as pl

    decoder = _decoder_of_process()
    with decoder.lock:
        answer = decoder.ask({"path": os.fspath(path.absolute()), "columns": [*columns], "whole": whole})
    if "error" in answer.head:
        raise ParquetError(str(answer.head["error"]))
    return ParquetContent(pl.read_ipc(io.BytesIO(answer.arrow_file)), str(answer.head["digest"]))


# --- this process's end ----------------------------------------------------------------------------------------------

_decoders: dict[int, _Decoder] = {}
"""Process id -> the decoder of that process: a fork of this process must not use this one's child."""
_decoders_lock = threading.Lock()


class _Answer(NamedTuple):
    """What the child sent for a question."""

    head: Mapping[str, Any]
    """`digest` or `error`, and `size`, the bytes of `arrow_file`."""
    arrow_file: bytearray
    """Empty with an error."""


class _Decoder:
    """A child process that decodes. It is started with the first question, and again after one that has ended it.

    Several threads may use it: each holds `lock` from its question to the answer.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: Mapping[str, object]) -> _Answer:
        """Sends the child a question, and waits for its answer.

        Raises:
            DecoderEndedError: the child has ended, or has taken too long.
            ParquetError: it cannot be started, or its answer is larger than this process may hold.
        """
        process = self._start_if_needed()
        deadline = time.monotonic() + _ANSWER_SECONDS
        try:
            assert process.stdin is not None  # noqa: S101 - it was started with pipes
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            head = json.loads(_read_exactly(process, _HEAD_BYTES, deadline).rstrip(b"\0"))
            size = int(head["size"])
            if size > _memory_bytes() // 2:
                raise ParquetError("its content is larger than the memory that there is for it")
            return _Answer(head, _read_exactly(process, size, deadline))
        except (OSError, EOFError):
            self.end()
            raise DecoderEndedError("it has ended the process that decoded it") from None
        except BaseException:  # Ctrl-C too: what is unread of this answer must not be taken for the next one
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

    def _start_if_needed(self) -> subprocess.Popen[bytes]:
        """Return the running child; start it where there is none."""
        if self._process is None:
            pipe = subprocess.PIPE
            command = python_code(_SERVE_CODE, str(os.getpid()))
            try:
                self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0)
            except OSError as error:
                raise ParquetError(f"no process can be started to decode it: {error.strerror}") from None
        return self._process


def _decoder_of_process() -> _Decoder:
    """Return the decoder of this process, which is made when it is first needed."""
    with _decoders_lock:
        process_id = os.getpid()
        if process_id not in _decoders:
            _decoders.clear()  # this process is a fork: the other decoders belong to its parents
            _decoders[process_id] = _Decoder()
            atexit.register(_decoders[process_id].end)
        return _decoders[process_id]


def end_decoding() -> None:
    """Ends this process's child if it has one: for a process that goes on for long and decodes no more for now."""
    decoder = _decoders.get(os.getpid())
    if decoder is not None:
        with decoder.lock:
            decoder.end()


def _read_exactly(process: subprocess.Popen[bytes], size: int, deadline: float) -> bytearray:
    """Return the next `size` bytes that a child writes.

    Args:
        process: the child.
        size: number of bytes to wait for.
        deadline: when to give up, by `time.monotonic`.

    Raises:
        EOFError: the child has ended before.
        DecoderEndedError: the bytes did not come by the deadline.
    """
    assert process.stdout is not None  # noqa: S101 - it was started with pipes
    descriptor = process.stdout.fileno()
    content = bytearray(size)
    view = memoryview(content)
    filled = 0
    while filled < size:
        remaining_seconds = max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([descriptor], [], [], remaining_seconds)
        if not ready:
            raise DecoderEndedError(f"decoding it takes more than {_ANSWER_SECONDS:g} s")
        count = os.readv(descriptor, [view[filled : filled + _CHUNK_BYTES]])
        if count == 0:
            raise EOFError
        filled += count
    return content


# --- the child -------------------------------------------------------------------------------------------------------

_HEAD_BYTES = 1024
_ERROR_LETTERS = 200
"""Longest error in a head. With 4 bytes for a letter it leaves room for the other fields."""


def serve() -> None:
    """Answers questions on standard input until that ends: the child's program."""
    _limit_memory()
    answers = os.dup(1)
    os.dup2(2, 1)  # standard output now leads to standard error: what a library prints is no answer
    for line in sys.stdin.buffer:
        answer = _decode_for(json.loads(line))
        _write_all(answers, memoryview(_head_bytes(answer)))
        _write_all(answers, answer.arrow_file)


class _ChildAnswer(NamedTuple):
    """What the child sends: fields of the head but for its `size`, and the Arrow file."""

    fields: Mapping[str, str]
    arrow_file: memoryview


def _decode_for(question: Mapping[str, Any]) -> _ChildAnswer:
    """Decodes the file that a question names; an error of any kind becomes the answer."""
    try:
        return _decode_as_arrow(Path(question["path"]), question["columns"], whole=question["whole"])
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # polars' panics are no `Exception`
        return _ChildAnswer({"error": _reason_in_words(error)}, memoryview(b""))


def _head_bytes(answer: _ChildAnswer) -> bytes:
    """Return the head of an answer, filled up with zeros to `_HEAD_BYTES`."""
    head = {**answer.fields, "size": len(answer.arrow_file)}
    return json.dumps(head, ensure_ascii=False).encode().ljust(_HEAD_BYTES, b"\0")


def _write_all(descriptor: int, content: memoryview) -> None:
    """Writes all bytes to a pipe, which takes a part of them at a time."""
    while content:
        written = os.write(descriptor, content)
        content = content[written:]


def _decode_as_arrow(path: Path, columns: Sequence[str], *, whole: bool) -> _ChildAnswer:
    """Reads columns of a Parquet file as an Arrow file; with `whole` all of its bytes, for the digest.

    Raises:
        OSError: the file cannot be read, or is a link.
        BaseException: whatever polars raises for a file that it cannot decode.
    """
    import polars as pl

    digest = ""
    with open_regular(path, largest_bytes=LARGEST_LINES_BYTES, follow_links=False) as file:
        source: Any = file
        if whole:
            data = file.read()
            digest = content_digest(data)
            source = io.BytesIO(data)
        frame = pl.read_parquet(source, columns=[*columns])
    memory = io.BytesIO()
    frame.write_ipc(memory, compression="uncompressed")
    return _ChildAnswer({"digest": digest}, memory.getbuffer())


def _reason_in_words(error: BaseException) -> str:
    """Return why a file cannot be decoded, on one line of at most `_ERROR_LETTERS` letters."""
    if isinstance(error, MemoryError):
        return "its content is larger than the memory that there is for it"
    message = (error.strerror or "") if isinstance(error, OSError) else str(error)
    if not message:
        return type(error).__name__
    return printable(message).splitlines()[0][:_ERROR_LETTERS]


def _limit_memory() -> None:
    """Limits this process to its share of the machine's memory, and lets it write no core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    limit_bytes = _memory_bytes()
    if hard_limit != resource.RLIM_INFINITY:
        limit_bytes = min(hard_limit, limit_bytes)
    with contextlib.suppress(OSError, ValueError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, hard_limit))


def _memory_bytes() -> int:
    """Return the bytes of the machine's memory that decoding may take."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(_LEAST_MEMORY_BYTES, int(installed * _MEMORY_SHARE))
