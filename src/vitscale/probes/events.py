"""The profiler's events as plain values: the one place that knows how torch hands them out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from torch.profiler import profile

Kind = Literal["operator", "annotation", "collective", "kernel", "copy", "launch"]
_OF_ACTIVITY: dict[str, Kind] = {
    "cpu_op": "operator",
    "user_annotation": "annotation",
    "kernel": "kernel",
    "gpu_memcpy": "copy",
    "gpu_memset": "kernel",
    "cuda_runtime": "launch",
    "cuda_driver": "launch",
}
GLOO = "gloo:"
_COMMUNICATION_CALL = "record_param_comms"
"""torch's own name for a call of NCCL: what it launches is linked to it."""


class Event(NamedTuple):
    """One interval of the profile, in nanoseconds of the profile's clock."""

    kind: Kind
    name: str
    start_ns: int
    end_ns: int
    lane: int
    """The thread of what ran on the host, the stream of what ran on the device."""
    correlation: int = 0
    """Joins a kernel or copy to the call that launched it."""
    communicator: str = ""
    """Of an NCCL kernel, with `operation`, in c10d's names; empty where the profiler does not link it to its call."""
    operation: str = ""


def events_of(finished: profile) -> list[Event]:
    """Everything a finished profile recorded that a timeline is made of.

    `profile.events()` would build a tree of Python objects, at ten times the cost; the ranks stand still meanwhile.
    """
    results: Any = finished.profiler
    return plain(results.kineto_results.events())


def plain(recorded: Iterable[Any]) -> list[Event]:
    """The same of Kineto's own events."""
    recorded = list(recorded)
    calls = {event.correlation_id(): event.extra_meta() for event in recorded if event.name() == _COMMUNICATION_CALL}
    found = []
    for event in recorded:
        if (kind := _kind(event)) is None:
            continue
        call = calls.get(event.linked_correlation_id(), {}) if kind == "kernel" and calls else {}
        found.append(
            Event(
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
    return found


def _kind(event: Any) -> Kind | None:
    kind = _OF_ACTIVITY.get(event.activity_type())
    # gloo's asynchronous work is reported beside the operators, from its issue to its completion.
    return "collective" if kind is not None and event.name().startswith(GLOO) else kind
