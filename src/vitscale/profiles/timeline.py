"""Makes the line of each explained step from a profile's events: its phases, idle time, collectives, copies.

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
UNKNOWN_PHASES = "vitscale.untold "
"""Beginning of the annotation of a stretch in which parts of a step are unknown.

Behind it stand these parts with commas between, a blank, and the reason: "vitscale.untold forward,backward it is so".
"""
COMMON_NAME_PREFIX = "nccl-"
"""Beginning of a communicator's name that is the same on all of its ranks, and of no other communicator."""

_SHORTEST_IDLE_NS = 100_000
"""A shorter gap between operators is the host's own work, not waiting."""
_LAUNCH = re.compile(r"(cuda|cu|hip)\w*(Launch\w*Kernel|GraphLaunch|Memcpy\w*Async)")
"""Calls of CUDA and HIP after which something runs on the device. Not memsets: one of no bytes runs nothing (3 of 117
on an A100). A launched graph has the correlation of what runs in it."""
_CAPTURE = re.compile(r"(?:cuda|cu|hip)Stream(Begin|End)Capture")
"""Calls between which a CUDA graph is recorded: what is launched there runs only when the graph is."""
_MOST_CLOCK_DIFFERENCE_NS = 1_000_000_000
"""How long before its launch a kernel may seem to begin, as clocks differ; beyond it a time is impossible."""
_MOST_LOST_SHARE = 0.01
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


_RecordedPhases = tuple[tuple[PhaseName, float, float], ...]
_RecordedCollectives = tuple[tuple[str, str, float, float], ...]
"""Types of `ExplainedLine.phases` and `ExplainedLine.collectives`."""


