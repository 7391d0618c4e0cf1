"""AMD's GPUs, by the real amdsmi over a library of known answers: which ones, in which order, and what they say."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fake_nvml
from fake_amdsmi import FakeAmdSmi, FakeGpu, installed, with_compute_nodes
from fake_nvml import FakeNvml
from vitscale.base.distribution import install_command
from vitscale.machine.gpus import (
    EnergyUnknown,
    Gpu,
    GpusUnreadable,
    energy_counter,
    gpu_settings,
    gpu_with_uuid,
    host_gpus,
    open_gpu,
    vendor_of_name,
    vendor_of_torch,
    visible_gpus,
)
from vitscale.machine.hardware import Machine
from vitscale.machine.vendors import amd, base
from vitscale.machine.vendors.amd import throttler_reasons
from vitscale.probes import resources
from vitscale.probes.gpu_monitor import gpu_monitor, summary
from vitscale.probes.resources import energy_meter

# In AMD SMI's order, which is that of their bus; HIP counts the third one first.
A = FakeGpu("00A1B2C3D4E5F601", hip_id=1)
B = FakeGpu("00A1B2C3D4E5F602", hip_id=2)
C = FakeGpu("FFA1B2C3D4E5F603", hip_id=0)
DIES = [
    FakeGpu(
        f"{number:016X}", hip_id=number, name="AMD Instinct MI250X", graphics_version=0x90A, memory_bytes=64 * 2**30,
        current_watts=0xFFFF, average_watts=500 if number % 2 == 0 else 0, throttler_bits=0, chip_throttler_bits=0,
    )
    for number in range(4)
]  # fmt: skip


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeAmdSmi:
    fake_nvml.installed(FakeNvml(), monkeypatch).init_code = 12  # no NVML
    monkeypatch.setattr("vitscale.machine.vendors.nvidia._DEVICES", tmp_path)
    return installed(FakeAmdSmi([replace(A), replace(B), replace(C)]), monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("variables", "chosen"),
    [
        ({}, [C, A, B]),
        ({"ROCR_VISIBLE_DEVICES": "2,0"}, [B, C]),
        ({"HIP_VISIBLE_DEVICES": "1"}, [A]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [A]),
        ({"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "2"}, [B]),  # HIP's own counts
        ({"ROCR_VISIBLE_DEVICES": "2,0", "HIP_VISIBLE_DEVICES": "1"}, [C]),  # the second one of those that are offered
        ({"ROCR_VISIBLE_DEVICES": "GPU-ffa1"}, [C]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-FFA1,1"}, [C, A]),
        ({"ROCR_VISIBLE_DEVICES": "0,9,1"}, [C]),
        ({"ROCR_VISIBLE_DEVICES": "0,0"}, [C]),
        ({"ROCR_VISIBLE_DEVICES": ""}, []),
        ({"HIP_VISIBLE_DEVICES": "-1"}, []),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
    ],
)
def test_gpus_are_counted_as_hip_does_from_those_that_the_runtime_offers(
    host: FakeAmdSmi, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], chosen: list[FakeGpu]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert [gpu.uuid for gpu in visible_gpus()] == [gpu.uuid for gpu in chosen]
    assert [gpu.uuid for gpu in host_gpus()] == [C.uuid, A.uuid, B.uuid]


def test_before_amd_smi_knew_hips_numbers_the_drivers_decide(host: FakeAmdSmi) -> None:
    host.gpus = [replace(A, hip_id=None, node_id=5), replace(B, hip_id=None, node_id=4)]
    assert [gpu.uuid for gpu in visible_gpus()] == [B.uuid, A.uuid]
    host.gpus = [replace(A, hip_id=None), replace(B, hip_id=None)]
    assert [gpu.uuid for gpu in visible_gpus()] == [A.uuid, B.uuid]


def test_what_is_known_of_a_gpu(host: FakeAmdSmi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device = tmp_path / "pci" / "0000:11:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("3\n")
    monkeypatch.setattr(base, "_PCI_DEVICES", tmp_path / "pci")
    host.gpus[2].power_cap_watts = 500
    assert gpu_with_uuid(C.uuid) == Gpu(
        uuid="GPU-ffa1b2c3d4e5f603",
        name="AMD Instinct MI300X",
        memory_bytes=192 * 2**30,
        driver="6.3.6",
        compute_capability=None,
        numa_node=3,
        architecture="gfx942",
    )
    assert gpu_settings(C.uuid) == {
        "power_limit_watts": 500.0,
        "power_limit_default_watts": 750.0,
        "pcie_generation": 5,
        "pcie_width": 16,
    }
    assert (gpu_with_uuid("GPU-0000000000000000"), gpu_settings("GPU-0000000000000000")) == (None, {})


@pytest.mark.parametrize(
    ("architecture", "is_fast"), [("gfx90a", True), ("gfx942", True), ("gfx906", False), ("gfx1030", False)]
)
def test_bf16_is_fast_where_there_are_units_for_it(architecture: str, is_fast: bool) -> None:
    gpu = Gpu("GPU-1", "AMD Instinct", None, None, None, architecture=architecture)
    assert Machine(1, None, (gpu,), False).fast_bf16("cuda") is is_fast


def test_the_library_is_never_shut_down_for_torch_uses_it_too(host: FakeAmdSmi) -> None:
    visible_gpus()
    gpu_settings(C.uuid)
    gpu_monitor(C.uuid).close()
    assert host.shut_downs == 0


# --- signs of GPUs -------------------------------------------------------------------------------------------------


def test_instinct_gpus_that_cannot_be_read_are_an_error(
    host: FakeAmdSmi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host.init_code = 34
    assert visible_gpus() == ()
    with_compute_nodes(tmp_path, 90010, 90010)
    with pytest.raises(GpusUnreadable, match=r"2 AMD Instinct GPUs in .* are there, but AMD SMI: .*DRIVER_NOT_LOADED"):
        visible_gpus()
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "")
    assert visible_gpus() == ()  # hidden on purpose


def test_the_graphics_of_a_desktops_processor_are_no_gpu_to_train_on(host: FakeAmdSmi, tmp_path: Path) -> None:
    host.init_code = 34
    with_compute_nodes(tmp_path, 90012, 100306)
    assert visible_gpus() == ()


def test_a_variable_that_names_no_gpu_is_an_error(host: FakeAmdSmi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "GPU-beef")
    with pytest.raises(GpusUnreadable, match="ROCR_VISIBLE_DEVICES = 'GPU-beef' are there, but AMD SMI tells of 3"):
        visible_gpus()


def test_without_amdsmi_the_reason_says_where_it_is(host: FakeAmdSmi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    assert (gpu_monitor(C.uuid).reason or "").startswith("amdsmi cannot be imported: ")
    assert install_command("amd") in (gpu_monitor(C.uuid).reason or "")


def test_without_the_compute_driver_amdsmi_is_not_even_imported(
    host: FakeAmdSmi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(amd, "_COMPUTE_DRIVER", tmp_path / "none")
    assert visible_gpus() == ()
    assert gpu_monitor(C.uuid).reason == f"no AMD GPU: {tmp_path / 'none'} is missing"


def test_nvidias_gpus_come_first(host: FakeAmdSmi, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml.installed(FakeNvml(), monkeypatch)
    assert [gpu.uuid for gpu in visible_gpus()] == [fake_nvml.UUID]


# --- readings ------------------------------------------------------------------------------------------------------


def test_a_reading(host: FakeAmdSmi) -> None:
    host.gpus[2].violations = {"active_ppt_pwr": 1, "active_hbm_thrm": 1}
    reading = open_gpu(C.uuid).take_reading()
    assert (reading.utilisation, reading.sm_clock_mhz, reading.temperature_celsius) == (0.97, 2100, 61)
    assert (reading.power_watts, reading.is_idle) == (650.0, False)
    assert reading.slowed_by == ("power cap", "thermal (memory)")
    figures = summary([reading])
    assert figures is not None
    assert (figures.limits, figures.throttle_reasons) == (("power cap",), ("thermal (memory)",))


def test_before_mi300_the_throttlers_bits_are_read(host: FakeAmdSmi) -> None:
    host.gpus = [replace(DIES[0], throttler_bits=1 << 0 | 1 << 36)]
    assert open_gpu(DIES[0].uuid).take_reading().slowed_by == ("power cap", "thermal (hardware)")


@pytest.mark.parametrize(
    ("bits", "chip_bits", "reasons"),
    [
        (0, 5, ()),
        (1 << 3, 0, ("power cap",)),
        (1 << 16 | 1 << 23, 0, ("board limit",)),
        (1 << 34, 0, ("thermal (memory)",)),
        (1 << 40 | 1 << 45, 0, ("thermal (voltage regulator)",)),
        (1 << 47, 0, ("hardware slowdown",)),
        (1 << 57, 0, ("reliability",)),
        (1 << 8, 0, ("reason 0x100",)),
        (2**64 - 1, 0, ()),
        (2**64 - 1, 4, ("cause not reported",)),
        (2**64 - 1, 2**32 - 1, None),
    ],
)
def test_reasons_of_the_throttler(bits: int, chip_bits: int, reasons: tuple[str, ...] | None) -> None:
    assert throttler_reasons(bits, chip_bits) == reasons


def test_what_a_gpu_does_not_report_is_unknown_and_not_zero(host: FakeAmdSmi) -> None:
    host.gpus[2] = replace(
        C, utilisation_percent=0xFFFF, clock_mhz=0, temperature_celsius=None, current_watts=0xFFFF, average_watts=0
    )
    reading = open_gpu(C.uuid).take_reading()
    assert set(vars(reading).values()) == {None}
    assert summary([reading]) is None


def test_average_power_counts_where_the_current_one_is_not_reported(host: FakeAmdSmi) -> None:
    host.gpus[2] = replace(C, current_watts=0xFFFF, average_watts=280)
    assert open_gpu(C.uuid).take_reading().power_watts == 280.0


# --- energy --------------------------------------------------------------------------------------------------------


def test_the_energy_of_a_gpu(host: FakeAmdSmi) -> None:
    host.gpus[2].energy_steps = 1_000_000
    meter = energy_meter(C.uuid, 0, "boot-1")
    meter.begin()
    host.gpus[2].energy_steps = 1_000_000 + 20_000_000
    reading = meter.end()
    meter.close()
    assert reading.joules == pytest.approx(20_000_000 * 15.3e-6)
    assert (reading.source, reading.devices) == ("AMD SMI: the GPU, whoever uses it", (C.uuid,))


@pytest.mark.parametrize("rank", [2, 3])
def test_both_dies_of_a_module_read_the_energy_of_the_module(host: FakeAmdSmi, rank: int) -> None:
    """The second die's counter stays at 0; both name both dies, so that the module is counted once."""
    host.gpus = [replace(die, energy_steps=0) for die in DIES]
    host.gpus[2].energy_steps = 500
    meter = energy_meter(DIES[rank].uuid, rank, "boot-1")
    meter.begin()
    host.gpus[2].energy_steps = 500 + 10_000_000
    reading = meter.end()
    meter.close()
    assert reading.joules == pytest.approx(153.0)
    assert reading.devices == (DIES[2].uuid, DIES[3].uuid)
    assert reading.source == "AMD SMI: the GPU module, all its dies, whoever uses it"


