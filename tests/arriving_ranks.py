"""`python -m arriving_ranks FOLDER`: a rank that trains nothing: says who it is, and waits to be ended or killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

from vitscale.processes import launch_file
from vitscale.processes.heartbeat import Heartbeat
from vitscale.store import write_whole
from vitscale.worker import rank_process

SHOWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "ARRIVING")


def main(folder: Path) -> None:
    launch = launch_file.read(folder)
    assert launch is not None
    rank_process.restart_with_environment(launch)
    rank_process.die_with_parent(launch)
    own = rank_process.rank_info(rank_process.now_ns(), launch)
    heartbeat = Heartbeat(launch, f"rank {own.rank}")
    said = {
        "place": [own.rank, own.world_size, own.local_rank],
        "host": socket.gethostname(),
        "variables": {name: os.environ.get(name) for name in SHOWN},
    }
    write_whole(folder / f"arrived-{own.rank}.json", json.dumps(said))
    while not (folder / f"kill-{own.rank}").exists():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)
    heartbeat.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
