"""Shares of a GPU's time in a trace: compute, exposed communication, exposed copies and idle time add up to the whole.

compute        a kernel runs that is no collective; memsets are kernels
communication  a collective's kernel runs: exposed while nothing computes, else overlapped
copy           the device copies: exposed while nothing computes or communicates
idle           nothing runs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vitscale.base.time_spans import Interval, intersection, length, union
from vitscale.profiles.kernels import COMMUNICATION, kind_of
from vitscale.profiles.timeline import STEP
from vitscale.profiles.trace_file import Call, Trace
from vitscale.profiles.trace_steps import Steps
from vitscale.store.records import Collective, TrafficLine


@dataclass(frozen=True)
class TimeShares:
    """How a stretch of a device's time was spent, in seconds."""

    total_seconds: float
    compute_seconds: float
    exposed_communication_seconds: float
    copy_seconds: float
    """Time of copies while nothing computes or communicates."""
    idle_seconds: float
    communication_seconds: float
    """All communication, overlapped or not."""
    copying_seconds: float
    """All copies, overlapped or not."""
    communication_overlap_share: float | None
    """Share of communication during which something computes; None without communication."""

    def as_json(self) -> dict[str, Any]:
        """The same values by field name."""
        return asdict(self)


class DeviceTime:
    """What ran on the device of one rank, as disjoint intervals in nanoseconds."""

    def __init__(self, trace: Trace) -> None:
        by_kind: dict[str, list[Interval]] = {"compute": [], "communication": [], "copy": []}
        self.kernel_seconds: dict[str, float] = {}
        """Kind of kernel to its seconds, added up over streams."""
        for event in trace.on_device:
            kind = kind_of(event.name) if event.kind == "kernel" else "copy"
            self.kernel_seconds[kind] = self.kernel_seconds.get(kind, 0.0) + (event.end_ns - event.start_ns) / 1e9
            of = kind if kind in by_kind else "compute"
            by_kind[of].append((float(event.start_ns), float(event.end_ns)))
        self._compute, self._communication, self._copies = (union(some) for some in by_kind.values())
        ends = [edge for some in (self._compute, self._communication, self._copies) for span in some for edge in span]
        self.span: Interval | None = (min(ends), max(ends)) if ends else None
        """First start and last end on the device; None where nothing ran."""

    def shares(self, within: Interval) -> TimeShares:
        """How the time within an interval was spent."""
        compute, communication, copies = (
            intersection(some, [within]) for some in (self._compute, self._communication, self._copies)
        )
        working = union([*compute, *communication])
        busy = union([*working, *copies])
        whole = length(communication)
        overlapped = length(intersection(compute, communication))
        total = within[1] - within[0]
        return TimeShares(
            total / 1e9,
            length(compute) / 1e9,
            (whole - overlapped) / 1e9,
            (length(busy) - length(working)) / 1e9,
            (total - length(busy)) / 1e9,
            whole / 1e9,
            length(copies) / 1e9,
            overlapped / whole if whole else None,
        )


def step_spans(trace: Trace, steps: Steps) -> list[tuple[int, Interval, bool]]:
    """(Number, span on the device, whether it is whole) of each step that launched something.

    A step lasts from the end of what was launched before it to the end of what it launched. If nothing was launched
    before, it is not whole: it begins with its own first kernel, and what came before that is unknown.
    """
    launches = trace.launches
    spans: list[tuple[int, Interval, bool]] = []
    reached, index, first = 0, 0, min((event.start_ns for _, event in launches), default=0)
    for number, (start, end) in zip(steps.numbers, _host_spans(steps), strict=True):
        while index < len(launches) and launches[index][0] < start:
            reached, index = max(reached, launches[index][1].end_ns), index + 1
        known, begin = reached > 0, reached or first
        own = index
        while index < len(launches) and launches[index][0] < end:
            reached, index = max(reached, launches[index][1].end_ns), index + 1
        if index > own and reached > begin:
            spans.append((number, (begin, reached), known or steps.first_is_whole))
    return spans


def traffic_lines(trace: Trace, steps: Steps) -> tuple[TrafficLine, ...]:
    """What each step's collectives sent, if the file records their sizes; else why it is unknown."""
    if not (trace.calls or any(kind_of(event.name) == COMMUNICATION for event in trace.on_device)):
        return ()
    lines = []
    for number, (start, end) in zip(steps.numbers, _host_spans(steps), strict=True):
        own = [call for call in trace.calls if start <= call.start_ns < end]
        known = [collective for call in own if (collective := _collective(call)) is not None]
        whole = bool(known) and len(known) == len(own)
        why = "the trace's calls of collectives carry no sizes" if own else "the trace records no calls of collectives"
        lines.append(
            TrafficLine(
                step=number,
                backend=trace.backend or "nccl",
                collectives=tuple(known) if whole else None,
                reason=None if whole else why,
            )
        )
    return tuple(lines)


def _collective(call: Call) -> Collective | None:
    """The collective of a call; None if the call lacks a figure, or tells what cannot be: nothing sent, or no ranks."""
    sizes = call.input_elements, call.output_elements
    if not (call.operation and call.dtype and call.ranks and call.ranks > 0) or call.input_elements is None:
        return None
    if any(size is not None and size < 0 for size in sizes) or not (any(sizes) or call.operation == "barrier"):
        return None
    return Collective(
        communicator=call.communicator,
        ranks=call.ranks,
        operation=call.operation,
        dtype=call.dtype,
        input_elements=call.input_elements,
        output_elements=call.output_elements or 0,
    )


def product_rate(trace: Trace, steps: Steps, device: DeviceTime) -> float | None:
    """FLOP/s of the matrix products of whole steps while the device computed; None where no shapes were recorded."""
    hosts = dict(zip(steps.numbers, _host_spans(steps), strict=True))
    flops, seconds = 0, 0.0
    for number, span, whole in step_spans(trace, steps):
        if whole:
            start, end = hosts[number]
            flops += sum(product.flops for product in trace.products if start <= product.start_ns < end)
            seconds += device.shares(span).compute_seconds
    return flops / seconds if flops and seconds else None


def _host_spans(steps: Steps) -> Sequence[tuple[int, int]]:
    return sorted((event.start_ns, event.end_ns) for event in steps.annotations if event.name == STEP)
