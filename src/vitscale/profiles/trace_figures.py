"""Finds steps and phases in a trace that others recorded, annotates them as our own profiles do, and takes its figures.

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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vitscale.base.time_spans import Interval, complement, intersection, length, union
from vitscale.present.units import listed
from vitscale.profiles.kernels import COMMUNICATION, COPY, is_collective, kind_of
from vitscale.profiles.timeline import PHASE_PREFIX, STEP, UNKNOWN_PHASES, Event, Launched
from vitscale.profiles.trace_file import Trace, TracedCollective
from vitscale.store.records import Collective, TrafficLine

_STEP = re.compile(r"ProfilerStep[#*](\d*)$")
_OPTIMIZER = re.compile(r"Optimizer\.step#|## optimizer ##$")
_FORWARD = re.compile(r"(\w*DataParallel|DeepSpeedEngine)\.forward$|## forward ##$")
_AFTER_BACKWARD = re.compile(r"FSDP::root_post_backward_callback")
"""Ranges of work that belongs to backward, though it follows the last of its functions."""
_DATA = re.compile(r"enumerate\(DataLoader\)#|\[pl\]\[profile\]\[_\w*\]\.train_dataloader_next")
"""Ranges in which the host waits for data: torch's, and Lightning's."""
UNTOLD = "not at all: none is marked, no optimizer named, and nothing repeats, so the whole trace stands as one"
"""`TraceSteps.found_by` where the steps of a trace could not be found."""
_LEAST_REPEATED_SHARE = 0.95
"""Share of kernels that must be the same one period later for a pattern to repeat."""
_FEWEST_PERIODS = 3
_MOST_PERIODS = 1000
"""Most times that a pattern is looked for."""
_PERIOD_TOLERANCE = 0.05
"""Share by which the distance between two events may differ from the period."""
_NEGLIGIBLE_SHARE = 0.01
"""Share of the device's time below which kernels may be of what is done every few steps."""
_MOST_SHORT_PERIODS = 8
"""Most short periods in the longest one: steps of which one may do more than the others."""
_PAUSE_SHARE_WITHIN_BACKWARD = 0.02
"""A pause between two backward functions that is a smaller share of the step lies within one pass."""
_IN_A_GRAPH = "a CUDA graph was launched outside of all ranges: what it runs is not told apart by phase"
_NO_BACKWARD = "an update is marked, but nothing tells where backward was (a compiled graph may hold it)"
_NO_OPERATORS = "the host's operators are not recorded (ProfilerActivity.CPU): nothing tells the phase of a kernel"
_NO_UPDATE = "no update is marked (Optimizer.step): what runs after backward stands as other"
_NO_LOADER = "no DataLoader is marked: waiting for data stands in launch gaps and other"

_KindIds = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TraceSteps:
    """The steps of a trace, on the host's clock."""

    numbers: tuple[int, ...]
    annotations: tuple[Event, ...]
    """Events for steps and their phases, named as in our own profiles."""
    found_by: str
    """How the steps were found, in words: "by ..."."""
    first_is_whole: bool = False
    """Whether it is known when the first began on the device: earlier work was recorded, or there is only this step."""
    first_begin_ns: int | None = None
    """When the first step began on the device, where that was before the first event there; None: with that event."""


class _HostSpan(NamedTuple):
    """A stretch of time on the host's clock."""

    start_ns: int
    end_ns: int


def steps_of(trace: Trace) -> TraceSteps:
    """Return the steps of a trace, found by the first that it has of marks, updates and a pattern.

    Marks are the profiler's own (`ProfilerStep`), updates are ranges of the optimizer, and a pattern is a series of
    kernels that repeats. Where a trace has none of them, all of it counts as one step.
    """
    marks = _profiler_marks(trace)
    if marks:
        return _marked_steps(trace, marks)

    begin_ns = min((event.start_ns for event in trace.events), default=0)
    update_ends = _ends_of_updates(trace)
    if len(update_ends) > 1:
        return _steps_with_phases(
            trace,
            numbers=range(len(update_ends)),
            spans=_spans_between([begin_ns, *update_ends]),
            found_by="by the optimizer's ranges: a step ends where an update does",
        )

    launches = trace.launches
    pattern_starts = _starts_of_repeats([launch.event for launch in launches])
    if len(pattern_starts) > _FEWEST_PERIODS:
        return _steps_with_phases(
            trace,
            numbers=range(len(pattern_starts) - 1),
            spans=_spans_between([launches[index].launch_ns for index in pattern_starts]),
            found_by=f"by kernels that repeat, {np.median(np.diff(pattern_starts)):,.0f} to a step",
        )

    last_ns = max((event.end_ns for event in trace.events), default=0)
    return _steps_with_phases(
        trace, numbers=[0], spans=[_HostSpan(begin_ns, last_ns + 1)], found_by=UNTOLD, first_is_whole=True
    )


