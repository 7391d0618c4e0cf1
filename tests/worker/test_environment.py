"""What a rank records of where it runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from results_factory import make_trial
from vitscale.engines import building
from vitscale.probes.matmul import tf32_allowed
from vitscale.worker.environment import (
    _all_settings,
    _boost,
    _governor,
    _network_adapters,
    _software_versions,
    allocation,
    nccl_file_settings,
    recorded_settings,
)


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"SLURM_JOB_ID": "4711", "SLURM_ARRAY_JOB_ID": "4700"}, "slurm 4711"),
        ({"PBS_JOBID": "99.head"}, "pbs 99.head"),
        ({"LSB_JOBID": "12"}, "lsf 12"),
        ({"SLURM_JOB_ID": ""}, None),
        ({}, None),
    ],
)
def test_the_job_that_holds_the_hosts(variables: dict[str, str], named: str | None) -> None:
    assert allocation(variables) == named


def test_variables_of_libraries_are_recorded_and_secrets_are_not() -> None:
    """By their prefixes these are settings too: rank-0.jsonl is readable by all users."""
    settings = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4", "HF_HUB_OFFLINE": "1"}
    secrets = {"NCCL_MY_SECRETX": "a", "TORCH_PWD": "b", "DS_CRED": "c", "CUDA_PASSPHRASE": "d"}
    assert recorded_settings({**secrets, **settings, "HOME": "/root"}) == settings


def test_settings_of_the_network_are_recorded() -> None:
    settings = {"FI_PROVIDER": "efa", "UCX_TLS": "rc", "OFI_NCCL_PROTOCOL": "RDMA", "SHARP_COLL_ENABLE_SAT": "1"}
    settings |= {"RCCL_MSCCL_ENABLE": "0", "HSA_ENABLE_SDMA": "0", "LD_LIBRARY_PATH": "/opt/efa", "NCCL_NET": "ofi"}
    secrets = {"FI_PASSWORD": "f", "UCX_AUTH": "u", "NCCL_TOKEN": "t"}
    assert recorded_settings({**secrets, **settings, "FIX": "1", "LD_PRELOAD": "/x.so"}) == settings


def test_settings_in_nccl_s_files_count_as_nccl_takes_them(tmp_path: Path) -> None:
    """A variable, then the user's file, then the host's; within a file the first line of a name."""
    host_file = tmp_path / "etc-nccl.conf"
    host_file.write_text("NCCL_IB_HCA=mlx5\nNCCL_SOCKET_IFNAME=eth0\nFI_PROVIDER=efa\nNCCL_NET=IB\n")
    put(
        tmp_path / ".nccl.conf",
        "# mine\nNCCL_IB_HCA=mlx5_1\nNCCL_IB_HCA=mlx5_2\nno setting\nNCCL_ALGO=Tree=x\nNCCL_TOKEN=t\nPATH=/evil\r",
    )
    home = {"HOME": str(tmp_path), "NCCL_NET": "ofi"}
    expected = {"NCCL_IB_HCA": "mlx5_1", "NCCL_SOCKET_IFNAME": "eth0", "FI_PROVIDER": "efa", "NCCL_ALGO": "Tree=x"}
    assert nccl_file_settings(home, host_file) == expected
    put(tmp_path / "named.conf", "NCCL_IB_HCA=mlx5_3")
    named = nccl_file_settings(home | {"NCCL_CONF_FILE": str(tmp_path / "named.conf")}, host_file)
    assert (named["NCCL_IB_HCA"], "NCCL_ALGO" in named) == ("mlx5_3", False)


def test_a_file_of_nccl_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".nccl.conf")
    (tmp_path / "large").write_text("NCCL_NET=ofi\n" * 10_000)
    assert nccl_file_settings({"HOME": str(tmp_path)}, tmp_path / "large") == {}
    assert nccl_file_settings({}, tmp_path / "missing") == {}


def test_only_a_rank_on_a_gpu_records_nccl_s_files(tmp_path: Path) -> None:
    put(tmp_path / ".nccl.conf", "NCCL_IB_HCA=mlx5_1")
    variables = {"HOME": str(tmp_path), "GLOO_SOCKET_IFNAME": "lo"}
    on_gpu = _all_settings(torch.device("cuda", 0), variables)
    assert {"NCCL_IB_HCA": "mlx5_1", "GLOO_SOCKET_IFNAME": "lo"}.items() <= on_gpu.items()
    assert _all_settings(torch.device("cpu"), variables) == {"GLOO_SOCKET_IFNAME": "lo"}


def test_fp32_is_multiplied_in_fp32_whatever_a_container_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own default would let cuDNN take TF32 for the convolution that cuts an image into patches."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    torch.set_float32_matmul_precision("high")
    assert tf32_allowed(None)
    trial = make_trial("none", 1)
    building.build(nn.Linear(2, 2), trial, torch.device("cpu"))
    assert not tf32_allowed(None)
    assert torch.get_float32_matmul_precision() == "highest"


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def test_the_governor_of_all_cores(tmp_path: Path) -> None:
    assert _governor(frozenset({0, 1}), tmp_path) is None
    for core, governor in enumerate(("powersave", "performance")):
        put(tmp_path / f"cpu{core}/cpufreq/scaling_governor", governor)
    assert _governor(frozenset({0}), tmp_path) == "powersave"
    assert _governor(frozenset({0, 1}), tmp_path) == "performance, powersave"
    assert _governor(frozenset({0, 2}), tmp_path) is None


@pytest.mark.parametrize(
    ("file", "text", "boost"),
    [
        ("intel_pstate/no_turbo", "0", True),
        ("intel_pstate/no_turbo", "1", False),
        ("cpufreq/boost", "1", True),
        ("cpufreq/boost", "0", False),
        ("cpufreq/boost", "junk", None),
    ],
)
def test_boost_by_either_driver(tmp_path: Path, file: str, text: str, boost: bool | None) -> None:
    assert _boost(tmp_path) is None
    put(tmp_path / file, text)
    assert _boost(tmp_path) is boost


def test_network_adapters_that_are_up_whatever_they_are_called(tmp_path: Path) -> None:
    assert _network_adapters(tmp_path / "none") is None
    adapters = [
        ("mlx5_0", "MT4129", "28.39.1002", "ACTIVE"),
        ("mlx5_7", "MT4129", "28.39.1002", "ACTIVE"),
        ("mlx5_8", "MT4129", "28.43.2026", "DOWN"),
        ("mlx5_9", "MT4123", "20.31.1014", "ACTIVE"),
        ("rxe0", "", "", "ACTIVE"),  # in software
    ]
    for name, kind, firmware, state in adapters:
        for file, text in (("hca_type", kind), ("fw_ver", firmware), ("ports/1/state", f"4: {state}")):
            put(tmp_path / name / file, text)
        put(tmp_path / name / "ports/1/rate", "400 Gb/sec (4X NDR)" if kind == "MT4129" else "200 Gb/sec (4X HDR)")
    assert _network_adapters(tmp_path) == (
        "MT4123, firmware 20.31.1014, 200 Gb/sec (4X HDR)", "MT4129, firmware 28.39.1002, 400 Gb/sec (4X NDR)",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("hip", "expected"),
    [
        (None, {"cuda": "12.8", "nccl": "2.27.3"}),
        ("6.4.43483", {"rocm": "6.4.43483", "rccl": "2.27.3"}),
    ],
)
def test_versions_of_a_gpu_are_those_of_its_vendor(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, expected: dict[str, str]
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", "12.8" if hip is None else None)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    versions = _software_versions(torch.device("cuda"), ())
    assert {name: versions.get(name) for name in ("cuda", "nccl", "rocm", "rccl") if name in versions} == expected
