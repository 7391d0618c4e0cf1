"""Makes each explained step's intervals from a profile's events: phases, idle time, collectives, copies.

On a host that computes, an operator is computing while it runs, and the phases are those the training loop is in. On a
GPU the host runs ahead, so everything is read off the device: a phase lasts from the end of the last kernel launched
before it to the end of the last kernel it launched itself.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar, get_args

from vitscale.base.time_spans import Interval, complement, intersection, union
from vitscale.profiles.kernels import is_collective, operation, operation_of_kernel
from vitscale.store.records import COMMUNICATION, EXPOSED, NORM_MARK, PARTS, ExplainedLine, PhaseName

_Value = TypeVar("_Value")
EventKind = Literal["operator", "annotation", "collective", "kernel", "copy", "launch"]
KIND_OF_ACTIVITY: dict[str, EventKind] = {
    "cpu_op": "operator",
    "user_annotation": "annotation",
    "kernel": "kernel",
    "gpu_memcpy": "copy",
    "gpu_memset": "kernel",
    "cuda_runtime": "launch",
    "cuda_driver": "launch",
}
"""Kineto's name of an activity, which is its category in a trace file, to the kind of event."""
GLOO = "gloo:"
COMMUNICATION_CALL = "record_param_comms"
"""torch's name for a call of NCCL; the kernels that the call launches are linked to it."""


class Event(NamedTuple):
    """One interval of the profile, in nanoseconds of the profile's clock."""

    kind: EventKind
    name: str
    start_ns: int
    end_ns: int
    lane: int
    """The thread of an event on the host, or the stream of one on the device."""
    correlation: int = 0
    """Joins a kernel or copy to the call that launched it."""
    communicator: str = ""
    """c10d's name of an NCCL kernel's communicator, as `operation` is of its operation; empty where the profiler does
    not link the kernel to its call."""
    operation: str = ""


STEP = "vitscale.step"
"""Annotation of a whole step. A phase's has the phase's name in place of "step"."""
PHASE_PREFIX = "vitscale."
UNTOLD_PHASES = "vitscale.untold "
"""Annotation of a stretch of which parts are unknown, followed by these (commas between), a blank, the reason."""
ALIKE = "nccl-"
"""Beginning of a communicator's name that is the same on all its ranks, and of no other communicator."""

_SHORTEST_IDLE_NS = 100_000
"""A shorter gap between operators is the host's own work, not waiting."""
_LAUNCH = re.compile(r"(cuda|cu|hip)\w*(Launch\w*Kernel|GraphLaunch|Memcpy\w*Async)")
"""Calls of CUDA and HIP after which something runs on the device. Not memsets: one of no bytes runs nothing (3 of 117
on an A100). A launched graph has the correlation of what runs in it."""
_CAPTURE = re.compile(r"(?:cuda|cu|hip)Stream(Begin|End)Capture")
"""Calls between which a CUDA graph is recorded: what is launched there runs only when the graph is."""
_CLOCKS_APART_NS = 1_000_000_000
"""How long before its launch a kernel may seem to begin, as clocks differ; beyond it a time is impossible."""
_MOST_LOST = 0.01
"""Largest share of launches that may be lost; beyond it no part of a step is known."""
_PART_OF_PHASE: dict[PhaseName, str] = {
    "data": "data_wait", "h2d": "h2d", "forward": "forward", "backward": "backward", "bubble": "bubble",
    "optimizer": "optimizer",
}  # fmt: skip

NO_TRANSFER = "the device is the host: nothing is copied"
NO_GAPS = "a host launches no kernels: gaps between operators are inside the phases"
NO_NCCL = "no NCCL kernel was recognised among those in the profile, though several ranks trained"
NO_KERNELS = (
    "the profiler saw none of the {of:,} launched kernels and copies run: another profiler may be attached to the GPU, "
    "or the driver may keep its counters from ordinary users"
)
LOST_KERNELS = "the profiler lost {lost:,} of {of:,} launched kernels and copies ({share} %)"
NO_LAUNCH = (
    "the launches of {lost:,} of {of:,} kernels and copies ({share} %) were lost, or are of a kind that is not read"
)


