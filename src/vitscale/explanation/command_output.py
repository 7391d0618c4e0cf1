"""The command's output: passed on as it comes, and kept in a log of limited size.

Where output goes to a terminal, the command gets a pseudo-terminal, so that it prints as it always does (colours,
progress bars, a line at a time); else a pipe. Standard output and standard error share one where both go to the same
file, which keeps their order.

The log has the first and the last megabytes. Values of secret variables are masked in it; the terminal gets every byte.
"""

from __future__ import annotations

import fcntl
import os
import select
import selectors
import struct
import termios
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from vitscale.base.secret_names import is_plain_value, is_secret_name

HEAD_BYTES = 8 << 20
"""Bytes from the beginning of the output that the log keeps."""
TAIL_BYTES = 1 << 20
"""Bytes from its end that the log keeps, where it is longer."""
_CHUNK_BYTES = 1 << 16
_LOOK_SECONDS = 0.2
"""Time between two looks at the terminal's size and at whether the output is to be closed."""
_FEWEST_SECRET_BYTES = 8
"""Shorter values of secret variables are not masked: they stand in other words by chance."""
_MASK = b"(not shown)"
_WINDOW_SIZE = struct.Struct("HHHH")
"""Rows, columns, and two sizes in pixels: the terminal's size as the kernel has it."""


class OutputTargets(NamedTuple):
    """File descriptors that the command's output is passed on to; None: to the log alone."""

    stdout: int | None = None
    stderr: int | None = None

    @property
    def are_same_file(self) -> bool:
        """Whether both lead to the same file, or nowhere."""
        if self.stdout is None or self.stderr is None:
            return self.stdout is self.stderr
        return os.path.samestat(os.fstat(self.stdout), os.fstat(self.stderr))


def secret_values(environment: Mapping[str, str]) -> list[bytes]:
    """Return the values of variables with a secret's name that can be masked, the longest first."""
    values = []
    for name, value in environment.items():
        encoded = os.fsencode(value)
        if is_secret_name(name) and len(encoded) >= _FEWEST_SECRET_BYTES and not is_plain_value(value):
            values.append(encoded)
    return sorted(values, key=len, reverse=True)


class SecretMask:
    """Masks secrets in a stream of bytes, also where one comes in two pieces."""

    def __init__(self, secrets: Iterable[bytes]) -> None:
        self._secrets = list(secrets)
        self._carry_bytes = max(map(len, self._secrets), default=1) - 1
        """Bytes that are held back, for a secret may begin in them."""
        self._carry = b""

    def feed(self, data: bytes) -> bytes:
        """Return what can be passed on by now, masked."""
        text = self._masked(self._carry + data)
        split = max(0, len(text) - self._carry_bytes)
        self._carry = text[split:]
        return text[:split]

    def finish(self) -> bytes:
        """Return the bytes that were held back."""
        remaining = self._carry
        self._carry = b""
        return remaining

    def _masked(self, text: bytes) -> bytes:
        for secret in self._secrets:
            text = text.replace(secret, _MASK)
        return text


class OutputLog:
    """A file with the beginning and the end of a stream, and a line between them on what is left out."""

    def __init__(self, path: Path, secrets: Iterable[bytes] = ()) -> None:
        """Make the file.

        Raises:
            OSError: it cannot be made.
        """
        self._file: BinaryIO | None = path.open("xb")
        self._mask = SecretMask(secrets)
        self._head_room = HEAD_BYTES
        self._tail = bytearray()
        """The last bytes of the stream, at most twice `TAIL_BYTES`."""
        self._bytes_beyond_head = 0
        self.total_bytes = 0
        """Bytes that came."""

    def write(self, data: bytes) -> None:
        """Add the next bytes of the stream. A disk that is full stops the file, and nothing else."""
        self.total_bytes += len(data)
        self._add(self._mask.feed(data))

    def close(self) -> None:
        """Write the end of the stream, and close the file."""
        self._add(self._mask.finish())
        kept_bytes = min(self._bytes_beyond_head, TAIL_BYTES)
        missing_bytes = self._bytes_beyond_head - kept_bytes
        if missing_bytes:
            self._write_to_file(f"\n... {missing_bytes:,} bytes are left out here ...\n".encode())
        if kept_bytes:
            self._write_to_file(bytes(self._tail[-kept_bytes:]))
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None

    def last_lines(self, count: int) -> list[str]:
        """Return the last lines of the stream so far that have a character; masked as in the file."""
        text = bytes(self._tail[-TAIL_BYTES:]).decode(errors="replace")
        lines = [line.rstrip() for line in text.replace("\r", "\n").split("\n")]
        return [line for line in lines if line][-count:]

    def _add(self, data: bytes) -> None:
        head = data[: self._head_room]
        self._head_room -= len(head)
        self._bytes_beyond_head += len(data) - len(head)
        self._write_to_file(head)
        self._tail += data
        if len(self._tail) > 2 * TAIL_BYTES:
            del self._tail[:-TAIL_BYTES]

    def _write_to_file(self, data: bytes) -> None:
        """Write bytes; after the first failure the file is closed, and the command goes on."""
        if self._file is None:
            return
        try:
            self._file.write(data)
            self._file.flush()
        except OSError:
            with suppress(OSError):
                self._file.close()
            self._file = None


