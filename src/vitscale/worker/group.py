"""Joins the ranks of one run to a process group, and does what they do together outside of steps."""

from __future__ import annotations

import os
import socket
import time

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore  # where torch's stubs declare it

from vitscale.probes.traffic import size_ring
from vitscale.worker.rank_process import RankInfo

_PATIENCE_SECONDS = 10.0
"""Longest wait for rank 0 to listen."""


def device_of(kind: str, rank: RankInfo) -> torch.device:
    """Returns this rank's device; a GPU becomes the one that torch uses by default in this thread.

    Args:
        kind: "cpu" or "cuda".
        rank: which rank this is.

    Raises:
        RuntimeError: it is to be a GPU, and torch sees none.
    """
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise RuntimeError(
            "this trial computes on GPUs, and torch sees none on this host: CUDA_VISIBLE_DEVICES is "
            f"{os.environ.get('CUDA_VISIBLE_DEVICES')!r}, and torch {torch.__version__} is built for CUDA "
            f"{torch.version.cuda}. Install torch for CUDA and see to the driver, or set train.device = 'cpu'"
        )
    device = torch.device("cuda", rank.local_rank % count)
    torch.cuda.set_device(device)
    return device


def join(rank: RankInfo, device: torch.device, *, alone: bool = False, gradients_on_host: bool = False) -> str | None:
    """Joins the group of all ranks and returns the backend of its devices; None where a rank trains alone.

    Args:
        rank: which rank this is.
        device: the device of this rank.
        alone: whether there is to be no process group, as for an engine that trains on one rank (`EngineFacts.alone`).
        gradients_on_host: whether ranks of GPUs exchange gradients on the host. See `backends`.
    """
    if alone:
        return None
    size_ring()
    device_backend = "nccl" if device.type == "cuda" else "gloo"
    device_id = device if device_backend == "nccl" else None
    backend = backends(device.type, gradients_on_host=gradients_on_host)
    if "MASTER_ADDR" in os.environ:
        if rank.rank != 0:
            _await_rank_0(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        dist.init_process_group(backend, device_id=device_id)
    else:
        # One rank without a launcher meets nobody, so no port is opened. DeepSpeed insists on the variable.
        os.environ.setdefault("LOCAL_RANK", str(rank.local_rank))
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, device_id=device_id)
    return device_backend


def _await_rank_0(address: str, port: int) -> None:
    """Waits until rank 0 listens, for `_PATIENCE_SECONDS` at most. Then torch connects at its first try.

    torch itself would pause after a refusal, for a random 0.25 to 0.75 s. Errors other than a refusal are left to it,
    and so is a rank 0 that does not listen in time.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            socket.create_connection((address, port), timeout=1).close()
        except ConnectionRefusedError:
            time.sleep(0.005)
        except OSError:
            return
        else:
            return


def backends(device: str, *, gradients_on_host: bool) -> str:
    """Returns the backends of the group of all ranks, as `init_process_group` takes them; the device's stands last.

    Gradients that FSDP2 keeps on the host are exchanged there when their norm is taken, which NCCL cannot do. Only then
    is gloo there too: it must find an interface between the hosts, and that may fail where NCCL's own is well.
    """
    if device == "cpu":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if gradients_on_host else "nccl"


def barrier() -> None:
    """Waits for all ranks; does nothing without a process group."""
    if dist.is_initialized():
        dist.barrier()


def total(values: Tensor) -> Tensor:
    """Sums `values` (any shape) over all ranks, in place, and returns them."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values
