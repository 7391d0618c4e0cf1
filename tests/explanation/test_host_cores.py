"""Cores of a host, where launchers bind ranks and where they do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hooked_factory import SimulatedJob
from vitscale.explanation.answer import explain_ranks
from vitscale.explanation.host_cores import HostCores, host_cores
from vitscale.explanation.rank_record import HookedRank


def ranks(masks: list[str | None], **fields: Any) -> list[HookedRank]:
    """One record for each mask, all on host h; `fields` are of each rank's line."""
    records = SimulatedJob(ranks=len(masks)).records()
    lines = [
        replace(record.rank, host="h", core_mask=mask, **fields) for record, mask in zip(records, masks, strict=True)
    ]
    return [replace(record, rank=line) for record, line in zip(records, lines, strict=True)]


@pytest.mark.parametrize(
    ("masks", "fields", "expected"),
    [
        (["ff", "ff00"], {"cpus": 8, "local_world_size": 2}, HostCores(16, 2)),  # srun --cpu-bind: 8 cores each
        (["ffff", "ffff"], {"cpus": 16, "local_world_size": 1}, HostCores(16, 2)),  # mpirun states no local ranks
        ([None, None], {"cpus": 16, "local_world_size": 2}, HostCores(16, 2)),
        (["ffff", "no mask"], {"cpus": 12, "local_world_size": 2}, HostCores(12, 2)),
        (["ff"], {"cpus": 8, "local_world_size": 4}, HostCores(8, 4)),  # three ranks left no record
    ],
)
def test_cores_are_those_of_all_ranks(masks: list[str | None], fields: dict[str, int], expected: HostCores) -> None:
    assert host_cores(ranks(masks, **fields), "h") == expected


def test_bound_ranks_do_not_take_turns() -> None:
    """Four ranks with 8 threads and 8 cores each: 32 threads on 32 cores."""
    bound = ranks(["ff", "ff00", "ff0000", "ff000000"], cpus=8, threads=8, local_world_size=4)
    assert "too-many-threads" not in {cause.kind for cause in explain_ranks(bound).causes}
    sharing = ranks(["ff"] * 4, cpus=8, threads=8, local_world_size=4)
    assert "too-many-threads" in {cause.kind for cause in explain_ranks(sharing).causes}
