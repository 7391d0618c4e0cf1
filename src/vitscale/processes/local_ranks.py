"""`python -m vitscale.processes.local_ranks N PORT MODULE FOLDER`: N ranks `python -m MODULE FOLDER` on this machine.

The launcher `local` runs it. When a rank fails the others are ended, and the exit codes of those that failed are
printed (`vitscale.runner.evidence` reads them). A signal that asks it to end is passed on to its ranks. Its exit code
is that of the rank that failed first, or 128 + N where signal N ended that rank, as in a shell.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from types import FrameType

from vitscale.base.interpreter import python_module
from vitscale.processes.launch_file import ALL_NAMES, TORCH

_LAST_WORDS_SECONDS = 0.5
"""Seconds that the other ranks have, once one has failed, to end and say why."""
_GRACE_SECONDS = 5.0
_LOOK_SECONDS = 0.01
ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that are passed on to the ranks."""

StartRank = Callable[[list[str], Mapping[str, str]], int]
"""Starts `python ARGUMENTS` with only these variables, and returns its process id."""


def main(arguments: list[str], start_rank: StartRank | None = None) -> int:
    """Runs the ranks to their end; returns the exit code.

    Args:
        arguments: N, PORT, MODULE and FOLDER; the ranks meet at PORT of this machine.
        start_rank: starts a rank; by default as a new process of this interpreter.
    """
    match arguments:
        case [ranks, port, module, folder] if ranks.isdecimal() and int(ranks) > 0 and port.isdecimal():
            pass
        case _:
            sys.exit("usage: python -m vitscale.processes.local_ranks N PORT MODULE FOLDER")
    own = {key: value for key, value in os.environ.items() if key not in ALL_NAMES}
    running: dict[int, int] = {}
    asked: list[int] = []

    def ask(number: int, _frame: FrameType | None = None) -> None:
        asked.append(number)
        _tell(running, number)

    options = python_module(module)[1:]
    before = {number: signal.signal(number, ask) for number in ASKING}
    try:
        for rank in range(int(ranks)):
            variables = own | _variables(rank, int(ranks), port)
            running[(start_rank or _new_process)([*options, folder], variables)] = rank
            if asked:
                _tell(running, asked[0])
        codes = _ended(running)
    finally:
        _tell(running, signal.SIGKILL)  # ranks are left here only after an exception
        for number, handler in before.items():
            signal.signal(number, handler)
    failed = [(rank, code) for rank, code in codes if code]
    if not failed:
        return 0
    print("local: the ranks that failed, the first one first:", file=sys.stderr)
    for rank, code in failed:
        print(f"local: rank {rank} ended with exit code {code}", file=sys.stderr)
    sys.stderr.flush()
    first = failed[0][1]
    return first if first > 0 else 128 - first


def _variables(rank: int, ranks: int, port: str) -> dict[str, str]:
    """The variables that tell a rank its place. A single rank gets none, and so opens no port."""
    if ranks == 1:
        return {}
    numbers = TORCH.telling(rank, ranks, rank)
    return numbers | {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def _new_process(arguments: list[str], variables: Mapping[str, str]) -> int:
    return os.posix_spawn(sys.executable, [sys.executable, *arguments], variables)


def _ended(running: dict[int, int]) -> list[tuple[int, int]]:
    """Waits for all ranks; returns (rank, exit code, or minus a signal's number) in the order in which they ended."""
    codes: list[tuple[int, int]] = []

    def reap(options: int) -> bool:
        pid, status = os.waitpid(-1, options)
        if pid in running:
            codes.append((running.pop(pid), os.waitstatus_to_exitcode(status)))
        return pid != 0

    # Sleep until something ends: this process must not take time from the ranks.
    while running and not any(code for _, code in codes):
        reap(0)
    for number, seconds in ((None, _LAST_WORDS_SECONDS), (signal.SIGTERM, _GRACE_SECONDS), (signal.SIGKILL, None)):
        if not running:
            break
        if number == signal.SIGKILL:
            print("local: SIGKILL to the ranks that did not heed SIGTERM", file=sys.stderr, flush=True)
        if number is not None:
            _tell(running, number)
        end = None if seconds is None else time.monotonic() + seconds
        while running and (end is None or time.monotonic() < end):
            if not reap(os.WNOHANG):
                time.sleep(_LOOK_SECONDS)
    return codes


def _tell(running: Mapping[int, int], number: int) -> None:
    for pid in list(running):
        os.kill(pid, number)
        # A stopped process (SIGSTOP) handles SIGTERM only once it continues.
        os.kill(pid, signal.SIGCONT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
