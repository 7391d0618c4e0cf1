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
_FIRST_TRACK = 10_000_000
"""Lowest thread number: if 0 or taken, Perfetto (v52) moves the track to another process, or makes it the main one."""
_TRACKS_OF_A_RANK = 1000
"""Thread numbers that are set aside for each rank."""
_PAUSE_NS = 1000
"""Time between two steps: an event at the end of a step must not fall into the next one."""
_COLOURS = {
    "bubble": "grey", "wait": "terrible", "wire": "bad", "norm": "bad", COMMUNICATION: "bad",
    "forward": "good", "backward": "rail_response", "optimizer": "rail_animation",
    "data_wait": "yellow", "h2d": "olive", "launch_gaps": "grey", "other": "white",
}  # fmt: skip
"""Colours of a step's parts in chrome://tracing; Perfetto picks a colour for each name itself."""


class RankStep(NamedTuple):
    """One rank's explained step."""

    rank: int
    line: ExplainedLine
    parts: Mapping[str, Sequence[Interval]]
    """Part of the step to its intervals, in seconds from the step's beginning."""
    ahead_seconds: float
    """How far its clock, which is 0 at the step's beginning, is ahead of a common clock."""


class _StepEvent(NamedTuple):
    """One event of an explained step on one rank."""

    track: str
    name: str
    seconds: Interval
    """Start and end, from the step's beginning."""
    facts: Mapping[str, Any]
    """What an event of this track has beyond its time, so that reading it gives the record again."""


def step_trace(about: Mapping[str, Any], steps: Iterable[Sequence[RankStep]]) -> bytes:
    """Return the trace, as JSON.

    Args:
        about: facts about the run.
        steps: all ranks of each step. Steps follow one another without a pause: what lay between was not explained.
    """
    writer = _TraceWriter()
    step_begin_ns = _PAUSE_NS
    for ranks in steps:
        step_end_ns = writer.add_step(ranks, step_begin_ns)
        step_begin_ns = step_end_ns + _PAUSE_NS
    events = [*writer.track_names(), *writer.events]
    trace = {"displayTimeUnit": "ms", ABOUT: {"form": _FORM, **about}, "traceEvents": events}
    return json.dumps(trace, allow_nan=False, separators=(",", ":")).encode()


class _TraceWriter:
    """Collects the events of steps in Chrome's format, and gives each collective a lane that is free."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._lane_ends_by_rank: dict[int, list[int]] = {}
        """Rank -> until when each of its lanes of collectives is used, in nanoseconds of the trace's clock."""

    def add_step(self, ranks: Sequence[RankStep], begin_ns: int) -> int:
        """Adds a step of all ranks that begins at `begin_ns`, and returns its end, both on the trace's clock."""
        most_ahead_seconds = max(rank_step.ahead_seconds for rank_step in ranks)
        end_ns = begin_ns
        for rank_step in ranks:
            # The rank whose clock is furthest ahead began the step first.
            delay_ns = round((most_ahead_seconds - rank_step.ahead_seconds) * 1e9)
            rank_end_ns = self._add_rank_step(rank_step, origin_ns=begin_ns + delay_ns)
            end_ns = max(end_ns, rank_end_ns)
        return end_ns

    def _add_rank_step(self, rank_step: RankStep, origin_ns: int) -> int:
        """Adds a step of one rank that begins at `origin_ns`, and returns its end or that of its last collective."""
        rank_end_ns = origin_ns + round(rank_step.line.seconds * 1e9)
        lane_ends = self._lane_ends_by_rank.setdefault(rank_step.rank, [])
        for event in _step_events(rank_step):
            start, end = event.seconds
            start_ns = origin_ns + round(start * 1e9)
            end_ns = origin_ns + round(end * 1e9)
            position = _TRACKS.index(event.track)
            if event.track == "collective":
                position += _take_lane(lane_ends, start_ns, end_ns)
                rank_end_ns = max(rank_end_ns, end_ns)
            self.events.append(_json_event(rank_step.rank, position, event, start_ns, end_ns))
        return rank_end_ns

    def track_names(self) -> Iterator[dict[str, Any]]:
        """Yields the entries that name and order the tracks of all ranks, once all steps are added."""
        for rank, lane_ends in self._lane_ends_by_rank.items():
            yield from _track_entries(rank, lanes=len(lane_ends))


