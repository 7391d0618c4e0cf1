"""Traces as other releases, tools and machines write them: what a plain sweep of their events finds comes out."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kineto_traces import A100, MI300X, trace_path
from vitscale.errors import StoreError
from vitscale.profiles import trace_json
from vitscale.profiles.timeline import steps_on_cuda
from vitscale.profiles.trace_figures import DeviceTime, step_spans, steps_of
from vitscale.profiles.trace_file import Trace, read_trace

Json = dict[str, Any]
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@cache
def sample(name: str, kernels: int = 1500) -> str:
    """The first so much of a real trace's device, with all that launched it and every range."""
    job = json.loads(gzip.decompress(trace_path(name).read_bytes()))
    events = sorted(job["traceEvents"], key=lambda event: float(event.get("ts", 0)))
    ran = [event for event in events if event.get("cat") in ON_DEVICE][:kernels]
    correlations = {event["args"]["correlation"] for event in ran}
    launches = [e for e in events if e.get("cat") == "cuda_runtime" and e["args"].get("correlation") in correlations]
    rest = [e for e in events if e.get("cat") in ("user_annotation", "gpu_user_annotation") or e["ph"] == "M"]
    return json.dumps({**job, "traceEvents": [*rest, *launches, *ran]})


def swept(events: Iterable[Any]) -> dict[str, float]:
    """Seconds by kind, from the edges of all that ran on the device in their order: by other means than intervals."""
    edges = []
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in ON_DEVICE:
            kind = "copy" if event["cat"] == "gpu_memcpy" else "comm" if "nccl" in event["name"] else "compute"
            start = float(event["ts"])
            edges += [(start, 1, kind), (start + float(event["dur"]), -1, kind)]
    edges.sort(key=lambda edge: edge[0])
    live = {"copy": 0, "comm": 0, "compute": 0}
    seconds = dict.fromkeys(("compute", "exposed", "copy", "idle", "comm"), 0.0)
    last = edges[0][0]
    for moment, change, kind in edges:
        now = [name for name in ("compute", "comm", "copy") if live[name]]
        into = {"compute": "compute", "comm": "exposed", "copy": "copy"}[now[0]] if now else "idle"
        seconds[into] += (moment - last) / 1e6
        seconds["comm"] += (moment - last) / 1e6 if live["comm"] else 0.0
        live[kind] += change
        last = moment
    return seconds | {"total": (edges[-1][0] - edges[0][0]) / 1e6}


def told(trace: Trace) -> dict[str, float]:
    device = DeviceTime(trace)
    assert device.span is not None
    shares = device.shares(device.span)
    return {
        "compute": shares.compute_seconds, "exposed": shares.exposed_communication_seconds,
        "copy": shares.copy_seconds, "idle": shares.idle_seconds, "comm": shares.communication_seconds,
        "total": shares.total_seconds,
    }  # fmt: skip


def each(change: Callable[[Json], Json | None]) -> Callable[[Json], Json]:
    """A rewriting of every event."""

    def rewritten(job: Json) -> Json:
        events = (change(event) for event in job["traceEvents"])
        return {**job, "traceEvents": [event for event in events if event is not None]}

    return rewritten


def on_device(change: Callable[[Json], Json]) -> Callable[[Json], Json]:
    return each(lambda event: change(event) if event.get("cat") in ON_DEVICE else event)


def as_text(event: Json) -> Json:
    own: Json = {name: str(event[name]) for name in ("ts", "dur", "pid", "tid") if name in event}
    return {**event, **own, "args": {name: str(value) for name, value in event.get("args", {}).items()}}


def moved(event: Json, us: float) -> Json:
    return {**event, "ts": float(event["ts"]) + us} if "ts" in event else event


def from_the_first_kernel(job: Json) -> Json:
    first = min(float(event["ts"]) for event in job["traceEvents"] if event.get("cat") in ON_DEVICE)
    return each(lambda event: moved(event, -first))(job)


def in_begins_and_ends(job: Json) -> Json:
    events = []
    for event in job["traceEvents"]:
        if event["ph"] == "X":
            lane = {name: event[name] for name in ("pid", "tid")}
            end = {"ph": "E", **lane, "ts": float(event["ts"]) + float(event["dur"])}
            events += [{**event, "ph": "B"}, end]
        else:
            events.append(event)
    return {**job, "traceEvents": events}


