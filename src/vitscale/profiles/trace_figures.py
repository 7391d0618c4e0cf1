"""Steps and phases in a trace that others recorded, which get the annotations of our own profiles, and its figures.

Shares of a GPU's time add up to the whole:

compute        a kernel runs that is no collective; memsets are kernels
communication  a collective's kernel runs: exposed while nothing computes, else overlapped
copy           the device copies: exposed while nothing computes or communicates
idle           nothing runs
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vitscale.base.time_spans import Interval, complement, intersection, length, union
from vitscale.profiles.kernels import COMMUNICATION, kind_of
from vitscale.profiles.timeline import PHASE_PREFIX, STEP, Event
from vitscale.profiles.trace_file import Call, Trace
from vitscale.store.records import Collective, PhaseName, TrafficLine

_STEP = re.compile(r"ProfilerStep[#*](\d*)$")
_OPTIMIZER = re.compile(r"Optimizer\.step#|## optimizer ##$")
_FORWARD = re.compile(r"(\w*DataParallel|DeepSpeedEngine)\.forward$|## forward ##$")
_DATA = re.compile(r"enumerate\(DataLoader\)#|\[pl\]\[profile\]\[_\w*\]\.train_dataloader_next")
UNTOLD = "not at all: none is marked, no optimizer named, and nothing repeats, so the whole trace stands as one"
_PERIODIC = 0.95
"""Share of kernels that must be the same one period later for a pattern to repeat."""
_FEWEST_PERIODS = 3
_ONE_BACKWARD = 0.02
"""Share of a step: a shorter pause between two backward functions lies within one pass."""


@dataclass(frozen=True)
class Steps:
    """The steps of a trace, on the host's clock."""

    numbers: tuple[int, ...]
    annotations: tuple[Event, ...]
    """Events for steps and their phases, named as in our own profiles."""
    found_by: str
    """How the steps were told apart, in words: "by ..."."""
    first_is_whole: bool = False
    """Whether it is known when the first began on the device: earlier work was recorded, or there is only this step."""


def steps_of(trace: Trace) -> Steps:
    """Steps by `ProfilerStep`, else by the optimizer's ranges, else by kernels that repeat, else all as one."""
    ranges = [event for event in trace.events if event.kind == "annotation"]
    launched = trace.launches
    marked = sorted((event.start_ns, event.end_ns, match[1]) for event in ranges if (match := _STEP.match(event.name)))
    if marked:
        numbers = tuple(int(number) if number else index for index, (_, _, number) in enumerate(marked))
        spans = [(start, end) for start, end, _ in marked]
        if len(set(numbers)) < len(numbers):
            numbers = tuple(range(len(spans)))
        alone = ", one step, taken from its first kernel" if len(spans) == 1 else ""
        return _steps(trace, numbers, spans, f"by the profiler's own marks (ProfilerStep){alone}", bool(alone))
    updates = union((float(span.start_ns), float(span.end_ns)) for span in ranges if _OPTIMIZER.match(span.name))
    begin = min((event.start_ns for event in trace.events), default=0)
    last = max((event.end_ns for event in trace.events), default=0)
    if len(updates) > 1:
        ends = [begin, *(math.ceil(end) for _, end in updates)]
        spans = list(itertools.pairwise(ends))
        return _steps(trace, range(len(spans)), spans, "by the optimizer's ranges: a step ends where an update does")
    if len(starts := _repeats([event.name for _, event in launched])) > _FEWEST_PERIODS:
        at = [launched[index][0] for index in starts]
        found_by = f"by kernels that repeat, {starts[1] - starts[0]:,} to a step"
        return _steps(trace, range(len(at) - 1), list(itertools.pairwise(at)), found_by)
    return _steps(trace, [0], [(begin, last + 1)], UNTOLD, first_is_whole=True)


def _steps(
    trace: Trace, numbers: Iterable[int], spans: Sequence[tuple[int, int]], found_by: str, first_is_whole: bool = False
) -> Steps:
    launched = trace.launches
    return Steps(
        tuple(numbers),
        (*(Event("annotation", STEP, *span, 0) for span in spans), *_phases(trace, spans)),
        found_by,
        first_is_whole or bool(launched and spans and launched[0][0] < spans[0][0]),
    )


def _repeats(names: Sequence[str]) -> list[int]:
    """Indices at which a repeating pattern begins; empty where nothing repeats.

    The rarest kernels occur once a step, so the distance between two of the same name is tried as the period of all.
    """
    counts = Counter(names)
    numbers = {name: index for index, name in enumerate(counts)}
    ids = np.array([numbers[name] for name in names])
    best: list[int] = []
    for name, count in sorted(counts.items(), key=lambda pair: pair[1]):
        if not _FEWEST_PERIODS < count <= 1000:
            continue
        places = np.flatnonzero(ids == numbers[name])
        period = int(np.median(np.diff(places)))
        if period > 1 and np.mean(ids[period:] == ids[:-period]) >= _PERIODIC:
            chained = [int(places[0])]
            for index in places[1:]:
                if abs(int(index) - chained[-1] - period) <= 0.05 * period:
                    chained.append(int(index))
            if not best or (chained[1:2] and period < best[1] - best[0]):
                best = chained
            if len(best) > _FEWEST_PERIODS:
                break
    return best if len(best) > _FEWEST_PERIODS else []


def _phases(trace: Trace, spans: Sequence[tuple[int, int]]) -> Iterable[Event]:
    """Yields each step's phases: backward by its functions, the others by ranges.

    If no range marks forward, it is all before each backward pass, or the whole step where nothing is trained.
    """

    def named(pattern: re.Pattern[str]) -> list[Interval]:
        return union(
            (float(e.start_ns), float(e.end_ns))
            for e in trace.events
            if e.kind == "annotation" and pattern.match(e.name)
        )

    updates, forwards, data = named(_OPTIMIZER), named(_FORWARD), named(_DATA)
    functions = union((float(e.start_ns), float(e.end_ns)) for e in trace.events if e.kind == "operator")
    infers = trace.operators > 0 and not functions and not updates
    for start, end in spans:
        inside: Interval = (start, end)
        update = intersection(updates, [inside])
        backward = union(intersection(functions, [inside]), join_below=_ONE_BACKWARD * (end - start))
        backward = _outside(backward, update, inside)
        waits = _outside(intersection(data, [inside]), [*backward, *update], inside)
        if told := intersection(forwards, [inside]):
            forward = _outside(told, [*backward, *update, *waits], inside)
        else:
            taken = union([*backward, *update, *waits])
            last = max((b for _, b in backward), default=end if infers else start)
            forward = [gap for gap in complement(taken, (start, last)) if gap[1] > gap[0]]
        phases: list[tuple[PhaseName, list[Interval]]] = [
            ("data", waits), ("forward", forward), ("backward", backward), ("optimizer", update),
        ]  # fmt: skip
        for name, some in phases:
            yield from (Event("annotation", PHASE_PREFIX + name, math.ceil(a), math.ceil(b), 0) for a, b in some)


def _outside(some: Sequence[Interval], of: Sequence[Interval], within: Interval) -> list[Interval]:
    return intersection(some, complement(union(of), within))


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