def _spans_between(moments_ns: Iterable[int]) -> list[_HostSpan]:
    """Return the spans from each moment to the next: [1, 5, 9] gives 1 to 5 and 5 to 9."""
    return [_HostSpan(start_ns, end_ns) for start_ns, end_ns in itertools.pairwise(moments_ns)]


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


class _MarkedRange(NamedTuple):
    """A `ProfilerStep` range as the trace has it."""

    start_ns: int
    end_ns: int
    number: str
    """Digits; empty in "ProfilerStep*", which has no number."""


def _profiler_marks(trace: Trace) -> list[_Mark]:
    """Return the `ProfilerStep` marks of a trace in order of time.

    A mark without a number gets its index; where two then have the same number, all get their index.
    """
    ranges = []
    for event in trace.events:
        match = _STEP.match(event.name) if event.kind == "annotation" else None
        if match:
            ranges.append(_MarkedRange(event.start_ns, event.end_ns, number=match[1]))
    ranges.sort()
    numbers = [int(marked.number) if marked.number else index for index, marked in enumerate(ranges)]
    if len(set(numbers)) < len(numbers):
        numbers = [*range(len(ranges))]
    # A graph of many kernels has one launch, and so one time.
    launch_ns = np.unique(np.array([launch.launch_ns for launch in trace.launches], dtype=np.int64))
    marks = []
    for marked, number in zip(ranges, numbers, strict=True):
        launches = _count_between(launch_ns, marked.start_ns, marked.end_ns)
        marks.append(_Mark(marked.start_ns, marked.end_ns, number, launches))
    return marks


def _count_between(sorted_ns: npt.NDArray[np.int64], start_ns: int, end_ns: int) -> int:
    """Return the number of times from `start_ns` to before `end_ns`."""
    first, behind_last = np.searchsorted(sorted_ns, (start_ns, end_ns))
    return int(behind_last - first)


_CUT_LAUNCH_SHARE = 0.5
"""Share of the other marks' fewest launches below which a shorter mark is taken for a part of a step. Whole steps may
differ: one may accumulate a gradient without an update."""
_CUT_LAUNCH_SHARE_AMONG_EQUALS = 0.9
"""The same where the other marks have about as many launches as each other, so that a whole step has as many too; and
the fewest launches of marks that are such equals, as a share of the most."""
_CUT_TIME_SHARE = 0.9
"""Share of the shortest other mark's time: a mark that is longer was not cut off, whatever was launched in it."""


def _marked_steps(trace: Trace, marks: Sequence[_Mark]) -> TraceSteps:
    """Return the steps of a trace by its marks, without those marks that hold no whole step.

    The profiler opens a mark with every `prof.step()`, so that its end cuts the last one off, mostly before anything
    was launched in it; started in the middle of a step, it cuts the first.
    """
    whole_steps = _without_cut(_without_empty(marks))
    numbers = [mark.number for mark in whole_steps]
    spans = [_HostSpan(mark.start_ns, mark.end_ns) for mark in whole_steps]
    skipped_clauses = _skipped_clauses(marks, whole_steps)
    method = "by the profiler's own marks (ProfilerStep)"
    if len(whole_steps) > 1:
        return _steps_with_phases(trace, numbers, spans, method + skipped_clauses)
    begin_ns = _begin_of_lone_step(trace, whole_steps[0])
    begin = "its first kernel" if begin_ns is None else "its mark's length before its last kernel's end"
    method += f", one step, taken from {begin}{skipped_clauses}"
    return replace(_steps_with_phases(trace, numbers, spans, method, first_is_whole=True), first_begin_ns=begin_ns)


