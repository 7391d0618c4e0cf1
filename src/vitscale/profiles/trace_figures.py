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
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vitscale.base.time_spans import Interval, complement, intersection, length, union
from vitscale.present.units import listed
from vitscale.profiles.kernels import COMMUNICATION, is_collective, kind_of
from vitscale.profiles.timeline import PHASE_PREFIX, STEP, UNTOLD_PHASES, Event
from vitscale.profiles.trace_file import Trace, TracedCollective
from vitscale.store.records import Collective, TrafficLine

_STEP = re.compile(r"ProfilerStep[#*](\d*)$")
_OPTIMIZER = re.compile(r"Optimizer\.step#|## optimizer ##$")
_FORWARD = re.compile(r"(\w*DataParallel|DeepSpeedEngine)\.forward$|## forward ##$")
_AFTER_BACKWARD = re.compile(r"FSDP::root_post_backward_callback")
"""Ranges of work that belongs to backward, though it follows the last of its functions."""
_DATA = re.compile(r"enumerate\(DataLoader\)#|\[pl\]\[profile\]\[_\w*\]\.train_dataloader_next")
UNTOLD = "not at all: none is marked, no optimizer named, and nothing repeats, so the whole trace stands as one"
_PERIODIC = 0.95
"""Share of kernels that must be the same one period later for a pattern to repeat."""
_FEWEST_PERIODS = 3
_LITTLE = 0.01
"""Share of the device's time below which kernels may be of what is done every few steps."""
_MOST_IN_ONE = 8
"""Most steps of which one may do more than the others."""
_ONE_BACKWARD = 0.02
"""Share of a step: a shorter pause between two backward functions lies within one pass."""
_IN_A_GRAPH = "a CUDA graph was launched outside of all ranges: what it runs is not told apart by phase"
_NO_BACKWARD = "an update is marked, but nothing tells where backward was (a compiled graph may hold it)"
_NO_OPERATORS = "the host's operators are not recorded (ProfilerActivity.CPU): nothing tells the phase of a kernel"
_NO_UPDATE = "no update is marked (Optimizer.step): what runs after backward stands as other"
_NO_LOADER = "no DataLoader is marked: waiting for data stands in launch gaps and other"


@dataclass(frozen=True)
class TraceSteps:
    """The steps of a trace, on the host's clock."""

    numbers: tuple[int, ...]
    annotations: tuple[Event, ...]
    """Events for steps and their phases, named as in our own profiles."""
    found_by: str
    """How the steps were told apart, in words: "by ..."."""
    first_is_whole: bool = False
    """Whether it is known when the first began on the device: earlier work was recorded, or there is only this step."""
    first_begin_ns: int | None = None
    """When the first step began on the device, where that was before the first event there; None: with that event."""


def steps_of(trace: Trace) -> TraceSteps:
    """Steps by `ProfilerStep`, else by the optimizer's ranges, else by kernels that repeat, else all as one."""
    if marks := _marks(trace):
        return _marked_steps(trace, marks)
    launched = trace.launches
    begin = min((event.start_ns for event in trace.events), default=0)
    last = max((event.end_ns for event in trace.events), default=0)
    if len(ends := _ends_of_updates(trace)) > 1:
        spans = list(itertools.pairwise([begin, *ends]))
        return _steps(trace, range(len(spans)), spans, "by the optimizer's ranges: a step ends where an update does")
    if len(starts := _repeats([event for _, event in launched])) > _FEWEST_PERIODS:
        at = [launched[index][0] for index in starts]
        found_by = f"by kernels that repeat, {np.median(np.diff(starts)):,.0f} to a step"
        return _steps(trace, range(len(at) - 1), list(itertools.pairwise(at)), found_by)
    return _steps(trace, [0], [(begin, last + 1)], UNTOLD, first_is_whole=True)


