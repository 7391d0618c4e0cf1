"""Starts commands on another pod of a set, where hosts of a cluster would use ssh.

Each pod but the first runs a `PodShellServer`. `python -m vitscale.processes.pod_shell KEY_FILE HOST -- ARGV...` runs
a command there, in the caller's working folder, prints what the command prints, and ends with its exit code.

The server begins a connection with a line of a random challenge. The caller answers with a line of JSON: a request,
and its proof, an HMAC of challenge and request under the key that all pods of a set read from a file on their common
volume. So only those who may read that file can start something, and a request that was overheard cannot be sent
again. Then the server sends frames: output, and at last an exit code. Without a proof it closes the connection.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from vitscale.base.interpreter import python_module

PORT = 29_477
"""Port on which pods serve; other than torchrun's and Kubeflow's (29400, 29500) and those of ranks (from 20000 on)."""
UNREACHED_CODE = 255
"""Exit code where the other pod does not answer or falls silent; ssh's code for the same."""
TORCHRUN_PREFIX = "PET_"
"""Prefix of the variables that torchrun takes as options. Kubeflow sets them for one start on all pods of a TrainJob,
and a trial that uses fewer pods would wait for the others."""

_PROOF_SECONDS = 10.0
"""Longest time in which a caller must prove itself."""
_PATIENCE_SECONDS = 60.0
"""How long a caller tries to reach a pod, which may just be restarting."""
_PAUSE_SECONDS = 1.0
"""Time from one try to the next."""
_LONGEST_LINE_BYTES = 1 << 20
_MOST_CALLERS = 64
"""Connections that are served at the same time; others wait."""
_CANNOT_START_CODE = 127
"""Exit code of a command that cannot be started; a shell's for a missing program."""
_FRAME_HEADER = struct.Struct("!cI")
"""Kind of a frame, and the bytes that follow."""
_OUTPUT = b"o"
_EXIT = b"x"
_MOST_FRAME_BYTES = 1 << 16


class PodShellError(Exception):
    """The other pod does not answer, refuses, or falls silent in the middle."""


@dataclass(frozen=True)
class PodRequest:
    """What a caller asks of a pod: to run a command, or else to finish, or else only to answer."""

    argv: tuple[str, ...] = ()
    """The command; empty: none is run."""
    cwd: str = "/"
    """Folder in which it runs."""
    finish_code: int | None = None
    """Exit code with which the pod's server is to end; None: it goes on."""

    def to_json(self) -> str:
        """Return the request as one line of JSON."""
        return json.dumps({"argv": self.argv, "cwd": self.cwd, "finish_code": self.finish_code})

    @classmethod
    def from_json(cls, text: str) -> PodRequest:
        """Read a request.

        Raises:
            ValueError: the text is no request.
        """
        fields = json.loads(text)
        if not isinstance(fields, dict) or fields.keys() != {"argv", "cwd", "finish_code"}:
            raise ValueError("no request")
        argv = fields["argv"]
        finish_code = fields["finish_code"]
        is_command = isinstance(argv, list) and all(isinstance(word, str) for word in argv)
        is_code = finish_code is None or (isinstance(finish_code, int) and 0 <= finish_code <= UNREACHED_CODE)
        if not is_command or not is_code or not isinstance(fields["cwd"], str):
            raise ValueError("no request")
        return cls(tuple(argv), fields["cwd"], finish_code)


class _Frame(NamedTuple):
    """A part of a server's answer."""

    kind: bytes
    payload: bytes


