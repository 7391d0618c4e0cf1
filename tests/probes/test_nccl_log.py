"""NCCL's log of one rank, in the form of its sources (2.12.12, 2.19.3, 2.30.7): network, adapters, channels."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vitscale.probes import nccl_log
from vitscale.store.checks import NcclLine

pytestmark = pytest.mark.computing

INFINIBAND = """
node0:2110:2110 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to ib0
node0:2110:2110 [0] NCCL INFO Bootstrap: Using ib0:10.0.0.1<0>
n0:2110:2320 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_3:1/IB [2]mlx5_bond_0:1/RoCE [RO]; OOB ib0:10.0.0.1<0>
node0:2110:2320 [0] NCCL INFO Initialized NET plugin IB
node0:2110:2320 [0] NCCL INFO Using network IB
node0:2110:2320 [0] NCCL INFO NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'
node0:2110:2320 [0] NCCL INFO NET/IB : GPU Direct RDMA Enabled for HCA 1 'mlx5_3'
node0:2110:2320 [0] NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 2 'mlx5_bond_0'
node0:2110:2320 [0] NCCL INFO Channel 00/08 : 0 7 6 5 4 3 2 1 9 10 11 12 13 14 15 8
node0:2110:2320 [0] NCCL INFO Channel 00/0 : 9[1] -> 0[0] [receive] via NET/IB/0/GDRDMA
node0:2110:2320 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0(3)/GDRDMA/Shared
node0:2110:2320 [0] NCCL INFO Channel 01/0 : 0[0] -> 7[7] via P2P/CUMEM/read
node0:2110:2320 [0] NCCL INFO Channel 02/0 : 0[0] -> 7[7] via P2P/IPC
node0:2110:2320 [0] NCCL INFO Channel 03 : 0[0] -> 6[6] via SHM/direct/direct
"""
SOCKETS = """
node0:77:77 [1] NCCL INFO NET/IB : No device found.
node0:77:77 [1] NCCL INFO Using network Socket
node0:77:90 [1] NCCL INFO P2P is disabled between connected GPUs 1 and 0. You can repress this message with \
NCCL_IGNORE_DISABLED_P2P=1.
node0:77:90 [1] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/Socket/0
"""
LIBFABRIC = """
ip-10-0-0-1:5:9 [0] NCCL INFO Using network AWS Libfabric
ip-10-0-0-1:5:9 [0] NCCL INFO NET/AWS Libfabric : GPU Direct RDMA Enabled for HCA 0 'rdmap16s27-rdma'
ip-10-0-0-1:5:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/AWS Libfabric/0/GDRDMA(PCI)
"""


def parsed(text: str) -> NcclLine:
    line = nccl_log.parse(text)
    assert line is not None
    return line


def test_infiniband() -> None:
    line = parsed(INFINIBAND)
    assert line.network == "IB"
    assert line.adapters == ("mlx5_0:1", "mlx5_3:1", "mlx5_bond_0:1")
    assert line.adapters_in_use == ("mlx5_0",)
    assert line.adapters_without_gpu_direct == ("mlx5_bond_0",)
    assert line.channels == {"NET/GDRDMA": 2, "P2P": 2, "SHM": 1}
    assert line.problems == ()


def test_sockets_and_peer_access() -> None:
    line = parsed(SOCKETS)
    assert (line.network, line.adapters, line.channels) == ("Socket", (), {"NET": 1})
    assert line.problems == ("P2P is disabled between connected GPUs 1 and 0",)


def test_a_plugin_of_another_network() -> None:
    line = parsed(LIBFABRIC)
    assert line.network == "AWS Libfabric"
    assert (line.adapters, line.adapters_in_use) == (("rdmap16s27-rdma",), ("rdmap16s27-rdma",))
    assert line.channels == {"NET/GDRDMA": 1}


def test_an_older_nccl_that_writes_bus_addresses_and_names_no_adapter_again() -> None:
    """NCCL 2.12: the index in a channel is that of the list of adapters."""
    line = parsed("""
n0:5:9 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB ; OOB ib0:10.0.0.1<0>
n0:5:9 [0] NCCL INFO Using network IB
n0:5:9 [0] NCCL INFO Channel 00/0 : 0[1a000] -> 8[1a000] [send] via NET/IB/1
n0:5:9 [0] NCCL INFO Channel 00 : 0[1a000] -> 1[1b000] via SHM/direct/direct
""")
    assert (line.adapters_in_use, line.channels) == (("mlx5_1",), {"NET": 1, "SHM": 1})


def test_a_log_without_a_word_of_networks(tmp_path: Path) -> None:
    assert nccl_log.parse("node0:1:1 [0] NCCL INFO cudaDriverVersion 12080\n") is None
    assert nccl_log.read(tmp_path / "missing") is None
    (tmp_path / "log").write_bytes(b"\xff\x00 [0] NCCL INFO Using network IB\n")
    line = nccl_log.read(tmp_path / "log")
    assert line is not None
    assert line.network == "IB"


def test_nccl_logs_into_a_file_of_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "warn")
    monkeypatch.delenv("NCCL_DEBUG_FILE", raising=False)
    monkeypatch.setenv("NCCL_DEBUG_SUBSYS", "ENV")
    assert nccl_log.begin(tmp_path, 3) == tmp_path / "nccl-3.log"
    assert os.environ["NCCL_DEBUG"] == "INFO"
    assert os.environ["NCCL_DEBUG_FILE"] == str(tmp_path / "nccl-3.log")
    assert os.environ["NCCL_DEBUG_SUBSYS"] == "INIT,NET,GRAPH"


@pytest.mark.parametrize("users", [{"NCCL_DEBUG": "INFO"}, {"NCCL_DEBUG_FILE": "/tmp/own"}])
def test_a_users_own_log_stays_his(users: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in users.items():
        monkeypatch.setenv(name, value)
    assert nccl_log.begin(tmp_path, 0) is None