def _skipped_clauses(marks: Sequence[_Mark], whole_steps: Sequence[_Mark]) -> str:
    """Return clauses about the marks that hold no whole step, each with "; " before it; empty where all do."""
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
    """Return the marks in which something was launched; all of them where the trace records no launches."""
    return [mark for mark in marks if mark.launches] or marks


def _without_cut(marks: Sequence[_Mark]) -> Sequence[_Mark]:
    """Return the marks without the last and the first where these hold a part of a step (`_is_cut`)."""
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
    """Return when the only step of a trace began on the device, in nanoseconds; None: with the first event there.

    The step lasted at least as long as its mark, after which the host began the next one. So where less time than that
    lies between the first event on the device and the end of the last, the device had waited for the host before its
    first event, and the step began a mark's length before the end.
    """
    first_ns = min((event.start_ns for _, event in trace.launches), default=mark.start_ns)
    ends = [event.end_ns for launch_ns, event in trace.launches if mark.start_ns <= launch_ns < mark.end_ns]
    begin_ns = max(ends, default=mark.end_ns) - mark.duration_ns
    return begin_ns if begin_ns < first_ns else None


def _ends_of_updates(trace: Trace) -> list[int]:
    """Return when updates of the optimizer end that end a step, in nanoseconds.

    An update ends a step if something is computed between it and the next one: one step may update twice. An update
    inside backward, of each gradient as it comes, ends no step. Where neither forward nor backward is marked, each
    update stands for a step.
    """
    backward = union(_backward_functions(trace))
    updates: list[Interval] = []
    for update in _ranges_named(trace, _OPTIMIZER):
        lies_in_backward = intersection([update], backward) == [update]
        if not lies_in_backward:
            updates.append(update)
    forward = _ranges_named(trace, _FORWARD)
    pass_starts = sorted(start for start, _ in (*backward, *forward))
    if not updates:
        return []
    next_starts = [*(start for start, _ in updates[1:]), math.inf]  # of the update that follows each one
    ends = []
    for (_, end), next_start in zip(updates, next_starts, strict=True):
        is_last = next_start == math.inf
        if is_last or not pass_starts or _is_any_between(pass_starts, end, next_start):
            ends.append(math.ceil(end))
    return ends


def _is_any_between(sorted_ns: Sequence[float], start_ns: float, end_ns: float) -> bool:
    """Whether a time lies from `start_ns` to before `end_ns`."""
    return bisect_left(sorted_ns, start_ns) < bisect_left(sorted_ns, end_ns)


def _backward_functions(trace: Trace) -> list[Interval]:
    """Return when torch's backward functions ran, which are all operators that a trace keeps; in no order."""
    return [(float(event.start_ns), float(event.end_ns)) for event in trace.events if event.kind == "operator"]


def _ranges_named(trace: Trace, pattern: re.Pattern[str]) -> list[Interval]:
    """Return when ranges were open whose names match; disjoint and in order."""
    matching = [event for event in trace.events if event.kind == "annotation" and pattern.match(event.name)]
    return union((float(event.start_ns), float(event.end_ns)) for event in matching)


def _steps_with_phases(
    trace: Trace, numbers: Iterable[int], spans: Sequence[_HostSpan], found_by: str, first_is_whole: bool = False
) -> TraceSteps:
    """Return the steps of a trace with their phases.

    Args:
        trace: the trace.
        numbers: the number of each step.
        spans: each step on the host's clock.
        found_by: how the steps were found, in words.
        first_is_whole: whether the first one is whole whatever was launched before it.
    """
    step_events = [Event("annotation", STEP, span.start_ns, span.end_ns, lane=0) for span in spans]
    launches = trace.launches
    has_earlier_work = bool(launches and spans) and launches[0].launch_ns < spans[0].start_ns
    return TraceSteps(
        numbers=tuple(numbers),
        annotations=(*step_events, *_phase_annotations(trace, spans)),
        found_by=found_by,
        first_is_whole=first_is_whole or has_earlier_work,
    )


