"""Energy by the real zeus: RAPL over a tree of files, NVML over a library of known answers."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import SimpleNamespace

import psutil
import pynvml
import pytest
import torch

from fake_nvml import UUID, FakeNvml, installed
from vitscale.probes import resources
from vitscale.probes.resources import Counter, CounterMeter, energy_meter
from vitscale.store.records import EnergyReading

rapl_of_zeus = pytest.importorskip("zeus.device.cpu.rapl", reason="needs vitscale[energy]")

RANGE_UJ = 262_143_328_850


class Rapl:
    """/sys/class/powercap/intel-rapl with zones of known counters."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def zone(self, path: str, name: str, microjoules: int) -> Path:
        zone = self.folder / path
        zone.mkdir()
        (zone / "name").write_text(f"{name}\n")
        (zone / "energy_uj").write_text(f"{microjoules}\n")
        (zone / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
        return zone

    def count(self, path: str, microjoules: int) -> None:
        (self.folder / path / "energy_uj").write_text(f"{microjoules}\n")


@pytest.fixture
def rapl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rapl]:
    folder = tmp_path / "intel-rapl"
    monkeypatch.setattr(rapl_of_zeus, "RAPL_DIR", str(folder))
    monkeypatch.setattr(resources, "RAPL_FOLDERS", (folder,))
    rapl_of_zeus.rapl_is_available.cache_clear()
    yield Rapl(folder)
    rapl_of_zeus.rapl_is_available.cache_clear()


def two_sockets(rapl: Rapl) -> None:
    """Two packages with memory; one also tells of its cores, which are part of it; psys is the whole machine."""
    rapl.zone("intel-rapl:0", "package-0", 1_000_000)
    rapl.zone("intel-rapl:0/intel-rapl:0:0", "core", 500_000)
    rapl.zone("intel-rapl:0/intel-rapl:0:1", "dram", 2_000_000)
    rapl.zone("intel-rapl:1", "package-1", 3_000_000)
    rapl.zone("intel-rapl:1/intel-rapl:1:0", "dram", 4_000_000)
    rapl.zone("intel-rapl:2", "psys", 5_000_000)


# --- RAPL ----------------------------------------------------------------------------------------------------------


def test_packages_and_memory_are_added_up_and_nothing_twice(rapl: Rapl) -> None:
    two_sockets(rapl)
    meter = energy_meter(None, 0, "boot-1")
    meter.begin()
    rapl.count("intel-rapl:0", 1_000_000 + 30_000_000)
    rapl.count("intel-rapl:0/intel-rapl:0:0", 500_000 + 20_000_000)
    rapl.count("intel-rapl:0/intel-rapl:0:1", 2_000_000 + 5_000_000)
    rapl.count("intel-rapl:1", 3_000_000 + 60_000_000)
    rapl.count("intel-rapl:1/intel-rapl:1:0", 4_000_000 + 7_500_000)
    rapl.count("intel-rapl:2", 5_000_000 + 150_000_000)
    assert meter.end() == EnergyReading(
        joules=30 + 5 + 60 + 7.5,
        source="RAPL: package-0, package-1 and memory, whoever uses them",
        reason=None,
        devices=("boot-1/package-0", "boot-1/package-1"),
    )
    meter.close()


def test_epochs_are_measured_one_by_one(rapl: Rapl) -> None:
    rapl.zone("intel-rapl:0", "package-0", 0)
    meter = energy_meter(None, 0, "boot-1")
    for before, after in ((10, 17), (100, 103)):
        rapl.count("intel-rapl:0", before * 1_000_000)
        meter.begin()
        rapl.count("intel-rapl:0", after * 1_000_000)
        assert meter.end().joules == pytest.approx(after - before)
    meter.close()


def test_a_counter_that_begins_again(rapl: Rapl) -> None:
    rapl.zone("intel-rapl:0", "package-0", RANGE_UJ - 2_000_000)
    meter = energy_meter(None, 0, "boot-1")
    meter.begin()
    rapl.count("intel-rapl:0", 3_000_000)
    assert meter.end().joules == pytest.approx(5.0)
    meter.close()


