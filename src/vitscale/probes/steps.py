"""A rank's steps: light ones have nothing but a timestamp at their end; a few explained ones run under the profiler,
with their phases annotated.

On a GPU the timestamp is a CUDA event and is read only when it has long passed, together with the loss that was copied
to pinned memory before it: the clock waits for nothing inside a step. The profiler leaves something behind there:
Kineto does not detach CUPTI when it stops (its TEARDOWN_CUPTI is off), so that no step's time is reported from the
first block on (`vitscale.engines.step_schedule`).
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

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
    """The context of a phase in a step that is not explained."""
    return _NOTHING


class Explainer:
    """One rank's explained blocks. All ranks begin and end a block at the same step."""

    def __init__(self, device: torch.device, world_size: int, traces: Path | None = None) -> None:
        """`traces` is the folder that keeps each block's trace; None keeps none."""
        self._device, self._world_size, self._traces = device, world_size, traces
        self._profile: profile | None = None
        self._steps: list[int] = []
        self._block = 0
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
        self._start()
        self.drop_block()

    def begin_block(self) -> None:
        """Starts the profiler. Takes about a millisecond."""
        finish_device_work(self._device)  # no kernel of an earlier step falls into the block
        self._start()
        self._steps = []
        self._named_phases = set()

    def step(self, number: int) -> AbstractContextManager[object]:
        """Annotation of a whole step."""
        PROGRESS.step = number
        if self._profile is None:
            return _NOTHING
        self._steps.append(number)
        return record_function(timeline.STEP)

    def phase(self, name: PhaseName) -> AbstractContextManager[object]:
        """Annotation of a part of a step."""
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
        finished, self._profile = self._profile, None
        if finished is None:
            raise RuntimeError("no explained block has begun")
        finish_device_work(self._device)  # the last kernels of the block belong to it
        _stop(finished)
        events = events_of(finished)
        if self._traces is not None:
            finished.export_chrome_trace(str(self._traces / f"trace-rank-{rank}-block-{self._block}.json.gz"))
        block, self._block = self._block, self._block + 1
        if self._device.type == "cuda":
            return timeline.steps_on_cuda(events, self._steps, block, self._world_size)
        return timeline.steps_on_cpu(events, self._steps, block)

    def drop_block(self) -> None:
        """Stops the profiler and drops what it saw."""
        finished, self._profile = self._profile, None
        if finished is not None:
            _stop(finished)

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()


def _stop(running: profile) -> None:
    """Stops a profiler once gloo's threads have written all they will into it.

    gloo says that a collective is complete before its thread has recorded the end: one that has lost its core between
    the two would write into what the profiler has freed by then (torch 2.13, `AsyncWork::finishWorkGloo`). Such a
    thread is running, or about to; one that has recorded sleeps until there is more to do.
    """
    asleep, give_up = 0, time.monotonic() + _GLOO_SECONDS
    # Looks twice: a thread may sleep for a moment while this thread holds the interpreter's lock.
    while (asleep := 0 if _gloo_runs() else asleep + 1) < 2 and time.monotonic() < give_up:
        time.sleep(0.0002)
    running.stop()


