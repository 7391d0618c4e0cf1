"""Exposed communication three ways: ours, `no_sync` differencing, and DDP's own logger. Start it on two ranks:

    torchrun --standalone --nproc-per-node=2 benchmarks/exposed_communication.py

or with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME set by hand on two hosts. Rank 0 prints one
line per bucket size. Why they differ stands in docs/where-the-time-goes.md.
"""

from __future__ import annotations

import os
import statistics
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from vitscale import models
from vitscale.analysis.time.exposure import exposures
from vitscale.base.time_spans import length
from vitscale.models import logits_of
from vitscale.probes.steps import Explainer
from vitscale.store.records import ExplainedLine
from vitscale.trial.model_spec import ModelSpec, resolve

STEPS, WARMUP = 8, 3
CPU = torch.device("cpu")


def step(ddp: DistributedDataParallel, images: torch.Tensor, labels: torch.Tensor, explainer: Explainer | None = None,
         number: int = 0, sync: bool = True) -> float:  # fmt: skip
    began = time.perf_counter()
    around = explainer.step(number) if explainer else nullcontext()
    with around, nullcontext() if sync else ddp.no_sync():
        loss = torch.nn.functional.cross_entropy(logits_of(ddp(images)), labels)
        with explainer.phase("backward") if explainer else nullcontext():
            loss.backward()
    ddp.zero_grad()
    return time.perf_counter() - began


def ours(ddp: DistributedDataParallel, images: torch.Tensor, labels: torch.Tensor) -> tuple[float, float, float]:
    """Mean seconds a step of exposed wait, exposed wire and both, on rank 0."""
    explainer, found = Explainer(CPU, dist.get_world_size()), []
    for number in range(STEPS):
        explainer.begin_block()
        step(ddp, images, labels, explainer, number)
        (line,) = explainer.end_block(dist.get_rank())
        texts: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(texts, line.model_dump_json())
        lines = [(rank, ExplainedLine.model_validate_json(text)) for rank, text in enumerate(texts)]
        found.append(exposures(lines)[0])
        dist.barrier()
    wait, wire, both = (
        statistics.fmean(length(getattr(one, name) or ()) for one in found) for name in ("wait", "wire", "exposed")
    )
    return wait, wire, both


def compare(bucket_mib: int) -> str:
    torch.manual_seed(0)
    model = models.build(resolve(ModelSpec(name="vit-ti16", image_size=32, patch_size=8, layers=6), 10))
    ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_mib)
    ddp._set_ddp_runtime_logging_sample_rate(1)
    images, labels = torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))
    for _ in range(WARMUP):
        step(ddp, images, labels)
    wait, wire, both = ours(ddp, images, labels)
    with_sync, without = [], []
    for _ in range(STEPS):
        dist.barrier()
        with_sync.append(step(ddp, images, labels))
        dist.barrier()
        without.append(step(ddp, images, labels, sync=False))
    differenced = statistics.fmean(with_sync) - statistics.fmean(without)
    logged = ddp._get_ddp_logging_data()
    communicating, overlapped = (
        logged.get(f"avg_backward_{name}_time", 0) / 1e9 for name in ("comm", "compute_comm_overlap")
    )
    return (
        f"buckets of {bucket_mib} MiB: ours {both * 1e3:.0f} ms (wait {wait * 1e3:.0f}, wire {wire * 1e3:.0f}); "
        f"no_sync differencing {differenced * 1e3:.0f} ms; DDP's logger {(communicating - overlapped) * 1e3:.0f} ms "
        f"(communication {communicating * 1e3:.0f}, of it overlapped {overlapped * 1e3:.0f})"
    )


def main() -> None:
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ.get("LOCAL_RANK", "0")) % len(cores)]})
    dist.init_process_group("gloo")
    for bucket_mib in (1, 4, 64):
        answer = compare(bucket_mib)
        if dist.get_rank() == 0:
            print(answer, flush=True)
    dist.barrier()
    os._exit(0)  # a finished gloo rank under DDP may hang in the interpreter's shutdown


if __name__ == "__main__":
    main()