def _step_events(rank_step: RankStep) -> Iterator[_StepEvent]:
    """Yields the events of a step on one rank, track by track; the parts are not read again, and have no facts."""
    line = rank_step.line
    step_facts = {"block": line.block, "device": line.device, "unknown": line.unknown}
    yield _StepEvent("step", f"step {line.step + 1}", (0.0, line.seconds), step_facts)
    for part, intervals in rank_step.parts.items():
        for interval in intervals:
            yield _StepEvent("time", part, interval, {})
    # Where no phase is known, one of them stands for all.
    are_phases_unknown = {"forward", "backward", "optimizer"} <= line.unknown.keys()
    for phase, start, end in line.phases:
        if are_phases_unknown:
            yield _StepEvent("phase", "unknown", (start, end), {"phase": phase})
        else:
            yield _StepEvent("phase", phase, (start, end), {})
    for track, intervals in (("idle", line.idle), ("copy", line.copies), ("loader", line.host_data)):
        for interval in intervals:
            yield _StepEvent(track, track, interval, {})
    for index, (communicator, operation, start, end) in enumerate(line.collectives):
        facts = {"communicator": communicator, "norm": index in line.norms}
        yield _StepEvent("collective", operation, (start, end), facts)


def _take_lane(lane_ends: list[int], start_ns: int, end_ns: int) -> int:
    """Takes the first lane that is free for a collective, or a new one, and returns its number.

    Args:
        lane_ends: until when each lane is used; the lane that is taken is then used until `end_ns`.
        start_ns: beginning of the collective.
        end_ns: its end.
    """
    for lane, lane_end_ns in enumerate(lane_ends):
        if lane_end_ns <= start_ns:
            lane_ends[lane] = end_ns
            return lane
    lane_ends.append(end_ns)
    return len(lane_ends) - 1


def _json_event(rank: int, position: int, event: _StepEvent, start_ns: int, end_ns: int) -> dict[str, Any]:
    """Return the event in Chrome's format, with times in microseconds.

    Args:
        rank: the rank.
        position: the track's position among those of the rank.
        event: the event.
        start_ns: its start on the trace's clock.
        end_ns: its end there.
    """
    entry: dict[str, Any] = {
        "ph": "X",
        "cat": event.track,
        "name": event.name,
        "pid": rank,
        "tid": _thread_number(rank, position),
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
    }
    if event.track == "time" and event.name in _COLOURS:
        entry["cname"] = _COLOURS[event.name]
    if event.facts:
        entry["args"] = {ABOUT: event.facts}
    return entry


def _track_entries(rank: int, lanes: int) -> Iterator[dict[str, Any]]:
    """Yields the entries that name and order the tracks of a rank, of which `lanes` are of collectives."""
    yield _metadata_entry(rank, 0, "process_name", {"name": f"rank {rank}"})
    yield _metadata_entry(rank, 0, "process_sort_index", {"sort_index": rank})
    names = list(_TRACKS[:-1])
    if lanes == 1:
        names.append("collectives")
    else:
        names += [f"collectives ({lane + 1})" for lane in range(lanes)]
    for position, name in enumerate(names):
        yield _metadata_entry(rank, position, "thread_name", {"name": name})
        yield _metadata_entry(rank, position, "thread_sort_index", {"sort_index": position})


