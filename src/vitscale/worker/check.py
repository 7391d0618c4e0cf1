"""One rank of `vitscale check`: measures where it runs, its network, its speed, its loader and its disk."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import NoReturn

from vitscale.processes.launch_file import LaunchFile
from vitscale.store import RankLog
from vitscale.store.checks import CheckRequest
from vitscale.worker.rank_process import RankInfo, now_ns, run_rank

_ARRIVED_NS = now_ns()
_GRACE_SECONDS = 30.0


class Check:
    """Measures what request.json asks for. A stage that fails or hangs is part of the result: the next one begins all
    the same, so that each line is on disk first."""

    name = "check"
    at_once = True

    def __init__(self, folder: Path) -> None:
        self._request = CheckRequest.model_validate_json((folder / "request.json").read_text(encoding="utf-8"))
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
    """Does this rank's part of the check in `folder`; see `run_rank`."""
    run_rank(folder, Check, arrived_ns)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