def _starts_of_repeats(events: Sequence[Event]) -> list[int]:
    """Return the indices at which a series of kernels begins that repeats step by step; empty where nothing repeats.

    The rarest kernels occur once a step. So names are tried from the rarest on: the distance, in events, between two
    kernels of the same name is the period if all kernels repeat by it.

    That period may be of several steps, since some kernels run only every few steps. So a shorter period replaces it
    if two things hold: it fits into the first one at most `_MOST_SHORT_PERIODS` times; and the kernels that do not run
    in every short period take next to no time, and neither update nor exchange. Otherwise the shorter period is that of
    a model's layers, which repeat within a step.

    Example: the kernels a b c a b c d, and these over and over, have the period of 7 events by the name d, and that of
    3 by the names a, b and c without d.
    """
    count_by_name = Counter(event.name for event in events)
    id_by_name = {name: index for index, name in enumerate(count_by_name)}
    ids = np.array([id_by_name[event.name] for event in events], dtype=np.int64)  # [events]
    counts_to_try = sorted({count for count in count_by_name.values() if _FEWEST_PERIODS < count <= _MOST_PERIODS})
    starts: list[int] = []
    longest_period_count = 0  # how often the longest period occurs; 0 until one is known
    for count in counts_to_try:
        disregarded_names: list[str] = []
        if starts:
            disregarded_names = [name for name, other_count in count_by_name.items() if other_count < count]
            fits_too_often = count > _MOST_SHORT_PERIODS * longest_period_count
            if fits_too_often or not _are_negligible(events, disregarded_names):
                break
        candidates = [id_by_name[name] for name, other_count in count_by_name.items() if other_count == count]
        new_starts = _starts_without(ids, [id_by_name[name] for name in disregarded_names], candidates)
        if new_starts:
            starts = new_starts
            longest_period_count = longest_period_count or count
    return starts


def _starts_without(ids: _KindIds, disregarded: Sequence[int], candidates: Iterable[int]) -> list[int]:
    """Return the indices at which a series begins that repeats; empty where nothing repeats.

    Args:
        ids: the kind of each event [events].
        disregarded: kinds whose events need not repeat.
        candidates: kinds to try, of which a series has one event.
    """
    indices = np.flatnonzero(~np.isin(ids, disregarded))  # those of the other events, among all events
    positions = _first_repeating_kind(ids[indices], candidates)  # among the other events
    return [int(indices[position]) for position in positions]


def _are_negligible(events: Sequence[Event], names: Sequence[str]) -> bool:
    """Whether the events with these names take next to no time of all, and are neither updates nor exchanges."""
    if any(kind_of(name) in (COMMUNICATION, "optimizer") for name in names):
        return False
    ns_by_name = Counter[str]()
    for event in events:
        ns_by_name[event.name] += event.end_ns - event.start_ns
    return sum(ns_by_name[name] for name in names) < _NEGLIGIBLE_SHARE * ns_by_name.total()


def _first_repeating_kind(ids: _KindIds, candidates: Iterable[int]) -> list[int]:
    """Return the positions of the first kind of event by which all events repeat, one period apart; else empty.

    Args:
        ids: the kind of each event.
        candidates: the kinds to try.
    """
    for candidate in candidates:
        indices = _occurrences_one_period_apart(ids, candidate)
        if len(indices) > _FEWEST_PERIODS:
            return indices
    return []


def _occurrences_one_period_apart(ids: _KindIds, candidate: int) -> list[int]:
    """Return the positions of one kind of event, one period apart; empty unless all events repeat by that period.

    Args:
        ids: the kind of each event.
        candidate: the kind whose usual distance, in events, is tried as the period.
    """
    positions = np.flatnonzero(ids == candidate)
    period = int(np.median(np.diff(positions)))
    if period <= 1:
        return []
    share_of_repeated = np.mean(ids[period:] == ids[:-period])  # of the events that have one a period earlier
    if share_of_repeated < _LEAST_REPEATED_SHARE:
        return []
    chain = [int(positions[0])]
    for position in positions[1:]:
        distance = int(position) - chain[-1]
        if abs(distance - period) <= _PERIOD_TOLERANCE * period:
            chain.append(int(position))
    return chain