def steps_on_cpu(events: Sequence[Event], steps: Sequence[int], block: int) -> list[ExplainedLine]:
    """The lines of one block on a host that computes.

    Args:
        events: events of the block's profile.
        steps: the numbers of the steps in it, in order.
        block: the number of the block.
    """
    calls = _calls(events)
    operators = [
        (float(event.start_ns), float(event.end_ns))
        for event in events
        # c10d's operators only hand work over; the rank's waiting for it shows in the operators around them.
        if event.kind == "operator"
        and not event.name.startswith(("c10d::", "autograd::engine"))
        and not _holds_one(event, calls)
    ]
    computing = union(operators, join_below=_SHORTEST_IDLE_NS)
    of_norms = _OfNorms(events)
    lines = []
    annotated = _Annotations(events)
    for step, span in zip(steps, annotated.steps, strict=True):
        collectives = sorted(
            (event for event in events if event.kind == "collective" and span.start_ns <= event.start_ns < span.end_ns),
            key=lambda event: event.start_ns,
        )
        in_flight = union((float(event.start_ns), float(event.end_ns)) for event in collectives)
        inside: Interval = (span.start_ns, span.end_ns)
        waiting = [gap for gap in complement(computing, inside) if gap[1] - gap[0] >= _SHORTEST_IDLE_NS]
        lines.append(
            ExplainedLine(
                step=step,
                block=block,
                device="cpu",
                seconds=(span.end_ns - span.start_ns) / 1e9,
                phases=tuple((_phase(s), *_seconds(s.start_ns, s.end_ns, span)) for s in annotated.phases(span)),
                # Only gaps that can be exposed communication are kept: others are the host's own work.
                idle=tuple(_seconds(*gap, span) for gap in waiting if intersection([gap], in_flight)),
                collectives=tuple(
                    ("gloo", e.name.removeprefix(GLOO), *_seconds(e.start_ns, e.end_ns, span)) for e in collectives
                ),
                norms=of_norms.places(event.start_ns for event in collectives),
                unknown={"h2d": NO_TRANSFER, "launch_gaps": NO_GAPS},
            )
        )
    return lines


def _calls(events: Iterable[Event]) -> dict[int, list[tuple[int, int]]]:
    """(Start, end) of each call of a collective, in order, by thread."""
    calls_of: dict[int, list[tuple[int, int]]] = {}
    for event in events:
        if event.kind == "operator" and event.name.startswith("c10d::"):
            calls_of.setdefault(event.lane, []).append((event.start_ns, event.end_ns))
    return {lane: sorted(calls) for lane, calls in calls_of.items()}


def _holds_one(event: Event, calls: Mapping[int, Sequence[tuple[int, int]]]) -> bool:
    """Whether a collective is called inside this operator, a hook that may wait there; its own operators compute.

    ZeRO 2 and 3 exchange gradients inside `torch::autograd::AccumulateGrad`, FSDP2 inside its own backward function.
    """
    of_thread = calls.get(event.lane, ())
    index = bisect.bisect_left(of_thread, (event.start_ns, 0))
    return index < len(of_thread) and of_thread[index][1] <= event.end_ns


def launches_of(events: Iterable[Event]) -> list[tuple[int, Event]]:
    """(Launch time, event) of the device's work with possible times, in the order of launch.

    Correlations count up: work with one below those of all recorded launches was launched before the profile began, and
    stands at 0. Work without a launch for another reason stands at its own start.
    """
    events = list(events)
    launched = _launched(events)
    first = min(launched, default=0)
    pairs = []
    for event in events:
        if event.kind in ("kernel", "copy"):
            launch = launched.get(event.correlation, 0 if 0 < event.correlation < first else event.start_ns)
            if event.start_ns > 0 and event.start_ns >= launch - _CLOCKS_APART_NS:
                pairs.append((launch, event))
    return sorted(pairs)


def _launched(events: Iterable[Event]) -> dict[int, int]:
    return {event.correlation: event.start_ns for event in events if event.kind == "launch" and event.correlation}


