"""The driver's end of the heartbeats: which ranks are there, how far each has come, and which have fallen silent.

A connection begins with a hello: {"token": ..., "role": "rank 3" or "agent", "host": ..., "pid": ...}. Then come beats,
{"step": 4, "phase": "forward"} or {}, and before an orderly end {"bye": true}; each is a line of JSON. The driver sends
single bytes: a newline with its own beat, and "s", which asks for stacks.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import re
import resource
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from vitscale.processes.heartbeat import BEAT_SECONDS, SILENCE_SECONDS, limit_silence

_LONGEST_MESSAGE_BYTES = 4096
_MOST_OPEN_FILES = 65_536
"""Files that this process may have open, where the system allows as many."""
_HELLO_SECONDS = 30.0
"""A connection that has not said hello for this long is closed."""
_CROWDED_HELLO_SECONDS = 0.25
"""The same while others wait to be let in. A rank says hello as it connects."""
_CONNECTIONS_PER_UNKNOWN = 8
"""One in so many of all connections may be unknown: it has not said hello yet."""
_ROLE = re.compile(r"rank (\d{1,6})")
_PRINTABLE = re.compile(r"[\x20-\x7e]{0,253}")

Disconnection = Literal["ended", "silent"]
"""The way in which a connection broke.

ended: the host's kernel says that the process is gone. silent: the host answers no more.
"""


@dataclass(frozen=True)
class RankStatus:
    """The last that was heard of one rank."""

    host: str
    pid: int
    heard_seconds: float
    """`time.monotonic()` of the last beat."""
    step: int = -1
    phase: str = "start-up"
    ended_seconds: float | None = None
    """`time.monotonic()` when the rank said that it ends, or was lost."""
    disconnection: Disconnection | None = None
    """None while the connection holds, or where the rank said that it ends; else how the connection broke."""


class HeartbeatServer:
    """Receives the heartbeats of one run, and keeps each rank's last status. Everything received is untrusted.

    A connection is unknown from `_accept_caller` until its hello, and then a rank's or an agent's. It is closed when it
    breaks, or sends what no process of the run sends. One thread does all this; the driver's threads read statuses.
    """

    def __init__(self, token: str, address: str) -> None:
        """Listen on `address` (all interfaces where it is empty) from a thread of its own.

        Raises:
            OSError: the address is not this machine's.
        """
        self._token = token
        self._statuses: dict[int, RankStatus] = {}
        self._lock = threading.Lock()
        self._stacks_wanted = False
        self._closing = False
        self._most_connections = _connections_allowed()
        """Most connections that have said hello."""
        self._most_unknown = max(1, self._most_connections // _CONNECTIONS_PER_UNKNOWN)
        """Most connections that have not said hello yet."""
        self._accepting = True
        """Whether new callers are listened to."""
        self._buffers: dict[socket.socket, bytes] = {}
        """Every open connection -> the begin of a message whose end has not come yet."""
        self._ranks: dict[socket.socket, int | None] = {}
        """Connection that has said hello -> its rank; None for an agent."""
        self._unknown_since: dict[socket.socket, float] = {}
        """Connection that has not said hello -> `time.monotonic()` when it came; the earliest one comes first."""
        self._server = _listening_socket(address)
        self._server.setblocking(False)
        self.port: int = self._server.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="heartbeats", daemon=True)
        self._thread.start()

    def statuses(self) -> Mapping[int, RankStatus]:
        """Return the last status of each rank that has been heard."""
        with self._lock:
            return dict(self._statuses)

    def ask_for_stacks(self) -> None:
        """Ask every rank to write down where its threads stand."""
        self._stacks_wanted = True

    def close(self) -> None:
        """Close all connections, upon which every process that is still there ends."""
        self._closing = True
        self._thread.join()
        for connection in [*self._buffers]:
            self._close_connection(connection)
        self._selector.close()
        self._server.close()

    def _serve(self) -> None:
        """Receive what comes, and send a beat to every connection each second, until the server is closed."""
        last_beat_seconds = time.monotonic()
        while not self._closing:
            for key, _ in self._selector.select(timeout=0.1):
                if key.fileobj is self._server:
                    self._accept_caller()
                elif isinstance(key.fileobj, socket.socket):
                    self._receive_from(key.fileobj)
            now_seconds = time.monotonic()
            if self._stacks_wanted or now_seconds - last_beat_seconds > BEAT_SECONDS:
                message = b"s" if self._stacks_wanted else b"\n"
                self._stacks_wanted = False
                # Messages to a host that is gone stay unacknowledged, which is how its loss shows here.
                for connection in [*self._buffers]:
                    self._send_to(connection, message)
                last_beat_seconds = now_seconds
            self._limit_unknown_connections(now_seconds)

    def _limit_unknown_connections(self, now_seconds: float) -> None:
        """Close connections that have not said hello in time, and accept new ones only where there is room.

        Whoever can reach the port may connect and say nothing. So only few connections may be unknown at a time. Other
        callers wait in the kernel's queue: they are not refused, for a rank may be among them.
        """
        is_full = len(self._unknown_since) >= self._most_unknown
        patience_seconds = _CROWDED_HELLO_SECONDS if is_full else _HELLO_SECONDS
        for connection, came_at in [*self._unknown_since.items()]:
            if now_seconds - came_at <= patience_seconds:
                break  # the following ones came later
            self._receive_from(connection)  # its hello may have come just now
            if connection in self._unknown_since:
                self._close_connection(connection)
        has_room = len(self._unknown_since) < self._most_unknown
        if has_room and not self._accepting:
            self._selector.register(self._server, selectors.EVENT_READ)
        elif self._accepting and not has_room:
            self._selector.unregister(self._server)
        self._accepting = has_room

    def _accept_caller(self) -> None:
        """Accept a caller, who is unknown until it says hello; none where there are too many connections."""
        with contextlib.suppress(OSError):
            connection, _ = self._server.accept()
            if len(self._ranks) >= self._most_connections:
                connection.close()
                return
            connection.setblocking(False)
            limit_silence(connection, SILENCE_SECONDS)
            self._selector.register(connection, selectors.EVENT_READ)
            self._buffers[connection] = b""
            self._unknown_since[connection] = time.monotonic()

    def _send_to(self, connection: socket.socket, message: bytes) -> None:
        """Send a message, or note that the connection broke; a message that does not fit now is dropped."""
        try:
            connection.send(message)
        except BlockingIOError:
            pass
        except OSError as error:
            if not _is_silence(error):
                self._receive_from(connection)  # read what it sent before it left
            self._note_disconnection(connection, error)

    def _receive_from(self, connection: socket.socket) -> None:
        """Read what has come on a connection, and handle the messages that are whole."""
        try:
            received = connection.recv(65_536)
        except BlockingIOError:
            return
        except OSError as error:
            self._note_disconnection(connection, error)
            return
        if not received:
            self._note_disconnection(connection, None)
            return
        *messages, unfinished = (self._buffers[connection] + received).split(b"\n")
        self._buffers[connection] = unfinished
        if len(unfinished) > _LONGEST_MESSAGE_BYTES:
            self._close_connection(connection)
            return
        for message in messages:
            if not self._handle_message(connection, message):
                self._close_connection(connection)
                return

    def _handle_message(self, connection: socket.socket, line: bytes) -> bool:
        """Handle one message. Return False where the other end does not belong to this run: it is to be closed."""
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return False
        if not isinstance(message, dict):
            return False
        if connection in self._unknown_since:
            return self._handle_hello(connection, message)
        rank = self._ranks[connection]
        if rank is not None:
            with self._lock:
                self._statuses[rank] = _after_beat(self._statuses[rank], message)
        return True

    def _handle_hello(self, connection: socket.socket, message: Mapping[str, Any]) -> bool:
        """Handle the first message of a connection. Return False where it is no hello, or that of another run."""
        if not self._is_token(message.get("token")):
            return False
        hello = _parse_hello(message)
        if hello is None:
            return False
        if hello.rank is not None and hello.rank in self._statuses:
            return False  # a second process with this rank's number: its end must say nothing about the first
        del self._unknown_since[connection]
        self._ranks[connection] = hello.rank
        if hello.rank is not None:
            with self._lock:
                self._statuses[hello.rank] = RankStatus(host=hello.host, pid=hello.pid, heard_seconds=time.monotonic())
        return True

    def _is_token(self, text: object) -> bool:
        """Whether this is the run's token; how long the answer takes does not show how much of it is right."""
        if not isinstance(text, str):
            return False
        return hmac.compare_digest(text.encode(errors="backslashreplace"), self._token.encode())

    def _note_disconnection(self, connection: socket.socket, error: OSError | None) -> None:
        """Note in a rank's status that its connection broke, unless the rank had said that it ends; forget it.

        Args:
            connection: the connection.
            error: what it broke with; None: the other end closed it.
        """
        rank = self._ranks.get(connection)
        if rank is not None:
            is_silent = error is not None and _is_silence(error)
            disconnection: Disconnection = "silent" if is_silent else "ended"
            with self._lock:
                status = self._statuses[rank]
                if status.ended_seconds is None:
                    self._statuses[rank] = replace(status, disconnection=disconnection, ended_seconds=time.monotonic())
        self._close_connection(connection)

    def _close_connection(self, connection: socket.socket) -> None:
        """Close a connection, and remove it from all that is kept by connection."""
        if connection in self._buffers:
            self._selector.unregister(connection)
            del self._buffers[connection]
        self._unknown_since.pop(connection, None)
        self._ranks.pop(connection, None)
        connection.close()


