"""Makes each explained step's intervals from a profile's events: phases, idle time, collectives, copies.

On a host that computes, an operator is computing while it runs, and the phases are those the training loop is in. On a
GPU the host runs ahead, so everything is read off the device: a phase lasts from the end of the last kernel launched
before it to the end of the last kernel it launched itself.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar, get_args

from vitscale.base.time_spans import Interval, complement, intersection, union
from vitscale.profiles.kernels import is_collective, operation, operation_of_kernel
from vitscale.store.records import COMMUNICATION, EXPOSED, NORM_MARK, PARTS, ExplainedLine, PhaseName

_Item = TypeVar("_Item")
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


class Launched(NamedTuple):
    """Work of the device, and when the host launched it."""

    launch_ns: int
    event: Event


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
    """Return the lines of one block on a host that computes.

    Args:
        events: events of the block's profile.
        steps: the numbers of the steps in it, in order.
        block: the number of the block.
    """
    computing = _computing_on_host(events)
    norms = _Norms(events)
    annotations = _Annotations(events)
    lines = []
    for step, span in zip(steps, annotations.steps, strict=True):
        collectives = [
            event for event in events if event.kind == "collective" and span.start_ns <= event.start_ns < span.end_ns
        ]
        collectives.sort(key=lambda event: event.start_ns)
        lines.append(
            ExplainedLine(
                step=step,
                block=block,
                device="cpu",
                seconds=(span.end_ns - span.start_ns) / 1e9,
                phases=tuple(
                    (_phase_name(phase), *_seconds(phase.start_ns, phase.end_ns, origin_ns=span.start_ns))
                    for phase in annotations.phases(span)
                ),
                idle=_exposed_waits(computing, collectives, span),
                collectives=tuple(
                    ("gloo", event.name.removeprefix(GLOO), *_seconds(event.start_ns, event.end_ns, span.start_ns))
                    for event in collectives
                ),
                norms=norms.positions(event.start_ns for event in collectives),
                unknown={"h2d": NO_TRANSFER, "launch_gaps": NO_GAPS},
            )
        )
    return lines


def _computing_on_host(events: Sequence[Event]) -> list[Interval]:
    """When an operator of any thread computed on the host; short gaps between operators count as computing."""
    calls = _collective_calls(events)
    operators: list[Interval] = []
    for event in events:
        # c10d's operators only hand work over; the rank's waiting for it shows in the operators around them.
        is_computing = event.kind == "operator" and not event.name.startswith(("c10d::", "autograd::engine"))
        if is_computing and not _calls_a_collective(event, calls):
            operators.append(_interval(event))
    return union(operators, join_below=_SHORTEST_IDLE_NS)


def _exposed_waits(computing: Sequence[Interval], collectives: Sequence[Event], step: Event) -> tuple[Interval, ...]:
    """The seconds of a step in which nothing computed and that may be exposed communication, on the step's axis.

    Other gaps are the host's own work.

    Args:
        computing: when operators computed; disjoint and in order.
        collectives: the collectives of the step.
        step: the span of the step.
    """
    in_flight = union(_interval(event) for event in collectives)
    waits = []
    for gap in complement(computing, (step.start_ns, step.end_ns)):
        start, end = gap
        if end - start >= _SHORTEST_IDLE_NS and intersection([gap], in_flight):
            waits.append(_seconds(start, end, origin_ns=step.start_ns))
    return tuple(waits)


class _Call(NamedTuple):
    """A call of a collective on the host."""

    start_ns: int
    end_ns: int


def _collective_calls(events: Iterable[Event]) -> dict[int, list[_Call]]:
    """Thread -> its calls of collectives, in order of time."""
    calls_by_thread: dict[int, list[_Call]] = {}
    for event in events:
        if event.kind == "operator" and event.name.startswith("c10d::"):
            calls_by_thread.setdefault(event.lane, []).append(_Call(event.start_ns, event.end_ns))
    return {thread: sorted(calls) for thread, calls in calls_by_thread.items()}


def _calls_a_collective(event: Event, calls_by_thread: Mapping[int, Sequence[_Call]]) -> bool:
    """Whether a collective is called inside this operator, a hook that may wait there; its own operators compute.

    ZeRO 2 and 3 exchange gradients inside `torch::autograd::AccumulateGrad`, FSDP2 inside its own backward function.
    """
    calls = calls_by_thread.get(event.lane, ())
    next_call = bisect.bisect_left(calls, (event.start_ns, 0))
    return next_call < len(calls) and calls[next_call].end_ns <= event.end_ns


def launches_of(events: Iterable[Event]) -> list[Launched]:
    """The device's work with possible times, in the order of launch.

    Correlations count up: work with one below those of all recorded launches was launched before the profile began, and
    its launch stands at 0. Work without a launch for another reason stands at its own start.
    """
    events = list(events)
    launch_times = _launch_times(events)
    first_correlation = min(launch_times, default=0)
    launches = []
    for event in events:
        if event.kind not in ("kernel", "copy"):
            continue
        was_launched_earlier = 0 < event.correlation < first_correlation
        launch_ns = launch_times.get(event.correlation, 0 if was_launched_earlier else event.start_ns)
        if event.start_ns > 0 and event.start_ns >= launch_ns - _CLOCKS_APART_NS:
            launches.append(Launched(launch_ns, event))
    return sorted(launches)


def _launch_times(events: Iterable[Event]) -> dict[int, int]:
    """Correlation -> when the host made the call that launched the work with this correlation, in nanoseconds."""
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
    """Return the lines of one block on a GPU, in device time. A step ends with the last kernel launched in it.

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
    launch_times = _launch_times(events)
    work = _DeviceWork.of(events)
    annotations = _Annotations(events)
    norms = _Norms(events)
    calls = _launch_calls(events, work.launches)
    communicator_names = _communicator_names(work.collectives, annotations.first_ns)
    unknown_in_block = _unknown_in_block(work, launch_times, norms, world_size)
    if first_begin_ns is None:
        first_begin_ns = min((launch.event.start_ns for launch in work.launches), default=None)
    progress = _DeviceProgress(work.launches, first_begin_ns if first_is_whole else None)

    lines = []
    marked_steps = list(zip(steps, annotations.steps, strict=True))
    for step, mark in marked_steps if first_is_whole else marked_steps[1:]:
        begin_ns = progress.begin(mark.start_ns)
        end_ns = progress.finished(mark.end_ns, at_least=begin_ns)
        inside: Interval = (begin_ns, end_ns)
        phase_marks = annotations.phases(mark)
        # Those that the step launched, as on every rank: on a stream of its own one may begin before the step does.
        launched_in_step = _begun_in(mark, work.collectives, lambda launch: launch.launch_ns)
        collectives = sorted(launched_in_step, key=lambda launch: launch.event.start_ns)
        loader_waits = union(progress.on_device(phase) for phase in phase_marks if _phase_name(phase) == "data")
        lines.append(
            ExplainedLine(
                step=step,
                block=block,
                device="cuda",
                # As far as the profiler knows nothing ran, so the host's time is all that is known.
                seconds=(end_ns - begin_ns if end_ns > begin_ns else mark.end_ns - mark.start_ns) / 1e9,
                phases=_device_phases(phase_marks, progress, begin_ns, end_ns),
                idle=_all_in_seconds(complement(_near(work.working, inside), inside), begin_ns),
                collectives=tuple(
                    (
                        communicator_names[_communicator(kernel)],
                        _operation(kernel),
                        *_seconds(max(kernel.start_ns, begin_ns), max(kernel.end_ns, begin_ns), begin_ns),
                    )
                    for _, kernel in collectives
                ),
                norms=norms.positions(launch_times.get(kernel.correlation, 0) for _, kernel in collectives),
                copies=_all_in_seconds(intersection(_near(work.copies_from_host, inside), [inside]), begin_ns),
                host_data=_all_in_seconds(intersection(loader_waits, [inside]), begin_ns),
                unknown=annotations.unknown_parts(mark)
                | unknown_in_block
                | _unknown_for_lost_work(calls, mark, phase_marks, norms.exposed_parts),
            )
        )
    return lines


