"""Findings on links, from records as two hosts of eight H100 would leave them, and from those with one fault each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from check_factory import checked, record, request, sweep
from vitscale.preflight.fit import fits
from vitscale.preflight.judging import judged
from vitscale.preflight.link_rates import (
    NVLINK_GENERATIONS,
    adapter_bytes_per_second,
    nvlink_generation,
    pcie_bytes_per_second,
    pcie_generation,
)
from vitscale.present.document import Finding
from vitscale.store.checks import CheckGroup, CheckRecord, GpuLinks, InfinibandPort, NcclLine, read_check
from vitscale.trial.trial import World

pytestmark = pytest.mark.computing

KINDS = {
    "nvlink-down", "peer-access-off", "slow-inside-nodes", "network-over-sockets", "adapters-unused", "no-gpu-direct",
    "adapters-differ", "pcie-narrow", "slow-link",
}  # fmt: skip
SIZES = tuple(1024 * 4**power for power in range(10))
H100 = "NVIDIA H100 80GB HBM3"


def links(local_rank: int, **fields: Any) -> GpuLinks:
    """Of one of eight GPUs behind NVSwitches."""
    content = {
        "pci_address": f"0000:{local_rank:02x}:00.0", "pcie_generation": 5, "pcie_gpu_generation": 5, "pcie_width": 16,
        "pcie_gpu_width": 16, "nvlink_generation": 4, "nvlinks_up": 18, "nvlinks_down": 0,
        "nvlink_neighbours": ("switch",) * 18,
        "peers": {f"0000:{other:02x}:00.0": "ok" for other in range(8) if other != local_rank},
    }  # fmt: skip
    return GpuLinks.model_validate(content | fields)


def port(number: int, **fields: Any) -> InfinibandPort:
    content = {
        "name": f"mlx5_{number}:1", "active": True, "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand",
        "numa_node": number // 4, "pcie_speed": "32.0 GT/s PCIe", "pcie_width": 16,
    }  # fmt: skip
    return InfinibandPort.model_validate(content | fields)


def nccl(local_rank: int, **fields: Any) -> NcclLine:
    content = {
        "network": "IB", "adapters": tuple(f"mlx5_{number}:1" for number in range(8)),
        "adapters_in_use": (f"mlx5_{local_rank}",), "adapters_without_gpu_direct": (),
        "channels": {"P2P": 24, "NET/GDRDMA": 4},
    }  # fmt: skip
    return NcclLine.model_validate(content | fields)


def cluster(
    *,
    hosts: int = 2,
    ranks_per_host: int = 8,
    device: str = H100,
    bandwidths: dict[CheckGroup, float] | None = None,
    of_links: dict[str, Any] | None = None,
    of_nccl: dict[str, Any] | None = None,
    **facts: Any,
) -> CheckRecord:
    """Bus bandwidths by group, and fields that all ranks have."""
    ranks_in_all = hosts * ranks_per_host
    found = []
    for number in range(ranks_in_all):
        local_rank = number % ranks_per_host
        lines = [
            line
            for group, bandwidth in (bandwidths or {}).items()
            for line in sweep(group, "all_reduce", ranks_per_host, 1e-5, bandwidth, SIZES)
        ]
        content: dict[str, Any] = {
            "host": f"node{number // ranks_per_host}", "backend": "nccl", "name": device,
            "infiniband": tuple(map(port, range(8))), "gpu_direct_modules": ("nvidia_peermem",),
            "gpu_links": links(local_rank, **(of_links or {})), "collectives": tuple(lines),
        }  # fmt: skip
        if of_nccl is not None:
            content["nccl"] = nccl(local_rank, **of_nccl)
        found.append(checked(number, ranks_in_all, **(content | facts)))
    world = World(nodes=hosts, ranks_per_node=ranks_per_host, threads_per_rank=1)
    return record(*found, request=request(world=world, device="cuda"), fits=fits(found))


def findings(whole: CheckRecord) -> list[Finding]:
    return [finding for finding in judged(whole) if finding.kind in KINDS]


def only(whole: CheckRecord) -> Finding:
    (finding,) = findings(whole)
    return finding


def test_hosts_as_they_should_be_have_no_finding() -> None:
    fast: dict[CheckGroup, float] = {"inside nodes": 360e9, "across nodes": 48e9, "all ranks": 330e9}
    assert findings(cluster(bandwidths=fast, of_nccl={})) == []
    assert findings(cluster(bandwidths=fast)) == []


def test_12_gigabytes_over_18_nvlinks(tmp_path: Path) -> None:
    """As a check of format 5 recorded it, in which of links only the number was known."""
    lacking = {"gpu_links", "gpu_direct_modules", "nccl", "write_bytes_per_second"}
    content = json.loads(cluster(hosts=1, bandwidths={"inside nodes": 12e9}).model_dump_json())
    for rank in content["ranks"]:
        rank["facts"]["infiniband"] = []
        rank["facts"]["environment"]["device"]["settings"] = {"nvlinks": 18}
        for part in (rank, rank["facts"], rank["disk"]):
            for field in lacking.intersection(part):
                del part[field]
    path = tmp_path / "check.json"
    path.write_text(json.dumps(content | {"format": 5}))
    finding = only(read_check(path))
    assert (finding.kind, finding.severity) == ("slow-inside-nodes", "warning")
    # 18 links x 20.6 GB/s, by which NCCL reckons, and x 25 GB/s.
    assert finding.message == (
        "all-reduce inside nodes reaches 12.0 GB/s, 0.03 of the 371 GB/s of 18 NVLinks by NCCL's reckoning "
        "(peak 450 GB/s)"
    )
    assert "nvidia-smi topo -p2p r" in finding.advice


@pytest.mark.parametrize(("gigabytes", "is_slow"), [(180, True), (190, False)])
def test_half_of_what_nccl_reckons_with_is_asked_for(gigabytes: float, is_slow: bool) -> None:
    whole = cluster(hosts=1, bandwidths={"inside nodes": gigabytes * 1e9})
    assert [finding.kind for finding in findings(whole)] == ["slow-inside-nodes"] * is_slow


def test_small_messages_show_no_bandwidth() -> None:
    whole = cluster(hosts=1)
    lines = sweep("inside nodes", "all_reduce", 8, 1e-5, 12e9, SIZES[:7])
    ranks = [rank.model_copy(update={"collectives": lines}) for rank in whole.ranks]
    assert findings(whole.model_copy(update={"ranks": tuple(ranks), "fits": fits(ranks)})) == []


def test_bridges_between_pairs_leave_the_ring_to_pcie() -> None:
    """Four cards, 0 with 1 and 2 with 3: a ring over all four crosses PCIe 4 x16, which carries 31.5 GB/s."""
    whole = cluster(hosts=1, ranks_per_host=4, device="NVIDIA A100 80GB PCIe", infiniband=())
    ranks = []
    for rank in whole.ranks:
        assert rank.facts is not None
        bridged = (f"0000:{rank.rank ^ 1:02x}:00.0",) * 12
        own = links(
            rank.rank,
            nvlink_generation=3,
            nvlinks_up=12,
            nvlink_neighbours=bridged,
            pcie_generation=4,
            pcie_gpu_generation=4,
        )
        facts = rank.facts.model_copy(update={"gpu_links": own})
        lines = sweep("inside nodes", "all_reduce", 4, 1e-5, 12e9, SIZES)
        ranks.append(rank.model_copy(update={"facts": facts, "collectives": lines}))
    assert findings(whole.model_copy(update={"ranks": tuple(ranks), "fits": fits(ranks)})) == []
    pair = ranks[:2]
    lines = sweep("inside nodes", "all_reduce", 2, 1e-5, 12e9, SIZES)
    pair = [rank.model_copy(update={"collectives": lines}) for rank in pair]
    finding = only(whole.model_copy(update={"ranks": tuple(pair), "fits": fits(pair)}))
    assert "of the 240 GB/s of 12 NVLinks by NCCL's reckoning (peak 300 GB/s)" in finding.message


def test_nvlinks_that_are_down() -> None:
    whole = cluster(hosts=1, ranks_per_host=2, of_links={"nvlinks_up": 16, "nvlinks_down": 2})
    finding = only(whole)
    assert finding.kind == "nvlink-down"
    assert finding.message == f"ranks 0 and 1 (node0): 16 of 18 NVLinks of {H100} are up"


def test_a_single_rented_gpu_without_nvlinks_is_none_that_lost_them() -> None:
    none = {"nvlinks_up": 0, "nvlinks_down": 18, "nvlink_neighbours": ()}
    assert findings(cluster(hosts=1, ranks_per_host=1, of_links=none)) == []


@pytest.mark.parametrize(
    ("settings", "peers", "cause"),
    [
        ({"NCCL_P2P_DISABLE": "1"}, "ok", "NCCL_P2P_DISABLE = 1"),
        ({"NCCL_P2P_LEVEL": "LOC"}, "ok", "NCCL_P2P_LEVEL = LOC"),
        ({}, "disabled by a driver setting", "peer access is off (disabled by a driver setting)"),
        ({}, "chipset not supported", "peer access is off (chipset not supported)"),
    ],
)
def test_peer_access_that_is_off(settings: dict[str, str], peers: str, cause: str) -> None:
    refused = {f"0000:{number:02x}:00.0": peers for number in range(8)}
    finding = only(cluster(hosts=1, of_links={"peers": refused}, settings=settings))
    assert (finding.kind, finding.severity) == ("peer-access-off", "warning")
    assert finding.message == f"GPUs of node0 exchange through the host's memory: {cause}"


def test_cards_that_cannot_do_it_are_a_note() -> None:
    refused = {f"0000:{number:02x}:00.0": "chipset not supported" for number in range(8)}
    cards = {"peers": refused, "nvlinks_up": None, "nvlink_neighbours": (), "nvlink_generation": None}
    finding = only(cluster(hosts=1, device="NVIDIA GeForce RTX 4090", of_links=cards))
    assert (finding.kind, finding.severity) == ("peer-access-off", "note")


def test_one_adapter_of_eight_by_the_setting_and_by_the_log() -> None:
    finding = only(cluster(settings={"NCCL_IB_HCA": "=mlx5_3:1"}))
    assert finding.kind == "adapters-unused"
    assert "takes 1 of 8 active adapters of 400 Gb/sec (4X NDR), mlx5_3 (NCCL_IB_HCA is '=mlx5_3:1')" in finding.message
    logged = only(cluster(of_nccl={"adapters_in_use": ("mlx5_0",)}))
    assert logged.kind == "adapters-unused"
    assert logged.message == (
        "node0 and node1: NCCL takes 1 of 8 active adapters of 400 Gb/sec (4X NDR), mlx5_0, for 8 ranks"
    )
    assert findings(cluster(settings={"NCCL_IB_HCA": "mlx5"})) == []
    assert findings(cluster(of_nccl={"adapters_in_use": ("mlx5_0+mlx5_1", "mlx5_2+mlx5_3")})) == []


def test_no_gpu_direct_by_the_log_and_by_the_module() -> None:
    through_memory = {"channels": {"P2P": 24, "NET": 8}}
    logged = only(cluster(of_nccl=through_memory, gpu_direct_modules=()))
    assert (logged.kind, logged.severity) == ("no-gpu-direct", "warning")
    assert "nvidia_peermem is not loaded" in logged.message
    unlogged = only(cluster(gpu_direct_modules=()))
    assert (unlogged.kind, unlogged.severity) == ("no-gpu-direct", "note")
    assert findings(cluster(of_nccl={}, gpu_direct_modules=())) == []  # by dma-buf


def test_adapters_of_which_nccl_says_that_gpu_direct_is_disabled() -> None:
    """All connections through the host's memory name them as the cause; a part of them is a warning of its own."""
    disabled = {"adapters_in_use": ("mlx5_0", "mlx5_1"), "adapters_without_gpu_direct": ("mlx5_1", "mlx5_7")}
    whole = only(cluster(of_nccl=disabled | {"adapters_in_use": tuple(f"mlx5_{n}" for n in range(7)),
                                             "channels": {"NET": 8}}))  # fmt: skip
    assert "(NCCL's log has GPU Direct RDMA disabled for mlx5_1)" in whole.message
    (part,) = [found for found in findings(cluster(of_nccl=disabled)) if found.kind == "no-gpu-direct"]
    assert part.severity == "warning"
    assert part.message == (
        "node0 and node1: NCCL's log has GPU Direct RDMA disabled for mlx5_1, which ranks use, so that what these "
        "adapters carry takes the host's memory"
    )
    unused = {"adapters_without_gpu_direct": ("mlx5_bond_0",)}
    assert findings(cluster(of_nccl=unused)) == []