def test_no_process_is_started_that_would_outlive_a_killed_rank(rapl: Rapl) -> None:
    """zeus on its own starts one for each counter."""
    two_sockets(rapl)
    before = psutil.Process().children(recursive=True)
    meter = energy_meter(None, 0, "boot-1")
    meter.begin()
    meter.end()
    assert psutil.Process().children(recursive=True) == before
    meter.close()


def test_its_thread_ends_with_it(rapl: Rapl) -> None:
    rapl.zone("intel-rapl:0", "package-0", 0)
    meter = energy_meter(None, 0, "boot-1")
    assert "energy" in {thread.name for thread in threading.enumerate()}
    meter.close()
    assert "energy" not in {thread.name for thread in threading.enumerate()}


def test_only_local_rank_0_reads(rapl: Rapl) -> None:
    two_sockets(rapl)
    meter = energy_meter(None, 1, "boot-1")
    meter.begin()
    assert meter.end() == EnergyReading(joules=None, source=None, reason="measured by local rank 0")
    meter.close()


def test_a_counter_that_cannot_be_read_any_more_is_unknown_for_that_epoch(rapl: Rapl) -> None:
    zone = rapl.zone("intel-rapl:0", "package-0", 0)
    meter = energy_meter(None, 0, "boot-1")
    meter.begin()
    (zone / "energy_uj").unlink()
    reading = meter.end()
    assert (reading.joules, reading.source) == (None, "RAPL: package-0, whoever uses them")
    assert (reading.reason or "").startswith("FileNotFoundError: ")
    rapl.count("intel-rapl:0", 0)
    meter.begin()
    rapl.count("intel-rapl:0", 1_000_000)
    assert meter.end().joules == pytest.approx(1.0)
    meter.close()


def reason_of(gpu_uuid: str | None = None) -> str:
    meter = energy_meter(gpu_uuid, 0, "boot-1")
    meter.begin()
    reading = meter.end()
    meter.close()
    assert reading.joules is None
    return reading.reason or ""


def test_without_rapl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resources, "RAPL_FOLDERS", (tmp_path / "none",))
    assert reason_of() == f"no RAPL on this host: {tmp_path / 'none'} is missing"


def test_with_rapl_of_no_package(rapl: Rapl) -> None:
    assert reason_of() == f"no RAPL on this host: {rapl.folder} holds no processor package"
    rapl.zone("intel-rapl:0", "psys", 0)
    assert reason_of() == f"no RAPL on this host: {rapl.folder} holds no processor package"


@pytest.mark.parametrize("refused", [PermissionError("denied"), OSError("input/output error"), RuntimeError("zeus!")])
def test_whatever_zeus_raises_becomes_the_reason(
    rapl: Rapl, monkeypatch: pytest.MonkeyPatch, refused: Exception
) -> None:
    """Only root may read the counters on most hosts; and zeus wraps only some of what its libraries raise."""
    two_sockets(rapl)

    def refuse(*_: object) -> None:
        raise refused

    monkeypatch.setattr(rapl_of_zeus.RAPLFile, "__init__", refuse)
    assert reason_of() == f"{type(refused).__name__}: {refused}"


