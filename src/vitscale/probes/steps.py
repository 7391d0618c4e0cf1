"""Times a rank's steps. Light ones have nothing but a timestamp at their end; a few explained ones run under the
profiler, with their phases annotated.

On a GPU the timestamp is a CUDA event and is read only when it has long passed, together with the loss that was copied
to pinned memory before it: the clock waits for nothing inside a step. The profiler leaves something behind there:
Kineto does not detach CUPTI when it stops (its TEARDOWN_CUPTI is off), so that no step's time is reported from the
first block on (`vitscale.engines.step_schedule`).
"""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from typing_extensions import override

from vitscale.processes.heartbeat import PROGRESS
from vitscale.profiles import timeline
from vitscale.store.records import ExplainedLine, PhaseName, StepLine

PhaseContext = Callable[[PhaseName], AbstractContextManager[object]]
"""A context that names what the training loop does: `with phase("forward"): ...`."""

_NOTHING: AbstractContextManager[None] = nullcontext()
_GLOO_THREAD = "pt_gloo_runloop"
_GLOO_SECONDS = 1.0
"""Longest wait for gloo's threads: those of a script may always have work."""


def no_phase(_name: PhaseName) -> AbstractContextManager[None]:
    """Returns the context of a phase in a step that is not explained: it does nothing."""
    return _NOTHING


class Explainer:
    """Profiles blocks of one rank's steps. Steps in a block are explained: their time is divided into parts.

    All ranks begin and end a block at the same step. `begin_block` starts the profiler; `end_block` stops it and
    returns what it saw, and `drop_block` stops it without. Outside a block `step` and `phase` do nearly nothing.
    """

    def __init__(self, device: torch.device, world_size: int, traces: Path | None = None) -> None:
        """`traces`: folder that keeps each block's trace; None keeps none."""
        self._device = device
        self._world_size = world_size
        self._traces = traces
        self._profile: profile | None = None
        """The profiler of the block under way."""
        self._steps: list[int] = []
        """Numbers of the steps of that block."""
        self._block = 0
        """Number of blocks that have ended with their record."""
        self._named_phases: set[str] = set()

    @property
    def explaining(self) -> bool:
        """Whether a block is under way."""
        return self._profile is not None

    @property
    def named_phases(self) -> frozenset[str]:
        """Phases that were named in the latest block."""
        return frozenset(self._named_phases)

    def warm_up(self) -> None:
        """Starts and stops the profiler once, on a host that computes: the first start loads its libraries.

        On a GPU nothing is started before the first block. CUPTI would stay attached through all timed steps, and a
        session without kernels is known to leave later ones without any; a block's first step is left out anyway.
        """
        if self._device.type == "cuda":
            return
        self._start_profiler()
        self.drop_block()

    def begin_block(self) -> None:
        """Starts the profiler. Takes about a millisecond."""
        finish_device_work(self._device)  # no kernel of an earlier step falls into the block
        self._start_profiler()
        self._steps = []
        self._named_phases = set()

    def step(self, number: int) -> AbstractContextManager[object]:
        """Returns a context that annotates a whole step, if it is explained."""
        PROGRESS.step = number
        if self._profile is None:
            return _NOTHING
        self._steps.append(number)
        return record_function(timeline.STEP)

    def phase(self, name: PhaseName) -> AbstractContextManager[object]:
        """Returns a context that annotates a part of a step, if it is explained."""
        PROGRESS.phase = name
        if self._profile is None:
            return _NOTHING
        self._named_phases.add(name)
        return record_function(timeline.PHASE_PREFIX + name)

    def end_block(self, rank: int) -> list[ExplainedLine]:
        """Stops the profiler and reads what it saw. That takes tens of milliseconds, a pause of the measurement.

        Raises:
            RuntimeError: no block has begun.
        """
        finished = self._profile
        self._profile = None
        if finished is None:
            raise RuntimeError("no explained block has begun")
        finish_device_work(self._device)  # the last kernels of the block belong to it
        _stop_profiler(finished)
        trace = None if self._traces is None else self._traces / f"trace-rank-{rank}-block-{self._block}.json.gz"
        events = events_of(finished, trace)
        block = self._block
        self._block += 1
        if self._device.type == "cuda":
            return timeline.steps_on_cuda(events, self._steps, block, self._world_size)
        return timeline.steps_on_cpu(events, self._steps, block)

    def drop_block(self) -> None:
        """Stops the profiler and drops what it saw."""
        finished = self._profile
        self._profile = None
        if finished is not None:
            _stop_profiler(finished)

    def _start_profiler(self) -> None:
        """Begins to record what the host does and, on a GPU, what the device does."""
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()


