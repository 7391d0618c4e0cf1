"""What gloo sends for a collective, by the counters of the network interface, beside what a ring would.

    python benchmarks/gloo_bytes.py

Each number of ranks runs in a network namespace of its own (`unshare -rn`, no root), where nobody else sends. Prints
the table of docs/traffic.md: bytes sent by all ranks together, as a share of the tensor's size S. What the two barriers
around a collective send is subtracted.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

ELEMENTS = 1_200_000
"""Of fp32: 4.8 MB, which divides over 2 and 3 ranks."""
REPEATS = 5
WORLDS = (2, 3)
RING: dict[str, Callable[[int], int]] = {
    "all_reduce": lambda n: 2 * (n - 1),
    "reduce_scatter": lambda n: n - 1,
    "all_gather": lambda n: n - 1,
    "broadcast": lambda n: n - 1,
    "all_to_all": lambda n: n - 1,
    "reduce": lambda n: n - 1,
}
"""What a ring sends, in S."""


def main() -> None:
    """Runs this file again in each namespace, and prints what came of it."""
    unshare = shutil.which("unshare")
    if unshare is None:
        sys.exit("gloo_bytes: needs unshare (util-linux)")
    found = {}
    for ranks in WORLDS:
        answer = subprocess.run(
            [unshare, "-rn", sys.executable, __file__, str(ranks)], capture_output=True, text=True, check=False
        )
        if answer.returncode:
            sys.exit(answer.stderr)
        found[ranks] = dict(line.split() for line in answer.stdout.splitlines())
    print("| operation |" + "".join(f" {ranks} ranks | a ring says |" for ranks in WORLDS))
    print("| --- |" + " --- | --- |" * len(WORLDS))
    for name, ring in RING.items():
        cells = "".join(f" {found[ranks][name]} S | {ring(ranks)} S |" for ranks in WORLDS)
        print(f"| {name} |{cells}")


def in_namespace(ranks: int) -> None:
    """Brings its loopback up and starts the ranks."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        # SIOCSIFFLAGS with IFF_UP | IFF_RUNNING, of linux/sockios.h and linux/if.h.
        fcntl.ioctl(handle, 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x40))
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, __file__, "rank"], env=os.environ | own | {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
        )
        for rank in range(ranks)
    ]
    sys.exit(max(process.wait() for process in started))


def sent_bytes() -> int:
    """By the loopback interface of this namespace."""
    lines = Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.strip().startswith("lo:")).split()[9])


def one_rank() -> None:
    """Takes part in every collective; rank 0 counts and prints."""
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    whole, part = torch.ones(ELEMENTS), torch.ones(ELEMENTS // ranks)
    calls: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
        "reduce": lambda: dist.reduce(whole, 0),
    }
    barriers = 0.0
    for name, call in calls.items():
        call()
        dist.barrier()
        before = sent_bytes()
        for _ in range(REPEATS):
            dist.barrier()
            call()
            dist.barrier()
        sent = (sent_bytes() - before) / REPEATS
        dist.barrier()
        barriers = sent if name == "nothing" else barriers
        if dist.get_rank() == 0 and name != "nothing":
            print(name, f"{(sent - barriers) / whole.nbytes:.3f}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    elif sys.argv[1] == "rank":
        one_rank()
    else:
        in_namespace(int(sys.argv[1]))
