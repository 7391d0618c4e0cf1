"""Real processes that send heartbeats, for tests of both of its ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vitscale.processes import launch_file
from vitscale.processes.launch_file import LaunchFile
from vitscale.store import write_whole

TOKEN = "0123456789abcdef"  # noqa: S105 - of no run

# As a rank: `python -c HELD FOLDER RANK`. Its main thread waits for what never comes, as in a collective.
HELD = """
import faulthandler, sys, threading, time
from pathlib import Path
from vitscale.processes import launch_file
from vitscale.processes import heartbeat
heartbeat.BEAT_SECONDS, heartbeat.SILENCE_SECONDS = 0.05, 0.5
folder, rank = Path(sys.argv[1]), sys.argv[2]
def dump():
    with (folder / f"stack-rank-{rank}.txt").open("w") as file:
        faulthandler.dump_traceback(file)
launch = launch_file.read(folder)
line = heartbeat.Heartbeat(launch, f"rank {rank}", heartbeat.PROGRESS, dump, lambda: (folder / f"lost-{rank}").touch())
for heartbeat.PROGRESS.step in range(10**9):
    if (folder / f"leave-{rank}").exists():
        line.close()
        break
    time.sleep(0.01)
"""


def write_launch(folder: Path, port: int, **changes: Any) -> LaunchFile:
    """The run's launch file, of a driver that listens at `port`."""
    fields: dict[str, Any] = {
        "token": TOKEN,
        "commands": (("true",),),
        "lifeline": f"127.0.0.1:{port}",
        "driver_pid": os.getpid(),
        "host_id": launch_file.host_id(),
        "started_ns": time.clock_gettime_ns(time.CLOCK_MONOTONIC),
    }
    launch = LaunchFile(**(fields | changes))
    write_whole(folder / launch_file.NAME, launch.model_dump_json())
    return launch


def said(process: subprocess.Popen[str]) -> str:
    """What one that has ended wrote to its standard error."""
    assert process.stderr is not None
    return process.stderr.read()


@contextmanager
def held(folder: Path, rank: int = 0) -> Iterator[subprocess.Popen[str]]:
    """A rank that goes on until it is ended, or until `folder/leave-RANK` exists."""
    process = subprocess.Popen([sys.executable, "-c", HELD, str(folder), str(rank)], stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def line(**message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"
