"""One rank of a run, which reads its trial, trains and records; or of `vitscale check`, which measures where it runs,
its network, its speed, its loader and its disk."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

from vitscale.processes.launch_file import LaunchFile
from vitscale.store import RankLog
from vitscale.store.records import PhaseLine
from vitscale.store.results import RunHeader
from vitscale.worker.rank_process import RankInfo, now_ns, run_rank

_ARRIVED_NS = now_ns()
_GRACE_SECONDS = 30.0
_REQUEST = "request.json"


class Train:
    """Trains as trial.json says."""

    name = "trial"
    at_once = False

    def __init__(self, folder: Path) -> None:
        self._header = RunHeader.model_validate_json((folder / "trial.json").read_text(encoding="utf-8"))
        self.world, self.device = self._header.trial.world, self._header.trial.train.device

    def begin(self) -> None:
        """Nothing."""

    def work(self, own: RankInfo, log: RankLog, folder: Path, launch: LaunchFile | None) -> object:
        """From the first import of torch to the last step; or all that the user's own script does."""
        del folder
        if launch is not None and launch.prepared_seconds is not None:
            log.write(PhaseLine(name="prepare", seconds=launch.prepared_seconds))
        if own.launch_seconds is not None:
            log.write(PhaseLine(name="launch", seconds=own.launch_seconds))
        if self._header.trial.train.script is not None:
            from vitscale.worker.script import run_script

            return run_script(self._header, own, log, launch)
        began = time.perf_counter()
        # Only now: torch takes its threads and cores from how the rank is pinned.
        from vitscale.worker.session import train

        port = launch.master_port if launch is not None and launch.mpi_discovery else None
        return train(self._header, own, log, began, port)


class Check:
    """Measures what request.json asks for. A stage that fails or hangs is part of the result: the next one begins all
    the same, so that each line is on disk first."""

    name = "check"
    at_once = True

    def __init__(self, folder: Path) -> None:
        from vitscale.store.checks import CheckRequest

        self._request = CheckRequest.model_validate_json((folder / _REQUEST).read_text(encoding="utf-8"))
        self.world, self.device = self._request.world, self._request.device
        self._host_cores = 0

    def begin(self) -> None:
        """Ends this process when even the limits of its stages fail it: a thread can hold the interpreter's lock."""
        timer = threading.Timer(self._request.longest_seconds + _GRACE_SECONDS, os._exit, (1,))
        timer.daemon = True
        timer.start()
        self._host_cores = len(os.sched_getaffinity(0))

    def work(self, own: RankInfo, log: RankLog, folder: Path, launch: LaunchFile | None) -> None:
        """Every stage."""
        del launch
        # Only now: torch takes its threads and cores from how the rank is pinned.
        from vitscale.worker.check_stages import measure

        measure(self._request, own, log, folder, self._host_cores)


def main(folder: Path, arrived_ns: int = _ARRIVED_NS) -> NoReturn:
    """Does this rank's part of the run, or of the check, in `folder`; see `run_rank`."""
    run_rank(folder, lambda asked: Check(asked) if (asked / _REQUEST).exists() else Train(asked), arrived_ns)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