class _Mark(NamedTuple):
    """A `ProfilerStep` range: the host's time from one call of `prof.step()` to the next, or to the profiler's end."""

    start_ns: int
    end_ns: int
    number: int
    launches: int
    """Calls of the host in it that launched something on the device; a graph of many kernels is one call."""

    @property
    def duration_ns(self) -> int:
        """Nanoseconds on the host's clock."""
        return self.end_ns - self.start_ns

    def __str__(self) -> str:
        return f"ProfilerStep#{self.number}"


def _marks(trace: Trace) -> list[_Mark]:
    """The `ProfilerStep` marks of a trace in order of time.

    A mark without a number gets its index; where two then have the same number, all get their index.
    """
    matches = [(event, _STEP.match(event.name)) for event in trace.events if event.kind == "annotation"]
    ranges = sorted((event.start_ns, event.end_ns, match[1]) for event, match in matches if match)
    numbers = [int(number) if number else index for index, (_, _, number) in enumerate(ranges)]
    if len(set(numbers)) < len(numbers):
        numbers = [*range(len(ranges))]
    launch_ns = np.unique(np.array([launch for launch, _ in trace.launches], dtype=np.int64))
    return [
        _Mark(start_ns, end_ns, number, launches=_count_between(launch_ns, start_ns, end_ns))
        for (start_ns, end_ns, _), number in zip(ranges, numbers, strict=True)
    ]


def _count_between(sorted_ns: npt.NDArray[np.int64], start_ns: int, end_ns: int) -> int:
    """The number of times from `start_ns` to before `end_ns`."""
    first, end = np.searchsorted(sorted_ns, (start_ns, end_ns))
    return int(end - first)


_CUT_LAUNCH_SHARE = 0.5
"""Share of the other marks' fewest launches below which a shorter mark is taken for a part of a step. Whole steps may
differ: one may accumulate a gradient without an update."""
_CUT_LAUNCH_SHARE_AMONG_EQUALS = 0.9
"""The same where the other marks have about as many launches as each other, so that a whole step has as many too; and
the fewest launches of marks that are such equals, as a share of the most."""
_CUT_TIME_SHARE = 0.9
"""Share of the shortest other mark's time: a mark that is longer was not cut off, whatever was launched in it."""


def _marked_steps(trace: Trace, marks: Sequence[_Mark]) -> TraceSteps:
    """The steps of a trace by its marks, without those marks that hold no whole step.

    The profiler opens a mark with every `prof.step()`, so that its end cuts the last one off, mostly before anything
    was launched in it; started in the middle of a step, it cuts the first.
    """
    whole_steps = _without_cut(_without_empty(marks))
    numbers = [mark.number for mark in whole_steps]
    spans = [(mark.start_ns, mark.end_ns) for mark in whole_steps]
    skipped_clauses = _skipped_clauses(marks, whole_steps)
    method = "by the profiler's own marks (ProfilerStep)"
    if len(whole_steps) > 1:
        return _steps(trace, numbers, spans, method + skipped_clauses)
    begin_ns = _begin_of_lone_step(trace, whole_steps[0])
    begin = "its first kernel" if begin_ns is None else "its mark's length before its last kernel's end"
    method += f", one step, taken from {begin}{skipped_clauses}"
    return replace(_steps(trace, numbers, spans, method, first_is_whole=True), first_begin_ns=begin_ns)


def _skipped_clauses(marks: Sequence[_Mark], whole_steps: Sequence[_Mark]) -> str:
    """Clauses about the marks that hold no whole step, each with "; " before it; empty where all do."""
    skipped = [mark for mark in marks if mark not in whole_steps]
    empty = [mark for mark in skipped if not mark.launches]
    cut = [mark for mark in skipped if mark.launches]
    clauses = ""
    if empty:
        clauses += f"; {listed(empty)} launched nothing: left out"
    if cut:
        whole_launches = min(mark.launches for mark in whole_steps)
        described = [f"{mark} ({mark.launches:,} of a whole step's {whole_launches:,} launches)" for mark in cut]
        clauses += f"; {listed(described)} cut off: left out"
    return clauses


