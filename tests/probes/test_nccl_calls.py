"""The groups of NCCL's calls in real events of torch's profiler, which a small extension records on a host."""

from __future__ import annotations

import ctypes
import gzip
import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from vitscale.probes.steps import _exported_metadata, events_of, metadata_in_trace, timeline_events
from vitscale.profiles.timeline import Event

SOURCE = Path(__file__).parents[1] / "nccl_calls.cpp"
CALLS = (("0", "default_pg", "allreduce"), ("1", "mesh_shard", "_allgather_base"), ("2", "mesh_replicate", "allreduce"))


@pytest.fixture(scope="module")
def extension(pytestconfig: pytest.Config) -> ctypes.CDLL:
    """The extension, which is built once for each torch: half a minute on a busy core."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler (g++) to build real calls of NCCL with")
    assert pytestconfig.cache is not None
    version = hashlib.sha256(f"{torch.__version__} {SOURCE.read_text()}".encode()).hexdigest()[:16]
    built = pytestconfig.cache.mkdir("nccl_calls") / f"{version}.so"
    if not built.exists():
        folder = Path(torch.__file__).parent
        draft = built.with_suffix(f".{id(built)}")
        abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
        command = [
            compiler, "-std=c++20", "-O0", "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
            f"-I{folder / 'include'}", f"-I{folder / 'include/torch/csrc/api/include'}", str(SOURCE), "-o", str(draft),
            f"-L{folder / 'lib'}", "-ltorch_cpu", "-lc10",
        ]  # fmt: skip
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        if finished.returncode != 0:
            pytest.skip(f"the extension cannot be built here: {finished.stderr[-300:]}")
        draft.rename(built)
    return ctypes.CDLL(str(built))


@pytest.fixture
def recorded(extension: ctypes.CDLL) -> Any:
    with profile(activities=[ProfilerActivity.CPU]) as finished:
        for group, description, operation in CALLS:
            extension.record_call(group.encode(), description.encode(), operation.encode(), ctypes.c_int64(8))
    return finished


def kineto_events(finished: Any) -> list[Any]:
    results: Any = finished.profiler
    return list(results.kineto_results.events())


def with_kernels(events: list[Any]) -> list[Any]:
    """The events, and for each call a kernel that is linked to it, which only a GPU would add."""
    calls = [event for event in events if event.name() == "record_param_comms"]
    kernels = [kernel_of(call.correlation_id()) for call in calls]
    return [*events, *kernels]


def kernel_of(call: int) -> Any:
    values = {
        "name": "ncclDevKernel_Generic_1", "activity_type": "kernel", "start_ns": 5, "end_ns": 9,
        "device_resource_id": 7, "correlation_id": 9_000 + call, "linked_correlation_id": call,
    }  # fmt: skip
    return SimpleNamespace(**{name: (lambda value=value: value) for name, value in values.items()})


def groups_and_operations(events: list[Event]) -> list[tuple[str, str]]:
    return [(event.communicator, event.operation) for event in events if event.kind == "kernel"]


def test_a_kernel_has_the_group_and_the_collective_of_its_call(recorded: Any) -> None:
    found = timeline_events(with_kernels(kineto_events(recorded)))
    assert groups_and_operations(found) == [("0", "allreduce"), ("1", "_allgather_base"), ("2", "allreduce")]


def test_the_exported_trace_has_the_same_for_a_torch_whose_events_lack_it(recorded: Any, tmp_path: Path) -> None:
    """torch 2.11 has no `extra_meta`, and its `metadata_json` has the number of an event alone."""
    events = kineto_events(recorded)
    trace = tmp_path / "trace.json.gz"
    exported = _exported_metadata(recorded, trace)
    assert trace.exists()
    found = timeline_events(with_kernels(events), exported)
    assert groups_and_operations(found) == [("0", "allreduce"), ("1", "_allgather_base"), ("2", "allreduce")]


def test_metadata_json_has_no_fields_of_a_call(extension: ctypes.CDLL) -> None:
    """Else it would be simpler to read than a trace."""
    config = torch._C._profiler._ExperimentalConfig(expose_kineto_event_metadata=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as finished:
        extension.record_call(b"1", b"mesh_shard", b"allreduce", ctypes.c_int64(8))
    (call,) = [event for event in kineto_events(finished) if event.name() == "record_param_comms"]
    assert "Process Group Name" not in call.metadata_json()


@pytest.mark.parametrize("lacks_metadata", [False, True])
def test_a_trace_is_kept_and_written_once_whatever_the_torch(
    lacks_metadata: bool, recorded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch writes the trace of a profile once only: a second time is an error."""
    if lacks_metadata:
        old = [OldEvent(event) for event in kineto_events(recorded)]
        results = SimpleNamespace(events=lambda: old)
        profiler = SimpleNamespace(kineto_results=results, export_chrome_trace=recorded.profiler.export_chrome_trace)
        monkeypatch.setattr(recorded, "profiler", profiler)
    path = tmp_path / "kept.json.gz"
    events_of(recorded, path)
    assert path.exists()
    if lacks_metadata:
        assert _fields_of(path) == {group for group, _, _ in CALLS}


def _fields_of(path: Path) -> set[str]:
    with gzip.open(path) as file:
        return {fields["Process Group Name"] for fields in metadata_in_trace(json.load(file)).values()}


class OldEvent:
    """A real event without what torch 2.11 lacks."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def __getattr__(self, name: str) -> Any:
        if name in ("extra_meta", "activity_type"):
            raise AttributeError(name)
        return getattr(self._event, name)
