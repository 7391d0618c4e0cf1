"""`python -m vitscale.lab.guard NAME`: ends the lab when the process that makes or uses it dies.

It notices through its standard input, a pipe that the kernel closes however that process dies.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType

from vitscale.lab import processes, quota
from vitscale.lab.state import PREFIX, Holder, folder_of, read

_KEEP = "keep\n"


class Guard:
    """Ends the lab with the block or with this process, whichever ends first, unless the lab is to be kept."""

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
        """Lets the lab outlive the block and this process."""
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
    """Waits for a line or the end of standard input; ends the lab unless the line is `_KEEP`."""
    if sys.stdin.readline() != _KEEP:
        take_down(name)


def take_down(name: str) -> bool:
    """Ends the lab called `name`, however much of it is left; False where there was nothing.

    Raises:
        VitscaleError: a process or a cgroup was not gone after 10 s; the folder is kept, to try again.
    """
    folder = folder_of(name)
    state = read(name)
    if state is not None:
        end_holders(state.holders)
    controller = quota.find_controller()
    if controller is not None:
        controller.remove(PREFIX + name)
    if not folder.exists():
        return False
    with suppress(FileNotFoundError):  # another process is ending it too
        shutil.rmtree(folder)
    return True


def end_holders(holders: Iterable[Holder]) -> None:
    """Ends the holders with everything in their namespaces, and returns when all are gone.

    Raises:
        VitscaleError: a process was not gone after 10 s.
    """
    processes.kill(
        process for holder in holders for process in (holder.first, holder.outside, *processes.waiting(holder.first))
    )


if __name__ == "__main__":
    main(sys.argv[1])
