"""Whatever ranks have recorded, if it can be read, is fitted, judged, printed and told as JSON without a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from check_factory import WORK, record, request
from vitscale.preflight.fit import fits
from vitscale.preflight.judging import check_document, check_fields, judged
from vitscale.present.data import envelope
from vitscale.present.terminal import lines
from vitscale.store.checks import GROUPS, OPERATIONS, STAGES, CheckedRank, FactsLine, StageLine
from vitscale.trial.trial import World

ANY_SECONDS = st.sampled_from([0.0, 1e-300, 5e-324, 1e-9, 1.0, 1e9]) | st.floats(0.0, 1e9)
ANY_RATE = st.sampled_from([0.0, 5e-324, 1.0, 1e24]) | st.floats(0.0, 1e24)
ANY_BYTES = st.sampled_from([1, 4, 2**30, 2**60 - 1]) | st.integers(1, 2**60 - 1)
ANY_TEXT = st.sampled_from(["", "\x1b[31m", "[bold]", "a\nb", "host", "\u202e", "x" * 3000]) | st.text(max_size=20)
TIMES = st.lists(ANY_SECONDS, min_size=1, max_size=4).map(tuple)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


INTERFACE = st.fixed_dictionaries(
    {
        "name": ANY_TEXT | st.sampled_from(["lo", "eth0", "docker0", "ib0"]),
        "kind": st.sampled_from(["ethernet", "infiniband", "loopback", "other"]),
        "up": st.booleans(),
        "speed_mbit": maybe(st.integers(0, 2**31 - 1)),
        "addresses": st.lists(ANY_TEXT | st.just("10.0.0.1/24"), max_size=2).map(tuple),
    }
)


ANY_COUNT = st.sampled_from([0, 1, 18, 2**31 - 1])
ADDRESS = st.sampled_from(["switch", "0000:00:00.0", "0000:01:00.0"]) | ANY_TEXT
LINKS = st.fixed_dictionaries(
    {},
    optional={
        "pci_address": maybe(ADDRESS), "pcie_generation": maybe(st.integers(0, 7)),
        "pcie_gpu_generation": maybe(st.integers(0, 7)), "pcie_width": maybe(ANY_COUNT),
        "pcie_gpu_width": maybe(ANY_COUNT), "nvlink_generation": maybe(st.integers(0, 7)),
        "nvlinks_up": maybe(ANY_COUNT), "nvlinks_down": maybe(ANY_COUNT),
        "nvlink_neighbours": st.lists(ADDRESS, max_size=3).map(tuple),
        "peers": st.dictionaries(ADDRESS, st.sampled_from(["ok", "not supported"]) | ANY_TEXT, max_size=2),
    },
)  # fmt: skip
PORT = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["mlx5_0:1", "mlx5_1:1"]) | ANY_TEXT, "active": st.booleans(),
        "rate": st.sampled_from(["400 Gb/sec (4X NDR)", "0 Gb/sec", "99999.999 Gb/sec"]) | ANY_TEXT,
        "pcie_speed": maybe(st.sampled_from(["32.0 GT/s PCIe", "2.5 GT/s PCIe"]) | ANY_TEXT),
        "pcie_width": maybe(ANY_COUNT),
    }
)  # fmt: skip
NCCL = st.fixed_dictionaries(
    {
        "network": maybe(st.sampled_from(["IB", "Socket"]) | ANY_TEXT), "adapters": st.just(()),
        "adapters_in_use": st.lists(st.sampled_from(["mlx5_0", "mlx5_0+mlx5_1"]) | ANY_TEXT, max_size=2).map(tuple),
        "adapters_without_gpu_direct": st.just(()),
        "channels": st.dictionaries(st.sampled_from(["P2P", "SHM", "NET", "NET/GDRDMA"]), ANY_COUNT, max_size=3),
        "problems": st.lists(ANY_TEXT, max_size=1).map(tuple),
    }
)  # fmt: skip
NCCL_SETTINGS = ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_IB_HCA", "NCCL_NET_GDR_LEVEL")


@st.composite
def ranks(draw: st.DrawFn) -> CheckedRank:
    rank = draw(st.integers(0, 5))
    environment = {
        "host": draw(ANY_TEXT), "cores_allowed": (), "threads": 1,
        "cpu_quota_cores": draw(maybe(st.floats(-1e99, 1e99))),
        "versions": draw(st.dictionaries(ANY_TEXT, maybe(ANY_TEXT), max_size=2)),
        "backend": draw(st.sampled_from(["gloo", "nccl", None, "\x1b"])),
        "settings": draw(
            st.dictionaries(
                st.sampled_from(["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_DISABLE", *NCCL_SETTINGS]),
                ANY_TEXT,
                max_size=2,
            )
        ),
        "git_revision": None,
        "device": {
            "type": "cpu", "name": draw(ANY_TEXT | st.just("NVIDIA H200")),
            "memory_bytes": draw(maybe(st.integers(-(2**62), 2**62))),
            "driver": draw(maybe(ANY_TEXT)),
        },
    }  # fmt: skip
    facts = {
        "rank": rank, "world_size": 2, "local_rank": 0, "environment": environment,
        "host_cores": draw(st.integers(0, 2**31 - 1)), "cpu_throttled_seconds": draw(maybe(ANY_SECONDS)),
        "hostname_addresses": tuple(draw(st.lists(ANY_TEXT, max_size=2))),
        "interfaces": tuple(draw(st.lists(INTERFACE, max_size=3))),
        "infiniband": tuple(draw(st.lists(PORT, max_size=2))), "gpu_links": draw(maybe(LINKS)),
        "gpu_direct_modules": draw(st.sampled_from([None, (), ("nvidia_peermem",)])),
    }  # fmt: skip
    collective = st.fixed_dictionaries(
        {
            "group": st.sampled_from(GROUPS), "operation": st.sampled_from(OPERATIONS),
            "ranks": st.integers(2, 2**31 - 1), "size_bytes": ANY_BYTES, "calls": st.just(1), "seconds": TIMES,
        }
    )  # fmt: skip
    compute = {
        "work": draw(st.just(WORK) | ANY_TEXT),
        "pieces_per_second": tuple(draw(st.lists(ANY_RATE, min_size=1, max_size=3))),
        "cpu_throttled_share": draw(maybe(ANY_SECONDS)), "gpu": None, "gpu_reason": None,
    }  # fmt: skip
    disk = {
        "free_bytes": draw(st.integers(0, 2**60 - 1)), "record_seconds": draw(TIMES), "record_bytes": 0,
        "seen_seconds": draw(maybe(ANY_SECONDS)), "seen_reason": draw(ANY_TEXT | st.just("not seen")),
    }  # fmt: skip
    rate = draw(st.sampled_from([5e-324, 1.0, 9e99]))
    stage = st.builds(
        StageLine,
        name=st.sampled_from(STAGES),
        ending=st.sampled_from(["done", "failed", "timeout", "skipped"]),
        seconds=ANY_SECONDS,
        reason=ANY_TEXT,
    )
    return CheckedRank.model_validate(
        {
            "rank": rank,
            "facts": draw(maybe(st.just(FactsLine.model_validate(facts)))),
            "collectives": tuple(draw(st.lists(collective, max_size=6))),
            "nccl": draw(maybe(NCCL)),
            "matmul": draw(maybe(st.just({"dtype": "fp32", "size": 1, "flops_per_second": rate}))),
            "compute": draw(maybe(st.just(compute))),
            "disk": draw(maybe(st.just(disk))),
            "stages": tuple(draw(st.lists(stage, max_size=3))),
            "ended": draw(st.booleans()),
            "broken": tuple(draw(st.lists(ANY_TEXT, max_size=1))),
        }
    )


@settings(phases=(Phase.reuse, Phase.generate), suppress_health_check=[HealthCheck.too_slow])
@given(
    found=st.lists(ranks(), max_size=4),
    world=st.integers(1, 6),
    ending=st.sampled_from(["ended", "stopped", "not started"]),
    log=ANY_TEXT,
)
def test_any_record(found: list[CheckedRank], world: int, ending: str, log: str) -> None:
    wanted = request(world=World(nodes=world, ranks_per_node=1, threads_per_rank=1))
    whole = record(*found, request=wanted, ending=ending, log=log, fits=fits(found))
    verdicts = judged(whole)
    fields = check_fields(whole, verdicts, Path("stored.json"))
    json.loads(envelope("check", fields), parse_constant=lambda name: 1 / 0)
    document = check_document(whole, verdicts, Path("stored.json"))
    assert len(lines(document)) <= 25
    assert not any("\x1b" in line.plain for line in lines(document, verbose=True))
