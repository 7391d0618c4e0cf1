"""The profiler around real steps, in this process."""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from vitscale.probes import steps
from vitscale.probes.steps import Explainer

CPU = torch.device("cpu")


Span = tuple[float, float]
"""Seconds at least and at most: by clocks inside and outside of what the profiler is told, however busy the machine."""


def step(explainer: Explainer, number: int, matrix: torch.Tensor) -> tuple[Span, Span]:
    """A step that waits 30 ms and more for data and computes; how long it took, and how long computing did."""
    began = time.perf_counter()
    with explainer.step(number):
        entered = time.perf_counter()
        with explainer.phase("data"):
            time.sleep(0.03)
        computes = time.perf_counter()
        with explainer.phase("forward"):
            inside = time.perf_counter()
            for _ in range(20):
                matrix = torch.tanh(matrix @ matrix)
            computed = time.perf_counter() - inside
        outside = time.perf_counter() - computes
        ended = time.perf_counter() - entered
    return (ended, time.perf_counter() - began), (computed, outside)


def test_on_a_gpu_the_profiler_first_starts_with_the_first_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUPTI would stay attached through every timed step, and an empty session may cost later ones their kernels."""
    profile = Mock()
    monkeypatch.setattr("vitscale.probes.steps.profile", profile)
    Explainer(torch.device("cuda"), 1).warm_up()
    assert profile.call_count == 0
    Explainer(CPU, 1).warm_up()
    assert profile.call_count == 1


def test_a_block_tells_each_of_its_steps(tmp_path: Path) -> None:
    explainer, matrix = Explainer(CPU, 1, tmp_path), torch.randn(200, 200)
    explainer.warm_up()
    step(explainer, 0, matrix)
    explainer.begin_block()
    measured = [step(explainer, number, matrix) for number in (1, 2)]
    lines = explainer.end_block(rank=0)
    step(explainer, 3, matrix)
    assert [line.step for line in lines] == [1, 2]
    for line, (seconds, computed) in zip(lines, measured, strict=True):
        assert 0.99 * seconds[0] <= line.seconds <= 1.01 * seconds[1]
        (data, *_), (name, start, end) = line.phases
        assert (data, name) == ("data", "forward")
        assert 0.99 * computed[0] <= end - start <= 1.01 * computed[1]
        assert line.collectives == ()
    (trace,) = tmp_path.glob("trace-rank-0-block-0.json.gz")
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert {"vitscale.step", "vitscale.forward", "aten::mm"} <= names


def test_what_gloo_is_about_to_record_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective is complete before its thread has recorded the end: here as if it had lost its core between them."""
    monkeypatch.setattr(steps, "_GLOO_SECONDS", 300.0)  # a busy machine takes longer than the usual one for this work
    completed, recorded = threading.Event(), threading.Event()

    def lose_the_core(_: object) -> None:
        completed.set()
        hashlib.pbkdf2_hmac("sha256", b"a", b"b", 300_000)  # without the interpreter's lock
        recorded.set()

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        explainer = Explainer(CPU, 1)
        explainer.begin_block()
        with explainer.step(0):
            work = dist.all_reduce(torch.ones(4), async_op=True)
            then = work.get_future().then(lose_the_core)
            completed.wait()
        (line,) = explainer.end_block(rank=0)
        assert recorded.is_set()
        assert len(line.collectives) == 1
        then.wait()
    finally:
        dist.destroy_process_group()


def test_blocks_are_numbered_and_end_only_once() -> None:
    explainer, matrix = Explainer(CPU, 1), torch.randn(20, 20)
    for block in (0, 1):
        explainer.begin_block()
        step(explainer, block, matrix)
        assert [line.block for line in explainer.end_block(rank=0)] == [block]
    with pytest.raises(RuntimeError, match="no explained block"):
        explainer.end_block(rank=0)
