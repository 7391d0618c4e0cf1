"""One rank of `vitscale check`: measures where it runs, its network, its speed, its loader and its disk."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import NoReturn

from vitscale.processes import launch_file
from vitscale.processes.heartbeat import PROGRESS, Heartbeat
from vitscale.processes.launch_file import LaunchFile
from vitscale.store.check_records import CheckRequest, Stage
from vitscale.store.checks import CheckLog
from vitscale.store.records import EndLine
from vitscale.worker import place as placing

_ARRIVED_NS = placing.now_ns()
_GRACE_SECONDS = 30.0


def main(folder: Path, arrived_ns: int = _ARRIVED_NS) -> NoReturn:
    """Does this rank's part of the check in `folder`, and ends the process: 0 where it came to its end.

    A stage that fails or hangs is part of the result: the next one begins all the same. For leaving by `os._exit` see
    `vitscale.worker.__main__`.

    Args:
        folder: with request.json, and launch.json.
        arrived_ns: when this process began its work, on the monotonic clock.
    """
    launch = launch_file.read(folder)
    placing.with_environment(launch)
    placing.die_with_parent(launch)
    own = placing.own_place(arrived_ns, launch)
    request = CheckRequest.model_validate_json((folder / "request.json").read_text(encoding="utf-8"))
    if own.world_size != request.world.size or not 0 <= own.rank < own.world_size:
        sys.exit(f"vitscale: the launcher made this rank {own.rank} of {own.world_size}, not of {request.world.size}")
    _end_after(request.longest_seconds + _GRACE_SECONDS)
    heartbeat = _heartbeat(launch, own.rank)
    host_cores = len(os.sched_getaffinity(0))
    placing.pin(own, request.world, request.device)
    exit_code = 0
    try:
        log = CheckLog(folder, own.rank)
        # Only now: torch takes its threads and cores from what `pin` has set.
        from vitscale.worker.check_stages import measure

        measure(request, own, log, folder, host_cores, _tell)
        log.write(EndLine())
    except BaseException:
        exit_code = 1
        with contextlib.suppress(OSError):
            traceback.print_exc()
    if heartbeat is not None:
        heartbeat.close()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code)


def _tell(stage: Stage) -> None:
    PROGRESS.phase = stage


def _end_after(seconds: float) -> None:
    """Ends this process when even the limits of its stages have failed it: a thread can hold the interpreter's lock."""
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()


def _heartbeat(launch: LaunchFile | None, rank: int) -> Heartbeat | None:
    if launch is None or launch.lifeline is None:
        return None
    try:
        return Heartbeat(launch, f"rank {rank}", PROGRESS)
    except OSError as error:
        sys.exit(f"vitscale: rank {rank} cannot reach the driver at {launch.lifeline}: {error}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