def test_the_power_of_a_die_is_unknown_for_the_module_is_measured_as_a_whole(host: FakeAmdSmi) -> None:
    host.gpus = DIES
    assert [open_gpu(die.uuid).take_reading().power_watts for die in DIES[:2]] == [None, None]


@pytest.mark.parametrize("steps", [(0, 500), (500, 500)])
def test_dies_of_two_modules_are_not_taken_for_one(host: FakeAmdSmi, steps: tuple[int, int]) -> None:
    """A job that has the second die of one module and the first of the next."""
    host.gpus = [replace(DIES[n], hip_id=i, energy_steps=steps[i]) for i, n in enumerate((1, 2))]
    for die in host.gpus:
        with pytest.raises(EnergyUnknown):
            energy_counter(die.uuid)


@pytest.mark.parametrize("steps", [None, 0])
def test_a_gpu_that_does_not_count_its_energy(host: FakeAmdSmi, steps: int | None) -> None:
    host.gpus[2].energy_steps = steps
    with pytest.raises(EnergyUnknown, match="this GPU does not count its energy"):
        energy_counter(C.uuid)


# --- torch ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def rocm_torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Torch as it is built for ROCm, with a GPU of these properties."""
    properties = SimpleNamespace(uuid=C.torch_uuid)
    monkeypatch.setattr(torch.version, "hip", "6.4.43483")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    return properties


