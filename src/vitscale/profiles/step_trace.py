"""Explained steps as a trace that Perfetto and chrome://tracing open, and back: a process for each rank, on one clock.

A rank's tracks are: its steps; what each moment of them went into, waiting and transfer included; its phases; when its
device was idle; copies; waiting for the loader; collectives in flight. All but the second are what was recorded, so
that reading them gives the records again. The format has no meaning for events of one track that overlap without one
lying inside the other: collectives that do so lie on several tracks.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from vitscale.base.time_spans import Interval
from vitscale.errors import StoreError, shown
from vitscale.profiles.trace_json import TraceText, beginning, integer, nanoseconds
from vitscale.store.records import COMMUNICATION, ExplainedLine

ABOUT = "vitscale"
"""Key of vitscale's own facts: about the run on the file's object, and beyond its time on an event."""
_FORM = 1
_MOST_EVENTS = 5_000_000
_TRACKS = ("step", "time", "phase", "idle", "copy", "loader", "collective")
"""Tracks of a rank in the order in which they are shown; collectives may need several."""
_FIRST_TRACK, _TRACKS_OF_A_RANK = 10_000_000, 1000
"""Thread numbers: if 0 or taken, Perfetto (v52) moves the track to another process, or makes it the main one."""
_COLOURS = {
    "bubble": "grey", "wait": "terrible", "wire": "bad", "norm": "bad", COMMUNICATION: "bad",
    "forward": "good", "backward": "rail_response", "optimizer": "rail_animation",
    "data_wait": "yellow", "h2d": "olive", "launch_gaps": "grey", "other": "white",
}  # fmt: skip
"""Colours of a step's parts in chrome://tracing; Perfetto picks a colour for each name itself."""


_Told = tuple[str, float, float, dict[str, Any]]
"""Name, start and end in seconds from the step's beginning, and what else an event tells."""


class RankStep(NamedTuple):
    """One rank's explained step."""

    rank: int
    line: ExplainedLine
    parts: Mapping[str, Sequence[Interval]]
    """Part of the step to its intervals, in seconds from the step's beginning."""
    ahead_seconds: float
    """How far its clock, which is 0 at the step's beginning, is ahead of a common clock."""


def step_trace(about: Mapping[str, Any], steps: Iterable[Sequence[RankStep]]) -> bytes:
    """The trace, as JSON.

    Args:
        about: what is known of the run.
        steps: all ranks of each step. Steps follow one another without a pause: what lay between was not explained.
    """
    events: list[dict[str, Any]] = []
    lanes: dict[int, list[int]] = {}
    began_ns = 1000
    for ranks in steps:
        latest = max(own.ahead_seconds for own in ranks)
        ended_ns = began_ns
        for own in ranks:
            start_ns = began_ns + round((latest - own.ahead_seconds) * 1e9)
            for track, name, (start, end), args in _events_of(own):
                span = start_ns + round(start * 1e9), start_ns + round(end * 1e9)
                tid = _TRACKS.index(track)
                if track == "collective":
                    tid += _lane(lanes.setdefault(own.rank, []), *span)
                    ended_ns = max(ended_ns, span[1])
                events.append(_event(own.rank, tid, track, name, span, args))
            ended_ns = max(ended_ns, start_ns + round(own.line.seconds * 1e9))
        began_ns = ended_ns + 1000  # an event at the end of a step must not fall into the next one
    named = [
        metadata
        for rank in dict.fromkeys(event["pid"] for event in events)
        for metadata in _names(rank, lanes.get(rank, []))
    ]
    whole = {"displayTimeUnit": "ms", ABOUT: {"form": _FORM, **about}, "traceEvents": [*named, *events]}
    return json.dumps(whole, allow_nan=False, separators=(",", ":")).encode()


def _events_of(own: RankStep) -> Iterator[tuple[str, str, Interval, dict[str, Any]]]:
    """Yields (track, name, seconds from the step's beginning, what else is known) for each event of a step."""
    line = own.line
    more = {"block": line.block, "device": line.device, "unknown": line.unknown}
    yield "step", f"step {line.step + 1}", (0.0, line.seconds), more
    for part, spans in own.parts.items():
        yield from (("time", part, span, {}) for span in spans)
    untold = {"forward", "backward", "optimizer"} <= line.unknown.keys()  # one phase then stands for all
    for name, start, end in line.phases:
        yield "phase", "unknown" if untold else name, (start, end), {"phase": name} if untold else {}
    for track, spans in (("idle", line.idle), ("copy", line.copies), ("loader", line.host_data)):
        yield from ((track, track, span, {}) for span in spans)
    for index, (communicator, operation, start, end) in enumerate(line.collectives):
        yield "collective", operation, (start, end), {"communicator": communicator, "norm": index in line.norms}


def _lane(ends: list[int], start_ns: int, end_ns: int) -> int:
    """Finds the first free track for a collective, or a new one, and marks it as used until `end_ns`."""
    lane = next((lane for lane, end in enumerate(ends) if end <= start_ns), len(ends))
    ends[lane : lane + 1] = [end_ns]
    return lane