@dataclass(frozen=True)
class _DeviceWork:
    """The work that a block's profile saw on the device."""

    launches: Sequence[Launched]
    """All of it, in the order of launch; so are `collectives`."""
    collectives: Sequence[Launched]
    working: Sequence[Interval]
    """When anything ran but collectives and copies from the host; disjoint and in order."""
    copies_from_host: Sequence[Interval]
    """When anything was copied from the host; disjoint and in order."""

    @classmethod
    def of(cls, events: Iterable[Event]) -> _DeviceWork:
        """Sorts the device's work by what it does."""
        launches = launches_of(events)
        collectives: list[Launched] = []
        working: list[Interval] = []
        copies_from_host: list[Interval] = []
        for launch in launches:
            event = launch.event
            if event.kind == "kernel" and is_collective(event.name):
                collectives.append(launch)
            elif event.kind == "copy" and "HtoD" in event.name:
                copies_from_host.append(_interval(event))
            else:
                # Other copies, such as DDP's on the device into and out of its buckets, are work of their phase.
                working.append(_interval(event))
        return cls(launches, collectives, union(working), union(copies_from_host))


def _device_phases(
    phase_marks: Sequence[Event], progress: _DeviceProgress, begin_ns: int, end_ns: int
) -> tuple[tuple[PhaseName, float, float], ...]:
    """The phases of a step on the device, on the step's axis: each ends with the last kernel launched in it.

    Args:
        phase_marks: the phases on the host, in order.
        progress: how far the device had come.
        begin_ns: beginning of the step on the device.
        end_ns: its end there.
    """
    phases = []
    phase_end_ns = begin_ns
    for mark in phase_marks:
        phase_begin_ns = min(progress.finished(mark.start_ns, at_least=phase_end_ns), end_ns)
        phase_end_ns = min(progress.finished(mark.end_ns, at_least=phase_begin_ns), end_ns)
        if phase_end_ns > phase_begin_ns:
            phases.append((_phase_name(mark), *_seconds(phase_begin_ns, phase_end_ns, begin_ns)))
    return tuple(phases)


