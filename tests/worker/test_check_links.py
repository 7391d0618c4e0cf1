"""What a rank of a check records of its links and of NCCL's log, with the GPU, its driver and NCCL played."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch

from check_factory import request, sweep
from fake_nvml import UUID, FakeLinks, FakeNvml, installed
from vitscale.store import RankLog
from vitscale.store.checks import CollectiveLine, NcclLine
from vitscale.store.lines import RankLine
from vitscale.worker import check_stages, group
from vitscale.worker.check_stages import _Measurements
from vitscale.worker.rank_process import RankInfo

pytestmark = pytest.mark.computing

LOG = """\
node0:7:7 [0] NCCL INFO Using network IB
node0:7:7 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA
"""
VARIABLES = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")


class SweepFailed(Exception):
    """A collective that ends in an error."""


class Lines:
    """Takes the place of a rank's log."""

    def __init__(self) -> None:
        self.written: list[RankLine] = []

    def write(self, line: RankLine) -> None:
        self.written.append(line)


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def measurements(lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Measurements]:
    """Rank 0 of two on a GPU, whose NCCL writes its log when it joins."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def join(*_: object, **__: object) -> None:
        Path(os.environ["NCCL_DEBUG_FILE"]).write_text(LOG)

    monkeypatch.setattr(group, "join", join)
    monkeypatch.setattr(group, "barrier", lambda: None)
    monkeypatch.setattr(check_stages, "gpu_uuid", lambda _: UUID)
    rank = RankInfo(rank=0, world_size=2, local_rank=0, launch_seconds=None)
    yield _Measurements(request(), rank, cast(RankLog, lines), tmp_path, torch.device("cuda", 0))
    for name in VARIABLES:
        os.environ.pop(name, None)


@pytest.mark.parametrize("fails", [False, True])
def test_what_nccl_logged_is_recorded_even_where_a_collective_fails(
    fails: bool, measurements: _Measurements, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sweep_groups(*_: object) -> Iterator[CollectiveLine]:
        yield from sweep("all ranks", "all_reduce", 2, 1e-5, 1e9)[:1]
        if fails:
            raise SweepFailed

    monkeypatch.setattr(check_stages, "sweep_groups", sweep_groups)
    measurements.join()
    try:
        measurements.sweep_collectives()
    except SweepFailed:
        assert fails
    logged = lines.written[-1]
    assert isinstance(logged, NcclLine)
    assert (logged.network, logged.channels) == ("IB", {"NET/GDRDMA": 1})


def test_links_of_the_gpu(measurements: _Measurements, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml()
    fake.links = FakeLinks(states=(1,) * 18)
    installed(fake, monkeypatch)
    links = measurements._gpu_links()
    assert links is not None
    assert (links.nvlinks_up, links.nvlink_generation, links.peers) == (18, 4, {"0000:1b:00.0": "ok"})
