"""Checks made by hand: whatever a test does not name is as it should be."""

from __future__ import annotations

from typing import Any

from vitscale.store.checks import (
    STAGES,
    CheckedRank,
    CheckGroup,
    CheckRecord,
    CheckRequest,
    CollectiveLine,
    ComputeLine,
    DiskLine,
    FactsLine,
    Interface,
    Operation,
    StageLine,
    SweepPlan,
    bus_factor,
)
from vitscale.store.records import DeviceRecord, Environment, MatmulLine
from vitscale.trial.model_spec import ModelSpec
from vitscale.trial.trial import DataSpec, TrainSpec, Trial, WindowSpec, World

WORK = "a piece of work"


def interface(name: str, address: str, speed_mbit: int | None = 1000, **fields: Any) -> Interface:
    """One that works."""
    kind = "loopback" if name == "lo" else "infiniband" if name.startswith("ib") else "ethernet"
    return Interface.model_validate(
        {"name": name, "kind": kind, "up": True, "speed_mbit": speed_mbit, "addresses": (address,)} | fields
    )


def facts(rank: int = 0, ranks: int = 2, host: str | None = None, **fields: Any) -> FactsLine:
    """Each rank on a host of its own; fields of the environment and of the device may be given by name."""
    host = host if host is not None else f"host{rank}"
    device = {"type": "cuda", "name": "NVIDIA A100", "memory_bytes": 40 * 2**30, "driver": "550.1"}
    environment = {
        "host": host, "cores_allowed": (0,), "threads": 1, "cpu_quota_cores": None, "versions": {"torch": "2.13.0"},
        "backend": "gloo", "settings": {}, "git_revision": None,
    }  # fmt: skip
    line = {
        "rank": rank, "world_size": ranks, "local_rank": 0, "host_cores": 8, "cpu_throttled_seconds": None,
        "hostname_addresses": (f"10.0.0.{rank + 1}",), "infiniband": (),
        "interfaces": (interface("lo", "127.0.0.1/8", None), interface("eth0", f"10.0.0.{rank + 1}/24")),
    }  # fmt: skip
    for name, value in fields.items():
        owner = (
            environment if name in Environment.model_fields else device if name in DeviceRecord.model_fields else line
        )
        owner[name] = value
    return FactsLine.model_validate(line | {"environment": environment | {"device": device}})


def sweep(
    group: CheckGroup,
    operation: Operation,
    ranks: int,
    latency: float,
    bandwidth: float,
    sizes: tuple[int, ...] | None = None,
) -> tuple[CollectiveLine, ...]:
    """What one rank measures of a link that is exactly so."""
    return tuple(
        CollectiveLine(
            group=group,
            operation=operation,
            ranks=ranks,
            size_bytes=size,
            calls=1,
            seconds=(latency + bus_factor(operation, ranks) * size / bandwidth,) * 3,
        )
        for size in sizes or tuple(1024 * 4**power for power in range(9))
    )


def compute(*pieces_per_second: float, **fields: Any) -> ComputeLine:
    """The pace of one rank."""
    line = {"work": WORK, "pieces_per_second": pieces_per_second, "cpu_throttled_share": None, "gpu": None}
    return ComputeLine.model_validate(line | {"gpu_reason": "no GPU"} | fields)


def checked(rank: int = 0, ranks: int = 2, pace: float = 100.0, **fields: Any) -> CheckedRank:
    """One rank that measured everything; fields of it and of its facts may be given by name."""
    own = {name: value for name, value in fields.items() if name in CheckedRank.model_fields}
    of_facts = {name: value for name, value in fields.items() if name not in CheckedRank.model_fields}
    line = {
        "rank": rank,
        "facts": facts(rank, ranks, **of_facts),
        "matmul": MatmulLine(dtype="fp32", size=1024, flops_per_second=1e9 * pace),
        "compute": compute(pace, pace, pace),
        "disk": DiskLine(
            free_bytes=10**12, record_seconds=(0.001, 0.001), record_bytes=300, seen_seconds=0.01, seen_reason=""
        ),
        "stages": tuple(StageLine(name=name, ending="done", seconds=1.0) for name in STAGES),
        "ended": True,
    }
    return CheckedRank.model_validate(line | own)


def request(ranks: int = 2, **fields: Any) -> CheckRequest:
    """Of a rank on each host."""
    content = {
        "world": World(nodes=ranks, ranks_per_node=1, threads_per_rank=1), "device": "cpu", "precision": "fp32",
        "sweep": SweepPlan(sizes_bytes=(1024, 4096), longest_seconds=2.0, seconds_per_size=0.1),
        "compute_repeats": 3, "compute_seconds": 0.1, "loader_seconds": 0.1, "limits": dict.fromkeys(STAGES, 60.0),
    }  # fmt: skip
    return CheckRequest.model_validate(content | fields)


def record(*ranks: CheckedRank, **fields: Any) -> CheckRecord:
    """A whole check of these ranks."""
    content = {
        "id": "20260102T030405-abcdef", "started_unix_seconds": 1.7e9, "wall_seconds": 60.0,
        "request": fields.pop("request", None) or request(max(1, len(ranks))), "launcher": "torchrun",
        "scheduler": "Hostfile", "hosts": (), "ranks": ranks, "fits": (), "loader_need": None, "ending": "ended",
    }  # fmt: skip
    return CheckRecord.model_validate(content | fields)


def trial(workers: int = 0) -> Trial:
    """Of a study that is given."""
    return Trial(
        model=ModelSpec(name="vit-b16"),
        data=DataSpec(name="digits", workers=workers),
        train=TrainSpec(engine="ddp", precision="fp32", device="cpu", micro_batch=32),
        world=World(ranks_per_node=2, threads_per_rank=1),
        window=WindowSpec(steps=10),
        launcher="torchrun",
    )
