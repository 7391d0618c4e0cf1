"""One rank: reads its trial, trains, records, and leaves the true reason where it fails."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

from vitscale.record import EndLine, PhaseLine, RunHeader
from vitscale.store import RankLog
from vitscale.worker import place as placing
from vitscale.worker.failure import error_line

_ARRIVED_NS = placing.now_ns()


def main(run_folder: Path) -> NoReturn:
    """Runs this process's rank of the run in `run_folder`, and ends the process: 0 where all its work is recorded.

    The process is left by `os._exit`, never through the interpreter's shutdown. Taking a process group or DDP's reducer
    apart holds the GIL while it waits for threads that want it: with gloo that was seen to hang finished ranks for
    good. And after an error a collective on another thread may wait for a rank that will never come.
    """
    placing.die_with_parent()
    own = placing.own_place(_ARRIVED_NS)
    header = RunHeader.model_validate_json((run_folder / "trial.json").read_text(encoding="utf-8"))
    placing.pin(own, header.trial.world)
    log = RankLog(run_folder, own.rank)
    exit_code = 0
    try:
        if own.launch_seconds is not None:
            log.write(PhaseLine(name="launch", seconds=own.launch_seconds))
        began = time.perf_counter()
        # Only now: torch takes its threads and cores from what `pin` has set.
        from vitscale.worker.session import train

        kept_alive = train(header, own, log, began)  # noqa: F841 - see above
        log.write(EndLine())
        log.close()
    except BaseException as error:
        exit_code = 1
        log.end_with(error_line(error))
        # On a full disk the log has no room for it either; the record has.
        with contextlib.suppress(OSError):
            traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
