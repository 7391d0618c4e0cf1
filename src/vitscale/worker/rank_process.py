"""One rank, whatever it was started for: finds its place in the world, does its work, and leaves the true reason where
it fails. Nothing here imports torch, which takes its threads and cores from what is set before."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, Protocol

from vitscale.processes import launch_file
from vitscale.processes.heartbeat import PROGRESS, Heartbeat
from vitscale.processes.launch_file import LaunchFile
from vitscale.store import RankLog
from vitscale.store.records import EndLine, ErrorLine
from vitscale.trial.trial import Device, World
from vitscale.worker import place as placing
from vitscale.worker.place import Place


class Body(Protocol):
    """What the ranks of a run, or of a check, are to do: read from the run's folder."""

    name: str
    """In messages."""
    at_once: bool
    """Whether each line is on disk before what comes next begins."""

    @property
    def world(self) -> World:
        """The ranks it is for."""

    @property
    def device(self) -> Device:
        """What they compute on."""

    def begin(self) -> None:
        """Called once this rank's place is known to be right, before it is pinned."""

    def work(self, own: Place, log: RankLog, folder: Path, launch: LaunchFile | None) -> object:
        """Does it all; what is returned must not be taken apart before the process ends."""


def run_rank(folder: Path, read: Callable[[Path], Body], arrived_ns: int) -> NoReturn:
    """Runs this process's rank, and ends the process: 0 where all its work is recorded.

    The process is left by `os._exit`, never through the interpreter's shutdown. Taking a process group or DDP's reducer
    apart holds the GIL while it waits for threads that want it: with gloo that was seen to hang finished ranks for
    good. And after an error a collective on another thread may wait for a rank that will never come.

    Args:
        folder: of the run, with launch.json where a driver has started it.
        read: finds there what is to be done.
        arrived_ns: when this process began its work, on the monotonic clock.
    """
    launch = launch_file.read(folder)
    placing.with_environment(launch)
    placing.die_with_parent(launch)
    own = placing.own_place(arrived_ns, launch)
    try:
        body = read(folder)
    except FileNotFoundError:
        sys.exit(f"vitscale: {folder} is not seen on this host: is the results folder shared by all hosts?")
    size = body.world.size
    if own.world_size != size or not 0 <= own.rank < size:
        # A launcher that starts another world than was asked for must not be measured.
        sys.exit(
            f"vitscale: the launcher made this rank {own.rank} of {own.world_size}, and the {body.name} has {size}"
        )
    body.begin()
    heartbeat = _heartbeat(launch, own.rank, folder)
    placing.pin(own, body.world, body.device)
    log = RankLog(folder, own.rank, at_once=body.at_once)
    exit_code = 0
    try:
        kept_alive = body.work(own, log, folder, launch)  # noqa: F841 - see `Body.work`
        log.write(EndLine())
        log.close()
    except BaseException as error:
        exit_code = 1
        log.end_with(error_line(error))
        # On a full disk the log has no room for it either; the record has.
        with contextlib.suppress(OSError):
            traceback.print_exc()
    if heartbeat is not None:
        heartbeat.close()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code)


def _heartbeat(launch: LaunchFile | None, rank: int, folder: Path) -> Heartbeat | None:
    if launch is None or launch.lifeline is None:
        return None
    stacks = folder / f"stack-rank-{rank}.txt"

    def dump_stacks() -> None:
        with contextlib.suppress(OSError), stacks.open("w") as file:
            faulthandler.dump_traceback(file)

    try:
        return Heartbeat(launch, f"rank {rank}", PROGRESS, dump_stacks)
    except OSError as error:
        sys.exit(f"vitscale: rank {rank} cannot reach the driver at {launch.lifeline}: {error}")


_LONGEST = 16_000
_MEMORY_MESSAGES = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def error_line(error: BaseException) -> ErrorLine:
    """The record of `error`, with its traceback; told apart are running out of memory and out of disk."""
    text = "".join(traceback.format_exception(error))
    return ErrorLine(
        error_type=type(error).__name__,
        message=str(error)[:_LONGEST],
        traceback=text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}\n...\n{text[-_LONGEST // 2 :]}",
        out_of_memory=any(map(_is_out_of_memory, _chain(error))),
        disk_full=isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT),
        unix_seconds=time.time(),
    )


def _chain(error: BaseException) -> list[BaseException]:
    """`error` and what it was raised from: a user's model that runs out of memory arrives wrapped in a message."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    return chain


def _is_out_of_memory(error: BaseException) -> bool:
    """Only allocation failures: an illegal access or a lost device is not a lack of memory."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MEMORY_MESSAGES)