def test_sockets_beside_infiniband() -> None:
    kinds = {finding.kind for finding in findings(cluster(of_nccl={"network": "Socket", "channels": {"NET": 4}}))}
    assert kinds == {"network-over-sockets"}


def test_bandwidths_between_hosts() -> None:
    slow: dict[CheckGroup, float] = {"inside nodes": 360e9, "across nodes": 11e9, "all ranks": 45e9}
    messages = [finding.message for finding in findings(cluster(bandwidths=slow, of_nccl={}))]
    assert messages == [
        "all-reduce across nodes reaches 11.0 GB/s, 0.22 of the 50.0 GB/s of an adapter",
        "all-reduce all ranks reaches 45.0 GB/s, 0.12 of the 360 GB/s of the same inside nodes",
    ]


def test_lanes_of_pcie() -> None:
    finding = only(cluster(hosts=1, of_links={"pcie_width": 8}))
    assert (finding.kind, "has 8 of 16 lanes" in finding.message) == ("pcie-narrow", True)
    finding = only(cluster(hosts=1, of_links={"pcie_generation": 4}))
    assert (finding.kind, finding.severity) == ("pcie-narrow", "note")
    assert "allows PCIe 4, and the GPU 5" in finding.message
    slots = tuple(port(number, pcie_speed="16.0 GT/s PCIe", pcie_width=8) for number in range(2))
    finding = only(cluster(hosts=1, infiniband=slots))
    assert "mlx5_0:1 at 50.0 GB/s on PCIe 4 x8, 15.8 GB/s" in finding.message


