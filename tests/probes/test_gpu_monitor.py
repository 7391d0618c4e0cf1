"""The GPU monitor: the real pynvml over a library of known answers."""

from __future__ import annotations

import sys
import threading

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_nvml import UUID, Answers, FakeNvml, installed
from vitscale.machine.gpus import GpuReading, OpenGpu, open_gpu
from vitscale.machine.vendors.nvidia import throttling
from vitscale.probes.gpu_monitor import SamplingMonitor, gpu_monitor, summary

HOUR = 3600.0
INSTANT = 1e-4
POWER_CAP, HARDWARE, THERMAL_HARDWARE, POWER_BRAKE = 0x4, 0x8, 0x40, 0x80
IDLE, USER_CLOCKS, DISPLAY = 0x1, 0x2, 0x100


def monitor(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch, seconds: float = HOUR) -> SamplingMonitor:
    installed(fake, monkeypatch)
    made = gpu_monitor(UUID, seconds)
    assert isinstance(made, SamplingMonitor)
    return made


def opened(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> OpenGpu:
    installed(fake, monkeypatch)
    return open_gpu(UUID)


def test_figures_of_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four looks: throttled in one of them, at the power limit in another."""
    looks = [
        Answers(90, 1980, 60, 600_000, 0),
        Answers(100, 1755, 71, 700_000, POWER_CAP),
        Answers(70, 1200, 84, 500_000, THERMAL_HARDWARE | HARDWARE),
        Answers(40, 1700, 75, 400_000, IDLE | USER_CLOCKS),
    ]
    gpu = opened(FakeNvml(looks), monkeypatch)
    seen = summary([gpu.take_reading() for _ in looks])
    assert seen is not None
    assert seen.model_dump() == {
        "samples": 4,
        "utilisation": pytest.approx(0.75),
        "sm_clock_mhz_median": 1727.5,
        "sm_clock_mhz_min": 1200,
        "unheld_sm_clock_mhz": 1980,
        "temperature_celsius_max": 84,
        "power_watts_mean": 550,
        "throttle_reasons": ("hardware slowdown", "thermal (hardware)"),
        "throttled_share": 0.25,
        "limits": ("power cap",),
        "limited_share": 0.25,
    }


def reading(mhz: int | None, bits: int | None) -> GpuReading:
    slowed_by, is_idle = (throttling(bits), bool(bits & IDLE)) if bits is not None else (None, None)
    return GpuReading(0.9, mhz, 60, 300.0, slowed_by, is_idle)


@pytest.mark.parametrize(
    ("looks", "clock"),
    [
        ([(1410, USER_CLOCKS), (1395, USER_CLOCKS | POWER_CAP)], 1410),  # locked, and once below by its power
        ([(345, IDLE), (1410, 0)], 1410),
        ([(1335, POWER_CAP), (1365, POWER_CAP), (1350, 0)], None),  # at its power limit, but for a moment
        ([(1700, POWER_CAP), (210, IDLE | USER_CLOCKS), (1980, None), (None, 0)], None),
    ],
)
def test_the_clock_that_only_a_setting_holds_is_told(
    looks: list[tuple[int | None, int | None]], clock: int | None
) -> None:
    seen = summary([reading(mhz, bits) for mhz, bits in looks])
    assert seen is not None
    assert seen.unheld_sm_clock_mhz == clock


def test_looks_are_taken_while_an_epoch_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml([Answers()] * 5)
    watching = monitor(fake, monkeypatch, INSTANT)
    watching.begin()
    assert fake.enough.wait(60)
    seen = watching.end()
    watching.close()
    assert seen is not None
    assert seen.samples >= 4  # the fifth look may have been under way
    assert seen.utilisation == pytest.approx(0.97)
    assert seen.power_watts_mean == pytest.approx(652)


def test_less_than_a_second_is_unknown_for_at_its_end_the_device_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml()
    watching = monitor(fake, monkeypatch)
    watching.begin()
    assert watching.end() is None
    assert watching.reason == "NVML is asked every 3600 s, and this was over before"
    assert fake.looked == 0
    watching.close()


def test_a_look_that_was_under_way_when_an_epoch_ended_is_not_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    held, later = 99, 10
    fake = FakeNvml([Answers(utilisation_percent=n) for n in (held, later)])
    inside, go_on = threading.Event(), threading.Event()

    def stay() -> None:
        if threading.current_thread() is not threading.main_thread() and not go_on.is_set():
            inside.set()
            assert go_on.wait(60)

    fake.on_look = stay
    watching = monitor(fake, monkeypatch, INSTANT)
    watching.begin()
    assert inside.wait(60)
    watching.end()
    watching.begin()
    go_on.set()
    assert fake.enough.wait(60)
    seen = watching.end()
    watching.close()
    assert seen is not None
    assert seen.utilisation == pytest.approx(0.10)


def test_its_thread_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    watching = monitor(FakeNvml(), monkeypatch)
    watching.begin()
    assert "gpu-monitor" in {thread.name for thread in threading.enumerate()}
    watching.close()
    assert "gpu-monitor" not in {thread.name for thread in threading.enumerate()}


def test_what_a_gpu_does_not_tell_is_unknown_and_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = opened(FakeNvml([Answers(None, 1980, None, None, None)]), monkeypatch)
    seen = summary([gpu.take_reading()])
    assert seen is not None
    assert seen.sm_clock_mhz_min == 1980
    assert (seen.utilisation, seen.temperature_celsius_max, seen.power_watts_mean) == (None, None, None)
    assert (seen.throttle_reasons, seen.throttled_share) == ((), None)


def test_a_gpu_that_tells_nothing_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = opened(FakeNvml([Answers(None, None, None, None, None)]), monkeypatch)
    assert summary([gpu.take_reading()]) is None


def test_older_drivers_are_asked_by_older_names(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml([Answers(temperature_celsius=77, clock_reasons=POWER_BRAKE)])
    fake.missing = {"nvmlDeviceGetTemperatureV", "nvmlDeviceGetCurrentClocksEventReasons"}
    look = opened(fake, monkeypatch).take_reading()
    assert (look.temperature_celsius, look.slowed_by) == (77, ("power brake",))


def test_a_later_pynvml_may_have_dropped_the_older_names(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = opened(FakeNvml([Answers(None, None, None, None, None)]), monkeypatch)
    monkeypatch.delattr(pynvml, "nvmlDeviceGetTemperature")
    monkeypatch.delattr(pynvml, "nvmlDeviceGetCurrentClocksThrottleReasons")
    look = gpu.take_reading()
    assert (look.temperature_celsius, look.slowed_by) == (None, None)


@pytest.mark.parametrize(
    ("uuid", "init_code", "reason"),
    [
        (None, 0, "the rank computes on the host"),
        ("GPU-ffffffff", 0, "NVML: Not Found"),
        (UUID, 12, "NVML: NVML Shared Library Not Found"),
        (UUID, 9, "NVML: Driver Not Loaded"),
    ],
)
def test_without_nvml_there_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, uuid: str | None, init_code: int, reason: str
) -> None:
    fake = installed(FakeNvml(), monkeypatch)
    fake.init_code = init_code
    nobody = gpu_monitor(uuid)
    assert nobody.reason == reason
    nobody.begin()
    assert nobody.end() is None
    nobody.close()


def test_without_pynvml_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert (gpu_monitor(UUID).reason or "").startswith("pynvml cannot be imported: ")


def test_reasons_by_name() -> None:
    assert throttling(0) == ()
    assert throttling(IDLE | USER_CLOCKS | DISPLAY) == ()
    assert throttling(POWER_CAP | POWER_BRAKE | IDLE) == ("power cap", "power brake")
    assert throttling(0x20 | 0x40) == ("thermal (driver)", "thermal (hardware)")
    assert throttling(0x800 | 0x2000) == ("reason 0x800", "reason 0x2000")


def test_the_bits_are_those_of_nvml() -> None:
    """Against the binding's own constants: the names here are ours, the numbers are not."""
    assert throttling(pynvml.nvmlClocksEventReasonSwPowerCap) == ("power cap",)
    assert throttling(pynvml.nvmlClocksEventReasonHwSlowdown) == ("hardware slowdown",)
    assert throttling(pynvml.nvmlClocksEventReasonSyncBoost) == ("sync boost",)
    assert throttling(pynvml.nvmlClocksEventReasonSwThermalSlowdown) == ("thermal (driver)",)
    assert throttling(pynvml.nvmlClocksEventReasonHwThermalSlowdown) == ("thermal (hardware)",)
    assert throttling(pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown) == ("power brake",)
    assert throttling(pynvml.nvmlClocksThrottleReasonBoardLimit) == ("board limit",)
    assert throttling(pynvml.nvmlClocksThrottleReasonReliability) == ("reliability",)
    left_out = (
        pynvml.nvmlClocksEventReasonGpuIdle
        | pynvml.nvmlClocksEventReasonApplicationsClocksSetting
        | pynvml.nvmlClocksEventReasonDisplayClockSetting
    )
    assert throttling(left_out) == ()


@given(st.integers(0, 2**64 - 1))
def test_each_bit_that_slows_has_one_name(bits: int) -> None:
    names = throttling(bits)
    assert len(names) == len(set(names)) == (bits & ~(IDLE | USER_CLOCKS | DISPLAY)).bit_count()