def _without_empty(marks: Sequence[_Mark]) -> Sequence[_Mark]:
    """The marks in which something was launched; all of them where the trace records no launches."""
    return [mark for mark in marks if mark.launches] or marks


def _without_cut(marks: Sequence[_Mark]) -> Sequence[_Mark]:
    """The marks without the last and the first where these hold a part of a step (`_is_cut`)."""
    if len(marks) > 1 and _is_cut(marks[-1], marks[:-1]):
        marks = marks[:-1]
    if len(marks) > 1 and _is_cut(marks[0], marks[1:]):
        marks = marks[1:]
    return marks


def _is_cut(mark: _Mark, other_marks: Sequence[_Mark]) -> bool:
    """Whether a mark is clearly shorter than all others, and has clearly fewer launches: it holds a part of a step."""
    shortest_ns = min(other.duration_ns for other in other_marks)
    if mark.duration_ns >= _CUT_TIME_SHARE * shortest_ns:
        return False
    launches = [other.launches for other in other_marks]
    are_equals = len(launches) > 1 and min(launches) >= _CUT_LAUNCH_SHARE_AMONG_EQUALS * max(launches)
    launch_share = _CUT_LAUNCH_SHARE_AMONG_EQUALS if are_equals else _CUT_LAUNCH_SHARE
    return mark.launches < launch_share * min(launches)


def _begin_of_lone_step(trace: Trace, mark: _Mark) -> int | None:
    """When the only step of a trace began on the device, in nanoseconds; None: with the first event there.

    The step lasted at least as long as its mark, after which the host began the next one. So where less time than that
    lies between the first event on the device and the end of the last, the device had waited for the host before its
    first event, and the step began a mark's length before the end.
    """
    first_ns = min((event.start_ns for _, event in trace.launches), default=mark.start_ns)
    ends = [event.end_ns for launch, event in trace.launches if mark.start_ns <= launch < mark.end_ns]
    begin_ns = max(ends, default=mark.end_ns) - mark.duration_ns
    return begin_ns if begin_ns < first_ns else None


def _ends_of_updates(trace: Trace) -> list[int]:
    """The ends of those updates after which something is computed before the next: one step may update twice.

    An update inside backward, of each gradient as it comes, ends no step. Where neither forward nor backward is marked,
    each update stands for a step.
    """
    updates, forwards = _named(trace, _OPTIMIZER), _named(trace, _FORWARD)
    functions = union((float(e.start_ns), float(e.end_ns)) for e in trace.events if e.kind == "operator")
    updates = [update for update in updates if intersection([update], functions) != [update]]
    passes = sorted(start for start, _ in (*functions, *forwards))
    if not passes:
        return [math.ceil(end) for _, end in updates]
    starts = [*(start for start, _ in updates[1:]), math.inf]
    return [
        math.ceil(end)
        for (_, end), start in zip(updates, starts, strict=False)
        if start == math.inf or bisect_left(passes, end) < bisect_left(passes, start)
    ]


def _named(trace: Trace, pattern: re.Pattern[str]) -> list[Interval]:
    """Stretches of the ranges whose names match."""
    return union(
        (float(e.start_ns), float(e.end_ns)) for e in trace.events if e.kind == "annotation" and pattern.match(e.name)
    )


def _steps(
    trace: Trace, numbers: Iterable[int], spans: Sequence[tuple[int, int]], found_by: str, first_is_whole: bool = False
) -> TraceSteps:
    launched = trace.launches
    return TraceSteps(
        tuple(numbers),
        (*(Event("annotation", STEP, *span, 0) for span in spans), *_phases(trace, spans)),
        found_by,
        first_is_whole or bool(launched and spans and launched[0][0] < spans[0][0]),
    )


