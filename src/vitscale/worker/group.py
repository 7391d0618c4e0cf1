"""Joins the ranks of one run to a process group, and does what they do together outside of steps."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore  # where torch's stubs declare it
from torch.distributed import distributed_c10d

from vitscale.probes.traffic import size_ring
from vitscale.worker.rank_process import RankInfo

_PATIENCE_SECONDS = 10.0
"""Longest wait for rank 0 to listen."""
_AFTER_WATCHER_SECONDS = 60.0
"""Time from the end of a watcher's patience to the end of a collective: the watcher looks at stacks, and ends all."""
_LONGEST_TIMEOUT_SECONDS = 30 * 86_400.0
"""Longest limit of collectives, which backends count in milliseconds."""


_LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
"""Variables by which libraries choose their device; DeepSpeed refuses values of the two that differ."""


def device_of(kind: str, rank: RankInfo) -> torch.device:
    """Returns this rank's device; a GPU becomes the one that torch, DeepSpeed and Accelerate use in this process.

    Where a rank sees its own GPU alone, or ranks share one, that is another number than the rank's on its host.

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
    _name_for_libraries(device)
    return device


def _name_for_libraries(device: torch.device) -> None:
    """Sets the variables by which DeepSpeed and Accelerate choose a GPU, where a launcher has set them, to `device`'s.

    DeepSpeed 0.19 takes LOCAL_RANK for the number of a device: in its engine (`_set_distributed_vars`, which alone
    heeds `args.device_rank`), when ZeRO-3 cuts up parameters (zero/partition_parameters.py), and at the end of the
    first step (zero/utils.py); so does Accelerate 1.15 with DDP (`prepare_model`) and in barriers. Hence the variables
    stay like this until the process ends. Which rank this is has been read from them before.
    """
    for name in _LOCAL_RANK_VARIABLES:
        if name in os.environ:
            os.environ[name] = str(device.index)


def join(
    rank: RankInfo,
    device: torch.device,
    *,
    alone: bool = False,
    gradients_on_host: bool = False,
    silence_seconds: float | None = None,
) -> str | None:
    """Joins the group of all ranks and returns the backend of its devices; None where a rank trains alone.

    Args:
        rank: which rank this is.
        device: the device of this rank.
        alone: whether there is to be no process group, as for an engine that trains on one rank (`EngineFacts.alone`).
        gradients_on_host: whether ranks of GPUs exchange gradients on the host. See `backends`.
        silence_seconds: how long whoever watches the ranks waits for a sign of any; None: nobody watches.
    """
    if alone:
        return None
    size_ring()
    device_backend = "nccl" if device.type == "cuda" else "gloo"
    device_id = device if device_backend == "nccl" else None
    backend = backends(device.type, gradients_on_host=gradients_on_host)
    timeout = None if silence_seconds is None else _limit_collectives(silence_seconds)
    if "MASTER_ADDR" in os.environ:
        if rank.rank != 0:
            _await_rank_0(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    else:
        # One rank without a launcher meets nobody, so no port is opened. DeepSpeed insists on the variable.
        os.environ.setdefault("LOCAL_RANK", str(rank.local_rank))
        dist.init_process_group(backend, timeout=timeout, store=HashStore(), rank=0, world_size=1, device_id=device_id)
    return device_backend


def _limit_collectives(silence_seconds: float) -> timedelta:
    """Sets how long collectives may take in groups made from now on, and returns it.

    It is more than a watcher's patience, who then says which rank the others wait for. At NCCL's own limit of ten
    minutes a rank would be ended by SIGABRT instead, and a long compilation on one rank would end the others.
    """
    seconds = min(silence_seconds + _AFTER_WATCHER_SECONDS, _LONGEST_TIMEOUT_SECONDS)
    timeout = timedelta(seconds=seconds)
    # Engines make groups of their own without a word of time, and torch takes its default for each: not the world's.
    vars(distributed_c10d).update(default_pg_timeout=timeout, default_pg_nccl_timeout=timeout)
    return timeout


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


def meet_on_host(name: str, seconds: float) -> bool:
    """Waits for all ranks at a point with this name, `seconds` at most; returns whether all came.

    Ranks meet in the store of their group: no device takes part, as in `barrier`, which hangs with a device that does.
    """
    store = distributed_c10d._get_default_store()
    everyone = f"vitscale/{name}/everyone"
    try:
        if store.add(f"vitscale/{name}", 1) == dist.get_world_size():
            store.set(everyone, "here")
        store.wait([everyone], timedelta(seconds=seconds))
    except dist.DistError:
        return False
    return True


def total(values: Tensor) -> Tensor:
    """Sums `values` (any shape) over all ranks, in place, and returns them."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values