def steps_on_cpu(events: Sequence[Event], steps: Sequence[int], block: int) -> list[ExplainedLine]:
    """Return the explained lines of one block, which are the steps of one profile, on a host that computes.

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
        collectives = _host_collectives(events, span)
        lines.append(
            ExplainedLine(
                step=step,
                block=block,
                device="cpu",
                seconds=(span.end_ns - span.start_ns) / 1e9,
                phases=_host_phases(annotations.phases(span), span),
                idle=_exposed_waits(computing, collectives, span),
                collectives=_recorded_host_collectives(collectives, span),
                norms=norms.positions(event.start_ns for event in collectives),
                unknown={"h2d": NO_TRANSFER, "launch_gaps": NO_GAPS},
            )
        )
    return lines


def _host_collectives(events: Iterable[Event], step: Event) -> list[Event]:
    """Return the collectives that begin in a step on the host, in order of time."""
    collectives = []
    for event in events:
        if event.kind == "collective" and step.start_ns <= event.start_ns < step.end_ns:
            collectives.append(event)
    return sorted(collectives, key=lambda event: event.start_ns)


def _recorded_host_collectives(collectives: Iterable[Event], step: Event) -> _RecordedCollectives:
    """Return collectives of the host as a record has them; gloo does not name communicators."""
    recorded = []
    for event in collectives:
        operation_name = event.name.removeprefix(GLOO)
        recorded.append(("gloo", operation_name, *_interval_in_seconds(event.start_ns, event.end_ns, step.start_ns)))
    return tuple(recorded)


def _clipped_host_collectives(collectives: Iterable[Event], begin_ns: int, step_end_ns: int) -> _RecordedCollectives:
    """Return collectives of the host as the record of a GPU's step has them, cut at the step's ends on the device.

    The profiler has host and device on one clock. What lies wholly outside is left out: the host is ahead.

    Args:
        collectives: those of the step on the host.
        begin_ns: beginning of the step on the device.
        step_end_ns: its end there.
    """
    recorded = []
    for event in collectives:
        start_ns = max(event.start_ns, begin_ns)
        end_ns = min(event.end_ns, step_end_ns)
        if end_ns > start_ns:
            operation_name = event.name.removeprefix(GLOO)
            recorded.append(("gloo", operation_name, *_interval_in_seconds(start_ns, end_ns, begin_ns)))
    return tuple(recorded)


def _host_phases(phases: Iterable[Event], step: Event) -> _RecordedPhases:
    """Return the phases of a step on the host as a record has them."""
    return tuple(
        (_phase_name(phase), *_interval_in_seconds(phase.start_ns, phase.end_ns, step.start_ns)) for phase in phases
    )


def _computing_on_host(events: Sequence[Event]) -> list[Interval]:
    """Return when an operator of any thread computed on the host: disjoint and in order.

    Short gaps between operators count as computing.
    """
    calls = _collective_calls(events)
    operators: list[Interval] = []
    for event in events:
        # c10d's operators only hand work over; the rank's waiting for it shows in the operators around them.
        is_computing = event.kind == "operator" and not event.name.startswith(("c10d::", "autograd::engine"))
        if is_computing and not _calls_a_collective(event, calls):
            operators.append(_interval_of(event))
    return union(operators, join_below=_SHORTEST_IDLE_NS)


def _exposed_waits(computing: Sequence[Interval], collectives: Sequence[Event], step: Event) -> tuple[Interval, ...]:
    """Return when nothing computed while a collective was in flight, in seconds since the step's beginning.

    Gaps without a collective are the host's own work.

    Args:
        computing: when operators computed; disjoint and in order.
        collectives: the collectives of the step.
        step: the span of the step.
    """
    in_flight = union(_interval_of(event) for event in collectives)
    waits = []
    for gap in complement(computing, (step.start_ns, step.end_ns)):
        start, end = gap
        if end - start >= _SHORTEST_IDLE_NS and intersection([gap], in_flight):
            waits.append(_interval_in_seconds(start, end, origin_ns=step.start_ns))
    return tuple(waits)


class _Call(NamedTuple):
    """A call of a collective on the host."""

    start_ns: int
    end_ns: int


def _collective_calls(events: Iterable[Event]) -> dict[int, list[_Call]]:
    """Return thread -> its calls of collectives, in order of time."""
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
    """Return the kernels and copies of the device in the order in which the host launched them.

    Work whose times are impossible is left out.
    """
    events = list(events)
    launch_times = _launch_times(events)
    first_correlation = min(launch_times, default=0)
    launches = []
    for event in events:
        if event.kind in ("kernel", "copy"):
            launched = Launched(_launch_ns(event, launch_times, first_correlation), event)
            if _is_possible(launched):
                launches.append(launched)
    return sorted(launches)  # by `launch_ns`; work of one launch keeps an order that does not depend on the file's


def _launch_ns(work: Event, launch_times: Mapping[int, int], first_correlation: int) -> int:
    """Return when the host launched some work of the device.

    A launch that is not recorded counts as at 0 if it came before the profile, else as at the work's own start.

    Args:
        work: a kernel or a copy.
        launch_times: correlation -> time of the recorded launch.
        first_correlation: the smallest of these correlations.
    """
    if work.correlation in launch_times:
        return launch_times[work.correlation]
    return 0 if _was_launched_earlier(work, first_correlation) else work.start_ns


def _is_possible(launched: Launched) -> bool:
    """Whether work has a time, and does not begin before its launch by more than clocks differ."""
    start_ns = launched.event.start_ns
    has_time = start_ns > 0
    return has_time and start_ns >= launched.launch_ns - _MOST_CLOCK_DIFFERENCE_NS


def _was_launched_earlier(event: Event, first_correlation: int) -> bool:
    """Whether work was launched before the first recorded launch: correlations count up, and 0 is none."""
    return 0 < event.correlation < first_correlation


def _launch_times(events: Iterable[Event]) -> dict[int, int]:
    """Return correlation -> when the host launched the work with this correlation, in nanoseconds."""
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
    """Return the explained lines of one block, which are the steps of one profile, on a GPU and in its time.

    A step ends with the last kernel launched in it. The block's first step has no line unless it is whole: unless the
    device had been waited for before it, its beginning is unknown. Parts with lost events are unknown, and so are
    those that they would be mistaken for: without its kernel a device looks idle.

    Args:
        events: events of the block's profile.
        steps: numbers of the steps, one for each that is annotated.
        block: number of the block.
        world_size: number of ranks.
        first_is_whole: whether it is known when the first step began on the device.
        first_begin_ns: when that was, where nothing was launched before it; None: with the first event on the device.
    """
    profiled = _DeviceBlock.of(events, block, world_size, first_begin_ns, first_is_whole=first_is_whole)
    annotated_steps = list(zip(steps, profiled.annotations.steps, strict=True))
    whole_steps = annotated_steps if first_is_whole else annotated_steps[1:]
    return [profiled.line(step, span) for step, span in whole_steps]


@dataclass(frozen=True)
class _DeviceBlock:
    """The events of a block on a GPU, sorted by their use for its lines."""

    number: int
    annotations: _Annotations
    norms: _Norms
    work: _DeviceWork
    progress: _DeviceProgress
    launch_ns_by_correlation: Mapping[int, int]
    launch_calls: Sequence[_LaunchCall]
    """The host's calls after which something runs on the device, in order of time."""
    communicator_names: Mapping[str, str]
    """A communicator's name in the profile -> its name in the lines."""
    host_collectives: Sequence[Event]
    """Collectives of gloo beside NCCL's, as of gradients that are kept on the host, while which the device may idle."""
    unknown_in_all_steps: Mapping[str, str]
    """Part -> why it is unknown."""

    @classmethod
    def of(
        cls, events: Sequence[Event], number: int, world_size: int, first_begin_ns: int | None, *, first_is_whole: bool
    ) -> _DeviceBlock:
        """Sorts the events of a block; the arguments are those of `steps_on_cuda`."""
        launch_ns_by_correlation = _launch_times(events)
        work = _DeviceWork.of(events)
        annotations = _Annotations(events)
        norms = _Norms(events)
        if first_begin_ns is None:
            first_begin_ns = min((launch.event.start_ns for launch in work.launches), default=None)
        return cls(
            number=number,
            annotations=annotations,
            norms=norms,
            work=work,
            progress=_DeviceProgress(work.launches, first_begin_ns if first_is_whole else None),
            launch_ns_by_correlation=launch_ns_by_correlation,
            launch_calls=_launch_calls(events, work.launches),
            communicator_names=_communicator_names(work.collectives, annotations.first_ns),
            host_collectives=[event for event in events if event.kind == "collective"],
            unknown_in_all_steps=_unknown_in_block(work, launch_ns_by_correlation, norms, world_size),
        )

    def line(self, step: int, span: Event) -> ExplainedLine:
        """Return the line of one step.

        Args:
            step: the number of the step.
            span: the step on the host.
        """
        begin_ns = self.progress.step_begin_ns(span.start_ns)
        end_ns = self.progress.done_ns(span.end_ns, at_least=begin_ns)
        on_device: Interval = (begin_ns, end_ns)
        has_work = end_ns > begin_ns
        # Without work, as far as the profiler knows, the host's time is all that is known.
        duration_ns = end_ns - begin_ns if has_work else span.end_ns - span.start_ns
        phases = self.annotations.phases(span)
        loader_waits = union(self.progress.on_device(phase) for phase in phases if _phase_name(phase) == "data")
        collectives = self._collectives_of_step(span)
        copies_in_step = intersection(_intervals_near(self.work.copies_from_host, on_device), [on_device])
        return ExplainedLine(
            step=step,
            block=self.number,
            device="cuda",
            seconds=duration_ns / 1e9,
            phases=_device_phases(phases, self.progress, begin_ns, end_ns),
            idle=_all_in_seconds(complement(_intervals_near(self.work.working, on_device), on_device), begin_ns),
            collectives=(
                *self._recorded_collectives(collectives, begin_ns),
                *_clipped_host_collectives(_host_collectives(self.host_collectives, span), begin_ns, end_ns),
            ),
            norms=self.norms.positions(
                self.launch_ns_by_correlation.get(kernel.correlation, 0) for kernel in collectives
            ),
            copies=_all_in_seconds(copies_in_step, begin_ns),
            host_data=_all_in_seconds(intersection(loader_waits, [on_device]), begin_ns),
            unknown=self._unknown_parts(span, phases),
        )

    def _collectives_of_step(self, step: Event) -> list[Event]:
        """Return the kernels of collectives that a step launched, in the order in which they ran.

        They are those of the launch on every rank: on a stream of its own a kernel may begin before its step does.
        """
        launches = _items_begun_in(step, self.work.collectives, start_ns=lambda launch: launch.launch_ns)
        return sorted((launch.event for launch in launches), key=lambda kernel: kernel.start_ns)

    def _recorded_collectives(self, kernels: Iterable[Event], begin_ns: int) -> _RecordedCollectives:
        """Return kernels of collectives as a record has them, cut at the step's beginning on the device."""
        recorded = []
        for kernel in kernels:
            communicator = self.communicator_names[_communicator_of_kernel(kernel)]
            start_ns = max(kernel.start_ns, begin_ns)
            end_ns = max(kernel.end_ns, begin_ns)
            recorded.append((communicator, _operation_of(kernel), *_interval_in_seconds(start_ns, end_ns, begin_ns)))
        return tuple(recorded)

    def _unknown_parts(self, step: Event, phases: Sequence[Event]) -> dict[str, str]:
        """Return part -> why it is unknown in a step; of several reasons the last one counts."""
        annotated = self.annotations.unknown_parts(step)
        lost = _unknown_for_lost_work(self.launch_calls, step, phases, self.norms.exposed_parts)
        return {**annotated, **self.unknown_in_all_steps, **lost}


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
                copies_from_host.append(_interval_of(event))
            else:
                # Other copies, such as DDP's on the device into and out of its buckets, are work of their phase.
                working.append(_interval_of(event))
        return cls(launches, collectives, union(working), union(copies_from_host))