class _Hello(NamedTuple):
    """The first message of a connection, without the token."""

    host: str
    pid: int
    rank: int | None
    """None for an agent."""


def _parse_hello(message: Mapping[str, Any]) -> _Hello | None:
    """Return the hello that a message is; None where it is none."""
    host = message.get("host")
    pid = message.get("pid")
    role = message.get("role")
    if not isinstance(role, str):
        return None
    if type(pid) is not int or not 0 < pid < 2**31:
        return None
    if not isinstance(host, str) or not _PRINTABLE.fullmatch(host):
        return None
    match = _ROLE.fullmatch(role)
    return _Hello(host, pid, rank=int(match[1]) if match else None)


def _connections_allowed() -> int:
    """Return how many connections there may be: half of the files that this process may have open.

    The limit of open files, often 1,024, is raised first, but not as far as possible: some launchers close every
    number up to it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:  # -1 on Linux
        return _MOST_OPEN_FILES // 2
    if soft < _MOST_OPEN_FILES:
        soft = _MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_OPEN_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft // 2


def _listening_socket(address: str) -> socket.socket:
    """Return a socket that listens on a free port of this address; of all interfaces where it is empty."""
    if not address and socket.has_dualstack_ipv6():
        # Other hosts may know this one by an IPv6 address.
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server((address, 0), backlog=1024)


def _is_silence(error: OSError) -> bool:
    """Whether the host stopped answering, rather than closed the connection."""
    return not isinstance(error, ConnectionResetError | BrokenPipeError)


def _after_beat(status: RankStatus, message: Mapping[str, Any]) -> RankStatus:
    """Return a rank's status after a message of its own; fields with values that no rank sends are ignored."""
    changes: dict[str, Any] = {"heard_seconds": time.monotonic()}
    if message.get("bye") is True:
        changes["ended_seconds"] = time.monotonic()
    step = message.get("step")
    if isinstance(step, int) and abs(step) < 2**62:
        changes["step"] = step
    phase = message.get("phase")
    if isinstance(phase, str) and len(phase) < 40 and phase.isprintable():
        changes["phase"] = phase
    return replace(status, **changes)