def _near(disjoint: Sequence[Interval], inside: Interval) -> Sequence[Interval]:
    """Those of many intervals, disjoint and in order, that may overlap with `inside`."""
    begin, end = inside
    first = bisect.bisect_left(disjoint, begin, key=lambda interval: interval[1])
    behind_last = bisect.bisect_left(disjoint, end, first, key=lambda interval: interval[0])
    return disjoint[first:behind_last]


def _begun_in(span: Event, items: Sequence[_Item], start_ns: Callable[[_Item], int]) -> Sequence[_Item]:
    """Those of many items that fall into a span.

    Args:
        span: the span.
        items: all of them, in order of time.
        start_ns: the time of an item.
    """
    first = bisect.bisect_left(items, span.start_ns, key=start_ns)
    behind_last = bisect.bisect_left(items, span.end_ns, first, key=start_ns)
    return items[first:behind_last]


class _LaunchCall(NamedTuple):
    """A call of the host that launches a kernel or a copy."""

    start_ns: int
    was_seen: bool
    """Whether its work was seen to run on the device."""


def _launch_calls(events: Sequence[Event], launches: Sequence[Launched]) -> list[_LaunchCall]:
    """The calls of a profile after which something runs on the device, in order of time.

    Calls while a CUDA graph is recorded are left out, unless their work was seen.
    """
    seen_correlations = {launch.event.correlation for launch in launches}
    captures = _captures(events)
    calls = []
    for event in events:
        if event.kind == "launch" and _LAUNCH.match(event.name):
            was_seen = event.correlation in seen_correlations
            if was_seen or not _is_inside(captures, event.start_ns):
                calls.append(_LaunchCall(event.start_ns, was_seen))
    return sorted(calls)


def _captures(events: Iterable[Event]) -> list[Interval]:
    """When CUDA graphs were recorded, by any thread: autograd's record backward. Disjoint and in order."""
    calls = []
    for event in events:
        match = _CAPTURE.match(event.name) if event.kind == "launch" else None
        if match is not None:
            calls.append((event, match[1]))
    spans: list[Interval] = []
    begin_by_thread: dict[int, int] = {}
    for event, verb in sorted(calls, key=lambda call: call[0].start_ns):
        if verb == "Begin":
            begin_by_thread[event.lane] = event.start_ns
        elif event.lane in begin_by_thread:
            spans.append((float(begin_by_thread.pop(event.lane)), float(event.end_ns)))
    return union(spans)


def _is_inside(spans: Sequence[Interval], moment_ns: int) -> bool:
    """Whether a moment lies in one of the spans, which are in order."""
    next_span = bisect.bisect_right(spans, (moment_ns, float("inf")))
    return next_span > 0 and moment_ns < spans[next_span - 1][1]


