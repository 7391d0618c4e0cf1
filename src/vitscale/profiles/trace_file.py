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
    COMMON_NAME_PREFIX,
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
    """Return the floating-point operations of one call of an operator; None where its shapes do not suffice.

    Args:
        name: the operator's name, with its namespace ("aten::addmm").
        shapes: shapes of its inputs, in order; empty for what is no tensor.
        concrete: its inputs as text ("[1, 1]", "False"), which hold the strides and paddings of a convolution.
    """
    rule = FLOPS_OF.get(name)
    if rule is None:
        return None
    try:
        flops = rule(shapes, concrete)
    except (IndexError, ValueError, ZeroDivisionError):
        return None
    return flops if 0 < flops < _MOST_FLOPS else None


def _mm_flops(shapes: TracedShapes, _concrete: Sequence[object]) -> int:
    """Return the FLOPs of mm(first, second)."""
    return _matrix_flops(first=shapes[0], second=shapes[1])


def _addmm_flops(shapes: TracedShapes, _concrete: Sequence[object]) -> int:
    """Return the FLOPs of addmm(bias, first, second), without the addition."""
    return _matrix_flops(first=shapes[1], second=shapes[2])


def _matrix_flops(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the FLOPs of matrices [..., rows, inner] times [..., inner, columns]."""
    rows, inner = first[-2:]
    columns = second[-1]
    return 2 * math.prod(first[:-2]) * rows * inner * columns


def _attention_flops(shapes: TracedShapes, _concrete: Sequence[object]) -> int:
    """Return the FLOPs of attention(queries, keys, values): the scores, and the values weighted by them.

    Queries are [..., S, D], keys [..., T, D], values [..., T, D of the values].
    """
    queries, keys, values = shapes[:3]
    return 2 * math.prod(queries[:-1]) * keys[-2] * (queries[-1] + values[-1])


def _attention_backward_flops(shapes: TracedShapes, concrete: Sequence[object]) -> int:
    """Return the FLOPs of attention_backward(output_gradient, queries, keys, values, ...).

    It has five products where forward has two: the scores again, and four for the gradients.
    """
    return _attention_flops(shapes[1:], concrete) * 5 // 2


class _ConvolutionSettings(NamedTuple):
    """How a convolution moves over its images. A list has a number for each axis, or a single one for all axes."""

    strides: list[int]
    paddings: list[int]
    dilations: list[int]
    is_transposed: bool


def _convolution_flops(shapes: TracedShapes, concrete: Sequence[object]) -> int:
    """Return the FLOPs of convolution(images, weight, bias, stride, padding, dilation, transposed, ...).

    Images are [N, C, ...], the weight is [C_out, C, ...].
    """
    images = shapes[0]
    weight = shapes[1]
    settings = _ConvolutionSettings(
        strides=_parse_numbers(concrete[3]),
        paddings=_parse_numbers(concrete[4]),
        dilations=_parse_numbers(concrete[5]),
        is_transposed=_is_true(concrete[6]),
    )
    if settings.is_transposed:
        # Each pixel of the input is multiplied by the whole weight, whatever the stride.
        pixels = math.prod(images[2:])
    else:
        # Each pixel of the output is a sum over the whole weight.
        pixels = math.prod(_convolved_sizes(images[2:], weight[2:], settings))
    return _flops_by_pixels(images[0], pixels, weight)


def _convolved_sizes(
    image_sizes: Sequence[int], kernel_sizes: Sequence[int], settings: _ConvolutionSettings
) -> list[int]:
    """Return the output's size in pixels along each axis, by the formula of torch.nn.Conv2d.

    Example: an axis of 224 pixels, a kernel of 16, a stride of 16 and no padding give 14.
    """
    axes = len(kernel_sizes)
    output_sizes = []
    for size, kernel, stride, padding, dilation in zip(
        image_sizes,
        kernel_sizes,
        _one_per_axis(settings.strides, axes),
        _one_per_axis(settings.paddings, axes),
        _one_per_axis(settings.dilations, axes),
        strict=True,
    ):
        output_sizes.append((size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1)
    return output_sizes


def _convolution_backward_flops(shapes: TracedShapes, concrete: Sequence[object]) -> int:
    """Return the FLOPs of convolution_backward(output_gradient, images, weight, ..., transposed, ..., output_mask).

    Each gradient takes as many as forward. The mask ("[True, False, True]") asks for those of images, weight and bias;
    that of the bias takes no product.
    """
    is_transposed = len(concrete) > 7 and _is_true(concrete[7])
    output_mask = str(concrete[-1]).strip("[]").split(",") if concrete else ["True", "True"]
    gradients = sum(_is_true(flag.strip()) for flag in output_mask[:2])
    # The tensor whose every pixel meets the whole weight: the output, or the input of a transposed convolution.
    pixel_shape = shapes[1] if is_transposed else shapes[0]
    return gradients * _flops_by_pixels(pixel_shape[0], math.prod(pixel_shape[2:]), shapes[2])


def _flops_by_pixels(images: int, pixels: int, weight: Sequence[int]) -> int:
    """Return the FLOPs of a convolution in which each of an image's `pixels` meets the whole weight once."""
    return 2 * images * pixels * math.prod(weight)


def _is_true(text: object) -> bool:
    """Whether an input is true: the profiler records it as Python's text, "True" or "False"."""
    return str(text) == "True"


def _parse_numbers(text: object) -> list[int]:
    """ "[1, 2]" -> [1, 2]."""
    return [int(number) for number in str(text).strip("[]").split(",")]


def _one_per_axis(values: Sequence[int], axes: int) -> list[int]:
    """Return one value for each axis: a single one holds for all."""
    return list(values) * axes if len(values) == 1 else list(values)


_SDPA = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
"""Ends of the names of torch's operators of scaled dot-product attention."""
FLOPS_OF: Mapping[str, Callable[[TracedShapes, Sequence[object]], int]] = {
    "aten::mm": _mm_flops,
    "aten::_scaled_mm": _mm_flops,
    "aten::bmm": _mm_flops,
    "aten::addmm": _addmm_flops,
    "aten::baddbmm": _addmm_flops,
    "aten::convolution": _convolution_flops,
    "aten::convolution_backward": _convolution_backward_flops,
    **{f"aten::_scaled_dot_product_{kind}": _attention_flops for kind in _SDPA},
    **{f"aten::_scaled_dot_product_{kind}_backward": _attention_backward_flops for kind in _SDPA},
}
"""Operator -> the FLOPs of a call by its shapes and concrete inputs, as `product_flops` has them.

Other operators call one of these, as `aten::linear` and `aten::conv2d` do."""


_MOST_EVENTS = 20_000_000
_LONGEST_NS = 10**13
"""Longest trace: 2.8 hours."""
_KIND_BY_CATEGORY: Mapping[str, EventKind] = {
    **KIND_OF_ACTIVITY,
    "operator": "operator",
    "runtime": "launch",
    "driver": "launch",
    "memcpy": "copy",
    "memset": "kernel",
}
"""Category in small letters to kind; torch 1.8 to 1.13 wrote "Kernel", "Runtime" and "Memcpy"."""
_IGNORED_CATEGORIES = frozenset(
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
    """A collective as the host called it, in c10d's names; a size is None where the file does not state it."""

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
    """The name of the GPU that most of it ran on; None where the file does not state it."""
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
    """Reason -> number of events that are left out for it: a category that is not known, or impossible values."""

    @cached_property
    def launches(self) -> list[Launched]:
        """The device's work in the order of launch; asked for once all events are there."""
        return launches_of(self.events)

    @property
    def on_device(self) -> list[Event]:
        """What ran on the GPU."""
        return [event for event in self.events if event.kind in ("kernel", "copy")]


def read_trace(path: Path) -> Trace:
    """Reads the trace of the one rank that a file holds.

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


class _Clock:
    """The clock of a trace: times of the file, rebased so that its events lie some hours after the clock's origin."""

    def __init__(self) -> None:
        self._middle_ns: int | None = None
        """The middle of the first events, on the file's clock; None until an event has a time."""

    def set_origin(self, raw_events: Sequence[Any]) -> None:
        """Sets the origin by the first events that have a time; later ones change nothing.

        Their median is taken, since some events are of no time (pytorch/kineto issue 109).
        """
        if self._middle_ns is not None:
            return
        times = [nanoseconds(raw.ts) for raw in raw_events if raw.ph in ("X", "B")]
        known_times = sorted(time_ns for time_ns in times if time_ns is not None)
        if known_times:
            self._middle_ns = known_times[len(known_times) // 2]

    def span(self, raw: Any) -> _Span | None:
        """Return when an event was, from the clock's origin on; None where its times are missing or impossible."""
        start_ns = nanoseconds(raw.ts)
        duration_ns = nanoseconds(raw.dur)
        if start_ns is None or duration_ns is None or not 0 <= duration_ns < _LONGEST_NS:
            return None
        if start_ns == 0 and duration_ns == 0:
            return None
        origin_ns = self._middle_ns - _LONGEST_NS if self._middle_ns is not None else 0
        since_origin_ns = start_ns - origin_ns
        if not 0 < since_origin_ns < 2 * _LONGEST_NS:
            return None
        return _Span(since_origin_ns, since_origin_ns + duration_ns)

    def unix_seconds(self, file_base_ns: int) -> float | None:
        """Return the middle of the first events in seconds since 1970; None where no event has a time.

        Args:
            file_base_ns: what the file's own times are counted from, in nanoseconds since 1970.
        """
        return (self._middle_ns + file_base_ns) / 1e9 if self._middle_ns is not None else None


class _OpenEvents:
    """Joins events that a file records as two: a beginning ("B") and an end ("E") on the same lane, which may nest."""

    def __init__(self) -> None:
        self._beginnings_by_lane: dict[_Lane, list[Any]] = {}
        """Beginnings that still lack their ends, the innermost last."""

    def begin(self, raw: Any) -> None:
        """Keeps a beginning until its end is read."""
        self._beginnings_by_lane.setdefault(_lane_of(raw), []).append(raw)

    def end(self, raw: Any) -> Any | None:
        """Return the event that ends here, as one with a duration; None where no beginning with a time is open."""
        beginnings = self._beginnings_by_lane.get(_lane_of(raw))
        start_ns = nanoseconds(beginnings[-1].ts) if beginnings else None
        end_ns = nanoseconds(raw.ts)
        if not beginnings or start_ns is None or end_ns is None:
            return None
        event = beginnings.pop()
        event.ph = "X"
        event.dur = (end_ns - start_ns) / 1000
        return event


class _HostRanges:
    """Ranges that the user or torch marked, without the copies that a device has of them.

    In some releases these copies have the category of the ranges themselves, so that only their lanes differ: a copy
    lies on a lane of the device. But a stream may have the same numbers as a thread, and a lane from which something
    is launched is the host's.
    """

    def __init__(self) -> None:
        self._ranges: list[tuple[Event, _Lane]] = []
        self._device_lanes: set[_Lane] = set()
        self._host_lanes: set[_Lane] = set()
        self._last_host_ids: tuple[Any, Any] = (None, None)
        """Process and thread of the last event on a lane of the host. Mostly the next one has the same ones, and its
        lane need not be made."""

    def add(self, event: Event, raw: Any) -> None:
        """Adds a range, of the host or a device's copy of one."""
        self._ranges.append((event, _lane_of(raw)))

    def add_device_lane(self, raw: Any) -> None:
        """Adds the lane of an event that ran on a device."""
        self._device_lanes.add(_lane_of(raw))

    def add_host_lane(self, raw: Any) -> None:
        """Adds the lane of an event that only a thread of the host can have."""
        if self._last_host_ids != (raw.pid, raw.tid):
            self._last_host_ids = (raw.pid, raw.tid)
            self._host_lanes.add(_lane_of(raw))

    def events(self) -> list[Event]:
        """Return the ranges of the host, once all events are read."""
        lanes_of_copies = self._device_lanes - self._host_lanes
        return [event for event, lane in self._ranges if lane not in lanes_of_copies]


class _CollectiveLinks:
    """Links a collective's kernel to the host's call, which has the operation that the kernel may lack.

    The kernel has the correlation of its launch, and the launch has the external id of the call.
    """

    def __init__(self) -> None:
        self._kernel_positions: list[int] = []
        """Positions, among the trace's events, of kernels without an operation of their own."""
        self._external_ids: dict[int, int] = {}
        """Correlation of a launch -> the external id of the call that launched."""
        self._calls: dict[int, TracedCollective] = {}
        """External id -> the call."""

    def add_kernel(self, position: int) -> None:
        """Adds a kernel without an operation, by its position among the trace's events."""
        self._kernel_positions.append(position)

    def add_launch(self, correlation: int, external_id: int) -> None:
        """Adds a launch that a call with this external id made."""
        self._external_ids[correlation] = external_id

    def add_call(self, external_id: int, call: TracedCollective) -> None:
        """Adds a call of a collective."""
        self._calls[external_id] = call

    def name_operations(self, events: list[Event]) -> None:
        """Gives the kernels among the events the communicator and operation of the calls that launched them."""
        for position in self._kernel_positions:
            kernel = events[position]
            external_id = self._external_ids.get(kernel.correlation, 0)
            call = self._calls.get(external_id)
            if call is not None:
                communicator = _common_communicator_name(call.communicator)
                events[position] = kernel._replace(communicator=communicator, operation=call.operation)


class _Reader:
    """Takes the events of a file one by one, and keeps those of a timeline."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._clock = _Clock()
        self._open_events = _OpenEvents()
        self._host_ranges = _HostRanges()
        self._collective_links = _CollectiveLinks()
        self._names: dict[str, str] = {}
        """Each name once, for events share it."""
        # What the trace will have, under the same names; ranges are added to the events at the end.
        self._events: list[Event] = []
        self._calls: list[TracedCollective] = []
        self._products: list[TracedProduct] = []
        self._operators = 0
        self._unknown: Counter[str] = Counter()
        self._events_by_device: Counter[int] = Counter()
        """Number of a device -> number of events that ran on it."""

    def set_clock(self, raw_events: Sequence[Any]) -> None:
        """Sets the clock's origin by the first events that have a time."""
        self._clock.set_origin(raw_events)

    def take(self, raw: Any) -> None:
        """Takes one event of the file; metadata, arrows and counters are passed over.

        `ph` is the event's phase in Chrome's format: "X" is a complete event, "B" a beginning, "E" an end.
        """
        if raw.ph == "X":
            self._take_complete(raw)
        elif raw.ph == "B":
            self._open_events.begin(raw)
        elif raw.ph == "E":
            joined = self._open_events.end(raw)
            if joined is None:
                self._unknown["ends without a beginning"] += 1
            else:
                self._take_complete(joined)

    def _take_complete(self, raw: Any) -> None:
        """Takes an event with a start and a duration; those of no kind of the timeline are passed over."""
        kind = self._timeline_kind(raw)
        if kind is None:
            return
        if not isinstance(raw.name, str):
            self._unknown["events without a name"] += 1
        elif kind == "operator":
            self._take_operator(raw)
        else:
            self._keep_event(raw, kind, raw.name)

    def _timeline_kind(self, raw: Any) -> EventKind | None:
        """Return the kind of an event by its category; None for no kind. A category that is not known is counted."""
        category = raw.cat.lower() if isinstance(raw.cat, str) else ""
        kind = _KIND_BY_CATEGORY.get(category)
        if kind is None and category and category not in _IGNORED_CATEGORIES:
            self._unknown[f"category {printable(category)[:40]}"] += 1
        return kind

    def _take_operator(self, raw: Any) -> None:
        """Takes an operator of the host, most of which are counted and passed over."""
        name = raw.name
        self._operators += 1
        if name.startswith(_BACKWARD):
            self._keep_event(raw, "operator", _BACKWARD)
        elif _MARKED.match(name):
            self._keep_event(raw, "annotation", name)
        elif name == COMMUNICATION_CALL:
            span = self._span_of(raw)
            if span is not None and raw.args is not None:
                self._add_call(span.start_ns, raw.args)
        elif name in FLOPS_OF and raw.args is not None and raw.args.dims:
            span = self._span_of(raw)
            product = _traced_product(span.start_ns, name, raw.args) if span is not None else None
            if product is not None:
                self._products.append(product)

    def _span_of(self, raw: Any) -> _Span | None:
        """Return when the event was, on the trace's clock; None, which is counted, where its times are impossible."""
        span = self._clock.span(raw)
        if span is None:
            self._unknown["events with impossible times"] += 1
        return span

    def _keep_event(self, raw: Any, kind: EventKind, name: str) -> None:
        """Keeps an event for the timeline, unless its times are impossible."""
        span = self._span_of(raw)
        if span is None:
            return
        if len(self._events) >= _MOST_EVENTS:
            raise StoreError(f"{shown(self._path.name)} has more than {_MOST_EVENTS:,} events of a timeline")
        shared_name = self._names.setdefault(name, name)
        if kind in ("kernel", "copy"):
            self._keep_on_device(raw, kind, shared_name, span)
        else:
            self._keep_on_host(raw, kind, shared_name, span)

    def _keep_on_device(self, raw: Any, kind: EventKind, name: str, span: _Span) -> None:
        """Keeps a kernel or a copy; a collective's kernel with its communicator and operation, if the file has them."""
        if kind_of(name) == COPY:  # before ROCm 7.2 copies were kernels
            kind = "copy"
        communicator = ""
        operation_name = ""
        if kind == "kernel" and is_collective(name):
            communicator = _common_communicator_name(text_of(raw.args, "group"))
            operation_name = text_of(raw.args, "operation")
            if not operation_name:
                self._collective_links.add_kernel(position=len(self._events))
        ids = _device_ids(raw)
        self._events_by_device[ids.device] += 1
        self._host_ranges.add_device_lane(raw)
        self._events.append(
            Event(kind, name, span.start_ns, span.end_ns, ids.stream, ids.correlation, communicator, operation_name)
        )

    def _keep_on_host(self, raw: Any, kind: EventKind, name: str, span: _Span) -> None:
        """Keeps a range, a launch or an operator of the host."""
        correlation = integer(raw.args.correlation) or 0 if raw.args is not None else 0
        event = Event(kind, name, span.start_ns, span.end_ns, lane=integer(raw.tid) or 0, correlation=correlation)
        if kind == "annotation":
            self._host_ranges.add(event, raw)
            return
        self._events.append(event)
        if kind in ("launch", "operator"):
            self._host_ranges.add_host_lane(raw)
        external_id = integer(raw.args.external) if kind == "launch" and raw.args is not None else None
        if external_id:
            self._collective_links.add_launch(correlation, external_id)

    def _add_call(self, start_ns: int, arguments: Any) -> None:
        """Adds a call of a collective; waiting for a collective is no call of one."""
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
        self._calls.append(call)
        external_id = integer(arguments.external)
        if c10d_name and external_id:
            self._collective_links.add_call(external_id, call)

    def trace(self, about: dict[str, Any]) -> Trace:
        """Return the trace of all events read; called once, at the end of the file.

        Args:
            about: the facts that the file has around its events.
        """
        self._collective_links.name_operations(self._events)
        self._events += self._host_ranges.events()
        job = about.get("distributedInfo")
        job = job if isinstance(job, dict) else {}
        return Trace(
            rank=integer(job.get("rank")),
            world_size=integer(job.get("world_size")),
            device=_device_name(about.get("deviceProperties"), self._events_by_device),
            trace_id=_text_or_none(about.get("trace_id")),
            backend=_text_or_none(job.get("backend")),
            versions=_library_versions(about, job),
            groups=tuple(_process_groups(job.get("pg_config"))),
            started_unix_seconds=self._clock.unix_seconds(integer(about.get("baseTimeNanoseconds")) or 0),
            events=self._events,
            calls=self._calls,
            products=self._products,
            operators=self._operators,
            devices=len(self._events_by_device),
            unknown=self._unknown,
        )


class _DeviceIds(NamedTuple):
    """Where an event ran on a device, and its launch."""

    device: int
    stream: int
    correlation: int
    """The number that its launch has too; 0 where it has none."""


def _device_ids(raw: Any) -> _DeviceIds:
    """Return where an event ran: by its arguments, else by its process (the device) and its thread (the stream)."""
    device = stream = correlation = None
    if raw.args is not None:
        device = integer(raw.args.device)
        stream = integer(raw.args.stream)
        correlation = integer(raw.args.correlation)
    if device is None:
        device = integer(raw.pid) or 0
    if stream is None:
        stream = integer(raw.tid) or 0
    return _DeviceIds(device, stream, correlation or 0)


def _common_communicator_name(group: str) -> str:
    """Return the name of a process group's communicator; empty for a group without a name.

    Its ranks had to agree on the group's name to meet, and no other group has it: so it counts as the same on all.
    """
    return COMMON_NAME_PREFIX + group if group else ""


def _lane_of(raw: Any) -> _Lane:
    """Return the lane of an event, cut short: the file may hold anything."""
    return _Lane(process=str(raw.pid)[:40], thread=str(raw.tid)[:40])


def _traced_product(start_ns: int, name: str, arguments: Any) -> TracedProduct | None:
    """Return the product of an operator by its arguments; None where its shapes do not give its FLOPs."""
    shapes = tuple(_parse_shape(value) for value in _as_list(arguments.dims))
    flops = product_flops(name, shapes, _as_list(arguments.concrete))
    if flops is None:
        return None
    type_names = [value for value in _as_list(arguments.types) if isinstance(value, str) and value]
    dtype = dtype_name(type_names[0]) if type_names else ""
    return TracedProduct(start_ns, name, shapes, dtype, flops)


def _parse_shape(value: object) -> tuple[int, ...]:
    """Return a shape of the file; empty for what is no tensor."""
    return tuple(size for size in _as_list(value) if isinstance(size, int))


def _as_list(value: object) -> list[Any]:
    """Return the value if it is a list, else an empty list. Traces are input, and may hold anything."""
    return value if isinstance(value, list) else []


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _library_versions(about: Mapping[str, Any], job: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the versions of libraries that the file states: "nccl" -> "2.21.5".

    Args:
        about: the facts around the events.
        job: those of the distributed job.
    """
    versions = {
        "nccl": job.get("nccl_version"),
        "cuda": about.get("cuda_runtime_version"),
        "hip": about.get("hip_runtime_version"),
        "driver": about.get("cuda_driver_version"),
    }
    return {name: printable(str(value))[:40] for name, value in versions.items() if value is not None}


def _process_groups(listed: object) -> Iterator[TracedGroup]:
    """Yields the process groups of a file's list; those without ranks are left out."""
    for group in _as_list(listed):
        ranks = group.get("ranks") if isinstance(group, dict) else None
        if isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks):
            yield TracedGroup(str(group.get("pg_name", ""))[:100], tuple(ranks))


def _device_name(properties: object, events_by_device: Counter[int]) -> str | None:
    """Return the name of the GPU with the most events.

    Where the file has no name for it, but one name for all of its GPUs, that name is returned; else None.

    Args:
        properties: the file's list of GPUs, each with an id and a name.
        events_by_device: number of a device -> number of its events.
    """
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