def _event(
    rank: int, tid: int, track: str, name: str, span: tuple[int, int], args: Mapping[str, Any]
) -> dict[str, Any]:
    event: dict[str, Any] = {"ph": "X", "cat": track, "name": name, "pid": rank, "tid": _number(rank, tid)}
    event |= {"ts": span[0] / 1000, "dur": (span[1] - span[0]) / 1000}
    if track == "time" and (colour := _COLOURS.get(name)):
        event["cname"] = colour
    return {**event, "args": {ABOUT: args}} if args else event


def _names(rank: int, lanes: Sequence[int]) -> Iterator[dict[str, Any]]:
    yield _name(rank, 0, "process_name", {"name": f"rank {rank}"})
    yield _name(rank, 0, "process_sort_index", {"sort_index": rank})
    tracks = [*_TRACKS[:-1], *("collectives" + f" ({lane + 1})" * (len(lanes) > 1) for lane in range(len(lanes)))]
    for tid, track in enumerate(tracks):
        yield _name(rank, tid, "thread_name", {"name": track})
        yield _name(rank, tid, "thread_sort_index", {"sort_index": tid})


def _name(rank: int, tid: int, what: str, args: Mapping[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": _number(rank, tid), "args": args}


def _number(rank: int, track: int) -> int:
    return _FIRST_TRACK + _TRACKS_OF_A_RANK * rank + track


def is_step_trace(path: Path) -> bool:
    """Whether vitscale wrote this trace; False for a file that cannot be read."""
    return f'"{ABOUT}":{{"form":'.encode() in beginning(path)


def read_step_trace(path: Path) -> tuple[dict[str, Any], dict[int, list[ExplainedLine]]]:
    """Reads what is known of the run, and each rank's explained steps in order.

    Raises:
        StoreError: the file cannot be read, or what is in it is no such trace.
    """
    text = TraceText(path)
    tracks: dict[tuple[int, str], list[tuple[int, int, str, dict[str, Any]]]] = {}
    count = 0
    for some in text.lists():
        count += len(some)
        if count > _MOST_EVENTS:
            raise StoreError(f"{shown(path.name)} has more than {_MOST_EVENTS:,} events")
        for event in some:
            start_ns, lasts_ns, rank = nanoseconds(event.ts), nanoseconds(event.dur), integer(event.pid)
            if event.ph != "X" or start_ns is None or lasts_ns is None or rank is None:
                continue
            if not isinstance(event.name, str):
                continue
            own = event.args.own if event.args is not None and isinstance(event.args.own, dict) else {}
            told = (start_ns, start_ns + lasts_ns, event.name, own)
            tracks.setdefault((rank, event.cat if isinstance(event.cat, str) else ""), []).append(told)
    about = text.about.get(ABOUT)
    if not isinstance(about, dict) or about.get("form") != _FORM:
        raise StoreError(
            f"{shown(path.name)} has another form of vitscale's traces than {_FORM}", next_step="Write it again"
        )
    ranks = sorted({rank for rank, track in tracks if track == "step"})
    try:
        return about, {rank: _lines({track: tracks.get((rank, track), []) for track in _TRACKS}) for rank in ranks}
    except (ValidationError, ValueError, TypeError, KeyError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise StoreError(f"{shown(path.name)} holds a step that cannot be: {why}") from None


def _lines(tracks: Mapping[str, Sequence[tuple[int, int, str, dict[str, Any]]]]) -> list[ExplainedLine]:
    """The steps of a rank; an event belongs to the last step that began before it."""
    steps = sorted(tracks["step"], key=lambda event: event[0])
    begins = [start_ns for start_ns, _, _, _ in steps]
    if len(set(begins)) < len(begins):
        raise ValueError("two steps of a rank begin at once")
    own: list[dict[str, list[_Told]]] = [{track: [] for track in _TRACKS} for _ in steps]
    for track, events in tracks.items():
        for start_ns, end_ns, name, more in events:
            if (index := bisect.bisect_right(begins, start_ns) - 1) >= 0:
                seconds = (start_ns - begins[index]) / 1e9, (end_ns - begins[index]) / 1e9
                own[index][track].append((name, *seconds, more))
    return [_line(*of_step["step"][0], of_step) for of_step in own]


def _line(
    name: str, _: float, seconds: float, told: Mapping[str, Any], tracks: Mapping[str, Sequence[_Told]]
) -> ExplainedLine:
    return ExplainedLine(
        step=int(name.removeprefix("step ")) - 1,
        block=told["block"],
        device=told["device"],
        seconds=seconds,
        phases=tuple((own.get("phase", name), start, end) for name, start, end, own in tracks["phase"]),
        idle=tuple((start, end) for _, start, end, _ in tracks["idle"]),
        collectives=tuple((str(own["communicator"]), op, start, end) for op, start, end, own in tracks["collective"]),
        norms=tuple(index for index, (_, _, _, own) in enumerate(tracks["collective"]) if own.get("norm")),
        copies=tuple((start, end) for _, start, end, _ in tracks["copy"]),
        host_data=tuple((start, end) for _, start, end, _ in tracks["loader"]),
        unknown=told["unknown"],
    )