@dataclass(frozen=True)
class _PhaseRanges:
    """The ranges of a trace that show phases, on the host's clock: disjoint and in order."""

    updates: Sequence[Interval]
    forwards: Sequence[Interval]
    loader: Sequence[Interval]
    backward: Sequence[Interval]
    graph_launches_ns: Sequence[int]
    """When CUDA graphs were launched, in order."""

    @classmethod
    def of(cls, trace: Trace) -> _PhaseRanges:
        """Collects the ranges of a trace."""
        graph_launches = [event for event in trace.events if event.kind == "launch" and "GraphLaunch" in event.name]
        return cls(
            updates=_ranges_named(trace, _OPTIMIZER),
            forwards=_ranges_named(trace, _FORWARD),
            loader=_ranges_named(trace, _DATA),
            backward=union([*_backward_functions(trace), *_ranges_named(trace, _AFTER_BACKWARD)]),
            graph_launches_ns=sorted(event.start_ns for event in graph_launches),
        )

    def graph_launches_in(self, span: _HostSpan) -> Sequence[int]:
        """Return when CUDA graphs were launched within a span."""
        first = bisect_left(self.graph_launches_ns, span.start_ns)
        behind_last = bisect_left(self.graph_launches_ns, span.end_ns)
        return self.graph_launches_ns[first:behind_last]


def _phase_annotations(trace: Trace, spans: Sequence[_HostSpan]) -> Iterator[Event]:
    """Yields the events of the phases of each step, and of what is unknown there."""
    ranges = _PhaseRanges.of(trace)
    launched = _LaunchedCopies(trace)
    for span in spans:
        yield from _phases_of_step(span, ranges, launched, has_operators=trace.operators > 0)


class _MarkedPhases(NamedTuple):
    """The stretches of one step that marks show to be of a phase; no two overlap but forward and loader waits."""

    forward: list[Interval]
    backward: list[Interval]
    update: list[Interval]
    loader_waits: list[Interval]


def _marked_phases(span: _HostSpan, ranges: _PhaseRanges) -> _MarkedPhases:
    """Return what marks show of the phases of a step: an update hides backward, and both hide the others."""
    inside: Interval = (span.start_ns, span.end_ns)
    update = intersection(ranges.updates, [inside])
    longest_pause = _PAUSE_SHARE_WITHIN_BACKWARD * (span.end_ns - span.start_ns)
    joined_backward = union(intersection(ranges.backward, [inside]), join_below=longest_pause)
    backward = _parts_outside(joined_backward, update, inside)
    return _MarkedPhases(
        forward=_parts_outside(intersection(ranges.forwards, [inside]), [*backward, *update], inside),
        backward=backward,
        update=update,
        loader_waits=_parts_outside(intersection(ranges.loader, [inside]), [*backward, *update], inside),
    )


def _phases_of_step(
    span: _HostSpan, ranges: _PhaseRanges, launched: _LaunchedCopies, has_operators: bool
) -> Iterator[Event]:
    """Yields a step's phases: backward by its functions, the others by ranges and by what lies between them.

    Args:
        span: the step.
        ranges: the marked ranges of the trace.
        launched: the copies that the host launched.
        has_operators: whether the trace records the host's operators.
    """
    inside: Interval = (span.start_ns, span.end_ns)
    marked = _marked_phases(span, ranges)
    reason_by_parts = {} if ranges.loader else {"data_wait": _NO_LOADER}
    if marked.backward:
        phases = _phases_of_training(inside, marked, launched)
        if not ranges.updates:
            reason_by_parts["optimizer"] = _NO_UPDATE
    elif has_operators and not marked.update and _are_inside(ranges.graph_launches_in(span), marked.forward):
        phases = {"forward": marked.forward or [inside]}  # a step that does not train
    else:
        reason_by_parts["forward,backward,optimizer"] = _reason_for_no_phases(bool(marked.update), has_operators)
        # One phase stands for all of them, so that gaps between launches are known.
        _, end = marked.update[-1] if marked.update else inside
        phases = {"forward": [(span.start_ns, end)]}
    phases["forward"] = _parts_outside(phases["forward"], marked.loader_waits, inside)

    for parts, reason in reason_by_parts.items():
        yield Event("annotation", f"{UNKNOWN_PHASES}{parts} {reason}", span.start_ns, span.end_ns, lane=0)
    for name, stretches in {"data": marked.loader_waits, **phases}.items():
        for start, end in stretches:
            yield Event("annotation", PHASE_PREFIX + name, math.ceil(start), math.ceil(end), lane=0)


