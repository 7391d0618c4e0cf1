"""`python -m vitscale.lab.guard NAME`: ends the lab when the process dies that makes or uses it.

It hears of it through a pipe, its standard input, that the kernel closes whatever that process died of.
"""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType

from vitscale.lab.ending import take_down

_KEEP = "keep\n"


class Guard:
    """Ends the lab with the block, or with this process, whichever comes first; unless it is to be kept."""

    def __init__(self, name: str, started: list[subprocess.Popen[str]]) -> None:
        self._name = name
        self._started = started
        self._keep = False

    def __enter__(self) -> Guard:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vitscale.lab.guard", self._name],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd="/",
            start_new_session=True,
        )
        return self

    def keep(self) -> None:
        """The lab outlives the block and this process."""
        self._keep = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if not self._keep:
                take_down(self._name)
                for process in self._started:
                    process.wait()
        finally:
            self._process.communicate(_KEEP if self._keep else None)


def main(name: str) -> None:
    """Waits for the end of its standard input."""
    if sys.stdin.readline() != _KEEP:
        take_down(name)


if __name__ == "__main__":
    main(sys.argv[1])
