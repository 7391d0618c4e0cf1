"""Reads a trace file of the PyTorch profiler (Kineto's Chrome format), plain or gzipped, as a stream.

What a timeline is made of is kept: what ran on the device, the calls that launched it, ranges that the user or torch
marked, calls of collectives, and the products whose shapes were recorded. All else is passed over, so that memory
follows the device's events and not the file. Times are rebased: in nanoseconds since 1970 a float is off by 256 ns.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from vitscale.errors import StoreError, printable, shown
from vitscale.profiles.kernels import COPY, dtype_name, is_collective, kind_of, operation
from vitscale.profiles.timeline import ALIKE, COMMUNICATION_CALL, KIND_OF_ACTIVITY, Event, EventKind, launches_of
from vitscale.profiles.trace_json import TraceText, integer, nanoseconds, text_of

TracedShapes = Sequence[Sequence[int]]


def product_flops(name: str, shapes: TracedShapes, concrete: Sequence[object]) -> int | None:
    """Floating-point operations of one call; None where its shapes do not tell.

    Args:
        name: the operator's name, with its namespace ("aten::addmm").
        shapes: shapes of its inputs, in order; empty for what is no tensor.
        concrete: its inputs as text, which hold the strides and paddings of a convolution.
    """
    rule = FLOPS_OF.get(name)
    try:
        flops = rule(shapes, concrete) if rule else None
    except (IndexError, ValueError, ZeroDivisionError):
        return None
    return flops if flops is not None and 0 < flops < 1 << 62 else None


def _of_matrices(first: Sequence[int], second: Sequence[int]) -> int:
    (rows, inner), columns = first[-2:], second[-1]
    return 2 * math.prod(first[:-2]) * rows * inner * columns


def _attention(shapes: TracedShapes) -> int:
    """FLOPs of the scores and of their weighted sum, for queries (..., S, D) and keys (..., T, D)."""
    queries, keys, values = shapes[:3]
    return 2 * math.prod(queries[:-1]) * keys[-2] * (queries[-1] + values[-1])


def _convolution(shapes: TracedShapes, concrete: Sequence[object]) -> int:
    images, weight = shapes[0], shapes[1]
    stride, padding, dilation = (_numbers(concrete[index]) for index in (3, 4, 5))
    if str(concrete[6]) == "True":
        return _of_pixels(images, weight)
    steps, pads, widths = (_for_each(some, len(weight) - 2) for some in (stride, padding, dilation))
    out = 1
    for size, kernel, step, pad, wide in zip(images[2:], weight[2:], steps, pads, widths, strict=True):
        out *= (size + 2 * pad - wide * (kernel - 1) - 1) // step + 1
    return 2 * images[0] * math.prod(weight) * out


def _of_pixels(images: Sequence[int], weight: Sequence[int]) -> int:
    """FLOPs of a convolution whose whole weight meets each of these pixels: its output, or a transposed one's input."""
    return 2 * images[0] * math.prod(images[2:]) * math.prod(weight)


def _convolution_backward(shapes: TracedShapes, concrete: Sequence[object]) -> int:
    transposed = len(concrete) > 7 and str(concrete[7]) == "True"
    wanted = str(concrete[-1]).strip("[]").split(",")[:2] if concrete else ["True", "True"]
    products = sum(flag.strip() == "True" for flag in wanted)
    return products * _of_pixels(shapes[1] if transposed else shapes[0], shapes[2])


def _numbers(text: object) -> list[int]:
    return [int(number) for number in str(text).strip("[]").split(",")]


def _for_each(some: Sequence[int], axes: int) -> list[int]:
    return list(some) * axes if len(some) == 1 else list(some)


_SDPA = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
FLOPS_OF: Mapping[str, Callable[[TracedShapes, Sequence[object]], int]] = {
    **dict.fromkeys(
        ("aten::mm", "aten::_scaled_mm", "aten::bmm"), lambda shapes, _: _of_matrices(shapes[0], shapes[1])
    ),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm"), lambda shapes, _: _of_matrices(shapes[1], shapes[2])),
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    **{f"aten::_scaled_dot_product_{kind}": lambda shapes, _: _attention(shapes) for kind in _SDPA},
    # The scores again, and four products for the gradients.
    **{
        f"aten::_scaled_dot_product_{kind}_backward": lambda shapes, _: _attention(shapes[1:]) * 5 // 2
        for kind in _SDPA
    },
}
"""Operator to its FLOPs. Other operators call one of these, as `aten::linear` and `aten::conv2d` do."""


