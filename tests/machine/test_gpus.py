"""Which GPUs a process may use, by NVML and CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pynvml
import pytest

from fake_nvml import UUID, FakeNvml, installed
from study_factory import EIGHT_CORES, expanded
from vitscale.errors import RequestError
from vitscale.machine.gpus import Gpu, GpusUnreadable, gpu_settings, host_gpus, visible_gpus
from vitscale.machine.vendors import nvidia
from vitscale.machine.vendors.nvidia import select_visible

H200 = Gpu("GPU-11111111-2222-3333-4444-555555555555", "NVIDIA H200", 143_771 * 2**20, "570.124.06", (9, 0))
T4 = Gpu("GPU-66666666-7777-8888-9999-000000000000", "Tesla T4", 15_360 * 2**20, "550.90.07", (7, 5))
A100 = Gpu("GPU-aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee", "NVIDIA A100-SXM4-40GB", None, None, (8, 0))
SLICES = tuple(replace(A100, uuid=f"MIG-{n}0000000", name="NVIDIA A100-SXM4-40GB MIG 3g.20gb") for n in (1, 2))
CUT = replace(A100, mig=True, slices=SLICES)


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("0,-1,1", [0]),
        ("2,0", [2, 0]),
        (" 1 , 2 ", [1, 2]),
        ("1,9,0", [1]),
        ("GPU-11111111", [0]),
        ("GPU-aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee,GPU-6", [2, 1]),
        ("GPU-", []),  # begins the name of several
        ("G", []),
        ("GPU-ffffffff", []),
        ("MIG-11111111", []),
        ("NoDevFiles", []),
        ("0,0", [0]),
        ("²", []),
        ("9" * 5000, []),
    ],
)
def test_cuda_visible_devices(visible: str | None, chosen: list[int]) -> None:
    all_gpus = (H200, T4, A100)
    assert select_visible(all_gpus, visible) == tuple(all_gpus[n] for n in chosen)


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [
        ("MIG-20000000", [SLICES[1]]),
        ("MIG-10000000,MIG-20000000", [SLICES[0]]),  # CUDA shows a process one slice
        ("1", [SLICES[0]]),
        ("GPU-aaaaaaaa", [SLICES[0]]),
        ("0,1", [H200, SLICES[0]]),
        (None, [H200]),
    ],
)
def test_a_slice_of_a_gpu_is_a_gpu(visible: str | None, chosen: list[Gpu]) -> None:
    assert select_visible((H200, CUT), visible) == tuple(chosen)
    assert select_visible((CUT,), None) == (SLICES[0],)


@pytest.fixture
def device_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Stands for /dev."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(nvidia, "_DEVICES", tmp_path)
    return tmp_path


def test_nvml_tells_of_a_gpu(device_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(FakeNvml(), monkeypatch)
    (gpu,) = visible_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert (visible_gpus(), host_gpus()) == ((), (gpu,))
    assert (gpu.uuid, gpu.name, gpu.memory_bytes) == (UUID, "NVIDIA H200", 143_771 * 2**20)
    assert (gpu.driver, gpu.compute_capability) == ("570.124.06", (9, 0))
    settings = gpu_settings(UUID)
    assert (settings["power_limit_watts"], settings["power_limit_default_watts"]) == (500.0, 700.0)
    assert (settings["ecc"], settings["nvlinks"]) == (True, None)
    assert gpu_settings("GPU-0") == {}


def test_a_jobs_own_gpu_is_seen_though_nvml_counts_others_that_it_may_not_use(
    device_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA numbers from 0 those that the job's control group lets it use: here the last of four."""
    fake = installed(FakeNvml(), monkeypatch)
    fake.forbidden = (0, 1, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert [gpu.uuid for gpu in visible_gpus()] == [UUID]


def test_signs_of_gpus_that_cannot_be_read_are_an_error(device_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = installed(FakeNvml(), monkeypatch)
    fake.init_code = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    assert (visible_gpus(), host_gpus()) == ((), ())  # a host without GPUs
    (device_files / "nvidia0").touch()
    with pytest.raises(GpusUnreadable, match="nvidia0 are there, but NVML: Driver Not Loaded"):
        visible_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert visible_gpus() == ()  # hidden on purpose
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    fake.init_code = pynvml.NVML_SUCCESS
    with pytest.raises(GpusUnreadable, match="CUDA_VISIBLE_DEVICES = 'MIG-1' are there, but NVML tells of 1"):
        visible_gpus()


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_no_study_falls_back_to_the_cpu_where_gpus_cannot_be_read(tmp_path: Path, device: str) -> None:
    machine = replace(EIGHT_CORES, gpus_unreadable="/dev/nvidia0 are there, but NVML: Driver Not Loaded")
    with pytest.raises(RequestError, match=r"no GPU can be read: /dev/nvidia0.*set train.device = 'cpu'"):
        expanded(tmp_path, {"train": {"device": device}}, machine)
    (tmp_path / "cpu").mkdir()
    found = expanded(tmp_path / "cpu", {"train": {"device": "cpu"}}, machine)
    assert {trial.train.device for trial in found.trials.values()} == {"cpu"}