def _are_inside(moments_ns: Iterable[int], stretches: Sequence[Interval]) -> bool:
    """Whether each moment lies in one of the stretches."""
    return all(intersection(stretches, [(moment, moment + 1.0)]) for moment in moments_ns)


def _reason_for_no_phases(has_update: bool, has_operators: bool) -> str:
    """Return why it is unknown when forward and backward of a step were, where no backward function is recorded."""
    if has_update:
        return _NO_BACKWARD
    return _IN_A_GRAPH if has_operators else _NO_OPERATORS


class _PhaseMark(NamedTuple):
    """A stretch of a step that is of one phase by its marks."""

    start: float
    end: float
    phase: str


def _phases_of_training(
    inside: Interval, marked: _MarkedPhases, launched: _LaunchedCopies
) -> dict[str, list[Interval]]:
    """Return phase -> its stretches in a step that trains, with what lies between its marks.

    Before a backward pass lies forward: preprocessing, the model, the loss. It ends with the copies by which DDP hands
    gradients back, and clipping belongs to the update. What follows the last update is of no phase, unless marked.

    Args:
        inside: the step.
        marked: what its marks show; with one stretch of backward at least.
        launched: the copies that the host launched.
    """
    marks = [
        *(_PhaseMark(start, end, "forward") for start, end in marked.forward),
        *(_PhaseMark(start, end, "backward") for start, end in marked.backward),
        *(_PhaseMark(start, end, "optimizer") for start, end in marked.update),
    ]
    marks.sort()
    phases: dict[str, list[Interval]] = {"forward": [], "backward": [], "optimizer": []}
    last_backward_start = max(start for start, _ in marked.backward)
    step_start, step_end = inside
    filled_until = step_start
    previous_phase = ""
    for mark in marks:
        if previous_phase == "backward":
            filled_until = _fill_with_copies(phases, filled_until, mark.start, launched)
        gap_phase = _phase_of_gap(
            previous_phase,
            mark,
            is_before_last_backward=mark.start <= last_backward_start,
            is_forward_marked=bool(marked.forward),
        )
        if gap_phase is not None:
            phases[gap_phase].append((filled_until, mark.start))
        phases[mark.phase].append((mark.start, mark.end))
        filled_until = mark.end
        previous_phase = mark.phase
    if previous_phase == "backward":
        _fill_with_copies(phases, filled_until, step_end, launched)
    return {phase: union(stretches) for phase, stretches in phases.items()}


def _phase_of_gap(
    previous_phase: str, mark: _PhaseMark, *, is_before_last_backward: bool, is_forward_marked: bool
) -> str | None:
    """Return the phase of what lies between two marks; None where it is of no phase.

    Args:
        previous_phase: the phase of the mark before; empty at the step's beginning.
        mark: the mark behind the gap.
        is_before_last_backward: whether that mark begins no later than the step's last stretch of backward.
        is_forward_marked: whether forward has marks of its own in the step.
    """
    if mark.phase == "optimizer" and previous_phase in ("backward", "optimizer"):
        return "optimizer"  # clipping
    if not is_before_last_backward:
        return None
    is_between_backwards = mark.phase == "backward" and previous_phase == "backward"
    # Where forward is marked, a pause without such a mark lies within one pass.
    return "backward" if is_between_backwards and is_forward_marked else "forward"


def _fill_with_copies(phases: dict[str, list[Interval]], start: float, end: float, launched: _LaunchedCopies) -> float:
    """Adds the copies with which a gap after backward begins to backward, and returns their end."""
    copies_end = launched.end_of_copies(start, end)
    phases["backward"].append((start, copies_end))
    return copies_end


