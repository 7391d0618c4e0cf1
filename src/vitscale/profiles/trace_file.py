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
from vitscale.profiles.timeline import (
    ALIKE,
    COMMUNICATION_CALL,
    KIND_OF_ACTIVITY,
    Event,
    EventKind,
    Launched,
    launches_of,
)
from vitscale.profiles.trace_json import TraceText, integer, nanoseconds, text_of

TracedShapes = Sequence[Sequence[int]]
_MOST_FLOPS = 1 << 62


def product_flops(name: str, shapes: TracedShapes, concrete: Sequence[object]) -> int | None:
    """Floating-point operations of one call; None where its shapes do not suffice.

    Args:
        name: the operator's name, with its namespace ("aten::addmm").
        shapes: shapes of its inputs, in order; empty for what is no tensor.
        concrete: its inputs as text, which hold the strides and paddings of a convolution.
    """
    rule = FLOPS_OF.get(name)
    if rule is None:
        return None
    try:
        flops = rule(shapes, concrete)
    except (IndexError, ValueError, ZeroDivisionError):
        return None
    return flops if 0 < flops < _MOST_FLOPS else None


def _matrix_flops(first: Sequence[int], second: Sequence[int]) -> int:
    """FLOPs of matrices (..., rows, inner) times (..., inner, columns)."""
    rows, inner = first[-2:]
    columns = second[-1]
    return 2 * math.prod(first[:-2]) * rows * inner * columns


def _attention_flops(shapes: TracedShapes) -> int:
    """FLOPs of the scores and of their weighted sum, for queries (..., S, D) and keys (..., T, D)."""
    queries, keys, values = shapes[:3]
    return 2 * math.prod(queries[:-1]) * keys[-2] * (queries[-1] + values[-1])