_MOST_EVENTS = 20_000_000
_LONGEST_NS = 10**13
"""Longest trace: 2.8 hours."""
_KINDS: Mapping[str, EventKind] = {**KIND_OF_ACTIVITY, "operator": "operator", "runtime": "launch", "driver": "launch",
                              "memcpy": "copy", "memset": "kernel"}  # fmt: skip
"""Category in small letters to kind; torch 1.8 to 1.13 wrote "Kernel", "Runtime" and "Memcpy"."""
_PASSED_OVER = frozenset(
    (
        *("ac2g", "fwdbwd", "fwd_bwd", "async_cpu_to_gpu", "async_gpu", "python_function", "cpu_instant_event"),
        *("trace", "gpu_user_annotation", "cuda_sync", "cuda_event", "overhead", "cuda_profiler_range"),
    )
)
"""Categories that add nothing to a timeline. A range on the device repeats one on the host."""
_BACKWARD = "autograd::engine::evaluate_function"
_MARKED = re.compile(r"ProfilerStep|Optimizer\.step|.*DataParallel\.forward|enumerate\(DataLoader\)")
"""Ranges that early releases recorded as operators."""


class TracedCollective(NamedTuple):
    """A collective as the host called it, in c10d's names; a size is None where it is not told."""

    start_ns: int
    communicator: str
    operation: str
    ranks: int | None
    dtype: str | None
    input_elements: int | None
    output_elements: int | None


class TracedProduct(NamedTuple):
    """A matrix product or convolution whose shapes were recorded."""

    start_ns: int
    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    flops: int


@dataclass(frozen=True)
class TracedGroup:
    """A process group of the job."""

    name: str
    ranks: tuple[int, ...]


@dataclass
class Trace:
    """One file: one rank of a job."""

    rank: int | None
    world_size: int | None
    device: str | None
    """The name of the GPU that most of it ran on; None where the file does not tell."""
    trace_id: str | None
    backend: str | None
    versions: dict[str, str | None]
    groups: tuple[TracedGroup, ...]
    started_unix_seconds: float | None
    events: list[Event] = field(default_factory=list)
    """Events in no order. Of operators only torch's backward functions are kept."""
    calls: list[TracedCollective] = field(default_factory=list)
    products: list[TracedProduct] = field(default_factory=list)
    operators: int = 0
    """Number of operators, kept or not."""
    devices: int = 0
    """Number of GPUs that something ran on."""
    unknown: Counter[str] = field(default_factory=Counter)
    """Number of events that are left out, by why: a category that is not known, or values that cannot be."""

    @cached_property
    def launches(self) -> list[tuple[int, Event]]:
        """(Launch time, event) of what ran, in the order of launch, once all is read."""
        return launches_of(self.events)

    @property
    def on_device(self) -> list[Event]:
        """What ran on the GPU."""
        return [event for event in self.events if event.kind in ("kernel", "copy")]


