"""NCCL's own log of one rank: which network and adapters it took, and by which way it reaches each other rank.

NCCL writes such lines while it makes its first communicators (src/transport/net.cc, p2p.cc, shm.cc, graph/topo.cc):

    host:211:305 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ib0:10.0.0.1<0>
    host:211:305 [0] NCCL INFO Using network IB
    host:211:305 [0] NCCL INFO NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'
    host:211:305 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA
    host:211:305 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
    host:211:305 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

from vitscale.store.checks import NcclLine

_MOST_BYTES = 16 << 20
"""Bytes of a log that are read; on a thousand ranks one has some hundred kilobytes."""
_MOST_PROBLEMS = 4
_LEVELS_OF_LESS = ("", "VERSION", "WARN")
"""Values of NCCL_DEBUG that log less than INFO does."""
_SUBSYSTEMS = "INIT,NET,GRAPH"

_NETWORK = re.compile(r"NCCL INFO Using network (?P<name>.+)$")
_USABLE = re.compile(r"NCCL INFO NET/IB : Using (?P<list>.*?); OOB")
_ADAPTER = re.compile(r"\[(?P<index>\d+)\] ?(?P<name>[^\s\[\]{},:/]+):(?P<port>\d+)[^\s\[\]{},/]*/")
_GPU_DIRECT = re.compile(r"GPU Direct RDMA (?P<state>Enabled|Disabled) for HCA (?P<index>\d+) '(?P<name>[^']*)'")
_BY_NETWORK = re.compile(r" \[(?:send|receive)\] via NET/.+?/(?P<index>\d+)(?:\(\d+\))?(?P<gpu_direct>/GDRDMA)?")
_INSIDE_HOST = re.compile(r"NCCL INFO Channel [\d/]+ : \d+\[\w+\] -> \d+\[\w+\] via (?P<transport>P2P|SHM)")
_PEER_ACCESS_OFF = re.compile(r"NCCL (?:INFO|WARN) (?P<text>P2P is disabled between .*?GPUs \d+ and \d+)")


def begin(folder: Path, rank: int) -> Path | None:
    """Lets the NCCL of this process log into a file of the folder, and returns the file.

    It has to be called before NCCL makes its first communicator. A user who has set NCCL_DEBUG=INFO or NCCL_DEBUG_FILE
    keeps his log; then nothing is changed, and None is returned.
    """
    is_users_own = os.environ.get("NCCL_DEBUG", "").upper() not in _LEVELS_OF_LESS or "NCCL_DEBUG_FILE" in os.environ
    if is_users_own:
        return None
    path = folder / f"nccl-{rank}.log"
    if "%" in str(path):  # NCCL would replace %h and %p
        return None
    os.environ["NCCL_DEBUG"] = "INFO"
    os.environ["NCCL_DEBUG_SUBSYS"] = _SUBSYSTEMS
    os.environ["NCCL_DEBUG_FILE"] = str(path)
    return path


def read(path: Path) -> NcclLine | None:
    """Returns what a log says; None where it cannot be read, or says nothing of networks and channels."""
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
    return parse(text)


def parse(text: str) -> NcclLine | None:
    """Returns what the lines of a log say; None where they say nothing of networks and channels."""
    network: str | None = None
    name_by_index: dict[int, str] = {}
    usable: dict[str, None] = {}
    without_gpu_direct: dict[str, None] = {}
    used_indices: set[int] = set()
    channels: Counter[str] = Counter()
    problems: dict[str, None] = {}
    for line in text.splitlines():
        if match := _NETWORK.search(line):
            network = match["name"].strip()
        elif match := _USABLE.search(line):
            for adapter in _ADAPTER.finditer(match["list"]):
                usable[f"{adapter['name']}:{adapter['port']}"] = None
                name_by_index.setdefault(int(adapter["index"]), adapter["name"])
        elif match := _GPU_DIRECT.search(line):
            name_by_index[int(match["index"])] = match["name"]
            if match["state"] == "Disabled":
                without_gpu_direct[match["name"]] = None
        elif match := _BY_NETWORK.search(line):
            used_indices.add(int(match["index"]))
            channels["NET/GDRDMA" if match["gpu_direct"] else "NET"] += 1
        elif match := _INSIDE_HOST.search(line):
            channels[match["transport"]] += 1
        elif match := _PEER_ACCESS_OFF.search(line):
            problems[match["text"]] = None
    if network is None and not channels:
        return None
    names_in_use = [name_by_index.get(index, f"adapter {index}") for index in sorted(used_indices)]
    return NcclLine(
        network=network,
        adapters=tuple(usable) or tuple(name_by_index.values()),
        adapters_in_use=tuple(names_in_use),
        adapters_without_gpu_direct=tuple(without_gpu_direct),
        channels=dict(channels),
        problems=tuple(problems)[:_MOST_PROBLEMS],
    )