def _convolution_flops(shapes: TracedShapes, concrete: Sequence[object]) -> int:
    """FLOPs of images (N, C, ...) and a weight (C_out, C, ...); its strides, paddings, dilations are inputs 3 to 5."""
    images = shapes[0]
    weight = shapes[1]
    strides, paddings, dilations = (_numbers(concrete[index]) for index in (3, 4, 5))
    is_transposed = str(concrete[6]) == "True"
    if is_transposed:
        return _pixel_flops(images, weight)
    axes = len(weight) - 2
    output_pixels = 1
    for size, kernel, stride, padding, dilation in zip(
        images[2:],
        weight[2:],
        _for_each_axis(strides, axes),
        _for_each_axis(paddings, axes),
        _for_each_axis(dilations, axes),
        strict=True,
    ):
        output_pixels *= (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    return 2 * images[0] * math.prod(weight) * output_pixels


def _pixel_flops(images: Sequence[int], weight: Sequence[int]) -> int:
    """FLOPs of a convolution whose whole weight meets each of these pixels: its output, or a transposed one's input."""
    return 2 * images[0] * math.prod(images[2:]) * math.prod(weight)


def _convolution_backward_flops(shapes: TracedShapes, concrete: Sequence[object]) -> int:
    """FLOPs of the gradients of images and weight, as far as the last input asks for them: "[True, False, ...]"."""
    is_transposed = len(concrete) > 7 and str(concrete[7]) == "True"
    output_mask = str(concrete[-1]).strip("[]").split(",") if concrete else ["True", "True"]
    gradients = sum(flag.strip() == "True" for flag in output_mask[:2])
    pixels = shapes[1] if is_transposed else shapes[0]
    return gradients * _pixel_flops(pixels, shapes[2])


def _numbers(text: object) -> list[int]:
    """ "[1, 2]" -> [1, 2]."""
    return [int(number) for number in str(text).strip("[]").split(",")]


def _for_each_axis(values: Sequence[int], axes: int) -> list[int]:
    """One value per axis: a single one holds for all."""
    return list(values) * axes if len(values) == 1 else list(values)


_SDPA = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
FLOPS_OF: Mapping[str, Callable[[TracedShapes, Sequence[object]], int]] = {
    **dict.fromkeys(
        ("aten::mm", "aten::_scaled_mm", "aten::bmm"), lambda shapes, _: _matrix_flops(shapes[0], shapes[1])
    ),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm"), lambda shapes, _: _matrix_flops(shapes[1], shapes[2])),
    "aten::convolution": _convolution_flops,
    "aten::convolution_backward": _convolution_backward_flops,
    **{f"aten::_scaled_dot_product_{kind}": lambda shapes, _: _attention_flops(shapes) for kind in _SDPA},
    # The scores again, and four products for the gradients.
    **{
        f"aten::_scaled_dot_product_{kind}_backward": lambda shapes, _: _attention_flops(shapes[1:]) * 5 // 2
        for kind in _SDPA
    },
}
"""Operator -> the FLOPs of a call. Other operators call one of these, as `aten::linear` and `aten::conv2d` do."""


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
    def launches(self) -> list[Launched]:
        """The device's work in the order of launch, once all is read."""
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
    text = TraceText(path)
    reader = _Reader(path)
    for raw_events in text.lists():
        reader.set_clock(raw_events)
        for raw in raw_events:
            reader.take(raw)
    return reader.trace(text.about)


class _Lane(NamedTuple):
    """A row of the trace: a thread of the host or a stream of a device, as text."""

    process: str
    thread: str


class _Span(NamedTuple):
    """A stretch of time on the trace's own clock."""

    start_ns: int
    end_ns: int


class _Reader:
    """Takes the events of a file one by one, and keeps those of a timeline."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._trace = Trace(
            rank=None,
            world_size=None,
            device=None,
            trace_id=None,
            backend=None,
            versions={},
            groups=(),
            started_unix_seconds=None,
        )
        self._base_ns: int | None = None
        """The clock's origin, in nanoseconds since 1970; None until a time is known."""
        self._names: dict[str, str] = {}
        """Each name once, for events share it."""
        self._open: dict[_Lane, list[Any]] = {}
        """Beginnings that still lack their ends, the innermost last."""
        self._ranges: list[tuple[Event, _Lane]] = []
        self._events_by_device: Counter[int] = Counter()
        self._device_lanes: set[_Lane] = set()
        self._host_lanes: set[_Lane] = set()
        self._last_host_lane: tuple[Any, Any] = (None, None)
        """Process and thread of the last call of the host, as the file has them."""
        self._calls_by_external_id: dict[int, TracedCollective] = {}
        self._external_ids: dict[int, int] = {}
        """Correlation of a launch -> the identity of the call that launched it."""
        self._unlinked: list[int] = []
        """Indices among the events of collectives without an operation of their own."""

    def set_clock(self, raw_events: Sequence[Any]) -> None:
        """Sets the clock's origin by the middle of the first events: some are of no time (pytorch/kineto issue 109)."""
        if self._base_ns is not None:
            return
        times = [nanoseconds(raw.ts) for raw in raw_events if raw.ph in ("X", "B")]
        known_times = sorted(time_ns for time_ns in times if time_ns is not None)
        if known_times:
            self._base_ns = known_times[len(known_times) // 2] - _LONGEST_NS

    def take(self, raw: Any) -> None:
        """Takes one event of the file."""
        if raw.ph in ("B", "E"):
            raw = self._joined(raw)
        if raw is None or raw.ph != "X":
            return
        kind = self._kind(raw)
        if kind is None:
            return
        if not isinstance(raw.name, str):
            self._trace.unknown["events without a name"] += 1
        elif kind == "operator":
            self._take_operator(raw)
        else:
            self._keep(raw, kind, raw.name)

    def _joined(self, raw: Any) -> Any:
        """Joins a beginning and an end that are events of their own; None at a beginning."""
        open_events = self._open.setdefault(_lane(raw), [])
        if raw.ph == "B":
            open_events.append(raw)
            return None
        start_ns = nanoseconds(open_events[-1].ts) if open_events else None
        end_ns = nanoseconds(raw.ts)
        if start_ns is None or end_ns is None:
            self._trace.unknown["ends without a beginning"] += 1
            return None
        joined = open_events.pop()
        joined.ph = "X"
        joined.dur = (end_ns - start_ns) / 1000
        return joined

    def _kind(self, raw: Any) -> EventKind | None:
        """The kind of an event by its category; None, counted where the category is not known, for no kind."""
        category = raw.cat.lower() if isinstance(raw.cat, str) else ""
        kind = _KINDS.get(category)
        if kind is None and category and category not in _PASSED_OVER:
            self._trace.unknown[f"category {printable(category)[:40]}"] += 1
        return kind

    def _take_operator(self, raw: Any) -> None:
        """Takes an operator of the host, most of which are counted and passed over."""
        name = raw.name
        self._trace.operators += 1
        if name.startswith(_BACKWARD):
            self._keep(raw, "operator", _BACKWARD)
        elif _MARKED.match(name):
            self._keep(raw, "annotation", name)
        elif name == COMMUNICATION_CALL:
            span = self._span(raw)
            if span is not None and raw.args is not None:
                self._add_call(span.start_ns, raw.args)
        elif name in FLOPS_OF and raw.args is not None and raw.args.dims:
            span = self._span(raw)
            product = _product(span.start_ns, name, raw.args) if span is not None else None
            if product is not None:
                self._trace.products.append(product)

    def _span(self, raw: Any) -> _Span | None:
        """When the event was, from the clock's origin on; None, counted, where its times cannot be."""
        start_ns = nanoseconds(raw.ts)
        duration_ns = nanoseconds(raw.dur)
        if start_ns is not None and duration_ns is not None and 0 <= duration_ns < _LONGEST_NS:
            since_base_ns = start_ns - (self._base_ns or 0)
            has_no_time = start_ns == 0 and duration_ns == 0
            if 0 < since_base_ns < 2 * _LONGEST_NS and not has_no_time:
                return _Span(since_base_ns, since_base_ns + duration_ns)
        self._trace.unknown["events with impossible times"] += 1
        return None

    def _keep(self, raw: Any, kind: EventKind, name: str) -> None:
        """Keeps an event for the timeline, unless its times cannot be."""
        span = self._span(raw)
        if span is None:
            return
        if len(self._trace.events) >= _MOST_EVENTS:
            raise StoreError(f"{shown(self._path.name)} has more than {_MOST_EVENTS:,} events of a timeline")
        name = self._names.setdefault(name, name)
        if kind in ("kernel", "copy"):
            self._keep_on_device(raw, kind, name, span)
        else:
            self._keep_on_host(raw, kind, name, span)

    def _keep_on_device(self, raw: Any, kind: EventKind, name: str, span: _Span) -> None:
        if kind_of(name) == COPY:
            kind = "copy"
        stream = device = None
        correlation = 0
        if raw.args is not None:
            stream = integer(raw.args.stream)
            device = integer(raw.args.device)
            correlation = integer(raw.args.correlation) or 0
        if stream is None:
            stream = integer(raw.tid) or 0
        if device is None:
            device = integer(raw.pid) or 0
        communicator = operation_name = ""
        if kind == "kernel" and is_collective(name):
            communicator = _communicator(text_of(raw.args, "group"))
            operation_name = text_of(raw.args, "operation")
            if not operation_name:
                self._unlinked.append(len(self._trace.events))
        self._events_by_device[device] += 1
        self._device_lanes.add(_lane(raw))
        self._trace.events.append(
            Event(kind, name, span.start_ns, span.end_ns, stream, correlation, communicator, operation_name)
        )

    def _keep_on_host(self, raw: Any, kind: EventKind, name: str, span: _Span) -> None:
        correlation = integer(raw.args.correlation) or 0 if raw.args is not None else 0
        event = Event(kind, name, span.start_ns, span.end_ns, lane=integer(raw.tid) or 0, correlation=correlation)
        if kind == "annotation":
            self._ranges.append((event, _lane(raw)))
            return
        self._trace.events.append(event)
        external_id = integer(raw.args.external) if kind == "launch" and raw.args is not None else None
        if external_id:
            self._external_ids[correlation] = external_id
        if kind in ("launch", "operator") and self._last_host_lane != (raw.pid, raw.tid):
            self._last_host_lane = (raw.pid, raw.tid)
            self._host_lanes.add(_lane(raw))

    def _add_call(self, start_ns: int, arguments: Any) -> None:
        """Adds a call of a collective; waiting for one is none."""
        c10d_name = text_of(arguments, "operation")
        if c10d_name == "wait":
            return
        dtype = text_of(arguments, "dtype")
        call = TracedCollective(
            start_ns=start_ns,
            communicator=text_of(arguments, "group"),
            operation=operation(c10d_name) if c10d_name else "",
            ranks=integer(arguments.ranks),
            dtype=dtype_name(dtype) if dtype else None,
            input_elements=integer(arguments.inputs),
            output_elements=integer(arguments.outputs),
        )
        self._trace.calls.append(call)
        external_id = integer(arguments.external)
        if c10d_name and external_id:
            self._calls_by_external_id[external_id] = call

    def trace(self, about: dict[str, Any]) -> Trace:
        """The trace of all events read, with the facts around them."""
        self._link_collectives()
        self._add_ranges()
        trace = self._trace
        trace.devices = len(self._events_by_device)
        trace.device = _device_name(about.get("deviceProperties"), self._events_by_device)
        trace.trace_id = about["trace_id"] if isinstance(about.get("trace_id"), str) else None
        job = about.get("distributedInfo")
        job = job if isinstance(job, dict) else {}
        trace.rank = integer(job.get("rank"))
        trace.world_size = integer(job.get("world_size"))
        trace.backend = job.get("backend") if isinstance(job.get("backend"), str) else None
        trace.groups = tuple(_groups(job.get("pg_config")))
        versions = {
            "nccl": job.get("nccl_version"),
            "cuda": about.get("cuda_runtime_version"),
            "hip": about.get("hip_runtime_version"),
            "driver": about.get("cuda_driver_version"),
        }
        trace.versions = {name: printable(str(value))[:40] for name, value in versions.items() if value is not None}
        if self._base_ns is not None:
            file_base_ns = integer(about.get("baseTimeNanoseconds")) or 0
            trace.started_unix_seconds = (self._base_ns + _LONGEST_NS + file_base_ns) / 1e9
        return trace

    def _link_collectives(self) -> None:
        """Gives kernels of collectives without an operation that of the call which launched them."""
        events = self._trace.events
        for index in self._unlinked:
            external_id = self._external_ids.get(events[index].correlation, 0)
            call = self._calls_by_external_id.get(external_id)
            if call is not None:
                communicator = _communicator(call.communicator)
                events[index] = events[index]._replace(communicator=communicator, operation=call.operation)

    def _add_ranges(self) -> None:
        """Adds the ranges of the host.

        In some releases the device's copies of the host's ranges have the category of the ranges themselves. A lane
        from which something is launched is the host's, though a stream may have the same numbers.
        """
        lanes_of_copies = self._device_lanes - self._host_lanes
        self._trace.events += [event for event, lane in self._ranges if lane not in lanes_of_copies]


def _communicator(group: str) -> str:
    """The communicator of a process group: its ranks had to agree on its name to meet, and no other group has it."""
    return ALIKE + group if group else ""


def _lane(raw: Any) -> _Lane:
    return _Lane(process=str(raw.pid)[:40], thread=str(raw.tid)[:40])


def _product(start_ns: int, name: str, arguments: Any) -> TracedProduct | None:
    """The product of an operator's arguments; None where its shapes do not give its FLOPs."""
    shapes = tuple(_shape(value) for value in _as_list(arguments.dims))
    flops = product_flops(name, shapes, _as_list(arguments.concrete))
    if flops is None:
        return None
    type_names = [value for value in _as_list(arguments.types) if isinstance(value, str) and value]
    dtype = dtype_name(type_names[0]) if type_names else ""
    return TracedProduct(start_ns, name, shapes, dtype, flops)


def _shape(value: object) -> tuple[int, ...]:
    """A shape as the file has it; empty for what is no tensor."""
    return tuple(size for size in _as_list(value) if isinstance(size, int))


def _as_list(value: object) -> list[Any]:
    """The value; an empty list for anything else than a list. Traces are input, and may hold anything."""
    return value if isinstance(value, list) else []


def _groups(listed: object) -> Iterator[TracedGroup]:
    """Yields the process groups of a file's list; those without ranks are left out."""
    for group in _as_list(listed):
        ranks = group.get("ranks") if isinstance(group, dict) else None
        if isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks):
            yield TracedGroup(str(group.get("pg_name", ""))[:100], tuple(ranks))


def _device_name(properties: object, events_by_device: Counter[int]) -> str | None:
    """The name of the GPU with the most events; None where the file has none for it and GPUs of several names."""
    names_by_id: dict[int | None, str] = {}
    for gpu in _as_list(properties):
        if isinstance(gpu, dict) and isinstance(gpu.get("name"), str):
            names_by_id[integer(gpu.get("id"))] = gpu["name"]
    busiest = events_by_device.most_common(1)[0][0] if events_by_device else 0
    name = names_by_id.get(busiest)
    names = set(names_by_id.values())
    if not name and len(names) == 1:
        name = names.pop()
    return printable(name)[:100] if name else None