class _LaunchedCopies:
    """Finds the copies by which DDP hands gradients back, by when the host launched them."""

    def __init__(self, trace: Trace) -> None:
        self._launches = trace.launches
        self._launch_ns = np.array([launch.launch_ns for launch in self._launches], dtype=np.int64)
        events = [launch.event for launch in self._launches]
        self._has_exchanges = any(event.kind == "kernel" and is_collective(event.name) for event in events)

    def end_of_copies(self, since_ns: float, until_ns: float) -> float:
        """Return when the last of the copies was launched with which a stretch of the host's time begins.

        They are copies within the device, with no other launch between. Return `since_ns` where the stretch begins
        with another launch, and where nothing is exchanged: copies are not DDP's then.
        """
        end_ns = since_ns
        if not self._has_exchanges:
            return end_ns
        first, behind_last = np.searchsorted(self._launch_ns, (math.ceil(since_ns), math.ceil(until_ns)))
        for launch_ns, event in self._launches[first:behind_last]:
            if event.kind != "copy" or "DtoD" not in event.name:
                break
            end_ns = launch_ns + 1.0
        return end_ns


def _parts_outside(stretches: Sequence[Interval], excluded: Sequence[Interval], inside: Interval) -> list[Interval]:
    """Return the parts of `stretches` that lie in `inside` and in none of `excluded`, which may overlap."""
    return intersection(stretches, complement(union(excluded), inside))


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
        compute: list[Interval] = []
        communication: list[Interval] = []
        copies: list[Interval] = []
        self.kernel_seconds: dict[str, float] = {}
        """Kind of kernel to its seconds, added up over streams."""
        for event in trace.on_device:
            kind = kind_of(event.name) if event.kind == "kernel" else COPY
            self.kernel_seconds[kind] = self.kernel_seconds.get(kind, 0.0) + (event.end_ns - event.start_ns) / 1e9
            interval = (float(event.start_ns), float(event.end_ns))
            if kind == COMMUNICATION:
                communication.append(interval)
            elif kind == COPY:
                copies.append(interval)
            else:
                compute.append(interval)
        self._compute = union(compute)
        self._communication = union(communication)
        self._copies = union(copies)
        self.span = _first_start_and_last_end([self._compute, self._communication, self._copies])
        """First start and last end on the device; None where nothing ran."""

    def shares(self, within: Interval) -> TimeShares:
        """Return how the time within an interval was spent; `within` is in nanoseconds."""
        compute = intersection(self._compute, [within])
        communication = intersection(self._communication, [within])
        copies = intersection(self._copies, [within])
        without_copies = union([*compute, *communication])
        busy = union([*without_copies, *copies])
        start, end = within
        total_ns = end - start
        communication_ns = length(communication)
        overlapped_ns = length(intersection(compute, communication))
        return TimeShares(
            total_seconds=total_ns / 1e9,
            compute_seconds=length(compute) / 1e9,
            exposed_communication_seconds=(communication_ns - overlapped_ns) / 1e9,
            copy_seconds=(length(busy) - length(without_copies)) / 1e9,
            idle_seconds=(total_ns - length(busy)) / 1e9,
            communication_seconds=communication_ns / 1e9,
            copying_seconds=length(copies) / 1e9,
            communication_overlap_share=overlapped_ns / communication_ns if communication_ns else None,
        )


def _first_start_and_last_end(sequences: Iterable[Sequence[Interval]]) -> Interval | None:
    """Return the first start and the last end of intervals, each sequence in order; None where there are none."""
    starts = []
    ends = []
    for intervals in sequences:
        if intervals:
            first_start, _ = intervals[0]
            _, last_end = intervals[-1]
            starts.append(first_start)
            ends.append(last_end)
    return (min(starts), max(ends)) if starts else None


class StepSpan(NamedTuple):
    """A step on the device."""

    number: int
    span: Interval
    """In nanoseconds."""
    is_whole: bool
    """Whether it is known when the step began."""