def _device_phases(
    phase_marks: Sequence[Event], progress: _DeviceProgress, begin_ns: int, end_ns: int
) -> _RecordedPhases:
    """Return the phases of a step on the device, in seconds since its beginning there.

    A phase ends with the last kernel launched in it; one in which nothing ran is left out.

    Args:
        phase_marks: the phases on the host, in order.
        progress: how far the device had come when the host was at some moment.
        begin_ns: beginning of the step on the device.
        end_ns: its end there.
    """
    phases = []
    phase_end_ns = begin_ns
    for mark in phase_marks:
        phase_begin_ns = min(progress.done_ns(mark.start_ns, at_least=phase_end_ns), end_ns)
        phase_end_ns = min(progress.done_ns(mark.end_ns, at_least=phase_begin_ns), end_ns)
        if phase_end_ns > phase_begin_ns:
            phases.append((_phase_name(mark), *_interval_in_seconds(phase_begin_ns, phase_end_ns, begin_ns)))
    return tuple(phases)


def _intervals_near(disjoint: Sequence[Interval], inside: Interval) -> Sequence[Interval]:
    """Return those of many intervals, which are disjoint and in order, that touch or overlap `inside`."""
    begin, end = inside
    first = bisect.bisect_left(disjoint, begin, key=lambda interval: interval[1])
    behind_last = bisect.bisect_left(disjoint, end, first, key=lambda interval: interval[0])
    return disjoint[first:behind_last]