def make_key(key_file: Path) -> None:
    """Make the file with the key of a set of pods, for its owner alone; one that is there stays.

    Raises:
        OSError: it cannot be written.
    """
    if key_file.exists():
        return
    temporary = key_file.with_name(f"{key_file.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32))
    temporary.rename(key_file)  # whole, or not at all: others read it at any time


def call(
    key_file: Path,
    host: str,
    request: PodRequest,
    output: IO[bytes] | None = None,
    *,
    patience_seconds: float = _PATIENCE_SECONDS,
    port: int = PORT,
) -> int:
    """Send a request to the server of a pod, and wait for its end.

    Args:
        key_file: file with the key of the set.
        host: name of the pod.
        request: what is asked.
        output: gets what the command prints, as it comes; None: that is lost.
        patience_seconds: how long the pod is tried to be reached.
        port: the server's.

    Returns:
        The exit code of the command; 0 where there was none.

    Raises:
        PodShellError: the pod is not reached, refuses, or falls silent.
    """
    with _connected(host, port, patience_seconds) as connection:
        try:
            connection.settimeout(_PROOF_SECONDS)
            challenge = _read_line(connection)
            text = request.to_json()
            message = {"request": text, "proof": _proof(key_file, challenge, text)}
            connection.sendall(json.dumps(message).encode() + b"\n")
            connection.settimeout(None)
            return _relay(connection, output)
        except (OSError, ValueError) as error:
            raise PodShellError(f"pod {host}: {error}") from None


def _connected(host: str, port: int, patience_seconds: float) -> socket.socket:
    """Return a connection to a pod's server, trying for so many seconds.

    Raises:
        PodShellError: it is not reached in time.
    """
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=_PROOF_SECONDS)
        except OSError as error:
            if time.monotonic() >= deadline:
                raise PodShellError(f"pod {host} is not reached on port {port}: {error}") from None
            time.sleep(_PAUSE_SECONDS)
        else:
            _watch_silence(connection)
            return connection


