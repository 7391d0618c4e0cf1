"""A process's heartbeat to its run's driver: sends how far the process is, and ends it when the driver is gone.

The connection shows whether anybody still waits for the process's work, whatever started the process (ssh, pdsh,
mpirun, srun). It breaks at once where the driver's host closes it, and within `SILENCE_SECONDS` where a link or a host
is gone. A driver that is only stopped (Ctrl-Z) keeps it open, for its kernel goes on answering.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NoReturn

from vitscale.processes.launch_file import LaunchFile

SILENCE_SECONDS = 20.0
"""A link that is silent for this long counts as cut, at both of its ends."""
BEAT_SECONDS = 1.0
"""Time from one beat to the next."""
LOST_DRIVER_EXIT_CODE = 79
_CONNECT_SECONDS = 10.0
STARTING = "start-up: "
"""Prefix of phases before the first step, as "start-up: engine"."""
COMPILING = "compiling "
"""Prefix of phases in which something is compiled, as "compiling fused_adam"."""


@dataclass
class RankProgress:
    """Progress of a rank. The training thread replaces each field whole; the heartbeat's thread reads them."""

    step: int = -1
    phase: str = "start-up"


PROGRESS = RankProgress()
"""Progress of this process, which is one rank."""


def limit_silence(connection: socket.socket, seconds: float) -> None:
    """Let the kernel end a connection whose other host does not acknowledge sent data for `seconds` (RFC 5482).

    What is sent goes out at once (TCP_NODELAY).
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _connect(address_and_port: str) -> socket.socket:
    """Return a connection to a driver, whose reads give up after `BEAT_SECONDS`.

    Args:
        address_and_port: "10.0.0.1:40123".

    Raises:
        OSError: the driver does not answer.
    """
    address, _, port = address_and_port.rpartition(":")
    connection = socket.create_connection((address, int(port)), timeout=_CONNECT_SECONDS)
    limit_silence(connection, SILENCE_SECONDS)
    connection.settimeout(BEAT_SECONDS)
    return connection


class Heartbeat:
    """The process's end of the connection, which a thread of its own watches.

    That thread sends beats until `close`, or until the driver is gone: then it calls `on_driver_lost` and ends the
    process.
    """

    def __init__(
        self,
        launch: LaunchFile,
        role: str,
        progress: RankProgress | None = None,
        dump_stacks: Callable[[], None] | None = None,
        on_driver_lost: Callable[[], None] | None = None,
    ) -> None:
        """Connect to the driver, and start the thread that sends beats and watches the connection.

        Args:
            launch: the run's launch file, which has the driver's address and the run's token.
            role: "rank 3", or "agent" for what starts ranks on a host.
            progress: progress to send with each beat; None: beats without it.
            dump_stacks: called when the driver asks; writes where each thread stands. None: nothing is written.
            on_driver_lost: called when the driver is gone, before this process is ended; None: nothing is.

        Raises:
            OSError: the driver does not answer.
            ValueError: the run has no heartbeat.
        """
        if launch.lifeline is None:
            raise ValueError("this run has no heartbeat")
        self._progress = progress
        self._dump_stacks = dump_stacks
        self._on_driver_lost = on_driver_lost
        self._closing = threading.Event()
        """Set once this process says that it ends."""
        self._driver_gone = False
        self._connection = _connect(launch.lifeline)
        self._send({"token": launch.token, "role": role, "host": socket.gethostname(), "pid": os.getpid()})
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tell the driver that this process ends, and that this is no failure of the connection.

        Called once the work is done, or the reason for the end is recorded. Does not return where the driver is gone
        already: the process is ended after `on_driver_lost` has returned.
        """
        if self._driver_gone:
            self._thread.join()
        self._closing.set()
        try:
            self._send({"bye": True})
            self._connection.close()
        except OSError:
            pass

    def _send(self, message: dict[str, object]) -> None:
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def _watch(self) -> None:
        """Send a beat a second and do what the driver asks, until this process closes; end it if the driver is gone.

        The driver sends "\\n" with its own beats, and "s" to ask for stacks.
        """
        while not self._closing.is_set():
            received = self._exchange_beats()
            if self._closing.is_set():
                return  # `close` has closed the connection, so that an error says nothing about the driver
            if received is None:
                self._end_process()
            if b"s" in received and self._dump_stacks is not None:
                self._dump_stacks()

    def _exchange_beats(self) -> bytes | None:
        """Send a beat, and return what the driver sends until the next one is due, within `BEAT_SECONDS`.

        Return b"" where it has sent nothing, and None where the connection is broken or its host has closed it.
        """
        try:
            self._send({} if self._progress is None else asdict(self._progress))
            received = self._connection.recv(256)  # waits as long as `_connect` has set
        except TimeoutError:
            return b""
        except OSError:
            return None
        is_closed_by_driver = received == b""
        return None if is_closed_by_driver else received

    def _end_process(self) -> NoReturn:
        """End this process, for its driver is gone."""
        self._driver_gone = True
        try:
            # The reader of stderr, such as a remote shell's other end, may be gone with the driver.
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write("vitscale: the driver of this run is gone, or its host cannot be reached: ending\n")
                sys.stderr.flush()
            if self._on_driver_lost is not None:
                self._on_driver_lost()
        finally:
            # Not sys.exit: the main thread may wait in a collective for ever.
            os._exit(LOST_DRIVER_EXIT_CODE)
