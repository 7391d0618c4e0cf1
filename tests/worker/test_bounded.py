"""Stages end in time, and say how."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from check_factory import request
from results_factory import make_environment, make_trial
from vitscale.probes.gpu_monitor import GpuMonitor
from vitscale.store.checks import STAGES, CheckStage, StageLine
from vitscale.worker import check_stages, group
from vitscale.worker.check_stages import CheckStages
from vitscale.worker.rank_process import RankInfo


class Recorded:
    def __init__(self, limits: dict[CheckStage, float] | None = None, *, on_gpu: bool = False) -> None:
        self.lines: list[StageLine] = []
        self.begun: list[CheckStage] = []
        self.prepared: list[str] = []
        self.stages = CheckStages(
            dict.fromkeys(STAGES, 60.0) | (limits or {}),
            self.lines.append,
            self.begun.append,
            lambda: self.prepared.append(threading.current_thread().name),
            on_gpu=on_gpu,
        )


def test_a_stage_that_is_done() -> None:
    found = Recorded()
    done: list[str] = []
    assert found.stages.do("matmul", lambda: done.append(threading.current_thread().name))
    assert done == found.prepared == ["stage-matmul"]
    assert found.begun == ["matmul"]
    assert [(line.name, line.ending, line.reason) for line in found.lines] == [("matmul", "done", "")]


def test_a_stage_that_hangs_is_left_and_the_next_one_begins() -> None:
    found = Recorded({"join": 0.2})
    for_ever = threading.Event()

    def hang() -> None:
        for_ever.wait()

    assert not found.stages.do("join", hang)
    assert found.stages.do("disk", lambda: None)
    for_ever.set()
    assert [(line.name, line.ending) for line in found.lines] == [("join", "timeout"), ("disk", "done")]
    assert found.lines[0].reason == "not done after 0.2 s"


def hanging(event: threading.Event) -> Callable[[], None]:
    """Work that ends when the event comes."""

    def wait() -> None:
        event.wait()

    return wait


def test_after_a_stage_that_hangs_on_a_gpu_only_what_needs_no_gpu_is_done() -> None:
    found = Recorded({"collectives": 0.05}, on_gpu=True)
    for_ever = threading.Event()
    assert found.stages.do("matmul", lambda: None, uses_device=True)
    assert not found.stages.do("collectives", hanging(for_ever), uses_device=True)
    has_device_afterwards = found.stages.has_device
    assert not has_device_afterwards
    assert not found.stages.do("compute", lambda: None, uses_device=True)
    assert found.stages.do("loader", lambda: None)
    for_ever.set()
    assert [(line.name, line.ending) for line in found.lines] == [
        ("matmul", "done"), ("collectives", "timeout"), ("compute", "skipped"), ("loader", "done"),
    ]  # fmt: skip
    assert found.lines[2].reason == "not measured: a collective before it hung"
    assert found.begun == ["matmul", "collectives", "loader"]


@pytest.mark.parametrize(("on_gpu", "uses_device"), [(False, True), (True, False)])
def test_what_hangs_elsewhere_leaves_the_device_to_later_stages(on_gpu: bool, uses_device: bool) -> None:
    found = Recorded({"collectives": 0.05}, on_gpu=on_gpu)
    for_ever = threading.Event()
    assert not found.stages.do("collectives", hanging(for_ever), uses_device=uses_device)
    assert found.stages.do("compute", lambda: None, uses_device=True)
    for_ever.set()


def test_a_hung_collective_takes_neither_matmul_nor_compute_nor_loader_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A rank of two on GPUs, scripted: whatever it waits for others in is on the host, before and after."""
    trial = make_trial("ddp", 2, device="cuda")
    wanted = request(
        world=trial.world, device="cuda", trial=trial, limits=dict.fromkeys(STAGES, 60.0) | {"collectives": 0.05}
    )
    for_ever = threading.Event()
    met: list[str] = []
    pinned: list[bool] = []
    lines: list[Any] = []

    def meet(name: str, seconds: float) -> bool:
        met.append(name)
        return True

    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(group, "device_of", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(group, "join", lambda *_, **__: "nccl")
    monkeypatch.setattr(group, "barrier", hanging(for_ever))
    monkeypatch.setattr(group, "meet_on_host", meet)
    monkeypatch.setattr(check_stages, "environment", lambda *_: make_environment())
    monkeypatch.setattr(check_stages, "gpu_uuid", lambda _: None)
    monkeypatch.setattr(check_stages, "device_monitor", lambda *_: GpuMonitor(reason="no GPU"))
    monkeypatch.setattr(check_stages, "measured_matmul", lambda *_: None)
    monkeypatch.setattr(check_stages, "compute_speed", lambda *_: "speed")
    monkeypatch.setattr(check_stages, "loader_rate", lambda *_, pin: pinned.append(pin))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    log: Any = SimpleNamespace(write=lines.append)
    check_stages.measure(wanted, RankInfo(0, 2, 0, None), log, tmp_path, host_cores=4)
    for_ever.set()
    endings = [(line.name, line.ending) for line in lines if isinstance(line, StageLine)]
    assert endings == [
        ("facts", "done"), ("join", "done"), ("matmul", "done"), ("compute", "done"), ("collectives", "timeout"),
        ("loader", "done"), ("disk", "done"),
    ]  # fmt: skip
    assert met == ["matmul", "compute"]
    assert pinned == [False], "to pin memory is to wait for the GPU"


def test_a_stage_that_raises_tells_its_reason_on_one_line() -> None:
    found = Recorded()

    def fail() -> None:
        raise RuntimeError("no such thing\nand a long story \udcff")

    assert not found.stages.do("loader", fail)
    (line,) = found.lines
    assert (line.ending, line.reason) == ("failed", "RuntimeError: no such thing")
    line.model_dump_json()


def test_what_cannot_be_written_as_utf8_is_escaped() -> None:
    found = Recorded()

    def fail() -> None:
        raise OSError("a path with \udcff")

    found.stages.do("disk", fail)
    assert found.lines[0].model_dump_json()


def test_a_stage_that_is_not_begun() -> None:
    found = Recorded()
    found.stages.skip("collectives", "there is one rank")
    assert found.begun == []
    assert [(line.ending, line.reason) for line in found.lines] == [("skipped", "there is one rank")]