def steps_on_cuda(
    events: Sequence[Event],
    steps: Sequence[int],
    block: int,
    world_size: int,
    *,
    first_is_whole: bool = False,
    first_begin_ns: int | None = None,
) -> list[ExplainedLine]:
    """The lines of one block on a GPU, in device time. A step ends with the last kernel launched in it.

    The block's first step has no line unless it is whole: it began on a device that had been waited for. Parts with
    lost events are unknown, and so are those that they would be mistaken for: without its kernel a device looks idle.

    Args:
        events: what was recorded.
        steps: numbers of the steps, one for each that is marked.
        block: number of the block.
        world_size: ranks of the run.
        first_is_whole: whether it is known when the first step began on the device.
        first_begin_ns: when that was, where nothing was launched before it; None: with the first event on the device.
    """
    launched = _launched(events)
    on_device = launches_of(events)
    seen = {event.correlation for _, event in on_device}
    captured = _captures(events)
    work = sorted(
        (e.start_ns, e.correlation in seen)
        for e in events
        if e.kind == "launch" and _LAUNCH.match(e.name) and (e.correlation in seen or not _within(captured, e.start_ns))
    )
    kernels = [event for _, event in on_device if event.kind == "kernel"]
    to_device = [event for _, event in on_device if event.kind == "copy" and "HtoD" in event.name]
    copies = union((float(e.start_ns), float(e.end_ns)) for e in to_device)
    # Other copies, such as DDP's on the device into and out of its buckets, are work of their phase: it is not idle.
    others = [event for _, event in on_device if event.kind == "copy" and "HtoD" not in event.name]
    computing = (event for event in kernels if not is_collective(event.name))
    working = union((float(e.start_ns), float(e.end_ns)) for e in (*computing, *others))
    collectives = [(launch, e) for launch, e in on_device if e.kind == "kernel" and is_collective(e.name)]
    annotated = _Annotations(events)
    labels = _communicators(collectives, min((span.start_ns for span in annotated.steps), default=0))
    ends = _Ends(on_device)
    of_norms = _OfNorms(events)
    block_wide = _without_launch(on_device, launched)
    if world_size > 1 and not collectives:
        block_wide = dict.fromkeys((*of_norms.exposed, COMMUNICATION), NO_NCCL) | block_wide
    # Nothing runs before it is launched, so the device's clock is at least so much behind the host's.
    behind = max([0, *(launch - event.start_ns for launch, event in on_device)])
    lines = []
    first_event_ns = min((event.start_ns for _, event in on_device), default=None)
    first = first_event_ns if first_begin_ns is None else first_begin_ns
    for step, span in list(zip(steps, annotated.steps, strict=True))[not first_is_whole :]:
        begin = ends.before(span.start_ns)
        begin = (first if first_is_whole and first is not None else span.start_ns - behind) if begin is None else begin
        end = max(ends.before(span.end_ns) or begin, begin)
        axis = Event("annotation", STEP, begin, end, 0)
        inside: Interval = (begin, end)
        phases, reached = [], begin
        of_step = annotated.phases(span)
        for phase in of_step:
            reached = min(max(ends.before(phase.start_ns) or reached, reached), end)
            last = min(max(ends.before(phase.end_ns) or reached, reached), end)
            if last > reached:
                phases.append((_phase(phase), *_seconds(reached, last, axis)))
            reached = last
        waits = union((float(s.start_ns - behind), float(s.end_ns - behind)) for s in of_step if _phase(s) == "data")
        # Those that the step launched, as on every rank: on a stream of its own one may begin before the step does.
        own = sorted(_between(collectives, span), key=lambda pair: pair[1].start_ns)
        lines.append(
            ExplainedLine(
                step=step,
                block=block,
                device="cuda",
                # As far as the profiler knows nothing ran, so the host's time is all that is known.
                seconds=(end - begin if end > begin else span.end_ns - span.start_ns) / 1e9,
                phases=tuple(phases),
                idle=tuple(_seconds(*gap, axis) for gap in complement(_around(working, inside), inside)),
                collectives=tuple(
                    (
                        labels[_communicator(e)],
                        _operation(e),
                        *_seconds(max(e.start_ns, begin), max(e.end_ns, begin), axis),
                    )
                    for _, e in own
                ),
                norms=of_norms.places(launched.get(event.correlation, 0) for _, event in own),
                copies=tuple(_seconds(*copy, axis) for copy in intersection(_around(copies, inside), [inside])),
                host_data=tuple(_seconds(*wait, axis) for wait in intersection(waits, [inside])),
                unknown=annotated.untold(span) | block_wide | _lost(work, span, of_step, of_norms.exposed),
            )
        )
    return lines