def read_trace(path: Path) -> Trace:
    """Reads the rank that a file holds.

    Raises:
        StoreError: it cannot be read, is cut off, is no trace, or is larger than what is read.
    """
    text, reader = TraceText(path), _Reader(path)
    for some in text.lists():
        reader.set_clock(some)
        for raw in some:
            reader.take(raw)
    return reader.trace(text.about)


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._names: dict[str, str] = {}
        self._base_ns: int | None = None
        self._called: dict[int, TracedCollective] = {}
        self._launched_by: dict[int, int] = {}
        self._trace = Trace(None, None, None, None, None, {}, (), None)
        self._devices: Counter[int] = Counter()
        self._device_lanes: set[tuple[str, str]] = set()
        self._host_lanes: set[tuple[str, str]] = set()
        self._host_lane: tuple[Any, Any] = (None, None)
        self._ranges: list[tuple[Event, tuple[str, str]]] = []
        self._begun: dict[tuple[str, str], list[Any]] = {}
        self._unlinked: list[int] = []

    def set_clock(self, some: Sequence[Any]) -> None:
        """Sets the clock's origin by the middle of the first events: some are of no time (pytorch/kineto issue 109)."""
        if self._base_ns is None:
            times = sorted(ns for raw in some if raw.ph in ("X", "B") and (ns := nanoseconds(raw.ts)) is not None)
            self._base_ns = times[len(times) // 2] - _LONGEST_NS if times else None

    def take(self, raw: Any) -> None:
        """Takes one event of the file."""
        trace = self._trace
        if raw.ph in ("B", "E") and (raw := self._joined(raw)) is None:
            return
        if raw.ph != "X":
            return
        category = raw.cat.lower() if isinstance(raw.cat, str) else ""
        kind = _KINDS.get(category)
        if kind is None:
            if category and category not in _PASSED_OVER:
                trace.unknown[f"category {printable(category)[:40]}"] += 1
            return
        name = raw.name
        if not isinstance(name, str):
            trace.unknown["events without a name"] += 1
            return
        arguments = raw.args
        if kind == "operator":
            trace.operators += 1
            if name.startswith(_BACKWARD):
                name = _BACKWARD
            elif _MARKED.match(name):
                kind = "annotation"
            elif name != COMMUNICATION_CALL and (name not in FLOPS_OF or arguments is None or not arguments.dims):
                return
        start_ns, end_ns = nanoseconds(raw.ts), nanoseconds(raw.dur)
        if start_ns is None or end_ns is None or not 0 <= end_ns < _LONGEST_NS or start_ns == end_ns == 0:
            trace.unknown["events with impossible times"] += 1
            return
        start_ns -= self._base_ns or 0
        if not 0 < start_ns < 2 * _LONGEST_NS:
            trace.unknown["events with impossible times"] += 1
            return
        if kind == "operator" and name != _BACKWARD:
            if name == COMMUNICATION_CALL:
                self._call(start_ns, arguments)
            elif (product := _product(start_ns, name, arguments)) is not None:
                trace.products.append(product)
            return
        if len(trace.events) >= _MOST_EVENTS:
            raise StoreError(f"{shown(self._path.name)} has more than {_MOST_EVENTS:,} events of a timeline")
        name = self._names.setdefault(name, name)
        correlation = integer(arguments.correlation) or 0 if arguments is not None else 0
        communicator = operation_name = ""
        if kind in ("kernel", "copy"):
            kind = "copy" if kind_of(name) == COPY else kind
            lane = integer(arguments.stream) if arguments is not None else None
            lane = integer(raw.tid) or 0 if lane is None else lane
            device = integer(arguments.device) if arguments is not None else None
            self._devices[(integer(raw.pid) or 0) if device is None else device] += 1
            self._device_lanes.add(_lane(raw))
            if kind == "kernel" and is_collective(name):
                communicator, operation_name = (
                    _communicator(text_of(arguments, "group")),
                    text_of(arguments, "operation"),
                )
                if not operation_name:
                    self._unlinked.append(len(trace.events))
        else:
            lane = integer(raw.tid) or 0
            if kind == "launch" and arguments is not None and (external := integer(arguments.external)):
                self._launched_by[correlation] = external
        event = Event(kind, name, start_ns, start_ns + end_ns, lane, correlation, communicator, operation_name)
        if kind == "annotation":
            self._ranges.append((event, _lane(raw)))
        else:
            trace.events.append(event)
            if kind in ("launch", "operator") and self._host_lane != (raw.pid, raw.tid):
                self._host_lane = raw.pid, raw.tid
                self._host_lanes.add(_lane(raw))

    def _joined(self, raw: Any) -> Any:
        """Joins a beginning and an end that are events of their own; None at a beginning."""
        begun = self._begun.setdefault(_lane(raw), [])
        if raw.ph == "B":
            begun.append(raw)
            return None
        start, end = (nanoseconds(some) for some in (begun[-1].ts if begun else None, raw.ts))
        if start is None or end is None:
            self._trace.unknown["ends without a beginning"] += 1
            return None
        whole = begun.pop()
        whole.ph, whole.dur = "X", (end - start) / 1000
        return whole

    def _call(self, start_ns: int, arguments: Any) -> None:
        if arguments is None:
            return
        called = text_of(arguments, "operation")
        inputs, outputs = integer(arguments.inputs), integer(arguments.outputs)
        dtype = text_of(arguments, "dtype")
        call = TracedCollective(
            start_ns,
            text_of(arguments, "group"),
            operation(called) if called else "",
            integer(arguments.ranks),
            dtype_name(dtype) if dtype else None,
            inputs,
            outputs,
        )
        if called == "wait":
            return
        self._trace.calls.append(call)
        if called and (external := integer(arguments.external)):
            self._called[external] = call

    def trace(self, about: dict[str, Any]) -> Trace:
        """The trace of all events read, with the facts around them."""
        trace = self._trace
        for index in self._unlinked:
            event = trace.events[index]
            call = self._called.get(self._launched_by.get(event.correlation, 0))
            if call is not None:
                trace.events[index] = event._replace(
                    communicator=_communicator(call.communicator), operation=call.operation
                )
        # In some releases the device's copies of the host's ranges have the category of the ranges themselves. A lane
        # from which something is launched is the host's, though a stream may have the same numbers.
        repeated = self._device_lanes - self._host_lanes
        trace.events += [event for event, lane in self._ranges if lane not in repeated]
        trace.devices = len(self._devices)
        job = about.get("distributedInfo")
        job = job if isinstance(job, dict) else {}
        trace.rank, trace.world_size = integer(job.get("rank")), integer(job.get("world_size"))
        trace.backend = job.get("backend") if isinstance(job.get("backend"), str) else None
        trace.groups = tuple(_groups(job.get("pg_config")))
        trace.device = _device_name(about.get("deviceProperties"), self._devices)
        trace.trace_id = about["trace_id"] if isinstance(about.get("trace_id"), str) else None
        named = {"nccl": job.get("nccl_version"), "cuda": about.get("cuda_runtime_version"),
                 "hip": about.get("hip_runtime_version"), "driver": about.get("cuda_driver_version")}  # fmt: skip
        trace.versions = {name: printable(str(value))[:40] for name, value in named.items() if value is not None}
        since = integer(about.get("baseTimeNanoseconds")) or 0
        trace.started_unix_seconds = None if self._base_ns is None else (self._base_ns + _LONGEST_NS + since) / 1e9
        return trace


def _communicator(group: str) -> str:
    """The communicator of a process group: its ranks had to agree on its name to meet, and no other group has it."""
    return group and ALIKE + group


def _lane(raw: Any) -> tuple[str, str]:
    return str(raw.pid)[:40], str(raw.tid)[:40]


def _product(start_ns: int, name: str, arguments: Any) -> TracedProduct | None:
    shapes = arguments.dims if isinstance(arguments.dims, list) else []
    plain = tuple(
        tuple(size for size in value if isinstance(size, int)) if isinstance(value, list) else () for value in shapes
    )
    flops = product_flops(name, plain, arguments.concrete if isinstance(arguments.concrete, list) else [])
    types = arguments.types if isinstance(arguments.types, list) else []
    dtype = next((dtype_name(value) for value in types if isinstance(value, str) and value), "")
    return None if flops is None else TracedProduct(start_ns, name, plain, dtype, flops)


def _groups(listed: object) -> Iterator[TracedGroup]:
    for group in listed if isinstance(listed, list) else []:
        ranks = group.get("ranks") if isinstance(group, dict) else None
        if isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks):
            yield TracedGroup(str(group.get("pg_name", ""))[:100], tuple(ranks))


def _device_name(properties: object, used: Counter[int]) -> str | None:
    number = used.most_common(1)[0][0] if used else 0
    named = {
        integer(gpu.get("id")): gpu["name"]
        for gpu in (properties if isinstance(properties, list) else [])
        if isinstance(gpu, dict) and isinstance(gpu.get("name"), str)
    }
    name = named.get(number) or (next(iter(named.values())) if len(set(named.values())) == 1 else None)
    return printable(name)[:100] if name else None