def _items_begun_in(span: Event, items: Sequence[_Item], start_ns: Callable[[_Item], int]) -> Sequence[_Item]:
    """Return those of many items whose time falls into a span.

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
    """Return the host's calls after which something runs on the device, in order of time.

    Calls while a CUDA graph is recorded are left out, unless their work was seen.
    """
    seen_correlations = {launch.event.correlation for launch in launches}
    captures = _graph_recordings(events)
    calls = []
    for event in events:
        if event.kind == "launch" and _LAUNCH.match(event.name):
            was_seen = event.correlation in seen_correlations
            if was_seen or not _is_inside_any(captures, event.start_ns):
                calls.append(_LaunchCall(event.start_ns, was_seen))
    return sorted(calls)


class _CaptureCall(NamedTuple):
    """A call that begins or ends the recording of a CUDA graph."""

    event: Event
    is_begin: bool


def _graph_recordings(events: Iterable[Event]) -> list[Interval]:
    """Return when CUDA graphs were recorded by any thread: disjoint and in order.

    Each thread begins and ends its own: those of backward are recorded by autograd's.
    """
    calls = []
    for event in events:
        match = _CAPTURE.match(event.name) if event.kind == "launch" else None
        if match is not None:
            calls.append(_CaptureCall(event, is_begin=match[1] == "Begin"))
    calls.sort(key=lambda call: call.event.start_ns)
    recordings: list[Interval] = []
    begin_by_thread: dict[int, int] = {}
    for event, is_begin in calls:
        thread = event.lane
        if is_begin:
            begin_by_thread[thread] = event.start_ns
        elif thread in begin_by_thread:
            recordings.append((float(begin_by_thread.pop(thread)), float(event.end_ns)))
    return union(recordings)


def _is_inside_any(spans: Sequence[Interval], moment_ns: int) -> bool:
    """Whether a moment lies in one of the spans, which are disjoint and in order."""
    spans_begun = bisect.bisect_right(spans, (moment_ns, float("inf")))  # number of spans that begin by then
    if spans_begun == 0:
        return False
    _, last_end_ns = spans[spans_begun - 1]
    return moment_ns < last_end_ns


def _unknown_in_block(
    work: _DeviceWork, launch_times: Mapping[int, int], norms: _Norms, world_size: int
) -> dict[str, str]:
    """Return part -> why it is unknown in all steps of a block.

    Args:
        work: what ran on the device.
        launch_times: correlation -> time of the recorded launch.
        norms: whether synchronised norms exchange.
        world_size: number of ranks.
    """
    first_correlation = min(launch_times, default=0)
    without_launch = 0
    for _, event in work.launches:
        is_recorded = event.correlation in launch_times
        if not is_recorded and not _was_launched_earlier(event, first_correlation):
            without_launch += 1
    unknown: dict[str, str] = {}
    if world_size > 1 and not work.collectives:
        unknown |= dict.fromkeys((*norms.exposed_parts, COMMUNICATION), NO_NCCL)
    if without_launch > _MOST_LOST_SHARE * len(work.launches):
        unknown |= _all_parts_unknown(NO_LAUNCH, without_launch, len(work.launches))
    return unknown


def _unknown_for_lost_work(
    calls: Sequence[_LaunchCall], step: Event, phases: Sequence[Event], exposed_parts: Sequence[str]
) -> dict[str, str]:
    """Return part -> why it is unknown, where something was launched in a step and never seen to run.

    Args:
        calls: the launching calls of the block, in order.
        step: the span of the step.
        phases: the phases of that step.
        exposed_parts: the parts of its exposed communication.
    """
    calls_in_step = _items_begun_in(step, calls, lambda call: call.start_ns)
    lost_launches_ns = [call.start_ns for call in calls_in_step if not call.was_seen]
    lost = len(lost_launches_ns)
    if lost == 0:
        return {}
    if lost > _MOST_LOST_SHARE * len(calls_in_step):
        template = NO_KERNELS if lost == len(calls_in_step) else LOST_KERNELS
        return _all_parts_unknown(template, lost, len(calls_in_step))
    parts = []
    for phase in phases:
        if any(phase.start_ns <= launch_ns < phase.end_ns for launch_ns in lost_launches_ns):
            parts.append(_PART_OF_PHASE[_phase_name(phase)])
    # The device looks idle where a kernel was lost, so a gap, or a transfer that it hid, seems longer.
    parts += [*exposed_parts, COMMUNICATION, "launch_gaps"]
    return dict.fromkeys(parts, _loss_in_words(LOST_KERNELS, lost, len(calls_in_step)))


def _all_parts_unknown(template: str, lost: int, total: int) -> dict[str, str]:
    """Return all parts of a step with one reason; the arguments are those of `_loss_in_words`."""
    return dict.fromkeys((*PARTS, COMMUNICATION), _loss_in_words(template, lost, total))


def _loss_in_words(template: str, lost: int, total: int) -> str:
    """Return a reason in words: a template such as `LOST_KERNELS`, filled with counts and their share in percent."""
    share = float(f"{100 * lost / max(1, total):.2g}")
    return template.format(lost=lost, of=total, share=f"{share:g}")  # never "1e+02"


def _communicator_of_kernel(kernel: Event) -> str:
    """Return the name of the kernel's communicator; where the profiler links none, its stream stands for one."""
    return kernel.communicator or f"stream {kernel.lane}"


