"""The profiler's events as plain values: where torch hands them out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.profiler import profile

from vitscale.profiles.events import COMMUNICATION_CALL, GLOO, KIND_OF_ACTIVITY, Event, Kind


def events_of(finished: profile) -> list[Event]:
    """Everything a finished profile recorded that a timeline is made of.

    `profile.events()` would build a tree of Python objects, at ten times the cost; the ranks stand still meanwhile.
    """
    results: Any = finished.profiler
    return plain(results.kineto_results.events())


def plain(recorded: Iterable[Any]) -> list[Event]:
    """The same of Kineto's own events."""
    recorded = list(recorded)
    calls = {event.correlation_id(): event.extra_meta() for event in recorded if event.name() == COMMUNICATION_CALL}
    events = []
    for event in recorded:
        if (kind := _kind(event)) is None:
            continue
        call = calls.get(event.linked_correlation_id(), {}) if kind == "kernel" and calls else {}
        events.append(
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
    return events


def _kind(event: Any) -> Kind | None:
    kind = KIND_OF_ACTIVITY.get(event.activity_type())
    # gloo's asynchronous work is reported beside the operators, from its issue to its completion.
    return "collective" if kind is not None and event.name().startswith(GLOO) else kind