def test_the_gpu_of_torch_is_that_with_its_uuid(host: FakeAmdSmi, rocm_torch: Any) -> None:
    assert resources.gpu_uuid(torch.device("cuda", 1)) == C.uuid  # whatever its number


@pytest.mark.parametrize("uuid", [None, "ffffffff-ffff-ffff-ffff-ffffffffffff", "no uuid"])
def test_without_a_uuid_it_is_the_visible_gpu_with_its_number(
    host: FakeAmdSmi, rocm_torch: Any, uuid: str | None
) -> None:
    rocm_torch.uuid = uuid
    assert resources.gpu_uuid(torch.device("cuda", 1)) == A.uuid


def test_a_gpu_that_nobody_knows_is_not_the_host(
    host: FakeAmdSmi, rocm_torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rocm_torch.uuid = None
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)  # not those that AMD SMI counts
    assert resources.gpu_uuid(torch.device("cuda", 1)) is None
    monitor = resources.device_monitor(torch.device("cuda", 1))
    assert monitor.reason == "no library of its vendor knows this GPU"


@pytest.mark.parametrize(
    ("name", "tool"),
    [
        ("AMD Instinct MI250X", "amd-smi"),
        ("AMD Radeon PRO W7900", "amd-smi"),
        ("NVIDIA H100 80GB HBM3", "nvidia-smi"),
        ("Tesla T4", "nvidia-smi"),
        ("AMD EPYC", "nvidia-smi"),  # a processor
    ],
)
def test_a_gpus_name_says_by_which_command_to_look_at_it(name: str, tool: str) -> None:
    assert vendor_of_name(name).tool == tool


def test_torch_says_whose_gpus_it_computes_on() -> None:
    assert vendor_of_torch(None).library == "NVML"
    assert vendor_of_torch("6.4.43483").library == "AMD SMI"