def _metadata_entry(rank: int, position: int, name: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry about a track, or about its rank, instead of an event in it."""
    return {"ph": "M", "name": name, "pid": rank, "tid": _thread_number(rank, position), "args": args}


def _thread_number(rank: int, position: int) -> int:
    return _FIRST_TRACK + _TRACKS_OF_A_RANK * rank + position


def is_step_trace(path: Path) -> bool:
    """Whether vitscale wrote this trace; False for a file that cannot be read."""
    return f'"{ABOUT}":{{"form":'.encode() in beginning(path)


class StepTrace(NamedTuple):
    """A trace that was read again."""

    about: dict[str, Any]
    """Facts about the run."""
    lines_by_rank: dict[int, list[ExplainedLine]]
    """The explained steps of each rank, in order."""


class _TrackKey(NamedTuple):
    """A track of a rank; all lanes of collectives are one."""

    rank: int
    track: str


class _ReadEvent(NamedTuple):
    """An event as the file has it, on the file's clock."""

    start_ns: int
    end_ns: int
    name: str
    facts: dict[str, Any]


class _ReadStepEvent(NamedTuple):
    """An event of a step, in seconds from the step's beginning."""

    name: str
    start: float
    end: float
    facts: dict[str, Any]


def read_step_trace(path: Path) -> StepTrace:
    """Reads a trace that vitscale wrote.

    Raises:
        StoreError: the file cannot be read, or is no such trace.
    """
    text = TraceText(path)
    tracks = _read_tracks(text, path)
    about = text.about.get(ABOUT)  # complete once all events are read
    if not isinstance(about, dict) or about.get("form") != _FORM:
        raise StoreError(
            f"{shown(path.name)} has another form of vitscale's traces than {_FORM}", next_step="Write it again"
        )
    ranks = sorted({key.rank for key in tracks if key.track == "step"})
    lines_by_rank = {}
    try:
        for rank in ranks:
            tracks_of_rank = {track: tracks.get(_TrackKey(rank, track), []) for track in _TRACKS}
            lines_by_rank[rank] = _explained_lines(tracks_of_rank)
    except (ValidationError, ValueError, TypeError, KeyError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise StoreError(f"{shown(path.name)} holds a step that cannot be: {reason}") from None
    return StepTrace(about, lines_by_rank)


def _read_tracks(text: TraceText, path: Path) -> dict[_TrackKey, list[_ReadEvent]]:
    """Return the events of each track, in the order of the file.

    Raises:
        StoreError: the file cannot be read, is no trace, or has too many events.
    """
    tracks: dict[_TrackKey, list[_ReadEvent]] = {}
    events = 0
    for raw_events in text.lists():
        events += len(raw_events)
        if events > _MOST_EVENTS:
            raise StoreError(f"{shown(path.name)} has more than {_MOST_EVENTS:,} events")
        for raw in raw_events:
            rank = integer(raw.pid)
            event = _read_event(raw)
            if rank is not None and event is not None:
                track = raw.cat if isinstance(raw.cat, str) else ""
                tracks.setdefault(_TrackKey(rank, track), []).append(event)
    return tracks


def _read_event(raw: Any) -> _ReadEvent | None:
    """Return the event of the file's entry; None where it has no time or no name."""
    start_ns = nanoseconds(raw.ts)
    duration_ns = nanoseconds(raw.dur)
    if raw.ph != "X" or not isinstance(raw.name, str):
        return None
    if start_ns is None or duration_ns is None:
        return None
    facts = raw.args.own if raw.args is not None else None
    return _ReadEvent(start_ns, start_ns + duration_ns, raw.name, facts if isinstance(facts, dict) else {})


def _explained_lines(tracks: Mapping[str, Sequence[_ReadEvent]]) -> list[ExplainedLine]:
    """Return the steps of a rank; an event belongs to the last step that began before it.

    Args:
        tracks: name of a track -> its events, for each of `_TRACKS`.

    Raises:
        ValueError: two steps begin at once, or one cannot be.
    """
    begins_ns = sorted(event.start_ns for event in tracks["step"])
    if len(set(begins_ns)) < len(begins_ns):
        raise ValueError("two steps of a rank begin at once")
    events_by_step = [_empty_tracks() for _ in begins_ns]
    for track, events in tracks.items():
        for event in events:
            step = bisect.bisect_right(begins_ns, event.start_ns) - 1
            if step >= 0:
                start = (event.start_ns - begins_ns[step]) / 1e9
                end = (event.end_ns - begins_ns[step]) / 1e9
                events_by_step[step][track].append(_ReadStepEvent(event.name, start, end, event.facts))
    return [_explained_line(tracks_of_step) for tracks_of_step in events_by_step]


def _empty_tracks() -> dict[str, list[_ReadStepEvent]]:
    return {track: [] for track in _TRACKS}


def _explained_line(tracks: Mapping[str, Sequence[_ReadStepEvent]]) -> ExplainedLine:
    """Return a step of a rank from the events of its tracks; the first event of track "step" is the step."""
    step = tracks["step"][0]
    collectives = tracks["collective"]
    return ExplainedLine(
        step=int(step.name.removeprefix("step ")) - 1,
        block=step.facts["block"],
        device=step.facts["device"],
        seconds=step.end,
        phases=tuple((event.facts.get("phase", event.name), event.start, event.end) for event in tracks["phase"]),
        idle=_intervals_of(tracks["idle"]),
        collectives=tuple(
            (str(event.facts["communicator"]), event.name, event.start, event.end) for event in collectives
        ),
        norms=tuple(index for index, event in enumerate(collectives) if event.facts.get("norm")),
        copies=_intervals_of(tracks["copy"]),
        host_data=_intervals_of(tracks["loader"]),
        unknown=step.facts["unknown"],
    )


def _intervals_of(events: Iterable[_ReadStepEvent]) -> tuple[Interval, ...]:
    return tuple((event.start, event.end) for event in events)