def test_an_adapter_that_is_down_on_one_host() -> None:
    whole = cluster()
    ranks = []
    for rank in whole.ranks:
        assert rank.facts is not None
        lacks = rank.facts.environment.host == "node1"
        ports = tuple(port(number, active=not (lacks and number == 5)) for number in range(8))
        facts = rank.facts.model_copy(update={"infiniband": ports})
        ranks.append(rank.model_copy(update={"facts": facts}))
    finding = only(whole.model_copy(update={"ranks": tuple(ranks)}))
    assert finding.kind == "adapters-differ"
    assert finding.message.endswith("mlx5_5:1 is 400 Gb/sec (4X NDR) on node0 and down on node1")


def test_rates_of_links() -> None:
    """By hand: 16 x 3.938 = 63.0; 400 Gbit/s / 8 = 50 GB/s; datasheets' totals by links and directions."""
    assert pcie_bytes_per_second(5, 16) == pytest.approx(63.008e9)
    assert (pcie_bytes_per_second(None, 16), pcie_bytes_per_second(9, 16), pcie_bytes_per_second(5, None)) == (
        None,
    ) * 3
    assert (pcie_generation("32.0 GT/s PCIe"), pcie_generation("Unknown"), pcie_generation(None)) == (5, None, None)
    assert adapter_bytes_per_second("400 Gb/sec (4X NDR)") == 50e9
    assert adapter_bytes_per_second("unavailable") is None
    totals = {1: (4, 160e9), 2: (6, 300e9), 3: (12, 600e9), 4: (18, 900e9), 5: (18, 1800e9)}
    for generation, (count, both_directions) in totals.items():
        assert 2 * count * NVLINK_GENERATIONS[generation].peak_bytes_per_second == both_directions
    workstation = nvlink_generation("NVIDIA RTX A6000", 3)
    assert workstation is not None
    assert 2 * 4 * workstation.peak_bytes_per_second == 112.5e9
    assert nvlink_generation("NVIDIA A40", None) is None