def _repeats(events: Sequence[Event]) -> list[int]:
    """Indices at which a repeating pattern begins; empty where nothing repeats.

    The rarest kernels occur once a step, so the distance between two of the same name is tried as the period of all.
    But what is done every few steps is rarer still: where the rest repeats several times within such a period, and
    next to nothing is done but once in it, it is of several steps. A model's layers repeat within a step too, beside
    kernels that take time, update or exchange.
    """
    names = Counter(event.name for event in events)
    numbers = {name: index for index, name in enumerate(names)}
    ids = np.array([numbers[event.name] for event in events], dtype=np.int64)
    best, once = list[int](), 0
    for count in sorted({count for count in names.values() if _FEWEST_PERIODS < count <= 1000}):
        rare = [name for name, others in names.items() if others < count] if best else []
        if best and (count > _MOST_IN_ONE * once or not _is_little(events, rare)):
            break
        of_all = np.flatnonzero(~np.isin(ids, [numbers[name] for name in rare]))
        tried = (_chained(ids[of_all], numbers[name]) for name, others in names.items() if others == count)
        if chained := next((some for some in tried if len(some) > _FEWEST_PERIODS), []):
            best, once = [int(of_all[index]) for index in chained], once or count
    return best


def _is_little(events: Sequence[Event], rare: Sequence[str]) -> bool:
    """Whether events of these names take next to no time, and are neither updates nor exchanges."""
    if any(kind_of(name) in (COMMUNICATION, "optimizer") for name in rare):
        return False
    of_all = Counter[str]()
    for event in events:
        of_all[event.name] += event.end_ns - event.start_ns
    return sum(of_all[name] for name in rare) < _LITTLE * of_all.total()


def _chained(ids: np.ndarray[Any, np.dtype[np.int64]], number: int) -> list[int]:
    """Indices of one kind of event, one period apart, if that period is everything's; else none."""
    places = np.flatnonzero(ids == number)
    period = int(np.median(np.diff(places)))
    if period <= 1 or np.mean(ids[period:] == ids[:-period]) < _PERIODIC:
        return []
    chained = [int(places[0])]
    for index in places[1:]:
        if abs(int(index) - chained[-1] - period) <= 0.05 * period:
            chained.append(int(index))
    return chained


def _phases(trace: Trace, spans: Sequence[tuple[int, int]]) -> Iterable[Event]:
    """Yields each step's phases: backward by its functions, the others by ranges and by what lies between them."""
    updates, forwards, data = (_named(trace, pattern) for pattern in (_OPTIMIZER, _FORWARD, _DATA))
    functions = [(float(e.start_ns), float(e.end_ns)) for e in trace.events if e.kind == "operator"]
    functions = union([*functions, *_named(trace, _AFTER_BACKWARD)])
    graphs = sorted(e.start_ns for e in trace.events if e.kind == "launch" and "GraphLaunch" in e.name)
    launched = _Launched(trace)
    for start, end in spans:
        inside: Interval = (start, end)
        update = intersection(updates, [inside])
        backward = union(intersection(functions, [inside]), join_below=_ONE_BACKWARD * (end - start))
        backward = _outside(backward, update, inside)
        told = _outside(intersection(forwards, [inside]), [*backward, *update], inside)
        waits = _outside(intersection(data, [inside]), [*backward, *update], inside)
        in_graphs = graphs[bisect_left(graphs, start) : bisect_left(graphs, end)]
        untold = {} if data else {"data_wait": _NO_LOADER}
        if backward:
            phases = _filled(inside, told, backward, update, launched)
            untold |= {} if updates else {"optimizer": _NO_UPDATE}
        elif trace.operators and not update and all(intersection(told, [(at, at + 1.0)]) for at in in_graphs):
            phases = {"forward": told or [inside]}
        else:
            why = _NO_BACKWARD if update else _IN_A_GRAPH if trace.operators else _NO_OPERATORS
            untold |= {"forward,backward,optimizer": why}
            # One phase stands for all of them, so that gaps between launches are known.
            phases = {"forward": [(start, update[-1][1] if update else end)]}
        yield from (
            Event("annotation", f"{UNTOLD_PHASES}{parts} {why}", start, end, 0) for parts, why in untold.items()
        )
        phases["forward"] = _outside(phases["forward"], waits, inside)
        for name, some in {"data": waits, **phases}.items():
            yield from (Event("annotation", PHASE_PREFIX + name, math.ceil(a), math.ceil(b), 0) for a, b in some)