@pytest.fixture
def no_zeus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were not installed."""

    class NotInstalled(MetaPathFinder):
        def find_spec(self, name: str, path: object, target: object = None) -> None:
            if name == "zeus":
                raise ModuleNotFoundError("No module named 'zeus'", name="zeus")

    for name in [name for name in sys.modules if name == "zeus" or name.startswith("zeus.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [NotInstalled(), *sys.meta_path])


def test_without_zeus_the_reason_says_what_to_install(rapl: Rapl, no_zeus: None) -> None:
    two_sockets(rapl)
    assert reason_of() == reason_of(UUID) == "the zeus library is not here: it comes with vitscale's extra energy"


def test_nobody_is_sent_to_install_zeus_where_there_is_nothing_to_measure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_zeus: None
) -> None:
    monkeypatch.setattr(resources, "RAPL_FOLDERS", (tmp_path / "none",))
    assert "no RAPL" in reason_of()


# --- NVML ----------------------------------------------------------------------------------------------------------


def test_a_gpu_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever CUDA_VISIBLE_DEVICES holds: zeus itself reads it as a list of numbers."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", UUID)
    fake = installed(FakeNvml(), monkeypatch)
    fake.energy_millijoules = 7_000
    meter = energy_meter(UUID, 5, "boot-1")
    meter.begin()
    fake.energy_millijoules += 123_456
    reading = meter.end()
    meter.close()
    assert reading.joules == pytest.approx(123.456)
    assert (reading.source, reading.devices) == ("NVML: the GPU, whoever uses it", (UUID,))


def test_a_counter_that_did_not_move_is_unknown_and_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(FakeNvml(), monkeypatch)
    assert reason_of(UUID) == "the counter of energy did not move: it is updated every 20 to 100 ms"


def test_a_counter_that_went_back_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that was loaded again counts from 0."""
    fake = installed(FakeNvml(), monkeypatch)
    fake.energy_millijoules = 9_000
    meter = energy_meter(UUID, 0, "boot-1")
    meter.begin()
    fake.energy_millijoules = 10
    assert meter.end().reason == "the counter went back"
    meter.close()


def test_a_gpu_that_is_lost_in_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = installed(FakeNvml(), monkeypatch)
    meter = energy_meter(UUID, 0, "boot-1")
    meter.begin()
    fake.energy_code = pynvml.NVML_ERROR_GPU_IS_LOST
    assert meter.end().reason == "ZeusGPULostError: GPU is lost"
    meter.close()


def test_a_slice_of_a_gpu_is_not_given_the_energy_of_another_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML numbers a slice among those of its GPU: the fourth one has the number of the host's fourth GPU."""
    fake = installed(FakeNvml(), monkeypatch)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda _: "slice")
    meter = energy_meter(UUID.replace("GPU", "MIG"), 0, "boot-1")
    meter.begin()
    fake.energy_millijoules += 700_000
    reading = meter.end()
    meter.close()
    assert reading.joules is None
    assert reading.reason == "a slice of a GPU (MIG) does not count its energy apart from the others"


def test_a_gpu_that_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(FakeNvml(), monkeypatch).architecture = pynvml.NVML_DEVICE_ARCH_PASCAL
    assert reason_of(UUID) == "this GPU does not count its energy: Volta and later do"


def test_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(FakeNvml(), monkeypatch).init_code = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    assert reason_of(UUID) == "NVMLError_LibraryNotFound: NVML Shared Library Not Found"


# --- keeping up ----------------------------------------------------------------------------------------------------


def test_a_counter_that_begins_again_twice_in_an_epoch_is_read_in_between() -> None:
    """100 J of range: 90 -> 20 -> 95 -> 10 is 30 + 75 + 15 J, of which begin and end alone see 20."""
    values = [90.0, 20.0, 95.0, 10.0]
    all_read = threading.Event()

    def read() -> float:
        if len(values) == 1:
            all_read.set()
            return values[0]
        return values.pop(0)

    meter = CounterMeter([Counter(read, range_joules=100.0)], "RAPL", ("x",), seconds_between_readings=1e-4)
    meter.begin()
    assert all_read.wait(60)
    assert meter.end().joules == pytest.approx(30 + 75 + 15)
    meter.close()


@pytest.mark.parametrize("kind", ["GPU", "MIG"])
def test_a_slice_of_a_gpu_is_asked_for_by_its_own_name(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA tells a slice's UUID without the word by which NVML knows it (MIG mode)."""
    bare = "a65afc88-50b5-5ccf-b0a8-f93b3247ae9e"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=bare))
    monkeypatch.setattr(resources, "gpu_with_uuid", lambda uuid: uuid if uuid == f"{kind}-{bare}" else None)
    assert resources.gpu_uuid(torch.device("cuda")) == f"{kind}-{bare}"
    assert resources.gpu_uuid(torch.device("cpu")) is None