def among_others(job: Json) -> Json:
    """What torch writes beside: nothing of it is time of the device."""
    lane, long = {"pid": 1, "tid": 1}, {"ph": "X", "ts": float(job["traceEvents"][-1]["ts"]) - 1e6, "dur": 9e6}
    other = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", **lane, "ts": 12.5, "dur": 3},  # of another clock
        {"ph": "X", "cat": "kernel", "name": "lost", **lane, "ts": 0, "dur": 0},
        {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", **lane, "ts": long["ts"], "args": {"Bytes": -512}},
        {"ph": "C", "name": "power", "pid": 1, "ts": long["ts"], "args": {"W": 300}},
        {**long, "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "PyTorch Profiler"},
        {**long, "cat": "python_function", "name": "nn.Module: Net_0", **lane, "args": {"Python parent id": None}},
        {**long, "cat": "cuda_sync", "name": "Stream Sync", "pid": 0, "tid": 7, "args": {"stream": 7}},
        {**long, "cat": "overhead", "name": "Buffer Flush", "pid": 1, "tid": -1},
    ]
    return {**job, "traceEvents": [*other, *job["traceEvents"]]}


VARIANTS: dict[str, Callable[[Json], Json]] = {
    "numbers as text": each(as_text),
    "processes and threads in words": on_device(lambda e: {**e, "pid": f"GPU {e['pid']}", "tid": f"stream {e['tid']}"}),
    "time from the first kernel": from_the_first_kernel,
    "time in 2026": each(lambda event: moved(event, 1.7e15 - 4.4e12)),
    "whole microseconds": each(lambda e: {**e, **{name: int(e[name]) for name in ("ts", "dur") if name in e}}),
    "the device's clock 0.3 ms behind the host's": on_device(lambda event: moved(event, -300)),
    "the device's clock 50 ms behind": on_device(lambda event: moved(event, -50_000)),
    "events in reverse": lambda job: {**job, "traceEvents": job["traceEvents"][::-1]},
    "events before all else": lambda job: {"traceEvents": job["traceEvents"]} | job,
    "begins and ends": in_begins_and_ends,
    "other events": among_others,
    "device ranges as the host's": each(
        lambda e: {**e, "cat": "user_annotation"} if e.get("cat") == "gpu_user_annotation" else e
    ),
}


@pytest.mark.parametrize("name", [A100, MI300X])
@pytest.mark.parametrize("variant", VARIANTS)
def test_however_a_trace_is_written_its_time_is_the_same(name: str, variant: str, tmp_path: Path) -> None:
    content = json.loads(sample(name))
    plain, path = tmp_path / "plain.json", tmp_path / "trace.json"
    plain.write_text(json.dumps(content))
    path.write_text(json.dumps(VARIANTS[variant](content)))
    before, trace = read_trace(plain), read_trace(path)
    expected = swept(json.loads(path.read_text())["traceEvents"] if "whole" in variant else content["traceEvents"])
    about = 1e-4 if "2026" in variant else 1e-6  # a float of 2026 in microseconds is off by 0.25, 1,500 times
    assert told(trace) == pytest.approx(expected, rel=1e-5, abs=about)
    steps, same = steps_of(trace), steps_of(before)
    assert (steps.numbers, steps.found_by) == (same.numbers, same.found_by)
    spans = [end - begin for _, (begin, end), _ in step_spans(trace, steps)]
    assert spans == pytest.approx([end - begin for _, (begin, end), _ in step_spans(before, same)], abs=3000)
    lines, as_before = (
        steps_on_cuda([*(e for e in some.events if e.kind != "annotation"), *found.annotations], found.numbers, 0, 2)
        for some, found in ((trace, steps), (before, same))
    )
    assert [line.unknown for line in lines] == [line.unknown for line in as_before]
    assert [line.seconds for line in lines] == pytest.approx([line.seconds for line in as_before], abs=3e-6)


SLIPS: dict[str, Callable[[str], str | bytes]] = {
    "inf": lambda text: text.replace('"correlation"', '"memory bandwidth (GB/s)": inf, "correlation"'),
    "nan": lambda text: text.replace('"correlation"', '"est. achieved occupancy %": -nan, "correlation"'),
    "NaN": lambda text: text.replace('"correlation"', '"rate": NaN, "correlation"'),
    "N/A": lambda text: text.replace('"correlation"', '"rate": N/A, "correlation"'),
    "paths of Windows": lambda text: text.replace('"name": "', '"name": "C:\\Users\\x\\t.py \\\\', 3),
    "control characters": lambda text: text.replace('"name": "', '"name": "\x01\t', 3),
    "no UTF-8": lambda text: text.encode().replace(b'"name": "', b'"name": "\xff\xfe', 3),
}


@pytest.mark.parametrize("slip", SLIPS)
@pytest.mark.parametrize("long", [False, True], ids=["one block", "blocks"])
def test_what_releases_wrote_that_is_no_json_is_read(
    slip: str, long: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if long:
        monkeypatch.setattr("vitscale.profiles.trace_json._BLOCK_BYTES", 50_000)
    content = sample(A100)
    spoilt = SLIPS[slip](content)
    path = tmp_path / "trace.json"
    path.write_bytes(spoilt if isinstance(spoilt, bytes) else spoilt.encode())
    assert told(read_trace(path)) == pytest.approx(swept(json.loads(content)["traceEvents"]), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("spoil", [lambda text: text[: len(text) // 2], lambda text: text.replace('"pid"', "pid", 1)])
def test_what_no_release_wrote_is_still_refused(spoil: Callable[[str], str], tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(spoil(sample(A100)))
    with pytest.raises(StoreError, match="cut off or broken after"):
        read_trace(tmp_path / "trace.json")


def test_a_broken_beginning_is_not_tried_again_with_every_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 300 blocks: 64 places at which the first may end, then again when twice as much is read."""
    tried: list[int] = []
    decoded = trace_json._decode_events

    def counted(text: bytes, mend: bool) -> list[Any] | None:
        tried.append(len(text))
        return decoded(text, mend)

    monkeypatch.setattr(trace_json, "_BLOCK_BYTES", 1000)
    monkeypatch.setattr(trace_json, "_decode_events", counted)
    event = '{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 1},\n'
    (tmp_path / "trace.json").write_text('{"traceEvents": [{"ph: "X"},' + event * 5000)
    with pytest.raises(StoreError, match="cut off or broken after 0 events"):
        read_trace(tmp_path / "trace.json")
    assert 64 <= len(tried) <= 64 * 10


def test_other_libraries_collectives_are_communication_in_every_figure(tmp_path: Path) -> None:
    job = json.loads(sample(A100))
    other = on_device(
        lambda e: e | ({"name": "void vllm::cross_device_reduce_2stage<half, 8>"} if "nccl" in e["name"] else {})
    )
    (tmp_path / "trace.json").write_text(json.dumps(other(job)))
    trace = read_trace(tmp_path / "trace.json")
    assert told(trace) == pytest.approx(swept(job["traceEvents"]), rel=1e-5, abs=1e-6)
    steps = steps_of(trace)
    events = [*(event for event in trace.events if event.kind != "annotation"), *steps.annotations]
    assert any(line.collectives for line in steps_on_cuda(events, steps.numbers, 0, 2))


def test_a_step_alone_is_told_and_what_infers_is_forward(tmp_path: Path) -> None:
    """One marked step, of an inference: 40 us of computing, 10 of nothing and 20 of computing."""
    host = {"ph": "X", "pid": 9, "tid": 9}
    events = [
        {**host, "cat": "user_annotation", "name": "ProfilerStep#7", "ts": 100, "dur": 60},
        {**host, "cat": "cpu_op", "name": "aten::relu", "ts": 101, "dur": 50},
        *({**host, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 105, "dur": 1, "args": {"correlation": n}}
          for n in (1, 2)),
        *({"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": at, "dur": lasts,
           "args": {"correlation": n, "stream": 7, "device": 0}} for n, at, lasts in ((1, 120, 40), (2, 170, 20))),
    ]  # fmt: skip
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    trace = read_trace(tmp_path / "trace.json")
    steps = steps_of(trace)
    assert steps.found_by.endswith("(ProfilerStep), one step, taken from its first kernel")
    events_of = [*(event for event in trace.events if event.kind != "annotation"), *steps.annotations]
    (line,) = steps_on_cuda(events_of, steps.numbers, 0, 1, first_is_whole=steps.first_is_whole)
    assert line.step == 7
    assert line.seconds == pytest.approx(70e-6)
    assert [phase for phase, _, _ in line.phases] == ["forward"]
    (gap,) = line.idle
    assert gap == pytest.approx((40e-6, 50e-6))