def _filled(
    inside: Interval,
    told: Sequence[Interval],
    backward: Sequence[Interval],
    update: Sequence[Interval],
    launched: _Launched,
) -> dict[str, list[Interval]]:
    """The phases of a step that trains, with what lies between their marks.

    Before a backward pass lies forward: preprocessing, the model, the loss. It ends with the copies by which DDP hands
    gradients back, and clipping belongs to the update. What follows the last update is of no phase, unless marked.
    """
    marks = sorted(
        (start, end, name)
        for name, some in (("forward", told), ("backward", backward), ("optimizer", update))
        for start, end in some
    )
    phases: dict[str, list[Interval]] = {"forward": [], "backward": [], "optimizer": []}
    last = max((start for start, _ in backward), default=-math.inf)
    reached, before = inside[0], ""
    for start, end, name in [*marks, (inside[1], inside[1], "")]:
        if before == "backward":
            returned = launched.copies(reached, start)
            phases["backward"].append((reached, returned))
            reached = returned
        if name == "optimizer" and before in ("backward", "optimizer"):
            phases["optimizer"].append((reached, start))
        elif start <= last:
            # Where forward is marked, a pause without such a mark lies within one pass.
            phases["backward" if told and name == before == "backward" else "forward"].append((reached, start))
        if name:
            phases[name].append((start, end))
        reached, before = end, name
    return {name: union(some) for name, some in phases.items()}


class _Launched:
    """What the host launched, by when."""

    def __init__(self, trace: Trace) -> None:
        self._launches = trace.launches
        self._at = np.array([launch for launch, _ in self._launches], dtype=np.int64)
        self._exchanges = any(event.kind == "kernel" and is_collective(event.name) for _, event in self._launches)

    def copies(self, since_ns: float, until_ns: float) -> float:
        """When the last of those copies on the device was launched with which a stretch begins.

        Where nothing is exchanged they are not DDP's, and the stretch begins with none.
        """
        reached = since_ns
        first, last = np.searchsorted(self._at, (math.ceil(since_ns), math.ceil(until_ns)))
        for launch, event in self._launches[first:last] if self._exchanges else ():
            if event.kind != "copy" or "DtoD" not in event.name:
                break
            reached = launch + 1.0
        return reached


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


def step_spans(trace: Trace, steps: TraceSteps) -> list[tuple[int, Interval, bool]]:
    """(Number, span on the device, whether it is whole) of each step that launched something.

    A step lasts from the end of what was launched before it to the end of what it launched. If nothing was launched
    before, it is not whole: it begins with its own first kernel, and what came before that is unknown.
    """
    launches = trace.launches
    spans: list[tuple[int, Interval, bool]] = []
    reached, index = 0, 0
    first = min((event.start_ns for _, event in launches), default=0)
    if steps.first_begin_ns is not None:
        first = steps.first_begin_ns
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


def traffic_lines(trace: Trace, steps: TraceSteps) -> tuple[TrafficLine, ...]:
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


def _collective(call: TracedCollective) -> Collective | None:
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


def product_rate(trace: Trace, steps: TraceSteps, device: DeviceTime) -> float | None:
    """FLOP/s of the matrix products of whole steps while the device computed; None where no shapes were recorded."""
    hosts = dict(zip(steps.numbers, _host_spans(steps), strict=True))
    flops, seconds = 0, 0.0
    for number, span, whole in step_spans(trace, steps):
        if whole:
            start, end = hosts[number]
            flops += sum(product.flops for product in trace.products if start <= product.start_ns < end)
            seconds += device.shares(span).compute_seconds
    return flops / seconds if flops and seconds else None


def _host_spans(steps: TraceSteps) -> Sequence[tuple[int, int]]:
    return sorted((event.start_ns, event.end_ns) for event in steps.annotations if event.name == STEP)
