"""One rank: reads its trial, trains, records, and leaves the true reason where it fails."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

from vitscale.processes import launch_file
from vitscale.processes.heartbeat import PROGRESS, Heartbeat
from vitscale.processes.launch_file import LaunchFile
from vitscale.store import RankLog
from vitscale.store.records import EndLine, PhaseLine
from vitscale.store.results import RunHeader
from vitscale.worker import place as placing
from vitscale.worker.failure import error_line

_ARRIVED_NS = placing.now_ns()


def main(run_folder: Path, arrived_ns: int = _ARRIVED_NS) -> NoReturn:
    """Runs this process's rank of the run in `run_folder`, and ends the process: 0 where all its work is recorded.

    The process is left by `os._exit`, never through the interpreter's shutdown. Taking a process group or DDP's reducer
    apart holds the GIL while it waits for threads that want it: with gloo that was seen to hang finished ranks for
    good. And after an error a collective on another thread may wait for a rank that will never come.

    Args:
        run_folder: with trial.json, and launch.json where a driver has started it.
        arrived_ns: when this process began its work, on the monotonic clock.
    """
    launch = launch_file.read(run_folder)
    placing.with_environment(launch)
    placing.die_with_parent(launch)
    own = placing.own_place(arrived_ns, launch)
    header = _header(run_folder)
    _check_world(own, header)
    heartbeat = _heartbeat(launch, own, run_folder)
    placing.pin(own, header.trial.world, header.trial.train.device)
    log = RankLog(run_folder, own.rank)
    exit_code = 0
    try:
        if launch is not None and launch.prepared_seconds is not None:
            log.write(PhaseLine(name="prepare", seconds=launch.prepared_seconds))
        if own.launch_seconds is not None:
            log.write(PhaseLine(name="launch", seconds=own.launch_seconds))
        began = time.perf_counter()
        # Only now: torch takes its threads and cores from what `pin` has set.
        from vitscale.worker.session import train

        port = launch.master_port if launch is not None and launch.mpi_discovery else None
        kept_alive = train(header, own, log, began, port)  # noqa: F841 - see above
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


def _header(run_folder: Path) -> RunHeader:
    try:
        return RunHeader.model_validate_json((run_folder / "trial.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        sys.exit(f"vitscale: {run_folder} is not seen on this host: is the results folder shared by all hosts?")


def _check_world(own: placing.Place, header: RunHeader) -> None:
    """A launcher that starts another world than was asked for must not be measured."""
    size = header.trial.world.size
    if own.world_size != size or not 0 <= own.rank < size:
        sys.exit(f"vitscale: the launcher made this rank {own.rank} of {own.world_size}, and the trial has {size}")


def _heartbeat(launch: LaunchFile | None, own: placing.Place, run_folder: Path) -> Heartbeat | None:
    if launch is None or launch.lifeline is None:
        return None
    stacks = run_folder / f"stack-rank-{own.rank}.txt"

    def dump_stacks() -> None:
        with contextlib.suppress(OSError), stacks.open("w") as file:
            faulthandler.dump_traceback(file)

    try:
        return Heartbeat(launch, f"rank {own.rank}", PROGRESS, dump_stacks)
    except OSError as error:
        sys.exit(f"vitscale: rank {own.rank} cannot reach the driver at {launch.lifeline}: {error}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