def _around(disjoint: Sequence[Interval], inside: Interval) -> Sequence[Interval]:
    """Those of many intervals, disjoint and in order, that may overlap with one."""
    first = bisect.bisect_left(disjoint, inside[0], key=lambda interval: interval[1])
    return disjoint[first : bisect.bisect_left(disjoint, inside[1], first, key=lambda interval: interval[0])]


def _between(launches: Sequence[tuple[int, _Value]], span: Event) -> Sequence[tuple[int, _Value]]:
    """Those of many launches, in order, that fall into a span."""
    first = bisect.bisect_left(launches, span.start_ns, key=lambda pair: pair[0])
    return launches[first : bisect.bisect_left(launches, span.end_ns, first, key=lambda pair: pair[0])]


def _captures(events: Iterable[Event]) -> list[Interval]:
    """When CUDA graphs were recorded, by any thread: autograd's record backward. Disjoint and in order."""
    spans, begun = list[Interval](), dict[int, int]()
    calls = ((e, match[1]) for e in events if e.kind == "launch" and (match := _CAPTURE.match(e.name)))
    for event, call in sorted(calls, key=lambda pair: pair[0].start_ns):
        if call == "Begin":
            begun[event.lane] = event.start_ns
        elif event.lane in begun:
            spans.append((float(begun.pop(event.lane)), float(event.end_ns)))
    return union(spans)


def _within(spans: Sequence[Interval], moment_ns: int) -> bool:
    index = bisect.bisect_right(spans, (moment_ns, float("inf")))
    return index > 0 and moment_ns < spans[index - 1][1]


def _without_launch(on_device: Sequence[tuple[int, Event]], launched: Mapping[int, int]) -> dict[str, str]:
    """All parts as unknown where too much of what ran has no launch: nobody knows its phase or step."""
    first = min(launched, default=0)
    missing = sum(e.correlation not in launched and not 0 < e.correlation < first for _, e in on_device)
    return _all_unknown(NO_LAUNCH, missing, len(on_device)) if missing > _MOST_LOST * len(on_device) else {}


def _lost(
    work: Sequence[tuple[int, bool]], step: Event, phases: Sequence[Event], exposed: Sequence[str]
) -> dict[str, str]:
    """The parts of a step that are unknown because something was launched in it and never seen to run.

    Args:
        work: when each kernel or copy was launched, in order, and whether it was seen to run.
        step: the span of the step.
        phases: the phases of that step.
        exposed: the parts of its exposed communication.
    """
    own = _between(work, step)
    lost = [launch for launch, seen in own if not seen]
    if len(lost) > _MOST_LOST * len(own):
        return _all_unknown(NO_KERNELS if len(lost) == len(own) else LOST_KERNELS, len(lost), len(own))
    why = _said(LOST_KERNELS, len(lost), len(own))
    hit = {_phase(phase) for phase in phases for launch in lost if phase.start_ns <= launch < phase.end_ns}
    # The device looks idle where a kernel was lost, so a gap, or a transfer that it hid, seems longer.
    parts = [*(_PART_OF_PHASE[phase] for phase in hit), *exposed, COMMUNICATION, "launch_gaps"]
    return dict.fromkeys(parts, why) if lost else {}


def _all_unknown(why: str, lost: int, of: int) -> dict[str, str]:
    return dict.fromkeys((*PARTS, COMMUNICATION), _said(why, lost, of))