def _unknown_in_block(
    work: _DeviceWork, launch_times: Mapping[int, int], norms: _Norms, world_size: int
) -> dict[str, str]:
    """Part -> why it is unknown in all steps of a block.

    Args:
        work: what ran on the device.
        launch_times: the recorded launches by their correlation.
        norms: whether synchronised norms exchange.
        world_size: ranks of the run.
    """
    first_correlation = min(launch_times, default=0)
    without_launch = 0
    for _, event in work.launches:
        was_launched_earlier = 0 < event.correlation < first_correlation
        if event.correlation not in launch_times and not was_launched_earlier:
            without_launch += 1
    unknown: dict[str, str] = {}
    if world_size > 1 and not work.collectives:
        unknown |= dict.fromkeys((*norms.exposed_parts, COMMUNICATION), NO_NCCL)
    if without_launch > _MOST_LOST * len(work.launches):
        unknown |= _all_parts_unknown(NO_LAUNCH, without_launch, len(work.launches))
    return unknown


def _unknown_for_lost_work(
    calls: Sequence[_LaunchCall], step: Event, phases: Sequence[Event], exposed_parts: Sequence[str]
) -> dict[str, str]:
    """Part -> why it is unknown, where something was launched in a step and never seen to run.

    Args:
        calls: the launching calls of the block, in order.
        step: the span of the step.
        phases: the phases of that step.
        exposed_parts: the parts of its exposed communication.
    """
    calls_in_step = _begun_in(step, calls, lambda call: call.start_ns)
    lost = [call.start_ns for call in calls_in_step if not call.was_seen]
    if not lost:
        return {}
    if len(lost) > _MOST_LOST * len(calls_in_step):
        template = NO_KERNELS if len(lost) == len(calls_in_step) else LOST_KERNELS
        return _all_parts_unknown(template, len(lost), len(calls_in_step))
    parts = []
    for phase in phases:
        if any(phase.start_ns <= launch_ns < phase.end_ns for launch_ns in lost):
            parts.append(_PART_OF_PHASE[_phase_name(phase)])
    # The device looks idle where a kernel was lost, so a gap, or a transfer that it hid, seems longer.
    parts += [*exposed_parts, COMMUNICATION, "launch_gaps"]
    return dict.fromkeys(parts, _loss_in_words(LOST_KERNELS, len(lost), len(calls_in_step)))


def _all_parts_unknown(template: str, lost: int, total: int) -> dict[str, str]:
    """All parts of a step with one reason; the arguments are those of `_loss_in_words`."""
    return dict.fromkeys((*PARTS, COMMUNICATION), _loss_in_words(template, lost, total))


def _loss_in_words(template: str, lost: int, total: int) -> str:
    """A reason such as `LOST_KERNELS`, with how much was lost of how much, and that as a share in percent."""
    share = float(f"{100 * lost / max(1, total):.2g}")
    return template.format(lost=lost, of=total, share=f"{share:g}")  # never "1e+02"


def _communicator(kernel: Event) -> str:
    """The name of the kernel's communicator; where the profiler links none, its stream stands for one."""
    return kernel.communicator or f"stream {kernel.lane}"


def _communicator_names(collectives: Sequence[Launched], since_ns: int) -> dict[str, str]:
    """Communicator -> a name that is the same on all ranks, by first launch.

    c10d's names of groups of some ranks are not the same. A communicator may use several streams.

    Args:
        collectives: the kernels of collectives, in the order of launch.
        since_ns: beginning of the first step; what one rank recorded before it another may not have.
    """
    since_first_step = [event for launch_ns, event in collectives if launch_ns >= since_ns]
    all_kernels = [event for _, event in collectives]
    communicators = list(dict.fromkeys(_communicator(kernel) for kernel in (*since_first_step, *all_kernels)))
    unlike = [name for name in communicators if not name.startswith(ALIKE)]
    prefix = ALIKE if len(unlike) == len(communicators) else f"{ALIKE}unnamed-"
    new_names = {name: f"{prefix}{index}" for index, name in enumerate(unlike)}
    return {name: new_names.get(name, name) for name in communicators}


class _Norms:
    """Recognises the collectives of synchronised norms: norms wait for them, so that none overlaps."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._marks = sorted((event.start_ns, event.end_ns) for event in events if event.name == NORM_MARK)
        self.exposed_parts = EXPOSED if self._marks else EXPOSED[:-1]
        """The parts of exposed communication that can occur."""

    def positions(self, issue_times_ns: Iterable[int]) -> tuple[int, ...]:
        """Indices of the norms' collectives among those that the host issued at these times."""
        return tuple(index for index, issue_ns in enumerate(issue_times_ns) if _is_inside(self._marks, issue_ns))


