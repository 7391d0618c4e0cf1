"""The environment and the command line that a process began with, written over in place.

Other processes see these in /proc/PID/environ and /proc/PID/cmdline, whatever `os.environ` is set to. What stands there
lies on the process's own stack and may be written by it, without any privilege (proc(5)): a fork of a prepared process
so carries its run's token, and shows whose rank it is.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

from vitscale.launch_file import TOKEN_VARIABLE

_ARGUMENTS_START, _ENVIRONMENT_START = 48, 50
"""Fields of /proc/PID/stat, counted from 1."""


class InitialMemory:
    """Of this process. It was started with a placeholder for the token, and for a command longer than its own."""

    def __init__(self) -> None:
        stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
        # The name in field 2 may hold blanks and parentheses.
        fields = stat[stat.rindex(")") + 2 :].split()
        self._command_at, environment_at = (int(fields[n - 3]) for n in (_ARGUMENTS_START, _ENVIRONMENT_START))
        self._command_bytes = len(Path("/proc/self/cmdline").read_bytes())
        name = f"{TOKEN_VARIABLE}=".encode()
        environment = Path("/proc/self/environ").read_bytes()
        offset = (b"\0" + environment).find(b"\0" + name)
        self._placeholder = environment[offset + len(name) :].partition(b"\0")[0] if offset >= 0 else b""
        self._token_at = environment_at + offset + len(name)

    def unfit(self) -> str | None:
        """Why it cannot be written; None where it can."""
        if not self._placeholder or not self._command_at:
            return "where its environment lies is not known"
        if ctypes.string_at(self._token_at, len(self._placeholder)) != self._placeholder:
            return "its environment does not lie where the kernel says"
        return None

    def set_token(self, token: str | None) -> None:
        """Writes a token as long as the placeholder; None: the placeholder."""
        text = self._placeholder if token is None else token.encode()
        if len(text) != len(self._placeholder):
            raise ValueError(f"a token of {len(text)} characters has no room in {len(self._placeholder)}")
        ctypes.memmove(self._token_at, text, len(text))

    def set_command(self, command: list[str]) -> None:
        """Writes a command line, cut off where there is no room for all of it."""
        text = b"\0".join(word.encode(sys.getfilesystemencoding(), "surrogateescape") for word in command)
        # The last byte stays 0: without it the kernel reads on into the environment.
        ctypes.memmove(
            self._command_at, text[: self._command_bytes - 1].ljust(self._command_bytes, b"\0"), self._command_bytes
        )