def _said(why: str, lost: int, of: int) -> str:
    share = float(f"{100 * lost / max(1, of):.2g}")
    return why.format(lost=lost, of=of, share=f"{share:g}")  # never "1e+02"


def _communicator(kernel: Event) -> str:
    return kernel.communicator or f"stream {kernel.lane}"


def _communicators(collectives: Sequence[tuple[int, Event]], since_ns: int) -> dict[str, str]:
    """Names of communicators, alike on all ranks, by first launch; c10d's names of groups of some ranks are not.

    A communicator may use several streams; where the profiler links none to a kernel, its stream stands for one.

    Args:
        collectives: (launch, kernel), in the order of launch.
        since_ns: beginning of the first step; what one rank recorded before it another may not have.
    """
    later = (event for launch, event in collectives if launch >= since_ns)
    names = dict.fromkeys(map(_communicator, (*later, *(event for _, event in collectives))))
    others = [name for name in names if not name.startswith(ALIKE)]
    prefix = ALIKE if len(others) == len(names) else f"{ALIKE}unnamed-"
    return {name: name for name in names} | {name: f"{prefix}{index}" for index, name in enumerate(others)}


class _OfNorms:
    """Finds the collectives of synchronised norms by when they were issued: norms wait for them, so none overlap."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._marks = sorted((e.start_ns, e.end_ns) for e in events if e.name == NORM_MARK)
        self.exposed = EXPOSED if self._marks else EXPOSED[:-1]
        """The parts of exposed communication that can occur."""

    def places(self, issued_ns: Iterable[int]) -> tuple[int, ...]:
        """Places of the norms' collectives among some, told by when the host issued each."""
        return tuple(index for index, moment in enumerate(issued_ns) if _within(self._marks, moment))


class _Ends:
    """When the device had finished, by when its work was launched."""

    def __init__(self, on_device: Sequence[tuple[int, Event]]) -> None:
        self._launches = [launch for launch, _ in on_device]
        self._ends: list[int] = []
        for _, event in on_device:
            self._ends.append(max(event.end_ns, self._ends[-1] if self._ends else 0))

    def before(self, moment_ns: int) -> int | None:
        """When the device had done all that was launched before `moment_ns`; None where nothing was launched."""
        index = bisect.bisect_left(self._launches, moment_ns)
        return self._ends[index - 1] if index else None


class _Annotations:
    """The steps and phases of a profile, in order."""

    def __init__(self, events: Iterable[Event]) -> None:
        annotations = (e for e in events if e.kind == "annotation" and e.name.startswith(PHASE_PREFIX))
        spans = sorted(annotations, key=lambda span: span.start_ns)
        self.steps = [span for span in spans if span.name == STEP]
        phases = get_args(PhaseName)
        self._phases = [(s.start_ns, s) for s in spans if s.name.removeprefix(PHASE_PREFIX) in phases]
        self._untold = [(s.start_ns, s) for s in spans if s.name.startswith(UNTOLD_PHASES)]

    def phases(self, step: Event) -> list[Event]:
        """The phases that begin in a step."""
        return [phase for _, phase in _between(self._phases, step)]

    def untold(self, step: Event) -> dict[str, str]:
        """The parts of a step that its annotations cannot tell, and why."""
        said = (span.name.removeprefix(UNTOLD_PHASES).partition(" ") for _, span in _between(self._untold, step))
        return {part: why for parts, _, why in said for part in parts.split(",")}


def _phase(span: Event) -> PhaseName:
    name: PhaseName = span.name.removeprefix(PHASE_PREFIX)  # type: ignore[assignment]  # `_Annotations` has looked
    return name


def _operation(kernel: Event) -> str:
    return operation(kernel.operation) if kernel.operation else operation_of_kernel(kernel.name)


def _seconds(start_ns: float, end_ns: float, step: Event) -> tuple[float, float]:
    return (round((start_ns - step.start_ns) / 1e9, 7), round((end_ns - step.start_ns) / 1e9, 7))