def _communicator_names(collectives: Sequence[Launched], since_ns: int) -> dict[str, str]:
    """Return communicator -> a name that is the same on all ranks.

    Names that begin with `COMMON_NAME_PREFIX` are so already. Others, as c10d's of groups of some ranks, are numbered
    by their first launch: {"stream 7": "nccl-0", "stream 20": "nccl-1"}. A communicator may use several streams.

    Args:
        collectives: the kernels of collectives, in the order of launch.
        since_ns: beginning of the first step. Communicators that are used after it come first: what one rank recorded
            before it, another may not have.
    """
    since_first_step = [event for launch_ns, event in collectives if launch_ns >= since_ns]
    all_kernels = [event for _, event in collectives]
    communicators = list(dict.fromkeys(_communicator_of_kernel(kernel) for kernel in (*since_first_step, *all_kernels)))
    local_names = [name for name in communicators if not name.startswith(COMMON_NAME_PREFIX)]
    has_common_names = len(local_names) < len(communicators)
    prefix = f"{COMMON_NAME_PREFIX}unnamed-" if has_common_names else COMMON_NAME_PREFIX
    numbered = {name: f"{prefix}{number}" for number, name in enumerate(local_names)}
    return {name: numbered.get(name, name) for name in communicators}


class _Norms:
    """Recognises the collectives of synchronised norms, by when the host issued them.

    A norm waits for its collective, so that none overlaps with computing.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        self._marks = sorted((event.start_ns, event.end_ns) for event in events if event.name == NORM_MARK)
        self.exposed_parts = EXPOSED if self._marks else EXPOSED[:-1]
        """The parts of exposed communication that can occur."""

    def positions(self, issue_times_ns: Iterable[int]) -> tuple[int, ...]:
        """Return the indices of those collectives that norms exchange by.

        Args:
            issue_times_ns: when the host issued each collective.
        """
        return tuple(index for index, issue_ns in enumerate(issue_times_ns) if _is_inside_any(self._marks, issue_ns))


class _DeviceProgress:
    """How far the device had come at a given moment of the host, which runs ahead of it.

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
        """How far the device's clock is behind the host's at least, for nothing runs before it is launched."""
        for launch_ns, event in launches:
            end_ns = max(event.end_ns, end_ns)
            self._end_ns.append(end_ns)
            self._lag_ns = max(launch_ns - event.start_ns, self._lag_ns)

    def _done_ns(self, moment_ns: int) -> int | None:
        """Return when the device had done all that was launched before `moment_ns`; None where nothing was."""
        launches = bisect.bisect_left(self._launch_ns, moment_ns)  # number of launches before that moment
        return self._end_ns[launches - 1] if launches else None

    def done_ns(self, moment_ns: int, at_least: int) -> int:
        """Return when the device had done all that was launched before `moment_ns`, or `at_least` if that is later."""
        end_ns = self._done_ns(moment_ns)
        return at_least if end_ns is None else max(end_ns, at_least)

    def step_begin_ns(self, start_ns: int) -> int:
        """Return when the device began a step that the host began at `start_ns`: when it had done all before it.

        Where nothing was launched before, this is the step's known begin on the device, or else the host's time on the
        device's clock.
        """
        end_ns = self._done_ns(start_ns)
        if end_ns is not None:
            return end_ns
        if self._first_begin_ns is not None:
            return self._first_begin_ns
        return start_ns - self._lag_ns

    def on_device(self, span: Event) -> Interval:
        """Return a span on the host's clock as one on the device's."""
        return (float(span.start_ns - self._lag_ns), float(span.end_ns - self._lag_ns))