class _Channel:
    """The way of one of the command's streams, or of both, to a target."""

    def __init__(self, target: int | None) -> None:
        """Open a pseudo-terminal where the target is a terminal, else a pipe.

        Raises:
            OSError: the system has none left.
        """
        self.target = target
        self._terminal = target if target is not None and os.isatty(target) else None
        self._last_size = b""
        self.reader, self.writer = os.pipe() if self._terminal is None else os.openpty()
        if self._terminal is not None:
            _copy_terminal_settings(self._terminal, self.writer)
            self.copy_terminal_size()

    def copy_terminal_size(self) -> None:
        """Give the pseudo-terminal the size that the terminal has now."""
        if self._terminal is None:
            return
        with suppress(OSError):
            size = fcntl.ioctl(self._terminal, termios.TIOCGWINSZ, bytes(_WINDOW_SIZE.size))
            if size != self._last_size:
                fcntl.ioctl(self.reader, termios.TIOCSWINSZ, size)
                self._last_size = size

    def read(self) -> bytes:
        """Return the next bytes; none where all writers have closed their end."""
        try:
            return os.read(self.reader, _CHUNK_BYTES)
        except OSError:  # EIO, by which a pseudo-terminal says the same
            return b""

    def pass_on(self, data: bytes) -> None:
        """Write bytes to the target; one that nobody reads any more gets no others."""
        remaining = memoryview(data)
        while remaining and self.target is not None:
            try:
                written = os.write(self.target, remaining)
                remaining = remaining[written:]
            except BlockingIOError:
                select.select([], [self.target], [], _LOOK_SECONDS)
            except OSError:
                self.target = None


def _copy_terminal_settings(terminal: int, pseudo_terminal: int) -> None:
    """Give a pseudo-terminal the settings of a terminal, without its output processing, which bytes get only once."""
    with suppress(termios.error):
        settings = termios.tcgetattr(terminal)
        settings[1] &= ~termios.OPOST
        termios.tcsetattr(pseudo_terminal, termios.TCSANOW, settings)


class CommandOutput:
    """Passes the command's output on and logs it, in a thread of its own, so that the command never waits for others.

    Use: give `stdout` and `stderr` to the command, call `start` once it runs, and `close` once it has ended.
    """

    def __init__(self, targets: OutputTargets, log: OutputLog) -> None:
        """Open the ways to the targets.

        Raises:
            OSError: the system has no pipe left.
        """
        self._log = log
        stdout = _Channel(targets.stdout)
        self._channels = [stdout] if targets.are_same_file else [stdout, _Channel(targets.stderr)]
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._pump, name="command output", daemon=True)

    @property
    def stdout(self) -> int:
        """The descriptor for the command's standard output."""
        return self._channels[0].writer

    @property
    def stderr(self) -> int:
        """The descriptor for the command's standard error."""
        return self._channels[-1].writer

    def start(self) -> None:
        """Begin to pass output on. The ends that only the command writes to are closed here."""
        self.close_writers()
        self._thread.start()

    def close_writers(self) -> None:
        """Close the command's ends in this process."""
        for channel in self._channels:
            os.close(channel.writer)

    def close(self, seconds: float) -> None:
        """Pass on what is left, for at most `seconds`, where a process may hold its end open; then close the log."""
        if self._thread.is_alive():
            self._thread.join(seconds)
        self._is_closing.set()
        self._thread.join(2 * _LOOK_SECONDS + seconds)
        self._log.close()

    def _pump(self) -> None:
        """Pass output on until every writer has closed its end, or `close` waits no longer."""
        with selectors.DefaultSelector() as selector:
            for channel in self._channels:
                selector.register(channel.reader, selectors.EVENT_READ, channel)
            while selector.get_map() and not self._is_closing.is_set():
                for key, _ in selector.select(_LOOK_SECONDS):
                    data = key.data.read()
                    if data:
                        self._log.write(data)
                        key.data.pass_on(data)
                    else:
                        selector.unregister(key.fileobj)
                for channel in self._channels:
                    channel.copy_terminal_size()
        for channel in self._channels:
            os.close(channel.reader)
