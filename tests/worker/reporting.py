"""A model that writes down what the process of its rank is like, as far as the process can see it itself."""

import ctypes
import dataclasses
import json
import os
import random
import signal
import sys
from pathlib import Path

import numpy
import torch
from threadpoolctl import threadpool_info
from torch import nn

from vitscale.base.resident_memory import resident_memory

IMPORTED_BY = os.getpid()


def _death_signal() -> int:
    number = ctypes.c_int(0)
    ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0)
    return number.value


def build(num_classes: int, image_size: int) -> nn.Module:
    pools = {pool["user_api"] + Path(pool["filepath"]).name: pool["num_threads"] for pool in threadpool_info()}
    report = {
        "argv": sys.argv,
        "cwd": str(Path.cwd()),
        "path": sys.path,
        "environment": dict(os.environ),
        "initial_environment": Path("/proc/self/environ").read_bytes().decode(),
        "name": Path("/proc/self/comm").read_text().strip(),
        "threads": torch.get_num_threads(),
        "interop": torch.get_num_interop_threads(),
        "pools": pools,
        "cores": sorted(os.sched_getaffinity(0)),
        "handlers": {name: str(signal.getsignal(name)).split(" at ")[0] for name in signal.Signals},
        "death_signal": _death_signal(),
        "parent": os.getppid(),
        "session": os.getsid(0),
        "imported_here": os.getpid() == IMPORTED_BY,
        "files": sorted(str(Path(f"/proc/self/fd/{n}").readlink()) for n in (0, 1, 2)),
        "memory": dataclasses.asdict(resident_memory()),
        "draws": [random.random(), float(numpy.random.rand()), int(numpy.random.default_rng().integers(1 << 62))],
        "hash": hash("of this process"),
        "torch_draw": float(torch.rand(1)),
    }
    print(f"rank {os.environ.get('RANK', '0')} prints")
    Path(os.environ["REPORTS"], f"{os.environ.get('RANK', '0')}-{os.getpid()}.json").write_text(json.dumps(report))
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * image_size * image_size, num_classes))
