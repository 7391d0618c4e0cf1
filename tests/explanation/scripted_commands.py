"""Commands for tests of a session: programs that end early, hang or misbehave, and ranks that only write lines.

A scripted rank does what a hooked one does with its file and the plan, without torch, so that it starts at once.
"""

from __future__ import annotations

import sys
from pathlib import Path

RANK = """
import json, os, pathlib, signal, sys, time

results = pathlib.Path(os.environ["PYTHONPATH"].split(":")[0]).parent
rank, world_size = int(sys.argv[1]), int(sys.argv[2])
options = sys.argv[3:]
path = results / "ranks" / f"host-{os.getpid()}.jsonl"
if "deaf" in options:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

def write(kind, **values):
    with path.open("a") as file:
        file.write(json.dumps({"type": kind, **values}) + "\\n")

write("rank", rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size, host="host",
      pid=os.getpid(), program="rank.py", python="3.11.2", torch="2.13.0", device="cpu", threads=1, cpus=2, wall_ns=0,
      monotonic_ns=0)
last_step = 400 if "brief" in options else 1000
step = 0
while step < last_step:
    step += 1
    time.sleep(0.01)
    write("step", number=step, began_ns=step * 10**7, seconds=0.01, images=8, micro_steps=1, data_seconds=0.002,
          copy_seconds=None, forward_seconds=0.003, backward_seconds=0.003, own_backward_seconds=None,
          first_bucket_seconds=None, optimizer_seconds=0.001, other_seconds=0.001)
    plan = json.loads((results / "hook/plan.json").read_text())
    if plan["stop_after"] is not None and step >= plan["stop_after"] and "deaf" not in options:
        write("end", step=step, reason="agreed step", cleaned=[])
        os._exit(0)
    if step == 40 and "short" in options:
        break
write("end", step=step, reason="exit", cleaned=[])
"""
LAUNCHER = """
import subprocess, sys

world_size = int(sys.argv[1])
ranks = [subprocess.Popen([sys.executable, "rank.py", str(rank), sys.argv[1], *sys.argv[2:]])
         for rank in range(world_size)]
codes = [rank.wait() for rank in ranks]
print("launched", codes, flush=True)
if "stays" in sys.argv:
    while True:
        sys.stdin.read(1)
        import time
        time.sleep(1)
sys.exit(max(codes))
"""


def scripted_ranks(folder: Path, ranks: int, *options: str) -> list[str]:
    """Writes the two programs into a folder, and returns the command that starts ranks there.

    Args:
        folder: the current folder of the command.
        ranks: number of ranks.
        options: "short", "brief": a rank ends by itself after 40 or 400 steps of 10 ms, not 1000. "deaf": it follows
            neither the plan nor SIGTERM. "stays": the launcher lives on when its ranks have ended.
    """
    (folder / "rank.py").write_text(RANK)
    (folder / "launcher.py").write_text(LAUNCHER)
    return [sys.executable, "launcher.py", str(ranks), *options]


def python(code: str) -> list[str]:
    """Returns the command that runs a line of Python."""
    return [sys.executable, "-c", code]
