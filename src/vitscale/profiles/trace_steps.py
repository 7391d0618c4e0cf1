"""Finds steps and phases in a trace that others recorded, and gives them the annotations of our own profiles."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from vitscale.base.time_spans import Interval, complement, intersection, union
from vitscale.profiles.timeline import PHASE_PREFIX, STEP, Event
from vitscale.profiles.trace_file import Trace
from vitscale.store.records import PhaseName

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
