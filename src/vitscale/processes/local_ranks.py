"""`python -m vitscale.processes.local_ranks N PORT MODULE FOLDER`: N ranks `python -m MODULE FOLDER` on this machine.

The launcher `local` runs it. When a rank fails the others are ended, and the exit codes of those that failed are
printed (`vitscale.runner.evidence` reads them). A signal that asks it to end is passed on to its ranks. Its exit code
is that of the rank that failed first, or 128 + N where signal N ended that rank, as in a shell.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import NamedTuple

from vitscale.base.interpreter import python_module
from vitscale.processes.launch_file import ALL_NAMES, TORCH

_MESSAGE_SECONDS = 0.5
"""Seconds that the other ranks have, once one has failed, to end by themselves and print why."""
_GRACE_SECONDS = 5.0
"""Seconds from SIGTERM to SIGKILL."""
_SECONDS_BETWEEN_LOOKS = 0.01
"""Time from one look at ranks that are to end to the next."""
FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that are passed on to the ranks."""

StartRank = Callable[[list[str], Mapping[str, str]], int]
"""Starts `python ARGUMENTS` with only these variables, and returns its process id."""


def main(arguments: list[str], start_rank: StartRank | None = None) -> int:
    """Run the ranks to their end; returns the exit code.

    Args:
        arguments: N, PORT, MODULE and FOLDER; the ranks meet at PORT of this machine.
        start_rank: starts a rank; by default as a new process of this interpreter.
    """
    match arguments:
        case [ranks, port, module, folder] if ranks.isdecimal() and int(ranks) > 0 and port.isdecimal():
            pass
        case _:
            sys.exit("usage: python -m vitscale.processes.local_ranks N PORT MODULE FOLDER")
    environment = {name: value for name, value in os.environ.items() if name not in ALL_NAMES}
    rank_by_pid: dict[int, int] = {}
    received_signals: list[int] = []

    def forward(signal_number: int, _frame: FrameType | None = None) -> None:
        received_signals.append(signal_number)
        _signal_all(rank_by_pid, signal_number)

    options = python_module(module)[1:]
    earlier_handlers = {number: signal.signal(number, forward) for number in FORWARDED_SIGNALS}
    try:
        for rank in range(int(ranks)):
            variables = environment | _rank_variables(rank, int(ranks), port)
            pid = (start_rank or _start_process)([*options, folder], variables)
            rank_by_pid[pid] = rank
            if received_signals:
                _signal_all(rank_by_pid, received_signals[0])  # this rank was not there yet when the signal came
        exits = _wait_for_all(rank_by_pid)
    finally:
        _signal_all(rank_by_pid, signal.SIGKILL)  # ranks are left here only after an exception
        for number, handler in earlier_handlers.items():
            signal.signal(number, handler)
    return _report_failures(exits)


class _RankExit(NamedTuple):
    """The end of a rank."""

    rank: int
    code: int
    """Exit code, or minus a signal's number."""


def _report_failures(exits: Sequence[_RankExit]) -> int:
    """Print the ranks that failed, and return this process's exit code."""
    failures = [rank_exit for rank_exit in exits if rank_exit.code]
    if not failures:
        return 0
    print("local: the ranks that failed, the first one first:", file=sys.stderr)
    for rank, code in failures:
        print(f"local: rank {rank} ended with exit code {code}", file=sys.stderr)
    sys.stderr.flush()
    first_code = failures[0].code
    if first_code < 0:  # minus the number of the signal that ended the rank
        return 128 + abs(first_code)
    return first_code


def _rank_variables(rank: int, ranks: int, port: str) -> dict[str, str]:
    """Return the variables by which a rank knows its number. A single rank gets none, and so opens no port."""
    if ranks == 1:
        return {}
    numbers = TORCH.variables(rank, ranks, rank)
    return numbers | {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def _start_process(arguments: list[str], variables: Mapping[str, str]) -> int:
    """Start a rank as a new process of this interpreter, as `StartRank` says."""
    return os.posix_spawn(sys.executable, [sys.executable, *arguments], variables)


class _EndingStage(NamedTuple):
    """A stage in the end of the remaining ranks, once one has failed."""

    signal_number: signal.Signals | None
    """The signal that they get as it begins; None: none."""
    seconds: float | None
    """The time that they have until the next stage; None: any."""


_ENDING_STAGES = (
    _EndingStage(None, _MESSAGE_SECONDS),
    _EndingStage(signal.SIGTERM, _GRACE_SECONDS),
    _EndingStage(signal.SIGKILL, None),
)


def _wait_for_all(rank_by_pid: dict[int, int]) -> list[_RankExit]:
    """Wait for all ranks, and end the others once one has failed.

    Args:
        rank_by_pid: the ranks that run; those that end leave it.

    Returns:
        The ends of the ranks, in the order in which they ended.
    """
    exits: list[_RankExit] = []

    def reap(options: int) -> bool:
        """Note the end of one child, which need not be a rank.

        Waits for one, or with `options` os.WNOHANG returns False where none has ended.
        """
        pid, status = os.waitpid(-1, options)
        if pid in rank_by_pid:
            exits.append(_RankExit(rank_by_pid.pop(pid), os.waitstatus_to_exitcode(status)))
        return pid != 0

    # Sleep until something ends: this process must not take time from the ranks.
    while rank_by_pid and not any(rank_exit.code for rank_exit in exits):
        reap(0)
    for stage in _ENDING_STAGES:
        if not rank_by_pid:
            break
        if stage.signal_number == signal.SIGKILL:
            print("local: SIGKILL to the ranks that did not heed SIGTERM", file=sys.stderr, flush=True)
        if stage.signal_number is not None:
            _signal_all(rank_by_pid, stage.signal_number)
        deadline = math.inf if stage.seconds is None else time.monotonic() + stage.seconds
        while rank_by_pid and time.monotonic() < deadline:
            if not reap(os.WNOHANG):
                time.sleep(_SECONDS_BETWEEN_LOOKS)
    return exits


def _signal_all(rank_by_pid: Mapping[int, int], signal_number: int) -> None:
    """Send a signal to all ranks that run, also to those that are stopped."""
    for pid in list(rank_by_pid):
        os.kill(pid, signal_number)
        # A stopped process (SIGSTOP) handles SIGTERM only once it continues.
        os.kill(pid, signal.SIGCONT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
