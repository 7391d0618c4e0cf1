"""Traces that Kineto wrote for others, as the events that a timeline is made of."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from vitscale.profiles.events import Event, Kind
from vitscale.profiles.timeline import STEP

TRACES = Path(os.environ.get("VITSCALE_TRACES", Path(__file__).resolve().parents[2] / "shared" / "traces"))
_KINDS: Mapping[str, Kind] = {
    "cpu_op": "operator", "user_annotation": "annotation", "kernel": "kernel", "gpu_memcpy": "copy",
    "gpu_memset": "kernel", "cuda_runtime": "launch", "cuda_driver": "launch",
}  # fmt: skip


def real_trace(name: str) -> list[Event]:
    """The events of one of `TRACES`; the test is skipped where it is not there."""
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"needs the trace {path} (VITSCALE_TRACES names another folder)")
    return list(_read(path))


@cache
def _read(path: Path) -> tuple[Event, ...]:
    return tuple(
        Event(
            _KINDS[raw["cat"]],
            _annotation(raw["name"]),
            round(raw["ts"] * 1000),
            round((raw["ts"] + raw["dur"]) * 1000),
            raw["tid"] if isinstance(raw["tid"], int) else 0,
            raw.get("args", {}).get("correlation", 0),
            raw.get("args", {}).get("Process Group Name", ""),
            raw.get("args", {}).get("Collective name", ""),
        )
        for raw in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        if raw.get("ph") == "X" and raw.get("cat") in _KINDS
    )


def _annotation(name: str) -> str:
    """In our words, where the trace marks a step, or a phase as "## forward ##"."""
    if name.startswith("ProfilerStep#"):
        return STEP
    return f"vitscale.{name.strip('# ')}" if name.startswith("## ") else name
