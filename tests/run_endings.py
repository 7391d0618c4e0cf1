"""Ends of runs as their driver sees them: what ranks recorded, what launchers printed, when heartbeats broke off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vitscale.processes.heartbeat_server import Disconnection, RankStatus
from vitscale.runner.classify import outcome_of
from vitscale.runner.evidence import Ending, RunEvidence
from vitscale.store.records import ErrorLine, RankRecord, StepLine
from vitscale.store.results import Outcome

# What torchrun (torch 2.13) printed when rank 1 of two was killed by SIGKILL, and when a rank's program ended with 3.
REPORT = """\
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/usr/lib/python3.11/site-packages/torch/distributed/launcher/api.py", line 383, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n\
=======================================================
s.py FAILED
-------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-20_22:41:28
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 13089)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 13089
-------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-20_22:41:28
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 13090)  (SIGKILL)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 13090
=======================================================
"""
# The same, but rank 0 noticed so soon that torchrun saw both ends at once, and took its exit code 1 for the cause.
BOTH_AT_ONCE = """\
s2.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-20_22:41:30
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 13107)  (SIGKILL)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 13107
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-20_22:41:30
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 13106) \n\
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""
EXIT_3 = BOTH_AT_ONCE[BOTH_AT_ONCE.index("Root") :].replace(": 1 (pid", ": 3 (pid")
FORCED = "Unable to shutdown process 13090 via Signals.SIGTERM, forcefully exiting via Signals.SIGKILL\n"


def ending(exit_code: int | None = 1, **changes: Any) -> Ending:
    fields: dict[str, Any] = {
        "stopped": None,
        "limit_seconds": None,
        "kernel_oom_kills": 0,
        "started_unix_seconds": 5.0,
        "wall_seconds": 7.0,
    }
    return Ending(exit_code, **(fields | changes))


def error(message: str = "bad pixel", at: float = 1.0, **changes: Any) -> ErrorLine:
    fields: dict[str, Any] = {
        "error_type": "ValueError",
        "message": message,
        "traceback": f"Traceback of {message}",
        "out_of_memory": False,
        "disk_full": False,
        "unix_seconds": at,
    }
    return ErrorLine(**(fields | changes))


def rank(number: int, steps: int = 3, *, ended: bool = False, **changes: Any) -> RankRecord:
    lines = (StepLine(step=n, epoch=0, seconds=0.1, images=1, loss=None, warmup=False) for n in range(steps))
    fields: dict[str, Any] = {"start": None, "model": None, "phases": (), "epochs": (), "error": None, "broken": ()}
    return RankRecord(**(fields | {"rank": number, "steps": tuple(lines), "ended": ended} | changes))


def outcome(log: Path, ends: Ending, *ranks: RankRecord, world_size: int = 2, text: str = "") -> Outcome:
    log.write_text(text)
    return outcome_of(RunEvidence(ends, ranks, world_size, log.parent))


def status(ended: float | None = None, disconnection: Disconnection | None = None, **changes: Any) -> RankStatus:
    """Of a rank last heard at 100 s."""
    fields: dict[str, Any] = {"host": "node0", "pid": 77, "heard_seconds": 100.0, "step": 4, "phase": "backward"}
    return RankStatus(ended_seconds=ended, disconnection=disconnection, **(fields | changes))


def statuses(*each: RankStatus) -> dict[int, RankStatus]:
    return dict(enumerate(each))
