"""The command's processes on this host: which they are, and how they are ended.

A process belongs to the command if one of these holds:
- it is in the session that the command was started in (the session's id is the command's process id);
- it was seen as a descendant of the command, though it may have left the session and lost its parent since;
- its PYTHONPATH has the hook's folder, which no other command has.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from vitscale.explanation.results_folder import PATH_VARIABLE

_SECONDS_BETWEEN_LOOKS = 0.1
"""Time from one look at processes that are to end to the next."""
_GONE = (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess, ProcessLookupError, PermissionError)
"""Errors of a process that has ended by now, or is another user's."""


class ProcessIdentity(NamedTuple):
    """A process, told apart from a later one with the same id."""

    pid: int
    created: float
    """When it started, in seconds since 1970."""


class CommandProcess(NamedTuple):
    """A live process of the command, as a message names it."""

    pid: int
    words: tuple[str, ...]
    """Its command line; empty where it cannot be read."""

    @property
    def program(self) -> str:
        """The file name of its program: "python3.11"; "?" where it is unknown."""
        return Path(self.words[0]).name if self.words and self.words[0] else "?"


class CommandProcesses:
    """Finds and ends the processes of one command."""

    def __init__(self, command_pid: int, hook: Path) -> None:
        """Begin with the command's first process.

        Args:
            command_pid: its process id, which is the id of its session too.
            hook: the hook's folder, as it stands in PYTHONPATH.
        """
        self._command_pid = command_pid
        self._hook = str(hook)
        self._descendants: set[ProcessIdentity] = set()
        """All descendants that were seen."""
        self._ever_killed = False

    @property
    def killed(self) -> bool:
        """Whether SIGKILL was needed."""
        return self._ever_killed

    def note_descendants(self) -> None:
        """Remember the descendants that the command has now. One that leaves its session and parent is known later."""
        with suppress(*_GONE):
            for process in psutil.Process(self._command_pid).children(recursive=True):
                with suppress(*_GONE):
                    self._descendants.add(ProcessIdentity(process.pid, process.create_time()))

    def live(self) -> list[psutil.Process]:
        """Return the command's live processes on this host; never this process or one that it runs in."""
        excluded = _own_line()
        found = []
        for process in psutil.process_iter():
            with suppress(*_GONE):
                if process.pid not in excluded and self._is_of_command(process) and _is_alive(process):
                    found.append(process)
        return found

    def described(self) -> list[CommandProcess]:
        """Return the command's live processes with their command lines."""
        return [CommandProcess(process.pid, _words(process)) for process in self.live()]

    def signal(self, signal_number: signal.Signals) -> None:
        """Send a signal to all live processes of the command, also to those that are stopped."""
        for process in self.live():
            with suppress(*_GONE):
                process.send_signal(signal_number)
                process.send_signal(signal.SIGCONT)  # a stopped one handles SIGTERM only once it continues

    def wait_until_gone(self, seconds: float) -> bool:
        """Wait until the command has no live process, for at most `seconds`; return whether it has none."""
        deadline = time.monotonic() + seconds
        while self.live():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        return True

    def end(self, grace_seconds: float) -> list[CommandProcess]:
        """End all processes of the command: by SIGTERM, and after `grace_seconds` by SIGKILL.

        Returns:
            Processes that live on, for the kernel holds them; mostly none.
        """
        self.signal(signal.SIGTERM)
        if self.wait_until_gone(grace_seconds) and self.wait_until_gone(0.0):
            return []  # looked at twice: one that was just being forked can slip through a look
        return self.kill(grace_seconds)

    def kill(self, patience_seconds: float) -> list[CommandProcess]:
        """Send SIGKILL to all processes of the command until none is left, for at most `patience_seconds`.

        Returns:
            Processes that live on.
        """
        self._ever_killed = True
        deadline = time.monotonic() + patience_seconds
        while True:
            self.signal(signal.SIGKILL)
            if self.wait_until_gone(_SECONDS_BETWEEN_LOOKS) and self.wait_until_gone(0.0):
                return []
            if time.monotonic() >= deadline:
                return self.described()

    def _is_of_command(self, process: psutil.Process) -> bool:
        """Whether a process belongs to the command, as the module says.

        Raises:
            psutil.Error, OSError: the process has ended, or is another user's.
        """
        if os.getsid(process.pid) == self._command_pid:
            return True
        if ProcessIdentity(process.pid, process.create_time()) in self._descendants:
            return True
        search_path = process.environ().get(PATH_VARIABLE, "")
        return self._hook in search_path.split(os.pathsep)


def _own_line() -> set[int]:
    """Return the ids of this process and its ancestors: under another explanation they have its hook too."""
    pids = {os.getpid()}
    with suppress(*_GONE):
        pids.update(parent.pid for parent in psutil.Process().parents())
    return pids


def _is_alive(process: psutil.Process) -> bool:
    """Whether a process runs; a zombie, which nobody has reaped yet, does not."""
    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)


def _words(process: psutil.Process) -> tuple[str, ...]:
    words: Sequence[str] = ()
    with suppress(*_GONE):
        words = process.cmdline()
    return tuple(words)