def _stop_profiler(running: profile) -> None:
    """Stops a profiler once gloo's threads have written all they will into it.

    gloo says that a collective is complete before its thread has recorded the end: one that has lost its core between
    the two would write into what the profiler has freed by then (torch 2.13, `AsyncWork::finishWorkGloo`). Such a
    thread is running, or about to; one that has recorded sleeps until there is more to do.
    """
    deadline = time.monotonic() + _GLOO_SECONDS
    idle_looks = 0
    # Twice in a row: a thread may sleep for a moment while this thread holds the interpreter's lock.
    while True:
        idle_looks = 0 if _is_gloo_running() else idle_looks + 1
        if idle_looks == 2 or time.monotonic() >= deadline:
            break
        time.sleep(0.0002)
    running.stop()


def _is_gloo_running() -> bool:
    """Whether one of this process's gloo threads is running, or waits for a core."""
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended
            # "1234 (pt_gloo_runloop) S 1 ...": thread, name and state; proc_pid_stat(5).
            thread_and_name, _, fields = (task / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
            name = thread_and_name.partition("(")[2]
            if name == _GLOO_THREAD and fields.split()[0] != "S":
                return True
    return False


CallMetadata = Mapping[int, Mapping[str, str]]
"""Correlation id of a call of NCCL -> its fields, as "Process Group Name" and "Collective name"."""


def events_of(finished: profile, trace: Path | None = None) -> list[timeline.Event]:
    """Returns all events of a finished profile that a timeline needs.

    `profile.events()` would build a tree of Python objects, at ten times the cost; the ranks stand still meanwhile.

    Args:
        finished: the profile.
        trace: file for its trace (.json.gz); None keeps none. torch writes the trace of a profile once only.
    """
    results: Any = finished.profiler
    recorded = list(results.kineto_results.events())
    calls = _communication_calls(recorded)
    if calls and not hasattr(calls[0], "extra_meta"):
        return timeline_events(recorded, _exported_metadata(finished, trace))
    if trace is not None:
        finished.export_chrome_trace(str(trace))
    return timeline_events(recorded)


def _exported_metadata(finished: profile, trace: Path | None) -> CallMetadata:
    """Returns the fields of calls of NCCL as a profile's trace has them, for a torch whose events lack `extra_meta`.

    torch 2.11's events have `metadata_json` alone: "" or, with `expose_kineto_event_metadata`, the number of the event,
    for torch reads it before it adds the fields (collection.cpp, `passEventsToKineto`). They are in the trace.

    `trace`: file to keep the trace in; None keeps none.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json.gz" if trace is None else trace
        finished.export_chrome_trace(str(path))
        with gzip.open(path) as file:
            return metadata_in_trace(json.load(file))


def metadata_in_trace(trace: Mapping[str, Any]) -> CallMetadata:
    """Returns the fields of calls of NCCL in an exported trace, whose "External id" is the correlation id."""
    metadata_by_call = {}
    for event in trace["traceEvents"]:
        if event.get("name") == timeline.COMMUNICATION_CALL and "External id" in event.get("args", {}):
            fields = event["args"]
            texts = {name: value for name, value in fields.items() if isinstance(value, str)}
            metadata_by_call[int(fields["External id"])] = texts
    return metadata_by_call


def _communication_calls(recorded: Iterable[Any]) -> list[Any]:
    """Returns the events that are calls of NCCL on the host."""
    return [event for event in recorded if event.name() == timeline.COMMUNICATION_CALL]


def timeline_events(kineto_events: Iterable[Any], exported: CallMetadata | None = None) -> list[timeline.Event]:
    """Converts the events of torch's profiler (Kineto) for a timeline; those of no use there are left out.

    The group and the collective of an NCCL kernel are known by the call on the host that launched it: the kernel's
    `linked_correlation_id` is that call's `correlation_id`.

    Args:
        kineto_events: the events.
        exported: fields of the calls; None: the events have them (`extra_meta`, from torch 2.12 on).
    """
    recorded = list(kineto_events)
    metadata_by_call = exported
    if metadata_by_call is None:
        metadata_by_call = {call.correlation_id(): call.extra_meta() for call in _communication_calls(recorded)}
    events = []
    for event in recorded:
        kind = _timeline_kind(event)
        if kind is None:
            continue
        metadata: Mapping[str, str] = {}
        if kind == "kernel" and metadata_by_call:
            metadata = metadata_by_call.get(event.linked_correlation_id(), metadata)
        events.append(
            timeline.Event(
                kind,
                event.name(),
                event.start_ns(),
                event.end_ns(),
                event.device_resource_id(),
                event.correlation_id(),
                metadata.get("Process Group Name", "").strip('"'),
                metadata.get("Collective name", "").strip('"'),
            )
        )
    return events


def _timeline_kind(event: Any) -> timeline.EventKind | None:
    """Returns the kind of an event in a timeline; None where it is of no use there."""
    activity = event.activity_type() if hasattr(event, "activity_type") else _activity_name(event)
    kind = timeline.KIND_OF_ACTIVITY.get(activity)
    # gloo's asynchronous work is reported beside the operators, from its issue to its completion.
    if kind is not None and event.name().startswith(timeline.GLOO):
        return "collective"
    return kind


def _activity_name(event: Any) -> str:
    """Returns Kineto's name of an event's activity, which torch 2.11 does not report, by its device and its name."""
    name = event.name()
    on_device = event.device_type().name != "CPU"
    if event.is_user_annotation():
        return "gpu_user_annotation" if on_device else "user_annotation"
    if on_device:
        return {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}.get(name[:6], "kernel")
    return "cuda_runtime" if _is_runtime_call(name) else "cpu_op"


def _is_runtime_call(name: str) -> bool:
    """Whether a name is of a call of CUDA or HIP, as "cudaLaunchKernel", "hipMalloc" and "cuLaunchKernel"."""
    for prefix in ("cuda", "hip", "cu"):
        if name.startswith(prefix):
            return name.removeprefix(prefix)[:1].isupper()
    return False


def finish_device_work(device: torch.device) -> None:
    """Waits until a GPU has done all that was asked of it; a host has done so already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


Mark = TypeVar("Mark")
LineOf = Callable[..., StepLine]
"""Makes a step's record of its `seconds` and its `loss`."""


class TimedStep(NamedTuple, Generic[Mark]):
    """A step whose time is known."""

    mark: Mark
    """What the caller gave to `StepClock.mark` for the step."""
    seconds: float
    """Time from the end of the step before to the end of this one."""
    loss: float


class StepClock(Generic[Mark]):
    """Times steps from the end of one to the end of the next.

    This class reads `time.perf_counter` after each step: on CPU a step is over when the call returns.
    """

    _began = 0.0

    def start(self) -> None:
        """Begins to time: the next step is timed from here."""
        self._began = time.perf_counter()

    def mark(self, mark: Mark, loss: Tensor) -> list[TimedStep[Mark]]:
        """Ends a step; returns those of this and earlier steps whose time is known since the last call, in order.

        Args:
            mark: names the step for the caller, and comes back with its time.
            loss: its loss (scalar), read when the device has computed it.
        """
        ended = time.perf_counter()
        seconds = ended - self._began
        self._began = ended
        return [TimedStep(mark, seconds, float(loss))]

    def seconds_since_mark(self) -> float:
        """Returns the seconds since the end of the latest step, or since `start`. The device has done its work."""
        return time.perf_counter() - self._began

    def drain(self) -> list[TimedStep[Mark]]:
        """Waits for the device and returns the remaining steps. Only between epochs."""
        return []


class _PendingStep(NamedTuple, Generic[Mark]):
    """A step that the device may still be computing."""

    mark: Mark
    begin: torch.cuda.Event
    end: torch.cuda.Event
    loss: Tensor
    """In pinned host memory (scalar): holds the loss once `end` has passed."""


class CudaStepClock(StepClock[Mark]):
    """Records CUDA events on the current stream, and reads them once they have passed."""

    def __init__(self) -> None:
        self._last: torch.cuda.Event | None = None
        """The end of the latest step; None before `start`."""
        self._pending: deque[_PendingStep[Mark]] = deque()
        """Steps whose end the device had not passed at the latest look, oldest first."""

    @override
    def start(self) -> None:
        self._last = self._record_event()

    @override
    def mark(self, mark: Mark, loss: Tensor) -> list[TimedStep[Mark]]:
        pinned_loss = torch.empty((), dtype=torch.float32, pin_memory=True)
        pinned_loss.copy_(loss, non_blocking=True)
        begin = self._last or self._record_event()
        end = self._record_event()
        self._last = end
        self._pending.append(_PendingStep(mark, begin, end, pinned_loss))
        return self._take_passed()

    @override
    def seconds_since_mark(self) -> float:
        if self._last is None:
            return 0.0
        event = self._record_event()
        event.synchronize()
        return float(self._last.elapsed_time(event)) / 1000

    @override
    def drain(self) -> list[TimedStep[Mark]]:
        torch.cuda.synchronize()
        return self._take_passed()

    def _take_passed(self) -> list[TimedStep[Mark]]:
        """Removes the steps whose end the device has passed from those pending; returns them, oldest first."""
        passed = []
        while self._pending and self._pending[0].end.query():
            step = self._pending.popleft()
            milliseconds = step.begin.elapsed_time(step.end)
            passed.append(TimedStep(step.mark, milliseconds / 1000, float(step.loss)))
        return passed

    @staticmethod
    def _record_event() -> torch.cuda.Event:
        """Returns an event that the device passes when it has done all work issued so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def step_clock(device: torch.device) -> StepClock[Mark]:
    """Returns the clock of steps that `device` computes."""
    return CudaStepClock() if device.type == "cuda" else StepClock()
