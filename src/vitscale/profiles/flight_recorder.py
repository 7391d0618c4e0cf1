"""Reads torch's flight recorder: which collectives of which groups a rank has entered, and which have not ended.

torch's JSON has an entry for each collective, with its number in its group, and by group the number of the last one
that was entered (`FlightRecorderDetail.hpp`, torch 2.6 to 2.13). Torch's other form is a pickle, which is not read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from vitscale.profiles.kernels import operation
from vitscale.store.recorder_dumps import OpenCall, RecordedGroup

VERSION = "2."
"""Version of the dump: minor versions of 2 only add fields (FlightRecorder.hpp of torch 2.13 has 2.10)."""
DUMP_OF_NCCL = "_dump_nccl_trace_json"
"""torch's function that dumps NCCL's recorder as JSON, in `torch._C._distributed_c10d`."""
DUMP_OF_OTHERS = "_dump_fr_trace_json"
"""The one of the recorder into which all other backends write."""
_MOST_NAME_CHARACTERS = 200
_MOST_OPEN_CALLS = 8
"""Open calls of a group that are kept: a GPU's host may be hundreds ahead, and the first one decides."""


class UnreadableRecorder(Exception):
    """A dump is not as this version knows it; its message is the reason, as the end of a sentence."""


class GroupMembers(NamedTuple):
    """A process group that a rank belongs to, by the name that the recorder has too."""

    name: str
    description: str
    ranks: tuple[int, ...]


def recorded_groups(text: str | bytes, own_groups: Sequence[GroupMembers] = ()) -> tuple[RecordedGroup, ...]:
    """Return a rank's place in each of its groups, by the name of the group.

    Args:
        text: a dump as JSON, with all entries.
        own_groups: groups that the rank belongs to: it may have entered no collective of some, and the recorder of
            gloo does not have their ranks (torch 2.13).

    Raises:
        UnreadableRecorder: it is no such dump.
    """
    try:
        content = json.loads(text)
        version = str(content.get("version"))
        if not version.startswith(VERSION):
            raise UnreadableRecorder(f"the flight recorder writes version {version}, and vitscale reads {VERSION}x")
        return _groups(content, own_groups)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
        raise UnreadableRecorder(f"the flight recorder cannot be read: {type(error).__name__} {error}") from None


def _groups(content: Mapping[str, Any], own_groups: Sequence[GroupMembers]) -> tuple[RecordedGroup, ...]:
    """Return the groups of a dump, and those of `own_groups` that are not in it."""
    calls_by_group: dict[str, list[dict[str, Any]]] = {group.name: [] for group in own_groups}
    descriptions = {group.name: group.description for group in own_groups}
    for call in content.get("entries", []):
        if not call.get("is_p2p"):
            name, description = map(str, call["process_group"])
            calls_by_group.setdefault(name, []).append(call)
            descriptions.setdefault(name, description)
    members_by_name = _configured_members(content) | {group.name: group.ranks for group in own_groups}
    status_by_id = content.get("pg_status", {})
    groups = []
    for name, calls in sorted(calls_by_group.items()):
        group = RecordedGroup(
            name=name[:_MOST_NAME_CHARACTERS],
            description=descriptions[name][:_MOST_NAME_CHARACTERS],
            members=members_by_name.get(name),
            last_entered=_last_entered(calls, status_by_id),
            open_calls=_open_calls(calls),
        )
        groups.append(group)
    return tuple(groups)


def _configured_members(content: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return name of a group -> its ranks, as NCCL's recorder has them ("[0, 1]"); gloo's has no names there."""
    members = {}
    for name, group in content.get("pg_config", {}).items():
        ranks = json.loads(group["ranks"])
        if name and ranks:
            members[str(name)] = tuple(map(int, ranks))
    return members


def _last_entered(calls: Iterable[Mapping[str, Any]], status_by_id: Mapping[str, Any]) -> int:
    """Return the number of the last collective that was entered in a group; 0 without any.

    Args:
        calls: the group's entries.
        status_by_id: the recorder's own count, by the group's number in this process.
    """
    last = 0
    for call in calls:
        status = status_by_id.get(str(call["pg_id"]), {})
        last = max(last, int(call["collective_seq_id"]), int(status.get("last_enqueued_collective", 0)))
    return last


def _open_calls(calls: Iterable[Mapping[str, Any]]) -> tuple[OpenCall, ...]:
    """Return the first calls that have not ended; gloo's are retired at their end and stay "scheduled"."""
    open_by_number: dict[int, OpenCall] = {}
    for call in calls:
        has_ended = bool(call.get("retired")) or call.get("state") == "completed"
        number = int(call["collective_seq_id"])
        if has_ended or number in open_by_number:  # the members of a coalesced call share its number
            continue
        name = str(call["profiling_name"]).partition(":")[2]
        open_by_number[number] = OpenCall(
            number=number,
            operation=operation(name)[:80],
            elements=sum(math.prod(size) for size in call["input_sizes"]),
            has_begun=call.get("state") == "started",
        )
    return tuple(open_by_number[number] for number in sorted(open_by_number)[:_MOST_OPEN_CALLS])