def _gloo_runs() -> bool:
    """Whether one of this process's gloo threads is running, or waits for a core."""
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended
            name, _, rest = (task / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
            if name.partition("(")[2] == _GLOO_THREAD and rest.split()[0] != "S":
                return True
    return False


def events_of(finished: profile) -> list[timeline.Event]:
    """All events of a finished profile that a timeline needs.

    `profile.events()` would build a tree of Python objects, at ten times the cost; the ranks stand still meanwhile.
    """
    results: Any = finished.profiler
    return plain(results.kineto_results.events())


def plain(recorded: Iterable[Any]) -> list[timeline.Event]:
    """Converts Kineto's own events."""
    recorded = list(recorded)
    calls = {e.correlation_id(): _metadata(e) for e in recorded if e.name() == timeline.COMMUNICATION_CALL}
    events = []
    for event in recorded:
        if (kind := _kind(event)) is None:
            continue
        call = calls.get(event.linked_correlation_id(), {}) if kind == "kernel" and calls else {}
        events.append(
            timeline.Event(
                kind,
                event.name(),
                event.start_ns(),
                event.end_ns(),
                event.device_resource_id(),
                event.correlation_id(),
                call.get("Process Group Name", "").strip('"'),
                call.get("Collective name", "").strip('"'),
            )
        )
    return events


def _kind(event: Any) -> timeline.EventKind | None:
    kind = timeline.KIND_OF_ACTIVITY.get(event.activity_type() if hasattr(event, "activity_type") else _activity(event))
    # gloo's asynchronous work is reported beside the operators, from its issue to its completion.
    return "collective" if kind is not None and event.name().startswith(timeline.GLOO) else kind


def _activity(event: Any) -> str:
    """Kineto's name of an event's activity, which torch 2.11 does not tell: by the device, and by what is named so."""
    name, on_device = event.name(), event.device_type().name != "CPU"
    if event.is_user_annotation():
        return "gpu_user_annotation" if on_device else "user_annotation"
    if on_device:
        return {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}.get(name[:6], "kernel")
    call = next((name.removeprefix(own) for own in ("cuda", "hip", "cu") if name.startswith(own)), "")
    return "cuda_runtime" if call[:1].isupper() else "cpu_op"


def _metadata(event: Any) -> dict[str, str]:
    """What an event of a call of NCCL says of it; torch 2.11 has it as JSON alone, without its braces."""
    if hasattr(event, "extra_meta"):
        told: dict[str, str] = event.extra_meta()
        return told
    try:
        fields = json.loads("{" + event.metadata_json().strip("{} ") + "}")
    except ValueError:
        return {}
    return {name: value for name, value in fields.items() if isinstance(value, str)}


def finish_device_work(device: torch.device) -> None:
    """Waits until a GPU has done all that was asked of it; a host has done so already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


Mark = TypeVar("Mark")
LineOf = Callable[..., StepLine]
"""Makes a step's record of its `seconds` and its `loss`."""


class StepClock(Generic[Mark]):
    """Times steps from the end of one to the end of the next. This class reads `time.perf_counter` after each step: on
    CPU a step is over when the call returns."""

    _began = 0.0

    def start(self) -> None:
        """Begins an epoch: the next step is timed from here."""
        self._began = time.perf_counter()

    def mark(self, mark: Mark, loss: Tensor) -> list[tuple[Mark, float, float]]:
        """Ends a step; returns what is known by now of this and earlier steps: (mark, seconds, loss)."""
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        return [(mark, seconds, float(loss))]

    def seconds_since_mark(self) -> float:
        """Returns the seconds since the end of the latest step, or since `start`. The device has done its work."""
        return time.perf_counter() - self._began

    def drain(self) -> list[tuple[Mark, float, float]]:
        """Waits for the device and returns what is left. Only between epochs."""
        return []


class CudaStepClock(StepClock[Mark]):
    """CUDA events on the current stream, read once they have passed."""

    def __init__(self) -> None:
        self._last: torch.cuda.Event | None = None
        self._pending: deque[tuple[Mark, torch.cuda.Event, torch.cuda.Event, Tensor]] = deque()

    @override
    def start(self) -> None:
        self._last = self._event()

    @override
    def mark(self, mark: Mark, loss: Tensor) -> list[tuple[Mark, float, float]]:
        pinned = torch.empty((), dtype=torch.float32, pin_memory=True)
        pinned.copy_(loss, non_blocking=True)
        begin, self._last = self._last or self._event(), self._event()
        self._pending.append((mark, begin, self._last, pinned))
        return self._passed()

    @override
    def seconds_since_mark(self) -> float:
        if self._last is None:
            return 0.0
        event = self._event()
        event.synchronize()
        return self._last.elapsed_time(event) / 1000

    @override
    def drain(self) -> list[tuple[Mark, float, float]]:
        torch.cuda.synchronize()
        return self._passed()

    def _passed(self) -> list[tuple[Mark, float, float]]:
        done = []
        while self._pending and self._pending[0][2].query():
            mark, begin, end, pinned = self._pending.popleft()
            done.append((mark, begin.elapsed_time(end) / 1000, float(pinned)))
        return done

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def step_clock(device: torch.device) -> StepClock[Mark]:
    """The clock for `device`."""
    return CudaStepClock() if device.type == "cuda" else StepClock()