def _watch_silence(connection: socket.socket) -> None:
    """Let the kernel ask the other end for a sign after 5 s of silence, and give it up after 4 questions."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def _relay(connection: socket.socket, output: IO[bytes] | None) -> int:
    """Pass on what a command prints until its end, and return its exit code.

    Raises:
        ValueError: the server closes the connection before, or sends what is no frame.
    """
    while True:
        frame = _read_frame(connection)
        if frame.kind == _EXIT and len(frame.payload) == 1:
            return frame.payload[0]
        if frame.kind != _OUTPUT:
            raise ValueError("its answer is none of vitscale's")
        if output is not None:
            output.write(frame.payload)
            output.flush()


def _read_frame(connection: socket.socket) -> _Frame:
    """Read one frame.

    Raises:
        ValueError: the connection ends before the frame does, or the frame is too long.
    """
    kind, length = _FRAME_HEADER.unpack(_read_bytes(connection, _FRAME_HEADER.size))
    if length > _MOST_FRAME_BYTES:
        raise ValueError("its answer is none of vitscale's")
    return _Frame(kind, _read_bytes(connection, length))


def _read_bytes(connection: socket.socket, count: int) -> bytes:
    """Read exactly so many bytes.

    Raises:
        ValueError: the connection ends before.
    """
    received = b""
    while len(received) < count:
        chunk = connection.recv(count - len(received))
        if not chunk:
            raise ValueError("it closed the connection; its log says why")
        received += chunk
    return received


def _read_line(connection: socket.socket) -> str:
    """Read a line, of which nothing follows before it is answered; returns it without its end.

    Raises:
        ValueError: the connection ends before, or the line is too long or no UTF-8.
    """
    received = b""
    while not received.endswith(b"\n"):
        chunk = connection.recv(_MOST_FRAME_BYTES)
        if not chunk:
            raise ValueError("it closed the connection; its log says why")
        received += chunk
        if len(received) > _LONGEST_LINE_BYTES:
            raise ValueError("its line is too long")
    return received[:-1].decode()


def _proof(key_file: Path, challenge: str, request: str) -> str:
    """Return the proof that whoever sends a request knows the key.

    Raises:
        OSError: the key cannot be read.
        ValueError: the file holds no key.
    """
    key = key_file.read_text(encoding="ascii").strip()
    if len(key) < 32:
        raise ValueError(f"{key_file} holds no key")
    return hmac.new(key.encode(), f"{challenge}\n{request}".encode(), hashlib.sha256).hexdigest()


class PodShellServer:
    """Runs what the first pod of a set asks for, until it says that the study is over."""

    def __init__(self, key_file: Path, say: Callable[[str], None] = print, *, port: int = PORT) -> None:
        """Listen on all interfaces. `say` prints a line on a caller who was refused. `port`: 0 takes a free one.

        Raises:
            OSError: the port is in use.
        """
        self._key_file = key_file
        self._say = say
        self._finish_code: int | None = None
        self._finished = threading.Event()
        self._room = threading.BoundedSemaphore(_MOST_CALLERS)
        self._server = _listening_socket(port)
        self.port: int = self._server.getsockname()[1]

    def serve(self) -> int:
        """Serve until a caller says that the study is over; returns the exit code that it names."""
        threading.Thread(target=self._accept_callers, name="pod shell", daemon=True).start()
        self._finished.wait()
        self._server.close()
        return self._finish_code or 0

    def _accept_callers(self) -> None:
        """Give each caller a thread of its own."""
        while not self._finished.is_set():
            self._room.acquire()
            try:
                connection, address = self._server.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve_caller, args=(connection, address[0]), daemon=True).start()

    def _serve_caller(self, connection: socket.socket, address: str) -> None:
        """Answer one caller and close the connection; whoever proves nothing gets no answer."""
        try:
            with connection:
                request = self._proved_request(connection)
                _watch_silence(connection)
                exit_code = _run(request, connection) if request.argv else 0
                _send(connection, _EXIT, bytes([exit_code]))
                if request.finish_code is not None:
                    self._finish_code = request.finish_code
                    self._finished.set()
        except (OSError, ValueError, RecursionError) as error:
            self._say(f"vitscale: the call from {address} is refused or broken: {error}")
        finally:
            self._room.release()

    def _proved_request(self, connection: socket.socket) -> PodRequest:
        """Read a request, and return it where its proof is right.

        Raises:
            OSError: the key cannot be read, or the caller is silent.
            ValueError: it is not, or there is no request.
        """
        connection.settimeout(_PROOF_SECONDS)
        challenge = secrets.token_hex(32)
        connection.sendall(challenge.encode() + b"\n")
        message = json.loads(_read_line(connection))
        fields = message if isinstance(message, dict) else {}
        text = fields.get("request")
        proof = fields.get("proof")
        if not isinstance(text, str) or not isinstance(proof, str):
            raise ValueError("no request with a proof")
        expected = _proof(self._key_file, challenge, text)
        if not hmac.compare_digest(proof.encode(), expected.encode()):
            raise ValueError("wrong proof: it has another key")
        connection.settimeout(None)
        return PodRequest.from_json(text)


def _listening_socket(port: int) -> socket.socket:
    """Return a socket that listens on all interfaces, IPv6's too where this machine has them.

    Raises:
        OSError: the port is in use.
    """
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _send(connection: socket.socket, kind: bytes, payload: bytes) -> None:
    """Send one frame.

    Raises:
        OSError: the caller is gone.
    """
    connection.sendall(_FRAME_HEADER.pack(kind, len(payload)) + payload)


def _run(request: PodRequest, connection: socket.socket) -> int:
    """Run a command, send what it prints, and return its exit code as a shell does: 128 + N where signal N ended it.

    A command whose caller is gone runs on: what the driver starts is a host agent, which ends with its heartbeat.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(TORCHRUN_PREFIX)}
    try:
        process = subprocess.Popen(
            request.argv,
            cwd=request.cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except (OSError, ValueError) as error:  # ValueError: a NUL in a word
        _send(connection, _OUTPUT, f"vitscale: {request.argv[0]} cannot be started on this pod: {error}\n".encode())
        return _CANNOT_START_CODE
    if process.stdout is not None:  # it is a pipe
        with process.stdout as output:
            _send_output(output, connection)
    exit_code = process.wait()
    return exit_code if exit_code >= 0 else 128 - exit_code


def _send_output(output: IO[bytes], connection: socket.socket) -> None:
    """Send what a command prints, as it comes, until it closes its output.

    Where the caller is gone the rest is read all the same, or the command would wait for ever.
    """
    is_caller_there = True
    while chunk := os.read(output.fileno(), _MOST_FRAME_BYTES):
        if is_caller_there:
            try:
                _send(connection, _OUTPUT, chunk)
            except OSError:
                is_caller_there = False


def call_command(key_file: str, host: str, argv: Sequence[str]) -> tuple[str, ...]:
    """Return the argv that runs `argv` on another pod. Args: key_file: path of the set's key."""
    return python_module("vitscale.processes.pod_shell", key_file, host, "--", *argv)


def main(arguments: Sequence[str]) -> int:
    """Run a command on another pod, as the arguments say; returns its exit code."""
    match list(arguments):
        case [key_file, host, "--", *argv] if argv:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            request = PodRequest(tuple(argv), str(Path.cwd()))
        case _:
            sys.exit("usage: python -m vitscale.processes.pod_shell KEY_FILE HOST -- COMMAND...")
    try:
        return call(Path(key_file), host, request, sys.stdout.buffer)
    except PodShellError as error:
        print(f"vitscale: {error}", file=sys.stderr)
        return UNREACHED_CODE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