class _Annotations:
    """The steps and phases of a profile, in order."""

    def __init__(self, events: Iterable[Event]) -> None:
        annotations = [event for event in events if event.kind == "annotation" and event.name.startswith(PHASE_PREFIX)]
        annotations.sort(key=lambda span: span.start_ns)
        phase_names = get_args(PhaseName)
        self.steps = [span for span in annotations if span.name == STEP]
        self._phases = [span for span in annotations if span.name.removeprefix(PHASE_PREFIX) in phase_names]
        self._unknown = [span for span in annotations if span.name.startswith(UNKNOWN_PHASES)]

    @property
    def first_ns(self) -> int:
        """When the first step begins; 0 without any."""
        return self.steps[0].start_ns if self.steps else 0

    def phases(self, step: Event) -> Sequence[Event]:
        """Return the phases that begin in a step, in order."""
        return _items_begun_in(step, self._phases, lambda span: span.start_ns)

    def unknown_parts(self, step: Event) -> dict[str, str]:
        """Return part -> why it is unknown, by the annotations in a step.

        Example of one: "vitscale.untold forward,backward the host's operators are not recorded".
        """
        reasons: dict[str, str] = {}
        for span in _items_begun_in(step, self._unknown, lambda span: span.start_ns):
            parts, _, reason = span.name.removeprefix(UNKNOWN_PHASES).partition(" ")
            reasons |= dict.fromkeys(parts.split(","), reason)
        return reasons


def _phase_name(span: Event) -> PhaseName:
    name: PhaseName = span.name.removeprefix(PHASE_PREFIX)  # type: ignore[assignment]  # `_Annotations` has looked
    return name


def _operation_of(kernel: Event) -> str:
    return operation(kernel.operation) if kernel.operation else operation_of_kernel(kernel.name)


def _interval_of(event: Event) -> Interval:
    return (float(event.start_ns), float(event.end_ns))


def _interval_in_seconds(start_ns: float, end_ns: float, origin_ns: int) -> Interval:
    """Return an interval in seconds from `origin_ns`, to a tenth of a microsecond."""
    return (round((start_ns - origin_ns) / 1e9, 7), round((end_ns - origin_ns) / 1e9, 7))


def _all_in_seconds(intervals_ns: Iterable[Interval], origin_ns: int) -> tuple[Interval, ...]:
    return tuple(_interval_in_seconds(start_ns, end_ns, origin_ns) for start_ns, end_ns in intervals_ns)