class _DeviceProgress:
    """How far the device had come when the host was at a given moment.

    Args:
        launches: the device's work, in the order of launch.
        first_begin_ns: when the device began a step before which nothing was launched; None where that is unknown.
    """

    def __init__(self, launches: Sequence[Launched], first_begin_ns: int | None) -> None:
        self._first_begin_ns = first_begin_ns
        self._launch_ns = [launch.launch_ns for launch in launches]
        self._end_ns: list[int] = []
        """When each launch and all before it had run."""
        end_ns = 0
        self._lag_ns = 0
        """Least time by which the device's clock is behind the host's, for nothing runs before it is launched."""
        for launch_ns, event in launches:
            end_ns = max(event.end_ns, end_ns)
            self._end_ns.append(end_ns)
            self._lag_ns = max(launch_ns - event.start_ns, self._lag_ns)

    def _finished(self, moment_ns: int) -> int | None:
        """When the device had done all that was launched before `moment_ns`; None where nothing was launched."""
        launches = bisect.bisect_left(self._launch_ns, moment_ns)
        return self._end_ns[launches - 1] if launches else None

    def finished(self, moment_ns: int, at_least: int) -> int:
        """When the device had done all that was launched before `moment_ns`, but not before `at_least`."""
        end_ns = self._finished(moment_ns)
        return at_least if end_ns is None else max(end_ns, at_least)

    def begin(self, start_ns: int) -> int:
        """When the device began a step that the host began at `start_ns`: with all done that came before."""
        end_ns = self._finished(start_ns)
        if end_ns is not None:
            return end_ns
        return start_ns - self._lag_ns if self._first_begin_ns is None else self._first_begin_ns

    def on_device(self, span: Event) -> Interval:
        """A span on the host's clock as one on the device's."""
        return (float(span.start_ns - self._lag_ns), float(span.end_ns - self._lag_ns))


class _Annotations:
    """The steps and phases of a profile, in order."""

    def __init__(self, events: Iterable[Event]) -> None:
        annotations = [event for event in events if event.kind == "annotation" and event.name.startswith(PHASE_PREFIX)]
        annotations.sort(key=lambda span: span.start_ns)
        phase_names = get_args(PhaseName)
        self.steps = [span for span in annotations if span.name == STEP]
        self._phases = [span for span in annotations if span.name.removeprefix(PHASE_PREFIX) in phase_names]
        self._unknown = [span for span in annotations if span.name.startswith(UNTOLD_PHASES)]

    @property
    def first_ns(self) -> int:
        """Beginning of the first step; 0 without any."""
        return self.steps[0].start_ns if self.steps else 0

    def phases(self, step: Event) -> Sequence[Event]:
        """The phases that begin in a step."""
        return _begun_in(step, self._phases, lambda span: span.start_ns)

    def unknown_parts(self, step: Event) -> dict[str, str]:
        """Part -> why it is unknown, as the annotations in a step say (`UNTOLD_PHASES`)."""
        reasons: dict[str, str] = {}
        for span in _begun_in(step, self._unknown, lambda span: span.start_ns):
            parts, _, reason = span.name.removeprefix(UNTOLD_PHASES).partition(" ")
            reasons |= dict.fromkeys(parts.split(","), reason)
        return reasons


def _phase_name(span: Event) -> PhaseName:
    name: PhaseName = span.name.removeprefix(PHASE_PREFIX)  # type: ignore[assignment]  # `_Annotations` has looked
    return name


def _operation(kernel: Event) -> str:
    return operation(kernel.operation) if kernel.operation else operation_of_kernel(kernel.name)


def _interval(event: Event) -> Interval:
    return (float(event.start_ns), float(event.end_ns))


def _seconds(start_ns: float, end_ns: float, origin_ns: int) -> Interval:
    """An interval in seconds from `origin_ns`, to a tenth of a microsecond."""
    return (round((start_ns - origin_ns) / 1e9, 7), round((end_ns - origin_ns) / 1e9, 7))


def _all_in_seconds(intervals_ns: Iterable[Interval], origin_ns: int) -> tuple[Interval, ...]:
    return tuple(_seconds(start_ns, end_ns, origin_ns) for start_ns, end_ns in intervals_ns)
