"""Traces that Kineto wrote for others, as the events that a timeline is made of."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest

from vitscale.profiles.timeline import Event
from vitscale.profiles.trace_figures import steps_of
from vitscale.profiles.trace_file import Trace, read_trace

TRACES = Path(os.environ.get("VITSCALE_TRACES", Path(__file__).resolve().parents[2] / "shared" / "traces"))
A100, V100 = "a100-world2-nccl-rank0.json.gz", "v100-world2-nccl-rank1.json.gz"
MI300X, ALEXNET = "mi300x-world8-rccl-resnet-rank0.json.gz", "a100-one-gpu-alexnet.json.gz"


def trace_path(name: str) -> Path:
    """One of `TRACES`; the test is skipped where it is not there."""
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"needs the trace {path} (VITSCALE_TRACES names another folder)")
    return path


@cache
def trace_of(name: str) -> Trace:
    """One of `TRACES` as read."""
    return read_trace(trace_path(name))


def real_trace(name: str) -> list[Event]:
    """Its events, with the annotations of our own profiles in place of its own."""
    trace = trace_of(name)
    return [*(event for event in trace.events if event.kind != "annotation"), *steps_of(trace).annotations]