def step_spans(trace: Trace, steps: TraceSteps) -> list[StepSpan]:
    """Return the span on the device of each step that launched something.

    A step lasts from the end of what was launched before it to the end of what it launched. If nothing was launched
    before, it is not whole: it begins with its own first kernel, and what came before that is unknown.
    """
    launches = _LaunchReader(trace.launches)
    first_ns = steps.first_begin_ns
    if first_ns is None:
        first_ns = min((event.start_ns for _, event in trace.launches), default=0)
    spans: list[StepSpan] = []
    for number, host in zip(steps.numbers, _host_spans(steps), strict=True):
        launches.read(until_ns=host.start_ns)
        is_begin_known = launches.end_ns > 0
        begin_ns = launches.end_ns if is_begin_known else first_ns
        launches_in_step = launches.read(until_ns=host.end_ns)
        if launches_in_step > 0 and launches.end_ns > begin_ns:
            is_whole = is_begin_known or steps.first_is_whole
            spans.append(StepSpan(number, (begin_ns, launches.end_ns), is_whole))
    return spans


class _LaunchReader:
    """Goes through launches once, in their order."""

    def __init__(self, launches: Sequence[Launched]) -> None:
        self._launches = launches
        self._next = 0
        self.end_ns = 0
        """When all work was done that was launched so far; 0 without any."""

    def read(self, until_ns: int) -> int:
        """Goes on to the first launch at `until_ns` or later, and returns the number of launches before it."""
        first = self._next
        while self._next < len(self._launches) and self._launches[self._next].launch_ns < until_ns:
            self.end_ns = max(self.end_ns, self._launches[self._next].event.end_ns)
            self._next += 1
        return self._next - first


def traffic_lines(trace: Trace, steps: TraceSteps) -> tuple[TrafficLine, ...]:
    """Return each step's collectives with what they sent, or why it is unknown; empty where none ran."""
    if not trace.calls and not any(kind_of(event.name) == COMMUNICATION for event in trace.on_device):
        return ()
    lines = []
    for number, host in zip(steps.numbers, _host_spans(steps), strict=True):
        calls = [call for call in trace.calls if host.start_ns <= call.start_ns < host.end_ns]
        lines.append(_traffic_line(number, trace.backend or "nccl", calls))
    return tuple(lines)


def _traffic_line(step: int, backend: str, calls: Sequence[TracedCollective]) -> TrafficLine:
    """Return the collectives of a step, or why they are unknown: none was recorded, or one lacks a figure."""
    if not calls:
        return _unknown_traffic(step, backend, reason="the trace records no calls of collectives")
    collectives = []
    for call in calls:
        collective = _sized_collective(call)
        if collective is not None:
            collectives.append(collective)
    if len(collectives) < len(calls):
        return _unknown_traffic(step, backend, reason="the trace's calls of collectives carry no sizes")
    return TrafficLine(step=step, backend=backend, collectives=tuple(collectives), reason=None)


def _unknown_traffic(step: int, backend: str, reason: str) -> TrafficLine:
    return TrafficLine(step=step, backend=backend, collectives=None, reason=reason)


def _sized_collective(call: TracedCollective) -> Collective | None:
    """Return the collective of a call; None if the call lacks a figure, or has an impossible one."""
    if not call.operation or not call.dtype or call.ranks is None or call.input_elements is None:
        return None
    output_elements = call.output_elements or 0
    if call.ranks <= 0 or call.input_elements < 0 or output_elements < 0:
        return None
    if call.input_elements == 0 and output_elements == 0 and call.operation != "barrier":
        return None
    return Collective(
        communicator=call.communicator,
        ranks=call.ranks,
        operation=call.operation,
        dtype=call.dtype,
        input_elements=call.input_elements,
        output_elements=output_elements,
    )


def product_rate(trace: Trace, steps: TraceSteps, device: DeviceTime) -> float | None:
    """Return the FLOP/s of the matrix products of whole steps, per second in which the device computed.

    None where no shapes were recorded, or no step is whole.
    """
    host_by_number = dict(zip(steps.numbers, _host_spans(steps), strict=True))
    flops = 0
    seconds = 0.0
    for step in step_spans(trace, steps):
        if step.is_whole:
            host = host_by_number[step.number]
            flops += sum(product.flops for product in trace.products if host.start_ns <= product.start_ns < host.end_ns)
            seconds += device.shares(step.span).compute_seconds
    return flops / seconds if flops and seconds else None


def _host_spans(steps: TraceSteps) -> list[_HostSpan]:
    """Return the steps on the host's clock, in order."""
    return sorted(_HostSpan(event.start_ns, event.end_ns) for event in steps.annotations if event.name == STEP)
