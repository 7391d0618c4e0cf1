"""The process group of the ranks: what carries the tensors of devices, and of the host."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from vitscale.worker import group
from vitscale.worker.rank_process import RankInfo

PLACE = RankInfo(rank=0, world_size=2, local_rank=0, launch_seconds=None)


@pytest.fixture(autouse=True)
def no_group_left() -> Iterator[None]:
    limits = {name: getattr(distributed_c10d, name) for name in ("default_pg_timeout", "default_pg_nccl_timeout")}
    yield
    vars(distributed_c10d).update(limits)
    if dist.is_initialized():
        dist.destroy_process_group()


def clip_on_the_host(backend: str) -> float:
    """The norm before clipping of a gradient that FSDP2 has left on the host of two GPUs' ranks.

    torch's fake backend stands for NCCL and gloo: what is tried is which devices the group serves. It adds nothing up.
    """
    dist.init_process_group(backend, store=FakeStore(), rank=0, world_size=2)
    shard = DTensor.from_local(torch.ones(3, 4), init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False)
    weight = nn.Parameter(shard)
    weight.grad = shard
    norm = nn.utils.clip_grad_norm_([weight], 1.0)
    assert isinstance(norm, DTensor)
    return float(norm.full_tensor())


def faked(backend: str) -> str:
    """`backend` with the fake one in every place; a lone NCCL serves CUDA alone."""
    if backend == "nccl":
        return "cuda:fake"
    return backend.replace("gloo", "fake").replace("nccl", "fake")


def test_a_group_of_gpus_alone_cannot_clip_gradients_on_the_host() -> None:
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        clip_on_the_host(faked(group.backends("cuda", gradients_on_host=False)))


def test_gradients_on_the_host_have_a_backend_there() -> None:
    assert clip_on_the_host(faked(group.backends("cuda", gradients_on_host=True))) == pytest.approx(12**0.5)


@pytest.mark.parametrize(
    ("device", "on_host", "asked", "told"),
    [
        ("cpu", False, "gloo", "gloo"),
        ("cpu", True, "gloo", "gloo"),
        ("cuda", False, "nccl", "nccl"),
        ("cuda", True, "cpu:gloo,cuda:nccl", "nccl"),
    ],
)
def test_what_is_told_is_the_backend_of_the_devices(
    monkeypatch: pytest.MonkeyPatch, device: str, on_host: bool, asked: str, told: str
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: calls.append(backend))
    assert group.join(PLACE, torch.device(device), gradients_on_host=on_host) == told
    assert calls == [asked]


def test_a_group_waits_longer_than_who_watches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[timedelta | None] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, timeout, **__: limits.append(timeout))
    for silence_seconds in (None, 1800.0, 1e300):
        group.join(PLACE, torch.device("cuda", 0), silence_seconds=silence_seconds)
    assert limits == [None, timedelta(seconds=1860), timedelta(days=30)]


def test_groups_that_engines_make_have_the_same_limit() -> None:
    alone = RankInfo(rank=0, world_size=1, local_rank=0, launch_seconds=None)
    group.join(alone, torch.device("cpu"), silence_seconds=1000.0)
    for own in (dist.group.WORLD, dist.new_group([0])):
        options = own._get_backend(torch.device("cpu")).options  # type: ignore[union-attr]
        assert options._timeout == timedelta(seconds=1060)


def test_ranks_meet_on_the_host_or_say_that_not_all_came(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    assert not group.meet_on_host("matmul", 0.01)
    assert group.meet_on_host("matmul", 0.01), "the second to come finds the first"
    assert not group.meet_on_host("compute", 0.01)


@pytest.mark.parametrize(("visible", "number"), [(1, 0), (2, 1), (4, 3)])
def test_libraries_take_the_device_that_a_rank_was_given(
    monkeypatch: pytest.MonkeyPatch, visible: int, number: int
) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.delenv("OMPI_COMM_WORLD_LOCAL_RANK", raising=False)
    rank = RankInfo(rank=7, world_size=8, local_rank=3, launch_seconds=None)
    assert group.device_of("cuda", rank) == chosen[0] == torch.device("cuda", number)
    assert os.environ["LOCAL_RANK"] == str(number)
    assert "OMPI_COMM_WORLD_LOCAL_RANK" not in os.environ
    # Under Open MPI DeepSpeed refuses to begin where the two differ.
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "3")
    group.device_of("cuda", rank)
    assert os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] == str(number)
    group.device_of("cpu", rank)


def test_a_gpu_that_torch_does_not_see_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(RuntimeError, match=r"torch sees none on this host: CUDA_VISIBLE_DEVICES is '7'"):
        group.device_of("cuda", PLACE)


def test_a_rank_meets_rank_0_when_that_listens_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch pauses for half a second, drawn at random, where rank 0 is a moment later."""
    events: list[str] = []
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))

    def refused(seconds: float) -> None:
        events.append("refused")
        if len(events) == 3:
            listening.listen()

    monkeypatch.setattr(time, "sleep", refused)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: events.append("meets"))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(listening.getsockname()[1]))
    with listening:
        group.join(RankInfo(rank=1, world_size=2, local_rank=1, launch_seconds=None), torch.device("cpu"))
        group.join(PLACE, torch.device("cpu"))

    assert events == ["refused"] * 3 + ["meets", "meets"]


@pytest.mark.parametrize("why", [TimeoutError("silent"), OSError("no route to host")])
def test_a_rank_0_that_cannot_be_reached_is_torchs_to_tell(monkeypatch: pytest.MonkeyPatch, why: OSError) -> None:
    def fails(*_: object, **__: object) -> socket.socket:
        raise why

    met: list[str] = []
    monkeypatch.setattr(socket, "create_connection", fails)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: met.append(backend))
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    monkeypatch.setenv("MASTER_PORT", "1")

    group.join(RankInfo(rank=1, world_size=2, local_rank=0, launch_seconds=None), torch.device("cpu"))

    assert met == ["gloo"]
