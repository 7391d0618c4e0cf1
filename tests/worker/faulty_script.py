"""Goes wrong as its argument says, on rank 1; imports no torch, but where a Probe needs it."""

from __future__ import annotations

import os
import signal
import sys
import time

fault, rank = sys.argv[1], int(os.environ["RANK"])
print("begun with", sys.argv[1:], flush=True)
if fault == "well":
    time.sleep(0.1)
elif fault == "early":
    from vitscale import Probe

    probe = Probe()
    for _ in range(3):
        with probe.step(images=4):
            pass
elif fault == "images":
    from vitscale import Probe

    with Probe().step(images=4 + rank):
        time.sleep(60 * (1 - rank))  # is ended with the other
elif rank == 1:
    if fault == "raises":
        raise ValueError("the sensor reads nonsense")
    if fault == "leaves":
        os._exit(3)
    if fault == "quits":
        sys.exit(4)
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hangs":
        time.sleep(1000)
elif fault != "hangs":
    time.sleep(60)  # is ended with the other
