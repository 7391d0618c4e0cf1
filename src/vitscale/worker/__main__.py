"""One rank of a run: reads its trial, trains and records."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import NoReturn

from vitscale.processes.launch_file import LaunchFile
from vitscale.store import RankLog
from vitscale.store.records import PhaseLine
from vitscale.store.results import RunHeader
from vitscale.worker.rank_process import RankInfo, now_ns, run_rank

_ARRIVED_NS = now_ns()


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


def main(folder: Path, arrived_ns: int = _ARRIVED_NS) -> NoReturn:
    """Does this rank's part of the run in `folder`; see `run_rank`."""
    run_rank(folder, Train, arrived_ns)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
